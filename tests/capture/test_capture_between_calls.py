"""What changes between the calls of a captured step counts as it does eagerly, wherever code reads it."""

from __future__ import annotations

from collections.abc import Callable
import functools
import itertools
import types
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
    no_sync,
    simulate,
)
from shardwise.errors import AliasError, CaptureError

Case = Callable[[Any], Any]


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def noise(rows: int = 4) -> DTensor:
    return distribute_tensor(torch.randn(rows, 4), mesh(), [Shard(0)])


def full(shape: Any, value: float) -> DTensor:
    return distribute_tensor(torch.full(shape, value), mesh(), [Replicate()])


def linear(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    return distribute_module(nn.Linear(4, 4, **how), mesh())


def whole(x: Any) -> Any:
    """A copy without layouts."""
    if isinstance(x, DTensor):
        return x.detach().full_tensor().clone()
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return [whole(y) for y in x] if isinstance(x, (list, tuple)) else x


def weights(model: nn.Module) -> list[Any]:
    found = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    return whole(found)


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


def changed(fn: Any, *changes: Callable[[], Any]) -> Case:
    """Three calls, and one after each change."""

    def case(wrap: Any) -> Any:
        step = wrap(fn)
        out = [whole(step(noise())) for _ in range(3)]
        for change in changes:
            change()
            out.append(whole(step(noise())))
        return out

    return case


# ---- what code names ---------------------------------------------------------------------------------


def put(holder: Any, key: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(holder, key, value)


def test_what_methods_and_classes_read() -> None:
    def case(wrap: Any) -> Any:
        class Settings:
            scale = 1.0
            table = {"a": 1.0}

        class Loss:
            power = 1.0

            def __init__(self) -> None:
                self.alpha = 1.0
                self.weight: Any = None

            def __call__(self, x: Any) -> Any:
                y = self.inner(x) * self.half
                return y if self.weight is None else y * self.weight

            def inner(self, x: Any) -> Any:
                return x * self.power + self.fixed(x)

            @property
            def half(self) -> float:
                return self.alpha / 2

            @staticmethod
            def fixed(x: Any) -> Any:
                return x * Settings.scale * Settings.table["a"]

        loss = Loss()
        changes = [
            put(Settings, "scale", 2.0),
            lambda: Settings.table.update(a=3.0),
            put(Settings, "table", {"a": 5.0}),
            put(loss, "alpha", 2.0),
            put(Loss, "power", 3.0),
            put(loss, "power", 4.0),
            put(loss, "weight", full((4,), 2.0)),
            put(loss, "weight", full((4,), 3.0)),
            put(Loss, "inner", lambda self, x: x),
        ]
        return changed(lambda x: loss(x), *changes)(wrap)

    same(case)


def test_what_a_library_holds() -> None:
    def case(wrap: Any) -> Any:
        library: Any = types.ModuleType("users_library")
        exec("scale = 1.0\ndef f(x):\n    return x * scale", vars(library))
        changes = [put(library, "scale", 2.0), put(library, "f", lambda x: x + 1)]
        return changed(lambda x: library.f(x) * library.scale, *changes)(wrap)

    same(case)


def test_what_is_asked_for_by_a_name_that_is_computed() -> None:
    class Deep:
        k = 1.0

    def case(wrap: Any) -> Any:
        weights_of, steps, kinds = {"a": 1.0, 3: 2.0}, list(range(20)), {"relu"}
        held: Any = Deep()
        held.w_a = 1.0
        inner: Any = held
        for _ in range(5):
            inner.next = inner = Deep()
        inner.weight = full((4,), 1.0)
        name = "a"

        @functools.lru_cache
        def cached(x: float) -> float:
            return x * weights_of[3]

        def chain(depth: int) -> Any:
            return (lambda x: x * inner.k) if depth == 0 else lambda x: chain(depth - 1)(x)

        last = chain(9)

        def step(x: Any, more: Any = (1.0,)) -> Any:
            for _, w in weights_of.items():
                x = x * w
            x = x.relu() if "relu" in kinds else x
            x = last(x) * steps[15] * getattr(held, "w_" + name) * more[0]
            return x * held.next.next.next.next.next.weight * cached(1.0)

        changes = [
            lambda: weights_of.update(a=3.0),
            lambda: weights_of.update(b=2.0),
            lambda: steps.__setitem__(15, 7),
            put(held, "w_a", 2.0),
            kinds.clear,
            put(inner, "k", 2.0),
            put(inner, "weight", full((4,), 2.0)),
            lambda: (cached.cache_clear(), weights_of.__setitem__(3, 5.0)),
            put(step, "__defaults__", ((2.0,),)),
        ]
        return changed(step, *changes)(wrap)

    same(case)


def test_dicts_with_methods_of_their_own() -> None:
    class Registry(dict[str, Any]):
        def get(self, key: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return [self[key]]

    def run() -> None:
        registry = Registry(a=1.0)

        def step(x: Any, ask: bool) -> Any:
            y = x * registry.get("a")[0]
            return y if not ask or y.sum() > 0 else -y

        captured = capture(step)
        for i in range(4):
            x = noise()
            assert torch.equal(whole(captured(x, False)), whole(x) * registry["a"])
            registry["a"] = i // 2
        with pytest.raises(CaptureError, match="asks for the value of a tensor"):
            captured(noise(), True)
        assert registry == {"a": 1}

    simulate(run, world_size=2)


def test_counters_that_the_step_does_not_read_cost_one_capture() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.seen, self.best = linear(), 0, 1.0

        def step(self, x: Any) -> Any:
            return self.model(x)

    def run() -> None:
        trainer, log = Trainer(), {"calls": 0}
        step = capture(lambda x: trainer.step(x) if log is not None else x)
        for i in range(30):
            x = noise()
            got = step(x)
            assert torch.equal(got.full_tensor(), trainer.model(x).full_tensor())
            trainer.seen, trainer.best, log["calls"] = i, 1.0 / (i + 1), i
        assert step.captures == 2

    simulate(run, world_size=2)


def test_methods_of_modules_beside_forward() -> None:
    class Model(nn.Module):
        gamma = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.alpha = 1.0

        def loss(self, x: Any) -> Any:
            return self.inner(x) * self.alpha * self.gamma

    def case(wrap: Any) -> Any:
        model = Model()
        Model.gamma = 1.0
        changes = [put(model, "alpha", 2.0), put(Model, "gamma", 3.0)]
        return changed(lambda x: model.loss(x), *changes)(wrap)

    same(case)


def test_settings_of_torchs_modules() -> None:
    def case(wrap: Any) -> Any:
        conv = distribute_module(nn.Conv1d(1, 1, 3, padding=1), mesh())
        model: Any = nn.Sequential(linear(), nn.Softmax(dim=-1), nn.LeakyReLU(0.1), nn.Tanh())
        model.scale = 1.0
        changes = [
            put(model, "scale", 2.0),
            put(model[1], "dim", 0),
            put(model[2], "negative_slope", 0.5),
            put(conv, "padding", (0,)),
            put(conv, "stride", (2,)),
        ]
        fn = lambda x: (model(x - 1) * model.scale, conv(x.unsqueeze(1)))  # noqa: E731
        return changed(fn, *changes)(wrap)

    same(case)


def test_modules_parameters_and_buffers_that_come_and_go() -> None:
    def case(wrap: Any) -> Any:
        model: Any = nn.Sequential(linear(bias=False))

        def step(x: Any) -> Any:
            model.zero_grad()
            y = model(x)
            for offset in model.buffers():
                y = y + offset
            y.square().mean().backward()
            return y.detach()

        step, out = wrap(step), []
        changes = {
            3: lambda: model.append(nn.Tanh()),
            5: put(model[0], "bias", nn.Parameter(full((4,), 1.0))),
            7: lambda: model[0].register_buffer("offset", full((4,), 1.0)),
            9: put(model[0], "bias", None),
            10: lambda: model.__delitem__(1),
        }
        for i in range(12):
            changes.get(i, lambda: None)()
            out += [whole(step(noise())), weights(model)]
        return out

    same(case)


# ---- hooks and modes -----------------------------------------------------------------------------------


def test_hooks_of_parameters_optimizers_and_all_modules() -> None:
    def case(wrap: Any) -> Any:
        model = nn.Sequential(linear(), nn.ReLU())
        weight, bias = model[0].weight, model[0].bias
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        def stepped(*_: Any) -> None:
            for p in model.parameters():
                p.grad.mul_(2)

        def doubled(p: Any) -> None:
            p.grad.mul_(2)

        places = [
            lambda: weight.register_hook(lambda g: g * 2),
            lambda: bias.register_post_accumulate_grad_hook(doubled),
            lambda: optimizer.register_step_pre_hook(stepped),
            lambda: nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 2),
        ]
        step, out = wrap(step), []
        kept = weight.register_hook(lambda g: g * 3)
        for place in [lambda: kept, *places]:
            handle = place()
            for i in range(4):
                if i == 2:
                    handle.remove()
                step(noise())
                out.append(weights(model))
        return out

    same(case)


def test_who_is_in_a_group_of_an_optimizer_and_its_step() -> None:
    def case(wrap: Any) -> Any:
        model = nn.Sequential(linear(), linear())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        group = optimizer.param_groups[0]

        def step(x: Any) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        captured, out = wrap(step), []
        bias = group["params"][-1]
        changes = {
            4: lambda: group["params"].pop(),
            7: lambda: group["params"].append(bias),
            10: lambda: group.update(params=[bias]),
            13: put(optimizer, "step", lambda: None),
        }
        for i in range(16):
            changes.get(i, lambda: None)()
            captured(noise())
            out.append(weights(model))
        return out

    same(case)


def test_keywords_of_a_partial_that_come() -> None:
    def case(wrap: Any) -> Any:
        scaled = functools.partial(lambda x, k=1.0, s=1.0: x * k * s, k=2.0)
        changes = [lambda: scaled.keywords.update(s=3.0), lambda: scaled.keywords.update(k=4.0)]
        return changed(lambda x: scaled(x), *changes)(wrap)

    same(case)


def test_no_sync_around_it() -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        step, out = wrap(lambda x: model(x).square().mean().backward()), []
        for i in range(8):
            if i % 3 == 2:
                step(noise())
            else:
                with no_sync():
                    step(noise())
            out.append([repr(p.grad.placements) for p in model.parameters()])
            out.append(weights(model))
        return out

    same(case)


# ---- arguments and results -----------------------------------------------------------------------------


def test_results_that_were_there_before_are_the_same_objects() -> None:
    def case(wrap: Any) -> Any:
        model = linear()

        def step(x: Any, plain: Any) -> Any:
            y = x * 2
            return x, plain, model.weight, y, [y]

        step, out = wrap(step), []
        for _ in range(4):
            x, plain = noise(), torch.ones(2)
            a, b, c, d, (e,) = step(x, plain)
            out.append([a is x, b is plain, c is model.weight, d is e])
        assert all(all(each) for each in out)
        return out

    same(case)


def test_gradients_that_are_returned_are_those_of_the_parameters() -> None:
    def case(wrap: Any) -> Any:
        torch.manual_seed(0)
        models = linear(), distribute_module(nn.Linear(4, 3), mesh(), cut)

        def step(x: Any, keep: bool) -> Any:
            out = []
            for model in models:
                model.zero_grad()
                model(x).square().mean().backward()
                out += [p.grad for p in model.parameters()]
                if not keep:
                    model.zero_grad()
            return out

        step, out, kept = wrap(step), [], []
        for i in range(8):
            grads = step(noise(), i % 2 == 0)
            params = [p for model in models for p in model.parameters()]
            out.append([g is p.grad for g, p in zip(grads, params)])
            out.append(whole(grads))
            if i > 4:
                for g in grads:
                    g.mul_(2)
            kept.append(grads)
            out += [weights(model) for model in models]
        assert all(out[0])
        return [*out, whole(kept)]

    same(case)


def cut(name: str, module: nn.Module, mesh: Any) -> None:
    for key, p in module.named_parameters(recurse=False):
        module.register_parameter(
            key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
        )


def test_a_result_that_is_a_copied_view_of_another_is_not_written_to() -> None:
    def run() -> None:
        step = capture(lambda x: (x[1], (x * 2)[1], x.t()))
        for i in range(4):
            x = noise()
            view, alone, transposed = step(x)
            assert torch.equal(whole(view) * 2, whole(alone))
            assert torch.equal(whole(view), whole(x)[1])
            alone.mul_(2)  # its base is nobody's
            transposed.mul_(2)
            if i:
                with pytest.raises(AliasError, match="would not reach its base"):
                    view.mul_(2)

    simulate(run, world_size=2)


def test_results_with_a_history_say_that_they_have_none() -> None:
    class Held:
        x: Any = None

    def run() -> None:
        model, held = linear(), Held()

        def step(x: Any) -> Any:
            held.x = model(x)
            return model(x), x.full_tensor() @ model.weight.full_tensor(), x * 2

        captured = capture(step)
        for _ in range(3):
            *results, without = captured(noise())
            assert not without.requires_grad
            for y in (*results, held.x):
                assert y.requires_grad
                y.mul_(2)
        for y in (*results, held.x):
            with pytest.raises(CaptureError, match="has no history"):
                (y.sum() + model.weight.sum()).backward()

    simulate(run, world_size=2)


def test_a_history_that_would_stay_in_an_argument_is_refused() -> None:
    def run() -> None:
        weight = linear().weight
        plain = nn.Parameter(torch.ones(4))
        steps: list[Callable[[Any, Any], Any]] = [
            lambda x, y: x.mul_(weight),
            lambda x, y: x[:, 0].mul_(weight.sum()),
            lambda x, y: y[0].copy_(plain),
            lambda x, y: torch._foreach_add_([y], [plain]),
        ]
        for fn in steps:
            step = capture(fn)
            step(noise(), torch.ones(2, 4))
            x, y = noise(), torch.ones(2, 4)
            before = whole(x)
            with pytest.raises(CaptureError, match="writes what has a history into a tensor"):
                step(x, y)
            assert torch.equal(whole(x), before)
            assert torch.equal(y, torch.ones(2, 4))
            assert x.is_leaf
            assert y.is_leaf
            assert not x.requires_grad
            assert not y.requires_grad

    simulate(run, world_size=2)


# ---- calls that reach the dispatcher by other ways --------------------------------------------------------


def test_transforms_of_functions() -> None:
    def case(wrap: Any) -> Any:
        model = linear()
        params = dict(model.named_parameters())

        def step(x: Any) -> Any:
            def loss(p: Any) -> Any:
                return torch.func.functional_call(model, p, (x,)).square().mean()

            grads, value = torch.func.grad_and_value(loss)(params)
            return value, *grads.values()

        return changed(step)(wrap)

    same(case)


def test_recurrent_layers() -> None:
    def case(wrap: Any) -> Any:
        model = distribute_module(nn.LSTM(4, 5), mesh())

        def step(x: Any, steps: int) -> Any:
            model.zero_grad()
            y, (h, c) = model(x.unsqueeze(0).expand(steps, -1, -1))
            y.square().mean().backward()
            return y.detach(), h.detach(), c.detach()

        step, out = wrap(step), []
        for i in range(6):
            out += [whole(step(noise(), 3 if i < 4 else 2)), weights(model)]
        return out

    same(case)


def test_values_of_arguments_are_not_those_of_the_recorded_call() -> None:
    def run() -> None:
        steps: list[Callable[[Any], Any]] = [
            lambda x: torch.from_numpy(x.numpy() * 2),
            lambda x: x * float(x.numpy()[0]),
            lambda x: x.tolist()[0] > 0 or x,
            lambda x: x.tensor_split(x.long().abs().clamp(max=1).cumsum(0)),
            lambda x: torch.from_dlpack(x) * 2,
            lambda x: x.set_(torch.ones(3)),
            lambda x: x.to_sparse().to_dense(),
        ]
        for fn in steps:
            step = capture(fn)
            step(torch.randn(3))
            with pytest.raises(CaptureError, match="cannot be captured"):
                step(torch.randn(3))
        aliases: list[Callable[[Any], Any]] = [
            lambda x: nn.Parameter(x).detach() * 2,
            lambda x: x.as_subclass(torch.Tensor) * 2,
            lambda x: x.data.mul_(2),
        ]
        for fn in aliases:
            step = capture(fn)
            for _ in range(4):
                x = torch.randn(3)
                assert torch.equal(fn(x.clone()), step(x))

    simulate(run, world_size=2)


def test_a_check_of_values_is_made_at_each_run() -> None:
    def step(x: Any) -> Any:
        torch._assert_async((x.full_tensor() < 100).all())
        return x * 2

    def run() -> None:
        captured = capture(step)
        for _ in range(3):
            captured(noise())
        with pytest.raises(RuntimeError):
            captured(noise() + 1000)

    simulate(run, world_size=2)


def test_what_an_iterator_gives_is_that_of_one_call() -> None:
    def run() -> None:
        data = torch.utils.data.TensorDataset(torch.arange(12.0))
        values: list[Any] = [
            iter(range(9)),
            itertools.count(1),
            zip(iter([1, 2, 3, 4])),
            (i for i in range(9)),
            enumerate([5, 6, 7, 8]),
            iter(torch.utils.data.DataLoader(data, batch_size=2)),
        ]
        for it in values:
            step = capture(lambda x, it=it: (x, next(it))[0] * 2)
            step(noise())
            with pytest.raises(CaptureError, match="an iterator"):
                step(noise())

    simulate(run, world_size=2)
