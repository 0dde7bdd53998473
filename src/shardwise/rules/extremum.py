"""Greatest and least elements: over a sharded dim each rank offers its best, and an all_reduce picks.

Ties are settled over all ranks as torch settles them on one: an index is the first of the whole tensor's;
the gradient of ``amax`` goes in equal parts to all elements that attain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import boxes
from shardwise.rules.edges import end_to_end
from shardwise.rules.notation import WHOLE, Arg, Rule
from shardwise.rules.pointwise import elementwise
from shardwise.rules.reduce import dims_of, drop, group_of, reduction
from shardwise.rules.registry import rule

_NEVER = torch.iinfo(torch.int64).max


# -- values ---------------------------------------------------------------------------------------
def worst(dtype: torch.dtype, op: str) -> Any:
    """What no element is worse than."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    if dtype is torch.bool:
        return op != "max"
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def piece_extremum(x: Tensor, dims: Sequence[int], op: str) -> Tensor:
    """The best of this rank's piece, dims kept; an empty piece offers the worst there is."""
    if any(x.shape[d] == 0 for d in dims):
        return x.new_full(
            [1 if d in dims else n for d, n in enumerate(x.shape)], worst(x.dtype, op)
        )
    best = x.amax if op == "max" else x.amin
    return best(tuple(dims), keepdim=True)


def group_extremum(group: Any, x: Tensor, op: str) -> Tensor:
    """The best over the ranks, without a gradient. A NaN wins, whatever a backend's max does with it."""
    if group.size == 1:
        return x
    if not x.dtype.is_floating_point:
        return group.reduce(x, op)
    nan = x.isnan()
    sign = 1 if op == "max" else -1
    flags = nan.to(x.dtype) * sign
    best, flag = group.reduce(
        torch.stack((torch.where(nan, worst(x.dtype, op), x), flags)), op
    ).unbind()
    return torch.where(flag != 0, math.nan, best)


def shared_gradient(
    group: Any, x: Tensor, dims: Sequence[int], value: Tensor, *, nans: bool = False
) -> Tensor:
    """``value`` (dims kept) with torch's gradient of ``amax``: equal parts to all that attain it, on all ranks.

    Args:
        group: The ranks that share the reduction.
        x: This rank's piece.
        dims: The dims that are reduced.
        value: The result.
        nans: Whether NaNs attain a NaN.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return value
    with torch.no_grad():
        mask = x == value
        if nans:
            mask = mask | (x.isnan() & value.isnan())
        count = group.reduce(mask.sum(tuple(dims), keepdim=True), "sum")
    return group.settle((x * mask).sum(tuple(dims), keepdim=True) / count, value)


def extremum(
    group: Any, x: Tensor, dims: Sequence[int], op: str, *, nans: bool = False
) -> Tensor:
    """``amax`` or ``amin`` over all ranks of the group, dims kept; differentiable."""
    value = group_extremum(group, piece_extremum(x.detach(), dims, op), op)
    return shared_gradient(group, x, dims, value, nans=nans)


def refused(x: Arg, dims: Sequence[int], keepdim: bool, results: int = 1) -> Rule:
    """The rule over a dim without elements: torch's own op shall say that it has no extremum."""
    return replace(
        reduction(x, dims, keepdim, results=results), whole=frozenset(f"d{d}" for d in dims)
    )


def _amax(op: str) -> Any:
    def answer(input: Arg, dim: Any = (), keepdim: bool = False, **more: Any) -> Rule | None:
        keepdim = more.get("keepdims", keepdim)
        dims = dims_of(input, dim, more)
        if dims is None or input.dtype.is_complex:
            return None
        if 0 in [input.shape[d] for d in dims]:
            return refused(input, dims, keepdim)

        def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
            return drop(extremum(group_of(ctx, dims), input, dims, op), dims, keepdim)

        return reduction(input, dims, keepdim, local=local)

    return answer


@rule("aminmax", "aten.aminmax")
def aminmax(input: Arg, *, dim: Any = None, keepdim: bool = False) -> Rule | None:
    """Both at once."""
    dims = dims_of(input, dim)
    if dims is None or input.dtype.is_complex:
        return None
    if 0 in [input.shape[d] for d in dims]:
        return refused(input, dims, keepdim, 2)

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
        group = group_of(ctx, dims)
        least, most = (extremum(group, input, dims, op) for op in ("min", "max"))
        return torch.return_types.aminmax(
            (drop(least, dims, keepdim), drop(most, dims, keepdim))
        )

    return reduction(input, dims, keepdim, local=local, results=2)


# -- indices --------------------------------------------------------------------------------------
def first_index(ctx: Any, x: Tensor, dims: Sequence[int], op: str, best: Tensor) -> Tensor:
    """The first place of ``best`` in the whole tensor, dims kept; flat where several dims are reduced.

    Places are counted as ``ctx.ins[0]`` cuts the tensor. A NaN is found where best is one.
    """
    x = x.detach()
    spec = ctx.ins[0]
    hit = (x == best) | (x.isnan() & best.isnan()) if x.dtype.is_floating_point else x == best
    if any(x.shape[d] == 0 for d in dims):
        place = best.new_full(best.shape, _NEVER, dtype=torch.int64)
    else:
        place = torch.zeros((), dtype=torch.int64, device=x.device)
        for d in dims:
            at = torch.arange(spec.offsets[d], spec.offsets[d] + x.shape[d], device=x.device)
            place = place * spec.shape[d] + at.view(
                [-1 if i == d else 1 for i in range(x.ndim)]
            )
        place = torch.where(hit, place, _NEVER).amin(tuple(dims), keepdim=True)
    return group_of(ctx, dims).reduce(place, "min")


