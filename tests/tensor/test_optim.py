"""Every optimizer on parameters of mixed layouts takes the steps that plain torch takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    CommLog,
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
from shardwise.comm.transport import current
from shardwise.program.spec import program_tables

R, S = Replicate(), Shard
# Shape, placements on the mesh (2, 2) or on its slice "b": even, uneven, size one, empty pieces, 3-D, scalar.
PARAMETERS: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    ((4, 6), (R, R)),
    ((5, 3), (S(0), R)),
    ((3, 7), (S(0), S(1))),
    ((7, 2), (S(0), S(0))),
    ((1, 5), (R, S(0))),
    ((3,), (S(0), S(0))),
    ((2, 3, 5), (S(2), S(1))),
    ((), (R, R)),
    ((6, 3), (S(0),)),
    ((4,), (R,)),
)
MATRICES = tuple(p for p in PARAMETERS if len(p[0]) == 2)
optim = torch.optim
LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
CASES: list[tuple[str, Any, dict[str, Any], tuple[dict[str, Any], ...]]] = [
    ("sgd", optim.SGD, {"lr": 0.1}, (LOOP, FOREACH, FUSED)),
    (
        "sgd nesterov",
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        (LOOP, FOREACH, FUSED),
    ),
    (
        "adam",
        optim.Adam,
        {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
        (LOOP, FOREACH, FUSED),
    ),
    ("adam maximize", optim.Adam, {"lr": 0.1, "maximize": True}, (LOOP, FOREACH, FUSED)),
    ("adamw", optim.AdamW, {"lr": 0.1}, (LOOP, FOREACH, FUSED)),
    ("adagrad", optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, (LOOP, FOREACH, FUSED)),
    ("adadelta", optim.Adadelta, {"lr": 0.5}, (LOOP, FOREACH)),
    ("adamax", optim.Adamax, {"lr": 0.1}, (LOOP, FOREACH)),
    (
        "nadam",
        optim.NAdam,
        {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
        (LOOP, FOREACH),
    ),
    ("radam", optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}, (LOOP, FOREACH)),
    ("rmsprop", optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}, (LOOP, FOREACH)),
    ("rprop", optim.Rprop, {"lr": 0.1}, (LOOP, FOREACH)),
    ("asgd", optim.ASGD, {"lr": 0.1, "t0": 2}, (LOOP, FOREACH)),
    ("adafactor", optim.Adafactor, {"lr": 0.1}, (LOOP, FOREACH)),
]
FORMS = [
    pytest.param(
        make,
        options,
        form,
        id=f"{name}, {next(iter(form))}" if next(iter(form.values())) else f"{name}, loop",
    )
    for name, make, options, forms in CASES
    for form in forms
]


def values(parameters: Any = PARAMETERS) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape, _ in parameters]


def targets(parameters: Any = PARAMETERS) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape, _ in parameters]


def placed(ts: list[Tensor], parameters: Any = PARAMETERS) -> list[DTensor]:
    """The tensors on the mesh, or on its slice, as the table says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return [
        distribute_tensor(t, mesh if len(ps) == 2 else mesh["b"], ps, src_data_rank=None)
        for t, (_, ps) in zip(ts, parameters)
    ]


def set_gradients(params: list[Any], ts: list[Any], step: int) -> None:
    """Those of a loss with another curvature at each step."""
    with torch.no_grad():
        for k, (p, t) in enumerate(zip(params, ts)):
            p.grad = (p - t) * (1.0 + 0.3 * step + 0.1 * k)


