"""The quick way through a captured call: taken if nothing has changed, and only then."""

from __future__ import annotations

from collections.abc import Callable
import copy
from typing import Any

import pytest
import torch
from torch import nn

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
from shardwise.capture import step as steps


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def rows(x: torch.Tensor) -> DTensor:
    return distribute_tensor(x, mesh(), [Shard(0)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("seen", torch.zeros(()))
        self.scale = 2.0
        self.settings = {"power": 2, "names": ["a"]}

    def forward(self, x: Any) -> Any:
        self.seen += 1  # pyright: ignore[reportIndexIssue]
        y = self.two(self.drop(self.one(x).relu())) * self.scale
        return y ** self.settings["power"]


class Case:
    """A model with an optimizer and what is called, eager or captured."""

    def __init__(self, wrap: Callable[[Any], Any], *, spread: bool = True) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        if spread:
            distribute_module(self.model, mesh())
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=True)
        self.bonus: Any = torch.ones(())
        if spread:
            self.bonus = distribute_tensor(self.bonus, mesh(), [Replicate()])
        model, optimizer, bonus = self.model, self.optimizer, self.bonus

        def step(*xs: Any) -> Any:
            optimizer.zero_grad()
            loss = sum(model(x).mean() for x in xs) + bonus
            loss.backward()
            optimizer.step()
            return loss.detach()

        def put(x: Any) -> None:
            nonlocal bonus
            bonus = x

        self.put = put

        self.step = wrap(step)
        self.args: list[Any] = [rows(torch.randn(4, 4)) if spread else torch.randn(4, 4)]

    def call(self) -> Any:
        loss = self.step(*self.args)
        found = [loss, self.model.seen, *self.model.parameters()]
        found += [p.grad for p in self.model.parameters()]
        found += [x for s in self.optimizer.state.values() for x in s.values()]
        return [
            None
            if x is None
            else x.full_tensor().clone()
            if isinstance(x, DTensor)
            else x.clone()
            for x in (y.detach() if isinstance(y, torch.Tensor) else y for y in found)
        ]


def count_careful(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each call that is looked at with care."""
    seen: list[int] = []
    careful = steps.State.stale

    def stale(self: Any) -> Any:
        seen.append(1)
        return careful(self)

    monkeypatch.setattr(steps.State, "stale", stale)
    return seen


@pytest.mark.parametrize("spread", [True, False])
def test_a_call_that_finds_all_as_it_was_is_not_looked_at_with_care(
    monkeypatch: pytest.MonkeyPatch, spread: bool
) -> None:
    seen = count_careful(monkeypatch)

    def run() -> None:
        case, other = Case(capture, spread=spread), Case(lambda f: f, spread=spread)
        for i in range(8):
            if i == 5:
                del seen[:]
            for c in (case, other):
                for group in c.optimizer.param_groups:  # a schedule
                    group["lr"] = 0.1 / (i + 1)
                torch.manual_seed(i)
                x = torch.randn(4, 4)
                c.args = [rows(x) if spread else x]
            for a, b in zip(case.call(), other.call(), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
        assert case.step.captures == 1

    if spread:
        simulate(run, world_size=2)
    else:
        run()
    assert not seen


def test_a_place_that_the_step_fills_is_no_reason_to_look_at_all_with_care(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = count_careful(monkeypatch)
    model = nn.Linear(4, 4)
    model.hidden = torch.zeros(2, 4)  # pyright: ignore[reportArgumentType]
    other = copy.deepcopy(model)

    def step_of(m: Any) -> Any:
        def step(x: Any) -> Any:
            with torch.no_grad():
                m.hidden = torch.tanh(m(x) + m.hidden)
            return m.hidden.sum()

        return step

    captured, eager = capture(step_of(model)), step_of(other)
    for i in range(8):
        if i == 5:
            del seen[:]
        x = torch.randn(2, 4)
        assert torch.equal(captured(x), eager(x))
        assert torch.equal(model.hidden, other.hidden)
        if i == 6:
            model.hidden, other.hidden = torch.ones(2, 4), torch.ones(2, 4)  # pyright: ignore[reportArgumentType]
    assert not seen
    assert captured.captures == 1


# ---- what changes between two calls ----------------------------------------------------------------------


def new_weight(c: Case) -> None:
    c.model.two.weight = nn.Parameter(c.model.two.weight.detach() * 2)


def other_data(c: Case) -> None:
    c.model.two.weight.data = c.model.two.weight.detach() * 2


def new_local(c: Case) -> None:
    c.model.two.bias.data = c.model.two.bias.detach().to(torch.float32) + 1


def new_buffer(c: Case) -> None:
    c.model.seen = c.model.seen + 10


def new_layer(c: Case) -> None:
    c.model.one = distribute_module(nn.Linear(4, 6, bias=False), mesh())


def frozen(c: Case) -> None:
    c.model.one.weight.requires_grad_(False)


def evaluated(c: Case) -> None:
    c.model.drop.p = 0.5
    c.model.eval()


def attribute(c: Case) -> None:
    c.model.scale = 3.0


def item(c: Case) -> None:
    c.model.settings["power"] = 3


def longer(c: Case) -> None:
    c.model.settings["names"].append("b")


def hook(c: Case) -> None:
    c.model.two.register_forward_hook(lambda m, args, out: out * 2)


def closure(c: Case) -> None:
    c.put(distribute_tensor(torch.full((), 5.0), mesh(), [Replicate()]))


def betas(c: Case) -> None:
    c.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def decay(c: Case) -> None:
    c.optimizer.param_groups[0]["weight_decay"] = 0.5


def group(c: Case) -> None:
    state = c.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    c.optimizer.load_state_dict(copy.deepcopy(state))


def table(c: Case) -> None:
    p = c.model.one.bias
    c.optimizer.state[p] = {k: x.clone() * 2 for k, x in c.optimizer.state[p].items()}


def entry(c: Case) -> None:
    held = c.optimizer.state[c.model.one.bias]
    held["exp_avg"] = held["exp_avg"].clone() * 2


def gradient(c: Case) -> None:
    c.model.one.weight.grad = None


def layout(c: Case) -> None:
    c.args = [distribute_tensor(c.args[0].full_tensor(), mesh(), [Replicate()])]


def shape(c: Case) -> None:
    c.args = [rows(torch.ones(6, 4))]


def strides(c: Case) -> None:
    c.args = [rows(torch.ones(4, 4)).t()]


def dtype(c: Case) -> None:
    c.model.double()
    c.args = [c.args[0].double()]
    c.put(c.bonus.double())
    c.optimizer.load_state_dict(c.optimizer.state_dict())


def twice(c: Case) -> None:
    c.args = [c.args[0], c.args[0]]


def asked(c: Case) -> None:
    c.args = [c.args[0].detach().requires_grad_()]


CHANGES = [
    new_weight,
    other_data,
    new_local,
    new_buffer,
    new_layer,
    frozen,
    evaluated,
    attribute,
    item,
    longer,
    hook,
    closure,
    betas,
    decay,
    group,
    table,
    entry,
    gradient,
    layout,
    shape,
    strides,
    dtype,
    twice,
    asked,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(change: Callable[[Case], None]) -> None:
    def run() -> None:
        found = []
        for wrap in (lambda f: f, capture):
            case, rows_ = Case(wrap), []
            for i in range(7):
                if i == 4:
                    change(case)
                torch.manual_seed(i)
                rows_ += case.call()
            found.append(rows_)
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            same = a is None and b is None
            assert same or torch.equal(a, b), (i, len(found[0]) / 7, a, b)

    simulate(run, world_size=2)


def test_modes_are_seen() -> None:
    w = torch.randn(4, 4)
    step = capture(lambda x: (x @ w).cumsum(0))
    x = torch.randn(4, 4)
    plain = [step(x) for _ in range(4)][-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert step(x).dtype == torch.bfloat16
    assert step(x).dtype == plain.dtype
    with torch.inference_mode():
        assert step(x).is_inference()
    assert not step(x).is_inference()
    more = capture(lambda x: x + torch.ones(4))
    assert {more(x).dtype for _ in range(4)} == {torch.float32}
    torch.set_default_dtype(torch.float64)
    try:
        assert more(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_arguments_that_come_to_share_memory_are_seen() -> None:
    def run(wrap: Any) -> Any:
        step = wrap(lambda a, b: (a.add_(1), b * 2)[1])
        base, other = torch.zeros(4), torch.zeros(4)
        out = [step(torch.zeros(4), torch.zeros(4)) for _ in range(4)]
        return [*out, step(base, base), step(base, other), step(base[:4], base)]

    for a, b in zip(run(lambda f: f), run(capture), strict=True):
        assert torch.equal(a, b)


def test_plain_arguments_are_compared() -> None:
    step = capture(lambda x, *, power, how: x**power if how == "up" else -x)
    x = torch.arange(1.0, 4.0)
    for power, how in [(2, "up"), (2, "up"), (2, "up"), (3, "up"), (3.0, "up"), (2, "no")] * 2:
        assert torch.equal(step(x, power=power, how=how), x**power if how == "up" else -x)


def test_zeros_of_both_signs_and_nans_as_arguments() -> None:
    step = capture(lambda x, a: 1 / (x * a))
    x = torch.ones(3)
    for a in (0.0, 0.0, 0.0, -0.0, -0.0, 0.0, -0.0):
        assert torch.equal(step(x, a), 1 / (x * a))
    before = step.captures
    for _ in range(4):
        assert step(x, float("nan")).isnan().all()
    assert step.captures == before + 1
