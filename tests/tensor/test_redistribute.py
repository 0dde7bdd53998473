"""``DTensor.redistribute``: every pair of layouts, its gradients, and how it may be called."""

import itertools

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
from shardwise.errors import LayoutError, MeshError
from shardwise.testing.sweep import lay_out

R, P = Replicate(), Partial()


def all_placements(axes=2, ndim=2):
    """Each axis does each thing; two axes on one dim in both orders."""
    one = [R, P, *(Shard(d) for d in range(ndim))]
    out = list(itertools.product(one, repeat=axes))
    for d in range(ndim):
        out.append((Shard(d, order=1), Shard(d, order=0)))
    return out


def leaf(x, mesh, placements):
    settled = tuple(p for p in placements)
    if any(p.is_shard() and p.order is not None for p in settled):
        return distribute_tensor(x, mesh, placements).requires_grad_()
    return lay_out(x, mesh, placements).requires_grad_()


@pytest.mark.parametrize("shape", [(5, 3), (1, 2)])
def test_values_and_gradients_of_all_pairs(shape):
    x = torch.randn(shape, dtype=torch.float64)
    w = torch.randn(shape, dtype=torch.float64)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        wd = distribute_tensor(w, mesh, None)
        for src, dst in itertools.product(all_placements(), repeat=2):
            d = leaf(x, mesh, src)
            y = d.redistribute(mesh, dst)
            assert y.placements == dst
            torch.testing.assert_close(y.full_tensor().detach(), x)
            y.backward(wd)
            assert d.grad.placements == d.placements
            torch.testing.assert_close(d.grad.full_tensor(), w)

    simulate(on_rank, 4)


def test_second_derivatives_of_all_pairs():
    x, w, v = (torch.randn(3, 2, dtype=torch.float64) for _ in range(3))
    px = x.clone().requires_grad_()
    (want1,) = torch.autograd.grad((px**3 * w).sum(), px, create_graph=True)
    (want2,) = torch.autograd.grad((want1 * v).sum(), px)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        wd, vd = distribute_tensor(w, mesh), distribute_tensor(v, mesh)
        for src, dst in itertools.product(all_placements()[::3], repeat=2):
            d = leaf(x, mesh, src)
            y = d.redistribute(mesh, dst) ** 3
            (first,) = torch.autograd.grad((y * wd).sum(), d, create_graph=True)
            torch.testing.assert_close(first.full_tensor().detach(), want1.detach())
            (second,) = torch.autograd.grad((first * vd).sum(), d)
            torch.testing.assert_close(second.full_tensor(), want2)

    simulate(on_rank, 4)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_pending_extremum_sends_its_gradient_to_who_attained_it(op):
    parts = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, 0.0]], dtype=torch.float64)
    w = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    whole = parts.clone().requires_grad_()
    value = whole.amax(0) if op == "max" else whole.amin(0)
    value.backward(w)  # torch shares the gradient of a tie equally

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        local = parts[rank].clone().requires_grad_()
        for dst in ([R], [Shard(0)], [P]):
            local.grad = None
            y = DTensor.from_local(local, mesh, [Partial(op)]).redistribute(mesh, dst)
            torch.testing.assert_close(y.full_tensor().detach(), value.detach())
            y.backward(distribute_tensor(w, mesh))
            torch.testing.assert_close(local.grad, whole.grad[rank])

    simulate(on_rank, 2)


def test_notations_that_mean_the_same_share_a_layout():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh)
        want = x.redistribute(mesh, [Shard(0), Shard(1)]).layout
        for same in (
            ("dp", "tp"),
            [Shard(-2), Shard(-1)],
            [Shard(0), Shard(1, order=0)],
            want,
            (["dp"], ["tp"]),
        ):
            assert x.redistribute(mesh, same).layout is want
            assert x.redistribute(placements=same).layout is want
        assert x.redistribute(mesh, [Shard(0)]).placements == (Shard(0), R)
        assert x.redistribute(mesh, "tp").placements == (R, Shard(0))
        assert x.redistribute(mesh, Shard(1)).placements == (Shard(1), R)
        assert x.redistribute(mesh, ("tp",)).placements == (R, Shard(0))
        assert x.redistribute(mesh).placements == (R, R)
        assert x.redistribute(mesh, [Shard(0), R]).redistribute().placements == (R, R)
        inner = x.redistribute(mesh, (("tp", "dp"), None))
        assert inner.placements == (Shard(0, order=1), Shard(0, order=0))
        assert inner.placements != x.redistribute(mesh, [Shard(0), Shard(0)]).placements
        assert x.redistribute(mesh, inner.placements).layout is inner.layout

    simulate(on_rank, 4)


