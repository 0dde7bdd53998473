"""A law of propagation: whatever is marked, the module laid out as planned gives one device's values and gradients."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, strategies as st
import pytest
import torch
from torch import nn
import torch.nn.functional as F

from shardwise import DTensor, Replicate, Shard, mark_sharding, propagate, simulate
from shardwise.layout.mesh import Mesh

MESHES = (
    Mesh.of("cpu", (2,), (0, 1), ("tp",)),
    Mesh.of("cpu", (3,), (0, 1, 2), ("tp",)),
    Mesh.of("cpu", (2, 2), (0, 1, 2, 3), ("dp", "tp")),
)
ROWS, LENGTH, WIDTH = 4, 3, 6


def _linear(m: Program, i: int, x: Any, old: Any) -> Any:
    return m.layers[i](x)


def _norm(m: Program, i: int, x: Any, old: Any) -> Any:
    return F.layer_norm(x, (WIDTH,), m.weights[i], None)


def _attention(m: Program, i: int, x: Any, old: Any) -> Any:
    heads = 2 + i % 2  # three do not divide
    q = m.layers[i](x).view(ROWS, LENGTH, heads, -1).transpose(1, 2)
    k = old.view(ROWS, LENGTH, heads, -1).transpose(1, 2)
    a = F.scaled_dot_product_attention(q, k, k)
    return a.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)


def _hidden(m: Program, i: int, x: Any, old: Any) -> Any:
    h = torch.tanh(x @ m.wide[i])
    return h @ m.wide[i].t()  # tied


def _in_place(m: Program, i: int, x: Any, old: Any) -> Any:
    y = x * m.weights[i]
    y.add_(old).mul_(0.5)
    return y


OPS: dict[str, Any] = {
    "linear": _linear,
    "norm": _norm,
    "attention": _attention,
    "hidden": _hidden,
    "in place": _in_place,
    "gelu": lambda m, i, x, old: F.gelu(x),
    "residual": lambda m, i, x, old: x + old,
    "softmax": lambda m, i, x, old: x.softmax(i % 3),
    "centre": lambda m, i, x, old: x - x.mean(i % 3, keepdim=True),
    "merge": lambda m, i, x, old: m.layers[i](x.reshape(-1, WIDTH)).view(ROWS, LENGTH, WIDTH),
    "turn": lambda m, i, x, old: torch.einsum("blw,blv->bwv", x, old).sum(-1).unsqueeze(1) + x,
    "halves": lambda m, i, x, old: torch.cat([c.sin() for c in x.chunk(2, -1)], -1),
    "roll": lambda m, i, x, old: x.roll(1, i % 3) + m.weights[i],
    "opaque": lambda m, i, x, old: torch.complex(x, old).abs() + 1,
}


class Program(nn.Module):
    """A chain of ops; some values are marked on the way."""

    def __init__(self, ops: list[str], marks: dict[int, Any]) -> None:
        super().__init__()
        self.ops, self.marks, n = ops, marks, len(ops)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(n))
        self.wide = nn.ParameterList(torch.randn(WIDTH, 8) / 3 for _ in range(n))
        self.double()

    def forward(self, x: Any) -> Any:
        first = x
        for i, op in enumerate(self.ops):
            last, x = x, OPS[op](self, i, x, first if i % 2 else x)
            first = last
            if i in self.marks:
                x = mark_sharding(x, self.marks[i])
        return x


@st.composite
def specs(draw: Any, mesh: Mesh) -> Any:
    """A partition spec for three dims, or placements at chosen sizes."""
    if draw(st.integers(0, 3)) == 0:
        shard = st.builds(lambda d, n: Shard(d, unit=n), st.integers(0, 2), st.integers(1, 4))
        kinds = st.one_of(st.none(), st.just(Replicate()), shard)
        given = [draw(kinds) for _ in range(mesh.ndim)]
        return given if any(p is not None for p in given) else ()
    entries: list[Any] = [draw(st.sampled_from([None, "?"])) for _ in range(3)]
    for axis in range(mesh.ndim):
        at = draw(st.integers(-1, 2))
        if at >= 0:
            before = entries[at] if isinstance(entries[at], tuple) else ()
            entries[at] = (*before, mesh.axis_name(axis))
    return tuple(entries)


@st.composite
def programs(draw: Any) -> tuple[Mesh, list[str], dict[int, Any]]:
    """A mesh, ops, and marks by position."""
    mesh = draw(st.sampled_from(MESHES))
    ops = draw(st.lists(st.sampled_from(list(OPS)), min_size=1, max_size=5))
    at = draw(st.sets(st.integers(0, len(ops) - 1), min_size=1, max_size=2))
    return mesh, ops, {i: draw(specs(mesh)) for i in sorted(at)}


def gradient(p: Any) -> Any:
    g = p.grad
    return g.full_tensor() if isinstance(g, DTensor) else g


@pytest.mark.slow
@given(programs())
def test_a_plan_keeps_values_and_gradients(case: Any) -> None:
    mesh, ops, marks = case
    torch.manual_seed(0)
    module, x = Program(ops, marks), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.double)
    plan = propagate(module, x, mesh=mesh)
    for i, spec in marks.items():
        found = plan.layouts[
            f"mark.{1 + sorted(marks).index(i)}" if i < len(ops) - 1 else "result"
        ]
        for entry, axes in zip(spec if isinstance(spec, tuple) else (), found.spec):
            if entry != "?":  # as it was said
                assert axes == (entry if entry is None or len(entry) > 1 else entry[0])
    plain = copy.deepcopy(module)
    x.requires_grad_()
    want = plain(x)
    want.square().sum().backward()

    def run() -> None:
        model = plan.apply(copy.deepcopy(module))
        (given_x,), _ = plan.distribute(x)
        found = model(given_x)
        torch.testing.assert_close(found.full_tensor(), want.detach(), rtol=1e-9, atol=1e-9)
        found.square().sum().backward()
        torch.testing.assert_close(gradient(given_x), x.grad, rtol=1e-8, atol=1e-8)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None, name
            else:
                torch.testing.assert_close(gradient(p), q.grad, rtol=1e-8, atol=1e-8, msg=name)

    simulate(run, len(mesh.ranks))
