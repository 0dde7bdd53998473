"""Pooling over a sharded space: rows of the neighbours, or pending sums."""

from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Shard, rng
from shardwise.testing.sweep import bytes_moved, check, sweep

S = Shard


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: F.max_pool1d(x, 3, 2, 1), (2, 3, 9)),
        (lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True), (2, 3, 6, 5)),
        (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True), (2, 2, 8, 5)),
        (lambda x: F.max_pool2d(x, 2, 1, 1, 2), (3, 6, 7)),
        (lambda x: F.max_pool3d(x, 2, return_indices=True), (1, 2, 4, 5, 4)),
        (lambda x: F.avg_pool1d(x, 3, 2, 1), (2, 3, 9)),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), (2, 2, 8, 5)),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, True, True), (2, 2, 8, 5)),
        (lambda x: F.avg_pool2d(x, (3, 2), 1, (1, 0), divisor_override=5), (3, 8, 5)),
        (lambda x: F.avg_pool2d(x, (8, 2)), (2, 3, 8, 5)),
        (lambda x: F.adaptive_avg_pool2d(x, (5, 4)), (2, 2, 9, 8)),
        (lambda x: F.adaptive_avg_pool2d(x, 1), (2, 3, 9, 8)),
        (lambda x: F.adaptive_max_pool2d(x, (5, 4), return_indices=True), (2, 2, 9, 8)),
        (lambda x: F.adaptive_max_pool1d(x, 5), (3, 9)),
    ],
)
def test_over_space(fn: Any, shape: tuple[int, ...]) -> None:
    assert not sweep(fn, rand(*shape), meshes=((4,), (2, 2)), extra=2)


@pytest.mark.parametrize("order", [2.0, 3.0])
def test_norms_of_windows(order: float) -> None:
    x = rand(2, 3, 9).abs() + 1
    assert not sweep(lambda x: F.lp_pool1d(x, order, 3, 2), x, meshes=((4,),))


def test_windows_of_the_least_value() -> None:
    """No row from outside wins where all are equal."""
    x = torch.full((1, 2, 8), -torch.inf, dtype=torch.float64)
    for d in range(3):
        assert not check(
            lambda x: F.max_pool1d(x, 3, 1, 1, return_indices=True), [x], (4,), ((S(d),),)
        )


ROW = 2 * 3 * 5 * 8


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (lambda x: F.max_pool2d(x, 3, 1, 1), 6),
        (lambda x: F.avg_pool2d(x, 3, 1, 1), 6),
        (lambda x: F.max_pool2d(x, 3, 2, 1), 3),
        (lambda x: F.max_pool2d(x, 2, return_indices=True), 0),
        (lambda x: F.avg_pool2d(x, 2), 0),
        (lambda x: F.lp_pool2d(x, 2.0, 2), 0),
        (lambda x: F.adaptive_avg_pool2d(x, (8, 5)), 0),
        (lambda x: F.adaptive_avg_pool2d(x, 1), 0),
        (lambda x: F.avg_pool2d(x, (16, 1)), 0),
    ],
)
def test_rows_that_move(fn: Any, rows: int) -> None:
    assert bytes_moved(fn, [rand(2, 3, 16, 5)], (4,), ((S(2),),)) == rows * ROW


def test_gradients_of_maxima_given_their_places() -> None:
    x = rand(3, 4, 6, 5)

    def fn(x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, 2, return_indices=True)
        op = torch.ops.aten.max_pool2d_with_indices_backward
        return op(y * y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)

    assert not sweep(fn, x, extra=2, grad=False)
    for d in (0, 1):
        assert not bytes_moved(fn, [rand(4, 4, 6, 5)], (2,), ((S(d),),))


@pytest.mark.parametrize("dims", [2, 3])
def test_windows_at_random_places(dims: int) -> None:
    x = rand(3, 2, *[6] * dims)
    pool = getattr(F, f"fractional_max_pool{dims}d")

    def drawn(x: Tensor) -> Any:
        torch.manual_seed(3)
        with rng(like="torch"):
            first = pool(x, 2, output_ratio=(0.5,) * dims, return_indices=True)
            return *first, pool(x[0], 2, output_size=3)

    def given(x: Tensor, places: Tensor) -> Tensor:
        return pool(x, 2, output_size=3, _random_samples=places)

    assert not sweep(drawn, x, extra=2)
    assert not sweep(drawn, x, meshes=((4,),), extra=0, twice=True)
    assert not sweep(
        given, x, torch.rand(3, 2, dims).double(), meshes=((4,),), extra=2, grad=False
    )
    for d in (0, 1):
        args = [rand(4, 4, *[6] * dims)]
        assert not bytes_moved(lambda x: pool(x, 2, output_size=3), args, (2,), ((S(d),),))
    with pytest.raises(ValueError, match="requires specifying either"):
        bytes_moved(lambda x: pool(x, 2), [x], (2,), ((S(0),),))


def test_second_gradients_of_windows_of_which_a_rank_has_one_or_none() -> None:
    fn = lambda x: F.adaptive_avg_pool1d(x, 5)  # noqa: E731
    assert not sweep(fn, rand(3, 2, 9), meshes=((4,),), extra=0, twice=True)
