"""Marks on a few tensors lay all of them out, with reasons, and the values stay those of one device."""

from __future__ import annotations

from collections import Counter
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
    mark_sharding,
    propagate,
    simulate,
)
from shardwise.errors import CaptureError, LayoutError, MeshError
from shardwise.layout.mesh import Mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
DP_TP = Mesh.of("cpu", (2, 2), (0, 1, 2, 3), ("dp", "tp"))
TP = Mesh.of("cpu", (2,), (0, 1), ("tp",))
TP4 = Mesh.of("cpu", (4,), (0, 1, 2, 3), ("tp",))
WIDTH, HEADS, HIDDEN, WORDS = 8, 2, 16, 12


class Block(nn.Module):
    """One layer of a transformer, its projections apart."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def mark(self, x: Any, spec: Any) -> Any:
        return x if self.mesh is None else mark_sharding(x, self.mesh, spec)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = self.mark(q, ("?", "tp", None, None))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.mark(self.up(self.norm2(x)), (..., "tp"))
        return x + self.down(F.gelu(h))


class Transformer(nn.Module):
    """A language model with tied embeddings; with a mesh, its three marks are at three lines."""

    def __init__(self, layers: int, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        self.embed, self.at = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Any) -> Any:
        if self.mesh is not None:
            tokens = mark_sharding(tokens, self.mesh, ("dp", None))
        x = self.embed(tokens) + self.at(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def megatron(name: str) -> tuple[Any, ...]:
    """The manual plan for a (dp, tp) mesh: where a parameter is."""
    _, _, last = name.rpartition("blocks.")
    kind = last.split(".")[1] if "." in last else ""
    if kind in ("q", "k", "v", "up"):
        return R, S0
    return (R, S1) if kind in ("o", "down") and name.endswith("weight") else (R, R)


def by_hand(name: str, sub: nn.Module, mesh: Any) -> None:
    for key, p in list(sub._parameters.items()):
        if p is not None and not isinstance(p, DTensor):
            full = f"{name}.{key}" if name else key
            placed = distribute_tensor(p.detach(), mesh, megatron(full))
            sub._parameters[key] = nn.Parameter(placed)


def loss_of(model: Any, tokens: Any) -> Any:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def same_gradients(model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
            continue
        found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(found, q.grad, rtol=tolerance, atol=tolerance, msg=name)


def sent(log: CommLog) -> Counter[Any]:
    """Kinds, counts, bytes. The one check that a plain tensor is equal on all ranks is left out."""
    moved = [e for e in log.events if e.kind != "all_gather_object"]
    return Counter((e.kind, e.op, e.tag, e.rank, e.bytes) for e in moved)


@pytest.mark.slow
def test_three_marks_shard_a_transformer_as_megatron_does() -> None:
    layers = 12
    tokens = torch.randint(0, WORDS, (4, 6))
    marked, plain = Transformer(layers, DP_TP), Transformer(layers)
    plan = propagate(marked, tokens, mesh=DP_TP, strict=True)
    assert not plan.conflicts
    assert not plan.opaque
    for name, _ in marked.named_parameters():
        assert plan.layouts[name].placements == megatron(name), name
    loss = loss_of(plain, tokens)
    loss.backward()

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        auto, manual = Transformer(layers, mesh), Transformer(layers)
        plan.apply(auto)
        distribute_module(manual, mesh, by_hand)
        x = distribute_tensor(tokens, mesh, [S0, R])
        logs = []
        for model in (auto, manual):
            with CommLog() as log:
                found = loss_of(model, x)
                found.backward()
            logs.append(sent(log))
            torch.testing.assert_close(found.full_tensor(), loss.detach())
            same_gradients(model, plain)
        return logs

    with CommLog() as log:
        logs = simulate(run, 4)
    assert log.events
    for at, (auto, manual) in enumerate(logs):
        assert auto == manual
        over_tp = sum(
            n
            for (kind, _, tag, rank, size), n in auto.items()
            if (kind, tag, rank) == ("all_reduce", "tp", at) and size == 2 * 6 * WIDTH * 8
        )
        assert over_tp == 4 * layers  # 2 + 2 in each block: 2 (k-1)/k of [batch, length, width]


def test_a_plan_says_why() -> None:
    plan = propagate(Transformer(2, DP_TP), torch.randint(0, WORDS, (4, 6)), mesh=DP_TP)
    text = str(plan)
    rows = [line for line in text.splitlines() if line.startswith("blocks.*.down.weight (2)")]
    assert len(rows) == 1, text
    assert "tp: S(1)" in rows[0]
    assert "tp: mark test_propagate.py:" in rows[0]
    assert "through linear test_propagate.py:" in rows[0]
    assert "tokens" in text
    assert plan.decisions["result"].layout.spec == ("dp", None, None)
    steps = plan.why("blocks.1.down.weight").splitlines()
    assert [s.split()[-2] for s in steps[2:]] == ["gelu", "linear"]
    with pytest.raises(LayoutError, match=r'no tensor "blocks\.9"'):
        plan.why("blocks.9")


def test_what_no_mark_reaches_is_replicated() -> None:
    plan = propagate(Transformer(1), torch.randint(0, WORDS, (4, 6)), mesh=DP_TP)
    assert all(layout.is_replicated for layout in plan.layouts.values())
    assert not any(d.because for d in plan.decisions.values())


# ---- forwards of many kinds -------------------------------------------------------------------


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        h = mark_sharding(F.relu(self.norm(self.a(x))), ("?", "tp", None, None))
        return self.out(F.max_pool2d(self.b(h), 2).mean((2, 3)))


class Attention(nn.Module):
    """torch's own module: projections packed in one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.MultiheadAttention(8, 4, batch_first=True), nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        x = mark_sharding(x, ("dp", ...))
        y, _ = self.inner(x, x, x, need_weights=False)
        return self.drop(x + y)


