"""Pooling: batch and channels are cut anyhow; over space a rank takes the rows that its windows look at.

Where an average has fewer rows than there are ranks, each adds what its rows give: a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.compat import NN_BUILTINS
from shardwise.rules.edges import Unempty, marked, nothing
from shardwise.rules.linalg import like_torch
from shardwise.rules.loss import bind
from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, some_empty
from shardwise.rules.registry import functions, rule
from shardwise.rules.stencil import Window, pieces

_MAX = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
_ADAPTIVE = ("input", "output_size", "return_indices")


def each(value: Any, count: int) -> list[int]:
    """A number for each dim."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def spatial_labels(
    x: Arg, dims: int, after: Sequence[int], *, sums: bool
) -> tuple[Labels, Labels, list[bool]]:
    """Labels before and after an op over the last dims, and on which of them too few rows come out.

    Args:
        x: The operand.
        dims: How many dims at the end are worked on.
        after: Their sizes in the result.
        sums: Whether the op is linear, so that few rows may be a pending sum.
    """
    lead = ("n", "c")[2 - (x.ndim - dims) :]
    first = x.ndim - dims
    few = [m < pieces(x, first + d) for d, m in enumerate(after)]
    before = tuple(
        f"s{d}" if x.layout.dims[first + d] and (sums or not less) else WHOLE
        for d, less in enumerate(few)
    )
    out = tuple(WHOLE if less else name for name, less in zip(before, few))
    return (*lead, *before), (*lead, *out), few


def spatial_rule(
    x: Arg, names: Labels, out: Labels, shapes: Any, local: Any, *, linear: bool, strides: Any
) -> Rule:
    """The rule of an op over space with a local program."""
    cut = frozenset(n for n in names if n.startswith("s"))
    return Rule(
        {x: names},
        (out,) * len(shapes),
        special=cut,
        divides=dict.fromkeys(cut, 0),
        linear=(frozenset([x]),) if linear else (),
        local=local,
        always_local=x.layout.has_empty(),
        out_shapes=tuple(shapes),
        out_strides=tuple(strides),
    )


def extended(ctx: Any, x: Tensor, few: Sequence[bool]) -> Tensor:
    """The piece among zeros in place of the other ranks' rows, on the dims of which few rows come out."""
    first = x.ndim - len(few)
    for d, less in enumerate(few):
        if less and f"s{d}" in ctx.axes:
            dim, start = first + d, ctx.ins[0].offsets[first + d]
            behind = ctx.ins[0].shape[dim] - start - x.shape[dim]
            x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), start, behind))
    return x


def flat_places(
    places: Tensor, local: Sequence[int], starts: Sequence[int], whole: Sequence[int]
) -> Tensor:
    """Places in a plane of local sizes as places in the whole plane."""
    out, scale = torch.zeros_like(places), 1
    for n, start, size in zip(reversed(local), reversed(starts), reversed(whole)):
        out += (places % n + start) * scale
        places = places.div(n, rounding_mode="floor")
        scale *= size
    return out


