"""The autograd surface of ``torch.Tensor`` on DTensors, against plain torch in float64."""

from collections.abc import Callable
import math
from typing import Any
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise import (
    CommLog,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    no_sync,
    simulate,
)
from shardwise.errors import LayoutError
from shardwise.testing.sweep import lay_out, sweep

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()

# Every way to hold a matrix on one axis, and the ones on two that mix them.
PLACED = [
    ((2,), (R,)),
    ((2,), (S0,)),
    ((2,), (P,)),
    ((4,), (S1,)),
    ((4,), (R,)),
    ((2, 2), (R, S0)),
    ((2, 2), (S0, S1)),
    ((2, 2), (S1, P)),
    ((2, 2), (S0, S0)),
]
placed = pytest.mark.parametrize(("shape", "ps"), PLACED, ids=str)


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    """Run ``fn(mesh)`` on the virtual ranks of a mesh."""
    return simulate(lambda: fn(init_device_mesh("cpu", shape)), math.prod(shape))


def close(got: Any, want: Tensor) -> None:
    """The whole value of ``got`` is ``want``."""
    assert isinstance(got, DTensor)
    assert tuple(got.shape) == tuple(want.shape)
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-9, atol=1e-9)


def pair() -> tuple[Tensor, Tensor]:
    """A leaf of odd size and a weight, on one device."""
    return torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)


def leaves(mesh: Any, ps: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, DTensor, DTensor]:
    """Plain leaves and their distributed twins; the weight is replicated."""
    px, pw = x.clone().requires_grad_(), w.clone().requires_grad_()
    dx = lay_out(x, mesh, ps).requires_grad_()
    dw = distribute_tensor(w, mesh).requires_grad_()
    return px, pw, dx, dw


def loss(x: Any, w: Any) -> Any:
    return ((x @ w).tanh() * x).sum()


# -- leaves ---------------------------------------------------------------------------------------