class Tied(nn.Module):
    """Words cut over tp in one place: the table follows, and what looks it up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Any) -> Any:
        return mark_sharding(self.head(self.table(x).tanh()), (..., "tp"))


class Grouped(nn.Module):
    """Two key heads for four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 2).transpose(1, 2)
        k, v = (f(x).view(b, t, 2, 2).transpose(1, 2) for f in (self.k, self.v))
        q = mark_sharding(q, ("?", "tp", None, None))
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return a.transpose(1, 2).reshape(b, t, 8).sum(1)


class Odd(nn.Module):
    """In-place writes, reductions, an op without a rule, a sum of outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Any) -> Any:
        h = self.w(x) * self.scale
        h = mark_sharding(h, ("dp", "tp"))
        h.add_(1.0).mul_(self.scale)
        h = h - h.amax(0, keepdim=True)
        h = torch.einsum("bi,bj->ij", h, x) + h.cumsum(0).std(0)
        return h.logsumexp(-1)


class Uneven(nn.Module):
    """Three heads for two ranks: the projections are cut between heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        q, k = (f(x).view(b, t, 3, 4).transpose(1, 2) for f in (self.q, self.k))
        q = mark_sharding(q, ("?", "tp", None, None))
        a = F.scaled_dot_product_attention(q, k, k)
        return self.o(a.transpose(1, 2).reshape(b, t, 12))


def _images() -> Any:
    return torch.randn(4, 3, 4, 4, dtype=torch.double)


def _rows(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.double)


FORWARDS: dict[str, tuple[Any, Any, dict[str, tuple[Any, ...]]]] = {
    "convs": (
        Convs,
        _images,
        {
            "a.weight": (R, S0),
            "norm.bias": (R, S0),
            "norm.running_var": (R, R),
            "b.weight": (R, S1),
        },
    ),
    "attention": (
        Attention,
        lambda: _rows(4, 3, 8),
        {"x": (S0, R), "inner.in_proj_weight": (R, R)},
    ),
    "tied": (
        Tied,
        lambda: torch.randint(0, 8, (4, 3)),
        {"table.weight": (R, S0), "head.weight": (R, S0)},
    ),
    "grouped": (Grouped, lambda: _rows(2, 3, 8), {"q.weight": (R, S0), "k.weight": (R, S0)}),
    "uneven": (
        Uneven,
        lambda: _rows(4, 3, 6),
        {
            "q.weight": (R, Shard(0, sizes=(8, 4))),
            "k.bias": (R, Shard(0, sizes=(8, 4))),
            "o.weight": (R, Shard(1, sizes=(8, 4))),
        },
    ),
    "odd": (Odd, lambda: _rows(4, 6), {"w.weight": (R, S0), "scale": (R, S0), "x": (S0, R)}),
}


