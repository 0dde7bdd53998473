"""Several tensors moved together, and moves under way."""

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
    redistribute_many,
    redistribute_state,
    simulate,
)
from shardwise.errors import LayoutError
from shardwise.tensor.pending import PendingDTensor
from shardwise.testing.sweep import lay_out

R, P = Replicate(), Partial()
KINDS = [R, P, Shard(0), Shard(1)]


def test_many_are_as_one_by_one():
    """Every pair of layouts at once: the values, the gradients, and no more bytes."""
    pairs = list(itertools.product(itertools.product(KINDS, repeat=2), repeat=2))[::3]
    xs = [torch.randint(-4, 5, (3 + i % 3, 4)).double() for i in range(len(pairs))]

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        ds = [lay_out(x, mesh, src).requires_grad_() for x, (src, _) in zip(xs, pairs)]
        with CommLog() as log:
            ys = redistribute_many(ds, [dst for _, dst in pairs])
        together, mine = log.on(rank).count(), log.on(rank).bytes
        with CommLog() as log:
            for d, (_, dst) in zip(ds, pairs):
                d.redistribute(mesh, dst)
        assert mine <= log.on(rank).bytes
        assert together < log.on(rank).count() / 2
        total = sum((y * y.detach().redistribute(mesh, [R, R])).sum() for y in ys)
        total.backward()
        for x, y, d, (_, dst) in zip(xs, ys, ds, pairs):
            assert y.placements == dst
            assert torch.equal(y.full_tensor().detach(), x)
            assert torch.equal(d.grad.full_tensor(), x)

    simulate(on_rank, 4)


def test_what_no_gradient_is_asked_for_has_none():
    """As if each had been moved by itself; also where ranks are on some of the meshes only."""
    x = torch.randn(4, 6, dtype=torch.float64)

    def on_rank(rank):
        small, pair = DeviceMesh("cpu", [2]), DeviceMesh("cpu", [0, 2])
        a = distribute_tensor(x, small, [Shard(0)]).requires_grad_()
        b = distribute_tensor(x, pair, [Shard(0)]).requires_grad_()
        for mesh in (small, pair, init_device_mesh("cpu", (3,))):
            moved = redistribute_many([a, b], [[R], [Shard(1)]], mesh)
            for use, leaf in zip(moved, (a, b)):
                with CommLog() as log:
                    got = torch.autograd.grad((use * use).sum(), [a, b], allow_unused=True)
                assert [g is not None for g in got] == [leaf is a, leaf is b]
                (g,) = (g for g in got if g is not None)
                if leaf.device_mesh.coordinate_of(rank) is not None:
                    assert torch.equal(g.full_tensor(), 2 * x)
                kinds = [e for e in log.on(rank).events if e.bytes]
                assert len(kinds) <= 1

    simulate(on_rank, 3)


def test_fifty_parameters_take_one_gather():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (4,))
        ps = [
            distribute_tensor(
                torch.full((8, i + 1), float(i)), mesh, [Shard(0)]
            ).requires_grad_()
            for i in range(50)
        ]
        with CommLog() as log:
            whole = redistribute_many(ps, [R])
            sum(w.sum() for w in whole).backward()
        kinds = [e.kind for e in log.on(rank).events]
        assert kinds.count("all_gather") == 1
        assert len(kinds) == 2
        for i, (p, w) in enumerate(zip(ps, whole)):
            assert torch.equal(w.full_tensor().detach(), torch.full((8, i + 1), float(i)))
            assert torch.equal(p.grad.full_tensor(), torch.ones(8, i + 1))
            w.detach().to_local().add_(1)  # results share no memory that a write could reach

    simulate(on_rank, 4)


def test_arguments_of_one_call_move_together():
    x, w = torch.randn(6, 4), torch.randn(4, 5)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        a, b = lay_out(x, mesh, [P]).requires_grad_(), lay_out(w, mesh, [P]).requires_grad_()
        with CommLog() as log:
            y = torch.maximum(a @ b, torch.zeros(()))
        counted = log.on(rank).count()
        torch.testing.assert_close(y.full_tensor().detach(), torch.relu(x @ w))
        y.sum().backward()
        px, pw = x.clone().requires_grad_(), w.clone().requires_grad_()
        torch.relu(px @ pw).sum().backward()
        torch.testing.assert_close(a.grad.full_tensor(), px.grad)
        torch.testing.assert_close(b.grad.full_tensor(), pw.grad)
        return counted

    assert len(set(simulate(on_rank, 2))) == 1


