"""Carry out a one-shot move: pack, one uneven all_to_all, unpack; addends are combined on arrival.

What a rank keeps is copied straight across. Where what is sent lies in memory as it travels, or what arrives
does as it is wanted, nothing is packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.reduce import ALLOWED, Accumulator, refuse
from shardwise.comm.transport import Transport
from shardwise.layout.boxes import Box, contiguous_stride
from shardwise.route.exchange import Exchange

Finish = Callable[[Tensor], Tensor]
Slices = tuple[slice, ...]
Ints = tuple[int, ...]

FEW = 256  # pieces that are kept listed; more are worked out at each use
NEUTRAL = {"sum": 0, "product": 1}  # what adds nothing; any copy does for max and min


# sizes, then stride and offset in the tensor that is read, and in the one that is written
_Copy = tuple[Ints, Ints, int, Ints, int]
_Part = tuple[int, Box, int]  # place in the group, what, which addend
# addend, whether it stays here, from what came (or from the operand) to the result, and where there
_Receive = tuple[int, bool, _Copy, Slices]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Copies before and after an exchange, worked out once.

    Attributes:
        sends: From the operand into the buffer that is sent.
        receives: Into the result; in the order of the addends where there are several.
    """

    sends: list[_Copy]
    receives: list[_Receive]