def check_values(plan: Any, module: nn.Module, x: Any, world: int) -> None:
    """The laid out module gives the values, gradients and buffers of one device."""
    plain = copy.deepcopy(module)
    want = plain(x)
    weights = torch.randn(want.shape, dtype=want.dtype)
    (want * weights).sum().backward()

    def run() -> None:
        model = plan.apply(copy.deepcopy(module))
        args, _ = plan.distribute(x)
        found = model(*args)
        torch.testing.assert_close(found.full_tensor(), want.detach())
        (found * distribute_tensor(weights, plan.mesh)).sum().backward()
        same_gradients(model, plain, 1e-10)
        for a, b in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b)

    simulate(run, world)


@pytest.mark.parametrize("name", FORWARDS)
def test_values_are_those_of_one_device(name: str) -> None:
    make, data, wanted = FORWARDS[name]
    module, x = make().double(), data()
    plan = propagate(module, x, mesh=DP_TP)
    for tensor, placements in wanted.items():
        assert plan.layouts[tensor].placements == placements, f"{tensor}\n{plan}"
    check_values(plan, module, x, 4)


def test_key_heads_that_do_not_divide_stay_whole() -> None:
    plan = propagate(Grouped().double(), _rows(2, 3, 8), mesh=TP4)
    found = {name: plan.layouts[f"{name}.weight"].placements for name in "qkv"}
    assert found == {"q": (S0,), "k": (R,), "v": (R,)}
    check_values(plan, Grouped().double(), _rows(2, 3, 8), 4)


# ---- conflicts ----------------------------------------------------------------------------------


def _said(plan: Any) -> list[str]:
    return [str(c).replace("test_propagate.py:", "line ") for c in plan.conflicts]


def test_conflicts_are_listed_with_both_reasons_and_strict_raises() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def two_axes(x: Any) -> Any:
        a = mark_sharding(first(x), ("dp", ...))
        b = mark_sharding(second(x), ("tp", ...))
        return a + b

    x = torch.randn(4, 8)
    plan = propagate(two_axes, x, mesh=DP_TP)
    assert plan.conflicts
    assert all("on dim 0" in str(c) and str(c).count("mark ") == 2 for c in plan.conflicts)
    assert len(plan.conflicts) <= 3  # x, and the sum
    with pytest.raises(LayoutError, match=r"in conflict at \d+ places") as raised:
        propagate(two_axes, x, mesh=DP_TP, strict=True)
    assert all(str(c).split(":")[0] in str(raised.value) for c in plan.conflicts)
    assert "conflicts: " in str(plan)


def test_one_axis_on_two_dims_is_a_conflict() -> None:
    def twice(x: Any) -> Any:
        x = mark_sharding(x, ("tp", None))
        return x @ x.T

    plan = propagate(twice, torch.randn(4, 8), mesh=TP)
    assert plan.layouts["result"].spec == ("tp", None)
    assert "but it shards dim 0 (mark line" in _said(plan)[0]


def test_too_few_rows_are_a_conflict() -> None:
    plan = propagate(
        lambda x: mark_sharding(x.flatten(1), ("?", "tp")), torch.randn(2, 3, 8), mesh=TP
    )
    assert plan.layouts["x"].is_replicated  # 3 rows for 2 ranks: 24 columns have no cut there
    assert "ties it to a dim of 3, where the cut is not between whole rows" in _said(plan)[0]
    plan = propagate(lambda x: mark_sharding(x, ("tp",)), torch.randn(5), mesh=TP4)
    assert plan.layouts["result"].spec == ("tp",)  # as it was said
    assert plan.layouts["x"].is_replicated  # but it does not spread
    assert "5 rows over 4 ranks leave some rank without any" in _said(plan)[0]


