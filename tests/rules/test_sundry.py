"""Ops without relatives; and products that are none, where a logarithm is infinite."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.testing import bytes_moved, sweep

X = torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("fn", [torch.xlogy, torch.special.xlog1py])
def test_a_pending_sum_times_an_infinite_logarithm_is_settled_first(fn):
    x = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    y = torch.tensor([0.0 if fn is torch.xlogy else -1.0] * 3, dtype=torch.float64)
    assert not sweep(fn, x, y, grad=False)


def test_glu():
    assert not sweep(lambda x: F.glu(x, 1), X, twice=True)
    assert bytes_moved(lambda x: F.glu(x, 1), [X], (2,), ((Shard(0),),)) == 0


def test_meshgrid_and_unravel_index():
    a, b = X[0].clone(), X[:, 1].clone()
    assert not sweep(lambda a, b: torch.meshgrid(a, b, indexing="xy"), a, b)
    combo = ((Shard(0),), (Replicate(),))
    assert (
        bytes_moved(lambda a, b: torch.meshgrid(a, b, indexing="ij"), [a, b], (2,), combo) == 0
    )
    i = torch.arange(24).reshape(4, 6)
    assert not sweep(lambda i: torch.unravel_index(i, (2, 12)), i)


@pytest.mark.parametrize("input", [torch.ones(1).double(), torch.ones(5).double()])
def test_addmv_where_a_rank_has_no_rows(input):
    mat, vec = torch.randn(5, 3).double(), torch.randn(3).double()
    assert not sweep(torch.addmv, input, mat, vec, meshes=[(4,)])


@pytest.mark.parametrize("transposed", [False, True])
def test_second_gradients_of_convolutions_where_a_rank_has_no_rows(transposed):
    conv = F.conv_transpose1d if transposed else F.conv1d
    x, w, b = (torch.randn(n).double() for n in ((1, 3, 4), (3, 3, 3), (3,)))
    assert not sweep(lambda x, w, b: conv(x, w, b), x, w, b, meshes=[(2,)], twice=True)


def test_second_gradients_of_pools_where_a_rank_has_no_rows():
    x = torch.randn(1, 2, 6).double()
    for fn in (lambda x: F.avg_pool1d(x, 2), lambda x: F.max_pool1d(x, 2)):
        assert not sweep(fn, x, meshes=[(2,)], twice=True)


def test_weights_of_integers_where_a_rank_has_nothing_to_count():
    x, w = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([3, 1, 2, 5, 4])
    assert not sweep(lambda x, w: torch.bincount(x, w), x, w, meshes=[(4,)], grad=False)


def test_addr_and_addbmm_leave_a_pending_sum():
    batch = torch.randn(4, 3, 5).double(), torch.randn(4, 5, 2).double()
    input = torch.randn(3, 2).double()
    assert not sweep(torch.addbmm, input, *batch, meshes=[(2,)])
    combo = ((Replicate(),), (Shard(0),), (Shard(0),))
    assert bytes_moved(torch.addbmm, [input, *batch], (2,), combo) == 0
    a, b = torch.randn(3).double(), torch.randn(2).double()
    assert not sweep(torch.addr, input, a, b, meshes=[(2,)])
    assert bytes_moved(torch.vdot, [a, a.clone()], (2,), ((Partial(),), (Replicate(),))) == 0


def test_lists_of_vectors_spread_over_a_grid():
    a, b = X[0].clone(), X[:, 1].clone()
    for order in ("xy", "ij"):
        fn = lambda a, b, order=order: torch.meshgrid([a, b], indexing=order)  # noqa: E731
        assert not sweep(fn, a, b, extra=2)
        assert bytes_moved(fn, [a, b], (2,), ((Shard(0),), (Replicate(),))) == 0


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_combinations(r, again):
    fn = lambda x: torch.combinations(x, r, again)  # noqa: E731
    for n in (1, 2, 5):
        assert not sweep(fn, X[0, :n].clone(), extra=2, twice=True)
    vector = ((Shard(0),),) if r == 1 else ((Partial(),),)
    assert bytes_moved(fn, [X[0].clone()], (2,), vector) == 0


def test_slopes_below_zero():
    for weight in (torch.tensor(0.3), torch.tensor([0.3]), torch.rand(6)):
        weight = weight.double()
        assert not sweep(F.prelu, X, weight, extra=2, twice=True)
        assert not sweep(F.prelu, torch.randn(3, 6, 2).double(), weight, extra=2)
        for d in (0, 1):
            assert not bytes_moved(F.prelu, [X, weight], (2,), ((Shard(d),), (Replicate(),)))
    assert not sweep(F.prelu, X[0].clone(), torch.tensor([0.3]).double())


def test_close_elements():
    y = X + torch.tensor([0.0, 1e-9, 1e-3, 1.0, float("nan"), float("inf")]).double()
    fn = lambda x, y: torch.isclose(x, y, rtol=1e-5, equal_nan=True)  # noqa: E731
    assert not sweep(fn, y, y[0].clone(), grad=False)
    assert not sweep(fn, X, y, grad=False)
    assert not bytes_moved(fn, [X, y], (2,), ((Shard(1),), (Replicate(),)))


@pytest.mark.parametrize("bias", [False, True])
def test_bilinear(bias):
    a, b, w = (torch.randn(n).double() for n in ((5, 2, 3), (5, 2, 4), (3, 3, 4)))
    more = [torch.randn(3).double()] if bias else []
    assert not sweep(F.bilinear, a, b, w, *more, extra=2, twice=True)
    assert not sweep(F.bilinear, a[0, 0].clone(), b[0, 0].clone(), w, *more, extra=1)
    r = (Replicate(),)
    a = torch.randn(4, 4).double()
    for combo in (
        ((Shard(0),), (Shard(0),), r),
        ((Shard(1),), r, (Shard(1),)),
        ((Partial(),), r, r),
    ):
        args = [a, a.clone(), torch.randn(3, 4, 4).double(), *more]
        assert not bytes_moved(F.bilinear, args, (2,), (*combo, *[r] * len(more)))


def test_reflected_product():
    vector, batch = torch.randn(3).double(), torch.randn(5, 3, 2).double()
    fn = lambda x, v: x.__rmatmul__(v)  # noqa: E731
    assert not sweep(fn, batch, vector, extra=2)
    assert not bytes_moved(fn, [batch, vector], (2,), ((Shard(0),), (Replicate(),)))
