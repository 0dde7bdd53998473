"""A step whose local parts are compiled does what the eager one does; how a step is cut into parts."""

from __future__ import annotations

import re
import shutil
from typing import Any
import weakref

import pytest
import torch
from torch import nn
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    capture,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.capture import inductor
from shardwise.capture.report import explain
from shardwise.errors import CaptureError
from shardwise.parallel import data_parallel

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)
S0 = [Shard(0)]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Parts run call by call, as the flat graphs say; the list fills with these graphs."""
    graphs: list[Any] = []

    def run(graph: Any, fakes: list[Any], mode: Any, **how: Any) -> Any:
        assert len([n for n in graph.graph.nodes if n.op == "placeholder"]) == len(fakes)
        graphs.append(graph)
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(inductor, "compile_flat", run)
    return graphs


def two(fn: Any, *args: Any) -> list[Any]:
    return simulate(lambda: fn(*args), world_size=2)


def on_mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


class Net(nn.Module):
    """Small, with dropout, batch norm and a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.scale = nn.BatchNorm1d(8), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        hidden = self.norm(F.gelu(F.dropout(self.first(x), 0.3)))
        return self.last(hidden * self.scale)


def training(mesh: Any, optimizer: Any, dtype: torch.dtype, clip: bool = True) -> Any:
    torch.manual_seed(0)
    model = distribute_module(Net().to(dtype), mesh)
    opt = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)

    def step(x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return step, model, opt, schedule.step


def run(step: Any, mesh: Any, dtype: torch.dtype, after: Any, n: int = 5, rows: int = 6) -> Any:
    torch.manual_seed(1)
    losses = []
    for _ in range(n):
        x = distribute_tensor(torch.randn(rows, 6, dtype=dtype), mesh, S0)
        y = distribute_tensor(torch.randint(3, (rows,)), mesh, S0)
        losses.append(step(x, y).full_tensor().clone())
        after()
    return losses


def whole(model: nn.Module, opt: Any) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        found += [v for v in opt.state[p].values() if isinstance(v, torch.Tensor)]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in found]


def close(optimizer: Any, dtype: torch.dtype, tolerance: float) -> Any:
    """Train eagerly and compiled; the states must be close, dropout masks and all."""

    def both() -> Any:
        mesh = on_mesh()
        outs = []
        for wrapped in (lambda f: f, lambda f: capture(f, compile="inductor")):
            step, model, opt, after = training(mesh, optimizer, dtype)
            step = wrapped(step)
            losses = run(step, mesh, dtype, after)
            outs.append([*losses, *whole(model, opt)])
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
        return step

    return two(both)


def adamw(**how: Any) -> Any:
    return lambda ps: torch.optim.AdamW(ps, lr=1e-2, **how)


OPTIMIZERS = {
    "AdamW, lists": adamw(foreach=True),
    "AdamW, one by one": adamw(foreach=False),
    "AdamW, amsgrad": adamw(foreach=True, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, centered=True, momentum=0.5),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2, foreach=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, lr_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flat_graphs_mean_what_the_calls_mean(name: str, interpreted: list[Any]) -> None:
    (step, _) = close(OPTIMIZERS[name], torch.float64, 1e-12)
    assert step.captures == 1  # a learning rate that changes compiles nothing anew
    assert interpreted


def test_flat_graphs_in_float32(interpreted: list[Any]) -> None:
    close(adamw(foreach=True), torch.float32, 2e-6)
    assert interpreted


@needs_compiler
@pytest.mark.slow
def test_compiled_as_eager_in_float64() -> None:
    (step, _) = close(adamw(foreach=True), torch.float64, 1e-10)
    assert step.captures == 1
    assert re.search(r"compiled: \d+ parts of [\d, ]+ calls, in [\d.]+ s", explain(step))


@needs_compiler
@pytest.mark.slow
def test_kernels_called_from_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "MANY_KERNELS", 1)
    real, ways = inductor.compile_flat, set[Any]()

    def noted(*args: Any, **how: Any) -> Any:
        made = real(*args, **how)
        ways.add(how.get("all_cpp", False))
        return made

    monkeypatch.setattr(inductor, "compile_flat", noted)
    close(adamw(foreach=True), torch.float64, 1e-10)
    assert ways == {True, False}


