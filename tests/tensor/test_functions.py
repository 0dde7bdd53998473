"""Custom autograd Functions, and full backward hooks of modules, on DTensors."""

from collections.abc import Callable
import gc
import math
from typing import Any
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shardwise import (
    CommLog,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import GradientError, LayoutError
from shardwise.testing.sweep import lay_out, sweep

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = [
    ((2,), (R,), (R,)),
    ((2,), (S0,), (R,)),
    ((2,), (S1,), (S0,)),
    ((4,), (P,), (S1,)),
    ((2, 2), (S0, R), (R, S1)),
    ((2, 2), (S0, S1), (P, S0)),
]
pairs = pytest.mark.parametrize(("shape", "px", "pw"), PAIRS, ids=str)


class MatMul(Function):
    """Old style: ctx in forward, two arguments that need a gradient and one that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, scale: float = 2.0) -> Any:
        assert not torch.is_grad_enabled()
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        ctx.flags = ctx.needs_input_grad
        return (x @ w) * scale

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        assert ctx.flags == ctx.needs_input_grad
        gx = g @ w.T * ctx.scale if ctx.needs_input_grad[0] else None
        gw = x.T @ g * ctx.scale if ctx.needs_input_grad[1] else None
        return gx, gw, None


# Bound where a DTensor may not be known yet: still goes over the bridge.
matmul = MatMul.apply


class Cube(Function):
    """New style, with a saved result; its backward can be differentiated."""

    @staticmethod
    def forward(x: Any, factor: float = 1.0) -> Any:
        return x**3 * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.factor = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        assert y.shape == x.shape
        return 3 * x**2 * g * ctx.factor, None


class Several(Function):
    """Several results: one with a gradient, one not differentiable, one that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y, sign, z = x * 2, x.sign(), x.sin()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(x)
        return y, sign, "text", z

    @staticmethod
    def backward(ctx: Any, gy: Any, gsign: Any, gtext: Any, gz: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert gtext is None
        assert gsign.shape == x.shape
        return gy * 2 + gz * x.cos()


class DoubleInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Any) -> Any:
        assert not torch.is_grad_enabled()
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Lazy(Function):
    """Gradients that are None stay None."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        assert b is None
        return a * 2


class Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return -g


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    """Run ``fn(mesh)`` on the virtual ranks of a mesh."""
    return simulate(lambda: fn(init_device_mesh("cpu", shape)), math.prod(shape))


def close(got: Any, want: Tensor) -> None:
    """The whole value of ``got`` is ``want``."""
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-9, atol=1e-9)


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)


def twins(mesh: Any, x: Tensor, px: Any) -> tuple[Tensor, DTensor]:
    return x.clone().requires_grad_(), lay_out(x, mesh, px).requires_grad_()


@pytest.mark.parametrize("apply", [MatMul.apply, matmul], ids=["late", "early"])
@pairs
def test_old_style(apply: Any, shape: Any, px: Any, pw: Any) -> None:
    x, w = data()

    def fn(mesh: Any) -> None:
        (x1, x2), (w1, w2) = twins(mesh, x, px), twins(mesh, w, pw)
        for args in ((), (3.0,)):
            a, b = apply(x1, w1, *args), apply(x2, w2, *args)
            close(b, a)
            assert b.grad_fn.name() == "MatMulBackward"
            a.tanh().sum().backward()
            b.tanh().sum().backward()
            close(x2.grad, x1.grad)
            close(w2.grad, w1.grad)
        a = apply(x1.detach(), w1).sum()
        b = apply(x2.detach(), w2).sum()
        a.backward()
        b.backward()
        close(w2.grad, w1.grad)
        with torch.no_grad():
            assert not apply(x2, w2).requires_grad

    on_mesh(shape, fn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: Cube.apply(x).sin(),
        lambda x: Cube.apply(x, 2.0),
        lambda x: Several.apply(x)[0] * Several.apply(x)[3],
        lambda x: Several.apply(x)[3],
        lambda x: DoubleInPlace.apply(x * 3).sin(),
        lambda x: Once.apply(x) * x,
        lambda x: Lazy.apply(x)[0].sin(),
        lambda x: Same.apply(x) * x,
    ],
    ids=["new", "default", "several", "one of several", "dirty", "once", "lazy", "same"],
)
def test_every_style_on_every_layout(fn: Any) -> None:
    assert not sweep(fn, torch.randn(5, 3, dtype=torch.float64))


@pairs
def test_double_backward(shape: Any, px: Any, pw: Any) -> None:
    x, w = data()

    def penalty(x: Any, w: Any) -> Any:
        h = matmul(Cube.apply(x), w)
        gx, gw = torch.autograd.grad((h * h).sum(), (x, w), create_graph=True)
        return h.sum() + (gx * gx).sum() + gw.tanh().sum()

    def fn(mesh: Any) -> None:
        (x1, x2), (w1, w2) = twins(mesh, x, px), twins(mesh, w, pw)
        penalty(x1, w1).backward()
        penalty(x2, w2).backward()
        close(x2.grad, x1.grad)
        close(w2.grad, w1.grad)
        (g,) = torch.autograd.grad((Once.apply(x2) * x2).sum(), x2, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()

    on_mesh(shape, fn)


def test_results_that_are_not_differentiable_and_plain_ones() -> None:
    x, _ = data()

    class Norm(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            whole = x.full_tensor()
            return whole.sum(), x * 1

        @staticmethod
        def backward(ctx: Any, g: Any, h: Any) -> Any:
            (x,) = ctx.saved_tensors
            assert type(g) is Tensor
            assert isinstance(h, DTensor)
            return torch.ones_like(x) * g

    def fn(mesh: Any) -> None:
        _, dx = twins(mesh, x, (S0,))
        _, sign, text, z = Several.apply(dx)
        assert isinstance(sign, DTensor)
        assert not sign.requires_grad
        assert text == "text"
        assert z.requires_grad
        total, _ = Norm.apply(dx)
        assert type(total) is Tensor
        total.backward()
        close(dx.grad, torch.ones_like(x))

    on_mesh((2,), fn)


def test_dirty_argument_comes_back_as_itself() -> None:
    x, _ = data()

    def fn(mesh: Any) -> None:
        _, dx = twins(mesh, x, (S0,))
        y = dx * 1
        assert DoubleInPlace.apply(y) is y
        close(y, 2 * x)
        assert y.grad_fn.name() == "DoubleInPlaceBackward"
        with pytest.raises(RuntimeError, match="leaf"):
            DoubleInPlace.apply(dx)

    on_mesh((2,), fn)


def test_returned_gradients_are_brought_into_place() -> None:
    x, _ = data()

    class Odd(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, b: Any, kind: str) -> Any:
            ctx.kind, ctx.mesh = kind, x.device_mesh
            return x + b

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            if ctx.kind == "other layout":
                return (
                    g.redistribute(ctx.mesh, [S1]),
                    g.sum(0, keepdim=True).redistribute(ctx.mesh, [S1]),
                    None,
                )
            if ctx.kind == "plain":
                whole = g.full_tensor()
                return whole, whole.sum(0, keepdim=True), None
            if ctx.kind == "broadcast":
                return g, g, None
            return g.T, g, None

    def fn(mesh: Any) -> None:
        for ps in ((S0,), (R,), (P,)):
            for kind in ("other layout", "plain", "broadcast"):
                (x1, x2), (b1, b2) = twins(mesh, x, ps), twins(mesh, x[:1], (R,))
                (x1 + b1).sin().sum().backward()
                Odd.apply(x2, b2, kind).sin().sum().backward()
                close(x2.grad, x1.grad)
                close(b2.grad, b1.grad)
        with pytest.raises(GradientError, match="shape"):
            Odd.apply(x2, b2, "wrong").sum().backward()

    on_mesh((2,), fn)


@pairs
def test_plain_tensor_beside_a_dtensor(shape: Any, px: Any, pw: Any) -> None:
    x, w = data()

    def fn(mesh: Any) -> None:
        x1, x2 = twins(mesh, x, px)
        w1, w2 = w.clone().requires_grad_(), w.clone().requires_grad_()
        matmul(x1, w1).tanh().sum().backward()
        matmul(x2, w2).tanh().sum().backward()
        close(x2.grad, x1.grad)
        torch.testing.assert_close(w2.grad, w1.grad)

    on_mesh(shape, fn)


class Mean(Function):
    """x times the mean of w, whose backward gives a plain tensor for w, made of what the whole gradient is."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x * w.mean()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        total = (g * x).sum()
        total = total.full_tensor() if isinstance(total, DTensor) else total
        return g * w.mean(), total * torch.ones_like(w) / w.numel()


@pytest.mark.parametrize("apply", [matmul, Mean.apply])
@pairs
def test_gradients_of_gradients_of_a_plain_tensor(
    shape: Any, px: Any, pw: Any, apply: Any
) -> None:
    """A plain argument stays plain, and enters where it is used: once for each use, also in backward."""
    x, w = data()

    def penalized(x: Any, w: Any) -> Any:
        first = torch.autograd.grad(apply(x, w).tanh().sum(), w, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), w, create_graph=True)[0]
        second.square().sum().backward()
        return first, second, w.grad

    def fn(mesh: Any) -> None:
        x1, x2 = twins(mesh, x, px)
        want = penalized(x1, w.clone().requires_grad_())
        got = penalized(x2, w.clone().requires_grad_())
        close(x2.grad, x1.grad)
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other)

    on_mesh(shape, fn)