def test_what_every_rank_makes_stays_whole() -> None:
    def fn(x: Any) -> Any:
        ramp = torch.arange(8.0) * 2
        return mark_sharding(x, (None, "tp")) + ramp.exp()

    plan = propagate(fn, torch.randn(4, 8), mesh=TP)
    assert plan.layouts["result"].spec == (None, "tp")
    made = [d for d in plan.decisions.values() if d.role == "constant"]
    assert {"arange.1", "mul.1", "exp.1"} <= {d.name for d in made}
    assert all(d.layout.is_replicated for d in made)


def test_a_mark_that_closes_a_dim_is_a_conflict() -> None:
    def closed(x: Any) -> Any:
        return mark_sharding(mark_sharding(x, ("dp", ...)) + 1, (None, "tp"))

    plan = propagate(closed, torch.randn(4, 8), mesh=DP_TP)
    assert plan.layouts["result"].spec == (None, "tp")
    assert plan.layouts["x"].spec == ("dp", "tp")
    assert "dp on dim 0" in _said(plan)[0]
    assert "the dim is not to be sharded by it" in _said(plan)[0]


# ---- what is there already ----------------------------------------------------------------------


def test_layouts_and_marks_that_are_there_count() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        mark_sharding(model[0].weight, mesh["tp"], ("tp", None))
        x = distribute_tensor(torch.randn(4, 8), mesh, [S0, R])
        plan = propagate(model, x, mesh=mesh)
        assert plan.layouts["input"].placements == (S0, R)
        assert plan.layouts["2.weight"].placements == (R, S1)
        assert plan.layouts["result"].placements == (S0, R)
        assert str(plan.decisions["result"].because["dp"]).startswith("layout of input")
        plan.apply(model)
        again = propagate(model, x, mesh=mesh)  # parameters have layouts now
        assert again.layouts["2.weight"].placements == (R, S1)
        assert str(again.decisions["linear.1"].because["tp"]).startswith("layout of 0.weight")
        weight = model[0].weight
        again.apply(model)
        assert model[0].weight is weight
        assert model(x).layout.spec == ("dp", None)

    simulate(run, 4)


def test_marks_of_arguments_win_over_layouts_of_parameters() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [S0]))
        x = mark_sharding(torch.randn(4, 8), mesh, ("dp", ...))
        plan = propagate(layer, x)
        assert plan.layouts["result"].placements == (S0,)
        assert [c.tensor for c in plan.conflicts] == ["result"]

    simulate(run, 2)


def test_a_function_over_modules_and_nested_arguments() -> None:
    body, head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 4)

    def loss(batch: Any, *, scale: float) -> Any:
        x = mark_sharding(batch["x"], ("dp", ...))
        h = checkpoint(lambda x: mark_sharding(body[0](x), (..., "tp")), x, use_reentrant=False)
        return F.cross_entropy(head(body[2](body[1](h))), batch["y"]) * scale

    body.double()
    head.double()
    batch = {"x": _rows(4, 8), "y": torch.randint(0, 4, (4,))}
    plan = propagate(loss, batch, scale=2.0, mesh=DP_TP)
    assert plan.layouts["batch.x"].placements == (S0, R)
    assert plan.layouts["batch.y"].placements == (S0, R)
    assert plan.layouts["body.2.weight"].placements == (R, S1)
    want = loss(batch, scale=2.0).detach()

    def run() -> None:
        parts = copy.deepcopy(body), copy.deepcopy(head)  # known by their names
        for part in parts:
            plan.apply(part)
        assert parts[0][2].weight.placements == (R, S1)
        (placed,), kwargs = plan.distribute(batch, scale=2.0)
        h = parts[0][2](parts[0][1](parts[0][0](placed["x"])))
        found = F.cross_entropy(parts[1](h), placed["y"]) * kwargs["scale"]
        torch.testing.assert_close(found.full_tensor(), want)

    simulate(run, 4)


def test_nothing_is_left_behind() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.last = x.mean(0)
            return self.norm(x)

    model = Counting()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    propagate(model, torch.randn(4, 4), mesh=TP)
    for key, x in model.state_dict().items():
        assert type(x) is torch.Tensor
        assert torch.equal(x, before[key]), key


