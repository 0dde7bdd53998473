"""The yardstick itself: it must be able to say no."""

import random

import pytest
import torch

from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.testing.calls import Call, put, take
from shardwise.testing.entry import cost_of
from shardwise.testing.judge import Reference, judge
from shardwise.testing.layouts import addend_weights, piece, randoms, singles
from shardwise.testing.libraries import Shardwise
from shardwise.testing.pieces import gradients_suffice, pieces_suffice


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def verdicts(fn, *tensors, mesh=(2,), twice=False, **flags):
    reference = Reference(Call(fn, list(tensors), **flags), twice=twice)
    return [o.verdict for o in judge(reference, Shardwise(), mesh, list(singles(tensors)))]


def test_right_is_right():
    assert set(verdicts(torch.mul, leaf(3, 5), leaf(5), twice=True)) == {"right"}


def test_a_wrong_value_is_wrong():
    def fn(x):
        return x * (3 if isinstance(x, DTensor) else 2)

    assert set(verdicts(fn, leaf(3, 5))) == {"wrong"}


def test_a_value_that_is_wrong_on_one_layout_only_is_found_there():
    def fn(x):
        wrong = isinstance(x, DTensor) and x.placements[0].is_shard(1)
        return x * (3 if wrong else 2)

    assert verdicts(fn, leaf(3, 5)) == ["right", "right", "wrong", "right"]


def test_a_wrong_gradient_is_wrong():
    def fn(x):
        return x * 2 + (x.detach() - x if isinstance(x, DTensor) else 0)

    assert set(verdicts(fn, leaf(3, 5))) == {"wrong"}


def test_a_wrong_second_gradient_is_wrong():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 2 * x.detach()

    def fn(x):
        return Square.apply(x) if isinstance(x, DTensor) else x * x

    assert set(verdicts(fn, leaf(3))) == {"right"}
    assert set(verdicts(fn, leaf(3), twice=True)) != {"right"}


def test_a_plain_result_is_wrong():
    assert set(
        verdicts(lambda x: x.full_tensor() if isinstance(x, DTensor) else x * 1, leaf(3))
    ) == {"wrong"}


def test_an_exception_is_an_error():
    def fn(x):
        if isinstance(x, DTensor) and x.placements[0].is_shard():
            raise RuntimeError("no")
        return x * 2

    assert verdicts(fn, leaf(3)) == ["right", "error", "right"]


def test_ranks_that_wait_for_each_other_are_a_hang():
    def fn(x):
        if (
            isinstance(x, DTensor)
            and x.placements[0].is_shard()
            and x.device_mesh.get_rank() == 0
        ):
            x.full_tensor()
        return x * 2

    assert verdicts(fn, leaf(3)) == ["right", "hang", "right"]


def test_only_shape_and_dtype_of_uninitialized_results_count():
    def fn(x):
        return x * (3 if isinstance(x, DTensor) else 2)

    with torch.no_grad():
        assert set(verdicts(fn, leaf(3).detach(), uninitialized=True)) == {"right"}


@pytest.mark.parametrize(
    ("fn", "placement", "want"),
    [
        (torch.exp, Shard(0), True),
        (torch.exp, Shard(1), True),
        (torch.exp, Partial(), False),
        (lambda x: x * 3, Partial(), True),
        (lambda x: x.sum(0), Shard(0), True),
        (lambda x: x.sum(0), Shard(1), True),
        (lambda x: x.cumsum(0), Shard(0), False),
        (lambda x: x.cumsum(0), Shard(1), True),
        (lambda x: x.softmax(0), Shard(0), False),
        (torch.isnan, Shard(0), True),
        (lambda x: torch.isnan(x).any(), Shard(0), False),
        (lambda x: x.flip(0), Shard(0), False),
        (lambda x: x @ x.T, Shard(1), True),
        (torch.exp, Replicate(), False),
        (lambda x: x == x.flip(0) + 1, Partial(), False),
        (lambda x: x.round(), Partial(), False),
        (lambda x: x.median(), Partial(), False),
        (lambda x: x.nansum(0), Partial(), False),
        (torch.nan_to_num, Partial(), False),
        (lambda x: x.clamp(0, 0), Partial(), False),
        (torch.nn.functional.hardshrink, Partial(), False),
        (lambda x: x.cumsum(0), Partial(), True),
        (lambda x: torch.fft.rfft(x), Partial(), True),
    ],
)
def test_whether_the_pieces_suffice(fn, placement, want):
    call = Call(fn, [torch.randn(5, 4, dtype=torch.float64)])
    assert pieces_suffice(call, 2, ((placement,),)) is want


def test_pieces_that_suffice_forward_may_not_backward():
    def polar(x, angle):
        return torch.polar(x, angle)

    combo = ((Partial(),), (Replicate(),))
    call = Call(polar, [leaf(4), leaf(4)])
    assert pieces_suffice(call, 2, combo)
    assert not gradients_suffice(Reference(call), 2, combo)
    call = Call(lambda x: torch.nn.functional.softshrink(x, 0.0), [leaf(4)])
    assert pieces_suffice(call, 2, combo[:1])  # the identity, whose gradient at zero is zero
    assert not gradients_suffice(Reference(call), 2, combo[:1])
    call = Call(torch.mul, [leaf(4, 3), leaf(3)])
    for placement in (Partial(), Shard(0)):
        assert gradients_suffice(Reference(call), 2, ((placement,), (Replicate(),)))


def test_flags_are_counted_apart_from_data():
    x = torch.eye(3, dtype=torch.float64).expand(4, 3, 3).clone()
    reference = Reference(Call(torch.linalg.inv, [x.requires_grad_()]))
    (outcome,) = judge(reference, Shardwise(), (2,), [((Shard(0),),)])
    assert (outcome.verdict, outcome.moved.bytes, outcome.moved.flag_bytes) == ("right", 0, 8)
    assert cost_of(outcome) == "flag"


def test_pieces_of_which_each_happens_to_have_the_greatest_do_not_suffice():
    call = Call(torch.nn.functional.one_hot, [torch.tensor([0, 3, 1, 2, 3, 0])])
    assert not pieces_suffice(call, 2, ((Shard(0),),))
    call = Call(lambda x: torch.nn.functional.one_hot(x, 4), call.tensors)
    assert pieces_suffice(call, 2, ((Shard(0),),))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_pieces_are_the_tensor(n):
    t = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(torch.cat([piece(t, Shard(0), r, n) for r in range(n)]), t)
    torch.testing.assert_close(sum(piece(t, Partial(), r, n) for r in range(n)), t)
    assert len(set(addend_weights(n))) > 1
    assert all(addend_weights(n))


@pytest.mark.parametrize("n", range(1, 10))
def test_addends_add_up_to_the_bit(n):
    t = torch.randn(1000)
    assert torch.equal(sum(piece(t, Partial(), r, n) for r in range(n)), t)


def test_what_is_not_finite_is_in_one_addend():
    t = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    total = sum(piece(t, Partial(), r, 4) for r in range(4))
    assert torch.allclose(total, t, equal_nan=True)


def test_slots():
    a, b = torch.ones(1), torch.ones(2)
    out = []
    tree = take((a, [b, 3], {"k": a}, slice(b, None)), out)
    assert len(out) == 4
    assert put(tree, ["a", "b", "c", "d"]) == ("a", ["b", 3], {"k": "c"}, slice("d", None))


def test_random_combos_are_seeded():
    t = [torch.ones(2, 3), torch.ones(3)]
    assert list(randoms(t, 2, 5, random.Random(1))) == list(randoms(t, 2, 5, random.Random(1)))