def train(
    params: list[Any], ts: list[Any], make: Any, options: dict[str, Any], steps: int
) -> Any:
    opt = make(params, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for step in range(steps):
        set_gradients(params, ts, step)
        opt.step()
        schedule.step()
    return opt


def leaves(ts: list[Any]) -> list[Any]:
    return [nn.Parameter(t.clone()) for t in ts]


def assert_same(got: list[Any], want: list[Tensor], tol: float = 1e-9) -> None:
    for g, w in zip(got, want):
        assert torch.allclose(g.detach().full_tensor(), w.detach(), rtol=tol, atol=tol)


@pytest.mark.parametrize(("make", "options", "form"), FORMS)
def test_steps_are_those_of_one_device(
    make: Any, options: dict[str, Any], form: dict[str, Any]
) -> None:
    plain = leaves(values())
    train(plain, targets(), make, {**options, **form}, 4)

    def on_rank() -> None:
        params = leaves(placed(values()))
        layouts = [p.layout for p in params]
        opt = train(params, placed(targets()), make, {**options, **form}, 4)
        assert_same(params, plain)
        assert [p.layout for p in params] == layouts
        for p in params:
            for name, s in opt.state[p].items():
                if isinstance(s, DTensor) and s.shape == p.shape:
                    assert s.layout is p.layout, f"{name} is not placed as its parameter"

    simulate(on_rank, 4)


def test_muon() -> None:
    plain = leaves(values(MATRICES))
    train(plain, targets(MATRICES), optim.Muon, {"lr": 0.01}, 3)

    def on_rank() -> None:
        params = leaves(placed(values(MATRICES), MATRICES))
        train(params, placed(targets(MATRICES), MATRICES), optim.Muon, {"lr": 0.01}, 3)
        assert_same(params, plain, 1e-2)  # its iteration runs in bfloat16

    simulate(on_rank, 4)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None) -> None:
    parameters = PARAMETERS[:5]

    def run(params: list[Any], ts: list[Any]) -> float:
        opt = torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn=search)

        def closure() -> Any:
            opt.zero_grad()
            loss = sum(
                (((p - t) ** 2).sum() + ((p - t) ** 4).sum() for p, t in zip(params, ts)),
                start=0.0,
            )
            loss.backward()
            return loss

        return float([opt.step(closure).detach() for _ in range(2)][-1])

    plain = leaves(values(parameters))
    want = run(plain, targets(parameters))

    def on_rank() -> None:
        params = leaves(placed(values(parameters), parameters))
        assert abs(run(params, placed(targets(parameters), parameters)) - want) < 1e-9
        assert_same(params, plain)

    simulate(on_rank, 4)


def misses() -> int:
    """Compiled programs, with those that are kept apart by the values of numbers."""
    tables = program_tables(current())
    return sum(map(len, tables)) + sum(
        len(getattr(p, "by_flags", ())) for table in tables for p in table.values()
    )


@pytest.mark.parametrize(("make", "options", "form"), FORMS)
def test_warm_steps_compile_nothing_and_move_nothing(
    make: Any, options: dict[str, Any], form: dict[str, Any]
) -> None:
    parameters = PARAMETERS[1:5] + PARAMETERS[-2:-1]

    def on_rank() -> tuple[list[int], list[Any]]:
        params, ts = (
            leaves(placed(values(parameters), parameters)),
            placed(targets(parameters), parameters),
        )
        opt = make(params, **options, **form)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            opt, 0.2, total_steps=30, cycle_momentum=False
        )
        counts, events = [], []
        for _ in range(20):
            for p, t in zip(params, ts):
                p.grad = t.clone()
            with CommLog() as log:
                opt.step()
            schedule.step()
            counts.append(misses())
            events += log.events
        return counts, events

    counts, events = simulate(on_rank, 4)[0]
    warm = (
        6 if make in (optim.RAdam, optim.ASGD) else 1
    )  # these take another branch after some steps
    assert len(set(counts[warm:])) == 1, f"programs after each step: {counts}"
    if make is optim.Adafactor:  # it takes norms, and means over rows and columns
        assert max(e.bytes for e in events) < 200
    else:
        assert not [e for e in events if e.kind != "all_gather_object"]


