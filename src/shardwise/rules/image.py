"""Pooling, resizing and patches: batch and channels are cut, the dims worked on are whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.rules.edges import Unempty, nothing
from shardwise.rules.notation import WHOLE, Arg, Rule, numbered, some_empty, without_empty
from shardwise.rules.registry import functions, rule
from shardwise.rules.rowmap import mapped

Shapes = tuple[tuple[int, ...], ...]


def _shapes_on_meta(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Shapes | None:
    """Shapes of the results for operands of the global shapes; None if torch refuses them."""
    meta = [
        torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Arg) else a
        for a in args
    ]
    try:
        with torch.no_grad():
            got = func(*meta, **kwargs)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        return None
    return tuple(tuple(t.shape) for t in (got if isinstance(got, tuple) else (got,)))


def _spatial(func: Callable[..., Any], dims: int | None) -> None:
    """Register an op that works on the last ``dims`` dims (None: all but two) of its first operand alone."""

    def spatial(*args: Any, **kwargs: Any) -> Rule | None:
        x, *others = args if args else (kwargs.pop("input"),)
        if not isinstance(x, Arg) or any(
            isinstance(a, Arg) for a in (*others, *kwargs.values())
        ):
            return None
        count = x.ndim - 2 if dims is None else dims
        if not 1 <= count <= x.ndim - 1 or x.ndim > count + 2:
            return None
        shapes = _shapes_on_meta(func, x, *others, **kwargs)
        if shapes is None or any(len(s) != x.ndim for s in shapes):
            return None
        names = (*("n", "c")[2 - (x.ndim - count) :], *(WHOLE,) * count)
        ins = {x: names}
        return Rule(
            ins,
            (names,) * len(shapes),
            whole=without_empty(ins, ("c",)),
            linear=(frozenset([x]),) if x.dtype.is_floating_point else (),
            out_shapes=shapes,
        )

    rule(func)(spatial)


for _name in (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
):  # fmt: skip
    for _f in (getattr(torch.ops.aten, _name), *functions(f"aten.{_name}")):
        _spatial(_f, None)


def _unpool(dims: int) -> None:
    func = getattr(F, f"max_unpool{dims}d")

    def unpool(input: Arg, indices: Arg, *args: Any, **kwargs: Any) -> Rule | None:
        """Positions are within a channel's plane, so batch and channels are cut."""
        if input.ndim not in (dims + 1, dims + 2) or indices.shape != input.shape:
            return None
        shapes = _shapes_on_meta(lambda x: func(x, x.long(), *args, **kwargs), input)
        if shapes is None:
            return None
        names = (*("n", "c")[2 - (input.ndim - dims) :], *(WHOLE,) * dims)
        ins = {input: names, indices: names}
        return Rule(
            ins,
            (names,),
            linear=(frozenset([input]),) if input.dtype.is_floating_point else (),
            local=Unempty(),
            always_local=some_empty(ins),
            out_shapes=shapes,
        )

    rule(func)(unpool)


for _d in (1, 2, 3):
    _unpool(_d)


