"""Resizing over a sharded space: rows of the neighbours move, and those only that are looked at."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Shard
from shardwise.testing.sweep import bytes_moved, sweep

S = Shard
MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}
ALL = [(dims, mode) for dims, modes in MODES.items() for mode in modes]


def rand(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "mode"), ALL)
def test_every_mode(dims: int, mode: str) -> None:
    x = rand(3, 2, *(5, 7, 6)[:dims])
    size = (8, 4, 9)[:dims]
    aligns = (False, True) if "linear" in mode or mode == "bicubic" else (None,)
    scales = (1.7, 0.6, 2.3)[:dims]
    for align in aligns:
        fn = partial(F.interpolate, mode=mode, align_corners=align)
        scaled = partial(fn, scale_factor=scales)
        again = partial(scaled, recompute_scale_factor=True)
        assert not sweep(partial(fn, size=size), x, meshes=((2, 2),), extra=2)
        assert not sweep(scaled, x, meshes=((4,),), extra=0, twice=True)
        assert not sweep(again, x, meshes=((2,),), extra=0, grad=False)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "lanczos"])
def test_without_aliases(mode: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.interpolate(x, (3, 4), mode=mode, antialias=True)

    assert not sweep(fn, rand(2, 2, 8, 9), extra=1)
    assert not sweep(fn, rand(3, 2, 4, 3), meshes=((4,),), extra=0, twice=True)


@pytest.mark.filterwarnings("ignore:`nn.functional.upsample")
def test_older_names_and_narrow_dtypes() -> None:
    x = rand(2, 3, 6, 5)
    for fn in (
        lambda x: F.upsample(x, scale_factor=2),
        lambda x: F.upsample_nearest(x, (9, 4)),
        lambda x: F.upsample_bilinear(x, scale_factor=2),
    ):
        assert not sweep(fn, x, meshes=((4,),), extra=0)
    half = x.bfloat16()
    assert not sweep(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), half, grad=False
    )


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (lambda x: F.interpolate(x, scale_factor=2), 0),
        (lambda x: F.interpolate(x, scale_factor=0.5), 0),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 6),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 12),
        (lambda x: F.interpolate(x, (8, 5), mode="area"), 0),
        (lambda x: F.interpolate(x, (16, 9), mode="bilinear"), 0),
    ],
)
def test_rows_that_move(fn: Any, rows: int) -> None:
    row = 2 * 3 * 5 * 8  # of two samples of three channels; three borders
    assert bytes_moved(fn, [rand(2, 3, 16, 5)], (4,), ((S(2),),)) == rows * row