def _argmax(op: str) -> Any:
    def answer(input: Arg, dim: Any = None, keepdim: bool = False, **more: Any) -> Rule | None:
        keepdim = more.get("keepdims", keepdim)
        dims = dims_of(input, dim, more)
        if dims is None or input.dtype.is_complex or input.dtype is torch.bool:
            return None
        if 0 in [input.shape[d] for d in dims]:
            return refused(input, dims, keepdim)

        def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
            x = input.detach()
            best = group_extremum(group_of(ctx, dims), piece_extremum(x, dims, op), op)
            return drop(first_index(ctx, x, dims, op, best), dims, keepdim)

        return reduction(input, dims, keepdim, local=local)

    return answer


def _max(op: str) -> Any:
    named = getattr(torch.return_types, op)

    def answer(
        input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None, **more: Any
    ) -> Rule | None:
        other = dim if isinstance(dim, Arg) else other
        if other is not None:
            return elementwise([input, other])
        full = dim is None and "axis" not in more
        keepdim = more.get("keepdims", keepdim)
        dims = dims_of(input, dim, more)
        if (
            dims is None
            or input.dtype.is_complex
            or (not full and len(dims) != 1 and input.ndim)
        ):
            return None
        if 0 in [input.shape[d] for d in dims]:
            return refused(input, dims, keepdim, 1 if full else 2)

        def whole(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
            return drop(extremum(group_of(ctx, dims), input, dims, op, nans=True), dims, False)

        def along(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
            group, (d,) = group_of(ctx, dims), dims
            value = group_extremum(group, piece_extremum(input.detach(), dims, op), op)
            index = first_index(ctx, input, dims, op, value)
            value = chosen(ctx, input, d, index, value)
            return named((drop(value, dims, keepdim), drop(index, dims, keepdim)))

        if full:
            return reduction(input, dims, local=whole)
        return reduction(input, dims, keepdim, local=along, results=2)

    return answer


def chosen(ctx: Any, x: Tensor, d: int, index: Tensor, value: Tensor) -> Tensor:
    """``value`` (dim kept) with the gradient of taking the elements at the global ``index`` of a sharded dim."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return value
    n = x.shape[d]
    if n == 0:
        mine = x.sum(d, keepdim=True)  # zeros, with an edge
    else:
        at = index - ctx.ins[0].offsets[d]
        taken = x.gather(d, at.clamp(0, n - 1))
        mine = torch.where((at >= 0) & (at < n), taken, torch.zeros_like(taken))
    return ctx.group(f"d{d}").settle(mine, value)


for _op in ("max", "min"):
    rule(f"a{_op}", f"aten.a{_op}")(_amax(_op))
    rule(f"arg{_op}", f"aten.arg{_op}")(_argmax(_op))
    rule(_op, f"aten.{_op}")(_max(_op))


# -- the k best -----------------------------------------------------------------------------------
@rule("topk", "aten.topk")
def topk(
    input: Arg, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True
) -> Rule | None:
    """Over a sharded dim each rank offers its k best, and the best of those are taken."""
    dims = dims_of(input, dim)
    if not dims or dim is None or not isinstance(k, int) or not 0 <= k <= input.shape[dims[0]]:
        return None
    (d,) = dims
    made = reduction(input, dims, True)
    shape = tuple(k if i == d else n for i, n in enumerate(input.shape))
    out = tuple(WHOLE if i == d else n for i, n in enumerate(made.outs[0]))
    fill = worst(input.dtype, "max" if largest else "min")
    if input.dtype.is_floating_point and not largest:
        fill = math.nan  # a NaN counts as greater than all

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
        spec, group = ctx.ins[0], ctx.group(f"d{d}")
        held = boxes.pieces(spec.shape[d], spec.layout.dims[d], ctx.mesh.shape)
        room, have = min(k, max(n for _, n in held)), min(k, input.shape[d])
        value, index = input.topk(have, d, largest, True)
        index = index + spec.offsets[d]
        if have < room:
            lack = [room - have if i == d else n for i, n in enumerate(input.shape)]
            value = end_to_end((value, value.new_full(lack, fill)), d)
            index = torch.cat((index, index.new_full(lack, _NEVER)), d)
        values = end_to_end(group.stack(value).unbind(), d)
        indices = torch.cat(group.gather(index).unbind(), d)
        order = indices.argsort(
            dim=d
        )  # among equals the first wins, and what only fills comes last
        best = values.detach().gather(d, order).argsort(dim=d, descending=largest, stable=True)
        order = order.gather(d, best.narrow(d, 0, k))
        return torch.return_types.topk((values.gather(d, order), indices.gather(d, order)))

    factor = frozenset([f"d{d}"])
    is_bool = input.dtype is torch.bool
    return replace(
        made,
        outs=(out, out),
        special=frozenset() if is_bool else factor,
        whole=factor if is_bool else frozenset(),
        local=local,
        out_shapes=(shape, shape),
    )