def test_what_cannot_be_followed_raises() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"reads the values.*test_propagate\.py:\d+"):
        propagate(lambda x: x if x.sum() > 0 else -x, x, mesh=TP)
    with pytest.raises(CaptureError, match="runs a backward"):
        propagate(lambda x: layer(x).sum().backward(), x, mesh=TP)
    assert layer.weight.grad is None


def test_a_plan_for_another_module_is_refused() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = torch.randn(2, 4)
        plan = propagate(nn.Linear(4, 6), x, mesh=mesh)
        with pytest.raises(LayoutError, match="no parameter of ModuleList is in the plan"):
            plan.apply(nn.ModuleList([nn.Linear(4, 6)]))
        with pytest.raises(LayoutError, match=r"has shape \(5, 4\)"):
            plan.apply(nn.Linear(4, 5))
        with pytest.raises(LayoutError, match="of another form"):
            plan.distribute(x, x)

    simulate(run, 2)


def test_a_call_without_a_rule_stops_layouts_alone() -> None:
    def fn(x: Any) -> Any:
        y = mark_sharding(x * 2, ("tp", None))
        return torch.histc(y, 3), y + 1

    plan = propagate(fn, torch.randn(4, 4), mesh=TP)
    assert plan.layouts["result.1"].spec == ("tp", None)
    assert plan.layouts["x"].spec == ("tp", None)


def test_what_came_through_a_product_wins_over_what_did_not() -> None:
    layer = nn.Linear(8, 8)

    def fn(x: Any, y: Any) -> Any:
        return mark_sharding(y, ("tp", None)).relu() + layer(mark_sharding(x, ("dp", None)))

    plan = propagate(fn, torch.randn(4, 8), torch.randn(4, 8), mesh=DP_TP)
    assert plan.layouts["result"].spec == ("dp", None)
    assert len(plan.conflicts) == 1, plan  # once, not for every operand


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, tokens = Transformer(1, DP_TP), torch.zeros(4, 6, dtype=torch.long)
    plan = propagate(model, tokens, mesh=DP_TP)
    assert plan.layouts["blocks.0.down.weight"].placements == (R, S1)


def test_several_axes_on_a_dim_keep_their_order() -> None:
    def fn(x: Any, w: Any) -> Any:
        x = mark_sharding(x, (("tp", "dp"), None))
        return (x @ w).view(4, 2, 6).relu()

    plan = propagate(fn, torch.randn(8, 6), torch.randn(6, 6), mesh=DP_TP)
    assert plan.layouts["x"].spec == (("tp", "dp"), None)
    assert plan.layouts["w"].is_replicated
    assert plan.layouts["result"].spec == (("tp", "dp"), None, None)
    part = propagate(
        lambda x: mark_sharding(x, (("tp", "dp"), None)).view(2, 4, 6),
        torch.randn(8, 6),
        mesh=DP_TP,
    )
    assert part.layouts["result"].spec == ("tp", None, None)  # two rows: as far as it goes
    assert [c.axes for c in part.conflicts] == [("dp",)]


def test_all_ranks_find_the_same() -> None:
    def run() -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return str(
            propagate(Transformer(1, mesh), torch.zeros(4, 6, dtype=torch.long), mesh=mesh)
        )

    assert len(set(simulate(run, 4))) == 1


def test_a_captured_step_keeps_marks() -> None:
    tokens = torch.randint(0, WORDS, (4, 6))
    plan = propagate(Transformer(1, DP_TP), tokens, mesh=DP_TP)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(tokens, mesh)  # the mark in the model cuts it
        losses = []
        for wrapped in (lambda f: f, capture):
            model = plan.apply(Transformer(1, mesh))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                optimizer.step()
                return loss

            run_step = wrapped(step)
            losses.append([run_step(x).full_tensor().item() for _ in range(3)])
        assert losses[0] == losses[1]

    simulate(run, 4)


# ---- mark_sharding by itself --------------------------------------------------------------------


