"""What comes before what, what it costs, when it runs: the schedule of a captured step, simulated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
import itertools
from typing import Any

import pytest
import torch
from torch import nn
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Profile,
    Shard,
    capture,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallel,
    simulate,
)
from shardwise.capture.cost import CPU, Device, durations, flops, is_heavy, network
from shardwise.capture.ir import Step, flatten
from shardwise.capture.memory import peak_bytes
from shardwise.capture.order import (
    dependencies,
    facts_of,
    followers,
    settle,
    starts,
    violations,
)
from shardwise.capture.passes import (
    bucket,
    counts,
    in_place,
    kept,
    redundant_moves,
    schedule,
    simplify,
)
from shardwise.capture.record import record
from shardwise.capture.run import executor
from shardwise.capture.state import State
from shardwise.capture.timeline import timeline
from shardwise.comm import DryTransport
from shardwise.comm.transport import use

BEFORE = (simplify, redundant_moves, counts, bucket, simplify, in_place)
FAST = Profile((10.0,), (1e5,))
SLOW = Profile((100.0,), (100.0,))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.head(self.blocks(x)), y)


def recorded(
    kind: str, layers: int = 3, width: int = 16, ranks: int = 2, rank: int = 0
) -> Step:
    """The recorded step of a small model, of one rank of a world that is not there."""
    with use(DryTransport(rank, ranks)):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        return on_mesh(kind, mesh, Model(layers, width), width)


def on_mesh(kind: str, mesh: Any, model: nn.Module, width: int, rows: int = 8) -> Step:
    batch: tuple[Any, ...] = (torch.randn(rows, width), torch.randint(16, (rows,)))
    if kind == "fsdp":
        for block in model.blocks:
            parallel.fully_shard(block, mesh)
        parallel.fully_shard(model, mesh)
    elif kind == "ddp":
        parallel.data_parallel(model, mesh)
    else:
        distribute_module(model, mesh)
        batch = tuple(DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in batch)
    groups: dict[type, list[Any]] = {}
    for p in model.parameters():
        groups.setdefault(type(p.data), []).append(p)
    optimizer = torch.optim.SGD(
        [{"params": ps} for ps in groups.values()], lr=0.1, momentum=0.9, foreach=True
    )

    def step(*batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(*batch)
    return record(step, State.of(step, batch, {}), batch, {}).step


def passed(step: Step, *passes: Any) -> Step:
    for p in passes:
        step = p(step)
    return step


def places(step: Step, kind: str) -> list[int]:
    return [at for at, n in enumerate(flatten(step.nodes)) if n.kind == kind]


# ---- dependencies ------------------------------------------------------------------------------------


def test_a_wait_comes_before_a_write_to_what_is_sent() -> None:
    step = recorded("fsdp").lowered()
    nodes = step.nodes
    sent = {n.outs[0]: n.args[0].root for n in nodes if n.kind == "start"}
    shards = {r for r in sent.values() if any(v.root == r for v, _ in step.inputs)}
    assert shards  # the gathers read parameters ...
    gathers = [(at, sent[n.args[0]]) for at, n in enumerate(nodes) if n.kind == "wait"]
    before = dependencies(nodes)
    for at, root in gathers:
        for later in range(at + 1, len(nodes)):
            if root in nodes[later].writes:
                assert at in before[later]  # ... which the optimizer writes
                break
        else:
            assert root not in shards


def test_violations_names_what_is_out_of_order() -> None:
    step = recorded("data").lowered()
    nodes = list(step.nodes)
    at = places(step, "wait")[0]
    nodes[at - 1], nodes[at] = nodes[at], nodes[at - 1]
    (said,) = violations(step, step.with_nodes(nodes))
    assert "must come before" in said
    assert "wait" in said
    assert violations(step, step.with_nodes(nodes[1:])) == ["other nodes"]
    assert violations(step, step) == []


# ---- costs -------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_products() -> None:
    step = recorded("ddp", layers=1).lowered()
    total = sum(flops(n) for n in step.nodes)
    forward = 2 * 8 * (16 * 64 + 64 * 16 + 16 * 16)
    assert total == 3 * forward  # two products in backward for each in forward
    assert all(is_heavy(n) == (flops(n) > 0) for n in step.nodes)


def test_collectives_cost_what_the_profile_says() -> None:
    step = passed(recorded("ddp"), simplify, bucket)
    (start,) = step.collectives()
    nbytes = start.args[0].nbytes
    assert network(step, SLOW).collective_us(start) == pytest.approx(
        100 + nbytes / 100  # received: 2 (n - 1) / n of it
    )


# ---- the simulator -----------------------------------------------------------------------------------


def test_exposed_communication_and_total() -> None:
    step = passed(recorded("ddp"), simplify, bucket)
    t = timeline(step, SLOW, CPU)
    assert t.exposed_us == pytest.approx(t.communication_us)  # nothing runs meanwhile
    assert t.total_us == pytest.approx(t.compute_us + t.communication_us)
    assert t.events[0].lane == "compute"
    assert "exposed" in str(t)
    assert timeline(step, FAST, CPU).total_us < t.total_us


def test_collectives_of_a_group_run_one_after_another() -> None:
    t = timeline(recorded("fsdp"), SLOW, CPU)
    sent = [e for e in t.events if e.lane == "dp"]
    assert len(sent) > 6
    assert all(a.end_us <= b.begin_us for a, b in itertools.pairwise(sent))


# ---- the schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["data", "ddp", "fsdp"])
@pytest.mark.parametrize("profile", [FAST, SLOW])
def test_a_schedule_is_the_same_step_and_not_slower(kind: str, profile: Profile) -> None:
    before = passed(recorded(kind), *BEFORE)
    after = schedule(before, profile, CPU)
    assert violations(before, after) == []
    old, new = timeline(before, profile, CPU), timeline(after, profile, CPU)
    assert new.total_us <= old.total_us
    assert new.peak_bytes <= 1.05 * old.peak_bytes
    assert new.compute_us == pytest.approx(old.compute_us)


def test_gradients_travel_while_backward_runs() -> None:
    cut = bucket(simplify(recorded("data", layers=4)), cap_bytes=10_000)
    after = schedule(cut, FAST, CPU)
    heavy = [at for at, n in enumerate(after.nodes) if is_heavy(n)]
    begun = places(after, "start")
    assert len(begun) > 3
    assert sum(at < heavy[-1] for at in begun) >= len(begun) - 2
    assert all(at > heavy[-1] for at in places(after, "wait")[-3:])
    assert timeline(after, FAST, CPU).exposed_us < 0.5 * timeline(cut, FAST, CPU).exposed_us


def test_labels_are_counted_first_and_the_count_is_waited_for_last() -> None:
    after = schedule(passed(recorded("data"), *BEFORE), FAST, CPU)
    heavy = [at for at, n in enumerate(after.nodes) if is_heavy(n)]
    forward = len(heavy) * 7 // 20  # 7 products forward, 13 backward
    assert places(after, "start")[0] < heavy[0]
    assert places(after, "wait")[0] > heavy[forward - 1]


@pytest.mark.parametrize("ignored", [0, 3, 6])
def test_counted_labels_are_those_of_the_loss(ignored: int) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        x = distribute_tensor(torch.randn(7, 5, requires_grad=True), mesh, [Shard(0)])
        labels = torch.randint(5, (7,))
        labels[:ignored] = 4
        y = distribute_tensor(labels, mesh, [Shard(0)])

        def step(x: Any, y: Any) -> Any:
            loss = F.cross_entropy(x, y, ignore_index=4)
            return loss, torch.autograd.grad(loss, x)[0]

        captured = capture(step)
        captured(x, y)
        for a, b in zip(step(x, y), captured(x, y), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        assert "aten.ne.Scalar" in str(captured.last.step)

    simulate(run, world_size=2)


def test_gathers_go_out_while_the_module_before_runs() -> None:
    before = passed(recorded("fsdp", layers=4), *BEFORE)
    after = schedule(before, FAST, CPU)
    old, new = timeline(before, FAST, CPU), timeline(after, FAST, CPU)
    gather = min(e.end_us - e.begin_us for e in new.events if "gather" in e.name)
    assert old.exposed_us > 2.5 * gather
    assert new.exposed_us < gather


@pytest.mark.parametrize("kind", ["data", "ddp", "fsdp"])
def test_uneven_ranks_start_in_the_same_order(kind: str) -> None:
    def run() -> Any:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        step = on_mesh(kind, mesh, Model(3, 7), 7, rows=2 * mesh.get_rank())
        before = passed(step, *BEFORE)
        after = schedule(before, FAST, CPU)
        assert violations(before, after) == []
        return starts(after), [n.kind for n in after.nodes if n.kind in ("start", "wait")]

    found = simulate(run, world_size=3)
    assert found[0][0] == found[1][0] == found[2][0]
    assert len(found[0][0]) >= 1


def test_estimates_do_not_change_the_order_of_starts() -> None:
    before = bucket(passed(recorded("fsdp", layers=4), simplify), cap_bytes=2000)
    orders = {
        starts(schedule(before, profile, device, cap))
        for profile in (FAST, SLOW)
        for device in (CPU, Device(1.0, 1.0), Device(1e9, 1e9, 0.0, 0.0))
        for cap in (None, 0, 10**9)
    }
    assert len(orders) == 1


def test_memory_stays_below_the_cap() -> None:
    before = passed(recorded("fsdp", layers=6), *BEFORE)
    peak = peak_bytes(before)
    free = schedule(before, SLOW, CPU, memory_cap_bytes=10**9)
    assert peak_bytes(free) > 1.5 * peak  # what it takes where memory is no question
    for cap in (int(1.2 * peak), int(1.05 * peak), peak):
        capped = schedule(before, SLOW, CPU, memory_cap_bytes=cap)
        assert peak_bytes(capped) <= cap
        assert violations(before, capped) == []


def test_nothing_ahead_leaves_the_gathers() -> None:
    before = passed(recorded("fsdp"), *BEFORE)
    gathers = [n for n in before.collectives() if n.info["kind"] == "all_gather"]
    after = schedule(before, FAST, CPU, ahead=0)
    assert [n for n in after.collectives() if n.info["kind"] == "all_gather"] == gathers
    assert violations(before, after) == []


def test_no_collectives_no_change() -> None:
    step = recorded("ddp", ranks=1)
    assert schedule(step) is step


# ---- memory, counted ---------------------------------------------------------------------------------


def counted_peak(step: Step, inputs: Any) -> int:
    """The most bytes that a run has allocated at once, as the profiler counts them."""
    run = executor(step)
    with torch.autograd.profiler.profile(profile_memory=True) as prof:
        run(inputs)
    live = peak = 0
    for e in sorted(prof.kineto_results.events(), key=lambda e: e.start_ns()):
        if e.name() == "[memory]":
            live += e.nbytes()
            peak = max(peak, live)
    return peak


def test_counted_memory_is_what_was_foreseen() -> None:
    with use(DryTransport(0, 2)):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model, batch = Model(6, 32), (torch.randn(64, 32), torch.randint(16, (64,)))
        step = on_mesh("fsdp", mesh, model, 32, rows=64)
        before = passed(step, *BEFORE)
        after = schedule(before, FAST, CPU)
        inputs = [
            slot.get(list(batch)) if slot.role != "number" else 0.1 for _, slot in step.inputs
        ]
        known = {v: x for (v, _), x in zip(step.inputs, inputs)}
        peaks = []
        for s in (before, after):
            given = [known[v] if v in known else slot.get([]) for v, slot in s.inputs]
            peaks.append(counted_peak(s, given))
            assert peaks[-1] == pytest.approx(peak_bytes(s), rel=0.02)
        assert peaks[1] <= 1.05 * peaks[0]


# ---- a large machine ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "fsdp"])
def test_twelve_layers_on_eight_nodes_of_eight(kind: str) -> None:
    """Within 5 % of the larger of compute and communication, plus what nothing can overlap.

    The model is small, so the network is slower by as much: a width of 1024 in place of 64.
    """
    with use(DryTransport(9, 64)):
        shape, names = ((8, 8), ("node", "gpu")) if kind == "data" else ((64,), ("dp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        step = on_mesh(kind, mesh, Model(12, 64), 64, rows=64)
    profile = Profile.nodes(shape, (15.0, 200_000 / 256), (30.0, 25_000 / 256))
    cut = partial(bucket, profile=profile)
    before = passed(step, simplify, redundant_moves, counts, cut, simplify, in_place)
    for speed in (300.0, 3000.0, 10_000.0):
        device = Device(speed, speed, 4.0, 0.0)
        after = schedule(before, profile, device)
        assert violations(before, after) == []
        old, new = timeline(before, profile, device), timeline(after, profile, device)
        head, tail = ends(before, durations(before, profile, device))
        most = max(new.compute_us, new.communication_us)
        assert new.total_us <= 1.05 * most + head + tail
        assert new.total_us < old.total_us
        assert new.peak_bytes <= 1.05 * old.peak_bytes


def ends(step: Step, us: dict[int, float]) -> tuple[float, float]:
    """What must run before the first collective, and what after the last: the least over all that carry data."""
    nodes = list(flatten(step.nodes))
    before = dependencies(nodes)
    after = followers(before)
    waits = {nodes[at].args[0]: at for at in places(step, "wait")}

    def busy(at: int, edges: list[list[int]]) -> float:
        seen: set[int] = set()
        todo = [at]
        while todo:
            new = [p for p in edges[todo.pop()] if p not in seen]
            seen.update(new)
            todo += new
        return sum(us[id(nodes[p])] for p in seen if nodes[p].kind not in ("start", "wait"))

    large = [at for at in places(step, "start") if nodes[at].args[0].nbytes > 64]
    head = min(busy(at, before) for at in large)
    tail = min(us[id(nodes[at])] + busy(waits[nodes[at].outs[0]], after) for at in large)
    return head, tail


# ---- what is gathered again ----------------------------------------------------------------------------------


class Wide(Model):
    """Takes most memory between the last block's forward and its backward."""

    def forward(self, x: Any, y: Any) -> Any:
        h = self.head(self.blocks(x))
        return F.cross_entropy((h[:, None] + torch.zeros(1, 512, 1)).exp().mean(1), y)