def test_states_move_to_another_mesh():
    """Four ranks train, two serve."""
    state = {"a": torch.randn(8, 4), "deep": {"b": torch.randn(6, 6), "step": 3}}

    def on_rank(rank):
        train, serve = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [1, 2])
        mine = {
            "a": distribute_tensor(state["a"], train, [Shard(0)]),
            "deep": {"b": distribute_tensor(state["deep"]["b"], train, [Shard(1)]), "step": 3},
        }
        with CommLog() as log:
            out = redistribute_state(mine, {"a": [Shard(1)], "deep.b": [R]}, serve)
        assert out["deep"]["step"] == 3
        assert out["a"].placements == (Shard(1),)
        if rank in (1, 2):
            assert torch.equal(out["a"].full_tensor(), state["a"])
            assert torch.equal(out["deep"]["b"].full_tensor(), state["deep"]["b"])
        back = redistribute_state(out, {"a": mine["a"], "deep.b": mine["deep"]["b"]}, train)
        assert torch.equal(back["a"].to_local(), mine["a"].to_local())
        assert torch.equal(back["deep"]["b"].full_tensor(), state["deep"]["b"])
        with pytest.raises(LayoutError, match="no tensors c"):
            redistribute_state(mine, {"c": [R]})
        return sum(e.kind == "all_to_all" for e in log.on(rank).events)

    assert simulate(on_rank, 4) == [1, 1, 1, 1]


def test_moves_under_way():
    """Nothing waits until a value is asked for; several are in flight; gradients flow."""
    x = torch.randn(8, 6, dtype=torch.float64)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        for src, dst in itertools.product(itertools.product(KINDS, repeat=2), repeat=2):
            d = lay_out(x, mesh, src).requires_grad_()
            y = d.redistribute(mesh, dst, async_op=True)
            z = d.redistribute(mesh, [R, R], async_op=True)
            assert y.shape == x.shape
            assert y.placements == dst
            total = (y * z).sum()  # both are waited for here
            assert type(y) is type(z) is DTensor
            torch.testing.assert_close(y.full_tensor(), x)
            total.backward()
            torch.testing.assert_close(d.grad.full_tensor(), 2 * x)

    simulate(on_rank, 4)


def test_what_waits():
    x = torch.randn(4, 4)

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        d = distribute_tensor(x, mesh, [Shard(0)])
        uses = [
            lambda y: y.to_local(),
            lambda y: y + 1,
            lambda y: 1 + y,
            lambda y: torch.cat([d, y]),
            lambda y: y.full_tensor(),
            lambda y: y.requires_grad,
            lambda y: y.detach(),
            lambda y: y.add_(1),
            lambda y: str(y),
            lambda y: y.redistribute(mesh, [Shard(1)], async_op=True).full_tensor(),
            lambda y: torch.equal(d, y),
            lambda y: torch._foreach_add([d, y], 1.0),
        ]
        for use in uses:
            y = d.redistribute(mesh, [R], async_op=True)
            assert type(y) is PendingDTensor
            assert isinstance(y, DTensor)
            use(y)
            assert type(y) is DTensor
        dropped = d.redistribute(mesh, [R], async_op=True)
        del dropped
        with torch.no_grad():
            lazy = d.clone().requires_grad_().redistribute(mesh, [R], async_op=True)
        assert not lazy.requires_grad

    simulate(on_rank, 2)


def test_a_state_that_does_not_fit_names_the_tensor():
    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0), Shard(1)])
        line = DeviceMesh("cpu", [0, 1, 2, 3])
        with pytest.raises(LayoutError, match=r'"deep.b": 2 placements'):
            redistribute_state({"a": x, "deep": {"b": x}}, {"a": [Shard(0)]}, line)

    simulate(rank, 4)
