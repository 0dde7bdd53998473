"""Whatever Python holds around a captured step: it is read, kept true, or refused before anything changes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
import copy
from dataclasses import dataclass
import random
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
from shardwise.errors import CaptureError

Case = Callable[[Any], Any]


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def rows(x: torch.Tensor) -> DTensor:
    return distribute_tensor(x, mesh(), [Shard(0)])


def noise() -> DTensor:
    return rows(torch.randn(4, 4))


def linear(out: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return distribute_module(nn.Linear(4, out), mesh())


def whole(x: Any) -> Any:
    """A copy without layouts."""
    if isinstance(x, DTensor):
        return x.detach().full_tensor().clone()
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        return [whole(y) for y in x]
    return x


def weights(model: nn.Module, optimizer: Any = None) -> list[Any]:
    found = [whole(p) for p in model.parameters()] + [whole(p.grad) for p in model.parameters()]
    if optimizer is not None:
        found += [whole(list(optimizer.state[p].values())) for p in model.parameters()]
    return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def same(case: Case) -> None:
    """A case does eagerly and captured the same, bit for bit."""

    def run() -> None:
        torch.manual_seed(5)
        eager = whole(case(lambda f: f))
        torch.manual_seed(5)
        captured = whole(case(capture))
        assert equal(eager, captured), (eager, captured)

    simulate(run, world_size=2)


def refused(case: Case, match: str) -> None:
    def run() -> None:
        with pytest.raises(CaptureError, match=match):
            case(capture)

    simulate(run, world_size=2)


def training(model: nn.Module, optimizer: Any) -> Any:
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


# ---- arguments and results ---------------------------------------------------------------------------


def test_arguments_that_share_memory_have_a_step_of_their_own() -> None:
    def case(wrap: Any) -> Any:
        step = wrap(lambda a, b: (a.add_(1) + b, a - b))
        x, y = rows(torch.ones(4, 2)), rows(torch.full((4, 2), 5.0))
        pairs = [(x, x), (x, x), (x, y), (y, x), (x, x)]
        plain = torch.arange(4.0)
        pairs += [(plain[:2], plain[:2]), (plain[:2], plain[2:]), (plain[:2], plain[:2])]
        return [whole(step(*pair)) for pair in pairs]

    same(case)


def test_an_argument_that_is_a_parameter() -> None:
    def case(wrap: Any) -> Any:
        model = linear()

        def step(x: Any, p: Any) -> Any:
            with torch.no_grad():
                model.weight.mul_(0.5)
            return model(x).sum() + p.sum()

        step = wrap(step)
        x = rows(torch.ones(4, 4))
        other = distribute_tensor(torch.ones(3, 4), mesh(), [Replicate()])
        return [whole(step(x, p)) for p in (other, other, model.weight, model.weight, other)]

    same(case)


def test_a_constant_that_is_returned_is_the_users_to_write() -> None:
    def case(wrap: Any) -> Any:
        step, out = wrap(lambda x: (x + 1, torch.tensor(3.0))), []
        for _ in range(4):
            _, three = step(noise())
            out.append(whole(three))
            three.add_(1)
        return out

    same(case)


def test_gradients_of_arguments() -> None:
    def case(wrap: Any) -> Any:
        model = linear()

        def step(x: Any, y: Any) -> Any:
            loss = model(x).square().mean() + (y * 3).sum()
            loss.backward()
            return loss

        step, out = wrap(step), []
        for _ in range(4):
            x = noise().detach().requires_grad_()
            y = torch.ones(2, requires_grad=True)
            step(x, y)
            out += [whole(x.grad), y.grad]
        return out, weights(model)

    same(case)


def test_a_method() -> None:
    def case(wrap: Any) -> Any:
        class Trainer:
            def __init__(self) -> None:
                self.model = linear()

            step = wrap(lambda self, x: self.model(x).sum())

        a, b = Trainer(), Trainer()
        nn.init.ones_(b.model.weight)
        return [whole(t.step(noise())) for t in (a, b, a, b, a, b)]

    same(case)


def test_models_as_arguments_each_have_their_modes() -> None:
    def case(wrap: Any) -> Any:
        models = [nn.Sequential(linear(), nn.Dropout(p)) for p in (0.5, 0.2)]
        step, out = wrap(lambda m, x: m(x)), []
        for i in range(8):
            models[0].train(i < 4)
            out.append(whole(step(models[i % 2], noise())))
        return out

    same(case)


def test_a_copy_has_no_steps_of_the_original() -> None:
    def case(wrap: Any) -> Any:
        class Call:
            def __init__(self) -> None:
                self.model = linear()

            def __call__(self, x: Any) -> Any:
                return self.model(x)

        call = Call()
        step = wrap(call)
        out = [whole(step(noise())) for _ in range(3)]
        twin = copy.deepcopy(step)
        nn.init.ones_(getattr(twin, "fn", twin).model.weight)
        return out + [whole(f(noise())) for f in (twin, twin, twin, step)]

    same(case)


def test_virtual_ranks_may_share_a_captured_function() -> None:
    step = capture(lambda x: x * 2)

    def run() -> None:
        for _ in range(4):
            x = noise()
            assert torch.equal(step(x).full_tensor(), x.full_tensor() * 2)
        assert (step.calls, step.captures) == (4, 1)

    simulate(run, world_size=2)


# ---- what is left in Python ----------------------------------------------------------------------------


def test_tensors_that_are_put_in_attributes_dicts_and_lists() -> None:
    def case(wrap: Any) -> Any:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = linear()
                self.register_buffer("mean", rows(torch.zeros(4, 3)))

            def forward(self, x: Any) -> Any:
                h = self.inner(x)
                if self.training:
                    self.last = h.detach()
                self.mean = self.mean * 0.9 + h.detach()
                return h.sum()

        model, log, average = Model().eval(), {}, [torch.zeros(())]

        def step(x: Any) -> Any:
            log["loss"] = loss = model(x).detach()
            average[0] = average[0] * 0.9 + loss.full_tensor()
            return loss

        step, out = wrap(step), []
        for i in range(6):
            model.train(i > 2)
            step(noise())
            out += [whole(x) for x in (model.mean, log["loss"], *average)]
        return out, whole(model.last)

    same(case)


def test_modes_that_the_step_sets() -> None:
    def case(wrap: Any) -> Any:
        model = nn.Sequential(linear(), nn.Dropout(0.5))
        weight = model[0].weight

        def step(x: Any) -> Any:
            model.eval()
            loss = model(x).sum()
            loss.backward()
            weight.requires_grad_(False)
            return loss

        step, out = wrap(step), []
        for _ in range(5):
            model.train()
            weight.requires_grad_(True)
            out += [whole(step(noise())), model[1].training, weight.requires_grad]
        return out, weights(model)

    same(case)


def into(body: Any) -> Case:
    def case(wrap: Any) -> None:
        step = wrap(body)
        for _ in range(3):
            step(noise())

    return case


def test_a_list_that_grows_by_tensors_is_refused_and_as_it_was() -> None:
    found: list[Any] = []

    def run() -> None:
        mine: list[Any] = []

        def step(x: Any) -> Any:
            mine.append(x.sum())
            return x * 2

        captured = capture(step)
        captured(noise())
        with pytest.raises(
            CaptureError, match=r"leaves a tensor or a number of the step in mine\[1\]"
        ):
            captured(noise())
        found.append(len(mine))

    simulate(run, world_size=2)
    assert found == [1, 1]


def test_what_a_run_would_not_do_again_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: Any) -> Any:
            self.n += 1
            return x * self.n

    @dataclass
    class Out:
        x: Any

    model = nn.Linear(4, 4)

    def other_memory(x: Any) -> Any:
        model.weight.data = model.weight.data * 0.9
        return x

    def seeded(x: Any) -> Any:
        torch.manual_seed(3)
        return torch.rand_like(x)

    def mutated(wrap: Any) -> None:
        step = wrap(lambda xs: xs.append(xs[0] * 2))
        for _ in range(2):
            step([noise()])

    refused(lambda wrap: into(Counter())(wrap), r"changes Counter\.n, a Python number")
    refused(into(lambda x: Out(x * 2)), "returns an object with tensors in it")
    refused(into(lambda x: x * random.random()), "Python's random")
    refused(into(lambda x: (x * i for i in range(2))), "returns a generator")
    refused(into(seeded), "seeds a random generator")
    refused(into(lambda x: f"{x.sum().item():.3f}"), "asks for the value of a tensor")
    refused(into(lambda x: x.full_tensor().numpy()), "asks for the value of a tensor")
    refused(into(other_memory), "other memory")
    assert model(torch.ones(4)).isfinite().all()
    refused(mutated, "changes a list or dict that is an argument")
    refused(
        lambda wrap: (
            [wrap(lambda x: x)(torch.ones(2).numpy()) for _ in range(1)]
            and [f(torch.ones(2).numpy()) for f in [wrap(lambda x: x)] for _ in range(2)]
        ),
        "numpy array",
    )


def test_a_gradient_that_would_leave_the_step_is_refused() -> None:
    def case(wrap: Any) -> None:
        before, model = linear(4), linear()
        step = wrap(lambda h: model(h).square().mean().backward())
        for _ in range(3):
            step(before(noise()))

    refused(case, r"leaves the step through argument 0.*computed outside")


# ---- what the function names ---------------------------------------------------------------------------


def test_names_that_come_to_mean_something_else() -> None:
    def case(wrap: Any) -> Any:
        model, scale, settings, few = linear(), 1.0, {"a": 1.0}, [1.0]
        drop = nn.Dropout(0.5)
        table = OrderedDict(w=rows(torch.ones(4, 3)))

        def step(x: Any) -> Any:
            return drop(model(x)) * scale * settings["a"] * few[0] * table["w"]

        step, out = wrap(step), []
        for i in range(9):
            if i == 3:
                model = linear()
                nn.init.ones_(model.weight)
            if i == 4:
                scale = 2.0
            if i == 5:
                settings["a"] = few[0] = 3.0
            if i == 6:
                drop.p = 0.1
            if i == 7:
                table["w"] = table["w"] * 2
            if i == 8:
                scale = settings["a"] = few[0] = 1.0
            out.append(whole(step(noise())))
        return out

    same(case)


def test_keys_elements_and_slots_that_come_and_change() -> None:
    class Slots:
        __slots__ = ("k", "model")

    def case(wrap: Any) -> Any:
        held, models, table, ring = Slots(), [linear(4)], {}, deque([rows(torch.ones(4, 4))], 2)
        held.model, held.k = linear(4), 1.0

        def step(x: Any) -> Any:
            for m in models:
                x = m(x)
            x = held.model(x) * held.k + table.get("p", 0)
            return x * sum(ring)

        step, out = wrap(step), []
        for i in range(9):
            if i == 3:
                table["p"] = rows(torch.ones(4, 4))
            if i == 4:
                table["p"] = rows(torch.ones(4, 4) * 2)
            if i == 5:
                models.append(linear(4))
            if i == 6:
                held.k, held.model = 2.0, linear(4)
            if i > 6:
                ring.append(rows(torch.ones(4, 4) * i))
            out.append(whole(step(noise())))
        return out

    same(case)


def test_modules_and_parameters_that_are_replaced() -> None:
    def case(wrap: Any) -> Any:
        model = nn.Sequential(linear(4), nn.ReLU())
        step, out = wrap(lambda x: model(x).square().mean().backward()), []
        for i in range(7):
            if i == 3:
                model[1] = nn.Tanh()
            if i == 4:
                ones = distribute_tensor(torch.ones(4, 4), mesh(), [Replicate()])
                model[0].weight = nn.Parameter(ones)
            if i == 5:
                model.double()
            model.zero_grad()
            step(noise().to(model[0].weight.dtype))
            out.append(weights(model))
        return out

    same(case)


def test_hooks_and_forwards_that_come_and_go() -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        step, out, handle = wrap(lambda x: model(x)), [], None
        for i in range(8):
            if i == 3:
                model.forward = lambda x: x * 2
            if i == 4:
                del model.forward
                handle = model.register_forward_hook(lambda m, args, y: y + 1)
            if i == 6 and handle is not None:
                handle.remove()
                model.register_forward_hook(lambda m, args, y: y + 2)
            out.append(whole(step(noise())))
        return out

    same(case)


def test_gradients_outside_modules_and_between_calls() -> None:
    def case(wrap: Any) -> Any:
        loose = [
            linear().weight.detach().clone().requires_grad_(),
            torch.ones(4, requires_grad=True),
        ]
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any) -> None:
            (model(x).square().mean() + (x @ loose[0].t()).mean()).backward()
            (loose[1] * 2).sum().backward()

        step, out = wrap(step), []
        for i in range(9):
            step(noise())
            out += [weights(model), *[whole(x.grad) for x in loose]]
            if i % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return out

    same(case)


# ---- optimizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[1, 1, 1, 2, 3], [0.1, 0.1, 0.1, torch.tensor(0.2), 0.3]])
def test_learning_rates_of_any_type(values: list[Any]) -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, out = wrap(training(model, optimizer)), []
        for lr in values:
            optimizer.param_groups[0]["lr"] = lr
            out.append(whole(step(noise())))
        return out, weights(model)

    same(case)


@pytest.mark.parametrize(
    ("kind", "how"),
    [(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.AdamW, {})],
)
def test_hyperparameters_that_change_at_each_step_become_inputs(kind: Any, how: Any) -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        optimizer = kind(model.parameters(), lr=0.1, **how)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)
        step, out = wrap(training(model, optimizer)), []
        for _ in range(20):
            out.append(whole(step(noise())))
            schedule.step()
        assert getattr(step, "captures", 2) == 2
        return out, weights(model, optimizer)

    same(case)


def test_a_hyperparameter_that_becomes_zero_is_another_step() -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step, out = wrap(training(model, optimizer)), []
        for decay in (0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.5, 0.6):
            optimizer.param_groups[0]["weight_decay"] = decay
            out.append(whole(step(noise())))
        return out, weights(model)

    same(case)


def test_an_optimizer_that_makes_new_state_runs_eagerly_once() -> None:
    def case(wrap: Any) -> Any:
        first, second, third = linear(4), linear(4), linear()
        model = nn.Sequential(first, second, third)
        first.requires_grad_(False)
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.1)
        step, out = wrap(training(model, optimizer)), []
        for i in range(8):
            if i == 3:
                first.requires_grad_(True)
            if i == 5:
                optimizer.add_param_group({"params": list(third.parameters()), "lr": 0.01})
            out.append(whole(step(noise())))
        assert getattr(step, "captures", 3) == 3
        return out, weights(model, optimizer)

    same(case)


def test_an_optimizer_that_the_step_does_not_use_does_not_keep_it_eager() -> None:
    def run() -> None:
        model, other = linear(), linear()
        both = {
            "a": torch.optim.Adam(model.parameters()),
            "b": torch.optim.Adam(other.parameters()),
        }
        step = capture(lambda x: training(model, both["a"])(x))
        for _ in range(3):
            step(noise())
        assert step.captures == 1

    simulate(run, world_size=2)


def test_an_optimizer_that_counts_in_python_is_refused() -> None:
    class Counting(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p.add_(p.grad, alpha=-0.1 / state["n"])

    def case(wrap: Any) -> None:
        model = linear()
        step = wrap(training(model, Counting(model.parameters(), {})))
        for _ in range(3):
            step(noise())

    refused(case, "'n' in its state")


def test_a_grad_scaler_with_a_fused_optimizer() -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        step, out = wrap(step), []
        for i in range(6):
            x = torch.randn(4, 4)
            x[0, 0] = float("inf") if i == 4 else 0.0
            step(rows(x))
            out.append(scaler.get_scale())
        return out, weights(model, optimizer)

    same(case)
