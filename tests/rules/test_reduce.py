"""Sums leave a pending sum; what is no sum is settled by one all_reduce of the result's size."""

import math

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.events import CommLog
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, lay_out, sweep

R, S, P = Replicate(), Shard, Partial()
MESHES = ((4,), (2, 2))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 3, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", ["sum", "nansum", "mean", "nanmean", "var", "std", "all", "any", "count_nonzero"]
)
def test_full_one_and_several_dims(x: torch.Tensor, name: str) -> None:
    f = getattr(torch, name)
    x[1, 1] = 0
    kw = {} if name == "count_nonzero" else {"keepdim": True}
    assert not sweep(f, x, meshes=MESHES, extra=3)
    assert not sweep(lambda x: f(x, dim=1), x, meshes=((4,),), extra=2)
    assert not sweep(lambda x: f(x, dim=(0, -1), **kw), x, meshes=MESHES, extra=3)


def test_few_rows_and_size_one(x: torch.Tensor) -> None:
    for f in (torch.sum, torch.mean, torch.prod, torch.any):
        assert not sweep(lambda x, f=f: f(x, dim=0), x[:1, :, :2], meshes=((4,),), extra=0)
    assert not sweep(lambda x: x.var(2), x[:2, :1], meshes=((4,),), extra=0)


def test_ways_to_say_it(x: torch.Tensor) -> None:
    for f in (
        lambda x: x.sum(axis=0, keepdims=True),
        lambda x: x.sum(dim=[]),
        lambda x: x.mean((0, 2), True),
        lambda x: torch.ops.aten.sum.dim_IntList(x, [0, 1], True),
        lambda x: torch.ops.aten.mean.dim(x, [0]),
        lambda x: x.var(False),
        lambda x: x.var(0, False, True),
        lambda x: torch.var_mean(x, (0, 1), correction=0.5, keepdim=True),
        lambda x: torch.std_mean(x, 0, True),
        lambda x: torch.ops.aten.var.correction(x, [0], correction=0),
        lambda x: x.sum(dtype=torch.float32).double(),
    ):
        assert not sweep(f, x, meshes=((2,),), extra=0, tol=1e-6)
    assert not sweep(lambda x: x.sum() + x.mean(0) + x.sum(-1), x[0, 0, 0], meshes=((2,),))


def test_products_with_zeros(x: torch.Tensor) -> None:
    x[1, 1, 1] = x[0, 0, 0] = x[4, 0, 0] = 0
    assert not sweep(torch.prod, x, meshes=MESHES, extra=2)
    assert not sweep(lambda x: x.prod(0), x, meshes=MESHES, extra=2)
    assert not sweep(
        lambda x: x.prod(0, keepdim=True), torch.arange(1, 7).view(6, 1), meshes=((4,),)
    )


def test_nans_are_counted_over_all_ranks(x: torch.Tensor) -> None:
    x[1] = math.nan
    x[:, 2] = math.nan
    settled = [(S(0),), (S(1),), (S(2),)]

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        for ps in settled:
            d = distribute_tensor(x, mesh, ps)
            for f in (torch.nanmean, torch.nansum):
                for dim in (0, (0, 1), None):
                    torch.testing.assert_close(
                        f(d, dim).full_tensor(), f(x, dim), equal_nan=True
                    )

    simulate(on_rank, 4)


def test_deviation_of_equal_elements_has_gradient_zero(x: torch.Tensor) -> None:
    x[:, 0] = 1.5
    x[:, :, 1] = 0
    assert not sweep(lambda x: x.std(0), x, meshes=((4,),))


def test_integers_and_bools() -> None:
    i = torch.randint(-5, 5, (5, 3))
    assert not sweep(
        lambda x: (x.sum(0), x.sum(), x.prod(0), x.any(0), x.all(), x.count_nonzero(0)),
        i,
        meshes=MESHES,
    )
    b = i > 0
    assert not sweep(lambda x: (x.sum(0), x.any(), x.all(0, keepdim=True)), b, meshes=MESHES)
    u = i.abs().to(torch.uint8)
    assert not sweep(lambda x: (x.any(0), x.all(), x.sum()), u, meshes=((4,),))


