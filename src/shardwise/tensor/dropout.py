"""Dropout: each rank makes its box of the one mask that the whole tensor has, O(local), nothing moves.

The mask multiplies, so a pending sum passes: all ranks of the sum have the same mask. The default stream is
Philox; under ``rng(like="torch")`` masks are bit-equal to plain torch on one CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.errors import ShardError
from shardwise.layout.boxes import restride
from shardwise.program.spec import Spec, spec_of
from shardwise.random import alpha_dropout_terms, dropout_mask, feature_box, native_dropout_mask
from shardwise.tensor.crossings import dense
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.overrides import override
from shardwise.tensor.random import (
    memory_order,
    overloads,
    prepare,
    random_override,
    settled,
    write,
)
from shardwise.tensor.views import fresh

Order = tuple[int, ...] | None


def _plan(spec: Spec) -> tuple[Spec, Order]:
    """The result's spec, and the order in which its mask is drawn: that of memory, if x is dense."""
    plans: dict[Spec, tuple[Spec, Order]] = spec.transport.state.setdefault("dropout", {})
    found = plans.get(spec)
    if found is None:
        layout = spec.layout
        want = restride(layout.shape, layout.stride)
        tiled = all(
            n == 1 or (s == w and s) for n, s, w in zip(layout.shape, layout.stride, want)
        )
        found = spec_of(dense(layout), spec.transport), memory_order(layout) if tiled else None
        if len(plans) >= 16384:
            plans.clear()
        plans[spec] = found
    return found


def _wrapped(local: Tensor, spec: Spec) -> DTensor:
    if spec.stride is None and not local.is_contiguous():
        local = local.contiguous()
    return wrap(local, spec)


def _scaled(x: DTensor, mask: Tensor, inplace: bool) -> DTensor:
    """``x * mask`` for a piece of a mask that is never negative."""
    if inplace:
        if "_view_of" in x.__dict__:
            return write(x, _scaled(x, mask, False))
        x._local.mul_(mask)
        return x
    return _wrapped(x._local * mask, _plan(x._spec)[0])


def _takes_mask(x: DTensor) -> DTensor:
    """``x`` with no pending reduction but a sum (or an extremum, which a mask also commutes with)."""
    fresh(x)
    layout = x._spec.layout
    if all(op in (None, "sum", "max", "min") for op in layout.partial):
        return x
    return x.redistribute(placements=settled(layout))


def _drop(x: DTensor, p: float, train: bool, inplace: bool) -> DTensor:
    if not 0 <= p <= 1:
        raise ShardError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or not x._spec.layout.numel:
        return x
    source = _takes_mask(x)
    spec, local = source._spec, source._local
    like = prepare(spec, local.device, None, "philox") if p != 1 else None
    mask = dropout_mask(
        spec.shape,
        spec.offsets,
        spec.local_shape,
        spec.dtype,
        local.device,
        p,
        like,
        None,
        _plan(spec)[1],
    )
    if inplace and source is not x:
        return write(x, _scaled(source, mask, False))
    return _scaled(source, mask, inplace)


@random_override(F.dropout)
def _f_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, train, inplace = _arguments(args, kwargs, True)
    return _drop(x, p, train, inplace)


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
) -> tuple[DTensor, float, bool, bool]:
    """(input, p, training, inplace) of the functional forms."""
    x, *rest = args
    if rest:
        kwargs = dict(zip(("p", "training", "inplace"), rest)) | kwargs
    return x, kwargs.get("p", 0.5), kwargs.get("training", train), kwargs.get("inplace", False)


def _builtin(
    args: tuple[Any, ...], kwargs: dict[str, Any], func: Any
) -> tuple[DTensor, float, bool, bool]:
    """The same of the builtin forms, whose name says whether they work in place."""
    given = dict(zip(("input", "p", "train"), args)) | kwargs
    name = func.__name__.partition(".")[0]
    return given["input"], given["p"], given["train"], name.endswith("_")


@random_override(torch.dropout, torch.dropout_, *overloads("dropout", "dropout_"))
def _torch_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _drop(*_builtin(args, kwargs, func))


