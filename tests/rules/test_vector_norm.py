"""Norms of every order: values and torch's gradients, at zero vectors and ties too; partial results move."""

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard
from shardwise.testing.sweep import bytes_moved, sweep

R, S = Replicate(), Shard
ORDERS = [0, 1, 2, 3, 0.5, 1.5, -1, -0.5, math.inf, -math.inf]


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    x[1] = x[2, 1] = x[:, 2, 1] = 0
    return x


@pytest.fixture
def ties() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-2, 3, (5, 6)).double()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order(x: torch.Tensor, ties: torch.Tensor, order: float) -> None:
    assert not sweep(
        lambda x: torch.linalg.vector_norm(x, order, (0, 2)), x, meshes=((4,), (2, 2)), extra=2
    )
    assert not sweep(
        lambda x: torch.linalg.vector_norm(x, order, 0, keepdim=True),
        ties,
        meshes=((4,),),
        extra=1,
    )
    assert not sweep(lambda x: torch.norm(x, order), ties, meshes=((2, 2),), extra=2)


def test_ways_to_say_it(x: torch.Tensor) -> None:
    for f in (
        lambda x: x.norm(),
        lambda x: x.norm(dim=-1),
        lambda x: x.norm(1, 0, True),
        lambda x: torch.linalg.norm(x),
        lambda x: torch.linalg.norm(x, 3, dim=0),
        lambda x: torch.linalg.norm(x, "fro", dim=(0, 1)),
        lambda x: torch.linalg.norm(x, "nuc", dim=(0, 1)),
        lambda x: torch.linalg.matrix_norm(x),
        lambda x: torch.linalg.matrix_norm(x, 1),
        lambda x: torch.linalg.norm(x[0], 2),
        lambda x: torch.ops.aten.linalg_vector_norm(x, 2, [0]),
        lambda x: torch.linalg.vector_norm(x, dtype=torch.float64, dim=0),
    ):
        assert not sweep(f, x, meshes=((2,),), extra=0)


def test_complex() -> None:
    z = torch.randn(5, 3, dtype=torch.complex128)
    for order in (1, 2, 3, math.inf):
        assert not sweep(
            lambda z, p=order: torch.linalg.vector_norm(z, p, 0),
            z,
            meshes=((4,),),
            extra=0,
            grad=False,
        )


def test_second_derivative_with_a_rank_that_holds_nothing(x: torch.Tensor) -> None:
    x = x.abs() + 1

    def slope(order):
        def fn(x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.linalg.vector_norm(x, order, 0)
            return torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]

        return fn

    for order in (2, 3, 0.5, math.inf):
        assert not sweep(slope(order), x, meshes=((4,),), extra=0)


def test_made_of_norms(x: torch.Tensor, ties: torch.Tensor) -> None:
    y = torch.randn(5, 3, 4, dtype=torch.float64)
    for p in (2.0, 1.0, math.inf):
        assert not sweep(lambda x, p=p: F.normalize(x, p, 0), ties, meshes=((4,),), extra=1)
    assert not sweep(lambda x: F.normalize(x), y, meshes=((2, 2),))
    assert not sweep(lambda x, y: F.cosine_similarity(x, y, 0), x, y, meshes=((4,), (2, 2)))
    assert not sweep(
        lambda x, y: F.cosine_similarity(x, y), y, y[:, :1].clone() * 2, meshes=((2,),)
    )
    assert not sweep(lambda x, y: F.pairwise_distance(x, y), x, y, meshes=((4,),))
    assert not sweep(
        lambda x, y: F.pairwise_distance(x, y, p=3, keepdim=True), x, y[0], meshes=((2, 2),)
    )
    assert not sweep(lambda x, y: torch.dist(x, y, 3), x, y, meshes=((4,),))


def test_weight_norm() -> None:
    torch.manual_seed(0)
    v = torch.randn(5, 3, 4, dtype=torch.float64)
    for dim, shape in ((0, (5, 1, 1)), (2, (1, 1, 4)), (-1, ())):
        g = torch.rand(shape, dtype=torch.float64)
        assert not sweep(
            lambda v, g, d=dim: torch._weight_norm(v, g, d), v, g, meshes=((4,), (2, 2))
        )
        assert not sweep(lambda v, d=dim: torch.norm_except_dim(v, 2, d), v, meshes=((4,),))


def test_only_partial_results_move() -> None:
    x = torch.randn(64, 3, dtype=torch.float64)
    cut, row = ((S(0),),), 2 * 3 * 8 * 3  # an all_reduce of three doubles over four ranks
    for order in (2, 3, 0.5):
        assert (
            bytes_moved(lambda x, p=order: torch.linalg.vector_norm(x, p, 0), [x], (4,), cut)
            == row
        )
    assert (
        bytes_moved(lambda x: torch.linalg.vector_norm(x, math.inf, 0), [x], (4,), cut)
        == 2 * row
    )
    assert bytes_moved(lambda x: F.normalize(x, dim=0), [x], (4,), cut) == row
    for f in (lambda x: x.norm(dim=1), lambda x: F.normalize(x, dim=1)):
        assert bytes_moved(f, [x], (4,), cut) == 0
    two = (cut[0], cut[0])
    assert bytes_moved(lambda x, y: F.cosine_similarity(x, y, 0), [x, x], (4,), two) == 2 * row
    assert bytes_moved(lambda x, y: F.pairwise_distance(x, y), [x, x], (4,), two) == 0


def test_orders_that_add_up_leave_a_pending_sum(x: torch.Tensor) -> None:
    for order in (0, 1):
        assert not bytes_moved(lambda x, o=order: x.norm(o), [x], (4,), ((S(0),),))
        assert not sweep(
            lambda x, o=order: torch.linalg.vector_norm(x, o, (0, 1)), x, extra=2, twice=True
        )
    assert not bytes_moved(lambda x: x.norm(), [x[:, :0]], (4,), ((S(0),),))
    assert bytes_moved(lambda x: x.norm(), [x], (4,), ((S(0),),))


def test_second_gradients_of_the_euclidean_norm(x: torch.Tensor) -> None:
    """NaN at a zero vector, as torch has it, and nowhere else; a piece that is zero is not a zero vector."""
    for f in (lambda x: x.norm(dim=0), lambda x: x.norm(), lambda x: x[1].norm()):
        assert not sweep(f, x, extra=2, twice=True)


@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_rows_made_shorter(x: torch.Tensor, order: float) -> None:
    x = x + 0.01
    fn = lambda x: torch.renorm(x, order, 1, 2.0)  # noqa: E731
    assert not sweep(fn, x, extra=2)
    assert not sweep(lambda x: x.renorm(order, 0, 2.0), x, meshes=((4,),), extra=1)
    assert not bytes_moved(fn, [x], (2,), ((S(1),),))
    assert (
        bytes_moved(fn, [x], (2,), ((S(0),),)) <= 2 * 2 * 2 * 3 * 8
    )  # norms, and flags of NaN
