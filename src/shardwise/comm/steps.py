"""One step of a route on one rank: pack, one collective, unpack.

A communicating step is a ``Collective`` in three parts, so that it can run at once, be started and waited for
later (``async_op``), or share its collective with the like steps of other tensors (``redistribute_many``).
Local re-cuts are plain functions.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.one_shot import NEUTRAL, OneShot, Packed, exchange, neutral
from shardwise.comm.transport import Handle, Transport
from shardwise.layout.boxes import contiguous_stride
from shardwise.route.moves import Move, group_sizes

Step = Callable[[Tensor], Tensor]


class Collective:
    """A step that communicates: ``unpack(exchange(pack(x)), x)``.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        ranks: The group.
        op: The reduction, for the kinds that have one.
        tag: Names of the mesh axes.
        pack: What this rank puts in: any shape for an all_reduce and an all_gather, [n, ...] for a
            reduce_scatter.
        unpack: From what comes out, the step's result.
    """

    __slots__ = ("kind", "op", "pack", "ranks", "tag", "transport", "unpack")

    def __init__(
        self,
        kind: str,
        transport: Transport,
        ranks: tuple[int, ...],
        op: str,
        tag: str,
        parts: tuple[Step | None, Step | None],
    ) -> None:
        self.kind, self.transport, self.ranks, self.op, self.tag = (
            kind,
            transport,
            ranks,
            op,
            tag,
        )
        self.pack, self.unpack = parts

    def __call__(self, x: Tensor) -> Tensor:
        """Run, and wait."""
        x = x.contiguous() if self.pack is None else self.pack(x)
        if self.kind == "all_gather":
            out = self.transport.all_gather(x, self.ranks, tag=self.tag)
        elif self.kind == "reduce_scatter":
            out = self.transport.reduce_scatter(x, self.ranks, self.op, tag=self.tag)
        else:
            out = self.transport.all_reduce(x, self.ranks, self.op, tag=self.tag)
        return out if self.unpack is None else self.unpack(out)

    def begin(self, x: Tensor) -> Handle:
        """Start; ``unpack`` what the handle gives."""
        x = x.contiguous() if self.pack is None else self.pack(x)
        return self.send(x)

    def send(self, packed: Tensor) -> Handle:
        """Start the collective of what is packed."""
        if self.kind == "all_gather":
            return self.transport.all_gather_async(packed, self.ranks, tag=self.tag)
        if self.kind == "reduce_scatter":
            return self.transport.reduce_scatter_async(
                packed, self.ranks, self.op, tag=self.tag
            )
        return self.transport.all_reduce_async(packed, self.ranks, self.op, tag=self.tag)

    def finish(self, got: Tensor) -> Tensor:
        """The step's result."""
        return got if self.unpack is None else self.unpack(got)


def compile_move(move: Move, coord: tuple[int, ...], transport: Transport) -> Step:
    """A move as the rank at a coordinate carries it out."""
    mesh = move.src.mesh
    ranks = mesh.group_ranks(move.axes, coord)
    tag = "*".join(mesh.axis_name(a) for a in move.axes)
    match move.kind:
        case "all_gather" | "reduce_scatter":
            make = _all_gather if move.kind == "all_gather" else _reduce_scatter
            parts = make(move, coord, ranks.index(transport.rank))
            return Collective(move.kind, transport, ranks, move.op or "sum", tag, parts)
        case "all_reduce":
            return Collective(
                "all_reduce", transport, ranks, move.op or "sum", tag, (None, None)
            )
        case "slice":
            (mine, _), (whole, _) = move.dst.box(coord), move.src.box(coord)
            dim, size = move.dim, move.dst.box(coord)[1][move.dim]
            start = mine[dim] - whole[dim] if size else 0
            return lambda x: x.narrow(dim, start, size).clone(
                memory_format=torch.contiguous_format
            )
        case "pad":
            return _pad(move, coord)
        case "keep":
            op = move.op or "sum"
            if op not in NEUTRAL or all(coord[a] == 0 for a in move.axes):
                return lambda x: x.clone()
            return lambda x: neutral(x.shape, op, x)
        case _:
            swapped = _swapped_dims(move)
            if swapped is not None:
                return Swap(swapped, move.src.box(coord)[1], transport, ranks, tag)
            return OneShot(move.exchange, ranks, transport, tag)


def _all_gather(move: Move, coord: Any, place: int) -> tuple[Step | None, Step]:
    dim = move.dim
    if move.src.is_even_dim(dim) or len(set(sizes := group_sizes(move, move.src, coord))) == 1:
        if dim == 0:
            return None, lambda got: got.flatten(0, 1)
        # flatten may be a view
        return None, lambda got: got.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    largest = max(sizes)

    def pack(x: Tensor) -> Tensor:
        if x.shape[dim] != largest:
            shape = (*x.shape[:dim], largest, *x.shape[dim + 1 :])
            padded = torch.zeros(shape, dtype=x.dtype, device=x.device)
            padded.narrow(dim, 0, x.shape[dim]).copy_(x)
            x = padded
        return x.contiguous()

    def unpack(got: Tensor) -> Tensor:
        parts = [got[i].narrow(dim, 0, size) for i, size in enumerate(sizes) if size]
        return torch.cat(parts or [got[0]], dim)

    return pack, unpack


