"""Sums, means, products, variances and the like: over a sharded dim only partial results meet.

A sum or a mean leaves a pending sum; anything else is settled by a small all_reduce of the result's size.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import ONE, Arg, Labels, LocalProgram, Rule, numbered
from shardwise.rules.registry import rule

_NARROW = (torch.float16, torch.bfloat16)


# -- what the rules of this family share ---------------------------------------------------------
def dims_of(
    x: Arg, dim: Any, more: dict[str, Any] | None = None, *, none: bool = True
) -> tuple[int, ...] | None:
    """The dims a ``dim`` argument names, ascending; None if torch would refuse it, or if it is not for a rule.

    Args:
        x: The tensor.
        dim: None, an int or several; None and none at all mean all dims.
        more: Further keywords; numpy's ``axis`` is taken from it.
        none: Whether ``()`` means all dims.
    """
    if more and "axis" in more:
        dim = more.pop("axis")
    if more and not more.keys() <= {"keepdims", "out"}:
        return None
    if dim is None:
        return tuple(range(x.ndim))
    wanted = (dim,) if isinstance(dim, int) else dim
    if not isinstance(wanted, (tuple, list)) or not all(type(d) is int for d in wanted):
        return None
    if not wanted:
        return tuple(range(x.ndim)) if none else None
    n = max(x.ndim, 1)
    if any(not -n <= d < n for d in wanted):
        return None
    dims = sorted(d % n for d in wanted)
    if len(set(dims)) != len(dims):
        return None
    return tuple(dims) if x.ndim else ()


def kept(names: Labels, dims: Sequence[int], keepdim: bool) -> Labels:
    """Labels of a result that lacks ``dims``, or keeps them at size one."""
    if keepdim:
        return tuple(ONE if d in dims else n for d, n in enumerate(names))
    return tuple(n for d, n in enumerate(names) if d not in dims)


def reduction(
    x: Arg,
    dims: Sequence[int],
    keepdim: bool = False,
    *,
    local: LocalProgram | None = None,
    op: str = "none",
    linear: bool = False,
    results: int = 1,
    always: bool = False,
) -> Rule:
    """The rule of an op that reduces ``dims``: with a local program over sharded ones, or a pending ``op``."""
    names = numbered("d", x.ndim)
    gone = [names[d] for d in dims]
    return Rule(
        {x: names},
        (kept(names, dims, keepdim),) * results,
        reduce=dict.fromkeys(gone, op),
        special=frozenset(gone if local is not None else ()),
        linear=(frozenset([x]),) if linear else (),
        local=local,
        always_local=always,
    )


def group_of(ctx: Any, dims: Sequence[int]) -> Any:
    """The ranks that share a reduction over ``dims`` of an operand whose dim i is factor ``d{i}``."""
    return ctx.group(*(f"d{d}" for d in dims))


def count_of(x: Arg, dims: Sequence[int]) -> int:
    """How many elements of the whole tensor a reduction over ``dims`` meets."""
    return math.prod(x.shape[d] for d in dims)


def wide(x: Tensor) -> Tensor:
    """In float32 where the dtype is narrower: as torch's kernels do it inside."""
    return x.float() if x.dtype in _NARROW else x


def result_dtype(x: Arg, dtype: Any, probe: Any) -> Any:
    """The dtype of an op's result: that asked for, or what ``probe`` makes of one element under autocast."""
    if dtype is not None:
        return dtype
    kind = getattr(x.device, "type", "cpu")
    if torch.is_autocast_enabled(kind):
        with torch.no_grad():
            return probe(torch.ones((1,) * x.ndim, dtype=x.dtype, device=x.device)).dtype
    return x.dtype


