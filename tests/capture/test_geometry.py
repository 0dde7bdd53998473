"""Where values lie: what passes put elsewhere, what the user gets, and inputs that come to lie over each other."""

from __future__ import annotations

from collections.abc import Callable
import re
import shutil
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    capture,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.capture import inductor
from shardwise.capture.overlap import overlaps
from shardwise.capture.passes import simplify
from shardwise.capture.truth import truthful
from shardwise.comm.transport import current

R, S0 = [Replicate()], [Shard(0)]
WIDE = torch.float64


def local(x: Any) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def same(make: Callable[[Any], tuple[Any, Any]], calls: int = 4, **how: Any) -> None:
    """Two ranks, eager and captured: what a step gives must be equal; each value is where its fake says."""

    def both() -> Any:
        outs = []
        for wrap in (lambda f: f, lambda f: capture(f, **how)):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            torch.manual_seed(0)
            step, arguments = make(mesh)
            wrapped, seen = wrap(step), []
            for i in range(calls):
                torch.manual_seed(i)
                seen += [local(x) for x in wrapped(*arguments(i))]
            outs.append(seen)
        for a, b in zip(*outs, strict=True):
            assert torch.equal(a, b)

    with mock.patch("shardwise.capture.step.executor", truthful):
        simulate(both, world_size=2)


def sums(*columns: int) -> Callable[[Any], Callable[[int], list[Any]]]:
    """Arguments whose products are pending sums of these sizes."""

    def arguments(mesh: Any) -> Callable[[int], list[Any]]:
        return lambda _: [
            distribute_tensor(torch.randn(4, k, dtype=WIDE), mesh, S0) for k in columns
        ]

    return arguments


def product(x: Any) -> torch.Tensor:
    return (x.t() @ x).redistribute(placements=R).to_local()


def test_a_place_in_memory_moves_with_the_memory() -> None:
    def make(mesh: Any) -> Any:
        def step(x: Any, y: Any) -> Any:
            a, b = product(x), product(y)  # they travel together
            return (
                a.as_strided((2, 2), (1, 3), 1) * 1,
                b.as_strided((2, 2), (1, 3), 1) * 1,
                b.t().as_strided((2,), (2,), 1) * 1,
            )

        return step, sums(3, 3)(mesh)

    same(make)


def test_what_is_seen_in_larger_elements_begins_at_one() -> None:
    def make(mesh: Any) -> Any:
        def step(x: Any, y: Any) -> Any:
            a, b = product(x), product(y)  # 9 entries, then 4
            return a + 1, torch.view_as_complex(b).abs(), b.view(torch.complex128).abs()

        return step, sums(3, 2)(mesh)

    same(make)


def test_views_of_views_of_what_travelled_together() -> None:
    def make(mesh: Any) -> Any:
        def step(x: Any, y: Any, z: Any) -> Any:
            a, b, c = product(x), product(y), product(z)
            row = b.t()[1:]
            row.mul_(2)
            d, e = (
                DTensor.from_local(t, mesh, S0, run_check=False).redistribute(placements=R)
                for t in (row, c)
            )
            row.add_(1)
            return a[0], b * 1, d.t().clone() * 2, e[1], row

        return step, sums(2, 3, 2)(mesh)

    same(make)


def test_views_of_what_is_made_twice() -> None:
    """The first view is of the second copy: what goes is not what came last."""

    def make(mesh: Any) -> Any:
        def step(x: Any) -> Any:
            a, b = (x.redistribute(placements=R).to_local() for _ in range(2))
            return a @ (b.t() @ a) - b @ (a.t() @ b), b.t()[1:] * 2

        return step, sums(3)(mesh)

    same(make, passes=(simplify,))


def test_there_and_back_is_not_the_parameter_where_a_view_of_it_is_handed_out() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        p = distribute_tensor(torch.ones(4, 3), mesh, S0)

        @capture
        def step() -> Any:
            return p.redistribute(placements=R).redistribute(placements=S0).to_local()[1:]

        for _ in range(3):
            step().zero_()
        assert torch.equal(p.full_tensor(), torch.ones(4, 3))

    simulate(run, world_size=2)


def test_what_is_handed_out_is_no_object_of_the_user() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        p = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, S0))
        w = nn.Parameter(torch.ones(3))
        held: dict[str, Any] = {"w": torch.zeros(3)}

        @capture
        def step(x: Any) -> Any:
            held["w"] = w.detach()
            y = x + 1
            return p.detach(), w.detach(), x.detach(), x.view_as(x), y, y.view_as(y)

        for _ in range(4):
            x = torch.ones(2)
            outs = step(x)
            assert not any(t.requires_grad for t in (*outs, held["w"]))
            assert outs[0].to_local() is not p.to_local()
            assert len({id(t) for t in (w, x, held["w"], *outs)}) == len(outs) + 3
            assert outs[1].data_ptr() == w.data_ptr()

    simulate(run, world_size=2)