def test_slice_of_a_mesh() -> None:
    x, w = data()

    def fn() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x1, x2 = twins(mesh, x, (S0, R))
        w1, w2 = twins(mesh["tp"], w, (S1,))
        matmul(x1, w1).tanh().sum().backward()
        matmul(x2, w2).tanh().sum().backward()
        close(x2.grad, x1.grad)
        close(w2.grad, w1.grad)

    simulate(fn, 4)


def test_function_of_plain_tensors_that_makes_a_dtensor_raises() -> None:
    x, _ = data()

    class Make(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, mesh: Any) -> Any:
            return DTensor.from_local(x, mesh, [S0])

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g.to_local(), None

    def fn(mesh: Any) -> None:
        assert isinstance(Make.apply(x, mesh), DTensor)
        with pytest.raises(GradientError, match="would be lost"):
            Make.apply(x.clone().requires_grad_(), mesh)

    on_mesh((2,), fn)


def test_nothing_is_kept_alive() -> None:
    x, w = data()

    def fn(mesh: Any) -> None:
        _, dx = twins(mesh, x, (S0,))
        _, dw = twins(mesh, w, (R,))
        h = dx * 2
        local = weakref.ref(h._local_tensor)
        gc.disable()
        try:
            y = matmul(h, dw)
            del h
            assert local() is not None  # saved
            y.sum().backward()
            del y
            assert local() is None  # by reference counts alone
        finally:
            gc.enable()

    on_mesh((2,), fn)


