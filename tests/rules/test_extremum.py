"""Greatest and least over a sharded dim: torch's ties, NaNs, indices and gradients, from small messages."""

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


@pytest.fixture
def ties() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-1, 2, (6, 5)).double()


@pytest.mark.parametrize("op", ["max", "min"])
def test_values_and_indices(x: torch.Tensor, op: str) -> None:
    best, arg, full = getattr(torch, f"a{op}"), getattr(torch, f"arg{op}"), getattr(torch, op)
    assert not sweep(lambda x: best(x, (0, 2), True), x, meshes=MESHES, extra=2)
    assert not sweep(lambda x: best(x), x, meshes=((2, 2),), extra=2)
    assert not sweep(lambda x: tuple(full(x, 0)), x, meshes=MESHES, extra=2)
    assert not sweep(lambda x: tuple(full(x, dim=-1, keepdim=True)), x, meshes=((4,),), extra=0)
    assert not sweep(
        lambda x: (arg(x), arg(x, 0), arg(x, -1, True), arg(x, keepdim=True)),
        x,
        meshes=MESHES,
        extra=2,
    )


@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_are_settled_over_all_ranks(ties: torch.Tensor, op: str) -> None:
    best, arg, full = getattr(torch, f"a{op}"), getattr(torch, f"arg{op}"), getattr(torch, op)
    assert not sweep(lambda x: best(x, 0), ties, meshes=MESHES, extra=2)
    assert not sweep(lambda x: full(x), ties, meshes=MESHES, extra=2)
    assert not sweep(lambda x: tuple(full(x, 0)), ties, meshes=MESHES, extra=2)
    assert not sweep(lambda x: (arg(x), arg(x, 0), arg(x, 1)), ties, meshes=MESHES, extra=2)
    assert not sweep(lambda x: tuple(torch.aminmax(x, dim=0)), ties, meshes=((4,),), extra=2)
    assert not sweep(lambda x: tuple(torch.aminmax(x)), ties, meshes=((2, 2),), extra=2)


def test_nan_and_infinity(x: torch.Tensor) -> None:
    x[1, 1, 1] = x[3, 1, 1] = math.nan
    x[2, 2], x[:, 0, 0], x[4, 0, 1] = -math.inf, -math.inf, math.inf

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        for d in range(3):
            y = distribute_tensor(x, mesh, [S(d)])
            for dim in range(3):
                for op in (torch.max, torch.min):
                    got, want = op(y, dim), op(x, dim)
                    torch.testing.assert_close(
                        got.values.full_tensor(), want.values, equal_nan=True
                    )
                    assert torch.equal(got.indices.full_tensor(), want.indices)
            assert y.max().full_tensor().isnan()
            assert y.argmax().full_tensor() == x.argmax()

    simulate(on_rank, 4)


def test_few_rows(x: torch.Tensor) -> None:
    few = x[:2]
    assert not sweep(
        lambda x: (x.amax(0), *x.max(0), x.argmin(0), x.min(), x.argmax()),
        few,
        meshes=((4,),),
        extra=1,
    )
    low = torch.full((3, 2), -math.inf)

    def on_rank() -> None:
        d = distribute_tensor(low, init_device_mesh("cpu", (4,)), [S(0)])
        assert torch.equal(d.max(0).indices.full_tensor(), low.max(0).indices)
        assert torch.equal(d.argmin(0).full_tensor(), low.argmin(0))

    simulate(on_rank, 4)


def test_integers_and_bools() -> None:
    torch.manual_seed(0)
    i = torch.randint(-2, 2, (5, 3))
    assert not sweep(
        lambda x: (x.amax(0), *x.max(0), *x.min(1), x.argmax(), x.max()), i, meshes=MESHES
    )
    assert not sweep(lambda x: (x.amax(0), *x.max(0), x.min()), i > 0, meshes=((4,),))
    low = torch.full((3, 2), torch.iinfo(torch.int64).min)
    assert not sweep(lambda x: (*x.max(0), x.argmax()), low, meshes=((4,),))


def test_two_tensors_are_elementwise(x: torch.Tensor) -> None:
    assert not sweep(lambda x, y: torch.max(x, y) + x.min(y), x, x.flip(0)[0], meshes=((2,),))
    assert bytes_moved(torch.max, [x, x], (4,), ((S(0),), (S(0),))) == 0


def test_an_empty_dim_raises_what_torch_raises() -> None:
    def on_rank() -> None:
        d = distribute_tensor(torch.ones(0, 3), init_device_mesh("cpu", (2,)), [S(1)])
        with pytest.raises(IndexError):
            d.amax(0)
        with pytest.raises(RuntimeError):
            d.max()
        assert d.amax(1).shape == (0,)

    simulate(on_rank, 2)


@pytest.mark.parametrize("largest", [True, False])
def test_topk(x: torch.Tensor, largest: bool) -> None:
    for k in (0, 1, 3, 5):
        assert not sweep(lambda x, k=k: tuple(x.topk(k, 0, largest)), x, meshes=MESHES, extra=1)
    assert not sweep(lambda x: tuple(x.topk(2, largest=largest)), x, meshes=((4,),))
    perm = torch.randperm(35).view(7, 5)
    assert not sweep(lambda x: tuple(x.topk(4, 0, largest)), perm, meshes=MESHES)


def test_topk_prefers_what_is_there_to_what_fills() -> None:
    low = torch.full((5, 2), -math.inf)
    low[3, 0], low[4, 1] = math.nan, math.nan

    def on_rank() -> None:
        d = distribute_tensor(low, init_device_mesh("cpu", (4,)), [S(0)])
        for largest in (True, False):
            value, index = d.topk(5, 0, largest)
            want = low.topk(5, 0, largest).values
            torch.testing.assert_close(value.full_tensor(), want, equal_nan=True)
            assert torch.equal(
                index.full_tensor().sort(0).values, torch.arange(5)[:, None].expand(5, 2)
            )

    simulate(on_rank, 4)


def test_only_candidates_move() -> None:
    x = torch.randn(64, 3, dtype=torch.float64)
    cut, row = ((S(0),),), 2 * 3 * 8 * 3  # an all_reduce of three doubles over four ranks
    assert bytes_moved(lambda x: x.amax(0), [x], (4,), cut) == 2 * row
    assert bytes_moved(lambda x: x.max(0), [x], (4,), cut) == 3 * row
    assert bytes_moved(lambda x: x.argmin(0), [x], (4,), cut) == 3 * row
    assert bytes_moved(lambda x: x.topk(2, 0), [x], (4,), cut) == 2 * (4 * 3 * 2 * 3 * 8)
    for f in (
        lambda x: x.amax(1),
        lambda x: x.max(1),
        lambda x: x.argmax(1),
        lambda x: x.topk(2),
    ):
        assert bytes_moved(f, [x], (4,), cut) == 0
