"""Pooling over a sharded space: rows of the neighbours, or pending sums."""

from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Shard
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
