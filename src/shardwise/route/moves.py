"""Moves: one collective, or one local re-cut, that changes a layout.

================  ===================  =======================  ==============================
kind              forward              backward (its transpose)  received per rank, n ranks
================  ===================  =======================  ==============================
all_gather        S(d) -> R            P -> S(d)                 (n-1)/n of the result
reduce_scatter    P -> S(d)            S(d) -> R                 (n-1)/n of the operand
all_reduce        P -> R               P -> R                    2(n-1)/n of the operand
slice             R -> S(d)            S(d) -> P, by ``pad``     nothing
pad               S(d) -> P            R -> S(d), by ``slice``   nothing
keep              R -> P               R -> P                    nothing
one_shot          any S/R -> any S/R   one_shot or reductions    what is needed and not held
================  ===================  =======================  ==============================
"""

from __future__ import annotations

from dataclasses import dataclass
import itertools
import math

from shardwise.layout.layout import Layout

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "slice", "pad", "keep", "one_shot")


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a route.

    Attributes:
        kind: One of ``KINDS``.
        src: Layout before.
        dst: Layout after.
        axes: Mesh axes it acts on, major to minor.
        dim: The tensor dim that is gathered, scattered, cut or padded; -1 where there is none.
        op: The pending reduction that it settles or makes, or None.
    """

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    dim: int = -1
    op: str | None = None

    @property
    def communicates(self) -> bool:
        """Whether anything is sent."""
        return self.kind not in ("slice", "pad", "keep")


def fold(move: Move) -> tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]:
    """What a move does to (axes per dim, pending reductions): the type rule of moves.

    A route is well typed if folding it over its moves gives the target; the laws assert it.
    """
    dims, partial = [list(d) for d in move.src.dims], list(move.src.partial)
    match move.kind:
        case "all_gather":
            assert tuple(dims[move.dim][-len(move.axes) :]) == move.axes, (
                "only the minor axes can be gathered"
            )
            del dims[move.dim][-len(move.axes) :]
        case "reduce_scatter":
            for a in move.axes:
                assert partial[a] == move.op, "only what is pending can be reduced"
                partial[a] = None
            dims[move.dim] += move.axes
        case "all_reduce":
            for a in move.axes:
                assert partial[a] == move.op, "only what is pending can be reduced"
                partial[a] = None
        case "slice":
            dims[move.dim] += move.axes
        case "pad":
            assert tuple(dims[move.dim][-len(move.axes) :]) == move.axes, (
                "only the minor axes can be padded"
            )
            del dims[move.dim][-len(move.axes) :]
            for a in move.axes:
                partial[a] = "sum"
        case "keep":
            for a in move.axes:
                partial[a] = move.op
        case _:
            assert move.src.partial == move.dst.partial, "a one-shot move settles no reduction"
            dims = [list(d) for d in move.dst.dims]
    return tuple(map(tuple, dims)), tuple(partial)


def group_size(move: Move) -> int:
    """Number of ranks that take part."""
    return math.prod(move.src.mesh.shape[a] for a in move.axes)


def piece_numel(layout: Layout) -> int:
    """Elements of the largest piece, which is that of the first rank."""
    return math.prod(layout.box((0,) * layout.mesh.ndim)[1])


def received_numel(move: Move) -> float:
    """Elements that a rank receives (the mean over ranks for a one-shot move)."""
    n = group_size(move)
    match move.kind:
        case "all_gather":
            return (n - 1) / n * piece_numel(move.src) * n
        case "reduce_scatter":
            return (n - 1) / n * piece_numel(move.dst) * n
        case "all_reduce":
            return 2 * (n - 1) / n * piece_numel(move.src)
        case "one_shot":
            return _needed_not_held(move.src, move.dst)
        case _:
            return 0.0


def intersect(
    a: tuple[tuple[int, ...], tuple[int, ...]], b: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the overlap of two boxes; some size is 0 when they do not meet."""
    offsets = tuple(max(x, y) for x, y in zip(a[0], b[0]))
    ends = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1]))
    return offsets, tuple(max(0, e - o) for o, e in zip(offsets, ends))


def _needed_not_held(src: Layout, dst: Layout) -> float:
    total, count = 0, 0
    for coord in itertools.islice(src.mesh.coordinates(), 64):
        need = dst.box(coord)
        total += math.prod(need[1]) - math.prod(intersect(src.box(coord), need)[1])
        count += 1
    return total / max(count, 1)