def test_a_mark_moves_a_dtensor_and_leaves_what_is_open() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.randn(4, 6, 8, dtype=torch.double)
        x = distribute_tensor(full, mesh, [S0, Shard(2)]).requires_grad_()

        def spec(*how: Any) -> Any:
            y = mark_sharding(x, *how)
            torch.testing.assert_close(y.full_tensor(), full)
            return y.layout.spec

        assert mark_sharding(x, mesh, ("dp", ...)) is x
        assert spec(mesh, ("dp", None, "tp")) == ("dp", None, "tp")
        assert spec(mesh, ()) == (None, None, None)
        assert spec(mesh, (None, "tp")) == (None, "tp", None)
        assert spec(mesh, (..., "tp", "?")) == ("dp", "tp", None)
        assert spec(mesh, ("?", ("tp", "dp"))) == (None, ("tp", "dp"), None)
        assert spec(mesh["tp"], (None, "tp")) == ("dp", "tp", None)
        assert spec([None, S1]) == ("dp", "tp", None)
        assert spec([R, Shard(-1)]) == (None, None, "tp")
        assert spec((1, None, 0)) == ("tp", None, "dp")
        assert spec(("dp", "?", "?")) == ("dp", None, "tp")

    simulate(run, 4)


def test_marks_at_chosen_sizes() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.randn(6, 2), mesh, [Shard(0, sizes=(4, 2))])
        assert mark_sharding(x, mesh, ("tp", None)) is x  # an axis is named, no sizes
        assert mark_sharding(x, mesh, [S0]).placements == (S0,)
        assert mark_sharding(x, mesh, [Shard(0, unit=5)]).to_local().shape[0] in (5, 1)
        layer = nn.Linear(2, 6)
        mark_sharding(layer.weight, mesh, [Shard(0, unit=4)])
        plan = propagate(lambda x: layer(x).exp(), torch.randn(3, 2), mesh=mesh)
        assert plan.layouts["bias"].placements == (Shard(0, sizes=(4, 2)),)
        assert plan.layouts["result"].placements == (Shard(1, sizes=(4, 2)),)

    simulate(run, 2)


def test_a_pending_sum_is_settled_where_the_mark_says_so() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        a = distribute_tensor(torch.randn(4, 6), mesh, [S1])
        b = distribute_tensor(torch.randn(6, 4), mesh, [S0])
        with CommLog() as log:
            settled = mark_sharding(a @ b, mesh, ("tp", None))
        assert [e.kind for e in log.events] == ["reduce_scatter"]
        assert settled.placements == (S0,)
        assert mark_sharding(a @ b, mesh, ()).placements == (R,)
        assert (a @ b).layout is mark_sharding(a @ b, mesh, (...,)).layout

    simulate(run, 2)


def test_wrong_marks_raise_before_anything() -> None:
    x = torch.randn(4, 6)
    for spec, error, text in (
        (("dp", "tp", None), LayoutError, "3 entries"),
        (("dp", "dp"), LayoutError, "twice"),
        (("nn",), MeshError, 'no axis "nn"'),
        ((..., ...), LayoutError, "the entry Ellipsis"),
        ((1.5,), LayoutError, "the entry 1.5"),
        ([Shard(2)], LayoutError, "2 dims"),
        (3.0, LayoutError, "not a spec"),
        (None, LayoutError, "needs a spec"),
    ):
        with pytest.raises(error, match=text):
            mark_sharding(x, DP_TP, spec)
    from shardwise import Partial

    with pytest.raises(LayoutError, match="a pending sum is no place"):
        mark_sharding(x, DP_TP, [Partial()])
    with pytest.raises(LayoutError, match="needs a spec"):
        mark_sharding(x)
    with pytest.raises(LayoutError, match="marks a tensor"):
        mark_sharding([1], DP_TP, ())
    with pytest.raises(MeshError, match="no slice"):
        propagate(lambda x: mark_sharding(x, DP_TP, ("dp",)), x, mesh=TP)


def test_a_mark_costs_a_plain_model_nothing() -> None:
    model, plain = Transformer(1, DP_TP), Transformer(1)
    tokens = torch.randint(0, WORDS, (4, 6))
    assert torch.equal(model(tokens), plain(tokens))
