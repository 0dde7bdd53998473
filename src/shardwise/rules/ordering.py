"""Sorting and order statistics: along a whole dim, each rank sorts the rows it has.

Along a sharded dim all of it is needed. What has no gradient (indices, and sorted integers) keeps the layout of
what is sorted, so that what is picked by it stays sharded: each rank keeps its part of the order.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import boxes
from shardwise.rules.notation import WHOLE, Arg, Rule, aligned, numbered
from shardwise.rules.reduce import dims_of, kept
from shardwise.rules.registry import rule


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
    mesh = [ctx.mesh.shape[a] for a in axes]
    places = itertools.product(*map(range, mesh))
    sizes = [boxes.nested(spec.shape[dim], mesh, place)[1] for place in places]
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


@rule("median", "nanmedian", "aten.median", "aten.nanmedian")
def median(input: Arg, dim: Any = None, keepdim: bool = False, **more: Any) -> Rule | None:
    """Along one dim."""
    return None if more else _one_of(input, dim, keepdim)


@rule("mode", "aten.mode")
def mode(input: Arg, dim: Any = -1, keepdim: bool = False, **more: Any) -> Rule | None:
    """Along one dim."""
    return None if more or 0 in input.shape else _one_of(input, dim, keepdim)


@rule("kthvalue", "aten.kthvalue")
def kthvalue(
    input: Arg, k: int, dim: Any = -1, keepdim: bool = False, **more: Any
) -> Rule | None:
    """Along one dim."""
    return None if more else _one_of(input, dim, keepdim)


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