def _reduce_scatter(move: Move, coord: Any, place: int) -> tuple[Step, Step | None]:
    dim = move.dim
    n = math.prod(move.src.mesh.shape[a] for a in move.axes)
    if move.dst.is_even_dim(dim) or len(set(sizes := group_sizes(move, move.dst, coord))) == 1:
        mine = move.dst.box(coord)[1][dim]
        if dim == 0:
            return lambda x: x.contiguous().unflatten(0, (n, mine)), None
        return lambda x: x.unflatten(dim, (n, mine)).movedim(dim, 0).contiguous(), None
    largest, own = max(sizes), sizes[place]

    def pack(x: Tensor) -> Tensor:
        shape = (n, *x.shape[:dim], largest, *x.shape[dim + 1 :])
        parts = torch.zeros(shape, dtype=x.dtype, device=x.device)
        start = 0
        for i, size in enumerate(sizes):
            if size:
                parts[i].narrow(dim, 0, size).copy_(x.narrow(dim, start, size))
            start += size
        return parts

    return pack, lambda got: got.narrow(dim, 0, own).contiguous()


def _pad(move: Move, coord: Any) -> Step:
    (mine, sizes), (whole, shape) = move.src.box(coord), move.dst.box(coord)
    dim = move.dim
    start = mine[dim] - whole[dim] if sizes[dim] else 0

    def pad(x: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=x.dtype, device=x.device)
        out.narrow(dim, start, sizes[dim]).copy_(x)
        return out

    return pad


def _swapped_dims(move: Move) -> tuple[int, int] | None:
    """The dims (i, j) of a move that only takes the minor axes of i to the end of j, all pieces even."""
    src, dst = move.src, move.dst
    changed = [d for d in range(src.ndim) if src.dims[d] != dst.dims[d]]
    if len(changed) != 2 or src.partial != dst.partial:
        return None
    i, j = changed if len(src.dims[changed[0]]) > len(dst.dims[changed[0]]) else changed[::-1]
    taken = src.dims[i][len(dst.dims[i]) :]
    moved = src.dims[i] == (*dst.dims[i], *taken) and dst.dims[j] == (*src.dims[j], *taken)
    even = all(layout.is_even_dim(d) for layout in (src, dst) for d in (i, j))
    return (i, j) if moved and taken == move.axes and even else None


class Swap:
    """S(i) -> S(j) with even pieces: two reshuffles around one exchange.

    Args:
        dims: i and j.
        shape: Of the operand's pieces.
        transport: This rank's transport.
        ranks: The group.
        tag: Names of the mesh axes.
    """

    __slots__ = ("_arrived", "_parts", "_shape", "_splits", "ranks", "tag", "transport")

    def __init__(
        self,
        dims: tuple[int, int],
        shape: tuple[int, ...],
        transport: Transport,
        ranks: tuple[int, ...],
        tag: str,
    ) -> None:
        self.transport, self.ranks, self.tag = transport, ranks, tag
        (i, j), n = dims, len(ranks)
        self._splits = [math.prod(shape) // n] * n
        piece = (*shape[:j], shape[j] // n, *shape[j + 1 :])
        stride = contiguous_stride(shape)
        # [n, *piece]: the pieces for each rank, where they lie in the operand
        self._parts = (n, *piece), (piece[j] * stride[j], *stride)
        # what came, [n, *piece], with its first dim moved to before dim i
        sizes, stride = (n, *piece), contiguous_stride((n, *piece))
        order = (*range(1, i + 1), 0, *range(i + 1, len(sizes)))
        self._arrived = tuple(sizes[d] for d in order), tuple(stride[d] for d in order)
        self._shape = (*piece[:i], n * piece[i], *piece[i + 1 :])

    def pack(self, x: Tensor) -> Packed:
        """What this rank sends, and what makes the result of what comes."""
        x = x.contiguous()
        parts = x.as_strided(*self._parts, x.storage_offset())
        return parts.reshape(-1), self._splits, self._splits, self._finish

    def _finish(self, flat: Tensor) -> Tensor:
        return flat.as_strided(*self._arrived, flat.storage_offset()).reshape(self._shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange, and wait for it."""
        return exchange(self, x)


class InRounds:
    """A step of several collectives, one after the other."""

    __slots__ = ()

    def begin(self, x: Tensor) -> tuple[Handle | None, Step]:
        """Start the first; what is returned takes what arrives, and goes through the others."""
        raise NotImplementedError


def begin(step: Step, x: Tensor) -> tuple[Handle | None, Step]:
    """Start a step: its handle (None: it is local, and done) and what makes the result of what arrives."""
    if isinstance(step, Collective):
        return step.begin(x), step.finish
    if isinstance(step, (OneShot, Swap)):
        flat, in_splits, out_splits, finish = step.pack(x)
        handle = step.transport.all_to_all_async(
            flat, step.ranks, in_splits, out_splits, tag=step.tag
        )
        return handle, finish
    if isinstance(step, InRounds):
        return step.begin(x)
    y = step(x)
    return None, lambda _: y
