"""Softmax: rows stay; over a sharded dim one maximum and one sum per row meet."""

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise import Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

S = Shard


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 3, 4, dtype=torch.float64) * 3


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
def test_every_dim(x: torch.Tensor, name: str) -> None:
    for dim in (0, 1, -1):
        assert not sweep(
            lambda x, d=dim: getattr(F, name)(x, dim=d), x, meshes=((4,), (2, 2)), extra=2
        )
    assert not sweep(lambda x: getattr(F, name)(x, 0), x[:2, :1], meshes=((4,),))
    assert not sweep(lambda x: getattr(F, name)(x, 0), x[0, 0, 0], meshes=((2,),))


def test_ways_to_say_it(x: torch.Tensor) -> None:
    for f in (
        lambda x: x.softmax(0),
        lambda x: torch.log_softmax(x, 0),
        lambda x: torch.special.softmax(x, 0),
        lambda x: torch.ops.aten._softmax(x, 0, False),
        lambda x: torch.ops.aten._log_softmax(x, 0, False),
        lambda x: x.float().softmax(0, torch.float64),
        lambda x: F.softmax(x.float(), 0, 3, torch.float64),
        lambda x: F.log_softmax(x, 0, dtype=torch.float32).double(),
    ):
        assert not sweep(f, x, meshes=((4,),), extra=0, tol=1e-6)


def test_large_and_infinite(x: torch.Tensor) -> None:
    assert not sweep(lambda x: x.log_softmax(0), x * 1000, meshes=((4,),), extra=0)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        y = x.clone()
        y[:2], y[:, 1, 1] = -math.inf, -math.inf
        y[1, 2, 2] = math.nan
        d = distribute_tensor(y, mesh, [S(0)])
        for f in (torch.softmax, torch.log_softmax):
            torch.testing.assert_close(f(d, 0).full_tensor(), f(y, 0), equal_nan=True)
        safe = torch.ops.aten._safe_softmax
        torch.testing.assert_close(safe(d, 0).full_tensor(), safe(y, 0), equal_nan=True)

    simulate(on_rank, 4)


def test_narrow_floats_are_worked_on_wide() -> None:
    x = torch.randn(33, 2).bfloat16()

    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [S(0)])
        y = d.softmax(0)
        assert y.dtype == torch.bfloat16
        assert (
            torch.equal(y.full_tensor(), x.softmax(0))
            or (y.full_tensor() - x.softmax(0)).abs().max() < 1e-3
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert d.softmax(0).dtype == x.softmax(0).dtype

    simulate(on_rank, 4)


def test_integers_raise_what_torch_raises() -> None:
    def on_rank() -> None:
        d = distribute_tensor(torch.arange(6), init_device_mesh("cpu", (2,)), [S(0)])
        with pytest.raises(RuntimeError):
            d.softmax(0)

    simulate(on_rank, 2)


def test_second_derivatives(x: torch.Tensor) -> None:
    def slope(f):
        def fn(x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad((f(x, 0) ** 3).sum(), x, create_graph=True)[0]

        return fn

    for f in (torch.softmax, torch.log_softmax):
        assert not sweep(slope(f), x, meshes=((4,),), extra=1)


def test_one_number_per_row_moves(x: torch.Tensor) -> None:
    row = 2 * 3 * 8 * 12  # an all_reduce of 3 * 4 doubles over four ranks
    for f in (torch.softmax, torch.log_softmax, F.softmin):
        assert bytes_moved(lambda x, f=f: f(x, 0), [x], (4,), ((S(0),),)) == 2 * row
        assert bytes_moved(lambda x, f=f: f(x, 0), [x], (4,), ((S(1),),)) == 0
