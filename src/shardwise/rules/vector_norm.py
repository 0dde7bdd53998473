"""Norms of vectors, and what is made of them: over a sharded dim, sums of powers or extrema meet.

Gradients are torch's also where the norm has none: zero at the zero vector, equal parts to all entries that
attain an infinity norm, on whatever rank they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.compat import direct_apply
from shardwise.rules.extremum import extremum
from shardwise.rules.notation import ONE, WHOLE, Arg, Rule, aligned, numbered
from shardwise.rules.pointwise import elementwise
from shardwise.rules.reduce import (
    dims_of,
    drop,
    group_of,
    is_inexact,
    kept,
    reduction,
    result_dtype,
    wide,
)
from shardwise.rules.registry import rule

_REAL_OF = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}


def norm_over(group: Any, x: Tensor, order: float, dims: Sequence[int]) -> Tensor:
    """The vector norm over all ranks of the group, dims kept; differentiable.

    Args:
        group: The ranks that share the reduction.
        x: This rank's piece, float32 or wider.
        order: Any real number, infinities included.
        dims: The dims that are reduced.
    """
    dims = tuple(dims)
    if order == 0:
        return group.sum(torch.linalg.vector_norm(x, 0, dims, keepdim=True))
    if math.isinf(order):
        return extremum(group, x.abs(), dims, "max" if order > 0 else "min", nans=True)
    grad = x.requires_grad and torch.is_grad_enabled()
    if order == 2 and grad:
        return _length(x, group, dims)
    if not grad and order >= 1:
        part = torch.linalg.vector_norm(x, order, dims, keepdim=True)
        total = group.sum(part.pow(order))
    else:  # powers of entries: the norm of a piece that is zero would have no second derivative
        total = group.sum(_powers(x, order).sum(dims, keepdim=True))
    return total if order == 1 else _root(total, order)


class _Length(torch.autograd.Function):
    """The Euclidean norm; at the zero vector its gradient is zero and its second one NaN, as torch's is."""

    @staticmethod
    def forward(x: Tensor, group: Any, dims: tuple[int, ...]) -> Tensor:
        part = torch.linalg.vector_norm(x, 2, dims, keepdim=True)
        return group.reduce(part.square(), "sum").sqrt() if group.size > 1 else part

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, size = ctx.saved_tensors
        return ctx.group.sum(grads[0]) * (x / size).masked_fill(size == 0, 0), None, None


_length = direct_apply(_Length)


def _powers(x: Tensor, order: float) -> Tensor:
    size = x.abs()
    if order >= 1:
        return size if order == 1 else size.pow(order)
    zero = size == 0  # the power has an infinite slope there, and torch takes zero
    powers = torch.where(zero, torch.ones_like(size), size).pow(order)
    return torch.where(zero, 0.0 if order > 0 else math.inf, powers)


def _root(total: Tensor, order: float) -> Tensor:
    """``total ** (1 / order)``, with gradient zero where that is zero."""
    zero = total == 0 if order > 0 else total == math.inf
    return torch.where(
        zero,
        torch.zeros_like(total),
        torch.where(zero, torch.ones_like(total), total).pow(1 / order),
    )


def vector_norm(
    input: Arg, order: Any, dims: Sequence[int], keepdim: bool, dtype: Any
) -> Rule | None:
    """A norm over any dims: local where they are whole; of order 0 or 1 a pending sum."""
    if not isinstance(order, (int, float)) or not is_inexact(dtype or input.dtype):
        return None
    if (order < 0 or order == math.inf) and 0 in [input.shape[d] for d in dims]:
        return None
    out = result_dtype(input, dtype, lambda x: torch.linalg.vector_norm(x, 2))
    out = _REAL_OF.get(out, out)

    adds_up = order in (0, 1) or not input.layout.numel

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        x = wide(input if dtype is None else input.to(dtype))
        if adds_up:
            return torch.linalg.vector_norm(x, order, dims, keepdim).to(out)
        return drop(norm_over(group_of(ctx, dims), x, order, dims), dims, keepdim).to(out)

    op = "sum" if adds_up else "none"
    return reduction(input, dims, keepdim, local=local, op=op)


@rule("vector_norm", "aten.linalg_vector_norm")
def linalg_vector_norm(
    input: Arg,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **more: Any,
) -> Rule | None:
    """Every order."""
    dims = dims_of(input, dim, more)
    return None if dims is None else vector_norm(input, ord, dims, keepdim, dtype)