@pytest.mark.parametrize("reentrant", [False, True])
@pairs
def test_inside_checkpoint(shape: Any, px: Any, pw: Any, reentrant: bool) -> None:
    x, w = data()

    def block(x: Any, w: Any) -> Any:
        return matmul(Cube.apply(x.sin()), w)

    def fn(mesh: Any) -> None:
        (x1, x2), (w1, w2) = twins(mesh, x, px), twins(mesh, w, pw)
        block(x1, w1).tanh().sum().backward()
        checkpoint(block, x2, w2, use_reentrant=reentrant).tanh().sum().backward()
        close(x2.grad, x1.grad)
        close(w2.grad, w1.grad)

    on_mesh(shape, fn)


def test_reentrant_checkpoint_moves_no_more_than_the_plain_graph() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)

    def fn(mesh: Any) -> int:
        dx = distribute_tensor(x, mesh, [R]).requires_grad_()
        y = checkpoint(torch.sin, dx * 2, use_reentrant=True)
        with CommLog() as log:
            y.backward(x)
        return log.count()

    assert on_mesh((2,), fn) == [1, 1]  # the reduction of the leaf's gradient


# -- hooks of modules ----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).tanh())


def distributed(net: nn.Module, mesh: Any, pw: Any) -> nn.Module:
    def cut(name: str, sub: nn.Module, mesh: Any) -> None:
        for key, p in list(sub.named_parameters(recurse=False)):
            ps = [q if not q.is_shard() or q.dim < p.ndim else R for q in pw]
            setattr(sub, key, nn.Parameter(distribute_tensor(p, mesh, ps)))

    return distribute_module(net, mesh, cut)


