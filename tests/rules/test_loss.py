"""Losses: every reduction, with rows, elements or classes cut, and nothing gathered."""
# ruff: noqa: B023  (every lambda is called before its loop goes on)

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, check, sweep

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args"),
    pytest.mark.filterwarnings("ignore:Using a target size"),
]
R, S, P = Replicate(), Shard, Partial()
REDUCTIONS = ["mean", "sum", "none"]
f64 = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=f64)


# -- elements ---------------------------------------------------------------------------------------
ELEMENTS: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth": partial(F.smooth_l1_loss, beta=0.7),
    "huber": partial(F.huber_loss, delta=0.5),
    "kl": F.kl_div,
    "kl_log": partial(F.kl_div, log_target=True),
    "hinge": partial(F.hinge_embedding_loss, margin=0.8),
    "poisson": partial(F.poisson_nll_loss, log_input=True),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements(name: str, reduction: str) -> None:
    loss = partial(ELEMENTS[name], reduction=reduction)
    assert not sweep(loss, rand(5, 3), rand(5, 3).abs() + 0.1, meshes=((4,),), extra=3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_signs_and_probabilities(reduction: str) -> None:
    x, signs = rand(5, 3), torch.sign(rand(5, 3))
    probs, target = torch.rand(5, 3, dtype=f64), torch.rand(5, 3, dtype=f64)
    one = {"meshes": ((4,),), "extra": 3}
    assert not sweep(lambda x: F.soft_margin_loss(x, signs, reduction=reduction), x, **one)
    assert not sweep(
        lambda x, y, s: F.margin_ranking_loss(x, y, s, 0.3, reduction=reduction),
        x,
        rand(5, 3),
        signs,
        **one,
    )
    assert not sweep(
        lambda p, t: F.binary_cross_entropy(p.sigmoid(), t.sigmoid(), reduction=reduction),
        x,
        target,
        **one,
    )
    weight = torch.rand(3, dtype=f64)
    assert not sweep(
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t.detach(), w.detach(), pos_weight=w.detach(), reduction=reduction),
        x, probs, weight, **one,
    )  # fmt: skip
    assert not sweep(
        lambda x, t, w: F.binary_cross_entropy(
            x.sigmoid(), t.sigmoid(), w.detach(), reduction=reduction
        ),
        x,
        probs,
        weight,
        **one,
    )
    var = torch.rand(5, 3, dtype=f64) + 0.1
    for v in (var, var[:, 0], var[:, :1], var[:1, :] if reduction == "none" else var):
        if v.shape == (1, 3):
            continue
        assert not sweep(
            lambda x, t, v: F.gaussian_nll_loss(
                x, t, v.abs() + 0.1, full=True, reduction=reduction
            ),
            x,
            probs,
            v,
            **one,
        )


def test_weighted_means() -> None:
    w = torch.rand(5, 3, dtype=f64)
    for reduction in REDUCTIONS:
        assert not sweep(
            lambda x, y, w: F.mse_loss(x, y, weight=w, reduction=reduction),
            rand(5, 3),
            rand(5, 3),
            w,
            meshes=((4,), (2, 2)),
        )
    assert not sweep(
        lambda x, y, w: F.huber_loss(x, y, weight=w),
        rand(5, 3),
        rand(5, 3),
        w,
        meshes=((4,), (2, 2)),
    )


def test_batchmean_old_spellings_and_broadcast() -> None:
    x, y = rand(5, 3), torch.rand(5, 3, dtype=f64)
    assert not sweep(partial(F.kl_div, reduction="batchmean"), x, y)
    for average, reduce in (
        (True, None),
        (False, None),
        (None, True),
        (None, False),
        (False, True),
        (True, False),
    ):
        assert not sweep(lambda x, y: F.mse_loss(x, y, average, reduce), x, y, meshes=((2,),))
        assert not sweep(
            lambda x: F.cross_entropy(
                x, torch.tensor([0, 1, 2, 2, 1]), None, average, -100, reduce
            ),
            x,
            meshes=((2,),),
        )
    assert not sweep(F.mse_loss, x, rand(3), meshes=((4,),))
    assert not sweep(F.mse_loss, x, rand(5, 1), meshes=((4,),))
    assert not sweep(
        F.mse_loss, torch.tensor(1.0, dtype=f64), torch.tensor(3.0, dtype=f64), meshes=((2,),)
    )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_aten_forms(number: int) -> None:
    aten = torch.ops.aten
    x, y = rand(5, 3), torch.rand(5, 3, dtype=f64)
    for op in (aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div):
        assert not sweep(
            lambda x, y: op.default(x, y, number), x, y, meshes=((4,),), extra=2, grad=False
        )
    assert not sweep(
        lambda x, y: aten.binary_cross_entropy_with_logits.default(x, y, None, None, number),
        x,
        y,
        meshes=((4,),),
        grad=False,
    )
    target = torch.tensor([0, 2, 1, 1, 2])
    weight = torch.rand(3, dtype=f64)
    for w in (None, weight):
        assert not sweep(
            lambda x: aten.nll_loss_forward.default(x, target, w, number, 1), x, grad=False
        )
        assert not sweep(
            lambda x: aten.nll_loss_nd.default(x, target, w, number, 1),
            x,
            meshes=((2,),),
            grad=False,
        )
        assert not sweep(
            lambda x: aten.cross_entropy_loss.default(x, target, w, number, 1, 0.1),
            x,
            meshes=((2,),),
            grad=False,
        )
    grid = torch.randint(0, 3, (2, 2, 3))
    assert not sweep(
        lambda x: aten.nll_loss2d_forward.default(x, grid, None, number, 1),
        rand(2, 3, 2, 3),
        meshes=((2, 2),),
        grad=False,
    )