def test_a_layout_of_a_reordered_dim_survives_being_passed_on():
    x = torch.arange(12.0).reshape(12, 1)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        a = distribute_tensor(x, mesh, (("tp", "dp"), None))
        b = distribute_tensor(x, mesh, a.placements)
        assert torch.equal(a.to_local(), b.to_local())
        row = {0: 0, 1: 6, 2: 3, 3: 9}[rank]
        assert a.to_local().flatten().tolist() == [row, row + 1, row + 2]

    simulate(on_rank, 4)


def test_equal_meshes_with_other_names_do_not_share_programs():
    def on_rank():
        one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        x = distribute_tensor(torch.arange(4.0), one)
        assert one == two
        assert x.redistribute(one, ("tp",)).placements == (R, Shard(0))
        assert x.redistribute(two, ("tp",)).placements == (Shard(0), R)
        assert x.redistribute(two, ("tp",)).device_mesh is two

    simulate(on_rank, 4)


def test_from_a_slice_to_its_mesh():
    x = torch.arange(6.0)
    w = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        d = distribute_tensor(x, mesh["tp"], [Shard(0)]).requires_grad_()
        y = d.redistribute(mesh, ("dp",))
        assert y.placements == (Shard(0), R)
        torch.testing.assert_close(y.full_tensor().detach(), x)
        y.backward(distribute_tensor(w, mesh))
        torch.testing.assert_close(d.grad.full_tensor(), w)

    simulate(on_rank, 4)


def test_dtypes_on_the_way():
    x = torch.randn(6, dtype=torch.float32)
    w = torch.randn(6, dtype=torch.float32)

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        with CommLog() as log:
            y = d.redistribute(
                mesh, [R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
            )
        assert {e.dtype for e in log.events} == {"bfloat16"}
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.full_tensor().detach(), x.bfloat16())
        wd = distribute_tensor(w.bfloat16(), mesh)
        with CommLog() as log:
            y.backward(wd)
        assert {e.dtype for e in log.events} == {"float32"}
        assert d.grad.dtype == torch.float32
        torch.testing.assert_close(d.grad.full_tensor(), w.bfloat16().float())

    simulate(on_rank, 2)


def test_the_result_is_no_alias_that_a_write_could_reach():
    """torch's contract: the same layout gives the same storage; another layout a fresh one."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        for src, dst in itertools.product(([R], [Shard(0)], [Partial()]), repeat=2):
            if src == dst:
                continue
            d = leaf(torch.arange(4.0), mesh, src).detach()
            before = d.to_local().clone()
            d.redistribute(mesh, dst).to_local().fill_(7)
            assert torch.equal(d.to_local(), before), (src, dst)

    simulate(on_rank, 2)


def test_expanded_and_transposed_tensors():
    x = torch.arange(6.0).reshape(2, 3)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        for base, view in (
            (x[:1], lambda t: t.expand(4, 3)),
            (x, lambda t: t.t()),
            (
                torch.arange(48.0).reshape(2, 2, 3, 4),
                lambda t: t.to(memory_format=torch.channels_last),
            ),
        ):
            want = view(base)
            for src, dst in itertools.product(
                ([R, R], [Shard(1), R], [Shard(0), Shard(1)]), repeat=2
            ):
                d = view(distribute_tensor(base, mesh)).redistribute(mesh, src)
                y = d.redistribute(mesh, dst)
                torch.testing.assert_close(y.full_tensor(), want)
                assert y.stride() == d.stride()
                assert y.reshape(-1).full_tensor().tolist() == want.reshape(-1).tolist()

    simulate(on_rank, 4)


def test_bad_arguments():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.zeros(4, 4), mesh)
        with CommLog() as log:
            with pytest.raises(MeshError, match='no axis "pp"'):
                x.redistribute(mesh, ("pp", None))
            with pytest.raises(LayoutError, match="3 placements"):
                x.redistribute(mesh, [R, R, R])
            with pytest.raises(LayoutError, match=r"Shard\(dim=2\) on a tensor with 2 dims"):
                x.redistribute(mesh, [Shard(2)])
            with pytest.raises(LayoutError, match="3 entries"):
                x.redistribute(mesh, ("dp", None, "tp"))
            with pytest.raises(LayoutError, match="uses a mesh axis twice"):
                x.redistribute(mesh, ("dp", "dp"))
            with pytest.raises(LayoutError, match="not a placement"):
                x.redistribute(mesh, [0])
            with pytest.raises(LayoutError, match="do not commute"):
                x.redistribute(mesh, [Partial(), Partial("max")])
            with pytest.raises(LayoutError, match="must be placements"):
                x.redistribute(mesh, x)
            with pytest.raises(MeshError, match="not a device mesh"):
                x.redistribute(3, [R])
        assert not log.events

    simulate(on_rank, 4)
