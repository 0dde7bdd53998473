"""Convolutions over a sharded space: the neighbours' rows move, and no others."""

from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.events import CommLog
from shardwise.simulate import simulate
from shardwise.testing.sweep import bytes_moved, sweep

R, S = Replicate(), Shard


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    "how",
    [
        {"padding": 1},
        {"padding": (1, 0), "stride": (2, 1)},
        {"padding": "same", "dilation": 2},
        {"stride": 3, "padding": 2},
    ],
)
def test_over_space(how: dict[str, Any]) -> None:
    x, w, b = rand(2, 3, 7, 6), rand(4, 3, 2, 3), rand(4)
    assert not sweep(lambda x, w, b: F.conv2d(x, w, b, **how), x, w, b, meshes=((4,), (2, 2)))


def test_other_dims() -> None:
    assert not sweep(lambda x, w: F.conv1d(x, w, padding=2), rand(3, 9), rand(4, 3, 4))
    three = rand(1, 2, 4, 3, 4), rand(3, 2, 2, 3, 3)
    assert not sweep(lambda x, w: F.conv3d(x, w, padding=1), *three, meshes=((2, 2),), extra=2)


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        (3, {"stride": 2, "padding": 1, "output_padding": 1}),
        (1, {"stride": 3, "output_padding": 2}),
        (2, {"stride": 2, "padding": 3, "dilation": 3}),
    ],
)
def test_transposed_over_space(kernel: int, how: dict[str, int]) -> None:
    x, w, b = rand(2, 3, 5), rand(3, 4, kernel), rand(4)
    assert not sweep(lambda x, w, b: F.conv_transpose1d(x, w, b, **how), x, w, b)


@pytest.mark.parametrize(
    ("channels", "groups", "ratio"), [(3, 3, 1), (5, 5, 2), (4, 2, 3), (6, 3, 2)]
)
def test_groups_cut_unevenly(channels: int, groups: int, ratio: int) -> None:
    x, w = rand(2, channels, 5), rand(groups * ratio, channels // groups, 3)
    b = rand(groups * ratio)
    assert not sweep(lambda x, w, b: F.conv1d(x, w, b, 1, 1, 1, groups), x, w, b)
    if ratio == 1:
        assert (
            bytes_moved(lambda x: F.conv1d(x, w, b, 1, 1, 1, groups), [x], (2,), ((S(1),),))
            == 0
        )


def test_transposed_groups() -> None:
    x, w, b = rand(2, 4, 5), rand(4, 3, 3), rand(6)
    assert not sweep(lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 0, 2), x, w, b)


@pytest.mark.parametrize(
    ("kernel", "how", "rows"),
    [
        (3, {"padding": 1}, 6),  # one row across each of three borders, both ways
        (5, {"padding": 2}, 12),
        (3, {"padding": 2, "dilation": 2}, 12),
        (3, {"padding": 1, "stride": 2}, 3),
        (4, {"stride": 4}, 0),
        (1, {}, 0),
    ],
)
def test_rows_that_move(kernel: int, how: dict[str, int], rows: int) -> None:
    x, w = rand(2, 3, 16, 5), rand(4, 3, kernel, 1)
    how = {k: (v, 0 if k == "padding" else 1) for k, v in how.items()}  # type: ignore[misc]
    moved = bytes_moved(lambda x, w: F.conv2d(x, w, **how), [x, w], (4,), ((S(2),), (R,)))
    assert moved == rows * 2 * 3 * 5 * 8


def test_rows_that_a_transposed_one_moves() -> None:
    x, w = rand(2, 3, 16), rand(3, 4, 4)
    moved = bytes_moved(
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1),
        [x, w],
        (4,),
        ((S(2),), (R,)),
    )
    assert moved == 6 * 2 * 3 * 8


def test_few_windows_are_pending_sums() -> None:
    """A kernel as large as the image: no rank takes all rows."""
    x, w, b = rand(2, 3, 8, 6), rand(4, 3, 8, 6), rand(4)
    assert not sweep(F.conv2d, x, w, b, meshes=((4,), (2, 2)))
    assert bytes_moved(F.conv2d, [x, w, b], (4,), ((S(2),), (R,), (R,))) == 0


def test_gradients_move_rows_only() -> None:
    """Backward brings the gradients of the neighbours' rows back; the weight's is a pending sum."""
    x, w = rand(1, 2, 16), rand(3, 2, 3)

    def on_rank() -> int:
        mesh = init_device_mesh("cpu", (4,))
        a = distribute_tensor(x, mesh, [S(2)]).requires_grad_()
        b = distribute_tensor(w, mesh, [R])
        y = F.conv1d(a, b, padding=1).square().sum()
        with CommLog() as log:
            y.backward()
        return log.bytes

    assert sum(simulate(on_rank, 4)) == 6 * 2 * 8


def test_double_backward() -> None:
    x, w = rand(1, 2, 7), rand(3, 2, 3)

    def second(x: Tensor, w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(F.conv1d(x, w, padding=1).pow(3).sum(), x, create_graph=True)
        return g.square().sum()

    plain = [t.clone().requires_grad_() for t in (x, w)]
    want = torch.autograd.grad(second(*plain), plain)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        a, b = (
            distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, S(2)), (w, R))
        )
        got = torch.autograd.grad(second(a, b), [a, b])
        for g, expected in zip(got, want):
            assert torch.allclose(g.full_tensor(), expected)

    simulate(on_rank, 4)
