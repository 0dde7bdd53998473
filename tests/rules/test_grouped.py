"""``grouped_mm``: rows, columns, the contracted dim and the groups may be cut."""

from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
A = torch.randn(7, 8)
W = torch.randn(3, 8, 8)
OFFS = torch.tensor([2, 2, 7], dtype=torch.int32)


def product(a: Any, w: Any, offs: Any) -> Any:
    return F.grouped_mm(a, w, offs=offs)


def test_every_layout() -> None:
    assert not sweep(product, A, W, OFFS, meshes=((4,),), extra=3, tol=1e-5)
    assert not sweep(product, A, W, OFFS, meshes=((2, 2),), extra=3, tol=1e-5)


def test_transposed_matrices() -> None:
    def transposed(a: Any, w: Any, offs: Any) -> Any:
        return F.grouped_mm(a, w.transpose(-2, -1), offs=offs)

    assert not sweep(transposed, A, W, OFFS, meshes=((2, 2),), extra=2, tol=1e-5)


def test_batches_of_one_size() -> None:
    assert not sweep(F.grouped_mm, torch.randn(3, 2, 8), W, meshes=((2,),), tol=1e-5)


def test_rows_of_no_group_are_not_summed() -> None:
    """torch leaves them undefined; a pending sum over groups must not spread them."""
    ends = torch.tensor([1, 3, 4], dtype=torch.int32)

    def inside(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        known = (torch.arange(7) < 4).unsqueeze(1)
        a = torch.where(known, a, 0.0)
        return torch.where(known, product(a, w, offs), 0.0)

    assert not sweep(inside, A, W, ends, meshes=((2,),), extra=0, tol=1e-5)


@pytest.mark.parametrize(
    ("a", "w"),
    [((S(0),), (R,)), ((R,), (S(0),)), ((S(1),), (S(1),)), ((R,), (S(2),))],
    ids=["rows", "groups", "contracted", "columns"],
)
def test_nothing_moves(a: Any, w: Any) -> None:
    assert bytes_moved(product, [A, W, OFFS], (2,), (a, w, (R,))) == 0