def test_what_is_sent_is_read_until_it_has_arrived() -> None:
    def run() -> Any:
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        @capture
        def step(x: Any) -> Any:
            a = x * 2
            handle = current().all_gather_async(a, (0, 1))
            copy = a.clone()
            copy.add_(1)  # onto what is under way, if the copy were left out
            return handle.wait().sum(), copy

        for _ in range(3):
            step(torch.ones(4, 3))
        return str(step.last.step)

    assert "aten.clone" in simulate(run, world_size=2)[0]


# ---- inputs ------------------------------------------------------------------------------------------


class Held:
    """Two tensors of a step."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def both_ways(make: Callable[[], Any], calls: int = 6) -> Any:
    outs, step = [], None
    for wrap in (lambda f: f, capture):
        run, before = make()
        step, seen = wrap(run), []
        for i in range(calls):
            seen += [x.detach().clone() for x in step(*before(i))]
        outs.append(seen)
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
    return step


def test_an_argument_in_the_memory_of_the_state() -> None:
    def make() -> Any:
        memory = torch.arange(8.0)
        held = Held(memory[:4], memory[4:])

        def step(x: Any) -> Any:
            x, y = x.view(2, 2), held.b.view(2, 2)
            held.a.add_(held.b)
            return x * 1 + y * 3, held.a * 1

        return step, lambda i: [memory[4:] if i < 4 else memory[:4]]

    assert both_ways(make).captures == 2


def test_tensors_of_the_state_that_become_one() -> None:
    def make() -> Any:
        held = Held(torch.ones(4), torch.full((4,), 2.0))

        def step() -> Any:
            before = held.b * 2
            held.a.add_(1)
            return [before + held.b * 2]

        def arguments(i: int) -> Any:
            if i == 4:
                held.a = held.b
            return []

        return step, arguments

    assert both_ways(make).captures == 2


@pytest.mark.parametrize("how", ["one", "transposed"])
def test_gradients_that_come_to_lie_otherwise(how: str) -> None:
    def make() -> Any:
        a, b = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))

        def step() -> Any:
            before = b.grad * 2
            a.grad.add_(1)
            return [before + b.grad * 2, b.grad.reshape(6) * 1]

        def arguments(i: int) -> Any:
            a.grad, b.grad = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
            if i >= 4 and how == "one":
                b.grad = a.grad
            elif i >= 4:
                b.grad = torch.arange(6.0).view(3, 2).t()
            return []

        return step, arguments

    assert both_ways(make).captures == 2


def test_overlaps() -> None:
    x, y = torch.zeros(4, 4), torch.zeros(3)
    assert overlaps([x[0], x[1], y, 3.0, torch.empty(0), x[2:]]) == ()
    assert overlaps([y, x[1], y, x]) == ((0, 2, 0), (1, 3, -16))
    assert overlaps([x[:, :2], x[:, 2:], x[3]]) == ((0, 1, 8), (0, 2, 48), (1, 2, 40))
    assert overlaps([x, x[0], x[3, 2:]]) == ((0, 1, 0), (0, 2, 56))


# ---- parts -------------------------------------------------------------------------------------------


def strange(x: Any, y: Any) -> Any:
    a = y * 2 + 1
    b = a.sin().as_strided((2, 2), (1, 3), 2)  # counted from the beginning of the memory
    c = (b * 2 + 1).exp()
    d = (x * 2 + y).cos()  # x is negated when it is read
    return d + c.sum(), c + 1


def given(i: int) -> list[torch.Tensor]:
    return [
        torch.randn(4, 3, dtype=torch.complex128).conj().imag,
        torch.randn(9, 3, dtype=WIDE)[i : i + 4],
    ]


def test_parts_leave_out_what_a_compiler_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def run(graph: Any, fakes: Any, mode: Any) -> Any:
        graphs.append(str(graph.graph))
        return lambda tensors: graph(*tensors)

    monkeypatch.setattr(inductor, "compile_flat", run)
    step = capture(strange, compile="inductor")
    for i in range(4):
        arguments = given(i)
        for a, b in zip(step(*arguments), strange(*arguments), strict=True):
            torch.testing.assert_close(a, b)
    assert graphs
    loose = [n for n in step.last.compiled.step.nodes if n.kind == "call"]
    assert sum("as_strided" in n.name for n in loose) == 1
    argument = next(v for v, slot in step.last.step.inputs if slot.name == "0")
    assert any(argument in n.inputs for n in loose)
    assert not any(re.search("as_strided", text) for text in graphs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_parts_of_negated_and_moved_memory() -> None:
    step = capture(strange, compile="inductor")
    for i in range(4):
        arguments = given(i)
        for a, b in zip(step(*arguments), strange(*arguments), strict=True):
            torch.testing.assert_close(a, b)
