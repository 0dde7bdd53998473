"""Convolutions: batch and output channels are cut anyhow, input channels with a pending sum, groups by group.

Over space a rank takes from its neighbours the rows that its windows look at, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import itertools
from itertools import pairwise
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.layout import boxes
from shardwise.layout.cut import Cut
from shardwise.rules.loss import bind
from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, numbered, without_empty
from shardwise.rules.registry import rule
from shardwise.rules.stencil import Spread, Window, pieces


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


def _alike(ins: dict[Arg, Labels], groups: int) -> bool:
    """Whether the channels of all operands are cut between the same groups, over whichever axes they are cut."""
    cut = {
        (arg, dim): groups_of // groups
        for arg, names in ins.items()
        for dim, name in enumerate(names)
        if name == "g"
        for groups_of in [arg.shape[dim]]
    }
    axes = tuple(dict.fromkeys(a for arg, dim in cut for a in arg.layout.dims[dim]))
    if any(isinstance(arg.layout.dims[dim], Cut) for arg, dim in cut):
        return False
    shape = next(iter(ins)).layout.mesh.shape
    if groups % math.prod(shape[a] for a in axes) == 0:
        return True
    sizes = [(arg.shape[dim], unit) for (arg, dim), unit in cut.items()]
    for count in range(1, len(axes) + 1):
        for some in itertools.permutations(axes, count):
            ranks = [shape[a] for a in some]
            for at in itertools.product(*map(range, ranks)):
                found = {
                    (start / unit, n / unit)
                    for size, unit in sizes
                    for start, n in [boxes.nested(size, ranks, at)]
                }
                if len(found) > 1 or any(x % 1 for pair in found for x in pair):
                    return False
    return True


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What a convolution does on each spatial dim.

    Attributes:
        stride: Steps.
        dilation: Steps inside the kernel.
        pads: Zeros before and after, of which a transposed convolution cuts off as many.
        extra: Rows that a transposed convolution adds at the end.
        groups: Groups of channels.
        transposed: Whether it is transposed.
    """

    stride: list[int]
    dilation: list[int]
    pads: list[tuple[int, int]]
    extra: list[int]
    groups: int
    transposed: bool

    def windows(self, input: Arg, weight: Arg) -> list[Window | Spread]:
        """One for each dim."""
        n = len(self.stride)
        kind = Spread if self.transposed else Window
        return [
            kind(size, k, s, d, pad[0])
            for size, k, s, d, pad in zip(
                input.shape[-n:], weight.shape[2:], self.stride, self.dilation, self.pads
            )
        ]


def _padding(padding: Any, kernel: Sequence[int], dilation: list[int]) -> list[tuple[int, int]]:
    n = len(kernel)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in ([0] * n if padding == "valid" else _each(padding, n))]


def _geometry(
    weight: Arg,
    stride: Any,
    padding: Any,
    dilation: Any,
    extra: Any,
    groups: int,
    transposed: bool,
) -> _Geometry:
    n = max(weight.ndim - 2, 1)
    spread = _each(dilation, n)
    pads = _padding(padding, weight.shape[2:], spread)
    return _Geometry(_each(stride, n), spread, pads, _each(extra, n), groups, transposed)