@pytest.mark.parametrize("form", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
def test_state_dict_round_trip(form: dict[str, Any]) -> None:
    plain = leaves(values())
    train(plain, targets(), optim.AdamW, {"lr": 0.1, **form}, 2)
    again = optim.AdamW(plain, lr=0.1, **form)  # what a fresh optimizer does without the state

    def on_rank() -> None:
        params, ts = leaves(placed(values())), placed(targets())
        opt = train(params, ts, optim.AdamW, {"lr": 0.1, **form}, 2)
        other = optim.AdamW(params, lr=0.7, **form)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        for p in params:
            for name, s in opt.state[p].items():
                t = other.state[p][name]
                assert type(t) is type(s)
                if isinstance(s, DTensor):
                    assert t.layout is s.layout
                    assert t is not s
                    assert torch.equal(t.to_local(), s.to_local())
        copies = leaves(params)
        twin = optim.AdamW(copies, lr=0.1, **form)
        twin.load_state_dict(copy.deepcopy(opt.state_dict()))
        for o, ps in ((other, params), (twin, copies)):
            set_gradients(ps, ts, 5)
            o.step()
        assert_same(copies, [p.detach().full_tensor() for p in params])
        assert other.state_dict()["param_groups"] == twin.state_dict()["param_groups"]

    assert again.state == {}
    simulate(on_rank, 4)


@pytest.mark.parametrize("form", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
def test_state_in_another_layout_is_moved_and_keeps_it(form: dict[str, Any]) -> None:
    plain = leaves(values()[1:3])
    train(plain, targets()[1:3], optim.Adam, {"lr": 0.1, **form}, 3)

    def on_rank() -> None:
        params, ts = leaves(placed(values())[1:3]), placed(targets())[1:3]
        opt = optim.Adam(params, lr=0.1, **form)
        for step in range(3):
            set_gradients(params, ts, step)
            opt.step()
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) if step < 0 else None
            opt.param_groups[0]["lr"] *= 0.9
            if step == 0:
                state = opt.state[params[0]]
                state["exp_avg"] = state["exp_avg"].redistribute(placements=[R, S(1)])
        assert_same(params, plain)
        assert opt.state[params[0]]["exp_avg"].placements == (R, S(1))

    simulate(on_rank, 4)


@pytest.mark.parametrize("form", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
def test_pending_gradients_count_once(form: dict[str, Any]) -> None:
    """Under no_sync gradients stay pending sums; a step settles them."""
    x = torch.randn(8, 4, dtype=torch.float64)
    plain = nn.Linear(4, 3).double()
    start = copy.deepcopy(plain.state_dict())
    opt = optim.SGD(plain.parameters(), lr=0.1, **form)
    (plain(x) ** 2).sum().backward()
    opt.step()

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        model = nn.Linear(4, 3).double()
        model.load_state_dict(start)
        distribute_module(model, mesh)
        opt = optim.SGD(model.parameters(), lr=0.1, **form)
        with no_sync():
            (
                model(distribute_tensor(x, mesh, [S(0), S(0)], src_data_rank=None)) ** 2
            ).sum().backward()
        assert model.weight.grad.placements == (Partial(), Partial())
        opt.step()
        assert_same(list(model.parameters()), list(plain.parameters()))

    simulate(on_rank, 4)


@pytest.mark.parametrize("form", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
def test_optimizer_made_before_the_module_is_distributed(form: dict[str, Any]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    x = torch.randn(6, 5, dtype=torch.float64)

    def run(m: nn.Module, opt: Any, x: Any) -> None:
        for _ in range(3):
            opt.zero_grad()
            (m(x) ** 2).sum().backward()
            opt.step()

    plain = model()
    run(plain, optim.AdamW(plain.parameters(), lr=0.1, **form), x)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        m = model()
        opt = optim.AdamW(m.parameters(), lr=0.1, **form)
        before = list(m.parameters())

        def cut(name: str, sub: nn.Module, mesh: Any) -> None:
            for key, p in list(sub.named_parameters(recurse=False)):
                sub.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [R, S(0)])))

        distribute_module(m, mesh, cut)
        assert all(p is q and isinstance(p, DTensor) for p, q in zip(m.parameters(), before))
        run(m, opt, distribute_tensor(x, mesh, [S(0), R], src_data_rank=None))
        assert_same(list(m.parameters()), list(plain.parameters()))

    simulate(on_rank, 4)


def test_tensor_lr_and_tensor_betas() -> None:
    plain = leaves(values())
    options = {"lr": torch.tensor(0.1, dtype=torch.float64)}

    def run(params: list[Any], ts: list[Any]) -> None:
        opt = optim.AdamW(params, foreach=False, lr=torch.tensor(0.1, dtype=torch.float64))
        fused = optim.SGD(params, fused=True, lr=torch.tensor(0.05, dtype=torch.float64))
        for step, o in enumerate((opt, fused, opt, fused)):
            set_gradients(params, ts, step)
            o.step()
            o.param_groups[0]["lr"].mul_(0.9)

    run(plain, targets())
    assert float(options["lr"]) == 0.1

    def on_rank() -> None:
        params = leaves(placed(values()))
        run(params, placed(targets()))
        assert_same(params, plain)

    simulate(on_rank, 4)


@pytest.mark.parametrize("form", [LOOP, FOREACH, FUSED], ids=["loop", "foreach", "fused"])
def test_zero_grad_keeps_or_drops(form: dict[str, Any]) -> None:
    def on_rank() -> None:
        params, ts = leaves(placed(values())), placed(targets())
        opt = optim.SGD(params, lr=0.1, **form)
        set_gradients(params, ts, 0)
        opt.zero_grad(set_to_none=False)
        assert all(float(p.grad.abs().sum()) == 0 and p.grad.layout is p.layout for p in params)
        opt.zero_grad()
        assert all(p.grad is None for p in params)

    simulate(on_rank, 4)


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: optim.lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    lambda o: optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [optim.lr_scheduler.LinearLR(o), optim.lr_scheduler.PolynomialLR(o, 4)],
        milestones=[2],
    ),
]


