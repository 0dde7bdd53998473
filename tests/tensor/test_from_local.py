"""``DTensor.from_local``, ``to_local``, ``full_tensor``: values, checks, gradients."""

import pytest
import torch

from shardwise import (
    CommLog,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import LayoutError

R, P = Replicate(), Partial()


def line(n):
    return init_device_mesh("cpu", (n,))


def test_uneven_pieces_give_the_right_global_shape():
    def on_rank(rank):
        rows = (3, 3, 1)[rank]
        d = DTensor.from_local(torch.full((rows, 2), float(rank)), line(3), [Shard(0)])
        assert d.shape == (7, 2)
        assert d.full_tensor()[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2]

    simulate(on_rank, 3)


def test_ranks_may_hold_nothing():
    def on_rank(rank):
        d = DTensor.from_local(torch.ones((1 if rank == 0 else 0, 2)), line(3), [Shard(0)])
        assert d.shape == (1, 2)
        assert d.full_tensor().tolist() == [[1, 1]]

    simulate(on_rank, 3)


def test_uneven_pieces_over_two_axes():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        rows = (2, 1, 1, 1)[rank]
        d = DTensor.from_local(torch.full((rows,), float(rank)), mesh, (("a", "b"),))
        assert d.full_tensor().tolist() == [0, 0, 1, 2, 3]
        rows = (2, 1, 1, 1)[(0, 2, 1, 3)[rank]]
        d = DTensor.from_local(torch.full((rows,), float(rank)), mesh, (("b", "a"),))
        assert d.full_tensor().tolist() == [0, 0, 2, 1, 3]

    simulate(on_rank, 4)


def test_without_the_check_nothing_is_sent():
    def on_rank(rank):
        with CommLog() as log:
            d = DTensor.from_local(
                torch.full((2,), float(rank)), line(2), [Shard(0)], run_check=False
            )
            e = DTensor.from_local(torch.full((2,), float(rank)), line(2), [R], run_check=False)
            f = DTensor.from_local(
                torch.ones(2 - rank),
                line(2),
                [Shard(0)],
                run_check=False,
                shape=(3,),
                stride=(1,),
            )
        assert not log.events
        assert d.shape == (4,)
        assert e.to_local().tolist() == [rank, rank]
        assert f.shape == (3,)
        assert f.full_tensor().tolist() == [1, 1, 1]

    simulate(on_rank, 2)


def test_strides():
    def on_rank():
        local = torch.arange(6.0).reshape(2, 3).t()
        d = DTensor.from_local(local, line(2), [Shard(0)])
        assert d.stride() == (1, 6)
        assert d.to_local().stride() == (1, 3)
        e = DTensor.from_local(local, line(2), [Shard(0)], shape=(6, 2), stride=(2, 1))
        assert e.stride() == (2, 1)
        assert e.to_local().is_contiguous()
        assert torch.equal(e.full_tensor(), d.full_tensor())
        assert e.view(12).full_tensor().tolist() == e.full_tensor().flatten().tolist()
        f = DTensor.from_local(
            torch.arange(6.0).reshape(3, 2), line(2), [Shard(0)], shape=(6, 2), stride=(1, 6)
        )
        assert f.stride() == (1, 6)
        assert f.t().view(12).full_tensor().tolist() == f.full_tensor().t().flatten().tolist()
        g = DTensor.from_local(torch.ones(1, 3).expand(2, 3), line(2), [Shard(0)])
        assert g.is_contiguous()
        assert g.view(-1).full_tensor().tolist() == [1] * 12
        h = DTensor.from_local(torch.arange(8.0)[::2], line(2), [Shard(0)])
        assert h.is_contiguous()
        assert h.view(2, 4).full_tensor().tolist() == [[0, 2, 4, 6]] * 2

    simulate(on_rank, 2)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("sum", [3.0, 3.0]),
        ("avg", [1.5, 1.5]),
        ("max", [3.0, 2.0]),
        ("min", [0.0, 1.0]),
        ("product", [0.0, 2.0]),
    ],
)
def test_pending_reductions(op, want):
    parts = torch.tensor([[0.0, 1.0], [3.0, 2.0]])

    def on_rank(rank):
        d = DTensor.from_local(parts[rank], line(2), [Partial(op)])
        assert d.placements == (Partial("sum" if op == "avg" else op),)
        assert d.full_tensor().tolist() == want
        for other in ([Shard(0)], [R], [P]):
            assert d.redistribute(placements=other).full_tensor().tolist() == want
        assert (d + 1).full_tensor().tolist() == [v + 1 for v in want]
        assert (-d).full_tensor().tolist() == [-v for v in want]
        assert (d * -2).full_tensor().tolist() == [v * -2 for v in want]
        assert d.sum().full_tensor().item() == sum(want)

    simulate(on_rank, 2)


def test_averages_are_scaled_over_every_axis_that_has_one():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        d = DTensor.from_local(
            torch.tensor(float(rank)), mesh, [Partial("avg"), Partial("avg")]
        )
        assert d.full_tensor().item() == 1.5
        e = DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial("avg"), P])
        assert e.full_tensor().item() == 3.0

    simulate(on_rank, 4)