class OneShot:
    """An exchange compiled for one rank.

    Attributes:
        exchange: The plan.
        ranks: The group, in order.
        in_splits: Elements for each member.
        out_splits: Elements from each member.
        op: The pending reduction that is settled, or None.
        direct: The pieces lie in memory as they travel, on both sides: nothing is packed.
        shape: Shape of the result.
    """

    __slots__ = (
        "_addends",
        "_held",
        "_need",
        "_plan",
        "_sent",
        "direct",
        "exchange",
        "in_splits",
        "op",
        "out_splits",
        "ranks",
        "shape",
        "tag",
        "transport",
    )

    def __init__(
        self, exchange: Exchange, ranks: tuple[int, ...], transport: Transport, tag: str
    ) -> None:
        self.exchange, self.ranks, self.transport, self.tag = exchange, ranks, transport, tag
        me = transport.rank
        place = {rank: i for i, rank in enumerate(ranks)}
        src, dst = exchange.src, exchange.dst
        at = src.mesh.coordinate_of(me)
        none: Box = ((0,) * src.ndim, (0,) * src.ndim)
        self._held = none if at is None else src.box(at)
        to = dst.mesh.coordinate_of(me)
        self.shape = none[1] if to is None else dst.box(to)[1]
        self._need = none if to is None else dst.box(to)
        own = place[me]
        self.in_splits, self.out_splits = [0] * len(ranks), [0] * len(ranks)
        self.op = exchange.op
        self._addends = math.prod(src.mesh.shape[a] for a in exchange.settled)
        self._plan, self.direct = None, False
        if 2 * len(ranks) <= FEW or self._count(place) <= FEW:
            gives, takes = self._list(place)
            _fill(self.in_splits, gives)
            _fill(self.out_splits, takes)
            self._plan = self._work_out(gives, takes, own)
            self.direct = (
                self.op is None
                and _tiles([box for _, box, _ in gives], self._held)
                and _tiles([box for _, box, _ in takes], self._need)
            )
        if not self.direct:  # what stays here need not travel through the buffers
            self.in_splits[own] = self.out_splits[own] = 0
        self._sent = sum(self.in_splits)

    def _count(self, place: dict[int, int]) -> int:
        """Find the sizes without a list of all pieces; how many there are."""
        me = self.transport.rank
        for p in self.exchange.gives(me):
            self.in_splits[place[p.rank]] = math.prod(p.box[1])
        for p in self.exchange.takes(me):
            self.out_splits[place[p.rank]] = math.prod(p.box[1])
        return sum(map(bool, self.in_splits)) + sum(map(bool, self.out_splits))

    def _list(self, place: dict[int, int]) -> tuple[list[_Part], list[_Part]]:
        """What goes to whom and comes from whom, in group order, what stays here included."""
        me, exchange = self.transport.rank, self.exchange
        gives = [(place[p.rank], p.box, p.addend) for p in exchange.gives(me)]
        takes = [(place[p.rank], p.box, p.addend) for p in exchange.takes(me)]
        return sorted(gives), sorted(takes)

    def _listed(self) -> _Plan:
        """The plan: kept, or worked out for one use."""
        if self._plan is not None:
            return self._plan
        place = {rank: i for i, rank in enumerate(self.ranks)}
        return self._work_out(*self._list(place), place[self.transport.rank])

    def _work_out(self, gives: list[_Part], takes: list[_Part], own: int) -> _Plan:
        """Where in memory everything comes from and goes to."""
        held, need = _Memory(self._held), _Memory(self._need)
        sends: list[_Copy] = []
        start = 0
        for i, box, _ in gives:
            if i != own:
                sends.append((box[1], *held.at(box), contiguous_stride(box[1]), start))
                start += math.prod(box[1])
        receives: list[_Receive] = []
        start = 0
        for i, box, k in takes:
            if i == own:
                part = held.at(box)
            else:
                part = contiguous_stride(box[1]), start
                start += math.prod(box[1])
            copy = (box[1], *part, *need.at(box))
            receives.append((k, i == own, copy, within(self._need, box)))
        if self.op is not None:
            receives.sort(key=lambda r: r[0])
        return _Plan(sends, receives)

    def pack(self, x: Tensor) -> Packed:
        """What this rank sends, and what makes the result of what comes."""
        op = self.op
        if op is not None and (op, x.dtype) not in ALLOWED:
            raise refuse(op, x.dtype)
        if self.direct:
            shape = self.shape
            return x.reshape(-1), self.in_splits, self.out_splits, lambda got: got.view(shape)
        x = x.contiguous()
        plan = self._listed()
        buffer = x.new_empty(self._sent)
        base = x.storage_offset()
        for sizes, stride, offset, to_stride, to in plan.sends:
            part = x.as_strided(sizes, stride, base + offset)
            buffer.as_strided(sizes, to_stride, to).copy_(part)
        receives = plan.receives
        return (
            buffer,
            self.in_splits,
            self.out_splits,
            lambda flat: self._unpack(flat, x, receives),
        )

    def _unpack(self, flat: Tensor, x: Tensor, receives: list[_Receive]) -> Tensor:
        out = x.new_empty(self.shape)
        if not receives:
            return out.zero_()
        here, there = x.storage_offset(), flat.storage_offset()
        total = None
        if self.op is not None:
            total = Accumulator(out, self.op, self._addends)
        for k, own, (sizes, stride, offset, to_stride, to), at in receives:
            part = (
                x.as_strided(sizes, stride, here + offset)
                if own
                else flat.as_strided(sizes, stride, there + offset)
            )
            if total is None:
                out.as_strided(sizes, to_stride, to).copy_(part)
            else:
                total.take(at, part, k == 0)
        return out if total is None else total.result()

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange, and wait for it."""
        return exchange(self, x)


Packed = tuple[Tensor, list[int], list[int], Finish]


def exchange(step: Any, x: Tensor) -> Tensor:
    """Pack, send, wait, unpack; the buffer is gone before the result is made."""
    buffer, in_splits, out_splits, finish = step.pack(x)
    got = step.transport.all_to_all(buffer, step.ranks, in_splits, out_splits, tag=step.tag)
    del buffer
    return finish(got)


def _fill(splits: list[int], parts: list[_Part]) -> None:
    for i, box, _ in parts:
        splits[i] = math.prod(box[1])


def within(base: Box, part: Box) -> Slices:
    """Where a box lies inside a larger one."""
    return tuple(slice(o - b, o - b + s) for o, b, s in zip(part[0], base[0], part[1]))


class _Memory:
    """The row-major memory of a box."""

    __slots__ = ("_offsets", "_stride")

    def __init__(self, box: Box) -> None:
        self._offsets, self._stride = box[0], contiguous_stride(box[1])

    def at(self, part: Box) -> tuple[Ints, int]:
        """Stride and offset of a box inside it."""
        stride = self._stride
        return stride, sum([(o - b) * n for o, b, n in zip(part[0], self._offsets, stride)])


def _tiles(parts: Sequence[Box], whole: Box) -> bool:
    """Whether the parts, one after the other, are the whole in row-major memory."""
    begun = 0
    for offsets, sizes in parts:
        stride, at, cut = 1, 0, False
        for d in range(len(sizes) - 1, -1, -1):
            if cut and sizes[d] != 1:
                return False  # its memory has gaps
            at += (offsets[d] - whole[0][d]) * stride
            cut = cut or sizes[d] != whole[1][d]
            stride *= whole[1][d]
        if at != begun:
            return False
        begun += math.prod(sizes)
    return begun == math.prod(whole[1])


def neutral(shape: Any, op: str, x: Tensor) -> Tensor:
    """A tensor that adds nothing."""
    return torch.full(shape, NEUTRAL[op], dtype=x.dtype, device=x.device)
