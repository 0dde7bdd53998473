"""Moves within a slab of memory: the same exchanges, cut into rounds.

Next to the operand and the result a move holds at most one slab of buffers. Each piece that one rank sends to
another is cut into runs of equal limit; round i carries the i-th run of every piece, and both sides know
which that is. Addends of a pending reduction are combined as they arrive, all of one place in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
import math

import torch
from torch import Tensor

from shardwise.comm.execute import Across, Mover, mover, profile_of
from shardwise.comm.one_shot import OneShot, within
from shardwise.comm.reduce import ALLOWED, reduce_in_order, refuse
from shardwise.comm.steps import Step, compile_move
from shardwise.comm.transport import Transport
from shardwise.errors import LayoutError
from shardwise.layout.boxes import Box, runs
from shardwise.layout.layout import Layout
from shardwise.route.cost import objective
from shardwise.route.exchange import Exchange
from shardwise.route.moves import Move, piece_numel
from shardwise.route.search import route

SHARES = {
    True: 8,
    False: 4,
}  # parts of a slab that one round fills: a backend may hold on to the round before


class Rounds:
    """An exchange in rounds, compiled for one rank.

    Args:
        exchange: The plan.
        ranks: The group, in order.
        transport: This rank's transport.
        tag: Names of the mesh axes.
        slab: Bytes of all buffers together.
    """

    __slots__ = (
        "_count",
        "_held",
        "_need",
        "exchange",
        "ranks",
        "shape",
        "slab",
        "tag",
        "transport",
    )

    def __init__(
        self,
        exchange: Exchange,
        ranks: tuple[int, ...],
        transport: Transport,
        tag: str,
        slab: int,
    ) -> None:
        self.exchange, self.ranks, self.transport = exchange, ranks, transport
        self.tag, self.slab = tag, slab
        src, dst = exchange.src, exchange.dst
        at = src.mesh.coordinate_of(transport.rank)
        to = dst.mesh.coordinate_of(transport.rank)
        none: Box = ((0,) * src.ndim, (0,) * src.ndim)
        self._held = none if at is None else src.box(at)
        self._need = none if to is None else dst.box(to)
        self.shape = self._need[1]
        self._count: dict[int, int] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange, round by round."""
        op, me = self.exchange.op, self.transport.rank
        if op is not None and (op, x.dtype) not in ALLOWED:
            raise refuse(op, x.dtype)
        share = self.slab // SHARES[op is not None] // x.element_size()
        limit = max(1, share // max(1, len(self.ranks) - 1))
        place = {rank: i for i, rank in enumerate(self.ranks)}
        gives = sorted((place[p.rank], p.box) for p in self.exchange.gives(me) if p.rank != me)
        takes = sorted((place[p.rank], p.box, p.addend) for p in self.exchange.takes(me))
        sent = [(i, _runs(box, limit)) for i, box in gives]
        taken = [(i, _runs(box, limit), k) for i, box, k in takes]
        out = x.new_empty(self.shape)
        if not takes:
            out.zero_()
        for i in range(self._rounds(limit, [r for _, r in sent] + [r for _, r, _ in taken])):
            self._round(
                x,
                out,
                [(to, r[i]) for to, r in sent if i < len(r)],
                [(of, r[i], k) for of, r, k in taken if i < len(r)],
            )
        return out

    def _rounds(self, limit: int, mine: Sequence[Sequence[Box]]) -> int:
        """How many rounds it takes: as many as the rank with the longest piece needs. They ask once."""
        found = self._count.get(limit)
        if found is None:
            most = torch.tensor(max(map(len, mine), default=0))
            found = int(self.transport.all_reduce(most, self.ranks, "max", tag=self.tag))
            self._count[limit] = found
        return found

    def _round(
        self,
        x: Tensor,
        out: Tensor,
        gives: Sequence[tuple[int, Box]],
        takes: Sequence[tuple[int, Box, int]],
    ) -> None:
        own = self.ranks.index(self.transport.rank)
        in_splits, out_splits = [0] * len(self.ranks), [0] * len(self.ranks)
        for i, box in gives:
            in_splits[i] = math.prod(box[1])
        for i, box, _ in takes:
            out_splits[i] = math.prod(box[1]) if i != own else 0
        buffer = x.new_empty(sum(in_splits))
        for (_, box), part in zip(gives, buffer.split([n for n in in_splits if n])):
            part.view(box[1]).copy_(x[within(self._held, box)])
        got = self.transport.all_to_all(buffer, self.ranks, in_splits, out_splits, tag=self.tag)
        del buffer
        arrived = iter(got.split([n for n in out_splits if n]))
        parts: dict[Box, list[tuple[int, Tensor]]] = {}
        for i, box, k in takes:
            part = x[within(self._held, box)] if i == own else next(arrived).view(box[1])
            parts.setdefault(box, []).append((k, part))
        op = self.exchange.op
        for box, addends in parts.items():
            if op is None:
                out[within(self._need, box)] = addends[0][1]
            else:
                ordered = [part for _, part in sorted(addends, key=lambda a: a[0])]
                out[within(self._need, box)] = reduce_in_order(ordered, op)


def _runs(box: Box, limit: int) -> list[Box]:
    """A piece in boxes of at most so many elements, by global offsets."""
    offsets, sizes = box
    return [
        (tuple(o + start for o, start in zip(offsets, starts)), held)
        for starts, held in runs(sizes, limit)
    ]


class _Reduced:
    """An all_reduce in rounds, over like pieces."""

    __slots__ = ("op", "ranks", "slab", "tag", "transport")

    def __init__(
        self, ranks: tuple[int, ...], op: str, transport: Transport, tag: str, slab: int
    ) -> None:
        self.ranks, self.op, self.transport, self.tag, self.slab = (
            ranks,
            op,
            transport,
            tag,
            slab,
        )

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        # some backends gather all addends to reduce them in order
        limit = max(1, self.slab // SHARES[True] // x.element_size() // len(self.ranks))
        for have, want in zip(x.reshape(-1).split(limit), out.view(-1).split(limit)):
            want.copy_(self.transport.all_reduce(have, self.ranks, self.op, tag=self.tag))
        return out


class Bounded(Mover):
    """A route on one mesh that holds, next to the operand, at most the larger of both pieces and a slab.

    Its backward is bounded, too; that of a pending max or min is not.
    """

    __slots__ = ("slab",)

    def __init__(self, src: Layout, dst: Layout, transport: Transport, slab: int) -> None:
        self.slab = slab
        super().__init__(src, dst, transport, objective())

    def _plan(self, src: Layout, dst: Layout) -> tuple[Move, ...]:
        """The cheapest route of which no layout between is too large; else straight there."""
        profile = profile_of(src.mesh, self.transport)
        item = getattr(src.dtype, "itemsize", 4)
        most = max(piece_numel(src), piece_numel(dst)) * item + self.slab
        for what in (self.what, "bytes"):
            moves = route(src, dst, profile, what)
            sizes = [0, *(piece_numel(m.dst) * item for m in moves)]
            if len(moves) == 1 or all(a + b + self.slab <= most for a, b in pairwise(sizes)):
                return moves
        if any(op is not None and src.partial[a] != op for a, op in enumerate(dst.partial)):
            return moves  # a sum is made of pieces: there is no straight way
        settled = {
            a for a, op in enumerate(src.partial) if op is not None and dst.partial[a] is None
        }
        axes = {a for layout in (src, dst) for on_dim in layout.dims for a in on_dim} | settled
        op = next((src.partial[a] for a in settled), None)
        return (Move("one_shot", src, dst, tuple(sorted(axes)), -1, op),)

    def _step(self, move: Move, coord: tuple[int, ...]) -> Step:
        if not move.communicates:
            return compile_move(move, coord, self.transport)
        ranks = move.src.mesh.group_ranks(move.axes, coord)
        tag = "*".join(move.src.mesh.axis_name(a) for a in move.axes)
        if move.kind == "all_reduce":
            return _Reduced(ranks, move.op or "sum", self.transport, tag, self.slab)
        return Rounds(move.exchange, ranks, self.transport, tag, self.slab)

    @property
    def back(self) -> Mover:
        """The transpose, within the same slab."""
        if self._back is None:
            self._back = Bounded(self.dst.dual(), self.src.dual(), self.transport, self.slab)
        return self._back

    def now(self) -> Mover:
        """It is made for one call."""
        return self


class BoundedAcross(Across):
    """A move between two meshes in rounds."""

    __slots__ = ("slab",)

    def __init__(self, src: Layout, dst: Layout, transport: Transport, slab: int) -> None:
        self.slab = slab
        super().__init__(src, dst, transport)
        self.steps = tuple(
            Rounds(step.exchange, step.ranks, transport, step.tag, slab)
            if isinstance(step, OneShot)
            else step
            for step in self.steps
        )

    @property
    def back(self) -> Mover:
        """The transpose, within the same slab."""
        if self._back is None:
            self._back = BoundedAcross(
                self.dst.dual(), self.src.dual(), self.transport, self.slab
            )
        return self._back


def bounded(src: Layout, dst: Layout, transport: Transport, slab: int) -> Mover:
    """A mover that holds at most a slab of buffers next to operand and result.

    Raises:
        LayoutError: The slab is no size.
    """
    if slab < 1:
        raise LayoutError(f"max_extra_bytes is a number of bytes of at least one, not {slab}.")
    if src is dst:
        return mover(src, dst, transport)
    table = transport.state.setdefault("bounded", {})
    key = (src, dst, slab, objective())
    if key not in table:
        if len(table) > 1024:
            table.clear()
        make = Bounded if src.mesh is dst.mesh else BoundedAcross
        table[key] = make(src, dst, transport, slab)
    return table[key]
