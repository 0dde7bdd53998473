"""A captured step does what the eager one does, bit for bit, and refuses what it could not repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import (
    CommLog,
    DTensor,
    Replicate,
    Shard,
    capture,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    no_sync,
    parallel,
    rng,
    simulate,
)
from shardwise.capture.check import order_of
from shardwise.capture.report import explain, summary
from shardwise.errors import CaptureError
from shardwise.events import FallbackEvent, observe

S0 = [Shard(0)]


def two(fn: Any, *args: Any) -> list[Any]:
    return simulate(lambda: fn(*args), world_size=2)


def on_mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def train(step: Any, mesh: Any, n: int = 5, after: Any = None, rows: int = 6) -> list[Any]:
    torch.manual_seed(1)
    out = []
    for _ in range(n):
        x = distribute_tensor(torch.randn(rows, 6), mesh, S0)
        y = distribute_tensor(torch.randn(rows, 3), mesh, S0)
        got = step(x, y)
        out.append(got.full_tensor().clone() if isinstance(got, DTensor) else got)
        if after is not None:
            after()
    return out


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state, whole."""
    found = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        found += [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in found]


def same(build: Any, n: int = 5, rows: int = 6) -> Any:
    """Run the same training eagerly and captured; the states must be equal, bit for bit."""

    def run() -> Any:
        mesh = on_mesh()
        outs = []
        for wrapped in (lambda f: f, capture):
            step, model, optimizer, after = build(mesh)
            step = wrapped(step)
            losses = train(step, mesh, n, after, rows)
            outs.append((losses, everything(model, optimizer), step))
        (la, a, _), (lb, b, step) = outs
        assert all(torch.equal(x, y) for x, y in zip(la, lb, strict=True)), (la, lb)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        return step

    return two(run)


def adamw(mesh: Any, clip: bool = True, **how: Any) -> Any:
    model = distribute_module(small(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **how)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, model, optimizer, schedule.step


@pytest.mark.parametrize("foreach", [True, False])
def test_adamw_dropout_batch_norm_clipping_and_a_schedule(foreach: bool) -> None:
    (step, _) = same(lambda mesh: adamw(mesh, foreach=foreach), n=6)
    assert step.captures == 1


@pytest.mark.parametrize("like", ["torch", "philox"])
def test_masks_are_those_of_eager_mode_in_each_stream(like: Any) -> None:
    def build(mesh: Any) -> Any:
        step, *rest = adamw(mesh)

        def inside(x: Any, y: Any) -> Any:
            with rng(like=like):
                return step(x, y)

        return inside, *rest

    same(build)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adamax, {"foreach": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adadelta, {}),
    ],
)
def test_optimizers(kind: Any, how: dict[str, Any]) -> None:
    def build(mesh: Any) -> Any:
        model = distribute_module(small(), mesh)
        optimizer = kind(model.parameters(), **how)

        def step(x: Any, y: Any) -> Any:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, model, optimizer, None

    if kind is torch.optim.RAdam:  # Python compares a number that it reads from the state
        with pytest.raises(CaptureError, match="decides what the program does"):
            same(build)
        return
    same(build)


