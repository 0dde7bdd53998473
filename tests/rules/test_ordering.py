"""Order statistics: rows stay where they are."""

import pytest
import torch

from shardwise import Shard
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
