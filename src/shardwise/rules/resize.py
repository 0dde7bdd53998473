"""Resizing: batch and channels are cut anyhow; over space a rank takes the rows that its own are made of.

Along one dim every row of the result is a sum of few rows of the input. Which, and with what weights, torch
itself is asked, once, with rows that are zero but for one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.rules.edges import nothing
from shardwise.rules.linalg import like_torch
from shardwise.rules.notation import WHOLE, Arg, Rule
from shardwise.rules.pool import each, spatial_rule
from shardwise.rules.reduce import wide
from shardwise.rules.registry import rule
from shardwise.rules.stencil import pieces

MOST = 2**28  # weights (most of them zero) that are worth to be asked for
_ROWS = 256  # of so many at a time
_PLANE = ("bilinear", "bicubic", "lanczos")  # that torch has for two dims only
_ALONG_ONE = {"bilinear": "linear", "trilinear": "linear"}


class Taps:
    """One dim of a resize: row ``o`` of the result is the sum of ``weights[o, t] * input[places[o, t]]``.

    Attributes:
        places: Rows of the input, ascending; where there are fewer than elsewhere, the last again.
        weights: Zero for those.
    """

    __slots__ = ("_on", "places", "weights")

    def __init__(self, places: Tensor, weights: Tensor) -> None:
        self.places, self.weights = places, weights
        self._on: dict[Any, tuple[Tensor, Tensor]] = {}

    def need(self, start: int, count: int) -> range:
        """The rows that a piece of the result is made of."""
        rows = self.places[start : start + count]
        return range(int(rows.min()), int(rows.max()) + 1) if count else range(0)

    def __call__(self, x: Tensor, dim: int, start: int, count: int) -> Tensor:
        """A piece of the result, from the rows that it needs."""
        key = (start, count, x.device, x.dtype)
        if key not in self._on:
            places = self.places[start : start + count] - self.need(start, count).start
            weights = self.weights[start : start + count].to(x.device, x.dtype)
            self._on[key] = places.to(x.device), weights
        places, weights = self._on[key]
        if places.shape[1] == 1 and bool((self.weights == 1).all()):
            return x.index_select(dim, places[:, 0])
        column = (-1, *(1,) * (x.ndim - 1 - dim))
        parts = [
            x.index_select(dim, places[:, t]) * weights[:, t].view(column)
            for t in range(places.shape[1])
        ]
        return functools.reduce(torch.add, parts)


@functools.lru_cache(maxsize=256)
def taps(n: int, mode: str, dtype: torch.dtype, device: str, **more: Any) -> Taps | None:
    """Ask torch how it resizes a dim of ``n`` rows; None if it refuses.

    Args:
        n: Rows of the input.
        mode: As ``interpolate`` takes it for one dim; for "bicubic" and with ``antialias`` for two.
        dtype: In which the input is read.
        device: Where.
        **more: ``interpolate``'s other arguments for this dim.
    """
    plane = mode in _PLANE
    if plane:  # beside a dim that stays as it is; of size two, for torch goes wrong at one
        beside = {"size": 2, "scale_factor": 1.0}
        more |= {k: (more[k], v) for k, v in beside.items() if more.get(k) is not None}
    entries: list[tuple[Tensor, Tensor, Tensor]] = []
    length = 0
    for first in range(0, n, _ROWS):
        count = min(_ROWS, n - first)
        rows = torch.zeros(1, count, n, dtype=dtype, device=device)
        rows[0, range(count), range(first, first + count)] = 1
        try:
            with torch.no_grad():
                if plane:
                    rows = rows[..., None].repeat(1, 1, 1, 2)
                got = F.interpolate(rows, mode=mode, **more)
        except (RuntimeError, ValueError, NotImplementedError):
            return None
        got = (got[0, :, :, 0] if plane else got[0]).T.cpu()
        length = len(got)
        to, of = got.nonzero(as_tuple=True)
        entries.append((to, of + first, got[to, of]))
    to, of, weight = (torch.cat(parts) for parts in zip(*entries))
    to, order = to.sort(stable=True)
    counts = torch.bincount(to, minlength=length)
    begins = counts.cumsum(0) - counts
    place = torch.arange(len(to)) - begins[to]
    width = int(counts.max())
    last = of[order][(begins + counts - 1).clamp(min=0)]
    places, weights = last[:, None].repeat(1, width), torch.zeros(length, width, dtype=dtype)
    places[to, place], weights[to, place] = of[order], weight[order]
    return Taps(places, weights)


class _Resized:
    """A resize of pieces: dims that are cut by their taps, the others as torch does it.

    Attributes:
        taps: For each dim of space that is cut.
        sizes: Sizes of the result's space, where they were given.
        scales: Scale factors, where they were given.
        rest: Further arguments.
    """

    __slots__ = ("rest", "scales", "sizes", "taps")

    def __init__(self, taps: dict[int, Taps], sizes: Any, scales: Any, rest: Any) -> None:
        self.taps, self.sizes, self.scales, self.rest = taps, sizes, scales, rest

    def __call__(self, ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        """Run on the piece."""
        out, first = ctx.outs[0], 2
        x = wide(input)
        size, scale = (None if v is None else list(v) for v in (self.sizes, self.scales))
        for d, rows in self.taps.items():
            dim = first + d
            start, count = out.offsets[dim], out.local_shape[dim]
            x = ctx.near(x, dim, f"s{d}", rows.need)
            x = rows(x, dim, start, count) if count else x
            if size is not None:
                size[d] = count
            if scale is not None:
                scale[d] = 1.0
        if 0 in out.local_shape:
            return nothing(out.local_shape, (x,), input.dtype)
        if len(self.taps) < x.ndim - first:
            x = F.interpolate(x, size, scale, **self.rest)
        return x.to(input.dtype)


def _resize(
    x: Arg,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: Any,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Rule | None:
    if x.ndim not in (3, 4, 5) or 0 in x.shape[2:]:
        return None
    dims = x.ndim - 2
    more = {"align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}
    rest = {"mode": mode, **more, "antialias": antialias}
    results = like_torch(F.interpolate, (x, size, scale_factor), rest)
    if results is None or len(results[0][0]) != x.ndim:
        return None
    shape, strides, _ = results[0]
    sizes = None if size is None else each(size, dims)
    scales = (
        None if scale_factor is None else [float(s) for s in each_scale(scale_factor, dims)]
    )
    # Without torch's kernel then: means of windows have, or have no, gradient of their gradient, by sizes that
    # differ among ranks; and without aliases a piece of one column goes wrong.
    every = mode == "area" or antialias
    cut: dict[int, Taps] = {}
    if x.dtype.is_floating_point:
        dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype
        lone = mode if antialias else _ALONG_ONE.get(mode, mode)
        for d in range(dims):
            n, m = x.shape[2 + d], shape[2 + d]
            few = m < pieces(x, 2 + d)
            wanted = bool(x.layout.dims[2 + d]) or every
            if not wanted or few or n * m > MOST:
                continue
            given: dict[str, Any] = {"size": None if sizes is None else sizes[d]}
            given["scale_factor"] = None if scales is None else scales[d]
            found = taps(
                n, lone, dtype, str(x.device or "cpu"), **given, **more, antialias=antialias
            )
            if found is not None and len(found.places) == m:
                cut[d] = found
    if every and (len(cut) < dims or 1 in (*x.shape[2:], *shape[2:])):
        cut = {}
    names = ("n", "c", *(f"s{d}" if d in cut else WHOLE for d in range(dims)))
    linear = x.dtype.is_floating_point
    local = _Resized(cut, sizes, scales, rest)
    return spatial_rule(x, names, names, (shape,), local, linear=linear, strides=(strides,))


def each_scale(value: Any, count: int) -> list[Any]:
    """A scale factor for each dim."""
    return list(value) if isinstance(value, (tuple, list)) else [value] * count


@rule(F.interpolate)
def interpolate(
    input: Arg,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Rule | None:
    """Every mode."""
    return _resize(
        input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    )


@rule(F.upsample)
def upsample(
    input: Arg,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
) -> Rule | None:
    """The older name."""
    return _resize(input, size, scale_factor, mode, align_corners)


@rule(F.upsample_nearest)
def upsample_nearest(input: Arg, size: Any = None, scale_factor: Any = None) -> Rule | None:
    """The older name of one mode."""
    return _resize(input, size, scale_factor, "nearest", None)


@rule(F.upsample_bilinear)
def upsample_bilinear(input: Arg, size: Any = None, scale_factor: Any = None) -> Rule | None:
    """The older name of another, with corners aligned."""
    return _resize(input, size, scale_factor, "bilinear", True)
