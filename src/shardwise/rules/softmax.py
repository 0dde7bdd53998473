"""Softmax and its logarithm: over a sharded dim, a maximum and a sum meet, one number per row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.rules.notation import Arg, Rule, numbered
from shardwise.rules.reduce import dims_of, greatest, group_of, is_inexact, result_dtype, wide
from shardwise.rules.registry import rule


def _implicit(ndim: int) -> int:
    """The dim that torch takes when none is given."""
    return 0 if ndim in (0, 1, 3) else 1


def _rows(input: Arg, dim: Any, dtype: Any, kind: str) -> Rule | None:
    if dim is None:
        dim = _implicit(input.ndim)
    dims = dims_of(input, dim)
    if dims is None and type(dim) is int:  # torch's fake and meta kernels let it pass
        low, high = -max(input.ndim, 1), max(input.ndim, 1) - 1
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{low}, {high}], but got {dim})"
        )
    if not isinstance(dim, int) or dims is None or not is_inexact(dtype or input.dtype):
        return None
    names = numbered("d", input.ndim)
    if not dims:
        return Rule({input: names}, (names,))
    if input.dtype.is_complex:
        whole = frozenset([names[dims[0]]])
        return Rule({input: names}, (names,), whole=whole)
    out = result_dtype(input, dtype, lambda x: torch.softmax(x, 0))
    local = _over_pieces(kind, dims, out)
    return Rule({input: names}, (names,), special=frozenset([names[dims[0]]]), local=local)


def _over_pieces(kind: str, dims: tuple[int, ...], out: Any) -> Any:
    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        group = group_of(ctx, dims)
        x = wide((-input if kind == "softmin" else input).to(out))
        x = x - greatest(group, x, dims)
        grown = x.exp()
        total = group.sum(grown.sum(dims, keepdim=True))
        return (x - total.log() if kind == "log_softmax" else grown / total).to(out)

    return local


@rule("softmax", torch.special.softmax, "aten.softmax.int")
def softmax(
    input: Arg, dim: Any = None, *rest: Any, dtype: Any = None, **_: Any
) -> Rule | None:
    """Rows stay; ``torch.softmax`` takes ``dtype`` third, ``F.softmax`` fourth."""
    return _rows(input, dim, _dtype(rest, dtype), "softmax")


@rule("log_softmax", torch.special.log_softmax, "aten.log_softmax.int")
def log_softmax(
    input: Arg, dim: Any = None, *rest: Any, dtype: Any = None, **_: Any
) -> Rule | None:
    """As ``softmax``."""
    return _rows(input, dim, _dtype(rest, dtype), "log_softmax")


@rule(F.softmin)
def softmin(
    input: Arg, dim: Any = None, *rest: Any, dtype: Any = None, **_: Any
) -> Rule | None:
    """As ``softmax``."""
    return _rows(input, dim, _dtype(rest, dtype), "softmin")


def _dtype(rest: tuple[Any, ...], dtype: Any) -> Any:
    return next((a for a in rest if isinstance(a, torch.dtype)), dtype)


@rule("aten._softmax")
def aten_softmax(self: Arg, dim: int, half_to_float: bool) -> Rule | None:
    """The op behind ``softmax``."""
    return _rows(self, dim, torch.float32 if half_to_float else None, "softmax")


@rule("aten._log_softmax")
def aten_log_softmax(self: Arg, dim: int, half_to_float: bool) -> Rule | None:
    """The op behind ``log_softmax``."""
    return _rows(self, dim, torch.float32 if half_to_float else None, "log_softmax")


@rule("aten._safe_softmax")
def safe_softmax(self: Arg, dim: int, dtype: Any = None) -> Rule | None:
    """Rows of -inf alone become zeros."""
    dims = dims_of(self, dim)
    if not dims or not self.dtype.is_floating_point:
        return None
    names = numbered("d", self.ndim)
    out = dtype or self.dtype

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        group, x = group_of(ctx, dims), wide(input.to(out))
        top = greatest(group, x, dims)
        none = top == -math.inf
        grown = (x - torch.where(none, torch.zeros_like(top), top)).exp()
        total = group.sum(grown.sum(dims, keepdim=True))
        return (grown / torch.where(none, torch.ones_like(total), total)).to(out)

    return Rule({self: names}, (names,), special=frozenset([names[dims[0]]]), local=local)
