"""Order statistics: rows stay where they are."""

from typing import Any

import pytest
import torch

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.testing.sweep import bytes_moved, sweep

S = Shard
MESHES = ((4,), (2, 2))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 3, 4, dtype=torch.float64)


FORMS = {
    "sort": lambda x: tuple(x.sort(1, descending=True)),
    "stable sort": lambda x: tuple(torch.sort(x, dim=1, stable=True)),
    "argsort": lambda x: x.argsort(1),
    "msort": lambda x: x.transpose(0, 1).msort().transpose(0, 1),
    "median": lambda x: tuple(x.median(1)),
    "nanmedian": lambda x: tuple(x.nanmedian(1, True)),
    "kthvalue": lambda x: tuple(x.kthvalue(2, 1)),
}


@pytest.mark.parametrize("name", FORMS)
def test_along_one_dim(x: torch.Tensor, name: str) -> None:
    assert not sweep(FORMS[name], x, meshes=MESHES, extra=2)
    assert not sweep(FORMS[name], x[:1], meshes=((4,),), extra=0)
    assert bytes_moved(FORMS[name], [x], (4,), ((S(0),),)) == 0
    assert bytes_moved(FORMS[name], [x], (4,), ((S(2),),)) == 0


def test_mode_and_full_median(x: torch.Tensor) -> None:
    assert not sweep(lambda x: tuple(x.mode(1)), (x * 2).round(), meshes=((4,),))
    assert not sweep(torch.median, x, meshes=((2,),))


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0])
def test_cdist(x: torch.Tensor, p: float) -> None:
    y = torch.randn(1, 2, 4, dtype=torch.float64)
    assert not sweep(lambda x, y: torch.cdist(x, y, p), x, y, meshes=MESHES)
    assert bytes_moved(torch.cdist, [x, x], (2, 2), ((S(0), S(1)), (S(0),))) == 0


def test_an_order_along_a_sharded_dim_stays_sharded() -> None:
    """What has no gradient keeps the layout of what is sorted, also in uneven and empty pieces."""
    x, n = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 3, (5, 3))

    def orders(x: Any, n: Any) -> Any:
        stable = torch.sort(n, dim=0, stable=True)
        return (
            torch.argsort(x, 0),
            torch.argsort(x, dim=-1, descending=True),
            n.sort(0, descending=True).values,
            stable,
            torch.msort(n),
            x[stable.indices[:, 0]],
        )

    assert not sweep(orders, x, n, meshes=((4,), (2, 2)), extra=4)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        ids = distribute_tensor(n, mesh, [S(0)])
        assert ids.argsort(0).placements == ids.sort(0).values.placements == (S(0),)

    simulate(on_rank, 2)


def test_quantiles_that_are_sharded(x: torch.Tensor) -> None:
    q = torch.tensor([0.1, 0.5, 0.9, 1.0]).double()
    for keepdim in (False, True):
        fn = lambda x, q, k=keepdim: torch.quantile(x, q, 1, k)  # noqa: E731
        assert not sweep(fn, x, q, extra=4)
        assert not bytes_moved(fn, [x, q], (2,), ((Replicate(),), (S(0),)))
    assert not sweep(torch.nanquantile, x, q[:2].clone(), meshes=((4,),), extra=2)
