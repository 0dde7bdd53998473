"""Losses of elements or of rows, cut anyhow.

A sum leaves a pending sum, and so does a mean, which divides the local sum by the global count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import inspect
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, aligned, numbered
from shardwise.rules.registry import functions, rule

Names = tuple[str, ...]
_INTS = {0: "none", 1: "mean", 2: "sum"}
HALVES = (torch.float16, torch.bfloat16)


def parameter_names(func: Any) -> Names:
    """Parameter names of a Python function or an ATen overload."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return tuple(a.name for a in schema.arguments)
    return tuple(inspect.signature(func).parameters)


def bind(names: Names, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    return dict(zip(names, args)) | kwargs


def reduction_of(given: dict[str, Any]) -> str:
    """The reduction that a loss is asked for, in its old and new spellings."""
    average, reduce = given.get("size_average"), given.get("reduce")
    if average is None and reduce is None:
        asked = given.get("reduction", "mean")
        return _INTS.get(asked, "?") if isinstance(asked, int) else asked
    if reduce is None or reduce:
        return "mean" if average is None or average else "sum"
    return "none"


def with_reduction(
    names: Names, args: Sequence[Any], kwargs: dict[str, Any], asked: str
) -> tuple[list[Any], dict[str, Any]]:
    """The same call with another reduction."""
    args, kwargs = list(args), dict(kwargs)
    at = names.index("reduction")
    by_number = "size_average" not in names and isinstance(
        args[at]
        if at < len(args)
        else kwargs.get("reduction", 1 if names[0] == "self" else ""),
        int,
    )
    value: Any = {"none": 0, "sum": 2}[asked] if by_number else asked
    for old in ("size_average", "reduce"):
        kwargs.pop(old, None)
        if old in names and names.index(old) < len(args):
            args[names.index(old)] = None
    if at < len(args):
        args[at] = value
    else:
        kwargs["reduction"] = value
    return args, kwargs


def divided(loss: Callable[[str], Tensor], count: Any, dtype: torch.dtype) -> Tensor:
    """A local sum over a global count; halves are summed as floats, for a sum may leave their range."""
    if dtype in HALVES:
        each = loss("none")
        return (each.sum(dtype=torch.float32) / count).to(each.dtype)
    return loss("sum") / count


def reduced_loss(
    func: Any,
    ins: dict[Arg, Labels],
    out: Labels,
    shape: tuple[int, ...],
    names: Names,
    reduction: str,
    *,
    weight: Arg | None = None,
    factor: Arg | None = None,
    sums_empty: bool = True,
) -> Rule | None:
    """The rule of a loss that has one value for each index of ``out``, reduced as asked.

    Args:
        func: What to call with another reduction.
        ins: Labels of the operands.
        out: Labels of the unreduced loss.
        shape: Its global shape.
        names: Parameter names of ``func``.
        reduction: "none", "mean", "sum", or "batchmean".
        weight: Weights whose sum the mean is divided by, in place of the number of elements.
        factor: An argument that each value is a multiple of: it may be a pending sum.
        sums_empty: Whether ``func`` sums an empty batch to zero.
    """
    linear = () if factor is None or factor is weight else (frozenset([factor]),)
    if reduction == "none":
        return Rule(ins, (out,), linear=linear, out_shapes=(shape,))
    if reduction not in ("mean", "sum", "batchmean"):
        return None
    count = shape[0] if reduction == "batchmean" and shape else math.prod(shape)
    dtype = next(iter(ins)).dtype
    factors = frozenset(n for labels in ins.values() for n in labels if n not in (".", "1"))

    def local(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        def loss(asked: str) -> Tensor:
            if asked == "sum" and not sums_empty:
                return loss("none").sum()
            asked_args, asked_kwargs = with_reduction(names, args, kwargs, asked)
            return func(*asked_args, **asked_kwargs)

        if reduction == "sum":
            return loss("none").sum()
        if weight is None:
            return divided(loss, count, dtype)
        total = bind(names, args, kwargs)["weight"].sum()
        return divided(
            loss, ctx.group(*(n for n in ctx.axes if n in ins[weight])).sum(total), dtype
        )

    special = frozenset() if reduction == "sum" and sums_empty else factors
    return Rule(ins, ((),), special=special, linear=linear, local=local, out_shapes=((),))


def _in_order(given: dict[str, Any]) -> list[Arg]:
    return [x for x in given.values() if isinstance(x, Arg)]


def _elementwise(func: Any, *, same: bool = False, weighted: bool = False) -> None:
    """Register a loss of elements.

    Args:
        func: The function.
        same: Input and target must have one shape.
        weighted: A mean divides by the sum of the weights, which have the shape of the input.
    """
    names = parameter_names(func)

    def elements(*args: Any, **kwargs: Any) -> Rule | None:
        given = bind(names, args, kwargs)
        operands = _in_order(given)
        weight = given.get("weight")
        if not isinstance(operands[0], Arg) or len(operands) < 2:
            return None
        if (same and operands[0].shape != operands[1].shape) or (
            weighted and weight is not None and weight.shape != operands[0].shape
        ):
            return None
        shape = tuple(torch.broadcast_shapes(*(a.shape for a in operands)))
        out = numbered("d", len(shape))
        ins = {a: aligned(a, out) for a in operands}
        how = reduction_of(given)
        return reduced_loss(
            func,
            ins,
            out,
            shape,
            names,
            how,
            weight=weight if weighted and how == "mean" else None,
            factor=weight,
        )

    rule(func, lifts=True)(elements)


for _name in (
    "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "poisson_nll_loss",
):  # fmt: skip
    for _f in (getattr(F, _name), *functions(f"aten.{_name}.default")):
        _elementwise(_f)
for _name in ("mse_loss", "l1_loss"):
    for _f in (getattr(F, _name), *functions(f"aten.{_name}.default")):
        _elementwise(_f, weighted=True)
for _name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
    for _f in (getattr(F, _name), *functions(f"aten.{_name}.default")):
        _elementwise(_f, same=True)


@rule(F.gaussian_nll_loss, lifts=True)
def gaussian_nll_loss(
    input: Arg,
    target: Arg,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Rule | None:
    """Of elements; the variance may lack the last dim, or have size one on one dim."""
    shape = tuple(torch.broadcast_shapes(input.shape, target.shape))
    if shape != input.shape:
        return None
    out = numbered("d", len(shape))
    ins = {input: out, target: aligned(target, out)}
    if isinstance(var, Arg):
        if var.shape == shape[:-1] and var.ndim == len(shape) - 1:
            ins[var] = out[:-1]
        elif var.ndim == len(shape):
            if any(v not in (n, 1) for v, n in zip(var.shape, shape)):
                return None
            if var.shape != shape and sum(v for v, n in zip(var.shape, shape) if v != n) != 1:
                return None
            ins[var] = aligned(var, out)
        else:
            return None
    names = parameter_names(F.gaussian_nll_loss)
    return reduced_loss(F.gaussian_nll_loss, ins, out, shape, names, reduction)


def _of_rows(func: Any, count: int, *, sums_empty: bool = True) -> None:
    """Register a loss of rows: the last dim of the first ``count`` operands is worked on whole."""
    names = parameter_names(func)

    def rows(*args: Any, **kwargs: Any) -> Rule | None:
        given = bind(names, args, kwargs)
        operands = _in_order(given)
        heads, rest = operands[:count], operands[count:]
        if len(heads) < count or any(a.ndim == 0 for a in heads):
            return None
        shape = tuple(torch.broadcast_shapes(*(a.shape for a in heads)))[:-1]
        out = numbered("d", len(shape))
        ins: dict[Arg, Labels] = {a: (*aligned_head(a, out), WHOLE) for a in heads}
        for a in rest:
            name = next(k for k, v in given.items() if v is a)
            if name == "weight":
                if a.ndim > len(out) + 1:
                    return None
                ins[a] = aligned(a, (*out, WHOLE), (*shape, heads[0].shape[-1]))
            elif a.shape == shape:
                ins[a] = out
            else:
                return None
        return reduced_loss(
            func,
            ins,
            out,
            shape,
            names,
            reduction_of(given),
            factor=given.get("weight"),
            sums_empty=sums_empty,
        )

    rule(func, lifts=True)(rows)


def aligned_head(arg: Arg, names: Labels) -> Labels:
    """Labels of all dims but the last, which broadcast to ``names``."""
    tail = names[len(names) - (arg.ndim - 1) :]
    return tuple("1" if n == 1 else name for n, name in zip(arg.shape, tail))


for _name, _count, _sums in (
    ("cosine_embedding_loss", 2, True),
    ("triplet_margin_loss", 3, True),
    (
        "multi_margin_loss",
        1,
        False,
    ),  # the kernels leave the sum of an empty batch as they found it
    ("multilabel_margin_loss", 2, False),
):
    for _f in (getattr(F, _name), *functions(f"aten.{_name}.default")):
        _of_rows(_f, _count, sums_empty=_sums)
_of_rows(F.multilabel_soft_margin_loss, 2)
