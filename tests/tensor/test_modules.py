"""``torch.nn.Module`` with DTensor parameters, against plain modules in float64."""

from collections.abc import Callable
import copy
import math
from typing import Any
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, stateless

from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    no_sync,
    simulate,
)
from shardwise.errors import LayoutError, UnsupportedError

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()

PLACED = [((2,), (R,)), ((2,), (S0,)), ((4,), (S1,)), ((2, 2), (S0, R)), ((2, 2), (S0, S1))]
placed = pytest.mark.parametrize(("shape", "ps"), PLACED, ids=str)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5, dtype=dtype)
        self.b = nn.Linear(5, 3, dtype=dtype)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0], dtype=dtype))

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).tanh()) * self.scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=torch.float64)
        self.b = nn.Linear(4, 4, dtype=torch.float64)
        self.b.weight = self.a.weight

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).tanh())


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    """Run ``fn(mesh)`` on the virtual ranks of a mesh."""
    return simulate(lambda: fn(init_device_mesh("cpu", shape)), math.prod(shape))


def close(got: Any, want: Tensor, tol: float = 1e-9) -> None:
    """The whole value of ``got`` is ``want``."""
    assert isinstance(got, DTensor)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=tol, atol=tol)


def fits(p: Tensor, ps: Any) -> list[Any]:
    """The placements, with those of dims that a tensor lacks left out."""
    return [R if q.is_shard() and q.dim >= p.ndim else q for q in ps]


def spread(net: nn.Module, mesh: Any, ps: Any) -> nn.Module:
    """Distribute parameters like this, and replicate the buffers."""

    def cut(name: str, sub: nn.Module, mesh: Any) -> None:
        for key, p in list(sub.named_parameters(recurse=False)):
            sub.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, fits(p, ps))))

    return distribute_module(net, mesh, cut)