@rule(F.local_response_norm)
def local_response_norm(
    input: Arg, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Rule | None:
    """``n c s -> n c s``; over sharded channels a rank takes those that are near its own."""
    if input.ndim < 3 or type(size) is not int or size < 1:
        return None
    names = ("n", "c", *numbered("s", input.ndim - 2))
    channels = input.shape[1]

    def near(rank_channels: range) -> list[int]:
        """The channels that the sums of these go over; -1 beyond the ends."""
        if not rank_channels:
            return []
        first, last = rank_channels.start - size // 2, rank_channels.stop + (size - 1) // 2
        return [i if 0 <= i < channels else -1 for i in range(first, last)]

    def local(
        ctx: Any,
        input: Tensor,
        size: int,
        alpha: float = 1e-4,
        beta: float = 0.75,
        k: float = 1.0,
    ) -> Tensor:
        def wanted(rank: int) -> Tensor:
            return torch.tensor(near(ctx.piece(0, 1, rank)), dtype=torch.int64, device="cpu")

        squares = ctx.rows(1, wanted, factor="c")(input.square())
        if not input.numel():
            return nothing(input.shape, [input, squares], saved=True)
        lined = squares.reshape(squares.shape[0], 1, squares.shape[1], -1)
        mean = F.avg_pool2d(lined, (size, 1), stride=1).reshape(input.shape)
        return input / (mean * alpha + k).pow(beta)

    return Rule(
        {input: names},
        (names,),
        special=frozenset("c"),
        local=local,
        always_local=input.layout.has_empty(),
    )


def _blocks(input: Arg, factor: int, up: bool) -> Rule | None:
    if input.ndim < 3 or factor < 1:
        return None
    *lead, c, h, w = input.shape
    r = factor
    if (up and c % (r * r)) or (not up and (h % r or w % r)):
        return None
    channels = c // (r * r) if up else c
    shape = (*lead, channels, h * r, w * r) if up else (*lead, c * r * r, h // r, w // r)
    names = (*numbered("b", len(lead)), "c", "h", "w")
    ins = {input: names}
    fewer = (channels, h, w) if up else (channels, h // r, w // r)
    return Rule(
        ins,
        (names,),
        divides=dict(zip("chw", fewer)) if r > 1 else {},
        linear=(frozenset([input]),),
        local=Unempty(),
        always_local=input.layout.has_empty(),
        out_shapes=(shape,),
    )


@rule("pixel_shuffle", "aten.pixel_shuffle.default")
def pixel_shuffle(input: Arg, upscale_factor: int) -> Rule | None:
    """``... (c r r) h w -> ... c (h r) (w r)``."""
    return _blocks(input, upscale_factor, up=True)


@rule("pixel_unshuffle", "aten.pixel_unshuffle.default")
def pixel_unshuffle(input: Arg, downscale_factor: int) -> Rule | None:
    """``... c (h r) (w r) -> ... (c r r) h w``."""
    return _blocks(input, downscale_factor, up=False)


@rule("channel_shuffle", "aten.channel_shuffle.default")
def channel_shuffle(input: Arg, groups: int) -> Rule | None:
    """The channels in another order: a rank fetches those of its piece."""
    if input.ndim < 3 or type(groups) is not int or groups < 1 or input.shape[1] % groups:
        return None
    each = input.shape[1] // groups
    return mapped(
        input,
        {1: lambda i: i % groups * each + i // groups},
        always_local=input.layout.has_empty(),  # the kernel refuses an empty piece
    )


def _patches(
    func: Callable[..., Any], dims: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Rule | None:
    x, *others = args if args else (kwargs.pop("input"),)
    shapes = _shapes_on_meta(func, x, *others, **kwargs)
    if shapes is None or x.ndim not in (dims - 1, dims):
        return None
    shape = shapes[0]
    batch = ("n",) * (x.ndim == dims)
    names, out = (
        (*batch, "c", *(WHOLE,) * (len(s) - len(batch) - 1)) for s in (x.shape, shape)
    )
    at = len(batch)
    ins = {x: names}
    return Rule(
        ins,
        (out,),
        whole=without_empty(ins, ("c",)),
        divides={"c": min(x.shape[at], shape[at])},
        linear=(frozenset([x]),),
        out_shapes=shapes,
    )


@rule(F.unfold)
def unfold(*args: Any, **kwargs: Any) -> Rule | None:
    """``n c [h] [w] -> n (c k) [l]``."""
    return _patches(F.unfold, 4, args, kwargs)


@rule(F.fold)
def fold(*args: Any, **kwargs: Any) -> Rule | None:
    """``n (c k) l -> n c [h] [w]``: of patches that are cut each rank adds its own, a pending sum."""
    made = _patches(F.fold, 3, args, kwargs)
    if made is None:
        return None
    (x,) = made.ins

    def local(ctx: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first = ctx.start(0, x.ndim - 1)
        behind = x.shape[-1] - first - input.shape[-1]
        return F.fold(F.pad(input, (first, behind)), *args, **kwargs)

    return replace(made, ins={x: (*made.ins[x][:-1], "l")}, special=frozenset("l"), local=local)


@rule(F.grid_sample)
def grid_sample(
    input: Arg,
    grid: Arg,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Rule | None:
    """``n c [s], n t 2 -> n c t``: the points may be cut too."""
    if input.ndim != grid.ndim or input.ndim not in (4, 5) or input.shape[0] != grid.shape[0]:
        return None
    points = numbered("t", input.ndim - 2)
    ins = {input: ("n", "c", *(WHOLE,) * (input.ndim - 2)), grid: ("n", *points, WHOLE)}
    shape = (*input.shape[:2], *grid.shape[1:-1])
    return Rule(ins, (("n", "c", *points),), linear=(frozenset([input]),), out_shapes=(shape,))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(
    input: Arg, grid: Arg, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Rule | None:
    """``grid_sample`` as ATen has it."""
    return grid_sample(input, grid)


@rule(F.affine_grid)
def affine_grid(theta: Arg, size: Any, align_corners: bool | None = None) -> Rule | None:
    """``n [2] [3] -> n [h] [w] [2]``."""
    if theta.ndim != 3 or len(size) not in (4, 5) or theta.shape[0] != size[0]:
        return None
    ins = {theta: ("n", WHOLE, WHOLE)}
    shape = (size[0], *size[2:], len(size) - 2)

    def local(ctx: Any, theta: Tensor, size: Any, align_corners: bool | None = None) -> Tensor:
        return F.affine_grid(theta, [theta.shape[0], *size[1:]], align_corners)

    names = ("n", *(WHOLE,) * (len(shape) - 1))
    return Rule(
        ins,
        (names,),
        whole=without_empty(ins, ("n",)),
        special=frozenset(("n",)),
        local=local,
        out_shapes=(shape,),
    )


@rule(
    *(
        f"aten.{kind}_pad{d}d.default"
        for kind in ("reflection", "replication")
        for d in (1, 2, 3)
    ),
)
def edge_pad(self: Arg, padding: Any) -> Rule | None:
    """Dims at the end, by their values at the edge: these are whole."""
    count = len(padding) // 2
    if len(padding) % 2 or count >= self.ndim:
        return None
    names = (*numbered("b", self.ndim - count), *(WHOLE,) * count)
    grown = [padding[2 * k] + padding[2 * k + 1] for k in reversed(range(count))]
    shape = (
        *self.shape[: self.ndim - count],
        *(n + g for n, g in zip(self.shape[self.ndim - count :], grown)),
    )
    ins = {self: names}
    return Rule(
        ins,
        (names,),
        whole=without_empty(ins, names),
        linear=(frozenset([self]),),
        out_shapes=(tuple(shape),),
    )