class _MaxPieces:
    """Maxima of windows that are partly here.

    Attributes:
        windows: One for each dim; its ``left`` is the padding.
        rest: Stride, padding, dilation and rounding.
        indices: Whether places are asked for.
    """

    __slots__ = ("indices", "rest", "windows")

    def __init__(self, windows: list[Window], rest: tuple[Any, ...], indices: bool) -> None:
        self.windows, self.rest, self.indices = windows, rest, indices

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Run on the piece."""
        x: Tensor = args[0] if args else kwargs["input"]
        n = len(self.windows)
        first, out = x.ndim - n, ctx.outs[0]
        kernel, stride, padding, dilation, ceil = self.rest
        pads, starts, cuts = list(padding), [0] * n, {}
        for d, window in enumerate(self.windows):
            if f"s{d}" not in ctx.axes:
                continue
            dim = first + d
            start, count = out.offsets[dim], out.local_shape[dim]
            x = ctx.near(x, dim, f"s{d}", window.need)
            before, behind = window.beyond(start, count)
            if behind:  # real rows come first, so that these win no tie
                x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, behind), value=_least(x.dtype))
            # The kernel's own padding at the front: windows count from the first then.
            cuts[dim] = (start if before else 0, count)
            pads[d] = window.left if before else 0
            starts[d] = window.need(start, count).start
        if 0 in out.local_shape:
            empty = nothing(out.local_shape, (x,), saved=True)
            return (
                (empty, torch.empty_like(empty, dtype=torch.int64)) if self.indices else empty
            )
        if not self.indices:
            y = getattr(torch, f"max_pool{n}d")(x, kernel, stride, pads, dilation, ceil)
            return _cut(y, cuts)
        y, places = getattr(F, f"max_pool{n}d_with_indices")(
            x, kernel, stride, pads, dilation, ceil
        )
        places = flat_places(places, x.shape[first:], starts, ctx.ins[0].shape[first:])
        return _cut(y, cuts), _cut(places, cuts)


def _least(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _cut(y: Tensor, cuts: dict[int, tuple[int, int]]) -> Tensor:
    for dim, (start, count) in cuts.items():
        if y.shape[dim] != count:
            y = y.narrow(dim, start, count)
    return y


class _AvgPieces:
    """Averages over windows that are partly here.

    Attributes:
        windows: One for each dim.
        few: On which dims the result is a pending sum.
        rest: Arguments.
    """

    __slots__ = ("few", "func", "rest", "windows")

    def __init__(
        self, func: Any, windows: list[Window], few: list[bool], rest: tuple[Any, ...]
    ) -> None:
        self.func, self.windows, self.few, self.rest = func, windows, few, rest

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run on the piece."""
        x: Tensor = args[0] if args else kwargs["input"]
        n = len(self.windows)
        first, out = x.ndim - n, ctx.outs[0]
        kernel, stride, padding, ceil, counted, divisor = self.rest
        x = extended(ctx, x, self.few)
        pads, scales = list(padding), []
        for d, window in enumerate(self.windows):
            if f"s{d}" not in ctx.axes or self.few[d]:
                continue
            dim = first + d
            start, count = out.offsets[dim], out.local_shape[dim]
            x = ctx.near(x, dim, f"s{d}", window.need)
            around = window.beyond(start, count)
            if any(around):
                x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), *around))
            pads[d] = 0
            if divisor is None:
                scales.append(_share(window, start, count, padding[d], counted, x, dim))
        if 0 in out.local_shape:
            return nothing(out.local_shape, (x,), saved=True)
        y = self.func(
            x, kernel, stride, pads, ceil, counted, *(() if divisor is None else (divisor,))
        )
        for scale in scales:
            if scale is not None:
                y = y * scale.to(y.dtype)
        return y


def _share(
    window: Window, start: int, count: int, pad: int, counted: bool, x: Tensor, dim: int
) -> Tensor | None:
    """What windows at the ends were divided by too much; None where all are full."""
    k, found = window.kernel, []
    for o in range(start, start + count):
        low = o * window.stride - pad
        high = min(low + k, window.size + pad)
        found.append(high - low if counted else min(high, window.size) - max(low, 0))
    if all(f == k for f in found):
        return None
    share = torch.tensor([k / f for f in found], dtype=torch.float64, device=x.device)
    return share.view(-1, *(1,) * (x.ndim - 1 - dim))


def _pool(func: Any, dims: int, *, largest: bool) -> None:
    """Register a pooling of the last ``dims`` dims."""

    def pool(*args: Any, **kwargs: Any) -> Rule | None:
        given = bind(_MAX if largest else _AVG, args, _renamed(kwargs))
        x = given["input"]
        if not isinstance(x, Arg) or x.ndim not in (dims + 1, dims + 2):
            return None
        results = like_torch(func, args, kwargs)
        if results is None or any(len(shape) != x.ndim for shape, *_ in results):
            return None
        kernel = each(given["kernel_size"], dims)
        stride = each(given.get("stride") or kernel, dims)
        padding, ceil = each(given.get("padding", 0), dims), given.get("ceil_mode", False)
        spread = each(given.get("dilation", 1), dims)
        if not len(kernel) == len(stride) == len(padding) == len(spread) == dims:
            return None
        shapes, strides = [r[0] for r in results], [r[1] for r in results]
        linear = not largest and x.dtype.is_floating_point
        names, out, few = spatial_labels(x, dims, shapes[0][-dims:], sums=linear)
        windows = [Window(*of) for of in zip(x.shape[-dims:], kernel, stride, spread, padding)]
        if largest:
            local: Any = _MaxPieces(
                windows, (kernel, stride, padding, spread, ceil), len(results) > 1
            )
        else:
            counted, divisor = (
                given.get("count_include_pad", True),
                given.get("divisor_override"),
            )
            if not linear:
                names = out = tuple(WHOLE if n.startswith("s") else n for n in names)
            local = _AvgPieces(
                func, windows, few, (kernel, stride, padding, ceil, counted, divisor)
            )
        return spatial_rule(x, names, out, shapes, local, linear=linear, strides=strides)

    rule(func)(pool)


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"input" if k == "self" else k: v for k, v in kwargs.items()}