def counted(step: Step) -> dict[str, int]:
    nodes = list(flatten(step.nodes))
    names = [n.info["kind"] if n.kind == "start" else n.name for n in nodes]
    return {k: names.count(k) for k in ("all_gather", "reduce_scatter", "free", "allocate")}


def test_what_is_gathered_again_at_once_is_kept() -> None:
    step = simplify(recorded("fsdp", layers=4))
    assert kept(step) is step  # nobody has looked whether there is memory
    settle(step, facts_of(step, is_heavy))
    after = kept(step)
    one_less = {k: n - (k != "reduce_scatter") for k, n in counted(step).items()}
    assert counted(after) == one_less
    assert peak_bytes(after) <= peak_bytes(step)
    assert len(after.nodes) == len(step.nodes) - 5  # the wait and the copy, too


def test_what_is_gathered_again_is_not_kept_where_memory_is_short() -> None:
    with use(DryTransport(0, 2)):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = simplify(on_mesh("fsdp", mesh, Wide(4, 16), 16))
    settle(step, facts_of(step, is_heavy))
    assert kept(step) is step


def test_what_has_changed_is_gathered_again() -> None:
    def facts(change: bool) -> int:
        step = recorded("fsdp", layers=3)
        nodes = list(step.nodes)
        frees = [i for i, n in enumerate(nodes) if n.name == "free"]
        gather = [n for n in nodes if n.kind == "start" and n.info["kind"] == "all_gather"]
        again = gather[3]  # of the last block
        if change:  # its shard is written between its two gathers
            note = nodes[frees[2]]
            write = replace(note, name="write", args=(again.args[0],), reads=frozenset())
            write.writes = frozenset({again.args[0].root})
            nodes.insert(frees[2] + 1, write)
        return sum(not needed for *_, needed in facts_of(step.with_nodes(nodes), is_heavy))

    assert facts(False) == 1
    assert facts(True) == 0