# -- rows -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows(reduction: str) -> None:
    x, y, z = rand(5, 3), rand(5, 3), rand(5, 3)
    signs = torch.sign(rand(5))
    labels, many = torch.tensor([0, 2, 1, 1, 2]), torch.tensor([[0, 2, -1]] * 5)
    one = {"meshes": ((4,),), "extra": 3}
    assert not sweep(
        lambda x, y, s: F.cosine_embedding_loss(x, y, s, 0.1, reduction=reduction),
        x,
        y,
        signs,
        **one,
    )
    assert not sweep(
        lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True, reduction=reduction),
        x,
        y,
        z,
        **one,
    )
    assert not sweep(
        lambda x, t: F.multi_margin_loss(x, t, reduction=reduction), x, labels, **one
    )
    assert not sweep(
        lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), x, many, **one
    )
    assert not sweep(
        lambda x, t: F.multilabel_soft_margin_loss(x, t.sigmoid(), reduction=reduction),
        x,
        y,
        **one,
    )
    weight = torch.rand(3, dtype=f64)
    assert not sweep(
        lambda x, t: F.multi_margin_loss(x, t, weight=weight, reduction=reduction),
        x,
        labels,
        **one,
    )


def test_other_losses_go_down_the_ladder() -> None:
    logp = rand(6, 2, 4).log_softmax(-1)
    targets = torch.tensor([[1, 2, 3], [2, 2, 1]])
    lengths = torch.tensor([6, 5]), torch.tensor([3, 2])
    assert not sweep(lambda x: F.ctc_loss(x, targets, *lengths), logp, meshes=((2,),))
    assert not sweep(
        F.triplet_margin_with_distance_loss, rand(5, 3), rand(5, 3), rand(5, 3), meshes=((2,),)
    )


