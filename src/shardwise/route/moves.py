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
one_shot          any -> any R/S       one_shot or reductions    what is needed and not held,
                                                                 once for each addend
================  ===================  =======================  ==============================

The first two pad uneven pieces to the largest; a one-shot move pads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
import itertools
import math

from shardwise.events import received_bytes
from shardwise.layout import boxes
from shardwise.layout.boxes import intersect
from shardwise.layout.cut import Cut, plain
from shardwise.layout.layout import Layout
from shardwise.route.exchange import Exchange

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "slice", "pad", "keep", "one_shot")
LOCAL = ("slice", "pad", "keep")


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
        return self.kind not in LOCAL

    @property
    def exchange(self) -> Exchange:
        """Who sends what to whom in a one-shot move."""
        used = {a for axes in self.src.dims for a in axes}
        spread = tuple(a for a in self.axes if a not in used and self.src.partial[a] is None)
        return Exchange(self.src, self.dst, spread)


def fold(move: Move) -> tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]:
    """What a move does to (axes per dim, pending reductions): the type rule of moves.

    A route is well typed if folding it over its moves gives the target; the laws assert it.
    """
    dims, partial = [list(d) for d in move.src.dims], list(move.src.partial)
    if move.src.is_sized or move.dst.is_sized:
        return _fold_sized(move)
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
            for a, op in enumerate(move.dst.partial):
                if op is None and partial[a] is not None:
                    assert partial[a] == move.op, "a one-shot move settles one reduction"
                    assert a in move.axes, "what is settled is exchanged"
                    partial[a] = None
            assert tuple(partial) == move.dst.partial, "a one-shot move makes no reduction"
            dims = [list(d) for d in move.dst.dims]
    return tuple(map(tuple, dims)), tuple(partial)


def _fold_sized(move: Move) -> tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]:
    """``fold`` where a dim is cut at chosen sizes: that cut is made and undone as a whole."""
    src, dst = move.src, move.dst
    dims, partial = fold(
        Move(move.kind, src.chunked(), dst.chunked(), move.axes, move.dim, move.op)
    )
    assert dims == dst.chunked().dims, "a move does to axes what it does to plain ones"
    changed = [d for d in range(src.ndim) if src.dims[d] != dst.dims[d]]
    if move.kind != "one_shot":
        assert changed in ([], [move.dim]), "a move changes the dim that it names"
        for layout in (src, dst):
            if changed and isinstance(layout.dims[move.dim], Cut):
                assert plain(layout.dims[move.dim]) == move.axes, (
                    "a cut is made or undone whole"
                )
    return dst.dims, partial


def group_size(move: Move) -> int:
    """Number of ranks that take part."""
    return math.prod(move.src.mesh.shape[a] for a in move.axes)


def piece_numel(layout: Layout) -> int:
    """Elements of the largest piece, which is that of the first rank but where sizes were chosen."""
    if not layout.is_sized:
        return math.prod(layout.box((0,) * layout.mesh.ndim)[1])
    ranks = layout.mesh.shape
    return math.prod(
        max(m for _, m in boxes.pieces(n, axes, ranks))
        for n, axes in zip(layout.shape, layout.dims)
    )


def received(move: Move, coord: tuple[int, ...]) -> int:
    """Bytes that the rank at a coordinate receives, to the byte what the log counts."""
    n = group_size(move)
    itemsize = getattr(move.src.dtype, "itemsize", 4)
    if n == 1 or not move.communicates:
        return 0
    if move.kind == "one_shot":
        return move.exchange.received_numel(move.src.mesh.rank_at(coord)) * itemsize
    first = tuple(0 if a in move.axes else i for a, i in enumerate(coord))  # holds the most
    if move.kind == "all_gather":
        put_in = _largest(move.src, move, first)
    elif move.kind == "reduce_scatter":
        put_in = _largest(move.dst, move, first) * n
    else:
        put_in = math.prod(move.src.box(coord)[1])
    return received_bytes(move.kind, put_in * itemsize, n)


def _largest(cut: Layout, move: Move, first: tuple[int, ...]) -> int:
    """Elements of the largest piece in the group of a gather or scatter, whose first rank is at ``first``."""
    sizes = list(cut.box(first)[1])
    if isinstance(cut.dims[move.dim], Cut):
        sizes[move.dim] = max(group_sizes(move, cut, first))
    return math.prod(sizes)


def group_sizes(move: Move, cut: Layout, coord: Sequence[int]) -> list[int]:
    """Sizes along the dim of a move of the pieces in its group, in group order, which is that of the pieces."""
    shape, axes = move.src.mesh.shape, cut.dims[move.dim]
    at, out = list(coord), []
    for where in itertools.product(*(range(shape[a]) for a in move.axes)):
        for a, i in zip(move.axes, where):
            at[a] = i
        out.append(boxes.piece(cut.shape[move.dim], axes, shape, at)[1])
    return out


def received_numel(move: Move, coords: Iterable[tuple[int, ...]] | None = None) -> float:
    """Elements that a rank receives: the mean over the ranks (or over those at ``coords``)."""
    each = [
        received(move, c) for c in (move.src.mesh.coordinates() if coords is None else coords)
    ]
    return sum(each) / max(1, len(each)) / getattr(move.src.dtype, "itemsize", 4)


def row_major(src: Layout, dst: Layout) -> tuple[Layout, Layout, tuple[int, ...] | None]:
    """The layouts with tensor dims in memory order, and that order (None if it is row-major already)."""
    order = tuple(sorted(range(src.ndim), key=lambda d: (-src.stride[d], d)))
    if order == tuple(range(src.ndim)) or 0 in src.stride or src.is_contiguous:
        return src, dst, None
    shape = tuple(src.shape[d] for d in order)

    def permuted(layout: Layout) -> Layout:
        dims = tuple(layout.dims[d] for d in order)
        stride = boxes.contiguous_stride(shape)
        return Layout(layout.mesh, dims, layout.partial, shape, stride, layout.dtype)

    return permuted(src), permuted(dst), order


__all__ = [
    "KINDS",
    "LOCAL",
    "Move",
    "fold",
    "group_size",
    "intersect",
    "piece_numel",
    "received",
    "received_numel",
    "row_major",
]