def test_logsumexp(x: torch.Tensor) -> None:
    assert not sweep(lambda x: x.logsumexp(0), x * 300, meshes=MESHES)
    assert not sweep(lambda x: torch.logsumexp(x, (0, 2), True), x, meshes=((4,),))
    x[1], x[:, 1, 1], x[2, 2, 2] = -math.inf, -math.inf, math.inf

    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [S(0)])
        torch.testing.assert_close(d.logsumexp(0).full_tensor(), x.logsumexp(0))

    simulate(on_rank, 4)


def test_trace() -> None:
    torch.manual_seed(0)
    for shape in ((5, 6), (6, 3), (1, 7)):
        assert not sweep(
            torch.trace,
            torch.randn(*shape, dtype=torch.float64),
            meshes=((4,), (2, 2)),
            extra=3,
        )


def test_wrong_dims_raise_what_torch_raises(x: torch.Tensor) -> None:
    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (2,)), [S(0)])
        with pytest.raises(IndexError):
            d.sum(3)
        with pytest.raises(RuntimeError):
            d.sum((0, 0))
        with pytest.raises(RuntimeError):
            d.long().mean()

    simulate(on_rank, 2)


def test_narrow_floats_add_up_wide() -> None:
    x = torch.full((64, 3), 3000.0, dtype=torch.float16)

    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [S(0)])
        mean = d.mean(0)
        assert mean.dtype == torch.float16
        assert torch.equal(mean.full_tensor(), x.mean(0)), "the sum alone does not fit a half"
        assert d.var(0).dtype == torch.float16

    simulate(on_rank, 4)


def test_a_sum_stays_pending() -> None:
    x = torch.randn(5, 3)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        d = distribute_tensor(x, mesh, [S(0)])
        with CommLog() as log:
            assert d.sum(0).placements == (P,)
            assert d.mean().placements == (P,)
            assert d.sum(1).placements == (S(0),)
            assert lay_out(x, mesh, [P]).sum(0).placements == (P,)
            assert lay_out(x, mesh, [P]).mean().placements == (P,)
        assert log.bytes == 0, "a sum needs no bytes"

    simulate(on_rank, 4)


def test_second_derivatives(x: torch.Tensor) -> None:
    def slope(f):
        def fn(x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad((f(x) ** 3).sum(), x, create_graph=True)[0]

        return fn

    for f in (
        lambda x: x.var(0),
        lambda x: x.prod(0),
        lambda x: x.logsumexp(0),
        lambda x: x.amax(0),
        lambda x: x.mean(0),
    ):
        assert not sweep(slope(f), x, meshes=((4,),), extra=1)


def all_reduce(n: int, k: int = 4) -> int:
    """Bytes that all k ranks together receive for n doubles each."""
    return 2 * (k - 1) * 8 * n


def test_only_partial_results_move(x: torch.Tensor) -> None:
    on = {d: ((S(d),),) for d in range(3)}
    for f in (torch.sum, torch.nansum, torch.mean, torch.count_nonzero, torch.trace):
        t = x[:, 0] if f is torch.trace else x
        assert bytes_moved(f, [t], (4,), on[0]) == 0
    for f in (torch.var, torch.std, torch.prod, torch.logsumexp, torch.any, torch.all):
        assert bytes_moved(lambda x, f=f: f(x, 0), [x], (4,), on[1]) == 0, f
    assert bytes_moved(lambda x: x.var(0), [x], (4,), on[0]) == 2 * all_reduce(12)
    assert bytes_moved(lambda x: x.logsumexp(0), [x], (4,), on[0]) == 2 * all_reduce(12)
    assert bytes_moved(lambda x: x.prod(0), [x], (4,), on[0]) == all_reduce(12)
    assert bytes_moved(lambda x: x.nanmean(0), [x], (4,), on[0]) == all_reduce(12)
    assert bytes_moved(lambda x: x.any(0), [x], (4,), on[0]) == all_reduce(12) // 8
