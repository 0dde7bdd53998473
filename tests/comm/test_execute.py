"""Movers: routes carried out on local tensors."""

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
from shardwise.comm.execute import fresh, mover
from shardwise.comm.transport import current
from shardwise.errors import UnsupportedError
from shardwise.layout.layout import Layout
from shardwise.testing.strategies import mesh_of

R, P = Replicate(), Partial()


def test_movers_are_cached_per_rank():
    def on_rank():
        mesh = mesh_of((2,))
        a = Layout.of(mesh, [Shard(0)], (4,), dtype=torch.float32)
        assert mover(a, a.replicated(), current()) is mover(a, a.replicated(), current())
        move = mover(a, a.replicated(), current())
        assert move.back.src is a.dual().replicated().with_placement(((),), ("sum",))
        assert move.back.dst is a
        assert move.communicates
        assert not mover(a.replicated(), a, current()).communicates
        return move

    one, two = simulate(on_rank, 2)
    assert one is not two


def test_a_mover_never_writes_to_or_aliases_its_operand():
    def on_rank(rank):
        mesh = mesh_of((2, 2))
        kinds = [
            [R, R],
            [P, R],
            [Shard(0), R],
            [Shard(0), Shard(1)],
            [P, P],
            [Shard(0), Shard(0)],
            [R, Partial("max")],
        ]
        for src in kinds:
            for dst in kinds:
                a = Layout.of(mesh, src, (3, 2), dtype=torch.float32)
                b = Layout.of(mesh, dst, (3, 2), dtype=torch.float32)
                x = torch.randn(a.box(mesh.coordinate_of(rank))[1])
                kept = x.clone()
                y = mover(a, b, current())(x)
                if y is not x and y.numel() and x.numel():
                    y.add_(1)
                assert torch.equal(x, kept), (src, dst)

    simulate(on_rank, 4)


def test_the_result_of_a_move_may_be_written_in_place_under_autograd():
    """A view made inside a custom Function may not: so none leaves."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), mesh, [R]
        )
        x.requires_grad_()
        for dst in ([Shard(1)], [Shard(0)], [P]):
            y = x.redistribute(mesh, dst).to_local()
            y = y.clone() if y._is_view() and y._base is None else y
            local = mover(x.layout, x.layout.with_placement(*_placed(mesh, dst, 4)), current())(
                x._local
            )
            local.mul_(2)
            local.sum().backward()

    simulate(on_rank, 2)


def _placed(mesh, placements, ndim):
    layout = Layout.of(mesh, placements, (2,) * ndim)
    return layout.dims, layout.partial


def test_fresh():
    x = torch.randn(4)
    assert fresh(x.view(2, 2), x).data_ptr() != x.data_ptr()
    y = torch.randn(4)
    assert fresh(y, x) is y
    assert not fresh(y.view(2, 2), x)._is_view()


def test_minus_infinity_and_nan_survive():
    """Zeros are written, never made by multiplying."""
    x = torch.tensor([[-torch.inf, 1.0], [torch.nan, 2.0]])

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        for src in ([R], [Shard(0)], [Shard(1)]):
            d = distribute_tensor(x, mesh, src).requires_grad_()
            y = d.redistribute(mesh, [P])
            torch.testing.assert_close(y.full_tensor().detach(), x, equal_nan=True)
            g = torch.tensor([[torch.inf, -torch.inf], [1.0, torch.nan]])
            y.backward(distribute_tensor(g, mesh))
            torch.testing.assert_close(d.grad.full_tensor(), g, equal_nan=True)

    simulate(on_rank, 2)


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_replicas_and_pieces_become_pending(op):
    """What a rank holds besides the one that keeps the value must add nothing."""
    x = torch.tensor([-2.0, 0.5, 3.0])

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        for src in ([R, R], [Shard(0), R], [Shard(0), Shard(0)], [R, Shard(0)]):
            for dst in ([Partial(op), R], [Partial(op), Partial(op)], [Shard(0), Partial(op)]):
                d = distribute_tensor(x, mesh, src, src_data_rank=None).redistribute(mesh, dst)
                assert torch.equal(d.full_tensor(), x), (src, dst)

    simulate(on_rank, 4)


def test_empty_pieces_take_part():
    """Four ranks, one row: three hold nothing, and every rank calls the same collectives."""
    x = torch.randn(1, 5, dtype=torch.float64)

    def on_rank():
        mesh = init_device_mesh("cpu", (4,))
        for src in ([Shard(0)], [Shard(1)], [P]):
            for dst in ([Shard(0)], [Shard(1)], [P], [R]):
                d = distribute_tensor(x, mesh, src).requires_grad_()
                with CommLog() as log:
                    y = d.redistribute(mesh, dst)
                    y.backward(distribute_tensor(x, mesh, src_data_rank=None))
                torch.testing.assert_close(y.full_tensor().detach(), x)
                torch.testing.assert_close(d.grad.full_tensor(), x)
                assert {e.rank for e in log.events} in ({current().rank}, set())

    with CommLog() as log:
        simulate(on_rank, 4)
    counts = [log.on(r).count() for r in range(4)]
    assert len(set(counts)) == 1


def test_a_collective_says_which_axes_it_ran_over():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.zeros(4), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        with CommLog() as log:
            x.full_tensor()
            x.redistribute(mesh, [Shard(0)])
        assert [e.tag for e in log.events] == ["dp*tp", "tp"]

    simulate(on_rank, 4)


def test_the_gradient_of_a_pending_product_is_refused():
    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        x = torch.ones(2, requires_grad=True)
        d = DTensor.from_local(x, mesh, [Partial("product")])
        with pytest.raises(UnsupportedError, match="the gradient of a pending product"):
            d.full_tensor()
        with torch.no_grad():
            assert d.full_tensor().tolist() == [1, 1]

    simulate(on_rank, 2)


def test_five_hundred_steps_of_gathers_and_scatters():
    """The shape of a fully sharded step, many times: nothing may leak or be freed too early."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        w = distribute_tensor(torch.ones(6), mesh, [Shard(0)]).requires_grad_()
        for _ in range(500):
            w.redistribute(mesh, [R]).backward(
                distribute_tensor(torch.ones(6), mesh, [P], src_data_rank=None)
            )
        assert torch.equal(w.grad.full_tensor(), torch.full((6,), 500.0))

    simulate(on_rank, 2)