def test_schedulers() -> None:
    def run(make: Any, params: list[Any], ts: list[Any]) -> None:
        opt = optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)
        schedule = make(opt)
        for step in range(5):
            set_gradients(params, ts, step)
            opt.step()
            schedule.step()
        state = schedule.state_dict()
        schedule.load_state_dict(state)

    parameters = PARAMETERS[:4]
    plain = [leaves(values(parameters)) for _ in SCHEDULERS]
    for make, params in zip(SCHEDULERS, plain):
        run(make, params, targets(parameters))

    def on_rank() -> None:
        for make, want in zip(SCHEDULERS, plain):
            params = leaves(placed(values(parameters), parameters))
            run(make, params, placed(targets(parameters), parameters))
            assert_same(params, want)

    simulate(on_rank, 4)


def test_reduce_on_plateau_takes_a_distributed_loss() -> None:
    def on_rank() -> float:
        params, ts = leaves(placed(values())), placed(targets())
        opt = optim.SGD(params, lr=0.1)
        schedule = optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
        for _ in range(3):
            schedule.step(sum(((p - t) ** 2).sum() for p, t in zip(params, ts)).detach())
        return opt.param_groups[0]["lr"]

    assert simulate(on_rank, 4) == [0.025] * 4


def test_averaged_model() -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    x = torch.randn(6, 5, dtype=torch.float64)
    swa = torch.optim.swa_utils

    def run(m: nn.Module, x: Any) -> list[Any]:
        ema = swa.AveragedModel(m, multi_avg_fn=swa.get_ema_multi_avg_fn(0.8))
        mean = swa.AveragedModel(m)
        opt = optim.SGD(m.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            opt.zero_grad()
            (m(x) ** 2).sum().backward()
            opt.step()
            ema.update_parameters(m)
            mean.update_parameters(m)
        return [*ema.parameters(), *mean.parameters()]

    want = run(model(), x)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))

        def cut(name: str, sub: nn.Module, mesh: Any) -> None:
            for key, p in list(sub.named_parameters(recurse=False)):
                sub.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [R, S(0)])))

        m = distribute_module(model(), mesh, cut)
        got = run(m, distribute_tensor(x, mesh, [S(0), R], src_data_rank=None))
        assert all(isinstance(p, DTensor) and p.placements == (R, S(0)) for p in got)
        assert_same(got, want)

    simulate(on_rank, 4)


def test_optimizer_in_backward() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)

    def run(m: nn.Module, x: Any) -> None:
        opts = {p: optim.AdamW([p], lr=0.1, foreach=True) for p in m.parameters()}

        def step(p: Any) -> None:
            opts[p].step()
            p.grad = None

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            (m(x) ** 2).sum().backward()

    plain = nn.Linear(4, 3).double()
    start = copy.deepcopy(plain.state_dict())
    run(plain, x)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        m = nn.Linear(4, 3).double()
        m.load_state_dict(start)
        distribute_module(m, mesh)
        run(m, distribute_tensor(x, mesh, [S(0), R], src_data_rank=None))
        assert_same(list(m.parameters()), list(plain.parameters()))

    simulate(on_rank, 4)


def grid() -> Iterator[tuple[Any, Any]]:
    yield from itertools.product([(R, R), (S(0), S(1)), (S(1), R)], repeat=2)


def test_gradient_in_another_layout() -> None:
    """``p.grad = g`` moves g to the parameter's layout."""
    t, g = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for own, other in grid():
            p = nn.Parameter(distribute_tensor(t, mesh, own, src_data_rank=None))
            p.grad = distribute_tensor(g, mesh, other, src_data_rank=None)
            optim.SGD([p], lr=0.5, foreach=True).step()
            assert_same([p], [t - 0.5 * g])
            assert p.placements == own

    simulate(on_rank, 4)


@pytest.mark.parametrize("form", [LOOP, FOREACH], ids=["loop", "foreach"])
def test_complex_parameters(form: dict[str, Any]) -> None:
    t, g = (torch.randn(5, 3, dtype=torch.complex128) for _ in range(2))

    def run(p: Any, g: Any) -> Any:
        opt = optim.AdamW([p], lr=0.1, amsgrad=True, **form)
        for step in range(3):
            p.grad = g * (1.0 + step)
            opt.step()
        return p

    want = run(nn.Parameter(t.clone()), g)

    def on_rank() -> None:
        p, grad = placed([t, g], [((5, 3), (S(0), S(1)))] * 2)
        assert_same([run(nn.Parameter(p), grad)], [want])

    simulate(on_rank, 4)


def test_differentiable_step() -> None:
    t, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def run(x: Any, w: Any) -> Any:
        w = w.clone().requires_grad_()
        q = x.clone().requires_grad_().clone()
        opt = optim.Adam([q], lr=0.1, differentiable=True)
        q.grad = w * w
        opt.step()
        (q**2).sum().backward()
        return w.grad

    want = run(t, w)

    def on_rank() -> None:
        x, y = placed([t, w], [((5, 3), (S(0), S(1)))] * 2)
        assert_same([run(x, y)], [want])

    simulate(on_rank, 4)
