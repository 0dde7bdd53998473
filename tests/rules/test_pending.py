"""A pending sum passes what is linear in it: nothing moves, values and gradients are those of one device."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.testing import bytes_moved, sweep
from shardwise.testing.sweep import check

G = torch.Generator().manual_seed(5)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=G)


X, W, B = rand(4, 6), rand(6), rand(4, 6)
IMAGE, VOLUME = rand(2, 1, 3, 4), rand(1, 2, 2, 1, 3)
GRID = rand(2, 3, 2, 2).tanh()
PLACES = torch.tensor([[[0, 3, 5], [5, 1, 4]]])
IDS, CLASSES = torch.tensor([[0, 3, 2], [2, 1, 0]]), torch.tensor([1, 5, -100, 0])
MASK = torch.tensor([True, False, True, True, False, True])
SHARES = rand(4, 6).softmax(1)
SPD = torch.eye(3, dtype=torch.float64) + 0.1 * rand(3, 3)

# name: (function of the tensors, the tensors, the positions of those that may be pending together)
CASES = {
    "nearest": (lambda x: F.interpolate(x, (3, 7)), [IMAGE], [0]),
    "nearest-exact": (
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
        [IMAGE],
        [0],
    ),
    "linear": (lambda x: F.interpolate(x, 5, mode="linear"), [rand(2, 1, 4)], [0]),
    "bilinear": (lambda x: F.interpolate(x, (3, 7), mode="bilinear"), [IMAGE], [0]),
    "bicubic": (
        lambda x: F.interpolate(x, (6, 7), mode="bicubic", align_corners=True),
        [IMAGE],
        [0],
    ),
    "antialias": (
        lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True),
        [IMAGE],
        [0],
    ),
    "trilinear": (lambda x: F.interpolate(x, (2, 3, 3), mode="trilinear"), [VOLUME], [0]),
    "area": (lambda x: F.interpolate(x, (3, 2), mode="area"), [IMAGE], [0]),
    "max_unpool1d": (lambda x, i: F.max_unpool1d(x, i, 2), [rand(1, 2, 3), PLACES], [0]),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        [rand(1, 1, 2, 3), PLACES.reshape(1, 1, 2, 3)],
        [0],
    ),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), [IMAGE, GRID], [0]),
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=2), [IDS, rand(4, 5)], [1]),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w, mode="mean"), [IDS, rand(4, 5)], [1]),
    "embedding_bag weights": (
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        [IDS, rand(4, 5), rand(2, 3)],
        [2],
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [rand(2, 3, 4), rand(2, 5, 4), rand(2, 5, 3)],
        [2],
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [rand(2, 2, 4, 4), rand(2, 2, 4, 4), rand(2, 2, 4, 4)],
        [2],
    ),
    "bce": (
        lambda x, t, w: F.binary_cross_entropy(x, t.detach(), w.detach()),
        [SHARES, SHARES.flip(0), rand(4, 6)],
        [2],
    ),
    "bce with logits": (
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, w.detach(), reduction="sum"),
        [X, SHARES, W],
        [2],
    ),
    "multi_margin_loss": (
        lambda x, t, w: F.multi_margin_loss(x, t, weight=w.detach()),
        [X, CLASSES.clamp(0), W.abs()],
        [2],
    ),
    "multilabel_soft_margin_loss": (
        lambda x, t, w: F.multilabel_soft_margin_loss(x, t, w, reduction="none"),
        [X, SHARES, W],
        [2],
    ),
    "mse_loss": (
        lambda x, t, w: F.mse_loss(x, t, weight=w, reduction="sum"),
        [X, B, X.abs()],
        [2],
    ),
    "nll_loss": (F.nll_loss, [X, CLASSES], [0]),
    "nll_loss of weighted classes": (
        lambda x, t, w: F.nll_loss(x, t, w.detach()),
        [X, CLASSES, W.abs()],
        [0],
    ),
    "nll_loss weights": (
        lambda x, t, w: F.nll_loss(x, t, w.detach(), reduction="none"),
        [X, CLASSES, W.abs()],
        [2],
    ),
    "cross_entropy weights": (
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), reduction="sum", label_smoothing=0.1),
        [X, CLASSES, W.abs()],
        [2],
    ),
    "cross_entropy of shares": (F.cross_entropy, [X, SHARES], [1]),
    "cross_entropy of shares, weights": (F.cross_entropy, [X, SHARES, W.abs()], [2]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [X, W], [1]),
    "where": (lambda m, x, y: torch.where(m, x, y), [MASK, X, B], [1, 2]),
    "where one is whole": (lambda m, x, y: torch.where(m, x, y), [MASK, X, W], [1]),
    "where the other is whole": (lambda x, m, y: x.where(m, y), [X[:1], MASK, B], [2]),
    "masked sum": (lambda x, m: torch.masked.sum(x, 0, mask=m.expand_as(x)), [X, MASK], [0]),
    "masked mean": (lambda x, m: torch.masked.mean(x, 0, mask=m.expand_as(x)), [X, MASK], [0]),
    "add of other shapes": (torch.add, [X, W], [0, 1]),
    "rsub of other shapes": (torch.rsub, [X, W], [0, 1]),
    "lerp": (torch.lerp, [X, B, W.abs()], [0, 1]),
    "stft": (
        lambda x: torch.stft(x, 4, return_complex=True, window=torch.ones(4).double()),
        [rand(12)],
        [0],
    ),
    "stft window": (
        lambda x, w: torch.stft(x, 4, return_complex=True, window=w),
        [rand(2, 12), rand(4)],
        [1],
    ),
    "solve": (torch.linalg.solve_ex, [SPD, rand(3, 2)], [1]),
    "tensorsolve": (torch.linalg.tensorsolve, [SPD.reshape(3, 1, 3), rand(3, 1)], [1]),
    "index_reduce": (
        lambda x, i, s: torch.index_reduce(x, 1, i, s, "prod"),
        [X, IDS[0], rand(4, 3)],
        [0],
    ),
    "scatter_reduce": (
        lambda x, i, s: torch.scatter_reduce(x, 0, i, s, "prod"),
        [X, IDS, rand(2, 3)],
        [0],
    ),
    "masked_scatter of all": (torch.masked_scatter, [X, torch.tensor(True), B], [0, 2]),
    "put": (torch.put, [X, IDS, rand(2, 3)], [0, 2]),
    "put, adding": (lambda x, i, s: x.put(i, s, True), [X, IDS, rand(2, 3)], [0]),
    "diagonal_scatter": (torch.diagonal_scatter, [X, rand(4)], [0, 1]),
    "as_strided": (lambda x: torch.as_strided(x, (2, 3), (3, 1), 2), [X], [0]),
    "as_strided_copy": (lambda x: torch.as_strided_copy(x, (2, 3), (1, 2)), [X], [0]),
    "as_strided_scatter": (
        lambda x, s: torch.as_strided_scatter(x, s, (2, 3), (6, 1)),
        [X, rand(2, 3)],
        [1],
    ),
    "addmm of nothing": (torch.addmm, [X, rand(4, 0), rand(0, 6)], [0]),
}

ONCE = {"grid_sample", "embedding_bag", "embedding_bag weights"} | {
    "causal attention",
    "multi_margin_loss",
}  # torch has no second gradient
SLOW = {"bicubic", "linear", "bilinear", "trilinear", "grid_sample"}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_a_pending_sum_passes(name):
    fn, tensors, which = CASES[name]
    assert not sweep(fn, *tensors, meshes=[(2,)], twice=name not in ONCE)
    assert not sweep(fn, *tensors, meshes=[(2, 2)], extra=4)
    for n in (2, 3):
        combo = tuple((Partial() if i in which else Replicate(),) for i in range(len(tensors)))
        assert bytes_moved(fn, tensors, (n,), combo) == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, t, w: F.nll_loss(x, t, w.detach()),
        lambda x, t, w: F.cross_entropy(x, t, w.detach()),
        lambda x, t, w: F.mse_loss(x, x.flip(0), weight=w.expand(4, 6)),
    ],
)
def test_weights_that_a_mean_divides_by_are_settled(fn):
    tensors = [X, CLASSES, W.abs()]
    combo = ((Replicate(),), (Replicate(),), (Partial(),))
    assert bytes_moved(fn, tensors, (2,), combo) > 0
    assert not sweep(fn, *tensors, meshes=[(2,)])


def test_a_small_pending_sum_is_settled_before_it_is_spread_out():
    combo = ((Replicate(),), (Partial(),), (Replicate(),))
    assert bytes_moved(torch.where, [MASK, X[:1, 0], X], (2,), combo) == 2 * 8


def test_what_is_put_may_be_cut():
    put = [X, torch.arange(5), rand(5)]
    assert not sweep(lambda x, i, s: x.put(i, s, True), *put, meshes=[(4,)])
    combo = ((Replicate(),), (Shard(0),), (Shard(0),))
    assert bytes_moved(lambda x, i, s: x.put(i, s, True), put, (2,), combo) == 0


def test_unpooling_where_a_rank_has_no_channel():
    tensors = [rand(1, 2, 3), PLACES]
    combo = ((Shard(1), Replicate()), (Replicate(), Shard(1)))
    assert check(lambda x, i: F.max_unpool1d(x, i, 2), tensors, (2, 2), combo) is None
    assert not sweep(lambda x, i: F.max_unpool1d(x, i, 2), *tensors, meshes=[(4,)])
    combo = ((Shard(1),), (Shard(1),))
    assert bytes_moved(lambda x, i: F.max_unpool1d(x, i, 2), tensors, (4,), combo) == 0


def test_a_power_that_may_be_infinite_is_no_factor():
    combo = ((Partial(),), (Replicate(),))
    x, power = torch.tensor([1.0, 2.0]).double(), torch.tensor([2000.0, 1.0]).double()
    assert check(torch.ldexp, [x, power], (2,), combo, grad=False) is None


INF = float("inf")
FACTORS = {
    "times inf": lambda x: x * INF,
    "-inf times": lambda x: -INF * x,
    "over 0": lambda x: x / 0,
    "over -0.0": lambda x: x / -0.0,
    "other=": lambda x: torch.mul(x, other=INF),
    "in place": lambda x: x.clone().mul_(INF),
    "in place over 0": lambda x: x.clone().div_(0.0),
    "complex": lambda x: x * complex(INF, 0),
    "too large for the dtype": lambda x: x.float() * 1e39,
    "too small for the dtype": lambda x: x.float() / 1e-46,
}


@pytest.mark.parametrize("name", FACTORS)
def test_addends_of_unlike_signs_times_infinity_are_not_nan(name):
    assert not sweep(FACTORS[name], X, meshes=[(2,), (2, 2)], grad=False)


def test_a_sum_times_a_finite_number_moves_nothing():
    for f in (lambda x: x * 2.5, lambda x: x / 3, lambda x: 0 * x, lambda x: x / INF):
        assert bytes_moved(f, [X], (2,), ((Partial(),),)) == 0
    assert not sweep(lambda x: x * INF * 0 + 2 * x, X, meshes=[(2,)])


def test_a_choice_leaves_out_what_is_not_finite():
    x = torch.tensor([torch.nan, 1.0, -torch.inf, 2.0], dtype=torch.float64)
    m = torch.tensor([False, True, False, True])
    assert not sweep(lambda m, x, y: torch.where(m, x, y).sum(), m, x, rand(4), meshes=[(2,)])
    assert not sweep(lambda m, x, y: torch.where(m, y, x), m, x, rand(4), meshes=[(2,)])