def both(
    mesh: Any, ps: Any, make: Callable[[], nn.Module] = Net
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    one = make()
    many = make()
    many.load_state_dict(one.state_dict())
    return one, spread(many, mesh, ps)


def same(many: nn.Module, one: nn.Module, tol: float = 1e-9) -> None:
    """Equal parameters, gradients and buffers."""
    for (name, p), q in zip(many.named_parameters(), one.parameters()):
        assert isinstance(p, nn.Parameter), name
        close(p, q, tol)
        if q.grad is None:
            assert p.grad is None
        else:
            close(p.grad, q.grad, tol)
            assert p.grad.placements == p.placements
    for p, q in zip(many.buffers(), one.buffers()):
        close(p, q, tol)


def train(net: nn.Module, x: Any, opt: Any = None) -> Any:
    y = net(x)
    (y * y).sum().backward()
    if opt is not None:
        opt.step()
        opt.zero_grad()
    return y


def inputs(mesh: Any, dtype: torch.dtype = torch.float64, n: int = 3) -> tuple[Tensor, DTensor]:
    x = torch.randn(6, n, dtype=dtype)
    return x, distribute_tensor(x, mesh, [S0])


# -- parameters --------------------------------------------------------------------------------------


@placed
def test_parameter(shape: Any, ps: Any) -> None:
    w = torch.randn(5, 3, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        d = distribute_tensor(w, mesh, ps)
        p = nn.Parameter(d)
        assert isinstance(p, nn.Parameter)
        assert isinstance(p, DTensor)
        assert p.requires_grad
        assert p.is_leaf
        assert not nn.Parameter(d, requires_grad=False).requires_grad
        assert "Parameter" in repr(p) or "DTensor" in repr(p)
        assert nn.ParameterList([p])[0] is p
        (p * 2).sum().backward()
        close(p.grad, torch.full_like(w, 2))
        assert not isinstance(p * 2, nn.Parameter)
        buffer = nn.Buffer(d)
        assert isinstance(buffer, nn.Buffer)

    on_mesh(shape, fn)


@placed
def test_distribute_module_keeps_parameters(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        one = copy.deepcopy(one)
        many = Net()
        many.load_state_dict(one.state_dict())
        before = dict(many.named_parameters())
        early = torch.optim.AdamW(many.parameters(), lr=0.1)
        assert spread(many, mesh, ps) is many
        for name, p in many.named_parameters():
            assert p is before[name]
            assert isinstance(p, DTensor)
        assert isinstance(many.scale, DTensor)
        x, dx = inputs(mesh)
        opt = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(3):
            close(train(many, dx, early), train(one, x, opt), 1e-7)
        same(many, one, 1e-7)
        late = torch.optim.SGD(many.parameters(), lr=0.1)
        opt = torch.optim.SGD(one.parameters(), lr=0.1)
        close(train(many, dx, late), train(one, x, opt), 1e-7)
        same(many, one, 1e-7)

    on_mesh(shape, fn)


WITH_MODULE = (
    lambda m, inputs, mesh: (distribute_tensor(inputs[0], mesh, [S0]),),
    lambda m, out, mesh: out.full_tensor(),
)
WITHOUT = (  # as programs for older versions of torch have it
    lambda inputs, mesh: (distribute_tensor(inputs[0], mesh, [S0]),),
    lambda out, mesh: out.full_tensor(),
)


@pytest.mark.parametrize("functions", [WITH_MODULE, WITHOUT], ids=["module", "older"])
def test_distribute_module_with_functions(functions: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = Net(), Net()
        many.load_state_dict(one.state_dict())
        x = torch.randn(6, 3, dtype=torch.float64)
        distribute_module(
            many,
            mesh,
            input_fn=functions[0],
            output_fn=functions[1],
        )
        y = many(x)
        assert type(y) is Tensor
        torch.testing.assert_close(y, one(x))
        y.sum().backward()
        one(x).sum().backward()
        same(many, one)

    on_mesh((2,), fn)


@placed
def test_tied_weights(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps, Tied)
        assert many.a.weight is many.b.weight
        assert len(list(many.parameters())) == 3
        x, dx = inputs(mesh, n=4)
        train(one, x)
        train(many, dx)
        same(many, one)
        twin = copy.deepcopy(many)
        assert twin.a.weight is twin.b.weight
        assert twin.a.weight is not many.a.weight
        same(twin, copy.deepcopy(one))
        many.float()
        one.float()
        assert many.a.weight is many.b.weight
        same(many, one, 1e-5)

    on_mesh(shape, fn)


# -- conversion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [False, True], ids=["set", "swap"])
@placed
def test_dtype_conversion(shape: Any, ps: Any, swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:

        def fn(mesh: Any) -> None:
            one, many = both(mesh, ps)
            before = list(many.parameters())
            x, dx = inputs(mesh)
            train(one, x)
            train(many, dx)
            same(many, one)
            for convert in ("bfloat16", "half", "float", "double"):
                getattr(one, convert)()
                getattr(many, convert)()
                assert all(p is q for p, q in zip(many.parameters(), before))
                same(many, one, 1e-2)
                # the C++ side of the wrapper has followed
                assert torch.empty_like(many.a.weight).dtype == one.a.weight.dtype
                assert torch.result_type(many.a.weight, 1) == one.a.weight.dtype
            one.to(torch.float64)
            many.to(torch.float64)
            one.zero_grad()
            many.zero_grad()
            train(one, x)
            train(many, dx)
            same(many, one, 1e-2)
            for p, q in zip(many.parameters(), one.parameters()):
                p.data = p.data.redistribute(mesh, [R] * len(shape))  # keeps its layout
                assert p.placements == tuple(distribute_tensor(q, mesh, fits(q, ps)).placements)

        on_mesh(shape, fn)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("ps", [(R,), (S0,)], ids=str)
def test_hooks_survive_conversion(ps: Any) -> None:
    def fn(mesh: Any) -> None:
        _, many = both(mesh, ps)
        seen: list[Any] = []
        for p in many.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
        many.float()
        train(many, inputs(mesh, torch.float32)[1])
        assert seen == [torch.float32] * 4

    on_mesh((2,), fn)


@placed
def test_to_empty_and_meta(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        state = {k: v.clone() for k, v in many.state_dict().items()}
        layouts = [p.placements for p in many.parameters()]
        many.to("meta")
        assert all(p.is_meta for p in many.parameters())
        many.to_empty(device="cpu")
        assert [p.placements for p in many.parameters()] == layouts
        many.load_state_dict(state)
        same(many, one)
        with torch.device("meta"):
            many = spread(Net(), mesh, ps)
        assert many.a.weight.to_local().is_meta
        many.to_empty(device="cpu")
        many.load_state_dict(state)
        same(many, one)
        x, dx = inputs(mesh)
        train(one, x)
        train(many, dx)
        same(many, one)

    on_mesh(shape, fn)


@placed
def test_data(shape: Any, ps: Any) -> None:
    w = torch.randn(5, 3, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        p = nn.Parameter(distribute_tensor(w, mesh, ps))
        (p * p).sum().backward()
        other = torch.randn(5, 3, dtype=torch.float64)
        p.data = distribute_tensor(other, mesh, [S1] * len(shape))
        assert p.placements == tuple(ps)
        close(p, other)
        close(p.grad, 2 * w)
        p.data.mul_(2)  # shares memory
        close(p, other * 2)
        p.data = other  # a plain tensor counts as replicated
        close(p, other)
        p.grad = None
        (p * p).sum().backward()
        close(p.grad, 2 * other)
        p.data = p.data.float()
        assert p.dtype == torch.float32
        assert (p * 2).dtype == torch.float32
        p.grad = None
        (p * p).sum().backward()
        close(p.grad, 2 * other.float(), 1e-6)
        p.data = distribute_tensor(torch.ones(2, 2), mesh)
        assert p.shape == (2, 2)
        assert p.t().shape == (2, 2)
        with pytest.raises(LayoutError):
            p.data = 3
        q, r = distribute_tensor(w, mesh, ps), distribute_tensor(other[:2], mesh)
        torch.utils.swap_tensors(q, r)
        close(q, other[:2])
        close(r, w)

    on_mesh(shape, fn)


def test_grad_data_is_kept() -> None:
    w = torch.randn(5, 3, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        for ps in ((R,), (S0,)):
            p = nn.Parameter(distribute_tensor(w, mesh, ps))
            (p * p).sum().backward()
            p.grad.data = p.grad.data * 2
            close(p.grad, 4 * w)
            (p * p).sum().backward()
            close(p.grad, 6 * w)
            with no_sync():
                (p * p).sum().backward()
                p.grad.zero_()  # a write into a pending sum
                (p * p).sum().backward()
            (p * p).sum().backward()
            close(p.grad, 4 * w)

    on_mesh((2,), fn)


@placed
def test_data_of_a_plain_tensor_is_no_dtensor(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        lin = nn.Linear(4, 4)
        d = distribute_tensor(lin.weight.detach(), mesh)
        for x in (lin.weight, torch.ones(4, 4)):
            with pytest.raises(LayoutError, match="data of a plain tensor"):
                x.data = d  # it crashed at the next read
        lin.weight.data = torch.zeros(4, 4)
        torch.testing.assert_close(lin(torch.ones(1, 4))[0], lin.bias)
        lin._apply(lambda t: distribute_tensor(t, mesh))
        assert isinstance(lin.weight, DTensor)

    on_mesh(shape, fn)


def test_the_class_is_not_called() -> None:
    for args in ((), (torch.ones(2),), (torch.ones(2), None, [R])):
        with pytest.raises(UnsupportedError, match="from_local"):
            DTensor(*args)


# -- state dicts --------------------------------------------------------------------------------------


@placed
def test_state_dict(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        state = many.state_dict()
        assert list(state) == list(one.state_dict())
        for value in state.values():
            assert isinstance(value, DTensor)
            assert not value.requires_grad
        for source in ((R,), (S0,), ps):
            _, from_ = both(mesh, tuple(source) + (R,) * (len(shape) - len(source)))
            with torch.no_grad():
                for p, q in zip(from_.parameters(), one.parameters()):
                    q.add_(1)
                    p.copy_(q)
            before = [(p, p.placements) for p in many.parameters()]
            many.load_state_dict(from_.state_dict())  # from another layout
            assert all(
                p is q and p.placements == ps for p, (q, ps) in zip(many.parameters(), before)
            )
            same(many, one)
        with torch.no_grad():
            for q in one.parameters():
                q.mul_(2)
        many.load_state_dict(one.state_dict())  # from plain values
        same(many, one)
        with pytest.raises(RuntimeError, match="size mismatch"):
            many.a.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(5)})
        with pytest.raises(RuntimeError, match="Missing key"):
            many.load_state_dict({})

    on_mesh(shape, fn)


def test_plain_module_loads_distributed_values() -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, (S0,))
        plain = Net()
        plain.load_state_dict(many.state_dict())
        for p, q in zip(plain.parameters(), one.parameters()):
            assert type(p.data) is Tensor
            torch.testing.assert_close(p, q)

    on_mesh((2,), fn)


@placed
def test_load_with_assign(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        want = [p.placements for p in many.parameters()]
        with torch.no_grad():
            for q in one.parameters():
                q.mul_(2)
        many.load_state_dict(one.state_dict(), assign=True)  # plain values: the layout stays
        assert [p.placements for p in many.parameters()] == want
        same(many, one)
        with torch.device("meta"):
            empty = spread(Net(), mesh, ps)
        empty.load_state_dict(one.state_dict(), assign=True)
        same(empty, one)
        _, other = both(mesh, [R] * len(shape))
        other.load_state_dict(one.state_dict())
        many.load_state_dict(other.state_dict(), assign=True)  # DTensors: as they are
        assert all(p.layout.is_replicated for p in many.parameters())
        x, dx = inputs(mesh)
        train(one, x)
        for net in (many, empty):
            train(net, dx)
            same(net, one)

    on_mesh(shape, fn)


def test_load_with_swap() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:

        def fn(mesh: Any) -> None:
            one, many = both(mesh, (S0,))
            with torch.no_grad():
                for q in one.parameters():
                    q.mul_(2)
            before = [(p, p.placements) for p in many.parameters()]
            for assign in (False, True):
                many.load_state_dict(one.state_dict(), assign=assign)
                assert all(
                    p is q and p.placements == ps
                    for p, (q, ps) in zip(many.parameters(), before)
                )
                same(many, one)

        on_mesh((2,), fn)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# -- copies and calls -----------------------------------------------------------------------------------


@placed
def test_deepcopy(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        x, dx = inputs(mesh)
        train(one, x)
        train(many, dx)
        twin, want = copy.deepcopy(many), copy.deepcopy(one)
        same(twin, want)
        with torch.no_grad():
            many.a.weight.zero_()
        same(twin, want)
        train(twin, dx)
        train(want, x)
        same(twin, want)
        y = dx @ dx.T
        assert copy.deepcopy(y) is not y
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(many.a.weight * 2)

    on_mesh(shape, fn)


@placed
def test_functional_call(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        x, dx = inputs(mesh)
        state = {k: v * 2 for k, v in one.named_parameters()}
        given = {k: v * 2 for k, v in many.named_parameters()}
        a = torch.func.functional_call(one, state, (x,))
        b = torch.func.functional_call(many, given, (dx,))
        close(b, a)
        a.sum().backward()
        b.sum().backward()
        same(many, one)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            close(stateless.functional_call(many, given, (dx,)), a)

    on_mesh(shape, fn)


# -- torch.nn.utils -------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w: Any) -> Any:
        return w.triu() + w.triu(1).transpose(-1, -2)


@placed
def test_parametrize(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps, lambda: nn.Linear(4, 4, dtype=torch.float64))
        x, dx = inputs(mesh, n=4)
        for net in (one, many):
            parametrize.register_parametrization(net, "weight", Symmetric())
        close(train(many, dx), train(one, x))
        same(many, one)
        for net in (one, many):
            parametrize.remove_parametrizations(net, "weight")
        close(many.weight, one.weight)

    on_mesh(shape, fn)


@pytest.mark.parametrize("kind", ["old", "new"])
@placed
def test_weight_norm(shape: Any, ps: Any, kind: str) -> None:
    def wrap(net: nn.Module) -> nn.Module:
        if kind == "new":
            return parametrizations.weight_norm(net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.utils.weight_norm(net)

    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps, lambda: nn.Linear(4, 5, dtype=torch.float64))
        x, dx = inputs(mesh, n=4)
        one, many = wrap(one), wrap(many)
        for _ in range(2):
            close(train(many, dx), train(one, x))
        same(many, one)
        if kind == "old":
            for net in (one, many):
                nn.utils.remove_weight_norm(net)
            close(many.weight, one.weight)

    on_mesh(shape, fn)


@pytest.mark.parametrize("kind", ["old", "new"])
@pytest.mark.parametrize(
    ("shape", "ps"), [((2,), (R,)), ((2,), (S0,)), ((2, 2), (S0, S1))], ids=str
)
def test_spectral_norm(shape: Any, ps: Any, kind: str) -> None:
    wrap = nn.utils.spectral_norm if kind == "old" else parametrizations.spectral_norm

    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps, lambda: nn.Linear(4, 5, dtype=torch.float64))
        x, dx = inputs(mesh, n=4)
        torch.manual_seed(5)
        one = wrap(one)
        torch.manual_seed(5)
        many = wrap(many)
        for p, q in zip(many.buffers(), one.buffers()):  # the start vectors are drawn
            with torch.no_grad():
                p.copy_(q)
        for _ in range(2):
            close(train(many, dx), train(one, x))
        for p, q in zip(many.parameters(), one.parameters()):
            close(p, q)
            close(p.grad, q.grad)
        many.eval()
        one.eval()
        close(many(dx), one(x))

    on_mesh(shape, fn)


@placed
def test_prune(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps, lambda: nn.Linear(4, 5, dtype=torch.float64))
        x, dx = inputs(mesh, n=4)
        for net in (one, many):
            prune.l1_unstructured(net, "weight", amount=7)
        close(train(many, dx), train(one, x))
        for p, q in zip(many.parameters(), one.parameters()):
            close(p.grad, q.grad)
        for net in (one, many):
            prune.remove(net, "weight")
        close(many.weight, one.weight)

    on_mesh(shape, fn)


@placed
def test_clipping_and_vectors(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, ps)
        x, dx = inputs(mesh)
        for foreach in (None, False, True):
            train(one, x)
            train(many, dx)
            want = nn.utils.clip_grad_norm_(one.parameters(), 0.5, foreach=foreach)
            got = nn.utils.clip_grad_norm_(many.parameters(), 0.5, foreach=foreach)
            close(got, want)
            same(many, one)
        for norm in (1.0, math.inf):
            want = nn.utils.get_total_norm([p.grad for p in one.parameters()], norm)
            close(nn.utils.get_total_norm([p.grad for p in many.parameters()], norm), want)
        nn.utils.clip_grad_value_(one.parameters(), 0.01)
        nn.utils.clip_grad_value_(many.parameters(), 0.01)
        same(many, one)
        v = nn.utils.parameters_to_vector(many.parameters())
        close(v, nn.utils.parameters_to_vector(one.parameters()))
        layouts = [p.placements for p in many.parameters()]
        nn.utils.vector_to_parameters(v * 2, many.parameters())
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(one.parameters()) * 2, one.parameters()
        )
        assert [p.placements for p in many.parameters()] == layouts
        same(many, one)

    on_mesh(shape, fn)


def test_buffers_and_printing() -> None:
    def fn(mesh: Any) -> None:
        one, many = both(mesh, (S0,))
        many.register_buffer(
            "more", distribute_tensor(torch.arange(4.0), mesh, [S0]), persistent=False
        )
        assert "more" not in many.state_dict()
        assert dict(many.named_buffers())["more"].placements == (S0,)
        many.register_buffer("nothing", None)
        assert "Linear" in repr(many)
        assert "DTensor" in str(many.a.weight)
        assert "Parameter" in repr(nn.ParameterList(many.parameters()))
        many.requires_grad_(False)
        assert not any(p.requires_grad for p in many.parameters())
        many.requires_grad_()
        x, dx = inputs(mesh)
        train(one, x)
        train(many, dx)
        for p, q in zip(many.parameters(), one.parameters()):
            close(p.grad, q.grad)
        assert sum(p.numel() for p in many.parameters()) == sum(
            p.numel() for p in one.parameters()
        )
        assert many.apply(lambda m: None) is many
        with torch.no_grad():
            many.apply(lambda m: m.weight.fill_(1.0) if isinstance(m, nn.Linear) else None)
        close(many.a.weight, torch.ones(5, 3, dtype=torch.float64))

    on_mesh((2,), fn)