def drop(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A result that kept its dims, without them where they are not asked for."""
    return x if keepdim or not dims else x.squeeze(tuple(dims))


def safe_sqrt(x: Tensor) -> Tensor:
    """The root, with gradient zero at zero, as torch's norms and deviations have it."""
    zero = x == 0
    return torch.where(
        zero, torch.zeros_like(x), torch.where(zero, torch.ones_like(x), x).sqrt()
    )


def is_inexact(dtype: Any) -> bool:
    """Floating or complex."""
    return dtype.is_floating_point or dtype.is_complex


# -- sums -----------------------------------------------------------------------------------------
@rule("sum", "aten.sum")
def sum_(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Rule | None:
    """A pending sum where a reduced dim is sharded."""
    keepdim = more.get("keepdims", keepdim)
    dims = dims_of(input, dim, more)
    if dims is None:
        return None
    linear = is_inexact(input.dtype) and (dtype is None or is_inexact(dtype))
    return reduction(input, dims, keepdim, op="sum", linear=linear)


@rule("nansum", "aten.nansum")
def nansum(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Rule | None:
    """As ``sum``, but a pending sum cannot pass: which addends are NaN is not known yet."""
    dims = dims_of(input, dim, more)
    return (
        None
        if dims is None
        else reduction(input, dims, more.get("keepdims", keepdim), op="sum")
    )


@rule("count_nonzero", "aten.count_nonzero")
def count_nonzero(input: Arg, dim: Any = None, **more: Any) -> Rule | None:
    """Counts add up."""
    dims = dims_of(input, dim, more)
    return None if dims is None else reduction(input, dims, op="sum")


@rule("mean", "aten.mean")
def mean(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Rule | None:
    """The local sum over the global count; a pending sum."""
    keepdim = more.get("keepdims", keepdim)
    dims = dims_of(input, dim, more)
    if dims is None or not is_inexact(dtype or input.dtype):
        return None
    n, out = count_of(input, dims), dtype or input.dtype

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        inside = torch.float32 if out in _NARROW else out
        return (torch.sum(input, dims, keepdim, dtype=inside) / n).to(out)

    def usual(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        return input.sum().div_(n)  # the sum is ours alone

    if out is input.dtype and out not in _NARROW and len(dims) == input.ndim and not keepdim:
        local = usual
    return reduction(
        input, dims, keepdim, local=local, op="sum", linear=is_inexact(input.dtype)
    )


@rule("nanmean", "aten.nanmean")
def nanmean(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Rule | None:
    """The local sum over the global count of what is no NaN; a pending sum."""
    dims = dims_of(input, dim, more)
    if dims is None or not input.dtype.is_floating_point:
        return None
    out = dtype or input.dtype

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        inside = torch.float32 if out in _NARROW else out
        n = group_of(ctx, dims).reduce((~input.isnan()).sum(dims, keepdim), "sum")
        return (torch.nansum(input, dims, keepdim, dtype=inside) / n).to(out)

    return reduction(input, dims, keepdim, local=local, op="sum")


@rule("prod", "aten.prod")
def prod(
    input: Arg, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Rule | None:
    """Products of the pieces are stacked and multiplied, so that a zero has torch's gradient."""
    full = dim is None and "axis" not in more
    keepdim = more.get("keepdims", keepdim)
    dims = dims_of(input, dim, more)
    if dims is None or (not full and len(dims) != 1 and input.ndim):
        return None

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        part = (
            torch.prod(input, dtype=dtype)
            if full
            else torch.prod(input, dims[0], keepdim, dtype=dtype)
        )
        group = group_of(ctx, dims)
        if part.requires_grad and torch.is_grad_enabled():
            return group.stack(part).prod(0, dtype=part.dtype)
        return group.reduce(part, "product")

    return reduction(input, dims, keepdim and not full, local=local)


@rule("trace", "aten.trace")
def trace(input: Arg) -> Rule | None:
    """Each piece adds up its part of the diagonal; a pending sum."""
    if input.ndim != 2:
        return None

    def local(ctx: Any, input: Tensor) -> Tensor:
        return input.diagonal(ctx.start(0, 0) - ctx.start(0, 1)).sum()

    return reduction(input, (0, 1), local=local, op="sum", linear=is_inexact(input.dtype))


# -- truth ----------------------------------------------------------------------------------------
def _truth(name: str, op: str) -> Any:
    func = getattr(torch, name)

    def answer(input: Arg, dim: Any = None, keepdim: bool = False, **more: Any) -> Rule | None:
        keepdim = more.get("keepdims", keepdim)
        dims = dims_of(input, dim, more, none=False)
        if dims is None:
            return None

        def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
            return group_of(ctx, dims).reduce(func(input, dims, keepdim), op)

        return reduction(input, dims, keepdim, local=local)

    return answer


rule("all", "aten.all")(_truth("all", "min"))
rule("any", "aten.any")(_truth("any", "max"))


# -- spread ---------------------------------------------------------------------------------------
def _spread(name: str) -> Any:
    root, both = name.startswith("std"), name.endswith("_mean")

    def answer(
        input: Arg,
        dim: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
        *,
        correction: Any = None,
        **more: Any,
    ) -> Rule | None:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if unbiased is not None:
            correction = int(unbiased)
        keepdim = more.get("keepdims", keepdim)
        dims = dims_of(input, dim, more)
        if dims is None or not input.dtype.is_floating_point:
            return None
        less = 1 if correction is None else correction
        n = count_of(input, dims)

        def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
            group, x = group_of(ctx, dims), wide(input)
            middle, squares = moments(group, x, dims, n)
            spread = squares / max(n - less, 0)
            spread = drop(safe_sqrt(spread) if root else spread, dims, keepdim).to(input.dtype)
            return (spread, drop(middle, dims, keepdim).to(input.dtype)) if both else spread

        warns = input.layout.has_empty()  # torch's own op warns about an empty piece
        return reduction(
            input, dims, keepdim, local=local, results=2 if both else 1, always=warns
        )

    return answer


def moments(group: Any, x: Tensor, dims: Sequence[int], n: int) -> tuple[Tensor, Tensor]:
    """Mean, and sum of squared distances from it, over all ranks of the group; the dims are kept."""
    middle = group.sum(x.sum(tuple(dims), keepdim=True)) / n
    return middle, group.sum((x - middle).square().sum(tuple(dims), keepdim=True))


for _name in ("var", "std", "var_mean", "std_mean"):
    rule(_name, f"aten.{_name}")(_spread(_name))


# -- log of a sum of exponentials -----------------------------------------------------------------
@rule("logsumexp", torch.special.logsumexp, "aten.logsumexp", "aten.special_logsumexp")
def logsumexp(input: Arg, dim: Any, keepdim: bool = False, **more: Any) -> Rule | None:
    """The greatest element is taken out first; then a sum over the ranks."""
    dims = dims_of(input, dim, more)
    if dims is None or input.dtype.is_complex or not dims:
        return None
    out = (
        result_dtype(input, None, lambda x: torch.logsumexp(x, dims))
        if is_inexact(input.dtype)
        else None
    )

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        group, x = group_of(ctx, dims), wide(input)
        if not x.dtype.is_floating_point:  # a difference of integers could overflow
            x = x.to(torch.get_default_dtype())
        top = greatest(group, x, dims)
        top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
        total = group.sum((x - top).exp().sum(dims, keepdim=True)).log() + top
        return drop(total if out is None else total.to(out), dims, keepdim)

    return reduction(input, dims, keepdim, local=local)


def greatest(group: Any, x: Tensor, dims: Sequence[int]) -> Tensor:
    """The greatest element over all ranks, to subtract before ``exp``: no gradient; a NaN may get lost."""
    x = x.detach()
    if any(x.shape[d] == 0 for d in dims):
        low = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        top = x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], low)
    else:
        top = x.amax(tuple(dims), keepdim=True)
    return group.reduce(top, "max")
