"""Scans over a sharded dim: one total per rank moves."""

import math

import pytest
import torch

from shardwise import Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S = Replicate(), Shard
MESHES = ((4,), (2, 2))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 3, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
def test_every_dim(x: torch.Tensor, name: str) -> None:
    def scan(x, d):
        y = getattr(torch, name)(x, d)
        return tuple(y) if isinstance(y, tuple) else y

    for dim in (0, -2, 2):
        assert not sweep(lambda x, d=dim: scan(x, d), x, meshes=MESHES, extra=2)
    assert not sweep(lambda x: scan(x, 0), x[:2, :1], meshes=((4,),))


def test_products_with_zeros(x: torch.Tensor) -> None:
    x[1, 1, 1] = x[0, 0] = x[4, 2] = 0
    assert not sweep(lambda x: x.cumprod(0), x, meshes=((4,),), extra=1)


def test_later_of_equals_wins() -> None:
    torch.manual_seed(0)
    t = torch.randint(-1, 2, (7, 5)).double()
    for f in (torch.cummax, torch.cummin):
        assert not sweep(lambda x, f=f: tuple(f(x, 0)), t, meshes=MESHES, extra=2)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_second_gradients_of_logarithms_of_sums(x: torch.Tensor, rows: int) -> None:
    x = x[:rows]
    samples = [x.clone() for _ in range(4)]
    samples[1][0] = 1e4  # all gradients further on underflow
    samples[2][rows // 2], samples[2][-1, 0] = 1e4, -1e4
    samples[3][0] = samples[3][rows // 2, 0] = -math.inf
    if rows > 3:
        samples.append(x.clone())
        samples[4][1] = math.inf
    for t in samples:
        for dim in (0, 1):
            assert not sweep(
                lambda x, d=dim: x.logcumsumexp(d), t, meshes=((2,), (4,)), extra=0, twice=True
            )


def test_nan_and_infinity(x: torch.Tensor) -> None:
    x[1, 1, 1] = x[3, 1, 1] = math.nan
    x[0], x[1, 0] = -math.inf, -math.inf

    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [S(0)])
        for f in (torch.cummax, torch.cummin):
            got, want = f(d, 0), f(x, 0)
            torch.testing.assert_close(got.values.full_tensor(), want.values, equal_nan=True)
            assert torch.equal(got.indices.full_tensor(), want.indices)
        for f in (torch.cumsum, torch.logcumsumexp):
            torch.testing.assert_close(f(d, 0).full_tensor(), f(x, 0), equal_nan=True)

    simulate(on_rank, 4)


def test_gradient_behind_minus_infinity() -> None:
    x = torch.tensor([-math.inf, -math.inf, 1.0, 2.0, 0.5], dtype=torch.float64)
    want = x.clone().requires_grad_()
    want.logcumsumexp(0)[2:].sum().backward()

    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [S(0)]).requires_grad_()
        d.logcumsumexp(0)[2:].sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), want.grad, equal_nan=True)

    simulate(on_rank, 4)


def test_integers() -> None:
    t = torch.randint(-2, 3, (7, 3))
    assert not sweep(
        lambda x: (x.cumsum(0), x.cumprod(0), *x.cummax(0), *x.cummin(0)), t, meshes=MESHES
    )
    assert not sweep(lambda x: (x > 0).cumsum(0), t, meshes=((4,),))
    assert not sweep(lambda x: x.cumsum(0, dtype=torch.int32), t, meshes=((4,),))


def test_second_derivatives(x: torch.Tensor) -> None:
    def slope(f):
        def fn(x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad((f(x, 0) ** 3).sum(), x, create_graph=True)[0]

        return fn

    for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
        assert not sweep(slope(f), x, meshes=((4,),), extra=1)


def test_differences(x: torch.Tensor) -> None:
    assert not sweep(lambda x: x.diff(dim=0), x, meshes=((4,),))
    assert not sweep(lambda x: x.diff(n=2), x, meshes=((2, 2),))
    assert not sweep(lambda x, p: x.diff(dim=0, prepend=p), x, x[:1].clone(), meshes=((4,),))
    assert bytes_moved(lambda x: x.diff(dim=0), [x], (4,), ((S(1),),)) == 0


def test_one_total_per_rank_moves(x: torch.Tensor) -> None:
    totals = 4 * 3 * 8 * 12  # every rank receives 3 * 4 doubles from each of three
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        f = getattr(torch, name)
        assert bytes_moved(lambda x, f=f: f(x, 0), [x], (4,), ((S(0),),)) == totals
        assert bytes_moved(lambda x, f=f: f(x, 0), [x], (4,), ((S(2),),)) == 0
    assert bytes_moved(lambda x: x.cummax(0), [x], (4,), ((S(0),),)) == 2 * totals


def test_no_difference_at_all(x: torch.Tensor) -> None:
    for fn in (lambda x: torch.diff(x, 0, 1), lambda x: x.diff(n=0)):
        assert not sweep(fn, x, extra=2, twice=True)
        assert not bytes_moved(fn, [x], (4,), ((S(1),),))
    before = x[:2].clone()
    fn = lambda x, b: torch.diff(x, 0, 0, prepend=b)  # noqa: E731
    assert not sweep(fn, x, before, extra=4)
    for combo in (((S(0),), (R,)), ((R,), (S(0),)), ((S(1),), (S(1),))):
        assert not bytes_moved(fn, [x, before], (4,), combo)


def test_second_gradients_of_products_where_a_rank_has_one_row_or_none(x: torch.Tensor) -> None:
    fn = lambda x: x.cumprod(1)  # noqa: E731
    for t in (x, x[:, :1, :1].clone()):
        assert not sweep(fn, t, meshes=((4,),), extra=0, twice=True)
