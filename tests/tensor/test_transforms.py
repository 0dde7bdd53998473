"""Function transforms over DTensors: what works, and what raises instead of being silently wrong."""

from collections.abc import Callable
import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, vjp, vmap
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import UnsupportedError

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    """Run ``fn(mesh)`` on the virtual ranks of a mesh."""
    return simulate(lambda: fn(init_device_mesh("cpu", shape)), math.prod(shape))


def close(got: Any, want: Tensor) -> None:
    """The whole value of ``got`` is ``want``."""
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-9, atol=1e-9)


def both(x: Tensor, mesh: Any, ps: Any) -> tuple[Tensor, DTensor]:
    return x.clone().requires_grad_(), distribute_tensor(x, mesh, ps).requires_grad_()


@pytest.mark.filterwarnings("ignore")
def test_compile_runs_the_calls_as_they_are() -> None:
    product = torch.compile(lambda a, b: (a @ b).relu(), backend="aot_eager")

    def norm(x: Any, y: Any, z: Any) -> Any:
        return F.layer_norm(x.permute(0, 2, 1).contiguous(), (4,), y, z).permute(0, 2, 1)

    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()

    def fn(mesh: Any) -> None:
        for n in (4, 6, 10):  # several shapes
            pa, da = both(torch.randn(n, 4, dtype=torch.float64), mesh, [S0])
            pb, db = both(torch.randn(4, 4, dtype=torch.float64), mesh, [R])
            a, b = (pa @ pb).relu(), product(da, db)
            close(b, a)
            (a * a).sum().backward()
            (b * b).sum().backward()
            close(da.grad, pa.grad)
            close(db.grad, pb.grad)
        px, dx = both(torch.randn(4, 4, 4, dtype=torch.float64), mesh, [S1])
        (py, dy), (pz, dz) = (
            both(torch.randn(4, dtype=torch.float64), mesh, [R]) for _ in range(2)
        )
        a, b = norm(px, py, pz), torch.compile(norm, backend="aot_eager")(dx, dy, dz)
        close(b, a)
        a, b = torch.matmul(a, px).permute(0, 2, 1), torch.matmul(b, dx).permute(0, 2, 1)
        (a * a).sum().backward()
        (b * b).sum().backward()
        for d, p in ((dx, px), (dy, py), (dz, pz)):
            close(d.grad, p.grad)
        one, many = copy.deepcopy(plain), distribute_module(copy.deepcopy(plain), mesh)
        fast = torch.compile(many, backend="aot_eager")
        px, dx = both(torch.randn(6, 4, dtype=torch.float64), mesh, [S0])
        for _ in range(2):
            (fast(dx) ** 2).sum().backward()
            (one(px) ** 2).sum().backward()
        close(dx.grad, px.grad)
        for d, p in zip(many.parameters(), one.parameters()):
            close(d.grad, p.grad)
        # a call in the middle of plain code, and what is around it
        mixed = torch.compile(
            lambda t, d: (t * 2 + 1, (d + 1).full_tensor() * t), backend="aot_eager"
        )
        t = torch.randn(4, dtype=torch.float64)
        u, v = mixed(t, distribute_tensor(t, mesh, [S0]))
        torch.testing.assert_close(u, t * 2 + 1)
        torch.testing.assert_close(v, (t + 1) * t)

    on_mesh((2,), fn)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda t, u: grad(lambda t: (t * t).tanh().sum())(t),
    "second argument": lambda t, u: grad(lambda t, u: (t @ u).tanh().sum(), argnums=1)(t, u),
    "softmax": lambda t, u: grad(lambda t: (t.softmax(-1) ** 2).sum())(t),
    "vjp": lambda t, u: vjp(lambda t: t @ u, t)[1](u)[0],
    "jacrev": lambda t, u: jacrev(lambda t: t.sum(0))(t),
    "vmap": lambda t, u: vmap(lambda r, s: (r * s).sum())(t, u),
    "closed over": lambda t, u: grad(lambda t: (t @ u).tanh().sum())(t),
    "inside": lambda t, u: grad(lambda t: (t @ (u @ u)).tanh().sum())(t),
    "vmap closed over": lambda t, u: vmap(lambda r: r @ u)(t),
    "linear": lambda t, u: grad(lambda t: F.linear(t, u, u[0]).tanh().sum())(t),
    "nested": lambda t, u: grad(lambda t: (grad(lambda s: (s @ u).tanh().sum())(t) ** 2).sum())(
        t
    ),
    "per sample": lambda t, u: vmap(grad(lambda p, r: (r @ p).tanh().sum()), (None, 0))(u, t),
    "moved inside": lambda t, u: grad(lambda t: (t @ spread(u)).tanh().sum())(t),
}


