"""Moves within a slab: values, gradients, refusals."""

import contextlib
import itertools

from expecttest import assert_expected_inline
import pytest
import torch

from shardwise import (
    CommLog,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    explain_redistribute,
    init_device_mesh,
    minimize,
    redistribute_many,
    redistribute_state,
    simulate,
)
from shardwise.errors import CommError, LayoutError
from shardwise.testing.sweep import lay_out

R, S, P = Replicate(), Shard, Partial()


MOVES = [
    ((4,), [S(0)], [S(1)]),
    ((4,), [S(1)], [R]),
    ((4,), [P], [R]),
    ((4,), [P], [S(1)]),
    ((4,), [S(0)], [S(0, owner=2)]),
    ((4,), [S(1, sizes=(1, 50, 0, 13))], [S(0)]),
    ((2, 2), [S(0), S(1)], [S(1), S(0)]),
    ((2, 2), [P, S(0)], [R, R]),
    ((2, 2), [S(0), R], [R, S(1)]),
    ((4,), [S(0)], [P]),
]


@pytest.mark.parametrize(("shape", "src", "dst"), MOVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_move_in_rounds_preserves_the_value(shape, src, dst, dtype):
    whole = torch.randint(-8, 8, (64, 64)).to(dtype)

    def check():
        mesh = init_device_mesh("cpu", shape)
        x = lay_out(whole, mesh, src)
        return x.redistribute(mesh, dst, max_extra_bytes=4096).full_tensor()

    assert all(torch.equal(full, whole) for full in simulate(check, 4))


def test_gradients_travel_in_rounds_too():
    whole = torch.randn(7, 9).double()

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        x = lay_out(whole, mesh, [S(0), S(1)]).requires_grad_()
        y = x.redistribute(mesh, [S(1), R], max_extra_bytes=320)
        (once,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(once.sum(), x)
        return (once + twice).full_tensor().detach()

    want = 3 * whole**2 + 6 * whole
    assert all(torch.allclose(g, want) for g in simulate(check, 4))


def test_a_limit_that_cannot_be_kept_raises_on_every_rank():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = lay_out(torch.randn(4, 4), mesh, [S(0), R])
        for few in (0, -1, True, 2.5):
            with pytest.raises(LayoutError, match="at least one"):
                x.redistribute(mesh, [R, R], max_extra_bytes=few)
        with CommLog() as log:
            for move in (
                lambda: x.redistribute(mesh, [R, R], max_extra_bytes=64),
                lambda: redistribute_many([x, x], [R, R], max_extra_bytes=64),
                lambda: redistribute_state({"x": x}, {"x": [R, R]}, max_extra_bytes=64),
                lambda: explain_redistribute(x, [R, R], max_extra_bytes=64),
            ):
                with pytest.raises(LayoutError, match="takes 160 bytes at least"):
                    move()
        assert not log.events
        assert x.redistribute(mesh, [S(0), S(1)], max_extra_bytes=1).placements == (S(0), S(1))
        return True

    assert all(simulate(check, 4))


KINDS = [R, P, S(0), S(1)]


def test_under_way_in_rounds():
    whole = torch.randint(-8, 8, (7, 10)).double()

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        pairs = list(itertools.product(itertools.product(KINDS, repeat=2), repeat=2))[::3]
        ds = [lay_out(whole, mesh, src).requires_grad_() for src, _ in pairs]
        ys = [
            d.redistribute(mesh, dst, async_op=True, max_extra_bytes=400)
            for d, (_, dst) in zip(ds, pairs)
        ]
        for d, y, (_, dst) in zip(ds, ys, pairs):
            assert y.placements == dst
            assert torch.equal(y.full_tensor().detach(), whole)
            (y * y).sum().backward()
            assert torch.equal(d.grad.full_tensor(), 2 * whole)

    simulate(check, 4)


def test_what_is_written_to_while_it_is_under_way_raises():
    def check():
        mesh = init_device_mesh("cpu", (4,))
        for limit in (None, 320):
            d = lay_out(torch.randn(8, 8), mesh, [S(0)])
            y = d.redistribute(mesh, [S(1)], async_op=True, max_extra_bytes=limit)
            d.add_(1)
            with pytest.raises(CommError, match="written to while"):
                y.full_tensor()

    simulate(check, 4)


def test_slices_in_rounds():
    """Each row's own slice; and one that only some ranks lie on, there and back, and back again."""
    whole = torch.randint(-8, 8, (6, 10)).double()

    def check(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = lay_out(whole, mesh, [S(0), S(1)]).requires_grad_()
        for limit in (None, 400):
            y = x.redistribute(mesh["b"], [S(0)], max_extra_bytes=limit)
            assert torch.equal(y.full_tensor().detach(), whole)
            (once,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
            (twice,) = torch.autograd.grad(once.sum(), x)
            assert torch.equal(twice.full_tensor(), 2 * 6 * whole)  # once for each row
            row = DeviceMesh("cpu", [2, 3])
            for scope in (contextlib.nullcontext(), minimize("bytes")):
                z = x.redistribute(
                    row, [S(1)], backward_dtype=torch.float32, max_extra_bytes=limit
                )
                u = x.redistribute(row, [S(1)], max_extra_bytes=limit)
                with scope:
                    (once,) = torch.autograd.grad((u * u * u).sum(), x, create_graph=True)
                    (g,) = torch.autograd.grad((z * z).sum(), x)
                assert torch.equal(once.full_tensor().detach(), 3 * whole**2)
                assert torch.equal(g.full_tensor(), 2 * whole)
                if rank >= 2:
                    assert torch.equal(z.full_tensor().detach(), whole)
        top = DTensor.from_local(whole.clone(), mesh, [Partial("max"), S(0)]).requires_grad_()
        out = top.redistribute(row, [S(1)])
        (g,) = torch.autograd.grad(out.sum(), top)
        assert torch.equal(g.to_local(), torch.full_like(whole, 0.5))

    simulate(check, 4)


def test_lists_in_rounds():
    """Small tensors share collectives within the slab, large ones go in rounds; gradients, too."""
    pairs = list(itertools.product(itertools.product(KINDS, repeat=2), repeat=2))[::5]
    xs = [torch.randint(-8, 8, (3 + i, 5)).double() for i in range(len(pairs))]

    def check(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        ds = [lay_out(x, mesh, src).requires_grad_() for x, (src, _) in zip(xs, pairs)]
        counts = []
        for limit in (320, 20_000, None):
            with CommLog() as log:
                ys = redistribute_many(ds, [dst for _, dst in pairs], max_extra_bytes=limit)
            counts.append(log.on(rank).count())
            total = sum((y * y).sum() for y in ys)
            for d, g, x in zip(ds, torch.autograd.grad(total, ds), xs):
                assert torch.equal(d.full_tensor().detach(), x)
                assert torch.equal(g.full_tensor(), 2 * x)
            for x, y, (_, dst) in zip(xs, ys, pairs):
                assert y.placements == dst
                assert torch.equal(y.full_tensor().detach(), x)
        assert counts[0] > counts[1] > counts[2]
        two = DeviceMesh("cpu", [1, 3, 2])
        state = {"a": ds[3], "b": {"c": ds[5], "n": 1}}
        out = redistribute_state(state, lambda name, x: [S(0)], two, max_extra_bytes=320)
        if rank:
            assert torch.equal(out["a"].full_tensor().detach(), xs[3])
            assert torch.equal(out["b"]["c"].full_tensor().detach(), xs[5])

    simulate(check, 4)


def test_explained_rounds_are_those_that_are_counted():
    """Bytes for each rank, and collectives, of every pair of layouts; across meshes; in another memory order."""
    whole = torch.randn(7, 10).t().contiguous().t()
    also = [[S(0, sizes=(5, 2)), S(1)], [S(1), S(1, order=0)], [R, S(0, owner=1)]]
    places = [*map(list, itertools.product(KINDS, repeat=2)), *also]

    def check(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        three = DeviceMesh("cpu", [3, 0, 1])
        pairs = [(a, mesh, b) for a, b in itertools.product(places, places)][::3]
        pairs += [(a, three, [b]) for a, b in itertools.product(places, KINDS)]
        pairs += [(a, mesh["b"], [b]) for a, b in itertools.product(places, KINDS)]
        slower = 0
        for src, on, dst in pairs:
            d = lay_out(whole, mesh, src)
            told = explain_redistribute(d, dst, on, max_extra_bytes=200)
            d.redistribute(on, dst, max_extra_bytes=200)
            with CommLog() as log:
                d.redistribute(on, dst, max_extra_bytes=200)
            mine = log.on(rank)
            assert mine.bytes == dict(zip(told.ranks, told.bytes)).get(rank, 0), (src, dst)
            assert mine.count() <= told.rounds
            if (
                on is mesh
                and len(told.entries) == 1
                and not (told.src.is_sized or told.dst.is_sized)
            ):
                assert mine.count() == told.rounds
            assert told.slab == 200
            slower += told.rounds > told.unbounded.rounds
        return slower

    assert min(simulate(check, 4)) > 50


def test_the_table_shows_rounds():
    def check(rank):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        x = lay_out(torch.zeros(64, 64), mesh, [S(0)])
        return str(explain_redistribute(x, [S(1)], max_extra_bytes=1024))

    (text, *_) = simulate(check, 4)
    assert_expected_inline(
        text,
        """\
f32[64, 64] {a: S(0)} -> f32[64, 64] {a: S(1)}, 4 ranks, within 1024 bytes
  move             layout after  mean bytes  most    us  rounds
  one_shot over a  {a: S(1)}           3072  3072  2133      32
  total                                3072  3072  2133      32
  lower bound                          3072  3072
  at once                              3072  3072    70       1""",
    )


def test_meshes_exchange_in_rounds():
    whole = torch.randn(5, 6).double()

    def check():
        one = init_device_mesh("cpu", (4,))
        two = init_device_mesh("cpu", (2, 2))
        x = lay_out(whole, one, [S(0)]).requires_grad_()
        y = x.redistribute(two, [S(1), S(0)], max_extra_bytes=320)
        (y * y).sum().backward()
        return y.full_tensor().detach(), x.grad.full_tensor()

    for value, grad in simulate(check, 4):
        assert torch.equal(value, whole)
        assert torch.allclose(grad, 2 * whole)
