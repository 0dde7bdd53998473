"""Carry out a one-shot move: pack, one uneven all_to_all, unpack; addends are combined on arrival.

What a rank keeps is copied straight across. Where what is sent lies in memory as it travels, or what arrives
does as it is wanted, nothing is packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.reduce import ALLOWED, Accumulator, refuse
from shardwise.comm.transport import Transport
from shardwise.layout.boxes import Box
from shardwise.route.exchange import Exchange

Finish = Callable[[Tensor], Tensor]
Slices = tuple[slice, ...]

FEW = 256  # pieces that are kept listed; more are worked out at each use
NEUTRAL = {"sum": 0, "product": 1}  # what adds nothing; any copy does for max and min


class OneShot:
    """An exchange compiled for one rank.

    Attributes:
        exchange: The plan.
        ranks: The group, in order.
        in_splits: Elements for each member.
        out_splits: Elements from each member.
        direct: The pieces lie in memory as they travel, on both sides: nothing is packed.
        shape: Shape of the result.
    """

    __slots__ = (
        "_held",
        "_listed",
        "_need",
        "direct",
        "exchange",
        "in_splits",
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
        for p in exchange.gives(me):
            self.in_splits[place[p.rank]] = math.prod(p.box[1])
        for p in exchange.takes(me):
            self.out_splits[place[p.rank]] = math.prod(p.box[1])
        few = sum(map(bool, self.in_splits)) + sum(map(bool, self.out_splits)) <= FEW
        self._listed = self._list() if few else None
        self.direct = False
        if self._listed is not None and exchange.op is None:
            gives, takes = self._listed
            self.direct = _tiles([box for _, box in gives], self._held) and _tiles(
                [box for _, box, _ in takes], self._need
            )
        if not self.direct:  # what stays here need not travel through the buffers
            self.in_splits[own] = self.out_splits[own] = 0

    def _list(self) -> tuple[list[tuple[int, Box]], list[tuple[int, Box, int]]]:
        """What goes to whom and comes from whom, in group order, what stays here included."""
        me = self.transport.rank
        place = {rank: i for i, rank in enumerate(self.ranks)}
        gives = sorted((place[p.rank], p.box) for p in self.exchange.gives(me))
        takes = sorted((place[p.rank], p.box, p.addend) for p in self.exchange.takes(me))
        return gives, takes

    def pack(self, x: Tensor) -> Packed:
        """What this rank sends, and what makes the result of what comes."""
        op = self.exchange.op
        if op is not None and (op, x.dtype) not in ALLOWED:
            raise refuse(op, x.dtype)
        if self.direct:
            shape = self.shape
            return x.reshape(-1), self.in_splits, self.out_splits, lambda got: got.view(shape)
        own = self.ranks.index(self.transport.rank)
        gives, takes = self._list() if self._listed is None else self._listed
        buffer = x.new_empty(sum(self.in_splits))
        start = 0
        for i, box in gives:
            if i == own:
                continue
            count = math.prod(box[1])
            buffer[start : start + count].view(box[1]).copy_(x[within(self._held, box)])
            start += count
        return (
            buffer,
            self.in_splits,
            self.out_splits,
            lambda flat: self._unpack(flat, x, takes, own),
        )

    def _unpack(
        self, flat: Tensor, x: Tensor, takes: list[tuple[int, Box, int]], own: int
    ) -> Tensor:
        parts: list[tuple[int, Box, Tensor]] = []
        start = 0
        for i, box, k in takes:
            if i == own:
                parts.append((k, box, x[within(self._held, box)]))
                continue
            count = math.prod(box[1])
            parts.append((k, box, flat[start : start + count].view(box[1])))
            start += count
        out = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        op = self.exchange.op
        if not parts:
            return out.zero_()
        if op is None:
            for _, box, part in parts:
                out[within(self._need, box)] = part
            return out
        count = math.prod(self.exchange.src.mesh.shape[a] for a in self.exchange.settled)
        total = Accumulator(out, op, count)
        for k, box, part in sorted(parts, key=lambda p: p[0]):
            total.take(within(self._need, box), part, k == 0)
        return total.result()

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


def within(base: Box, part: Box) -> Slices:
    """Where a box lies inside a larger one."""
    return tuple(slice(o - b, o - b + s) for o, b, s in zip(part[0], base[0], part[1]))


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
