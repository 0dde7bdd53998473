"""Rows of a sharded dim, by number: each rank gets those it asks for, and only what it lacks is sent.

Who asks for what is known to all ranks beforehand, so one uneven all_to_all does it, and none is needed where
every rank holds what it wants. The transpose, which is the gradient, sends back and adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
import copy
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.groups import Group
from shardwise.compat import direct_apply

_CPU = torch.device("cpu")
Index = tuple[list[Tensor | None], Tensor | None]


class Rows:
    """A plan for one rank: which rows of its piece go to whom, and how its result is made of what arrives.

    Attributes:
        group: The ranks that share the dim.
        dim: The dim whose rows are exchanged.
        count: How many rows this rank's piece has.
        fill: What a row is filled with that comes from nowhere; None if there is no such row.
        given: For each rank how many rows it gets from this one.
        taken: For each rank how many rows this one gets from it.
        traffic: Whether any rank of the group lacks a row.
    """

    __slots__ = ("_index", "count", "dim", "fill", "given", "group", "taken", "traffic")

    def __init__(
        self,
        group: Group,
        dim: int,
        have: Sequence[Tensor],
        wants: Sequence[Tensor],
        fill: float = 0.0,
    ) -> None:
        """Work the plan out.

        Args:
            group: The ranks that share the dim.
            dim: The dim.
            have: For each rank of the group the numbers of the rows of its piece, each once.
            wants: For each rank the rows that its result is made of, in order; -1 for a row of ``fill``.
            fill: What a row is filled with that comes from nowhere.
        """
        me, count = group.index, len(have[group.index])
        mine = wants[me]
        owner, place = _whereabouts(have)
        parts = [_held_by(r, mine, owner).unique() for r in range(group.size)]
        gives = [place[_held_by(me, rows, owner).unique()] for rows in wants]
        self.group, self.dim, self.count = group, dim, count
        self.given, self.taken = [len(g) for g in gives], [len(t) for t in parts]
        self.traffic = any(
            len(_held_by(r, rows, owner)) < int((rows >= 0).sum())
            for r, rows in enumerate(wants)
        )
        table, order = torch.cat(parts).sort()
        take = torch.full_like(mine, len(table))  # where the row of fill is
        real = mine >= 0
        if len(table):
            take[real] = order[torch.searchsorted(table, mine[real])]
        self.fill = None if bool(real.all()) else fill
        in_order = len(take) == len(table) and _is_count(take)
        whole = [len(g) == count and _is_count(g) for g in gives]
        self._index: dict[torch.device, Index] = {
            _CPU: (
                [None if w else g for w, g in zip(whole, gives)],
                None if in_order else take,
            )
        }

    def on(self, device: torch.device) -> Index:
        """On a device: the rows to give to each rank, and the places to take (None for all in order)."""
        found = self._index.get(device)
        if found is None:
            gives, place = self._index[_CPU]
            moved = [None if g is None else g.to(device) for g in gives]
            found = self._index[device] = moved, None if place is None else place.to(device)
        return found

    def filled(self, fill: float) -> Rows:
        """The same plan with another fill."""
        out = copy.copy(self)
        out.fill = fill
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """The rows that this rank asked for; differentiable."""
        if x.requires_grad and torch.is_grad_enabled():
            return _fetch(x, self)  # pyright: ignore[reportReturnType]
        return self.fetch(x)

    def fetch(self, x: Tensor) -> Tensor:
        """The rows that this rank asked for: a fresh tensor."""
        gives, place = self.on(x.device)
        parts = self._sent([_rows(x, self.dim, g) for g in gives], self.given, self.taken)
        if self.fill is not None:
            parts.append(x.new_full(_resized(x, self.dim, 1), self.fill))
        table = torch.cat(parts, self.dim)
        return table if place is None else table.index_select(self.dim, place)

    def give_back(self, g: Tensor) -> Tensor:
        """The transpose of ``fetch``: rows go back to where they came from, and are added up."""
        gives, place = self.on(g.device)
        dim, size = self.dim, sum(self.taken)
        if place is not None:
            room = size + (self.fill is not None)
            g = (
                g.new_zeros(_resized(g, dim, room))
                .index_add_(dim, place, g)
                .narrow(dim, 0, size)
            )
        parts = self._sent(list(g.split(self.taken, dim)), self.taken, self.given)
        out = g.new_zeros(_resized(g, dim, self.count))
        for rows, part in zip(gives, parts):
            out = out.add_(part) if rows is None else out.index_add_(dim, rows, part)
        return out

    def _sent(self, parts: list[Tensor], given: list[int], taken: list[int]) -> list[Tensor]:
        """Exchange: part i goes to rank i; what comes back is in the order of the ranks, too."""
        me, group = self.group.index, self.group
        own = parts[me]
        shape = _resized(own, self.dim, 1)
        if not self.traffic:
            return [
                own if i == me else own.new_empty(_resized(own, self.dim, 0))
                for i in range(group.size)
            ]
        row = math.prod(shape)
        send = torch.cat(
            [p.movedim(self.dim, 0).reshape(-1) for i, p in enumerate(parts) if i != me]
        )
        out_splits = [0 if i == me else n * row for i, n in enumerate(given)]
        in_splits = [0 if i == me else n * row for i, n in enumerate(taken)]
        got = group.transport.all_to_all(
            send, group.ranks, out_splits, in_splits, tag=group.tag
        )
        rest = (*shape[: self.dim], *shape[self.dim + 1 :])
        return [
            own if i == me else t.view(n, *rest).movedim(0, self.dim)
            for i, (t, n) in enumerate(zip(got.split(in_splits), taken))
        ]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, rows: Rows) -> Tensor:
        return rows.fetch(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        if g.requires_grad and torch.is_grad_enabled():
            return _give_back(g, ctx.rows), None
        return ctx.rows.give_back(g), None


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(g: Tensor, rows: Rows) -> Tensor:
        return rows.give_back(g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows = ctx.rows
        if rows.fill:  # what is constant has no part in a derivative
            rows = rows.filled(0.0)
        return rows(grads[0]), None


def _whereabouts(have: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """For each row the rank that holds it, and its place in that rank's piece."""
    total = sum(map(len, have))
    owner, place = (torch.empty(total, dtype=torch.int64, device=_CPU) for _ in range(2))
    for r, rows in enumerate(have):
        owner[rows] = r
        place[rows] = torch.arange(len(rows), device=_CPU)
    return owner, place


def _held_by(rank: int, rows: Tensor, owner: Tensor) -> Tensor:
    rows = rows[rows >= 0]
    return rows[owner[rows] == rank]


def _is_count(rows: Tensor) -> bool:
    """Whether these are 0, 1, 2, ..."""
    return bool((rows == torch.arange(len(rows), device=_CPU)).all())


def _resized(x: Tensor, dim: int, n: int) -> tuple[int, ...]:
    return (*x.shape[:dim], n, *x.shape[dim + 1 :])


def _rows(x: Tensor, dim: int, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(dim, rows)


_fetch = direct_apply(_Fetch)
_give_back = direct_apply(_GiveBack)