@rule(torch.norm, torch.Tensor.norm)
def norm(
    input: Arg,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Rule | None:
    """The older form: a vector norm, unless it is nuclear."""
    dims = dims_of(input, dim)
    if dims is None or p == "nuc":
        return None
    if p == "fro" and dim is not None and len(dims) > 2:
        return None
    return vector_norm(input, 2 if p is None or p == "fro" else p, dims, keepdim, dtype)


@rule(
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
    "aten.norm.ScalarOpt_dtype",
)
def aten_norm(
    self: Arg, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Rule | None:
    """The op behind it."""
    dims = dims_of(self, dim)
    return (
        None if dims is None else vector_norm(self, 2 if p is None else p, dims, keepdim, dtype)
    )


@rule(torch.linalg.norm, "aten.linalg_norm")
def linalg_norm(
    input: Arg,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **more: Any,
) -> Rule | None:
    """A vector norm without an order, or over one dim; else a matrix norm."""
    dims = dims_of(input, dim, more)
    if dims is None:
        return None
    if ord is None:
        return vector_norm(input, 2, dims, keepdim, dtype)
    if len(dims) == 1 and not isinstance(ord, str):
        return vector_norm(input, ord, dims, keepdim, dtype)
    return _matrix_norm(input, ord, dims, keepdim, dtype) if len(dims) == 2 else None


@rule(torch.linalg.matrix_norm, "aten.linalg_matrix_norm")
def linalg_matrix_norm(
    input: Arg,
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **more: Any,
) -> Rule | None:
    """Frobenius is a vector norm; the others need whole matrices."""
    dims = dims_of(input, dim, more)
    return (
        None
        if dims is None or len(dims) != 2
        else _matrix_norm(input, ord, dims, keepdim, dtype)
    )


def _matrix_norm(
    input: Arg, order: Any, dims: tuple[int, ...], keepdim: bool, dtype: Any
) -> Rule | None:
    if order == "fro":
        return vector_norm(input, 2, dims, keepdim, dtype)
    if 0 in input.shape:
        return None
    names = tuple(WHOLE if d in dims else n for d, n in enumerate(numbered("d", input.ndim)))
    return Rule({input: names}, (kept(names, dims, keepdim),))


# -- made of norms --------------------------------------------------------------------------------
@rule(F.normalize)
def normalize(
    input: Arg, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None
) -> Rule | None:
    """``x / max(norm, eps)``."""
    dims = dims_of(input, dim)
    if dims is None or not isinstance(p, (int, float)) or not is_inexact(input.dtype):
        return None
    if (p < 0 or p == math.inf) and 0 in [input.shape[d] for d in dims]:
        return None
    names = numbered("d", input.ndim)

    def local(
        ctx: Any, input: Tensor, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None
    ) -> Tensor:
        size = norm_over(group_of(ctx, dims), wide(input), p, dims).to(
            _REAL_OF.get(input.dtype, input.dtype)
        )
        return input / size.clamp_min(eps)

    return Rule(
        {input: names}, (names,), special=frozenset(names[d] for d in dims), local=local
    )


@rule("cosine_similarity", "aten.cosine_similarity")
def cosine_similarity(x1: Arg, x2: Arg, dim: Any = 1, eps: Any = 1e-8) -> Rule | None:
    """A pending sum of products of what the two norms divide."""
    made = elementwise([x1, x2])
    shape = made.out_shapes[0] if made.out_shapes else ()
    n = len(shape)
    if (
        type(dim) is not int
        or not -n <= dim < n
        or not (is_inexact(x1.dtype) and x1.dtype == x2.dtype)
    ):
        return None
    if x1.dtype.is_complex:
        return None
    d = dim % n
    names = made.outs[0]

    def local(ctx: Any, x1: Tensor, x2: Tensor, dim: Any = 1, eps: Any = 1e-8) -> Tensor:
        group = group_of(ctx, (d,))
        shape = torch.broadcast_shapes(x1.shape, x2.shape)
        parts = []
        for x in (wide(x1.expand(shape)), wide(x2.expand(shape))):
            size = norm_over(group, x, 2, (d,)).clone()
            with torch.no_grad():  # torch lets the gradient through the bound
                size.clamp_min_(eps)
            parts.append(x / size)
        return (parts[0] * parts[1]).sum(d).to(x1.dtype)

    # A size-one side is expanded; where the other is sharded its norm would count this rank's part only.
    stretched = x1.ndim != n or x2.ndim != n or x1.shape[d - n] != x2.shape[d - n]
    return Rule(
        made.ins,
        (kept(names, (d,), False),),
        special=frozenset() if stretched else frozenset([names[d]]),
        whole=frozenset([names[d]]) if stretched else frozenset(),
        local=local,
        out_shapes=(tuple(s for i, s in enumerate(shape) if i != d),),
    )


@rule("pairwise_distance", "aten.pairwise_distance")
def pairwise_distance(
    x1: Arg, x2: Arg, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False
) -> Rule | None:
    """The norm of the difference along the last dim."""
    made = elementwise([x1, x2])
    shape = made.out_shapes[0] if made.out_shapes else ()
    if (
        not shape
        or not isinstance(p, (int, float))
        or not (is_inexact(x1.dtype) and x1.dtype == x2.dtype)
    ):
        return None
    if shape[-1] == 0:
        return None
    d = len(shape) - 1
    names = made.outs[0]

    def local(
        ctx: Any, x1: Tensor, x2: Tensor, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False
    ) -> Tensor:
        size = norm_over(group_of(ctx, (d,)), wide(x1 - x2 + eps), p, (d,))
        return drop(size, (d,), keepdim).to(_REAL_OF.get(x1.dtype, x1.dtype))

    out_shape = (*shape[:-1], 1) if keepdim else shape[:-1]
    return Rule(
        made.ins,
        (kept(names, (d,), keepdim),),
        reduce={names[d]: "none"},
        special=frozenset([names[d]]),
        local=local,
        out_shapes=(out_shape,),
    )


@rule("dist", "aten.dist")
def dist(input: Arg, other: Arg, p: Any = 2) -> Rule | None:
    """The norm of the difference over all dims."""
    made = elementwise([input, other])
    shape = made.out_shapes[0] if made.out_shapes else ()
    if (
        not isinstance(p, (int, float))
        or not (is_inexact(input.dtype) and input.dtype == other.dtype)
        or 0 in shape
    ):
        return None
    names, dims = made.outs[0], tuple(range(len(shape)))

    def local(ctx: Any, input: Tensor, other: Tensor, p: Any = 2) -> Tensor:
        size = norm_over(group_of(ctx, dims), wide(input - other), p, dims)
        return drop(size, dims, False).to(_REAL_OF.get(input.dtype, input.dtype))

    return Rule(
        made.ins,
        ((),),
        reduce=dict.fromkeys(names, "none"),
        special=frozenset(names),
        local=local,
        out_shapes=((),),
    )


@rule("renorm", "aten.renorm")
def renorm(input: Arg, p: Any, dim: Any, maxnorm: Any) -> Rule | None:
    """Rows of a dim that are longer than ``maxnorm`` are made that long."""
    if input.ndim < 2 or type(dim) is not int or not -input.ndim <= dim < input.ndim:
        return None
    if not isinstance(p, (int, float)) or p <= 0 or not is_inexact(input.dtype):
        return None
    if not isinstance(maxnorm, (int, float)) or maxnorm < 0:
        return None
    names = numbered("d", input.ndim)
    dims = tuple(d for d in range(input.ndim) if d != dim % input.ndim)

    def local(ctx: Any, input: Tensor, p: Any, dim: Any, maxnorm: Any) -> Tensor:
        size = norm_over(group_of(ctx, dims), wide(input), p, dims)
        ratio = torch.where(size > maxnorm, maxnorm / (size + 1e-7), torch.ones_like(size))
        return (input * ratio).to(input.dtype)

    return Rule(
        {input: names}, (names,), special=frozenset(names[d] for d in dims), local=local
    )


# -- weight norm ----------------------------------------------------------------------------------
@rule("_weight_norm", "aten._weight_norm")
def weight_norm(v: Arg, g: Arg, dim: Any = 0) -> Rule | None:
    """``v * (g / norm of v over all dims but one)``."""
    names = numbered("d", v.ndim)
    if dim == -1:
        dims = tuple(range(v.ndim))
        labels: tuple[str, ...] = (ONE,) * g.ndim
        if g.ndim:
            return None
    elif type(dim) is int and 0 <= dim < v.ndim and g.ndim == v.ndim:
        dims = tuple(d for d in range(v.ndim) if d != dim)
        labels = aligned(g, names)
    else:
        return None

    def local(ctx: Any, v: Tensor, g: Tensor, dim: Any = 0) -> Tensor:
        size = norm_over(group_of(ctx, dims), wide(v), 2, dims)
        return v * (g / (drop(size, dims, False) if dim == -1 else size).to(v.dtype))

    special = frozenset(names[d] for d in dims)
    cut = v.layout.is_sharded or g.layout.is_sharded  # torch's kernel dies of an empty piece
    return Rule({v: names, g: labels}, (names,), special=special, local=local, always_local=cut)


@rule("norm_except_dim", "aten.norm_except_dim")
def norm_except_dim(v: Arg, pow: Any = 2, dim: Any = 0) -> Rule | None:
    """The norm over all dims but one."""
    if dim == -1:
        return vector_norm(v, pow, tuple(range(v.ndim)), False, None)
    if type(dim) is not int or not 0 <= dim < v.ndim or 0 in v.shape:
        return None
    dims = tuple(d for d in range(v.ndim) if d != dim)
    made = vector_norm(v, pow, dims, True, None)
    if made is None or not v.layout.has_empty():
        return made
    return replace(made, always_local=True)
