"""Convolutions, pooling and other image ops: batch and channels cut without communication."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv(dims: int) -> None:
    conv = getattr(F, f"conv{dims}d")
    kernel, size = (2,) * dims, (4,) * dims
    operands = rand(3, 5, *size), rand(4, 5, *kernel), rand(4)
    assert not sweep(
        partial(conv, stride=2, padding=1), *operands, meshes=((2, 2),) if dims > 1 else ((4,),)
    )
    assert not sweep(
        partial(conv, padding="same", dilation=2), *operands[:2], meshes=((2,),), extra=1
    )
    assert not sweep(conv, rand(5, *size), *operands[1:], meshes=((2,),), extra=1)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_transpose(dims: int) -> None:
    conv = getattr(F, f"conv_transpose{dims}d")
    kernel, size = (2,) * dims, (3,) * dims
    operands = rand(3, 5, *size), rand(5, 4, *kernel), rand(4)
    assert not sweep(
        partial(conv, stride=2, output_padding=1),
        *operands,
        meshes=((2, 2),) if dims > 1 else ((4,),),
    )


@pytest.mark.parametrize(("groups", "ratio"), [(2, 1), (4, 1), (4, 2), (3, 1)])
def test_groups(groups: int, ratio: int) -> None:
    x, bias = rand(2, groups * 2, 4, 4), rand(groups * ratio)
    assert not sweep(
        partial(F.conv2d, groups=groups),
        x,
        rand(groups * ratio, 2, 2, 2),
        bias,
        meshes=((4,),),
        extra=3,
    )
    assert not sweep(
        lambda x, w, b: F.conv_transpose2d(x, w, b, 1, 0, 0, groups),
        x,
        rand(groups * 2, ratio, 2, 2),
        bias,
        meshes=((2, 2),),
        extra=2,
    )


def test_aten_convolution() -> None:
    x = rand(3, 4, 4, 4)

    def call(x: Tensor, w: Tensor, b: Tensor, transposed: bool, groups: int) -> Tensor:
        return torch.ops.aten.convolution.default(
            x, w, b, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups
        )

    assert not sweep(
        partial(call, transposed=False, groups=1), x, rand(5, 4, 2, 2), rand(5), meshes=((2,),)
    )
    assert not sweep(
        partial(call, transposed=True, groups=1), x, rand(4, 5, 2, 2), rand(5), meshes=((2,),)
    )
    assert not sweep(
        partial(call, transposed=False, groups=2), x, rand(4, 2, 2, 2), rand(4), meshes=((2,),)
    )


def test_channels_last() -> None:
    x = rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    w = rand(6, 3, 2, 2).to(memory_format=torch.channels_last)

    def call(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        y = F.conv2d(x, w)
        return y, y.stride(), y.permute(0, 2, 3, 1).reshape(-1, 6), F.max_pool2d(y, 2)

    assert not sweep(call, x, w, meshes=((2,), (4,)))


def test_what_convolutions_move() -> None:
    x, w, b = rand(4, 4, 5, 5), rand(6, 4, 2, 2), rand(6)
    for combo in (
        ((S(0),), (R,), (R,)),
        ((R,), (S(0),), (S(0),)),
        ((S(1),), (S(1),), (R,)),
        ((S(1),), (R,), (R,)),
    ):
        assert bytes_moved(F.conv2d, [x, w, b], (2,), combo) == 0, combo
    assert bytes_moved(F.conv2d, [x, w, b], (2, 2), ((S(0), R), (R, S(0)), (R, S(0)))) == 0
    depthwise = partial(F.conv2d, groups=4)
    assert (
        bytes_moved(
            depthwise, [x, rand(8, 1, 2, 2), rand(8)], (4,), ((S(1),), (S(0),), (S(0),))
        )
        == 0
    )


# -- pooling ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling(dims: int) -> None:
    x = rand(3, 3, *(5, 4, 4)[:dims])

    def call(x: Tensor) -> tuple[Any, ...]:
        def pool(name: str) -> Any:
            return getattr(F, f"{name}{dims}d")

        return (
            pool("max_pool")(x, 2),
            pool("max_pool")(x, 2, 1, return_indices=True),
            pool("avg_pool")(x, 2, ceil_mode=True),
            pool("adaptive_max_pool")(x, 2),
            pool("adaptive_max_pool")(x, 2, return_indices=True),
            pool("adaptive_avg_pool")(x, 2),
            pool("lp_pool")(x.abs() + 0.1, 2.0, 2),
        )

    assert not sweep(call, x, meshes=((4,), (2, 2)), extra=2)
    for placement in (S(0), S(1)):
        assert bytes_moved(call, [x], (2,), ((placement,),)) == 0
    assert not sweep(lambda x: getattr(F, f"max_pool{dims}d")(x, 2), x[0], meshes=((2,),))

    def there_and_back(x: Tensor) -> Tensor:
        y, where = getattr(F, f"max_pool{dims}d")(x, 2, return_indices=True)
        return getattr(F, f"max_unpool{dims}d")(y, where, 2, output_size=x.shape)

    assert not sweep(there_and_back, x, meshes=((2,), (4,)), extra=1)


def test_resizing() -> None:
    x = rand(3, 5, 3, 3)

    def call(x: Tensor) -> list[Tensor]:
        return [
            *(
                F.interpolate(x, scale_factor=1.5, mode=mode)
                for mode in ("nearest", "bilinear", "area")
            ),
            F.interpolate(x, size=(3, 5), mode="bilinear", align_corners=True, antialias=False),
            F.interpolate(x[0], size=6, mode="linear"),
            F.local_response_norm(x, 2),
        ]

    assert not sweep(call, x, meshes=((4,),), extra=1)

    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0)

    assert (
        bytes_moved(resize, [x], (2,), ((S(0),),))
        == bytes_moved(resize, [x], (2,), ((S(1),),))
        == 0
    )


def test_shuffles() -> None:
    x, y = rand(3, 8, 2, 2), rand(2, 3, 2, 4, 4)
    assert not sweep(lambda x: F.pixel_shuffle(x, 2), x, meshes=((2,), (4,)))
    assert not sweep(lambda x: F.pixel_unshuffle(x, 2), y, meshes=((2,), (4,)))
    assert not sweep(lambda x: F.channel_shuffle(x, 4), x, meshes=((2,), (4,)))
    assert bytes_moved(lambda x: F.pixel_shuffle(x, 2), [x], (2,), ((S(1),),)) == 0
    assert bytes_moved(lambda x: F.pixel_unshuffle(x, 2), [y], (2,), ((S(2),),)) == 0


def test_patches() -> None:
    x, patches = rand(3, 4, 4, 5), rand(3, 16, 6)
    assert not sweep(lambda x: F.unfold(x, 2), x, meshes=((2,), (4,)))
    assert not sweep(lambda x: F.fold(x, (3, 4), 2), patches, meshes=((2,), (4,)))
    assert not sweep(lambda x: F.unfold(x, 2), x[0], meshes=((2,),))
    for placement in (S(0), S(1)):
        assert bytes_moved(lambda x: F.unfold(x, 2), [x], (2,), ((placement,),)) == 0
        assert (
            bytes_moved(lambda x: F.fold(x, (3, 4), 2), [patches], (2,), ((placement,),)) == 0
        )


def test_grids() -> None:
    x, grid, theta = rand(3, 3, 4, 4), rand(3, 5, 4, 2), rand(3, 2, 3)
    assert not sweep(
        partial(F.grid_sample, align_corners=False), x, grid, meshes=((2,), (4,), (2, 2))
    )
    assert not sweep(
        lambda t: F.affine_grid(t, [3, 2, 4, 5], align_corners=False),
        theta,
        meshes=((2,), (4,)),
    )
    sample = partial(F.grid_sample, align_corners=False)
    for combo in (((S(0),), (S(0),)), ((S(1),), (R,)), ((R,), (S(1),)), ((R,), (S(2),))):
        assert bytes_moved(sample, [x, grid], (2,), combo) == 0


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_pad(mode: str) -> None:
    x = rand(3, 5, 4, 4)
    assert not sweep(lambda x: F.pad(x, (1, 2, 0, 1), mode=mode), x, meshes=((2,), (4,)))
    assert bytes_moved(lambda x: F.pad(x, (1, 2), mode=mode), [x[0]], (2,), ((S(0),),)) == 0
    if mode == "constant":
        assert not sweep(
            lambda x: F.pad(x, (-1, 2, 0, 0, 1, 0), value=1.5), x, meshes=((2,), (4,))
        )
        assert not sweep(lambda x: torch.constant_pad_nd(x, (0, 0, 1, 1)), x, meshes=((2,),))
        assert not sweep(
            lambda x: torch.ops.aten.reflection_pad2d.default(x, [1, 2, 0, 1]),
            x,
            meshes=((4,),),
            grad=False,
        )
        assert bytes_moved(lambda x: F.pad(x, (0, 0, 1, 1)), [x], (2,), ((S(3),),)) == 0


def test_complex_numbers() -> None:
    def convolved(x: Any, w: Any) -> Any:
        plain = F.conv1d(x, w, padding=1), F.conv1d(x[0], w)
        return *plain, F.conv_transpose1d(x, w.transpose(0, 1), stride=2)

    x, w = (torch.complex(rand(*s), rand(*s).flip(0)) for s in ((3, 2, 5), (4, 2, 3)))
    assert not sweep(convolved, x, w, meshes=((4,), (2, 2)), extra=2)