def spread(u: Any) -> Any:
    return u.redistribute(placements=[S0]) if isinstance(u, DTensor) else u


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functional_transforms(f: Any) -> None:
    x, w = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        for ps in ((R,), (S0,), (S1,)):
            for _ in range(2):  # a second time, when the programs are known
                d, e = distribute_tensor(x, mesh, ps), distribute_tensor(w, mesh, [S1])
                close(f(d, e), f(x, w))
                (px, dx), (pw, dw) = (
                    both(x, mesh, ps),
                    both(w, mesh, [S1]),
                )  # gradients of gradients
                want, got = f(px, pw), f(dx, dw)
                assert got.requires_grad == want.requires_grad
                if want.requires_grad:
                    want.sin().sum().backward()
                    got.sin().sum().backward()
                    for p, q in ((px, dx), (pw, dw)):
                        close(q.grad, p.grad) if p.grad is not None else None
        close(d + e, x + w)  # nothing is left behind

    on_mesh((2,), fn)
    assert grad(lambda t: (t * t).sum())(x).equal(2 * x)
    assert (
        DTensor.__dict__["__torch_function__"].__func__.__qualname__
        == "DTensor.__torch_function__"
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_over_reverse_of_virtual_ranks() -> None:
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)

    def f(t: Any, u: Any) -> Any:
        return (t @ u).tanh().sum()

    def fn(mesh: Any) -> None:
        e = distribute_tensor(w, mesh)
        with pytest.raises(UnsupportedError, match="level belongs to the whole process"):
            hessian(lambda t: f(t, e))(distribute_tensor(x, mesh, [S0]))

    def alone(mesh: Any) -> None:
        d, e = distribute_tensor(x, mesh, [S0]), distribute_tensor(w, mesh)
        close(hessian(lambda t: f(t, e))(d), hessian(f)(x, w))
        close(jacfwd(lambda t: t @ e)(d), jacfwd(lambda t: t @ w)(x))

    on_mesh((2,), fn)
    on_mesh((1,), alone)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_raises() -> None:
    x = torch.randn(4, dtype=torch.float64)
    d = distribute_tensor(x, init_device_mesh("cpu", (1,)))
    with torch.autograd.forward_ad.dual_level():
        for primal, tangent in ((d, d), (x, d), (d, x)):
            with pytest.raises(UnsupportedError, match="forward-mode"):
                torch.autograd.forward_ad.make_dual(primal, tangent)
        with pytest.raises(UnsupportedError, match="forward-mode"):
            torch.autograd.forward_ad.unpack_dual(d)
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for lost in (
            lambda: d * dual,
            lambda: DTensor.from_local(dual, d.device_mesh, d.placements),
            lambda: distribute_tensor(dual, d.device_mesh, d.placements),
        ):
            with pytest.raises(UnsupportedError, match="forward-mode"):
                lost()
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(torch.tanh, (d,), (d,))
    want = torch.autograd.functional.jvp(torch.tanh, x, x)
    for got, p in zip(torch.autograd.functional.jvp(torch.tanh, d, d), want):
        close(got, p)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_raises() -> None:
    x = torch.randn(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    d = distribute_tensor(x, mesh)
    net = distribute_module(nn.Linear(4, 4), mesh)
    for _ in range(2):  # a call that was seen before, too
        (d * 2, x * d)
        for trace in (
            lambda: torch.jit.trace(lambda t: t * 2, (d,)),
            lambda: torch.jit.trace(lambda t: t * d, (x,)),
            lambda: torch.jit.trace(net, (x,)),
            lambda: torch.jit.trace_module(net, {"forward": (d,)}),
        ):
            with pytest.raises(UnsupportedError, match=r"torch.jit.trace"):
                trace()
    assert torch.jit.trace(lambda t: t * 2, (x,))(x).equal(x * 2)
    torch.jit.script(nn.Linear(4, 4))