def _rule(
    input: Arg, weight: Arg, bias: Arg | None, sizes: list[int] | None, how: _Geometry
) -> Rule | None:
    """The rule of any convolution."""
    n, groups, transposed = weight.ndim - 2, how.groups, how.transposed
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
    at = len(batch)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if channels % groups or input.shape[at] % groups or weight.shape[0] % groups:
        return None
    spatial = numbered("s", n)
    # A result of fewer rows than ranks would make one rank work: each adds what its rows give instead.
    few = [size < pieces(input, at + 1 + d) for d, size in enumerate(sizes)]
    after = tuple(WHOLE if less else name for name, less in zip(spatial, few))
    kernel = (WHOLE,) * n
    i, o = ("i", "o") if groups == 1 else ("g", "g")
    into, out = (i, o) if groups == 1 else ((WHOLE, o) if not transposed else (i, WHOLE))
    ins = {
        input: (*batch, i, *spatial),
        weight: (*((into, out) if transposed else (out, into)), *kernel),
    }
    if bias is not None:
        ins[bias] = (o,)
    whole: frozenset[str] = frozenset()
    fetches = groups > 1 and not _alike(ins, groups)
    if fetches and transposed:
        whole = frozenset("g")
    elif fetches and not input.layout.dims[at]:
        ins[input] = (*batch, WHOLE, *spatial)
    shape = (*input.shape[:at], channels, *sizes)
    empty = without_empty(ins, ("n", "i", "o", "g"))
    divides = dict.fromkeys((*spatial, "g"), 0)
    return Rule(
        ins,
        ((*batch, o, *after),),
        whole=whole,
        special=frozenset((*spatial, "g", *empty)),
        divides=divides,
        linear=tuple(frozenset([x] if bias is None else [x, bias]) for x in (input, weight)),
        addends=frozenset() if bias is None else frozenset([bias]),
        local=_Pieces(how, how.windows(input, weight), few, at, channels // groups),
        out_shapes=(shape,),
        out_strides=(_strides(input, weight, shape),),
    )


def _edges(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Zero, with the edges of a convolution to its tensors, along which zeros flow back.

    Ranks that have something to convolve get gradients of gradients from that node, so a rank that has nothing needs
    the same one: a convolution of one zero, joined to no elements of each tensor.
    """
    zero = torch.zeros(
        (1, 1), dtype=dtype, device=x.device
    )  # two dims: cat drops an edge to no rows of one
    ends: list[Any] = [
        torch.cat([t.reshape(-1, 1)[:0].to(dtype), zero]).reshape(-1)
        for t in (x, weight, bias)
        if t is not None
    ]
    ends = [*ends, None]
    y = F.conv1d(ends[0].view(1, 1, 1), ends[1].view(1, 1, 1), ends[2])
    return y[:0].sum()


# By the number of spatial dims. `torch.convolution` knows no complex numbers.
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


class _Pieces:
    """The local program of one call: rows of the neighbours, then the convolution of what is here.

    Attributes:
        how: The geometry.
        windows: One for each spatial dim.
        few: On which dims each rank adds what its rows give to the whole result.
        at: The dim of the channels.
        ratio: Channels of the result for each group.
    """

    __slots__ = ("at", "few", "how", "ratio", "windows")

    def __init__(
        self,
        how: _Geometry,
        windows: list[Window | Spread],
        few: list[bool],
        at: int,
        ratio: int,
    ) -> None:
        self.how, self.windows, self.few, self.at, self.ratio = how, windows, few, at, ratio

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run on this rank's pieces."""
        given = bind(("input", "weight", "bias"), args[:3], kwargs)
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        at, out = self.at, ctx.outs[0]
        x, groups = self.channels(ctx, x, weight)
        pads: list[tuple[int, int]] = []
        cuts: list[tuple[int, int]] = []
        for d in range(len(self.windows)):
            x, pad, cut = self.along(ctx, x, d, at + 1 + d)
            pads.append(pad)
            cuts.append(cut)
        if 0 in out.local_shape or x.shape[at] == 0:
            return self.without(out.local_shape, x, weight, bias)
        extra = [0 if count >= 0 else e for e, (_, count) in zip(self.how.extra, cuts)]
        y = self.convolve(x, weight, bias, pads, extra, groups, out.offsets[at])
        for d, (start, count) in enumerate(cuts):
            if count >= 0 and y.shape[at + 1 + d] != count:
                y = y.narrow(at + 1 + d, start, count)
        return y

    def without(
        self, shape: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The result where it is empty, or where nothing goes into it but the bias."""
        kind = x.device.type
        cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
        made = torch.zeros(tuple(shape), dtype=dtype, device=x.device)
        if bias is not None:
            made = made + bias.to(dtype).view(-1, *(1,) * len(self.windows))
        return made + _edges(x, weight, bias, dtype)

    def channels(self, ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        """The channels that the result's need, and how many groups those are."""
        groups, at = self.how.groups, self.at
        if groups == 1 or "g" not in ctx.axes:
            return x, groups
        each, ratio = ctx.ins[0].shape[at] // groups, self.ratio

        def need(start: int, count: int) -> range:
            first, last = start // ratio, -(-(start + count) // ratio)
            return range(first * each, max(last, first) * each)

        if ctx.ins[0].layout.dims[at]:
            x = ctx.near(x, at, "g", need)
        else:
            rows = need(ctx.outs[0].offsets[at], ctx.outs[0].local_shape[at])
            x = x.narrow(at, rows.start, len(rows))
        return x, x.shape[at] // each

    def along(
        self, ctx: Any, x: Tensor, d: int, dim: int
    ) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
        """What the windows here look at on a dim, the zeros around it, and what to keep of the result."""
        window, whole = self.windows[d], (0, -1)
        if f"s{d}" not in ctx.axes:
            return x, self.how.pads[d], whole
        if self.few[d]:  # others' rows are zeros here
            start = ctx.ins[0].offsets[dim]
            return (
                _surround(x, dim, start, window.size - start - x.shape[dim]),
                self.how.pads[d],
                whole,
            )
        start, count = ctx.outs[0].offsets[dim], ctx.outs[0].local_shape[dim]
        x = ctx.near(x, dim, f"s{d}", window.need)
        if isinstance(window, Window):
            return _surround(x, dim, *window.beyond(start, count)), (0, 0), whole
        before, behind, cut = window.around(start, count)
        return _surround(x, dim, before, behind), (0, 0), (cut, count)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pads: list[tuple[int, int]],
        extra: list[int],
        groups: int,
        first: int,
    ) -> Tensor:
        """The convolution of rows that are all here; groups may be cut through at both ends."""
        how, at = self.how, self.at
        for d, (before, behind) in enumerate(pads):
            if before != behind:
                x, pads[d] = _surround(x, at + 1 + d, before, behind), (0, 0)

        def call(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
            padding = [p for p, _ in pads]
            if how.transposed:
                run = _TRANSPOSED[len(pads) - 1]
                return run(x, weight, bias, how.stride, padding, extra, groups, how.dilation)
            run = _CONVOLUTIONS[len(pads) - 1]
            return run(x, weight, bias, how.stride, padding, how.dilation, groups)

        ratio = self.ratio
        here = weight.shape[0]
        if how.transposed or how.groups == 1 or here == groups * ratio:
            return call(x, weight, bias, groups)
        each, first = x.shape[at] // groups, -first % ratio
        parts: list[Tensor] = []
        done = group = 0
        while done < here:
            if done == 0 and first:
                rows, count = min(first, here), 1
            elif here - done >= ratio:
                count = (here - done) // ratio
                rows = count * ratio
            else:
                rows, count = here - done, 1
            parts.append(
                call(
                    x.narrow(at, group * each, count * each),
                    weight.narrow(0, done, rows),
                    None if bias is None else bias.narrow(0, done, rows),
                    count,
                )
            )
            done, group = done + rows, group + count
        return torch.cat(parts, at)


def _surround(x: Tensor, dim: int, before: int, behind: int) -> Tensor:
    """Zeros before and after a dim."""
    if not before and not behind:
        return x
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), before, behind))


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
    how = _geometry(weight, stride, padding, dilation, 0, groups, False)
    return _rule(input, weight, bias, sizes, how)


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
    how = _geometry(weight, stride, padding, dilation, output_padding, groups, True)
    return _rule(input, weight, bias, sizes, how)


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
    how = _geometry(weight, stride, padding, dilation, output_padding, groups, transposed)
    return _rule(input, weight, bias, sizes, how)
