"""Tensors of which only a number or a dtype is read, and ``where`` that lists places."""

from __future__ import annotations

from typing import Any

import torch

from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
X = torch.randn(5, 3, 4, dtype=torch.float64)


def test_a_tensor_as_an_index() -> None:
    def read(x: Any, i: Any) -> Any:
        return x[i], x[i - 4], x[:, i - 3], x[..., i, None], x[i, 1:]

    assert not sweep(read, X, torch.tensor(3), meshes=((4,),), extra=2)


def test_a_tensor_as_a_bound() -> None:
    def read(x: Any, n: Any) -> Any:
        return x[:n], x[n:], x[:, : n - 1], x[1:n:2], x[n - 3 : n, ..., :n]

    assert not sweep(read, X, torch.tensor(3), meshes=((4,),), extra=2)


def test_a_bound_that_is_a_pending_sum() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        n = DTensor.from_local(torch.tensor(1 + mesh.get_rank()), mesh, [P])
        x = distribute_tensor(X, mesh, [S(0)], src_data_rank=None)
        assert torch.equal(x[:n].full_tensor(), X[:3])
        assert torch.equal(x[n].full_tensor(), X[3])

    simulate(on_rank, 2)


def test_an_element_is_a_view() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        i = distribute_tensor(torch.tensor(1), mesh)
        for ps in ([R], [S(0)], [S(2)]):
            x = distribute_tensor(X, mesh, ps, src_data_rank=None)
            x[i].fill_(7.0)
            x[i + 1] = 8.0
            x[i + 2 : i + 3] = 9.0
            want = X.clone()
            want[1], want[2], want[3] = 7.0, 8.0, 9.0
            assert torch.equal(x.full_tensor(), want)

    simulate(on_rank, 2)


def test_a_plain_tensor_cut_at_a_distributed_bound() -> None:
    def on_rank() -> None:
        n = distribute_tensor(torch.tensor(2), init_device_mesh("cpu", (2,)))
        assert torch.equal(X[:n], X[:2])
        assert isinstance(X[n], DTensor)

    simulate(on_rank, 2)


def test_a_cast_to_the_like_of_another_tensor() -> None:
    """Only its dtype is read: nothing moves, whatever its layout; a plain tensor stays plain."""
    other = torch.randn(5, 3, 4)

    def like(x: Any, y: Any) -> Any:
        return x.type_as(y), x.to(y), x.to(y, True, True), y.type_as(y)

    assert not sweep(like, X, other, meshes=((4,), (2, 2)), extra=2, tol=1e-6)
    for a in (S(0), S(1), P):
        for b in (S(0), S(1), P):
            assert bytes_moved(like, [X, other], (2,), ((a,), (b,))) == 0

    def on_rank() -> None:
        y = distribute_tensor(other, init_device_mesh("cpu", (2,)), [S(0)])
        for got in (X.type_as(y), X.to(y)):
            assert type(got) is torch.Tensor
            assert torch.equal(got, X.float())

    simulate(on_rank, 2)


def test_places_where_a_condition_holds() -> None:
    """Their number depends on values; the second call must not find a program of the first one's size."""

    def places(x: Any) -> Any:
        return torch.where(x > 0), torch.where(x > 1), torch.where(x[1] > 5)

    assert not sweep(places, X, meshes=((2,), (2, 2)), extra=2, grad=False)