def test_what_cannot_be_called_from_cpp_is_called_from_python(
    interpreted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "MANY_KERNELS", 1)
    real = inductor.compile_flat

    def picky(*args: Any, all_cpp: bool = False) -> Any:
        if all_cpp:
            raise NotImplementedError
        return real(*args)

    monkeypatch.setattr(inductor, "compile_flat", picky)
    close(adamw(foreach=True), torch.float64, 1e-12)
    assert interpreted


def test_data_parallel_is_few_parts(interpreted: list[Any]) -> None:
    def count() -> Any:
        mesh = on_mesh()
        torch.manual_seed(0)
        model = distribute_module(
            nn.Sequential(
                nn.Embedding(8, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 8)
            ),
            mesh,
        )
        opt = torch.optim.AdamW(model.parameters(), foreach=True)

        def step(ids: Any, labels: Any) -> Any:
            opt.zero_grad()
            loss = F.cross_entropy(model(ids), labels)
            loss.backward()
            opt.step()
            return loss

        step = capture(step, compile="inductor")
        ids = distribute_tensor(torch.randint(8, (8,)), mesh, S0)
        for _ in range(3):
            step(ids, ids)
        return step.last

    (last, _) = two(count)
    kinds = [n.kind for n in last.compiled.step.nodes]
    shape = "".join({"opaque": "p", "start": "s", "wait": "w"}.get(k, "") for k in kinds)
    # forward, backward and packing | counters and decay | one over the number of labels | AdamW
    assert shape == "pspwpp", last.compiled.step
    loose = [n for n in last.compiled.step.nodes if n.kind not in ("opaque", "start", "wait")]
    calls = [n.name for n in loose if n.kind != "number"]
    assert calls == ["aten.slice.Tensor", "aten.mul_.Tensor"]  # all gradients at once


def views_and_writes() -> None:
    mesh = on_mesh()

    def step(x: Any, kept: Any) -> Any:
        a = x * 2 + 1
        b = a[:, :1]  # a view of what one part makes ...
        kept.add_(1)
        shown = kept[1:]
        total = x.sum().redistribute(placements=[Replicate()])
        a.mul_(total)  # ... that another writes
        kept.mul_(total)
        return a.log().exp().sqrt(), b, shown, kept[:2]

    compiled = capture(step, compile="inductor")
    for i in range(4):
        x = distribute_tensor(torch.arange(12.0).view(6, 2) + i, mesh, S0)
        outs = []
        for f in (step, compiled):
            kept = distribute_tensor(torch.ones(4), mesh, [Replicate()])
            got = f(x, kept)
            outs.append([t.full_tensor().clone() for t in (*got, kept)])
            kept.zero_()  # what was handed out shows it
            outs[-1] += [t.full_tensor() for t in got]
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(b, a)
    assert compiled.last.compiled.parts


@pytest.mark.parametrize(("first", "parts"), [(2, 1), (1, 0)])
def test_memory_that_is_shared_and_written(
    first: int, parts: int, interpreted: list[Any]
) -> None:
    def step(x: Any, y: Any) -> Any:
        x.add_(1)
        y.mul_(3)
        x.mul_(2)
        return x.sum() + y.sum()

    def fresh() -> Any:
        both = torch.arange(6.0)
        return both, both[:2], both[first:]  # side by side; or over each other: call by call

    compiled = capture(step, compile="inductor")
    for _ in range(3):
        (a, *given), (b, *others) = fresh(), fresh()
        assert torch.equal(compiled(*given), step(*others))
        assert torch.equal(a, b)
    assert len(compiled.last.compiled.parts) == parts


def test_draws_go_first_and_cut_nothing(interpreted: list[Any]) -> None:
    def dropped() -> Any:
        mesh = on_mesh()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.2))
        model = data_parallel(net, mesh)  # it computes with plain tensors

        def step(x: Any) -> Any:
            loss = F.dropout(model(x), 0.3).square().sum()
            loss.backward()
            return loss

        outs = []
        for f in (step, capture(step, compile="inductor")):
            torch.manual_seed(1)
            model.zero_grad()
            outs.append([f(torch.ones(4, 6)).clone() for _ in range(4)])
            outs[-1] += [p.grad.clone() for p in model.parameters()]
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(b, a)
        return f.last.compiled.step

    (step, _) = two(dropped)
    names = [n.name for n in step.nodes]
    draws = [i for i, name in enumerate(names) if "bernoulli" in name]
    parts = [i for i, name in enumerate(names) if name.startswith("compiled")]
    assert len(draws) == 3
    assert max(draws) < min(parts), names