def same_error(fn, world, kind=LayoutError):
    """Run on every rank; all must raise the same error. Gives its text without the place."""

    def on_rank(rank):
        with pytest.raises(kind) as caught:
            fn(rank)
        return str(caught.value).splitlines()[0]

    texts = set(simulate(on_rank, world))
    assert len(texts) == 1
    return texts.pop()


def test_replicas_that_differ_raise_on_every_rank():
    def on_rank(rank):
        DTensor.from_local(torch.full((2,), float(rank == 2)), line(3), [R])

    assert same_error(on_rank, 3) == (
        "rank 2 holds other values than rank 0, but the placements say that they are replicas."
    )

    def half(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0), R])

    assert same_error(half, 4) == (
        "rank 1 holds other values than rank 0, but the placements say that they are replicas."
    )


def test_equal_replicas_pass_the_check():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int64):
            d = DTensor.from_local(torch.full((2,), rank // 2).to(dtype), mesh, [Shard(0), R])
            assert d.shape == (4,)
        nan = DTensor.from_local(torch.tensor([torch.nan, -torch.inf]), mesh, [R, R])
        assert nan.shape == (2,)

    simulate(on_rank, 4)


def test_pieces_that_contradict_each_other_raise_on_every_rank():
    def sizes(rank):
        DTensor.from_local(torch.ones((1, 3)[rank]), line(2), [Shard(0)])

    assert same_error(sizes, 2) == (
        "the pieces contradict each other: rank 0 gave shape (1,); of a tensor of shape (4,) its piece would be (2,) "
        "(pieces are cut as torch.chunk cuts)."
    )

    def other_dim(rank):
        DTensor.from_local(torch.ones(2, 3 + rank), line(2), [Shard(0)])

    assert "rank 1 gave shape (2, 4)" in same_error(other_dim, 2)

    def replicas(rank):
        DTensor.from_local(torch.ones(2 + rank), line(2), [R])

    assert "rank 1 gave shape (3,)" in same_error(replicas, 2)

    def dims(rank):
        DTensor.from_local(torch.ones((1,) * (1 + rank)), line(2), [Shard(0)])

    assert same_error(dims, 2) == "the pieces have different numbers of dims."

    def dtypes(rank):
        DTensor.from_local(
            torch.ones(2, dtype=(torch.float32, torch.int64)[rank]), line(2), [Shard(0)]
        )

    assert (
        same_error(dtypes, 2) == "the pieces have different dtypes: torch.float32, torch.int64."
    )


def test_a_given_shape_skips_the_exchange_and_is_checked_against_the_own_piece():
    def on_rank(rank):  # rank 1 does hold two of five: without an exchange only rank 0 can know
        if rank == 0:
            with pytest.raises(
                LayoutError,
                match=r"a local of shape \(2,\) is no piece of f32\[5\] {0: S\(0\)}",
            ):
                DTensor.from_local(torch.ones(2), line(2), [Shard(0)], shape=(5,))

    with CommLog() as log:
        simulate(on_rank, 2)
    assert log.count() == 0


def test_the_first_ranks_strides_are_those_of_the_tensor():
    """Strides of small pieces say little: they must not make ranks differ."""

    def fits(rank):
        local = torch.arange(float((2, 1)[rank] * 2)).reshape(2, -1).t()
        d = DTensor.from_local(local, line(2), [Shard(0)])
        assert d.stride() == (1, 3)
        assert d.redistribute(placements=[Shard(1)]).full_tensor().tolist() == [
            [0, 2],
            [1, 3],
            [0, 1],
        ]

    simulate(fits, 2)


def test_other_bad_input():
    def on_rank():
        d = distribute_tensor(torch.ones(2), line(2))
        with pytest.raises(LayoutError, match="takes a local tensor, not a DTensor"):
            DTensor.from_local(d, line(2), [R])
        with pytest.raises(LayoutError, match=r"Shard\(dim=1\) on a tensor with 1 dims"):
            DTensor.from_local(torch.ones(2), line(2), [Shard(1)])
        with pytest.raises(LayoutError, match="an average of whole numbers"):
            DTensor.from_local(torch.ones(2, dtype=torch.int64), line(2), [Partial("avg")])

    simulate(on_rank, 2)


# ---- gradients --------------------------------------------------------------------------------

W = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("placements", "want"),
    [
        ([Shard(0)], lambda r: W[2 * r : 2 * r + 2]),
        ([R], lambda r: W),  # whole, on every rank
        ([P], lambda r: W),
        ([Partial("avg")], lambda r: W / 2),
    ],
)
def test_from_local_gives_the_local_its_gradient(placements, want):
    def on_rank(rank):
        n = 2 if placements[0].is_shard() else 4
        local = torch.arange(float(n)).requires_grad_()
        d = DTensor.from_local(local, line(2), placements)
        assert d.requires_grad
        assert not d.is_leaf
        (d * distribute_tensor(W, line(2))).sum().backward()
        torch.testing.assert_close(local.grad, want(rank))

    simulate(on_rank, 2)


def test_from_local_grad_placements():
    def on_rank(rank):
        local = torch.ones(4, requires_grad=True)
        d = DTensor.from_local(local, line(2), [R], grad_placements=[P])
        d.redistribute(placements=[Shard(0)]).backward(distribute_tensor(W, line(2)))
        return local.grad

    parts = simulate(on_rank, 2)
    torch.testing.assert_close(parts[0] + parts[1], W)
    assert not torch.equal(parts[0], W)


@pytest.mark.parametrize("placements", [[Shard(0)], [R], [P]])
def test_to_local_takes_the_gradient_back(placements):
    """The local program computes the same on all ranks: torch's contract for a bare to_local."""

    def on_rank(rank):
        d = distribute_tensor(torch.arange(4.0), line(2), placements).requires_grad_()
        local = d.to_local()
        w = W[2 * rank : 2 * rank + 2] if placements[0].is_shard() else W
        (local * w).sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), W)

    simulate(on_rank, 2)


