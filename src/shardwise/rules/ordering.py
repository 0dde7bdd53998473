"""Sorting and order statistics: along a whole dim, each rank sorts the rows it has.

Along a sharded dim all of it is needed. What has no gradient (indices, and sorted integers) keeps the layout of
what is sorted, so that what is picked by it stays sharded: each rank keeps its part of the order.

The element of one rank (a median, the k-th) along a sharded dim is found by counting where that moves less than
a gather. Which of several equal elements it is taken from is then the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import boxes
from shardwise.rules.extremum import chosen, first_index, shared_gradient
from shardwise.rules.notation import (
    WHOLE,
    Arg,
    Labels,
    Rule,
    aligned,
    numbered,
    without_empty,
)
from shardwise.rules.reduce import dims_of, drop, group_of, kept, reduction
from shardwise.rules.registry import rule
from shardwise.rules.select import digit_bits, of_rank
from shardwise.rules.subscript import padded


def _sorted(input: Arg, dim: Any, results: int, values: bool = True) -> Rule | None:
    dims = dims_of(input, dim)
    if dim is None or dims is None:
        return None
    names = numbered("d", input.ndim)
    if not names:
        return Rule({input: names}, (names,) * results)
    at = dims[0]
    if values and (input.dtype.is_floating_point or input.dtype.is_complex):
        names = (*names[:at], WHOLE, *names[at + 1 :])
        return Rule({input: names}, (names,) * results)

    def local(ctx: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        got = ctx.func(_all_of(ctx, x, at, names[at]), *args, **kwargs)
        start, count = ctx.outs[0].offsets[at], ctx.outs[0].local_shape[at]
        if results == 1:
            return got.narrow(at, start, count).contiguous()
        return type(got)([t.narrow(at, start, count).contiguous() for t in got])

    return Rule({input: names}, (names,) * results, special=frozenset([names[at]]), local=local)


def _all_of(ctx: Any, x: Tensor, dim: int, factor: str) -> Tensor:
    """The whole of a dim of the first argument, without a gradient."""
    spec, axes = ctx.ins[0], ctx.axes[factor]
    sizes = [n for _, n in boxes.pieces(spec.shape[dim], axes, ctx.mesh.shape)]
    shape = list(x.shape)
    shape[dim] = max(sizes) - x.shape[dim]
    x = x.detach()
    pieces = ctx.group(factor).gather(torch.cat([x, x.new_zeros(shape)], dim))
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(pieces.unbind(), sizes)], dim)


def _one_of(input: Arg, dim: Any, keepdim: bool) -> Rule | None:
    dims = dims_of(input, dim)
    if dim is None or dims is None:
        return None
    names = tuple(WHOLE if d in dims else n for d, n in enumerate(numbered("d", input.ndim)))
    return Rule({input: names}, (kept(names, dims, keepdim),) * 2)


@rule("sort")
def sort(
    input: Arg, dim: Any = -1, descending: bool = False, *, stable: Any = None, **more: Any
) -> Rule | None:
    """Values and indices."""
    return None if more.keys() - {"out"} else _sorted(input, dim, 2)


@rule("aten.sort.default", "aten.sort.stable")
def aten_sort(
    self: Arg, dim: Any = -1, descending: bool = False, *, stable: Any = None
) -> Rule | None:
    """Values and indices."""
    return _sorted(self, dim, 2)


@rule("argsort", "aten.argsort.default", "aten.argsort.stable")
def argsort(
    input: Arg, dim: Any = -1, descending: bool = False, stable: Any = None
) -> Rule | None:
    """Indices."""
    return _sorted(input, dim, 1, False)


@rule("msort", "aten.msort")
def msort(input: Arg) -> Rule | None:
    """Along the first dim."""
    return _sorted(input, 0, 1) if input.ndim else None


# -- the element of a given rank -------------------------------------------------------------------
Ranks = Callable[
    [Any, Tensor, int], Tensor
]  # (group, piece, dim) -> the rank sought in each row


def _nans(group: Any, x: Tensor, dim: int) -> Tensor:
    """How many NaNs each row has, over all ranks; the dim is kept."""
    if not x.dtype.is_floating_point:
        return x.new_zeros(
            [1 if i == dim else n for i, n in enumerate(x.shape)], dtype=torch.int64
        )
    return group.reduce(x.isnan().sum(dim, keepdim=True), "sum")


def _sought(input: Arg, dim: Any, keepdim: bool, ranks: Ranks, named: Any) -> Rule | None:
    """Value and index of one element of each row."""
    made = _one_of(input, dim, keepdim)
    dims = dims_of(input, dim)
    if made is None or not dims or not input.layout.dims[dims[0]]:
        return made
    (d,) = dims
    bits = digit_bits(input, input.layout.numel // max(input.shape[d], 1))
    if bits is None:
        return made

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
        group = ctx.group(f"d{d}")
        wanted = ranks(group, input.detach(), d).movedim(d, -1)
        value = of_rank(group, input.movedim(d, -1), wanted, bits).movedim(-1, d)
        index = first_index(ctx, input, (d,), "max", value)
        value = chosen(ctx, input, d, index, value)
        return named((drop(value, (d,), keepdim), drop(index, (d,), keepdim)))

    names = numbered("d", input.ndim)
    return Rule(
        {input: names},
        made.outs,
        reduce={names[d]: "none"},
        special=frozenset([names[d]]),
        local=local,
    )


def _median(named: Any, skips: bool) -> Any:
    def ranks_of(n: int) -> Ranks:
        def ranks(group: Any, x: Tensor, d: int) -> Tensor:
            nans = _nans(group, x, d)
            if skips:
                return (n - nans - 1).clamp(min=0) // 2
            return torch.where(nans > 0, n - 1, (n - 1) // 2)

        return ranks

    def answer(input: Arg, dim: Any = None, keepdim: bool = False, **more: Any) -> Rule | None:
        if more:
            return None
        if dim is not None:
            dims = dims_of(input, dim)
            n = input.shape[dims[0]] if dims and input.ndim else 1
            return _sought(input, dim, keepdim, ranks_of(n), named)
        bits = digit_bits(input, 1)
        if bits is None or not input.layout.is_sharded:
            return Rule({input: (WHOLE,) * input.ndim}, ((),))
        dims, n = tuple(range(input.ndim)), input.layout.numel

        def local(ctx: Any, input: Tensor) -> Tensor:
            group, flat = group_of(ctx, dims), input.detach().reshape(1, -1)
            value = of_rank(group, flat, ranks_of(n)(group, flat, 1), bits)
            value = value.view((1,) * input.ndim)
            return drop(shared_gradient(group, input, dims, value, nans=True), dims, False)

        return reduction(input, dims, local=local)

    return answer


for _name, _skips in (("median", False), ("nanmedian", True)):
    rule(_name, f"aten.{_name}")(_median(getattr(torch.return_types, _name), _skips))


@rule("kthvalue", "aten.kthvalue")
def kthvalue(
    input: Arg, k: int, dim: Any = -1, keepdim: bool = False, **more: Any
) -> Rule | None:
    """Along one dim."""
    dims = dims_of(input, dim)
    if more or type(k) is not int or dims is None:
        return None
    n = input.shape[dims[0]] if dims else 1
    if not 1 <= k <= n:
        return _one_of(input, dim, keepdim)  # torch says why not

    def ranks(group: Any, x: Tensor, d: int) -> Tensor:
        row = [1 if i == d else m for i, m in enumerate(x.shape)]
        return torch.full(row, k - 1, dtype=torch.int64, device=x.device)

    return _sought(input, dim, keepdim, ranks, torch.return_types.kthvalue)


@rule("quantile", "nanquantile", "aten.quantile", "aten.nanquantile")
def quantile(
    input: Arg, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Rule | None:
    """Along one dim, or of all elements, which are whole; other dims stay as they are."""
    dims = dims_of(input, dim)
    if dims is None or (dim is not None and type(dim) is not int) or q is input:
        return None
    if not input.dtype.is_floating_point or 0 in input.shape or not input.ndim:
        return None
    names = tuple(WHOLE if d in dims else n for d, n in enumerate(numbered("d", input.ndim)))
    ins: dict[Arg, Labels] = {input: names}
    more: tuple[int, ...] = ()
    if isinstance(q, Arg):
        if q.ndim > 1:
            return None
        ins[q], more = ("q",) * q.ndim, q.shape
    elif not isinstance(q, float):
        return None

    def local(ctx: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.numel():
            return ctx.func(input, *args, **kwargs)
        lacks = [d for d, n in enumerate(input.shape) if not n]
        for d in lacks:  # torch refuses an empty piece: one of zeros, cut off
            input = padded(input, d)
        out = ctx.func(input, *args, **kwargs)
        for d in lacks:
            out = out.narrow(len(more) + (d if keepdim else d - sum(e < d for e in dims)), 0, 0)
        return out

    shape = [
        1 if d in dims else n for d, n in enumerate(input.shape) if keepdim or d not in dims
    ]
    return Rule(
        ins,
        (("q",) * len(more) + kept(names, dims, keepdim),),
        whole=without_empty(ins, ("q",)),
        local=local,
        always_local=input.layout.has_empty(),
        out_shapes=((*more, *shape),),
    )


@rule("mode", "aten.mode")
def mode(input: Arg, dim: Any = -1, keepdim: bool = False, **more: Any) -> Rule | None:
    """Along one dim."""
    return None if more or 0 in input.shape else _one_of(input, dim, keepdim)


@rule("cdist", "aten.cdist", lifts=False)
def cdist(x1: Arg, x2: Arg, p: Any = 2.0, *_: Any, **__: Any) -> Rule | None:
    """``... p m, ... r m -> ... p r``: rows of both may be sharded."""
    if x1.ndim < 2 or x2.ndim < 2 or 0 in x1.shape or 0 in x2.shape:
        return None
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    names = numbered("b", len(batch))
    ins = {
        x1: (*_batch(x1, names), "p", WHOLE),
        x2: (*_batch(x2, names), "r", WHOLE),
    }
    return Rule(ins, ((*names, "p", "r"),), out_shapes=((*batch, x1.shape[-2], x2.shape[-2]),))


def _batch(arg: Arg, names: tuple[str, ...]) -> tuple[str, ...]:
    padded = aligned(arg, (*names, "", ""))
    return padded[: arg.ndim - 2]