# -- classes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weighted", "smoothing"), [(False, 0.0), (False, 0.1), (True, 0.0), (True, 0.1)]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy(reduction: str, weighted: bool, smoothing: float) -> None:
    target = torch.tensor([0, 6, 3, 3, 5])
    weight = torch.rand(7, dtype=f64) if weighted else None

    def loss(x: Tensor, t: Tensor, w: Any = weight) -> Tensor:
        w = None if w is None else w.detach()
        return F.cross_entropy(
            x, t, w, ignore_index=3, reduction=reduction, label_smoothing=smoothing
        )

    operands = [rand(5, 7), target, *([weight] if weighted else [])]
    assert not sweep(loss, *operands, meshes=((4,), (2, 2)), extra=2)
    assert not sweep(
        loss, rand(5, 7, 2), target.view(5, 1).expand(5, 2).contiguous(), meshes=((2,),)
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_probabilities(reduction: str) -> None:
    weight = torch.rand(7, dtype=f64)
    for smoothing in (0.0, 0.2):
        for w in (None, weight):
            loss = partial(
                F.cross_entropy, weight=w, reduction=reduction, label_smoothing=smoothing
            )
            assert not sweep(loss, rand(5, 7), rand(5, 7).softmax(1), meshes=((4,),))
    assert not sweep(
        partial(F.cross_entropy, reduction=reduction),
        rand(2, 3, 2),
        rand(2, 3, 2).softmax(1),
        meshes=((4,),),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss(reduction: str) -> None:
    target = torch.tensor([0, 6, 3, 3, 5])
    for w in (None, torch.rand(7, dtype=f64)):
        loss = partial(F.nll_loss, weight=w, ignore_index=3, reduction=reduction)
        assert not sweep(lambda x, t: loss(x, t), rand(5, 7), target, meshes=((2,), (2, 2)))
    assert not sweep(
        lambda x, t: F.nll_loss(x, t, reduction=reduction),
        rand(2, 3, 2, 3),
        torch.randint(0, 3, (2, 2, 3)),
        meshes=((4,),),
    )


def test_one_row_few_classes_and_all_ignored() -> None:
    for reduction in REDUCTIONS:
        assert not sweep(
            lambda x, t: F.cross_entropy(x, t, reduction=reduction),
            rand(6),
            torch.tensor(4),
            meshes=((2,), (4,)),
        )
        assert not sweep(
            lambda x, t: F.cross_entropy(x, t, reduction=reduction, label_smoothing=0.1),
            rand(3, 2),
            torch.tensor([1, 0, 1]),
            meshes=((4,),),
        )
    ignored = torch.full((5,), -100)
    assert not sweep(
        lambda x, t: F.cross_entropy(x, t), rand(5, 7), ignored, meshes=((2,), (4,))
    )
    assert not sweep(
        lambda x, t: F.cross_entropy(x, t, reduction="sum"), rand(5, 7), ignored, meshes=((4,),)
    )


def test_masked_and_large_logits() -> None:
    x = rand(4, 6)
    x[0, 1], x[2] = -torch.inf, x[2] + 1e4
    target = torch.tensor([0, 5, 2, 3])
    for n in (2, 4):
        for dim in (0, 1):
            assert check(lambda x: F.cross_entropy(x, target), [x], (n,), ((S(dim),),)) is None


def test_target_out_of_range_raises_where_classes_are_cut() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        F.cross_entropy(distribute_tensor(rand(2, 4), mesh, [S(1)]), torch.tensor([1, 4]))

    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        simulate(on_rank, 2)


def test_double_backward_through_cut_classes() -> None:
    x = rand(3, 5)

    def penalty(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(
            F.cross_entropy(x, torch.tensor([1, 4, 0])), x, create_graph=True
        )
        return (g * g).sum()

    assert not sweep(penalty, x, meshes=((2,), (4,)))


def test_halves_do_not_overflow() -> None:
    x = torch.full((64, 4), 100.0, dtype=torch.float16)
    x[:, 0] = -5000.0
    target = torch.zeros(64, dtype=torch.int64)

    def on_rank() -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        cut = [distribute_tensor(x, mesh, [S(dim)]) for dim in (0, 1)]
        losses = [
            *(F.cross_entropy(y, target) for y in cut),
            F.l1_loss(cut[0] * 10, torch.zeros_like(x)),
        ]
        return [loss.full_tensor().item() for loss in losses]

    want = F.cross_entropy(x.float(), target).item()
    assert simulate(on_rank, 2)[0] == pytest.approx(
        [want, want, (x.float() * 10).abs().mean().item()], rel=2e-3
    )


def test_what_moves() -> None:
    x, target, y = rand(6, 8), torch.randint(0, 8, (6,)), rand(6, 8)
    rows, classes = ((S(0),), (S(0),)), ((S(1),), (R,))
    for reduction in ("sum", "none"):
        assert (
            bytes_moved(
                lambda x, t: F.cross_entropy(x, t, reduction=reduction), [x, target], (2,), rows
            )
            == 0
        )
        assert (
            bytes_moved(
                lambda x, t: F.nll_loss(x, t, reduction=reduction), [x, target], (2,), classes
            )
            == 0
        )
    # one count; the maximum and the sum of each row
    assert bytes_moved(F.cross_entropy, [x, target], (2,), rows) == 2 * 8
    assert bytes_moved(F.cross_entropy, [x, target], (2,), classes) == 2 * 2 * 6 * 8
    for reduction in REDUCTIONS:
        for d in (0, 1):
            assert (
                bytes_moved(
                    partial(F.mse_loss, reduction=reduction), [x, y], (2,), ((S(d),), (S(d),))
                )
                == 0
            )


@pytest.mark.parametrize("cut", [(S(0), R), (S(0), S(1)), (S(1), S(0)), (S(0), S(0))], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        F.nll_loss,
        partial(F.cross_entropy, label_smoothing=0.1),
        partial(F.cross_entropy, weight=torch.ones(8, dtype=f64)),
        lambda x, t: F.cross_entropy(x.bfloat16(), t),
    ],
)
def test_a_wrong_target_of_one_rank_raises_on_all(loss: Any, cut: Any) -> None:
    def fn() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(6, 8, dtype=f64), mesh, cut)
        rows = [p if p == S(0) else R for p in cut]
        target = distribute_tensor(torch.tensor([0, 1, 2, 3, -100, 8]), mesh, rows)
        with pytest.raises(IndexError, match="Target 8 is out of bounds"):
            loss(x, target)
        good = distribute_tensor(torch.tensor([0, 1, 2, 3, -100, 7]), mesh, rows)
        assert loss(x, good).full_tensor().isfinite()  # and the ranks are where they were

    simulate(fn, 4)