def test_pieces_of_a_buffer_are_written_between_parts(interpreted: list[Any]) -> None:
    def step(x: Any) -> Any:
        packed = x.new_empty(8)
        packed[:4].copy_(x.exp().log().exp())  # functional, each would be a pass over all of it
        packed[4:].copy_(x.sin().cos().sin())
        return packed.exp().log().exp()

    compiled = capture(step, compile="inductor")
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(4)), step(torch.ones(4)))
    names = [n.name for n in compiled.last.compiled.step.nodes]
    assert names.count("aten.copy_.default") == 2
    assert sum(name.startswith("compiled") for name in names) == 3


class _Freed:
    """Notes when a tensor dies."""

    def __init__(self, x: torch.Tensor) -> None:
        self.alive = True
        weakref.finalize(x, self.die)

    def die(self) -> None:
        self.alive = False


def test_what_a_part_takes_last_may_die_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[bool] = []

    def run(graph: Any, fakes: list[Any], mode: Any, **how: Any) -> Any:
        def call(tensors: list[Any]) -> Any:
            watched = [_Freed(x) for x in tensors]
            outs = graph(*[x.clone() for x in tensors])
            tensors.clear()
            dead.append(not all(w.alive for w in watched))
            return outs

        return call

    monkeypatch.setattr(inductor, "compile_flat", run)

    def step(x: Any) -> Any:
        y = x.exp().log().exp()
        total = x.sum().redistribute(placements=[Replicate()])
        return (y * total).sin().cos().sin()

    def died() -> None:
        mesh = on_mesh()
        compiled = capture(step, compile="inductor")
        for _ in range(3):
            x = distribute_tensor(torch.ones(4, 2), mesh, S0)
            compiled(x)

    two(died)
    assert dead[-1]  # y does not outlive its last use


def test_views_show_what_is_written_later(interpreted: list[Any]) -> None:
    two(views_and_writes)
    assert interpreted


@needs_compiler
@pytest.mark.slow
def test_compiled_views_show_what_is_written_later() -> None:
    two(views_and_writes)


def test_all_ranks_raise_when_one_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.comm.transport import current

    def failing(graph: Any, fakes: Any, mode: Any) -> Any:
        if current().rank == 1:
            raise RuntimeError("no compiler here")
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(inductor, "compile_flat", failing)

    def refused() -> str:
        mesh = on_mesh()
        step, model, opt, _ = training(mesh, adamw(foreach=True), torch.float64)
        step = capture(step, compile="inductor")
        run(step, mesh, torch.float64, lambda: None, n=1)
        before = whole(model, opt)
        with pytest.raises(CaptureError, match="no compiler here") as error:
            run(step, mesh, torch.float64, lambda: None, n=1)
        assert all(torch.equal(a, b) for a, b in zip(before, whole(model, opt), strict=True))
        return str(error.value)

    here, there = two(refused)
    assert "rank 1" in here
    assert "g++" in there


def test_new_shapes_compile_anew_and_are_bounded(interpreted: list[Any]) -> None:
    def shapes() -> None:
        mesh = on_mesh()
        step, _, _, after = training(mesh, adamw(foreach=True), torch.float64)
        step = capture(step, compile="inductor", max_captures=2)
        for rows in (6, 6, 8, 6, 8):
            run(step, mesh, torch.float64, after, n=1, rows=rows)
        assert step.captures == 2
        with pytest.raises(CaptureError, match="was captured 2 times"):
            run(step, mesh, torch.float64, after, n=1, rows=10)

    two(shapes)


def test_memory_that_lies_otherwise_is_another_step(interpreted: list[Any]) -> None:
    w = nn.Parameter(torch.randn(3, 4))
    step = capture(lambda x: (x @ w).exp().sum().log(), compile="inductor")
    x = torch.randn(2, 3)
    for _ in range(3):
        step(x)
    assert step.captures == 1
    w.data = torch.randn(4, 3).t()
    torch.testing.assert_close(step(x), (x @ w).exp().sum().log())
    assert step.captures == 2
