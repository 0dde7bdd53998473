"""``redistribute`` to another mesh: other shape, order, ranks or size; forward and backward."""

import itertools

import pytest
import torch

from shardwise import (
    CommLog,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import LayoutError, MeshError
from shardwise.testing.sweep import lay_out

R, P = Replicate(), Partial()


def placed(x, mesh, placements, rank):
    """Unequal addends where a sum is pending; empty outside the mesh."""
    if mesh.coordinate_of(rank) is None:
        return distribute_tensor(x, mesh, placements, src_data_rank=None)
    return lay_out(x, mesh, placements)


PAIRS = [
    ([0, 1, 2, 3], [0, 1]),
    ([0, 1], [0, 1, 2, 3]),
    ([0, 1, 2], [0, 1, 2, 3]),
    ([3, 1], [2, 0, 3]),
    ([0, 1], [2, 3]),
    ([[0, 1], [2, 3]], [0, 1, 2, 3]),
    ([[0, 1], [2, 3]], [[3, 1], [2, 0]]),
    ([0, 1], [[0, 1], [2, 3]]),
    ([[0, 1], [2, 3]], [0, 1]),
    ([[0, 1], [2, 3]], [1, 3]),
    ([2], [0, 1]),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("size", [(5, 3), (1, 3), (0, 2), (3, 1)])
def test_values_and_gradients(a, b, size):
    """Also where ranks hold nothing: no more rows than one, or none."""
    x = torch.randint(-5, 5, size).double()
    w = torch.randint(-5, 5, size).double()

    def on_rank(rank):
        one, two = DeviceMesh("cpu", a), DeviceMesh("cpu", b)
        kinds = [R, P, Shard(0), Shard(1)]
        wd = distribute_tensor(w, two, [Shard(0)])
        places = [list(itertools.product(kinds, repeat=m.ndim)) for m in (one, two)]
        places = [ps if len(ps) == 4 else ps[:: 3 if size == (5, 3) else 5] for ps in places]
        for src, dst in itertools.product(*places):
            d = placed(x, one, src, rank).requires_grad_()
            y = d.redistribute(two, dst)
            assert y.device_mesh == two
            assert y.placements == dst
            full = y.full_tensor().detach()
            if two.coordinate_of(rank) is not None:
                assert torch.equal(full, x), (src, dst)
            (y * wd).sum().backward()
            if one.coordinate_of(rank) is not None:
                assert d.grad.placements == d.placements
                assert torch.equal(d.grad.full_tensor(), w), (src, dst)

    simulate(on_rank, 4)


def test_gradients_of_gradients():
    """Also where ranks hold nothing: their gradients depend on just what those of the others depend on."""
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    loss = {
        "cube": lambda x, w: (x * x * x).sum(),
        "linear": lambda x, w: (x * 2 @ w).sum(),
        "both": lambda x, w: torch.tanh(x @ w).softmax(-1).square().sum() + w.sum(),
    }

    def grads(call, x, w, over):
        once = torch.autograd.grad(call(x, w), over, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in once if g is not None)
        if not total.requires_grad:
            return once
        return *once, *torch.autograd.grad(total, over, allow_unused=True)

    def on_rank(rank):
        one, two = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[2], [1]])
        for call in loss.values():
            px, pw = x.clone().requires_grad_(), w.clone().requires_grad_()
            want = grads(call, px, pw, (px, pw))
            dx = distribute_tensor(x, one, [Shard(0)]).requires_grad_()
            dw = distribute_tensor(w, one, [Shard(1)]).requires_grad_()

            def across(x, w, call=call):
                y = call(x.redistribute(two, [Shard(0), R]), w.redistribute(two, [R, R]))
                return y.redistribute(one, [R])

            got = grads(across, dx, dw, (dx, dw))
            for a, b in zip(got, want, strict=True):
                assert (a is None) == (b is None)
                if a is not None and rank in (0, 1):
                    torch.testing.assert_close(a.full_tensor().detach(), b.detach())

    simulate(on_rank, 3)


def test_received_bytes_are_what_is_needed_and_not_held():
    """Four ranks hand a tensor to two of them: each gets the quarter of it that it lacks."""
    x = torch.randn(8, 4)

    def on_rank(rank):
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
        with CommLog() as log:
            d.redistribute(DeviceMesh("cpu", [0, 1]), [Shard(0)])
        return log.on(rank).bytes

    assert simulate(on_rank, 4) == [2 * 16, 4 * 16, 0, 0]


def test_training_on_one_mesh_and_a_loss_on_another():
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    pw = w.clone().requires_grad_()
    (torch.tanh(torch.tanh(x @ pw) @ pw.T) ** 2).sum().backward()

    def on_rank(rank):
        one, two = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[2, 1], [0, 3]])
        wd = distribute_tensor(w, one, [Shard(1)]).requires_grad_()
        h = torch.tanh(distribute_tensor(x, one, [R]) @ wd)
        h = h.redistribute(two, [Shard(0), Shard(1)])
        y = torch.tanh(h @ wd.redistribute(two, [R, Shard(0)]).T)
        (y**2).sum().backward()
        if rank in (0, 1):
            torch.testing.assert_close(wd.grad.full_tensor(), pw.grad)

    simulate(on_rank, 4)


def test_other_dtypes_memory_orders_and_scalars():
    def on_rank(rank):
        one, two = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3, 2])
        for x in (
            torch.arange(6, dtype=torch.int16).view(2, 3),
            torch.tensor(7, dtype=torch.bfloat16),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(0, 3),
            torch.tensor([True, False, True]),
        ):
            places = [Shard(x.ndim - 1)] if x.ndim else [R]
            y = distribute_tensor(x, one, places).redistribute(
                two, [Shard(0)] if x.ndim else [R]
            )
            full = y.full_tensor()
            if rank in (2, 3):
                assert torch.equal(full, x)
                assert y.stride() == x.stride()

    simulate(on_rank, 4)


def test_pending_extrema_are_settled_on_the_way():
    def on_rank(rank):
        one, two = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2, 3])
        x = torch.tensor([3.0, -1.0, 2.0])
        for op in ("max", "min"):
            mine = x - rank if op == "max" else x + rank
            d = DTensor.from_local(mine, one, [Partial(op)], shape=(3,)).requires_grad_()
            y = d.redistribute(two, [Shard(0)])
            full = y.full_tensor().detach()
            if rank:
                assert torch.equal(full, x)
            (y * 2).sum().backward()
            if rank < 2:
                assert torch.equal(d.to_local(), mine)
        with pytest.raises(LayoutError, match="cannot be made on another mesh"):
            distribute_tensor(x, one).redistribute(two, [Partial("max")])

    simulate(on_rank, 4)


def test_a_row_of_the_mesh_is_each_callers_own():
    """To ``mesh["tp"]``, another mesh on each row, and back."""
    x = torch.arange(8.0).view(4, 2)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        d = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
        y = d.redistribute(mesh["tp"], [Shard(0)])
        assert torch.equal(y.full_tensor().detach(), x)
        (y * y).sum().backward()
        assert torch.equal(d.grad.full_tensor(), 2 * 2 * x)  # once for each row
        z = y.detach().redistribute(mesh, [R, Shard(1)])
        assert torch.equal(z.full_tensor(), x)

    simulate(on_rank, 4)


def test_ranks_that_name_different_meshes_are_told():
    def on_rank(rank):
        d = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)))
        other = DeviceMesh("cpu", [0, 1] if rank % 2 else [0, 2])
        with pytest.raises(MeshError, match="do not agree on the meshes"):
            d.redistribute(other, [Shard(0)])

    simulate(on_rank, 4)
