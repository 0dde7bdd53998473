"""Images: resized, sampled, shuffled, normalised by their neighbours; only neighbours' channels move."""

from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Replicate, Shard
from shardwise.testing.sweep import bytes_moved, sweep

R, S = Replicate(), Shard
aten = torch.ops.aten


def rand(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def test_sampled_at_points() -> None:
    x, grid = rand(2, 3, 4, 5), rand(2, 3, 5, 2)
    assert not sweep(
        lambda x, g: torch.grid_sampler_2d(x, g, 0, 1, False), x, grid, extra=2, twice=True
    )
    volume, points = rand(2, 3, 2, 3, 2), rand(2, 1, 3, 2, 3)
    fn = lambda x, g: torch.grid_sampler_3d(x, g, 0, 0, True)  # noqa: E731
    assert not sweep(fn, volume, points, meshes=((4,),), extra=2)
    for combo in (((S(0),), (S(0),)), ((S(1),), (R,)), ((R,), (S(2),))):
        args = [x[:, :2], rand(2, 3, 4, 2)]
        got = bytes_moved(
            lambda x, g: torch.grid_sampler_2d(x, g, 0, 1, False), args, (2,), combo
        )
        assert not got


def test_resized_without_aliases() -> None:
    def fn(x: Tensor) -> Tensor:
        return aten._upsample_bilinear2d_aa(
            x, output_size=[3, 4], align_corners=False, scale_factors=None
        )

    assert not sweep(fn, rand(3, 5, 6, 7), extra=2, twice=True)
    for d in (0, 1):
        assert not bytes_moved(fn, [rand(2, 4, 6, 7)], (2,), ((S(d),),))


@pytest.mark.parametrize("factor", [1, 2])
def test_pixels_and_channels(factor: int) -> None:
    x = rand(2, 8, 4, 8)

    def up(x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, factor)

    def down(x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, factor)

    for fn in (up, down):
        assert not sweep(fn, x, extra=2, twice=True)
        assert not sweep(fn, rand(3, 4, 2, 6), meshes=((4,),), extra=2)
        for d in range(4):
            assert not bytes_moved(fn, [x], (2,), ((S(d),),))
    assert not bytes_moved(up, [rand(2, 16, 8, 4)], (4,), ((S(0),),))


def test_shuffled_channels() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.channel_shuffle(x, 3)

    assert not sweep(fn, rand(3, 6, 2, 3), extra=2, twice=True)
    assert not bytes_moved(fn, [rand(2, 6, 2, 3)], (4,), ((S(0),),))
    # Of each rank's half (two of four channels) a half goes away.
    moved = bytes_moved(lambda x: F.channel_shuffle(x, 2), [rand(1, 4, 1, 1)], (2,), ((S(1),),))
    assert moved == 2 * 8


@pytest.mark.parametrize("size", [1, 2, 5])
def test_normalised_by_near_channels(size: int) -> None:
    def fn(x: Tensor) -> Any:
        return F.local_response_norm(x, size, alpha=0.5, beta=0.7, k=1.5)

    assert not sweep(fn, rand(2, 7, 3), extra=2, twice=True)
    assert not sweep(fn, rand(3, 2, 2, 2), meshes=((4,),), extra=2)
    assert not bytes_moved(fn, [rand(2, 6, 3)], (4,), ((S(2),),))
    # Three borders, over which the channels go that the sums on either side lack.
    moved = bytes_moved(fn, [rand(2, 32, 3)], (4,), ((S(1),),))
    assert moved == 3 * (size - 1) * 2 * 3 * 8


def test_patches_put_together() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.fold(x, (4, 5), (2, 2))

    x = rand(2, 8, 12)
    assert not sweep(fn, x, extra=2, twice=True)
    assert not sweep(fn, rand(8, 12), meshes=((4,),), extra=1)
    for p in (S(0), S(1), S(2)):
        assert not bytes_moved(fn, [x], (2,), ((p,),))
