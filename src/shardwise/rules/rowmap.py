"""Ops whose result's rows are rows of the operand in other places: rolled, turned round, padded, repeated.

Over a sharded dim each rank fetches the rows that its piece of the result is made of, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import Arg, Rule, numbered

# From the numbers of rows of the result to those of the operand; -1 for a row that comes from nowhere.
RowMap = Callable[[Tensor], Tensor]


def counted(rows: range) -> Tensor:
    """The numbers of these rows."""
    return torch.arange(rows.start, rows.stop, rows.step, device="cpu")


def fetched(ctx: Any, x: Tensor, dim: int, of: RowMap, **more: Any) -> Tensor:
    """This rank's piece of the result along a dim whose factor is ``d{dim}``, here and there.

    Args:
        ctx: The call.
        x: This rank's piece.
        dim: The dim.
        of: Which rows the result's are.
        **more: For ``ctx.rows``; ``out_dim`` is the dim's place in the result, ``out`` its number.
    """
    out, out_dim = more.pop("out", 0), more.pop("out_dim", dim)
    plan = ctx.rows(dim, lambda rank: of(counted(ctx.piece(out, out_dim, rank))), **more)
    return plan(x)


def mapped(
    x: Arg,
    maps: Mapping[int, RowMap],
    shape: Sequence[int] | None = None,
    *,
    fill: float = 0.0,
    linear: bool = True,
    **more: Any,
) -> Rule:
    """The rule of an op that takes rows of some dims from other places, and leaves the others as they are.

    Args:
        x: The operand.
        maps: For each such dim which rows of the operand the result's are.
        shape: Of the result, where it differs.
        fill: What rows hold that come from nowhere.
        linear: Whether a pending sum passes.
        **more: Further fields of the rule.
    """
    names = numbered("d", x.ndim)

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        for d, of in maps.items():
            x = fetched(ctx, x, d, of, fill=fill)
        return x

    return Rule(
        {x: names},
        (names,),
        special=frozenset(names[d] for d in maps),
        linear=(frozenset([x]),) if linear else (),
        local=local,
        out_shapes=(tuple(x.shape if shape is None else shape),),
        **more,
    )


# -- maps --------------------------------------------------------------------------------------------
def rolled(shift: int, n: int) -> RowMap:
    """Row i comes from i - shift, around the end."""
    return lambda i: (i - shift) % max(n, 1)


def reversed_(n: int) -> RowMap:
    """The last comes first."""
    return lambda i: n - 1 - i


def padding(before: int, n: int, mode: str) -> RowMap:
    """More rows (or fewer) at both ends, as ``torch.nn.functional.pad`` makes them."""

    def of(i: Tensor) -> Tensor:
        i = i - before
        if mode == "constant":
            return torch.where((i < 0) | (i >= n), -1, i)
        if mode == "replicate":
            return i.clamp(0, n - 1)
        if mode == "circular":
            return i % n
        i = i.abs()
        return torch.where(i >= n, 2 * (n - 1) - i, i)

    return of