@random_override(torch.native_dropout, *overloads("native_dropout"))
def _native_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "p", "train"), args)) | kwargs
    x, p, train = given["input"], given["p"], given["train"]
    x = _takes_mask(x)
    spec, local = x._spec, x._local
    out, order = _plan(spec)
    mask_spec = spec_of(settled(out.layout).with_dtype(torch.bool), spec.transport)
    if train is False or not spec.layout.numel:
        return x.clone(), wrap(torch.ones_like(local, dtype=torch.bool), mask_spec)
    like = prepare(spec, local.device, None, "philox")
    mask, scale = native_dropout_mask(
        spec.shape,
        spec.offsets,
        spec.local_shape,
        spec.dtype,
        local.device,
        p,
        like,
        None,
        order,
    )
    return _wrapped(local.mul(mask).mul_(scale), out), _wrapped(mask, mask_spec)


# ---- the affine one ---------------------------------------------------------------------------------


def _alpha(x: DTensor, p: float, train: bool, inplace: bool, feature: bool) -> DTensor:
    if not 0 <= p <= 1:
        raise ShardError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or not x._spec.layout.numel:
        return x
    if p == 1:
        return _drop(x, p, train, inplace)
    fresh(x)
    source: Any = (
        x.redistribute(placements=settled(x._spec.layout)) if x._spec.layout.is_partial else x
    )
    if inplace and source is x and torch.is_grad_enabled():
        source = x.clone()
    spec, local = source._spec, source._local
    like = prepare(spec, local.device, None, "philox")
    place, order = (spec.shape, spec.offsets, spec.local_shape), _plan(spec)[1]
    if feature:
        place, order = feature_box(*place), None
    factor, term = alpha_dropout_terms(*place, spec.dtype, local.device, p, like, None, order)
    value = _wrapped((local * factor).add_(term), _plan(spec)[0])
    return write(x, value) if inplace else value


@random_override(F.alpha_dropout)
def _f_alpha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _alpha(*_arguments(args, kwargs, False), feature=False)


@random_override(F.feature_alpha_dropout)
def _f_feature_alpha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _alpha(*_arguments(args, kwargs, False), feature=True)


@random_override(
    torch.alpha_dropout, torch.alpha_dropout_, *overloads("alpha_dropout", "alpha_dropout_")
)
def _torch_alpha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _alpha(*_builtin(args, kwargs, func), feature=False)


@random_override(
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    *overloads("feature_alpha_dropout", "feature_alpha_dropout_"),
)
def _torch_feature_alpha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _alpha(*_builtin(args, kwargs, func), feature=True)


# ---- whole channels -----------------------------------------------------------------------------------


def _drop_features(
    x: DTensor, p: float, train: bool, inplace: bool, batched: bool = True
) -> DTensor:
    """Drop whole channels of (N, C, ...), or of (C, ...) where ``batched`` is False."""
    if not 0 <= p <= 1:
        raise ShardError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or not x._spec.layout.numel:
        return x
    source = _takes_mask(x)
    spec, local = source._spec, source._local
    shape, offsets, sizes = tuple(spec.shape), tuple(spec.offsets), tuple(spec.local_shape)
    if not batched:
        shape, offsets, sizes = (1, *shape), (0, *offsets), (1, *sizes)
    like = prepare(spec, local.device, None, "philox") if p != 1 else None
    mask = dropout_mask(*feature_box(shape, offsets, sizes), spec.dtype, local.device, p, like)
    mask = mask if batched else mask.squeeze(0)
    if inplace and source is not x:
        return write(x, _scaled(source, mask, False))
    return _scaled(source, mask, inplace)


@lru_cache(maxsize=256)
def _accepted(func: Any, ndim: int) -> bool:
    """Raise or warn as torch does about the number of dims."""
    func(torch.empty((2,) * ndim, device="meta"), 0.5, True)
    return True


@override(F.dropout1d, F.dropout2d, F.dropout3d)
def _f_features(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, train, inplace = _arguments(args, kwargs, True)
    _accepted(func, x.ndim)
    unbatched = {F.dropout1d: 2, F.dropout3d: 4}.get(func)
    return _drop_features(x, p, train, inplace, batched=x.ndim != unbatched)


@random_override(
    torch.feature_dropout,
    torch.feature_dropout_,
    *overloads("feature_dropout", "feature_dropout_"),
)
def _torch_features(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _drop_features(*_builtin(args, kwargs, func))
