"""``torch._foreach_*`` and ``torch._fused_*`` on lists of mixed layouts: N single calls, in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
from shardwise.comm.transport import current
from shardwise.errors import AliasError, ShardError
from shardwise.program.spec import program_tables
from shardwise.testing.sweep import lay_out

R, S, P = Replicate(), Shard, Partial()
SHAPES = ((4, 6), (5, 3), (3, 7), (1, 5), (3,), (2, 3, 5), ())
PLACED = ((R, R), (S(0), R), (S(0), S(1)), (R, S(0)), (S(0), S(0)), (S(2), S(1)), (R, R))
OTHER = ((S(1), R), (S(0), R), (R, P), (P, P), (S(0), R), (S(2), S(1)), (R, P))
PENDING = ((P, P), (P, R), (S(0), P), (R, P), (P, S(0)), (P, S(1)), (P, R))


def values(seed: int, positive: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in SHAPES]
    return [t.abs() + 0.5 for t in made] if positive else made


def placed(ts: list[Tensor], how: Any = PLACED) -> list[DTensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return [lay_out(t, mesh, ps) for t, ps in zip(ts, how)]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(got: Any, want: Any, tol: float = 1e-10) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert tuple(g.shape) == tuple(w.shape)
        assert g.dtype == w.dtype
        assert torch.allclose(whole(g), w, rtol=tol, atol=tol)


def each(fn: Callable[..., Any], lists: list[list[Tensor]], layouts: list[Any]) -> None:
    """``fn`` on the lists, its results and what it wrote, in every combination of layouts; and its bytes."""
    plain = [[t.clone() for t in ts] for ts in lists]
    want = fn(*plain)

    def on_rank() -> None:
        for how in layouts:
            args = [placed(ts, h) for ts, h in zip(lists, how)]
            before = [[t.placements for t in ts] for ts in args]
            for _ in range(2):  # the second call runs the plan of the first
                args = [placed(ts, h) for ts, h in zip(lists, how)]
                got = fn(*args)
            assert_same(got, want)
            for ts, ws, places in zip(args, plain, before):
                assert_same(ts, ws)
                assert [t.placements for t in ts] == places

    simulate(on_rank, 4)


UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
    "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    ts = [t.abs() % 0.9 + 0.05 for t in values(1)]
    func, written = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    plain = func(ts)

    def on_rank() -> None:
        for how in (PLACED, PENDING):
            assert_same(func(placed(ts, how)), plain)
            xs = placed(ts, how)
            assert written(xs) is xs
            assert_same(xs, plain)
            assert [x.placements for x in xs] == list(how)

    simulate(on_rank, 4)


BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: torch._foreach_add(a, b),
    "add alpha": lambda a, b: torch._foreach_add(a, b, alpha=0.3),
    "add_": lambda a, b: torch._foreach_add_(a, b),
    "add_ alpha": lambda a, b: torch._foreach_add_(a, b, alpha=-0.3),
    "sub": lambda a, b: torch._foreach_sub(a, b, alpha=2),
    "sub_": lambda a, b: torch._foreach_sub_(a, b),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "mul_": lambda a, b: torch._foreach_mul_(a, b),
    "mul_ itself": lambda a, b: torch._foreach_mul_(a, a),
    "div": lambda a, b: torch._foreach_div(a, b),
    "div_": lambda a, b: torch._foreach_div_(a, b),
    "maximum": lambda a, b: torch._foreach_maximum(a, b),
    "maximum_": lambda a, b: torch._foreach_maximum_(a, b),
    "minimum_": lambda a, b: torch._foreach_minimum_(a, b),
    "clamp_min_": lambda a, b: torch._foreach_clamp_min_(a, b),
    "clamp_max": lambda a, b: torch._foreach_clamp_max(a, b),
    "pow": lambda a, b: torch._foreach_pow(torch._foreach_abs(a), b),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.3),
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.7),
    "lerp_ numbers": lambda a, b: torch._foreach_lerp_(a, b, [0.1 * k for k in range(7)]),
    "lerp tensors": lambda a, b: torch._foreach_lerp(a, b, b),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, 0.3),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, a, value=0.3),
    "addcmul_ numbers": lambda a, b: torch._foreach_addcmul_(
        a, b, b, [0.1 * k for k in range(7)]
    ),
    "addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, a, b, -0.3),
    "addcdiv_ numbers": lambda a, b: torch._foreach_addcdiv_(
        a, a, b, [0.1 * k for k in range(7)]
    ),
    "addcdiv_ tensor of numbers": lambda a, b: torch._foreach_addcdiv_(
        a, a, b, torch.arange(7.0, dtype=torch.float64)
    ),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
}


@pytest.mark.parametrize("name", BINARY)
def test_lists(name: str) -> None:
    layouts = [(PLACED, PLACED), (PLACED, OTHER), (PENDING, PENDING)]
    each(BINARY[name], [values(1), values(2, positive=True)], layouts)


NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda a: torch._foreach_add(a, 0.5),
    "add_": lambda a: torch._foreach_add_(a, 2),
    "add_ numbers": lambda a: torch._foreach_add_(a, [0.1 * k for k in range(7)]),
    "sub_ numbers": lambda a: torch._foreach_sub_(a, [0.1 * k for k in range(7)]),
    "mul_": lambda a: torch._foreach_mul_(a, 0.5),
    "div_ numbers": lambda a: torch._foreach_div_(a, [k + 1 for k in range(7)]),
    "pow": lambda a: torch._foreach_pow(a, 2),
    "pow_ numbers": lambda a: torch._foreach_pow_(a, [k % 3 for k in range(7)]),
    "pow of a number": lambda a: torch._foreach_pow(1.5, a),
    "maximum": lambda a: torch._foreach_maximum(a, 0.2),
    "minimum_": lambda a: torch._foreach_minimum_(a, 0.2),
    "clamp_min": lambda a: torch._foreach_clamp_min(a, 0.1),
    "clamp_max_ numbers": lambda a: torch._foreach_clamp_max_(a, [0.1 * k for k in range(7)]),
    "clone": lambda a: torch._foreach_clone(a),
    "zero_": lambda a: torch._foreach_zero_(a),
    "max": lambda a: torch._foreach_max(a),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_one_list(name: str) -> None:
    each(NUMBERS[name], [values(1)], [(PLACED,), (OTHER,), (PENDING,)])


SCALARS: dict[str, Callable[..., Any]] = {
    "add": lambda a, s: torch._foreach_add(a, s, alpha=0.5),
    "add_": lambda a, s: torch._foreach_add_(a, s),
    "mul": lambda a, s: torch._foreach_mul(a, s),
    "mul_": lambda a, s: torch._foreach_mul_(a, s),
    "div_": lambda a, s: torch._foreach_div_(a, s),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("kind", ["plain", "replicated", "pending"])
def test_scalar_tensor(name: str, kind: str) -> None:
    ts, s = values(1), torch.tensor(0.7, dtype=torch.float64)
    plain = [t.clone() for t in ts]
    want = SCALARS[name](plain, s)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for how in (PLACED, OTHER):
            scalar = (
                s
                if kind == "plain"
                else lay_out(s, mesh, (R, R) if kind == "replicated" else (R, P))
            )
            xs = placed(ts, how)
            assert_same(SCALARS[name](xs, scalar), want)
            assert_same(xs, plain)

    simulate(on_rank, 4)


def test_scalar_of_the_mesh_and_tensors_of_a_slice() -> None:
    ts, s = values(1)[:3], torch.tensor(0.7, dtype=torch.float64)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        scalar = distribute_tensor(s, mesh)
        xs = [distribute_tensor(t, m, [S(0)]) for t, m in zip(ts, (mesh["b"], mesh, mesh["b"]))]
        meshes = [x.device_mesh for x in xs]
        torch._foreach_mul_(xs, scalar)
        assert_same(xs, [t * s for t in ts])
        assert [x.device_mesh for x in xs] == meshes
        assert_same(torch._foreach_mul(xs, scalar), [t * s * s for t in ts])
        torch._foreach_add_(
            xs, [x.redistribute(mesh, [R, R]) if x.device_mesh is mesh else x for x in xs]
        )
        assert_same(xs, [t * s * 2 for t in ts])

    simulate(on_rank, 4)


def test_plain_tensors_in_the_lists() -> None:
    ts, us = values(1), values(2)
    want = torch._foreach_add(ts, us)

    def on_rank() -> None:
        xs = [x if k % 2 else t.clone() for k, (t, x) in enumerate(zip(ts, placed(ts)))]
        got = torch._foreach_add(xs, [u.clone() for u in us])
        assert_same(got, want)
        assert [isinstance(g, DTensor) for g in got] == [isinstance(x, DTensor) for x in xs]
        torch._foreach_add_(xs, us)
        assert_same(xs, want)

    simulate(on_rank, 4)


def test_different_plain_tensors_raise_on_all_ranks() -> None:
    def on_rank(rank: int) -> str:
        (x,) = placed(values(1)[:1])
        with pytest.raises(ShardError, match="differ between") as error:
            torch._foreach_add_([x], [torch.full((4, 6), float(rank), dtype=torch.float64)])
        return str(error.value)

    simulate(on_rank, 4)


def test_result_dtypes() -> None:
    a, b = torch.ones(4, 3, dtype=torch.int64), torch.ones(5, dtype=torch.float32)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        xs = [distribute_tensor(a, mesh, [S(0)]), distribute_tensor(b, mesh, [S(0)])]
        for _ in range(2):
            got = torch._foreach_add(xs, 0.5)
            assert [g.dtype for g in got] == [torch.float32, torch.float32]
            assert_same(got, torch._foreach_add([a, b], 0.5))
            assert [g.dtype for g in torch._foreach_add(xs, 1)] == [torch.int64, torch.float32]

    simulate(on_rank, 4)


def test_strides_are_kept() -> None:
    t = torch.randn(6, 4, dtype=torch.float64).t()

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(t, mesh, [S(0), S(1)])
        for _ in range(2):
            (y,) = torch._foreach_mul([x], 2.0)
            assert y.stride() == t.stride()
            assert_same([y], [t * 2])
        torch._foreach_lerp_([x], [y], 0.5)
        assert_same([x], [t * 1.5])

    simulate(on_rank, 4)


def test_gradients() -> None:
    ts, us = values(1), values(2, positive=True)

    def run(xs: Any, ys: Any) -> Any:
        out = torch._foreach_div(torch._foreach_mul(xs, ys), torch._foreach_add(ys, 1.0))
        return sum(((o * o).sum() for o in out), start=0.0)

    plain = [[t.clone().requires_grad_() for t in ts], [u.clone().requires_grad_() for u in us]]
    run(*plain).backward()

    def on_rank() -> None:
        for how in ((PLACED, PLACED), (PLACED, OTHER), (PENDING, PLACED)):
            args = [placed(ts, how[0]), placed(us, how[1])]
            for xs in args:
                for x in xs:
                    x.requires_grad_()
            run(*args).backward()
            for xs, ws in zip(args, plain):
                assert_same([x.grad for x in xs], [w.grad for w in ws])

    simulate(on_rank, 4)


def test_a_view_that_is_a_copy_loses_no_write() -> None:
    t = torch.arange(24.0).view(4, 6)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        base = distribute_tensor(t, mesh, [S(0), R])
        view = base[3]
        try:
            torch._foreach_mul_([view], 2.0)
        except AliasError:
            return
        assert torch.equal(base.full_tensor()[3], t[3] * 2)
        assert torch.equal(view.full_tensor(), t[3] * 2)
        assert float(torch._foreach_norm([view])[0]) == pytest.approx(float((t[3] * 2).norm()))
        base.mul_(2.0)
        for call in (
            torch._foreach_norm,
            torch._foreach_abs,
            torch._foreach_neg,
        ):
            assert torch.equal(call([view])[0].full_tensor(), call([t[3] * 4])[0])
        torch._foreach_add_([view], 1.0)
        assert torch.equal(base.full_tensor()[3], t[3] * 4 + 1)
        with pytest.raises(AliasError):
            torch._amp_foreach_non_finite_check_and_unscale_(
                [base[3]], torch.zeros(()), torch.ones(())
            )

    simulate(on_rank, 4)


def test_nothing_moves_where_layouts_agree_and_little_where_sums_are_pending() -> None:
    def on_rank() -> None:
        xs, ys, zs = placed(values(1)), placed(values(2)), placed(values(2), PENDING)
        with CommLog() as log:
            torch._foreach_add_(xs, ys, alpha=0.1)
            torch._foreach_addcdiv_(xs, ys, ys, [0.1] * 7)
            torch._foreach_sqrt(xs)
            torch._foreach_mul_(zs, 2.0)
            torch._foreach_mul_(zs, xs[-1])
        assert log.events == []
        params = [lay_out(t, xs[0].device_mesh, (R, R)) for t in values(3)]
        grads = [lay_out(t, xs[0].device_mesh, (P, P)) for t in values(3)]
        with CommLog() as log:
            torch._foreach_add_(params, grads, alpha=-1.0)
        assert log.count("all_reduce") == 1
        assert_same(params, [t * 0 for t in values(3)])

    simulate(on_rank, 4)


def test_numbers_do_not_make_plans() -> None:
    def on_rank() -> None:
        xs, ys = placed(values(1)), placed(values(2))
        counts = []
        for k in range(4):
            torch._foreach_add_(xs, ys, alpha=0.1 * k + 0.1)
            torch._foreach_mul_(xs, 0.5 + k)
            torch._foreach_addcdiv_(xs, ys, ys, [float(k)] * 7)
            torch._foreach_lerp_(xs, ys, 0.1 * k)
            torch._foreach_addcmul_(xs, ys, ys, value=float(k))
            counts.append(sum(map(len, program_tables(current()))))
        assert len(set(counts)) == 1

    simulate(on_rank, 4)


@pytest.mark.parametrize("ord", [2, 1.0, 0, 3, 0.5, float("inf"), -float("inf"), -1.0])
def test_norm(ord: float) -> None:
    ts = values(1)
    want = torch._foreach_norm(ts, ord)

    def on_rank() -> None:
        for how in (PLACED, OTHER, PENDING):
            for _ in range(2):
                got = torch._foreach_norm(placed(ts, how), ord)
                assert all(g.layout.is_replicated for g in got)
                assert_same(got, want)
                assert all(torch.allclose(g.to_local(), w) for g, w in zip(got, want))

    simulate(on_rank, 4)


def test_norm_dtypes() -> None:
    ts = [t.half() * 100 for t in values(1)]  # squares overflow in half precision

    def on_rank() -> None:
        mixed = placed([t if k % 2 else t.double() for k, t in enumerate(ts)])
        assert_same(
            torch._foreach_norm(mixed, 2),
            torch._foreach_norm([whole(m) for m in mixed], 2),
            1e-3,
        )
        want = torch._foreach_norm(ts, 2.0, dtype=torch.float64)
        assert_same(torch._foreach_norm(placed(ts), 2.0, dtype=torch.float64), want, 1e-6)
        assert_same(
            torch._foreach_norm(placed(ts), 1, torch.float32),
            torch._foreach_norm(ts, 1, torch.float32),
            1e-4,
        )

    simulate(on_rank, 4)


def test_norm_takes_one_collective_and_has_gradients() -> None:
    ts = values(1)
    plain = [t.clone().requires_grad_() for t in ts]
    sum(torch._foreach_norm(plain, 2), start=0.0).backward()

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        xs = [distribute_tensor(torch.ones(4, 4), mesh, [S(0), S(1)]) for _ in range(20)]
        xs += [distribute_tensor(torch.ones(4, 4), mesh, [S(0), R]) for _ in range(20)]
        with CommLog() as log:
            torch._foreach_norm(xs, 2)
        assert log.count("all_reduce") == len(log.events) == 1
        ys = placed(ts)
        for y in ys:
            y.requires_grad_()
        sum(torch._foreach_norm(ys, 2), start=0.0).backward()
        assert_same([y.grad for y in ys], [p.grad for p in plain])

    simulate(on_rank, 4)


def test_norm_of_nothing_and_powsum() -> None:
    ts = values(1)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        nothing = distribute_tensor(torch.zeros(0, 3), mesh, [S(0)])
        assert [float(n) for n in torch._foreach_norm([nothing, nothing], 2)] == [0.0, 0.0]
        with pytest.raises(RuntimeError, match="empty"):
            torch._foreach_norm([nothing], float("inf"))
        assert_same(torch._foreach_powsum(placed(ts), 3), torch._foreach_powsum(ts, 3))

    simulate(on_rank, 4)


def test_foreach_mm() -> None:
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        xs = [lay_out(a, mesh, (S(0), R)), lay_out(a, mesh, (R, S(1)))]
        ys = [lay_out(b, mesh, (R, S(1))), lay_out(b, mesh, (R, S(0)))]
        for _ in range(2):
            assert_same(torch._foreach_mm(xs, ys), [a @ b, a @ b])

    simulate(on_rank, 4)


def test_lists_of_different_lengths() -> None:
    def on_rank() -> None:
        xs = placed(values(1))
        with pytest.raises(ShardError, match="same length"):
            torch._foreach_add(xs, xs[:3])

    simulate(on_rank, 4)


def test_the_moves_of_a_list_share_a_collective():
    torch.manual_seed(0)
    xs = [torch.randn(4, n).double() for n in (4, 6, 8)]

    def on_rank():
        mesh = init_device_mesh("cpu", (2,))
        rows = [distribute_tensor(x, mesh, [Shard(0)]) for x in xs]
        columns = [distribute_tensor(x, mesh, [Shard(1)]) for x in xs]
        with CommLog() as log:
            sums = torch._foreach_add(rows, columns)
        return [s.full_tensor() for s in sums], [e.kind for e in log.events]

    for sums, kinds in simulate(on_rank, 2):
        assert all(torch.equal(s, x + x) for s, x in zip(sums, xs))
        assert kinds == ["all_gather"]  # one for all three