def test_gradient_accumulation_reduces_once() -> None:
    logs = []

    def build(mesh: Any) -> Any:
        model = distribute_module(small(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            with no_sync():
                F.mse_loss(model(x), y).backward()
            with CommLog() as log:
                loss = F.mse_loss(model(x), y)
                loss.backward()
            logs.append(log.count())
            optimizer.step()
            return loss

        return step, model, optimizer, None

    step, _ = same(build)
    reductions = [n for n in step.last.step.collectives() if n.info["kind"] == "all_reduce"]
    assert sum(n.info.get("members", 1) > 1 for n in reductions) == 1


def test_gradients_that_stay_between_steps_are_inputs() -> None:
    def build(mesh: Any) -> Any:
        model = distribute_module(small(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: Any, y: Any) -> Any:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()  # no zero_grad: they add up
            return loss

        return step, model, optimizer, None

    same(build, n=6)


def test_activation_checkpointing_draws_the_same_masks_again() -> None:
    def build(mesh: Any) -> Any:
        model = distribute_module(small(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(checkpoint(model, x, use_reentrant=False), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer, None

    same(build)


def test_autocast() -> None:
    def build(mesh: Any) -> Any:
        step, *rest = adamw(mesh)

        def cast(x: Any, y: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return step(x, y)

        return cast, *rest

    same(build)


def test_another_shape_or_mode_is_captured_again_and_counted() -> None:
    def run() -> int:
        mesh = on_mesh()
        step, model, _, _ = adamw(mesh)
        step = capture(step, max_captures=3)
        for rows in (6, 4, 6, 4):
            train(step, mesh, 2, None, rows)
        assert step.captures == 2
        model.eval()
        train(step, mesh, 2)
        assert step.captures == 3
        with pytest.raises(CaptureError, match="captured 3 times"):
            train(step, mesh, 1, None, 8)
        return step.captures

    two(run)


def test_no_capture_after_the_second_of_fifty_steps() -> None:
    def run() -> None:
        mesh = on_mesh()
        step, _, _, after = adamw(mesh)
        step = capture(step)
        counts = []
        train(step, mesh, 50, lambda: (after(), counts.append(step.captures)))
        assert counts[1:] == [1] * 49

    two(run)


def test_state_that_is_loaded_is_used() -> None:
    def run() -> None:
        mesh = on_mesh()
        outs = []
        for wrapped in (lambda f: f, capture):
            step, model, optimizer, _ = adamw(mesh)
            step = wrapped(step)
            train(step, mesh, 3)
            saved = copy.deepcopy(optimizer.state_dict())
            weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
            train(step, mesh, 2)
            optimizer.load_state_dict(saved)
            model.load_state_dict(weights)
            train(step, mesh, 2)
            outs.append(everything(model, optimizer))
        assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))

    two(run)


# ---- what cannot be ----------------------------------------------------------------------------------


def refused(body: Any, match: str) -> None:
    """A step with ``body`` between backward and the optimizer is refused, and nothing has changed."""

    def run() -> None:
        mesh = on_mesh()
        model = distribute_module(small(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            body(loss, model, optimizer)
            optimizer.step()
            return loss

        captured = capture(step)
        train(captured, mesh, 1)
        before = everything(model, optimizer)
        with pytest.raises(CaptureError, match=match) as caught:
            train(captured, mesh, 1)
        assert "test_capture.py:" in str(caught.value)
        after = everything(model, optimizer)
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        train(step, mesh, 1)  # eager mode still works

    two(run)


def test_a_branch_on_a_value_is_refused() -> None:
    refused(lambda loss, *_: bool(loss.item() > 3), "decides what the program does")


def test_error_if_nonfinite_is_refused() -> None:
    refused(
        lambda _, model, __: nn.utils.clip_grad_norm_(
            model.parameters(), 1.0, error_if_nonfinite=True
        ),
        "depends on it",
    )


def test_a_size_that_depends_on_data_is_refused() -> None:
    refused(lambda loss, *_: (loss._local.reshape(1) > 0).nonzero(), "depends on data")


def test_a_scheduler_inside_is_refused() -> None:
    def run() -> None:
        mesh = on_mesh()
        step, _, _, schedule = adamw(mesh)

        def inside(x: Any, y: Any) -> Any:
            out = step(x, y)
            schedule()
            return out

        captured = capture(inside)
        train(captured, mesh, 1)
        with pytest.raises(CaptureError, match=r"after the captured step"):
            train(captured, mesh, 1)

    two(run)


# ---- parallel modules ---------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
            for _ in range(3)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parallel_step(make: Any, plain: bool = True) -> None:
    def run() -> None:
        mesh = on_mesh()
        outs, logs = [], []
        for wrapped in (lambda f: f, capture):
            torch.manual_seed(0)
            model = make(Blocks(), mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

            def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step = wrapped(step)
            torch.manual_seed(mesh.get_coordinate()[0])
            losses = []
            for _ in range(5):
                with CommLog() as log:
                    losses.append(step(torch.randn(4, 6), torch.randn(4, 3)))
            logs.append(log.on(mesh.get_coordinate()[0]))
            outs.append([*losses, *everything(model, optimizer)])
        assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))
        assert logs[1].bytes <= logs[0].bytes

    two(run)


def test_data_parallel() -> None:
    parallel_step(lambda m, mesh: parallel.data_parallel(m, mesh))


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_sharded(reshard: bool) -> None:
    def make(m: Any, mesh: Any) -> Any:
        for block in m.blocks:
            parallel.fully_shard(block, mesh, reshard_after_forward=reshard)
        return parallel.fully_shard(m, mesh, reshard_after_forward=reshard)

    parallel_step(make)


def test_tensor_parallel() -> None:
    def run() -> None:
        mesh = on_mesh()
        outs = []
        for wrapped in (lambda f: f, capture):
            torch.manual_seed(0)
            model = Blocks()
            plan = {
                f"blocks.{i}.{k}": style()
                for i in range(3)
                for k, style in (
                    (1, parallel.ColwiseParallel),
                    (3, parallel.RowwiseParallel),
                )
            }
            parallel.parallelize_module(model, mesh, plan)
            groups: dict[type, list[Any]] = {}
            for p in model.parameters():
                groups.setdefault(type(p.data), []).append(p)
            optimizer = torch.optim.AdamW([{"params": ps} for ps in groups.values()])

            def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step = wrapped(step)
            torch.manual_seed(3)
            losses = [step(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(5)]
            outs.append([*losses, *everything(model, optimizer)])
        assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))
        assert len(step.last.step.collectives()) == 3 * 2

    two(run)


def test_mixed_layouts_on_a_2d_mesh() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        outs = []
        for wrapped in (lambda f: f, capture):
            torch.manual_seed(0)
            w = distribute_tensor(torch.randn(6, 7), mesh, [Replicate(), Shard(1)])
            v = distribute_tensor(torch.randn(7, 3), mesh, [Replicate(), Shard(0)])
            w, v = nn.Parameter(w), nn.Parameter(v)
            optimizer = torch.optim.AdamW([w, v])

            def step(x: Any, w: Any = w, v: Any = v, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = ((x @ w).relu() @ v).pow(2).mean()
                loss.backward()
                optimizer.step()
                return loss

            step = wrapped(step)
            torch.manual_seed(2)
            losses = [
                step(distribute_tensor(torch.randn(5, 6), mesh, [Shard(0), Replicate()]))
                for _ in range(5)
            ]
            outs.append([t.full_tensor() for t in (*losses, w, v, w.grad, v.grad)])
        assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))

    simulate(run, world_size=4)


# ---- ranks agree, and the report ----------------------------------------------------------------------


def test_ranks_that_capture_different_steps_raise_together_and_name_the_difference() -> None:
    def differ() -> str:
        mesh = on_mesh()
        first = mesh.get_coordinate()[0] == 0
        calls = []

        def step(x: Any) -> Any:
            calls.append(1)
            if first and len(calls) > 1:
                return x.redistribute(placements=[Replicate()]).sum()
            return x.sum()

        captured = capture(step)
        x = distribute_tensor(torch.randn(4, 6), mesh, S0)
        captured(x)
        with pytest.raises(CaptureError, match="different steps") as caught:
            captured(x)
        return str(caught.value)

    a, b = two(differ)
    assert a == b
    assert "rank 0 has `move {dp: S(0)} -> {dp: R} of [4, 6]" in a
    assert "rank 1 has `nothing more`" in a


def test_a_refusal_on_one_rank_is_one_on_all() -> None:
    def run() -> str:
        mesh = on_mesh()
        first = mesh.get_coordinate()[0] == 0
        w = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Replicate()]))

        def step(x: Any) -> Any:
            y = (x @ w).sum()
            if first:
                bool(y._local > 0)
            return y

        captured = capture(step)
        x = distribute_tensor(torch.randn(4, 6), mesh, S0)
        captured(x)
        with pytest.raises(CaptureError) as caught:
            captured(x)
        return str(caught.value)

    a, b = two(run)
    assert "cannot be captured" in a
    assert b.startswith("rank 0 could not capture the step: CaptureError")


def test_predicted_bytes_are_counted_bytes_and_explain_says_so() -> None:
    def run() -> tuple[str, int, int]:
        mesh = on_mesh()
        step, *_ = adamw(mesh)
        step = capture(step)
        train(step, mesh, 2)
        x = distribute_tensor(torch.randn(6, 6), mesh, S0)
        y = distribute_tensor(torch.randn(6, 3), mesh, S0)
        with CommLog() as log:
            step(x, y)
        own = log.on(mesh.get_coordinate()[0])
        facts = summary(step.last.step)
        assert facts["bytes"] == own.bytes
        assert sum(facts["collectives"].values()) == own.count()
        return explain(step), own.count(), own.bytes

    text, count, size = two(run)[0]
    assert count == 5  # batch norm's four statistics, and one bucket
    first, last = text.splitlines()[1], text.split("\n\n")[0].splitlines()[-1]
    assert "10 all_reduce" in first
    assert last.rstrip().endswith(str(size))


def test_passes_that_would_send_in_another_order_on_one_rank_are_left_out_on_all() -> None:
    def contrary(step: Any) -> Any:
        """The first two independent collectives, the other way round on one rank."""
        if step.rank == 0:
            return step
        nodes = list(step.lowered().nodes)
        a, b = [i for i, n in enumerate(nodes) if n.kind == "start"][-2:]
        nodes[a : b + 1] = [nodes[b], *nodes[a:b]]
        return step.with_nodes(nodes)

    def run() -> Any:
        mesh = on_mesh()
        w, v = both = nn.ParameterList(
            distribute_tensor(torch.ones(6, 4), mesh, [Replicate()]) for _ in range(2)
        )

        def step(x: Any) -> Any:
            both.zero_grad()
            loss = (x @ w + x @ (2 * v)).sum()
            loss.backward()
            return loss

        x = distribute_tensor(torch.randn(4, 6), mesh, S0)
        expected = step(x).full_tensor(), w.grad.full_tensor(), v.grad.full_tensor()
        seen: list[Any] = []
        with observe(seen.append):
            captured = capture(step, passes=[contrary])
            captured(x)
            got = captured(x).full_tensor(), w.grad.full_tensor(), v.grad.full_tensor()
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        return [e for e in seen if isinstance(e, FallbackEvent)]

    for seen in two(run):
        assert any("another order" in e.why for e in seen)


def test_order_is_agreed_on_where_a_rank_knows_less() -> None:
    """The bias of a row-wise layer: its gradient needs nothing on the ranks that hold zeros of the pending sum."""

    def run() -> tuple[str, int]:
        mesh = on_mesh()
        torch.manual_seed(0)
        model = Blocks()
        plan = {
            f"blocks.{i}.{k}": style()
            for i in range(3)
            for k, style in ((1, parallel.ColwiseParallel), (3, parallel.RowwiseParallel))
        }
        parallel.parallelize_module(model, mesh, plan)

        def forward(x: Any) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        seen: list[Any] = []
        step = capture(forward)
        with observe(seen.append):
            for _ in range(3):
                step(torch.ones(4, 6))
        assert not [e for e in seen if isinstance(e, FallbackEvent)]
        assert step.last.log[-1][0] == "schedule"
        return order_of(step.last.step), len(step.last.step.collectives())

    (first, count), second = two(run)
    assert (first, count) == second


def test_one_rank_may_record_anew_for_a_batch_of_another_size() -> None:
    def run() -> int:
        mesh = on_mesh()
        rank = mesh.get_coordinate()[0]
        outs = []
        for wrapped in (lambda f: f, capture):
            torch.manual_seed(0)
            model = parallel.data_parallel(Blocks(), mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step = wrapped(step)
            torch.manual_seed(rank)
            losses = [step(torch.randn(4 + (rank == 0 and i == 3), 6)) for i in range(6)]
            outs.append([*losses, *(p.detach() for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
        return step.captures

    assert two(run) == [2, 1]


def test_a_view_that_is_a_copy_shows_what_was_written_after_it() -> None:
    def run() -> None:
        mesh = on_mesh()
        kept = {"rows": None}

        def step(x: Any) -> Any:
            a = x * 2
            kept["rows"] = a[4:]
            b = a[:2]  # rows of one rank: communication, so a copy
            a.mul_(3)
            return a, b

        captured = capture(step)
        for i in range(4):
            x = distribute_tensor(torch.arange(12.0).view(6, 2) + i, mesh, S0)
            a, b = captured(x)
            assert torch.equal(b.full_tensor(), a.full_tensor()[:2])
            assert torch.equal(kept["rows"].full_tensor(), a.full_tensor()[4:])

    two(run)