def test_to_local_with_gradients_that_are_parts():
    x = torch.arange(4.0)

    def on_rank(rank):
        d = distribute_tensor(x, line(2), [R]).requires_grad_()
        local = d.to_local(grad_placements=[P])
        (local * W * (rank + 1)).sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), 3 * W)

    simulate(on_rank, 2)


def test_a_wrong_guess_of_to_local_raises_on_every_rank():
    def on_rank(rank):
        d = distribute_tensor(torch.arange(4.0), line(2), [R]).requires_grad_()
        (d.to_local() * W * (rank + 1)).sum().backward()

    assert (
        "takes the gradient of a replicated piece to be equal on all ranks, but it differs"
        in same_error(on_rank, 2)
    )


def test_full_tensor_takes_the_gradient_back():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in ([Shard(0), R], [P, R], [R, R], [Shard(0), Shard(0)], [P, Shard(0)]):
            d = distribute_tensor(torch.arange(4.0), mesh, placements).requires_grad_()
            (d.full_tensor() * W).sum().backward()
            torch.testing.assert_close(d.grad.full_tensor(), W)

    simulate(on_rank, 4)


def test_full_tensor_with_gradients_that_are_parts():
    def on_rank(rank):
        d = distribute_tensor(torch.arange(4.0), line(2), [Shard(0)]).requires_grad_()
        (d.full_tensor(grad_placements=[P]) * W * (rank + 1)).sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), 3 * W)

    simulate(on_rank, 2)


def test_there_and_back_is_differentiable_twice():
    def on_rank():
        local = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        d = DTensor.from_local(local, line(2), [Shard(0)])
        y = (d.full_tensor() ** 3).sum()
        (g,) = torch.autograd.grad(y, local, create_graph=True)
        torch.testing.assert_close(g, 3 * local**2)
        (h,) = torch.autograd.grad(g.sum(), local)
        torch.testing.assert_close(h, 6 * local.detach())

    simulate(on_rank, 2)


def test_the_result_of_to_local_is_no_leaf_and_keeps_the_storage():
    def on_rank():
        d = distribute_tensor(torch.arange(4.0), line(2), [Shard(0)])
        d.to_local().zero_()
        assert d.full_tensor().tolist() == [0, 0, 0, 0]
        e = d.clone().requires_grad_()
        assert e.to_local().requires_grad
        assert not e.to_local().is_leaf
        with torch.no_grad():
            assert not e.to_local().requires_grad

    simulate(on_rank, 2)


@pytest.mark.parametrize("leave", ["to_local", "full_tensor", "stay"])
@pytest.mark.parametrize("cut", [Shard(1), Shard(0), Replicate()], ids=str)
def test_gradients_of_gradients_of_plain_tensors(cut, leave):
    """What is computed from a plain gradient is computed on every rank, and is not summed over them."""
    w, x = torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def penalized(x, product):
        g = torch.autograd.grad(product(x), x, create_graph=True)[0]
        third = torch.autograd.grad(g.square().sum(), x, create_graph=True)[0]
        third.square().sum().backward()

    one, plain = x.clone().requires_grad_(), w.clone().requires_grad_()
    penalized(one, lambda x: (x @ plain).tanh().square().sum())

    def rank(_):
        mesh = init_device_mesh("cpu", (2,))
        ours = distribute_tensor(w, mesh, [cut]).requires_grad_()
        mine = x.clone().requires_grad_()

        def product(x):
            y = DTensor.from_local(x, mesh, [Replicate()], run_check=False) @ ours
            if leave == "to_local":
                y = y.redistribute(mesh, [Replicate()]).to_local()
            elif leave == "full_tensor":
                y = y.full_tensor()
            return y.tanh().square().sum()

        penalized(mine, product)
        torch.testing.assert_close(mine.grad, one.grad)
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)

    simulate(rank, 2)
