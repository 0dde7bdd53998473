"""Moves within a slab of memory: the same exchanges, cut into rounds.

Next to the operand and the result a move holds at most one slab of buffers. Each piece that one rank sends to
another is cut into runs of equal limit; round i carries the i-th run of every piece, and both sides know
which that is. Addends of a pending reduction are combined as they arrive, all of one place in the same round.
Which moves, and how many rounds, is in ``route/bounded.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import math

import torch
from torch import Tensor

from shardwise.comm.execute import Across, Dropped, Mover, mover, profile_of
from shardwise.comm.many import move_many
from shardwise.comm.one_shot import NEUTRAL, OneShot, within
from shardwise.comm.reduce import ALLOWED, reduce_in_order, refuse
from shardwise.comm.steps import InRounds, Step, compile_move
from shardwise.comm.transport import Handle, Transport
from shardwise.errors import LayoutError
from shardwise.layout.boxes import Box, runs
from shardwise.layout.layout import Layout
from shardwise.route.bounded import (
    bounded_route,
    check_slab,
    limit_of,
    reduced_limit,
    rounds_of,
    together_bytes,
)
from shardwise.route.cost import objective
from shardwise.route.exchange import Exchange
from shardwise.route.moves import Move

FEW_RANKS = 64  # among which each works out how many rounds there are; more ask each other

_Gives = list[tuple[int, Box]]  # place in the group, what goes there
_Takes = list[
    tuple[int, Box, int]
]  # place in the group, what comes from there, which addend it is


class Rounds(InRounds):
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
        out = x.new_empty(self.shape)
        for gives, takes in self._rounds(x, out):
            self._round(x, out, gives, takes)
        return out

    def _round(self, x: Tensor, out: Tensor, gives: _Gives, takes: _Takes) -> None:
        buffer, ins, outs = self._pack(x, gives, takes)
        got = self.transport.all_to_all(buffer, self.ranks, ins, outs, tag=self.tag)
        del buffer
        self._unpack(x, out, takes, got, outs)

    def begin(self, x: Tensor) -> tuple[Handle | None, Step]:
        """Start the first round; what is returned takes what arrives, and goes through the others."""
        out = x.new_empty(self.shape)
        rounds = self._rounds(x, out)
        first = next(rounds, None)
        if first is None:
            return None, lambda _: out
        buffer, in_splits, out_splits = self._pack(x, *first)
        handle = self.transport.all_to_all_async(
            buffer, self.ranks, in_splits, out_splits, tag=self.tag
        )

        def finish(got: Tensor) -> Tensor:
            self._unpack(x, out, first[1], got, out_splits)
            del got
            for gives, takes in rounds:
                self._round(x, out, gives, takes)
            return out

        return handle, finish

    def _rounds(self, x: Tensor, out: Tensor) -> Iterator[tuple[_Gives, _Takes]]:
        """What goes and comes in each round; what only stays is copied before the first."""
        op, me = self.exchange.op, self.transport.rank
        if op is not None and (op, x.dtype) not in ALLOWED:
            raise refuse(op, x.dtype)
        limit = limit_of(self.slab, x.element_size(), len(self.ranks), op is not None)
        place = {rank: i for i, rank in enumerate(self.ranks)}
        gives = sorted((place[p.rank], p.box) for p in self.exchange.gives(me) if p.rank != me)
        takes = sorted((place[p.rank], p.box, p.addend) for p in self.exchange.takes(me))
        if not takes:
            out.zero_()
        if op is None:
            for i, box, _ in takes:
                if self.ranks[i] == me:
                    out[within(self._need, box)] = x[within(self._held, box)]
            takes = [t for t in takes if self.ranks[t[0]] != me]
        sent = [(i, _runs(box, limit)) for i, box in gives]
        taken = [(i, _runs(box, limit), k) for i, box, k in takes]
        count = self._num_rounds(limit, [r for _, r in sent] + [r for _, r, _ in taken])
        return (
            (
                [(to, r[i]) for to, r in sent if i < len(r)],
                [(of, r[i], k) for of, r, k in taken if i < len(r)],
            )
            for i in range(count)
        )

    def _num_rounds(self, limit: int, mine: Sequence[Sequence[Box]]) -> int:
        """As many as the longest piece in the group needs. Large groups ask, once."""
        found = self._count.get(limit)
        if found is None:
            if len(self.ranks) <= FEW_RANKS:
                found = rounds_of(self.exchange, self.ranks, limit)
            else:
                most = torch.tensor(max(map(len, mine), default=0))
                asked = self.transport.all_reduce(most, self.ranks, "max", tag=self.tag)
                found = max(int(asked), int(most))  # a dry transport answers nothing
            self._count[limit] = found
        return found

    def _pack(
        self, x: Tensor, gives: _Gives, takes: _Takes
    ) -> tuple[Tensor, list[int], list[int]]:
        own = self.ranks.index(self.transport.rank)
        in_splits, out_splits = [0] * len(self.ranks), [0] * len(self.ranks)
        for i, box in gives:
            in_splits[i] = math.prod(box[1])
        for i, box, _ in takes:
            out_splits[i] = math.prod(box[1]) if i != own else 0
        buffer = x.new_empty(sum(in_splits))
        for (_, box), part in zip(gives, buffer.split([n for n in in_splits if n])):
            part.view(box[1]).copy_(x[within(self._held, box)])
        return buffer, in_splits, out_splits

    def _unpack(
        self, x: Tensor, out: Tensor, takes: _Takes, got: Tensor, out_splits: list[int]
    ) -> None:
        own = self.ranks.index(self.transport.rank)
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


class _Reduced(InRounds):
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
        for have, want in self._rounds(x, out):
            want.copy_(self.transport.all_reduce(have, self.ranks, self.op, tag=self.tag))
        return out

    def begin(self, x: Tensor) -> tuple[Handle | None, Step]:
        """Start the first round; what is returned takes what arrives, and goes through the others."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rounds = self._rounds(x, out)
        first = next(rounds, None)
        if first is None:
            return None, lambda _: out
        handle = self.transport.all_reduce_async(first[0], self.ranks, self.op, tag=self.tag)

        def finish(got: Tensor) -> Tensor:
            first[1].copy_(got)
            del got
            for have, want in rounds:
                want.copy_(self.transport.all_reduce(have, self.ranks, self.op, tag=self.tag))
            return out

        return handle, finish

    def _rounds(self, x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        limit = reduced_limit(self.slab, x.element_size(), len(self.ranks))
        parts = zip(x.reshape(-1).split(limit), out.view(-1).split(limit))
        return ((have, want) for have, want in parts if have.numel())


class Bounded(Mover):
    """A route on one mesh that holds, next to the operand, at most the larger of both pieces and a slab.

    Its backward is bounded, too; that of a pending max or min holds what it saves besides.
    """

    __slots__ = ("slab",)

    def __init__(self, src: Layout, dst: Layout, transport: Transport, slab: int) -> None:
        self.slab = slab
        super().__init__(src, dst, transport, objective())

    def _plan(self, src: Layout, dst: Layout) -> tuple[Move, ...]:
        profile = profile_of(src.mesh, self.transport)
        return bounded_route(src, dst, profile, self.what)

    def _step(self, move: Move, coord: tuple[int, ...]) -> Step:
        if not move.communicates:
            if move.kind == "keep" and self.moves[0] is not move:
                return _keep(move, coord)
            return compile_move(move, coord, self.transport)
        ranks = move.src.mesh.group_ranks(move.axes, coord)
        tag = "*".join(move.src.mesh.axis_name(a) for a in move.axes)
        if move.kind == "all_reduce":
            return _Reduced(ranks, move.op or "sum", self.transport, tag, self.slab)
        return Rounds(move.exchange, ranks, self.transport, tag, self.slab)

    def between(self, src: Layout, dst: Layout) -> Mover:
        """Within the same slab."""
        return _made(src, dst, self.transport, self.slab)

    def now(self) -> Mover:
        """It is made for one call."""
        return self


def _keep(move: Move, coord: tuple[int, ...]) -> Step:
    """``keep`` of a tensor that is ours: in place."""
    op = move.op or "sum"
    if op not in NEUTRAL or all(coord[a] == 0 for a in move.axes):
        return lambda x: x
    return lambda x: x.fill_(NEUTRAL[op])


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

    def between(self, src: Layout, dst: Layout) -> Mover:
        """Within the same slab."""
        return _made(src, dst, self.transport, self.slab)


def bounded(how: Mover, slab: int) -> Mover:
    """The mover between the same layouts that holds at most a slab of buffers next to operand and result.

    Args:
        how: A mover.
        slab: Bytes.

    Raises:
        LayoutError: The slab is no size, or too small for a round of one element for each rank.
    """
    if isinstance(slab, bool) or not isinstance(slab, int) or slab < 1:
        raise LayoutError(
            f"max_extra_bytes is a number of bytes of at least one, not {slab!r}."
        )
    if how.communicates:
        check_slab((how.src, how.dst), slab)
    if isinstance(how, Dropped):
        return Dropped(bounded(how.how, slab))
    return _made(how.src, how.dst, how.transport, slab)


def _made(src: Layout, dst: Layout, transport: Transport, slab: int) -> Mover:
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


def move_bounded(movers: Sequence[Mover], xs: Sequence[Tensor], slab: int) -> list[Tensor]:
    """Move several tensors, each within the slab next to operands and results; differentiable.

    One after the other, in rounds; tensors that fit into the slab together, with all that packing them takes, share
    collectives.
    """
    within_slab = [bounded(m, slab) for m in movers]  # all are there before anything moves
    out = list(xs)
    for run, fits in _fitting(movers, xs, slab):
        if not fits:
            out[run[0]] = within_slab[run[0]](xs[run[0]])
            continue
        moved = move_many([movers[i] for i in run], [xs[i] for i in run])
        for i, y in zip(run, moved):
            out[i] = y
    return out


def _fitting(
    movers: Sequence[Mover], xs: Sequence[Tensor], slab: int
) -> Iterator[tuple[list[int], bool]]:
    """Runs of operands that fit into the slab together, there and back, and each one that does not."""
    run: list[int] = []
    free = slab
    for i, (how, x) in enumerate(zip(movers, xs)):
        size = _together_bytes(how.now(), x)
        if run and size > free:
            yield run, True
            run, free = [], slab
        if size > slab:
            yield [i], False
            continue
        run.append(i)
        free -= size
    if run:
        yield run, True


def _together_bytes(how: Mover, x: Tensor) -> float:
    size = together_bytes(how.moves, how.src, how.dst)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return size
    if how.settles_extremum:  # is not moved with others
        return math.inf
    back = how.back.now()
    return max(size, together_bytes(back.moves, back.src, back.dst))
