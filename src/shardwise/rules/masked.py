"""Writing where a mask says, one value for each hit: ``masked_scatter``, ``x[mask] = values``.

The mask tells each rank which of the values are its own; a byte for each element moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rules.found import assembled
from shardwise.rules.notation import WHOLE, Arg, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.subscript import padded

_T = torch.Tensor


def _filled(ctx: Any, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """``x`` with the n-th row of ``values`` where the mask, over its first dims, has its n-th hit."""
    k = mask.ndim
    whole = assembled(ctx, mask, 1, numbered("d", k))
    order = (whole.flatten().cumsum(0) - 1).view(whole.shape)
    spec = ctx.ins[0]
    at = tuple(slice(o, o + n) for o, n in zip(spec.offsets[:k], spec.local_shape[:k]))
    rows = len(values)
    values = values if rows else padded(values, 0)
    picked = values.index_select(0, order[at].reshape(-1).clamp(0, max(rows - 1, 0)))
    picked = picked.view(*mask.shape, *values.shape[1:]).to(x.dtype)
    return torch.where(mask.view(*mask.shape, *(1,) * (x.ndim - k)), picked, x)


def filled_by_mask(x: Arg, mask: Arg, values: Arg, in_place: bool) -> Rule | None:
    """``x[mask] = values`` with a row for each hit, over the first dims of ``x``."""
    k = mask.ndim
    if mask.dtype is not torch.bool or mask in (x, values) or values is x:
        return None
    names = numbered("d", x.ndim)

    def local(ctx: Any, x: Tensor, index: Any, values: Tensor, *_: Any, **__: Any) -> Any:
        if isinstance(index, (tuple, list)):
            index = next(i for i in index if isinstance(i, Tensor))
        _judge(ctx, index, values)
        made = _filled(ctx, x, index, values)
        if not in_place:
            return made
        x.copy_(made)
        return None if ctx.func is _T.__setitem__ else x

    same = values.dtype == x.dtype
    return Rule(
        {x: names, mask: names[:k], values: (WHOLE, *names[k:])},
        (names,),
        special=frozenset(names[:k]),
        linear=(frozenset([x, values]),) if same else (),
        addends=frozenset([values] if in_place else [x, values]) if same else frozenset(),
        local=local,
    )


def _judge(ctx: Any, mask: Tensor, values: Tensor) -> None:
    """On all ranks alike, what torch says when there are more or fewer values than hits."""
    hits = mask.sum()
    hits = int(ctx.group(*numbered("d", mask.ndim)).reduce(hits, "sum"))
    if hits != len(values):
        where = torch.ones(hits, dtype=torch.bool)
        torch.zeros(hits)[where] = torch.zeros(len(values))


@rule("masked_scatter", "aten.masked_scatter")
def masked_scatter(input: Any, mask: Any, source: Any) -> Rule | None:
    """The first values of the source, in order, where the mask hits."""
    return _scattered(input, mask, source, False)


@rule(_T.masked_scatter_, "aten.masked_scatter_", inplace=True)
def masked_scatter_(input: Any, mask: Any, source: Any) -> Rule | None:
    """``masked_scatter`` in place."""
    return _scattered(input, mask, source, True)


def _scattered(x: Any, mask: Any, source: Any, in_place: bool) -> Rule | None:
    if not all(isinstance(a, Arg) for a in (x, mask, source)):
        return None
    if mask.dtype is not torch.bool or source.dtype != x.dtype or source is x or not x.ndim:
        return None
    names = numbered("d", x.ndim)
    if not mask.ndim and source.shape == x.shape:  # all of it or nothing
        both = frozenset([source] if in_place else [x, source])
        ins = {x: names, mask: (), source: names}
        return Rule(ins, (names,), linear=(frozenset([x, source]),), addends=both)
    if mask.shape != x.shape:
        return None

    def local(ctx: Any, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        hits = int(ctx.group(*names).reduce(mask.sum(), "sum"))
        if hits > source.numel():  # torch says so, on all ranks
            where = torch.ones(hits, dtype=torch.bool)
            torch.zeros(hits).masked_scatter(where, torch.zeros(source.numel()))
        made = _filled(ctx, x, mask, source.reshape(-1))
        return x.copy_(made) if in_place else made

    return Rule(
        {x: names, mask: names, source: (WHOLE,) * source.ndim},
        (names,),
        special=frozenset(names),
        linear=(frozenset([x, source]),),
        addends=frozenset([source] if in_place else [x, source]),
        local=local,
    )