@pytest.mark.parametrize(
    ("shape", "px", "pw"),
    [
        ((2,), (S0,), (R,)),
        ((2,), (R,), (S0,)),
        ((4,), (S1,), (S1,)),
        ((2, 2), (S0, R), (R, S0)),
        ((2, 2), (P, S0), (S0, R)),
    ],
    ids=str,
)
def test_full_backward_hooks(shape: Any, px: Any, pw: Any) -> None:
    x, _ = data()
    plain, state = Net(), None
    state = plain.state_dict()

    def fn(mesh: Any) -> None:
        one, many = Net(), Net()
        one.load_state_dict(state)
        many.load_state_dict(state)
        many = distributed(many, mesh, pw)
        seen: list[tuple[str, Any, Any]] = []

        def after(m: nn.Module, into: Any, out: Any) -> Any:
            seen.append(("after", into[0], out[0]))
            return tuple(None if g is None else g * 2 for g in into)

        def before(m: nn.Module, out: Any) -> Any:
            seen.append(("before", None, out[0]))
            return tuple(g * 3 for g in out)

        x1, x2 = twins(mesh, x, px)
        for net in (one, many):
            net.second.register_full_backward_hook(after)
            net.first.register_full_backward_pre_hook(before)
            net.register_full_backward_hook(after)
        for net, t in ((one, x1), (many, x2)):
            net(t).sin().sum().backward()
        close(x2.grad, x1.grad)
        for p, q in zip(many.parameters(), one.parameters()):
            close(p.grad, q.grad)
        half = len(seen) // 2
        assert half == 3
        for (kind, into, out), (kind2, into2, out2) in zip(seen[:half], seen[half:]):
            assert kind == kind2
            close(out2, out)
            if into is not None:
                close(into2, into)

    on_mesh(shape, fn)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_where_no_input_requires_grad_and_with_other_layouts() -> None:
    x, _ = data()

    def fn(mesh: Any) -> None:
        net = distributed(Net(), mesh, (R,))
        kinds: list[Any] = []
        handle = net.first.register_full_backward_pre_hook(
            lambda m, out: kinds.append(type(out[0]))
        )
        net(distribute_tensor(x, mesh, [S0])).sum().backward()
        assert kinds == [DTensor]
        handle.remove()
        want = net.first.weight.grad.full_tensor()
        net.zero_grad()
        net.first.register_full_backward_pre_hook(
            lambda m, out: (out[0].redistribute(mesh, [S1]),)
        )
        net(distribute_tensor(x, mesh, [S0])).sum().backward()
        close(net.first.weight.grad, want)

    on_mesh((2,), fn)


def test_global_backward_hook() -> None:
    x, _ = data()
    seen: list[Any] = []
    handle = nn.modules.module.register_module_full_backward_hook(
        lambda m, i, o: seen.append(type(o[0]))
    )
    try:

        def fn(mesh: Any) -> None:
            net = distributed(Net(), mesh, (R,))
            net(distribute_tensor(x, mesh, [S0]).requires_grad_()).sum().backward()

        on_mesh((2,), fn)
    finally:
        handle.remove()
    assert seen == [DTensor] * 6


def test_plain_functions_and_hooks_are_as_before() -> None:
    x, w = data()
    x, w = x.requires_grad_(), w.requires_grad_()
    y = matmul(x, w, 2.0)
    y.sum().backward()
    torch.testing.assert_close(w.grad, 2 * x.detach().sum(0)[:, None].expand(3, 4))
    net = Net()
    seen: list[Any] = []
    net.register_full_backward_hook(lambda m, i, o: seen.append(i[0].shape))
    net(x).sum().backward()
    assert seen == [x.shape]
    with pytest.raises(LayoutError):
        simulate(
            lambda: matmul(distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(5)]), w),
            2,
        )