class _AdaptivePieces:
    """Windows of unlike sizes, each whole on the rank that has its row of the result.

    Attributes:
        func: Takes a tensor and an output size.
        sizes: Of the result.
        few: On which dims the result is a pending sum.
        indices: Whether places come too.
    """

    __slots__ = ("few", "func", "indices", "sizes")

    def __init__(
        self, func: Any, sizes: tuple[int, ...], few: list[bool], indices: bool
    ) -> None:
        self.func, self.sizes, self.few, self.indices = func, sizes, few, indices

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Run on the piece."""
        x: Tensor = args[0] if args else kwargs["input"]
        n = len(self.sizes)
        first, out = x.ndim - n, ctx.outs[0]
        whole = ctx.ins[0].shape[first:]
        x = extended(ctx, x, self.few)
        size, starts, odd = list(self.sizes), [0] * n, []
        for d, (rows, made) in enumerate(zip(whole, self.sizes)):
            if f"s{d}" not in ctx.axes or self.few[d]:
                continue
            dim = first + d

            def need(start: int, count: int, rows: int = rows, made: int = made) -> range:
                return (
                    range(start * rows // made, -(-(start + count) * rows // made))
                    if count
                    else range(0)
                )

            size[d] = out.local_shape[dim]
            starts[d] = need(out.offsets[dim], size[d]).start
            x = ctx.near(x, dim, f"s{d}", need)
            if rows % made:
                odd.append((d, rows, made, out.offsets[dim]))
        if 0 in out.local_shape:
            empty = nothing(out.local_shape, (x,), saved=True)
            return (
                (empty, torch.empty_like(empty, dtype=torch.int64)) if self.indices else empty
            )
        return self.pool(x, size, starts, whole, odd)

    def pool(
        self, x: Tensor, size: list[int], starts: list[int], whole: Any, odd: list[Any]
    ) -> Any:
        """Dims whose windows are alike at once, the others row by row."""
        first = x.ndim - len(size)
        if odd:
            (d, rows, made, offset), *others = odd
            parts = []
            for o in range(offset, offset + size[d]):
                low, high = o * rows // made, -(-(o + 1) * rows // made)
                piece = x.narrow(first + d, low - starts[d], high - low)
                one = [*size[:d], 1, *size[d + 1 :]]
                at = [*starts[:d], low, *starts[d + 1 :]]
                parts.append(self.pool(piece, one, at, whole, others))
            if not self.indices:
                return torch.cat(parts, first + d)
            values, places = zip(*parts)
            return torch.cat(values, first + d), torch.cat(places, first + d)
        if not self.indices:
            # A mean, which has no gradient of its gradient, where one row comes out.
            return marked(self.func(x, size if len(size) > 1 else size[0]), [x])
        y, places = self.func(x, size if len(size) > 1 else size[0])
        return y, flat_places(places, x.shape[first:], starts, whole)


def _adaptive(func: Any, dims: int, *, largest: bool) -> None:
    pure = getattr(
        F, f"adaptive_max_pool{dims}d_with_indices" if largest else f"adaptive_avg_pool{dims}d"
    )

    def adaptive(*args: Any, **kwargs: Any) -> Rule | None:
        x = bind(_ADAPTIVE, args, _renamed(kwargs))["input"]
        if not isinstance(x, Arg) or x.ndim not in (dims + 1, dims + 2):
            return None
        results = like_torch(func, args, kwargs)
        if results is None or any(len(shape) != x.ndim for shape, *_ in results):
            return None
        shapes, strides = [r[0] for r in results], [r[1] for r in results]
        sizes = shapes[0][-dims:]
        if 0 in sizes:
            return None
        linear = not largest and x.dtype.is_floating_point
        names, out, few = spatial_labels(x, dims, sizes, sums=linear)
        indices = len(results) > 1
        call: Callable[..., Any] = (
            pure if indices or not largest else lambda x, size: pure(x, size)[0]
        )
        local = _AdaptivePieces(call, sizes, few if linear else [False] * dims, indices)
        return spatial_rule(x, names, out, shapes, local, linear=linear, strides=strides)

    rule(func)(adaptive)


def _aten(name: str) -> Sequence[Any]:
    return functions(f"aten.{name}") if hasattr(torch.ops.aten, name) else ()


for _d in (1, 2, 3):
    for _name in (f"max_pool{_d}d", f"max_pool{_d}d_with_indices"):
        for _f in (*functions(_name), *_aten(_name)):
            _pool(_f, _d, largest=True)
    for _f in (*functions(f"avg_pool{_d}d"), *_aten(f"avg_pool{_d}d")):
        _pool(_f, _d, largest=False)
    for _name in (f"adaptive_max_pool{_d}d", f"adaptive_max_pool{_d}d_with_indices"):
        for _f in (*functions(_name), *_aten(_name)):
            _adaptive(_f, _d, largest=True)
    for _name in (f"adaptive_avg_pool{_d}d", f"_adaptive_avg_pool{_d}d"):
        for _f in (*(functions(_name) if hasattr(F, _name) else ()), *_aten(_name)):
            _adaptive(_f, _d, largest=False)


@rule("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_backward(
    grad_output: Arg, self: Arg, kernel_size: Any, *args: Any, **kwargs: Any
) -> Rule | None:
    """``n c [p] [q], n c [h] [w], n c [p] [q] -> n c [h] [w]``; linear in the gradient that arrives."""
    given = bind(("stride", "padding", "dilation", "ceil_mode", "indices"), args, kwargs)
    places = given.get("indices")
    if not isinstance(places, Arg) or self.ndim not in (3, 4):
        return None
    if places.shape != grad_output.shape or grad_output.shape[:-2] != self.shape[:-2]:
        return None
    names = (*("n", "c")[4 - self.ndim :], WHOLE, WHOLE)
    ins = {grad_output: names, self: names, places: names}
    return Rule(
        ins,
        (names,),
        linear=(frozenset([grad_output]),),
        local=Unempty(saved=True),
        always_local=self.layout.has_empty(),
        out_shapes=(self.shape,),
    )


def _fractional_pieces(ctx: Any, x: Tensor, kernel: Any, size: Any, samples: Tensor) -> Any:
    shape = ctx.outs[0].local_shape
    if 0 not in shape:
        return ctx.func(x, kernel, size, samples)
    empty = nothing(shape, (x,), saved=True)
    return empty, torch.empty_like(empty, dtype=torch.int64)


def _fractional(func: Any, dims: int) -> None:
    """Register a pooling by windows at random places, which are an operand."""

    def fractional(
        self: Arg, kernel_size: Any, output_size: Any, random_samples: Arg
    ) -> Rule | None:
        """``n c [h] [w], n c [2] -> n c [p] [q]``, and the same of places."""
        if self.ndim not in (dims + 1, dims + 2) or random_samples.ndim != 3:
            return None
        results = like_torch(func, (self, kernel_size, output_size, random_samples), {})
        if results is None or len(results) != 2:
            return None
        batch = ("n",) * (self.ndim - dims - 1)
        names = (*batch, "c", *(WHOLE,) * dims)
        ins = {self: names, random_samples: (*(batch or (ONE,)), "c", WHOLE)}
        return Rule(
            ins,
            (names, names),
            local=_fractional_pieces,
            always_local=some_empty(ins),
            out_shapes=tuple(shape for shape, *_ in results),
            out_strides=tuple(stride for _, stride, _ in results),
        )

    rule(func)(fractional)


for _d in (2, 3):
    for _f in (
        getattr(NN_BUILTINS, f"fractional_max_pool{_d}d"),
        *_aten(f"fractional_max_pool{_d}d"),
    ):
        _fractional(_f, _d)
