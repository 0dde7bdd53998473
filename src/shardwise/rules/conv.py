"""Convolutions: batch and output channels are cut anyhow, input channels with a pending sum, groups by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import boxes
from shardwise.rules.notation import WHOLE, Arg, Labels, Rule
from shardwise.rules.registry import rule


def without_empty(ins: dict[Arg, Labels], factors: Sequence[str]) -> frozenset[str]:
    """Those of the factors that must be whole, because some rank's piece would be empty: the kernel fails there.

    Looks at all axes that cut a factor in some operand, which is at least what will be cut.
    """
    bad: set[str] = set()
    for factor in factors:
        where = [
            (arg, dim)
            for arg, names in ins.items()
            for dim, n in enumerate(names)
            if n == factor
        ]
        axes = tuple(dict.fromkeys(a for arg, dim in where for a in arg.layout.dims[dim]))
        if not axes:
            continue
        sizes = [where[0][0].layout.mesh.shape[a] for a in axes]
        last = [k - 1 for k in sizes]
        if any(boxes.nested(arg.shape[dim], sizes, last)[1] == 0 for arg, dim in where):
            bad.add(factor)
    return frozenset(bad)


def _each(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _sizes(
    input: Arg, weight: Arg, stride: Any, padding: Any, dilation: Any
) -> list[int] | None:
    """Spatial sizes of a convolution's result."""
    n = weight.ndim - 2
    steps, spread, kernel = _each(stride, n), _each(dilation, n), weight.shape[2:]
    if padding == "same":
        return list(input.shape[-n:])
    pads = [0] * n if padding == "valid" else _each(padding, n)
    if not len(steps) == len(spread) == len(pads) == n:
        return None
    return [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(input.shape[-n:], pads, spread, kernel, steps)
    ]


def _sizes_transposed(
    input: Arg, weight: Arg, stride: Any, padding: Any, extra: Any, dilation: Any
) -> list[int] | None:
    n = weight.ndim - 2
    steps, pads, more, spread = (_each(v, n) for v in (stride, padding, extra, dilation))
    if not len(steps) == len(spread) == len(pads) == len(more) == n:
        return None
    return [
        (size - 1) * s - 2 * p + d * (k - 1) + o + 1
        for size, s, p, o, d, k in zip(
            input.shape[-n:], steps, pads, more, spread, weight.shape[2:]
        )
    ]


def _strides(input: Arg, weight: Arg, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Channels come last in memory if they do in the input or in the weight."""
    if len(shape) not in (4, 5) or input.ndim != weight.ndim:
        return None
    order = (0, *range(2, len(shape)), 1)
    for arg in (input, weight):
        last = arg.layout.stride[1] == 1 and not arg.layout.is_contiguous
        if last and all(
            arg.layout.stride[a] >= arg.layout.stride[b] for a, b in pairwise(order)
        ):
            return boxes.restride(
                shape, [len(shape) - order.index(d) for d in range(len(shape))]
            )
    return None


def _rule(
    input: Arg,
    weight: Arg,
    bias: Arg | None,
    sizes: list[int] | None,
    groups: int,
    transposed: bool,
    regroup: Callable[..., Tensor],
) -> Rule | None:
    """The rule of any convolution; ``regroup(ctx, groups, args, kwargs)`` calls it with other groups."""
    n = weight.ndim - 2
    if (
        sizes is None
        or n < 1
        or input.ndim not in (n + 1, n + 2)
        or min(sizes) <= 0
        or groups < 1
    ):
        return None
    if bias is not None and bias.ndim != 1:
        return None
    batch = ("n",) if input.ndim == n + 2 else ()
    spatial = (WHOLE,) * n
    one = groups == 1
    i, o = ("i", "o") if one else ("g", "g")
    into, out = (i, o) if one else ((WHOLE, o) if not transposed else (i, WHOLE))
    ins = {
        input: (*batch, i, *spatial),
        weight: (*((into, out) if transposed else (out, into)), *spatial),
    }
    if bias is not None:
        ins[bias] = (o,)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    shape = (*input.shape[: len(batch)], channels, *sizes)
    names = (*batch, o, *spatial)
    strides = (_strides(input, weight, shape),)
    if not one:

        def local(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
            pieces = math.prod(ctx.mesh.shape[a] for a in ctx.axes["g"])
            return regroup(ctx, groups // pieces, args, kwargs)

        return Rule(
            ins,
            (names,),
            special=frozenset(("g",)),
            divides={"g": groups},
            local=local,
            out_shapes=(shape,),
            out_strides=strides,
        )
    together = [frozenset([x] if bias is None else [x, bias]) for x in (input, weight)]
    return Rule(
        ins,
        (names,),
        whole=without_empty(ins, ("i", "o")),
        linear=tuple(together),
        addends=frozenset() if bias is None else frozenset([bias]),
        out_shapes=(shape,),
        out_strides=strides,
    )


def _regroup_at(position: int) -> Callable[..., Tensor]:
    """Call again with other groups, which is the argument at a position, or named."""

    def regroup(ctx: Any, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if len(args) > position:
            args = (*args[:position], count, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "groups": count}
        return ctx.func(*args, **kwargs)

    return regroup


_SEVENTH, _NINTH = _regroup_at(6), _regroup_at(8)


@rule("conv1d", "conv2d", "conv3d", *(f"aten.conv{d}d" for d in (1, 2, 3)))
def conv(
    input: Arg,
    weight: Arg,
    bias: Arg | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Rule | None:
    """``n i [s], o i [k], o -> n o [s]``."""
    sizes = _sizes(input, weight, stride, padding, dilation)
    return _rule(input, weight, bias, sizes, groups, False, _SEVENTH)


@rule(
    *(f"conv_transpose{d}d" for d in (1, 2, 3)),
    "aten.conv_transpose1d", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
)  # fmt: skip
def conv_transpose(
    input: Arg,
    weight: Arg,
    bias: Arg | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Rule | None:
    """``n i [s], i o [k], o -> n o [s]``."""
    sizes = _sizes_transposed(input, weight, stride, padding, output_padding, dilation)
    return _rule(input, weight, bias, sizes, groups, True, _SEVENTH)


@rule("aten.convolution.default", torch.convolution)
def convolution(
    input: Arg,
    weight: Arg,
    bias: Arg | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Rule | None:
    """Both, as ATen has it."""
    if transposed:
        sizes = _sizes_transposed(input, weight, stride, padding, output_padding, dilation)
    else:
        sizes = _sizes(input, weight, stride, padding, dilation)
    return _rule(input, weight, bias, sizes, groups, transposed, _NINTH)