@placed
def test_gradients_have_the_layout_of_their_leaf_and_accumulate(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        for _ in range(3):
            loss(px, pw).backward()
            loss(dx, dw).backward()
            close(dx.grad, px.grad)
            close(dw.grad, pw.grad)
            assert dx.grad.placements == dx.placements
            assert dw.grad.placements == dw.placements
            assert dx.grad is dx.grad

    on_mesh(shape, fn)


def test_each_backward_reduces_once() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        dx = distribute_tensor(x, mesh, [S0])
        dw = distribute_tensor(w, mesh).requires_grad_()
        for _ in range(3):
            out = (dx @ dw).sum()
            with CommLog() as log:
                out.backward()
            assert log.count("all_reduce") == 1

    on_mesh((2,), fn)


@placed
def test_zero_grad_both_ways(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        for set_to_none in (False, True, False):
            loss(px, pw).backward()
            loss(dx, dw).backward()
            close(dx.grad, px.grad)
            close(dw.grad, pw.grad)
            for p, q in (
                ([px, pw], torch.optim.SGD([px, pw])),
                ([dx, dw], torch.optim.SGD([dx, dw])),
            ):
                q.zero_grad(set_to_none=set_to_none)
                assert all((t.grad is None) == set_to_none for t in p)
            if not set_to_none:
                close(dx.grad, px.grad)
        loss(px, pw).backward()
        loss(dx, dw).backward()
        close(dx.grad, px.grad)

    on_mesh(shape, fn)


@placed
def test_no_sync_then_synced_backward(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        loss(px, pw).backward()
        loss(dx, dw).backward()
        reduced = loss(dx, dw)
        with no_sync(), CommLog():
            reduced.backward()
        loss(px, pw).backward()
        if len(shape) == 1:
            assert dw.grad.placements == (P,)
        close(dw.grad, pw.grad)  # read while pending
        close(dx.grad, px.grad)
        with no_sync():
            loss(dx, dw).backward()
        loss(px, pw).backward()
        close(dw.grad, pw.grad)
        loss(px, pw).backward()
        loss(dx, dw).backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)
        assert dw.grad.placements == dw.placements

    on_mesh(shape, fn)


def test_no_sync_saves_the_reductions() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        dx = distribute_tensor(x, mesh, [S0])
        dw = distribute_tensor(w, mesh).requires_grad_()
        with CommLog() as log:
            with no_sync():
                for _ in range(3):
                    (dx @ dw).sum().backward()
            assert log.count() == 0
            assert dw.grad.placements == (P,)
            assert log.count() == 0
            (dx @ dw).sum().backward()
        assert log.count("all_reduce") == 1
        close(dw.grad, 4 * (x.sum(0)[:, None].expand(3, 3)))

    on_mesh((4,), fn)


@placed
def test_requires_grad_can_be_toggled(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        for t in (px, dx):
            t.requires_grad_(False)
            assert not t.requires_grad
            t.requires_grad = True
            t.requires_grad_().requires_grad_()
        pw.requires_grad_(False)
        dw.requires_grad_(False)
        loss(px, pw).backward()
        loss(dx, dw).backward()
        close(dx.grad, px.grad)
        assert dw.grad is None
        pw.requires_grad_()
        dw.requires_grad_()
        loss(px, pw).backward()
        loss(dx, dw).backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)
        y = dx * 2
        with pytest.raises(RuntimeError, match="leaf"):
            y.requires_grad_(False)
        with pytest.raises(RuntimeError, match="floating"):
            distribute_tensor(torch.arange(3), mesh).requires_grad_()

    on_mesh(shape, fn)


def test_grad_can_be_set() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        _, _, dx, dw = leaves(mesh, (S0,), x, w)
        g = torch.randn(3, 3, dtype=torch.float64)
        dw.grad = distribute_tensor(g, mesh, [S1])
        assert dw.grad.placements == (R,)
        close(dw.grad, g)
        loss(dx, dw).backward()
        px, pw = x.clone(), w.clone().requires_grad_()
        loss(px, pw).backward()
        close(dw.grad, g + pw.grad)
        with pytest.raises(LayoutError, match="shape"):
            dw.grad = dx
        with pytest.raises(LayoutError, match="distribute_tensor"):
            dw.grad = g
        dw.grad = None
        assert dw.grad is None

    on_mesh((2,), fn)


# -- backward and grad -------------------------------------------------------------------------------


@placed
def test_create_graph_and_gradients_of_gradients(shape: Any, ps: Any) -> None:
    x, w = pair()

    def penalty(x: Any, w: Any) -> Any:
        h = (x @ w).tanh()
        out = (h * h).sum() + (x.softmax(0) * h).sum()
        gx, gw = torch.autograd.grad(out, (x, w), create_graph=True)
        return out + (gx * gx).sum() + (gw.tanh() * w).sum()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        a, b = penalty(px, pw), penalty(dx, dw)
        close(b, a)
        a.backward()
        b.backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)

    on_mesh(shape, fn)


@placed
def test_backward_with_create_graph(shape: Any, ps: Any) -> None:
    x, w = pair()

    def run(x: Any, w: Any) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle that .grad makes
            loss(x, w).backward(create_graph=True)
        gx, gw = x.grad, w.grad
        second = torch.autograd.grad((gx * gx).sum() + (gw * gw * w).sum(), (x, w))
        x.grad = w.grad = None
        return [gx, gw, *second]

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        for got, want in zip(run(dx, dw), run(px, pw)):
            close(got, want)

    on_mesh(shape, fn)


@placed
def test_autograd_grad(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        unused = distribute_tensor(w, mesh, [R]).requires_grad_()
        want = torch.autograd.grad(loss(px, pw), (px, pw))
        got = torch.autograd.grad(loss(dx, dw), (dx, dw))
        for g, t, p in zip(got, (dx, dw), want):
            close(g, p)
            assert g.layout.partial == t.layout.dual().partial
            assert g.layout.dims == t.layout.dims
            assert t.grad is None
        (only,) = torch.autograd.grad(loss(dx, dw), dx)
        close(only, want[0])
        with pytest.raises(RuntimeError, match="to not have been used"):
            torch.autograd.grad(loss(dx, dw), (dx, unused))
        got = torch.autograd.grad(loss(dx, dw), (dx, unused), allow_unused=True)
        assert got[1] is None
        got = torch.autograd.grad(loss(dx, dw), (dx, unused), materialize_grads=True)
        close(got[1], torch.zeros_like(w))
        h, k = dx * 2, px * 2  # of a non-leaf, with a gradient, two outputs
        seed = torch.randn_like(x)
        outs, pouts = (h.tanh(), (h @ dw).sum()), (k.tanh(), (k @ pw).sum())
        got = torch.autograd.grad(outs, [h, dw], [distribute_tensor(seed, mesh, [S0]), None])
        for g, p in zip(got, torch.autograd.grad(pouts, [k, pw], [seed, None])):
            close(g, p)
        seeds = torch.randn(2, 5, 3, dtype=torch.float64)
        want = torch.autograd.grad(px @ pw, (px, pw), seeds, is_grads_batched=True)
        rows = distribute_tensor(seeds, mesh, [S1])
        got = torch.autograd.grad(dx @ dw, (dx, dw), rows, is_grads_batched=True)
        for g, p in zip(got, want):
            close(g, p)
        with pytest.raises(RuntimeError, match="batch dim"):
            torch.autograd.grad(loss(dx, dw), dx, is_grads_batched=True)

    on_mesh(shape, fn)


def test_autograd_grad_communicates_nothing_for_its_results() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        dx = distribute_tensor(x, mesh, [S0])
        dw = distribute_tensor(w, mesh).requires_grad_()
        out = (dx @ dw).sum()
        with CommLog() as log:
            (g,) = torch.autograd.grad(out, dw)
        assert log.count() == 0
        assert g.placements == (P,)

    on_mesh((2,), fn)


@placed
def test_backward_with_a_gradient(shape: Any, ps: Any) -> None:
    x, w = pair()
    seed = torch.randn(5, 3, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        for given in ((R,), (S0,), (S1,), (P,)):
            px, pw, dx, dw = leaves(mesh, ps, x, w)
            (px @ pw).backward(seed)
            (dx @ dw).backward(gradient=lay_out(seed, mesh, (R,) * (len(shape) - 1) + given))
            close(dx.grad, px.grad)
            close(dw.grad, pw.grad)
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        (px @ pw).backward(seed)
        (dx @ dw).backward(seed)  # a plain gradient counts as replicated
        close(dx.grad, px.grad)
        with pytest.raises(LayoutError, match="shape"):
            (dx @ dw).backward(distribute_tensor(seed[:1], mesh))

    on_mesh(shape, fn)


@placed
def test_backward_of_more_than_one_element_raises(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        n = math.prod(shape)
        dx = distribute_tensor(torch.randn(n, dtype=torch.float64), mesh, [S0] * len(shape))
        dx.requires_grad_()
        assert (
            dx.to_local().numel() == 1
        )  # local pieces have one element: only the global count tells
        with pytest.raises(RuntimeError, match="scalar"):
            (dx * 2).backward()
        with pytest.raises(RuntimeError, match="scalar"):
            torch.autograd.grad(dx * 2, dx)
        one = distribute_tensor(
            torch.randn(1, 1, dtype=torch.float64), mesh, ps
        ).requires_grad_()
        (one * 3).backward()
        close(one.grad, torch.full((1, 1), 3.0, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="does not require grad"):
            one.detach().sum().backward()

    on_mesh(shape, fn)


@placed
def test_backward_inputs_and_retain_graph(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        a, b = loss(px, pw), loss(dx, dw)
        a.backward(inputs=[pw], retain_graph=True)
        b.backward(inputs=[dw], retain_graph=True)
        assert dx.grad is None
        close(dw.grad, pw.grad)
        a.backward(inputs=px, retain_graph=True)
        b.backward(inputs=dx, retain_graph=True)
        close(dx.grad, px.grad)
        a.backward()
        b.backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)
        with pytest.raises(RuntimeError, match="second time"):
            b.backward()
        hp, hd = px * 2, dx * 2  # of a non-leaf
        loss(hp, pw).backward(inputs=[hp])
        loss(hd, dw).backward(inputs=[hd])
        close(hd.grad, hp.grad)
        close(dx.grad, px.grad)
        torch.autograd.backward([loss(px, pw), (px * 2).sum()])
        torch.autograd.backward([loss(dx, dw), (dx * 2).sum()])
        close(dx.grad, px.grad)

    on_mesh(shape, fn)


@placed
def test_retain_grad(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        hp, hd = px * 3, dx * 3
        assert hd.grad is None
        hp.retain_grad()
        hd.retain_grad()
        assert hd.retains_grad
        assert not hd.is_leaf
        loss(hp, pw).backward()
        loss(hd, dw).backward()
        close(hd.grad, hp.grad)
        assert hd.grad.layout.partial == hd.layout.dual().partial
        dx.retain_grad()  # nothing to do on a leaf
        close(dx.grad, px.grad)

    on_mesh(shape, fn)


# -- hooks -----------------------------------------------------------------------------------------


@placed
def test_register_hook(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        seen: list[Any] = []

        def look(t: Any) -> Callable[[Any], None]:
            return lambda g: seen.append((t, g))

        hp, hd = px * 3, dx * 3
        for p, d in ((px, dx), (hp, hd), (pw, dw)):
            p.register_hook(lambda g: g * g)
            # the result may have any layout
            d.register_hook(lambda g: (g * g).redistribute(mesh, [S0] * len(shape)))
            d.register_hook(look(d))
        removed = dx.register_hook(look(dw))
        removed.remove()
        loss(hp, pw).backward()
        loss(hd, dw).backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)
        assert len(seen) == 3
        for t, g in seen:
            assert g.layout.partial == t.layout.dual().partial
            assert g.layout.dims == t.layout.dims
        dx.register_hook(lambda g: g.to_local())
        with pytest.raises(LayoutError, match="hook"):
            loss(dx, dw).backward()

    on_mesh(shape, fn)


@placed
def test_post_accumulate_hook_runs_after_the_reduction(shape: Any, ps: Any) -> None:
    x, w = pair()

    def step(p: Any) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        layouts: list[Any] = []
        for t in (px, pw, dx, dw):
            t.register_post_accumulate_grad_hook(step)
        dw.register_post_accumulate_grad_hook(lambda p: layouts.append(p.grad)).remove()
        for _ in range(3):
            loss(px, pw).backward()
            loss(dx, dw).backward()
            assert dx.grad is None
            assert dw.grad is None
            close(dx, px)
            close(dw, pw)
        assert not layouts
        with pytest.raises(RuntimeError, match="leaf"):
            (dx * 2).register_post_accumulate_grad_hook(step)

    on_mesh(shape, fn)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hook(mode: str) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        _, _, dx, dw = leaves(mesh, (S0,), x, w)
        seen: list[Any] = []
        handle = torch.autograd.graph.register_multi_grad_hook((dx, dw), seen.append, mode=mode)
        loss(dx, dw).backward()
        assert len(seen) == 1
        grads = seen[0] if mode == "all" else [seen[0]]
        assert all(isinstance(g, DTensor) for g in grads)
        handle.remove()
        loss(dx, dw).backward()
        assert len(seen) == 1

    on_mesh((2,), fn)


def test_hook_on_a_node_sees_locals() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        _, _, dx, dw = leaves(mesh, (S0,), x, w)
        out = loss(dx, dw)
        kinds: list[Any] = []
        out.grad_fn.register_hook(lambda _, grads: kinds.append(type(grads[0])))
        out.backward()
        assert kinds == [Tensor]

    on_mesh((2,), fn)


# -- modes -----------------------------------------------------------------------------------------


@placed
def test_grad_modes(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        for mode in (torch.no_grad(), torch.set_grad_enabled(False), torch.inference_mode()):
            with mode:
                y = (dx @ dw).tanh()
                assert not y.requires_grad
                assert y.is_leaf
                assert y.is_inference() == torch.is_inference_mode_enabled()
                close(y, (px @ pw).tanh())
        with torch.no_grad(), torch.enable_grad():
            assert (dx * 2).requires_grad

        @torch.no_grad()
        def off(t: Any) -> Any:
            return t * 2

        assert not off(dx).requires_grad
        y = dx * 2
        z = y.detach()
        assert not z.requires_grad
        assert z.is_leaf
        assert isinstance(z, DTensor)
        assert z.placements == y.placements
        with torch.no_grad():
            z.mul_(2)  # shares memory
        close(y, px * 4)
        y.detach_()
        assert y.is_leaf
        assert not y.requires_grad
        with pytest.raises(RuntimeError, match="in-place"):
            dx.mul_(2)  # a leaf

    on_mesh(shape, fn)


def test_anomaly_mode() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, (S0,), x, w)
        loss(dx, dw).backward()
        loss(px, pw).backward()
        close(dw.grad, pw.grad)
        bad = distribute_tensor(
            torch.zeros(4, dtype=torch.float64), mesh, [S0]
        ).requires_grad_()
        with pytest.raises(RuntimeError, match="nan values"):
            (bad.sqrt() * 0).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():  # a flag of the process
            on_mesh((2,), fn)


@placed
def test_saved_tensors_hooks(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        kinds: set[Any] = set()

        def pack(t: Tensor) -> Any:
            kinds.add(type(t))
            return t.numpy().copy() if not t.requires_grad else t.detach().numpy().copy()

        loss(px, pw).backward()
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            out = loss(dx, dw)
        out.backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)
        assert kinds == {Tensor}  # hooks see local pieces
        with torch.autograd.graph.save_on_cpu():
            out = loss(dx, dw)
        out.backward()
        loss(px, pw).backward()
        close(dx.grad, px.grad)

    on_mesh(shape, fn)


@pytest.mark.parametrize("reentrant", [False, True])
@placed
def test_checkpoint(shape: Any, ps: Any, reentrant: bool) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        calls = [0]

        def block(h: Any, w: Any) -> Any:
            calls[0] += 1
            return (h @ w).tanh() + h

        def inner(h: Any) -> Any:  # a weight in the closure
            return (h @ dw).sin()

        for _ in range(2):
            h = checkpoint(block, dx * 2, dw, use_reentrant=reentrant)
            h = checkpoint(inner, h, use_reentrant=reentrant)
            (h * h).sum().backward()
            k = block(px * 2, pw)
            k = (k @ pw).sin()
            (k * k).sum().backward()
            close(h, k)
            close(dx.grad, px.grad)
            close(dw.grad, pw.grad)
        assert calls[0] == 2 * 3

    on_mesh(shape, fn)


@pytest.mark.parametrize("ps", [(R,), (S0,)], ids=str)
def test_functional_jacobian_and_hessian(ps: Any) -> None:
    x = torch.randn(3, dtype=torch.float64)

    def f(t: Any) -> Any:
        return t.tanh() * t

    def fn(mesh: Any) -> None:
        dx = distribute_tensor(x, mesh, ps)
        close(
            torch.autograd.functional.jacobian(f, dx), torch.autograd.functional.jacobian(f, x)
        )
        for name in ("vjp", "vhp", "hvp"):
            v = torch.ones_like(x)
            g = f if name == "vjp" else lambda t: f(t).sum()
            want = getattr(torch.autograd.functional, name)(g, x, v)
            got = getattr(torch.autograd.functional, name)(
                g, dx, distribute_tensor(v, mesh, ps)
            )
            for a, b in zip(got, want):
                close(a, b)

    on_mesh((2,), fn)


# -- plain tensors, crossings, slices of a mesh -------------------------------------------------------


@placed
def test_plain_tensor_gets_the_whole_gradient(shape: Any, ps: Any) -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, pw, dx, _ = leaves(mesh, ps, x, w)
        plain = w.clone().requires_grad_()
        bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
        pb = bias.detach().clone().requires_grad_()
        (((px @ pw) + pb).tanh() * px).sum().backward()
        (((dx @ plain) + bias).tanh() * dx).sum().backward()
        close(dx.grad, px.grad)
        torch.testing.assert_close(plain.grad, pw.grad)
        torch.testing.assert_close(bias.grad, pb.grad)

    on_mesh(shape, fn)


def filled(total: Any, put: Callable[[Any], Any]) -> Any:
    put(total)
    return total


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda t, x: t.add_(x),
    "+=": lambda t, x: filled(t, lambda t: t.__iadd__(x)),
    "mul_": lambda t, x: t.mul_(x),
    "copy_": lambda t, x: t.copy_(x),
    "fill_": lambda t, x: t.fill_(x.sum()),
    "lerp_": lambda t, x: t.lerp_(x, 0.3),
    "a row": lambda t, x: filled(t, lambda t: t.__setitem__(0, x[0])),
    "a number": lambda t, x: filled(t, lambda t: t.__setitem__((0, 0), x.sum())),
    "a slice": lambda t, x: filled(t, lambda t: t[:2].copy_(x[:2])),
    "index_add_": lambda t, x: t.index_add_(0, torch.arange(len(x)), x),
    "what is used on": lambda t, x: t.add_(x) * x,
}


@placed
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_plain_tensor_takes_in_a_dtensor(shape: Any, ps: Any, name: str, leaf: bool) -> None:
    x, _ = pair()
    start = torch.randn_like(x)

    def fn(mesh: Any) -> None:
        got = []
        for t in (x.clone(), lay_out(x, mesh, ps)):
            t.requires_grad_()
            total = start.clone().requires_grad_(leaf)
            out = WRITES[name](total.clone(), t)
            out.sin().square().sum().backward()
            got.append((out, t.grad, total.grad))
        (want, g, h), (out, dg, dh) = got
        close(out, want) if isinstance(out, DTensor) else torch.testing.assert_close(out, want)
        close(dg, g)
        assert (dh is None) == (h is None)
        if h is not None:
            torch.testing.assert_close(dh, h)

    on_mesh(shape, fn)


SHORT: dict[str, Callable[..., Any]] = {
    "a row": lambda x: (x.sin()[1] * 2).sin(),
    "rows": lambda x: (x.sin()[1:2] * 2).sin(),
    "a row that is written to": lambda x: filled(x.clone(), lambda b: b[1].mul_(2.0)).sin(),
    "cat": lambda x: torch.cat([x.sin(), x.cos()]).sin(),
    "stack": lambda x: torch.stack([x.sin(), x.cos()]).sin(),
    "pad": lambda x: torch.nn.functional.pad(x.sin(), (1, 2)).sin(),
    "positions": lambda x: x.sin()[torch.tensor([0, 1, 1])].sin(),
    "index_select": lambda x: x.sin().index_select(0, torch.tensor([1, 0])).sin(),
    "gather": lambda x: x.sin().gather(0, torch.tensor([1, 1])).sin(),
    "take": lambda x: x.sin().take(torch.tensor([1])).sin(),
    "a mask": lambda x: x.sin()[x.detach() > 0].sin(),
    "repeat_interleave": lambda x: x.sin().repeat_interleave(torch.arange(len(x))).sin(),
    "logcumsumexp": lambda x: x.sin().logcumsumexp(0).sin(),
    "topk": lambda x: x.sin().topk(2).values.sin(),
    "roll": lambda x: x.sin().roll(1).sin(),
    "diff": lambda x: x.sin().diff().sin(),
}


@pytest.mark.parametrize("shape", [(5, 2), (2, 5), (7, 1)])
def test_second_gradients_of_diagonals_of_which_ranks_hold_nothing(shape: Any) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    for offset in (0, 1, -1):
        fn = lambda x, k=offset: x.sin().diagonal(k).sin()  # noqa: E731
        assert not sweep(fn, x, meshes=[(3,), (2, 2)], twice=True)


@pytest.mark.parametrize("name", SHORT)
def test_second_gradients_of_vectors_of_which_ranks_hold_nothing(name: str) -> None:
    for n in (2, 5):
        x = torch.randn(n, dtype=torch.float64)
        assert not sweep(SHORT[name], x, meshes=[(3,), (4,)], twice=True)


@placed
def test_gradcheck(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        for f in (lambda t: t.tanh() @ t.T, lambda t: (t.softmax(0) ** 2).sum()):
            d = distribute_tensor(torch.randn(3, 2, dtype=torch.float64), mesh, ps)
            assert torch.autograd.gradcheck(f, (d.requires_grad_(),))
            assert torch.autograd.gradgradcheck(f, (d,))

    on_mesh(shape, fn)


@placed
def test_a_plain_seed_gets_the_whole_gradient(shape: Any, ps: Any) -> None:
    x, _ = pair()
    v = torch.randn_like(x)

    def fn(mesh: Any) -> None:
        got = []
        for t in (x.clone(), lay_out(x, mesh, ps)):
            t.requires_grad_()
            seed = v.clone().requires_grad_()
            (g,) = torch.autograd.grad(t.tanh(), t, seed, create_graph=True)
            g.square().sum().backward()
            got.append((t.grad, seed.grad))
        close(got[1][0], got[0][0])
        torch.testing.assert_close(got[1][1], got[0][1])

    on_mesh(shape, fn)


@pytest.mark.parametrize(
    ("shape", "ps"), [*PLACED, ((2, 2), (P, R)), ((2, 2), (R, R)), ((2, 2), (P, S1))], ids=str
)
def test_gradients_of_gradients_next_to_plain_tensors(shape: Any, ps: Any) -> None:
    """What is computed from a plain gradient is computed on every rank, and is not summed over them."""
    x, w = pair()
    a, b = torch.randn(3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def penalized(x: Any, w: Any, a: Any, b: Any) -> Any:
        """A penalty on the gradient of the gradient, of a residual, a parameter and an operand."""
        y = torch.nn.functional.linear(x + b, w, a)
        loss = (y + b).tanh().square().sum() + (x.mul(b) @ w).sin().sum() + (b @ a).sum()
        wrt = [t for t in (b, a, x, w) if t.requires_grad]
        first = torch.autograd.grad(loss, wrt, create_graph=True)
        second = torch.autograd.grad(
            (first[0] * b.sin()).sum() + first[1].square().sum(), wrt, create_graph=True
        )
        third = (second[0] * x).square().sum() + second[1].square().sum()
        third.backward()
        return [*first, *second, *[t.grad for t in wrt]]

    one = [t.clone().requires_grad_() for t in (x, w, a, b)]
    want = penalized(*one)

    def rank(mesh: Any) -> None:
        for grads in (False, True):
            ours = [lay_out(x, mesh, ps), lay_out(w, mesh, (R,) * mesh.ndim)]
            ours = [t.requires_grad_(grads) for t in ours]
            plain = [t.clone().requires_grad_() for t in (a, b)]
            got = penalized(*ours, *plain)
            n = 4 if grads else 2
            for i in range(3):
                for g, v in zip(got[i * n : i * n + n], want[4 * i : 4 * i + n]):
                    if isinstance(g, DTensor):
                        close(g, v)
                    else:
                        torch.testing.assert_close(g, v, rtol=1e-9, atol=1e-9)

    on_mesh(shape, rank)


def cuts(mesh: Any, ps: Any, x: Tensor) -> Tensor:
    return distribute_tensor(x, mesh, ps).to_local()


def test_from_local_and_to_local_gradients() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        rank = mesh.get_rank()
        # sharded in, sharded out
        local = cuts(mesh, (S0,), x).requires_grad_()
        d = DTensor.from_local(local, mesh, [S0])
        (d * d).to_local().sum().backward()
        torch.testing.assert_close(local.grad, 2 * local.detach())
        # replicated in: the gradient of the local is whole
        local = w.clone().requires_grad_()
        d = DTensor.from_local(local, mesh, [R])
        dx = distribute_tensor(x, mesh, [S0])
        pw = w.clone().requires_grad_()
        (x @ pw).tanh().sum().backward()
        (dx @ d).tanh().sum().backward()
        torch.testing.assert_close(local.grad, pw.grad)
        # grad_placements: the contribution alone
        local = w.clone().requires_grad_()
        d = DTensor.from_local(local, mesh, [R], grad_placements=[P])
        (dx @ d).tanh().sum().backward()
        part = DTensor.from_local(local.grad, mesh, [P])
        close(part, pw.grad)
        # partial in: every addend gets the whole gradient
        local = w.clone().requires_grad_()
        d = DTensor.from_local(local, mesh, [P])
        (d * d).sum().backward()
        torch.testing.assert_close(local.grad, 2 * 2 * w)
        # to_local of a replicated value: ranks compute the same
        dw = distribute_tensor(w, mesh).requires_grad_()
        (dw * 2).to_local().sum().backward()
        close(dw.grad, torch.full_like(w, 2.0))
        # each rank contributes a part: said with grad_placements
        dw = distribute_tensor(w, mesh).requires_grad_()
        ((dw * 2).to_local(grad_placements=[P]) * (rank + 1)).sum().backward()
        close(dw.grad, torch.full_like(w, 6.0))
        # and without, the wrong guess raises on all ranks
        dw = distribute_tensor(w, mesh).requires_grad_()
        with pytest.raises(LayoutError, match="grad_placements"):
            ((dw * 2).to_local() * (rank + 1)).sum().backward()
        # full_tensor, and a gradient that differs in layout
        dx = distribute_tensor(x, mesh, [S1]).requires_grad_()
        (dx.full_tensor() ** 3).sum().backward()
        close(dx.grad, 3 * x**2)

    on_mesh((2,), fn)


def test_slice_of_a_mesh() -> None:
    x, w = pair()

    def fn() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        px, pw = x.clone().requires_grad_(), w.clone().requires_grad_()
        dx = distribute_tensor(x, mesh, [S0]).requires_grad_()
        dw = distribute_tensor(w, mesh["tp"], [S1]).requires_grad_()
        bias = distribute_tensor(w[0], mesh["tp"]).requires_grad_()
        pb = w[0].clone().requires_grad_()
        for _ in range(2):
            ((dx @ dw + bias).tanh()).sum().backward()
            ((px @ pw + pb).tanh()).sum().backward()
            close(dx.grad, px.grad)
            close(dw.grad, pw.grad)
            close(bias.grad, pb.grad)
            assert dw.grad.device_mesh == mesh["tp"]

    simulate(fn, 4)


def test_gradients_of_gradients_on_a_slice_of_a_mesh() -> None:
    x, w = pair()

    def penalized(x: Any, w: Any, b: Any) -> list[Any]:
        first = torch.autograd.grad((x @ w + b).tanh().sum(), (x, w, b), create_graph=True)
        loss = first[1].square().sum() + first[2].pow(3).sum()
        second = torch.autograd.grad(loss, (x, w, b), create_graph=True)
        (second[1].sin().sum() + second[2].square().sum()).backward()
        return [*first, *second, x.grad, w.grad, b.grad]

    def fn() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        want = penalized(*[t.clone().requires_grad_() for t in (x, w, w[0])])
        dx = distribute_tensor(x, mesh, [S0]).requires_grad_()
        dw = distribute_tensor(w, mesh["tp"], [S1]).requires_grad_()
        bias = distribute_tensor(w[0], mesh["tp"]).requires_grad_()
        for got, one in zip(penalized(dx, dw, bias), want, strict=True):
            close(got, one)

    simulate(fn, 4)


@placed
def test_in_place_on_non_leaves(shape: Any, ps: Any) -> None:
    x, w = pair()

    def f(x: Any, w: Any) -> Any:
        y = x * 2
        y.mul_(3)
        y.add_(x)
        y[1:3] = y[1:3] * 2
        z = y + 1
        z += (x @ w).tanh()
        return (z * z).sum()

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        a, b = f(px, pw), f(dx, dw)
        close(b, a)
        a.backward()
        b.backward()
        close(dx.grad, px.grad)
        close(dw.grad, pw.grad)
        y = dx * 2
        z = y * y
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            z.sum().backward()

    on_mesh(shape, fn)


def test_gradient_edges() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        _, _, dx, dw = leaves(mesh, (S0,), x, w)
        edge = torch.autograd.graph.get_gradient_edge(dw)
        assert edge.node is torch.autograd.graph.get_gradient_edge(dw).node
        assert loss(dx, dw).grad_fn is not None
        assert loss(dx, dw).grad_fn.next_functions

    on_mesh((2,), fn)


@placed
def test_the_gradient_at_an_edge_is_that_of_the_tensor(
    shape: tuple[int, ...], ps: tuple[Any, ...]
) -> None:
    x, w = pair()
    edge_of = torch.autograd.graph.get_gradient_edge

    def fn(mesh: Any) -> None:
        px, pw, dx, dw = leaves(mesh, ps, x, w)
        (px @ pw).square().sum().backward()
        close(torch.autograd.grad((dx @ dw).square().sum(), [edge_of(dx)])[0], px.grad)
        into, to = torch.autograd.grad((dx @ dw).square().sum(), [dx, edge_of(dw)])
        close(into, px.grad)
        close(to, pw.grad)
        y, py = dx @ dw, (px @ pw).detach()
        close(torch.autograd.grad(y.square().sum(), edge_of(y), retain_graph=True)[0], 2 * py)
        seed = DTensor.from_local(2 * py, mesh, [R] * mesh.ndim)
        close(torch.autograd.grad([edge_of(y)], [dw], [seed], retain_graph=True)[0], pw.grad)
        y.square().sum().backward(inputs=[edge_of(dx)])
        close(dx.grad, px.grad)
        assert dw.grad is None

    on_mesh(shape, fn)


def test_an_edge_of_a_tensor_of_which_a_plain_loss_was_made() -> None:
    x, w = pair()

    def fn(mesh: Any) -> None:
        px, _, dx, dw = leaves(mesh, (S0,), x, w)
        loss = (dx @ dw).square().sum().full_tensor()
        (px @ w).square().sum().backward()
        edge = torch.autograd.graph.get_gradient_edge(dx)
        close(torch.autograd.grad(loss, edge)[0], px.grad)

    on_mesh((2,), fn)


def test_edges_of_plain_tensors_are_those_of_torch() -> None:
    x = torch.ones(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x)
    assert type(edge) is torch.autograd.graph.GradientEdge
    assert torch.equal(torch.autograd.grad((x * x).sum(), edge)[0], torch.full((3,), 2.0))


def test_a_gradient_of_another_dtype_is_refused() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (R, S0):
            x = distribute_tensor(torch.ones(4, 3), mesh, [placement]).requires_grad_()
            with pytest.raises(LayoutError, match="float64"):
                x.grad = x.detach().double()

    simulate(on_rank, 2)
