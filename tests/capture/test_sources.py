"""What a captured step reads beside names: arrays, settings, the environment, the clock, files, random numbers."""

from __future__ import annotations

import array
import collections
from collections.abc import Callable
import contextvars
import os
from pathlib import Path
import random
import time
from time import time as now
import types
from typing import Any
import weakref

import numpy as np
import pytest
import torch

from shardwise import capture
from shardwise.errors import CaptureError


def same(fn: Callable[[Any], Any], *changes: Callable[[], Any], captures: int) -> None:
    """After each change the captured function does what the function does."""
    step = capture(fn)
    for change in (lambda: None, *changes):
        change()
        for _ in range(3):
            x = torch.randn(4)
            assert torch.equal(step(x), fn(x))
    assert step.captures == captures


def refused(fn: Callable[[Any], Any], match: str) -> None:
    step = capture(fn)
    step(torch.ones(4))
    with pytest.raises(CaptureError, match=match):
        step(torch.ones(4))


class Held:
    k: Any = 1.0


def test_numbers_in_arrays_and_buffers() -> None:
    small, large = np.ones(4), np.ones(5000)
    table, raw = array.array("d", [1.0, 2.0]), bytearray(b"\x01\x02")
    seen = torch.ones(3)
    view = seen.numpy()
    steps: list[tuple[Callable[[Any], Any], Callable[[], Any]]] = [
        (lambda x: x * small[1], lambda: small.fill(2.0)),
        (lambda x: x * torch.tensor(small), lambda: small.fill(3.0)),
        (lambda x: x * torch.from_numpy(small * 2), lambda: small.fill(4.0)),
        (lambda x: x * torch.as_tensor(large[:4]), lambda: large.fill(2.0)),
        (lambda x: x * torch.from_numpy(large * 3)[:4], lambda: large.fill(3.0)),
        (lambda x: x * table[0], lambda: table.__setitem__(0, 5.0)),
        (lambda x: x * raw[0], lambda: raw.__setitem__(0, 5)),
        (lambda x: x * float(view[0]), lambda: seen.fill_(2)),
    ]
    for fn, change in steps:
        same(fn, change, captures=2)


def test_long_lists_and_dicts_count_as_a_whole() -> None:
    numbers, longer = [1.0] * 200, [1.0] * 3000
    table = dict.fromkeys(range(500), 1.0)
    same(lambda x: x * numbers[150], lambda: numbers.__setitem__(150, 2.0), captures=2)
    same(lambda x: x * table[7], lambda: table.__setitem__(7, 2.0), captures=2)
    same(lambda x: x * torch.tensor(longer)[:4], lambda: longer.__setitem__(3, 2.0), captures=2)
    log = [0.0] * 100
    step = capture(lambda x: x * 2 if log else x)
    for i in range(40):  # what counts not costs one capture
        step(torch.ones(4))
        log.append(float(i))
    assert step.captures == 2


def test_a_tensor_of_an_array_that_is_too_large_to_compare_is_refused() -> None:
    data = np.zeros(1 << 24)
    refused(lambda x: x * torch.from_numpy(data[:4]), "too large to be compared")
    literal: Callable[[Any], Any] = lambda x: x * torch.tensor([1.0, 2.0, 3.0, data.ndim])  # noqa: E731
    same(literal, captures=1)


def test_an_array_that_the_step_writes_is_refused_and_as_it_was() -> None:
    counts = np.zeros(3)

    def step(x: Any) -> Any:
        counts[0] += 1
        return x * 2

    refused(step, "changes counts")
    assert counts.tolist() == [1, 0, 0]


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_TEST", raising=False)
    put: Callable[[str], Callable[[], Any]] = lambda x: (  # noqa: E731
        lambda: monkeypatch.setenv("SHARDWISE_TEST", x)
    )
    name = "SHARDWISE_" + "TEST"
    steps: list[Callable[[Any], Any]] = [
        lambda x: x * float(os.environ.get("SHARDWISE_TEST", "1")),
        lambda x: x * float(os.getenv("SHARDWISE_TEST") or 1),
        lambda x: x * float(os.environ.get(name, 1)),
    ]
    for step in steps:
        monkeypatch.delenv("SHARDWISE_TEST", raising=False)
        same(step, put("2"), put("3"), captures=3)


def test_settings_that_code_asks_for() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        same(
            lambda x: x * torch.get_num_threads(),
            lambda: torch.set_num_threads(threads + 1),
            captures=2,
        )
        same(
            lambda x: x * len(torch.get_float32_matmul_precision()),
            lambda: torch.set_float32_matmul_precision("medium"),
            captures=2,
        )
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_zeros_of_both_signs_in_settings() -> None:
    held, settings = Held(), {"z": (0.0, 1)}
    held.k = 0.0
    for change in (lambda: setattr(held, "k", -0.0), lambda: settings.update(z=(-0.0, 1))):
        same(lambda x: 1 / (x * 0 + 1) / (held.k * 1 + settings["z"][0] + x.abs() * 0), change, captures=2)  # fmt: skip


def test_objects_that_hold_others() -> None:
    data: dict[str, float] = {"a": 1.0}
    user, chain = collections.UserDict(a=1.0), collections.ChainMap(data, {"b": 1.0})
    proxy, held = types.MappingProxyType(data), Held()
    reference, variable = weakref.ref(held), contextvars.ContextVar("variable", default=1.0)

    class Meta(type):
        k = 1.0

    class Made(metaclass=Meta):
        pass

    steps: list[tuple[Callable[[Any], Any], Callable[[], Any]]] = [
        (lambda x: x * user["a"], lambda: user.update(a=2.0)),
        (lambda x: x * chain["a"], lambda: data.update(a=3.0)),
        (lambda x: x * proxy["a"], lambda: data.update(a=4.0)),
        (lambda x: x * reference().k, lambda: setattr(held, "k", 2.0)),  # pyright: ignore[reportOptionalMemberAccess]
        (lambda x: x * variable.get(), lambda: variable.set(2.0)),
        (lambda x: x * Made.k, lambda: setattr(Meta, "k", 2.0)),
    ]
    for fn, change in steps:
        same(fn, change, captures=2)


def test_names_that_come() -> None:
    class Base:
        k = 2.0

    class Derived(Base):
        pass

    def scaled(x: Any) -> Any:
        try:
            return x * a_scale  # pyright: ignore[reportUndefinedVariable]
        except NameError:
            return x

    def masked(x: Any) -> Any:
        return x if A_MASK is None else x * A_MASK

    space = globals()
    try:
        same(scaled, lambda: space.update(a_scale=3.0), captures=2)
        same(masked, lambda: space.update(A_MASK=torch.ones(4) * 2), captures=2)
    finally:
        space.pop("a_scale")
        space["A_MASK"] = None
    same(lambda x: x * Derived.k, lambda: setattr(Derived, "k", 3.0), captures=2)
    same(lambda x: x * 2 if hasattr(Derived, "j") else x, lambda: setattr(Derived, "j", 1), captures=2)  # fmt: skip


A_MASK: Any = None


def test_clocks() -> None:
    start, lines, held = time.time(), [], Held()
    held.k = time.perf_counter

    def timed(x: Any) -> Any:
        begin = time.perf_counter()
        y = x * 2
        lines.append(f"{time.perf_counter() - begin:.3f} {now() - begin}")
        return y

    same(timed, captures=2)  # one for the list that grows
    steps: list[Callable[[Any], Any]] = [
        lambda x: x * time.time(),
        lambda x: x * (time.time_ns() // 10**9),
        lambda x: x * 2 if time.time() - start < 1000 else x,
        lambda x: x * torch.tensor(now()),
        lambda x: x * held.k(),
    ]
    for step in steps:
        refused(step, r"reads the clock.*test_sources.py:\d+.*depends on that")
    assert time.time is now


def test_files(tmp_path: Path) -> None:
    scale, log = tmp_path / "scale", tmp_path / "log"
    scale.write_text("2")
    np.save(tmp_path / "x.npy", np.ones(4))

    def swallowed(x: Any) -> Any:
        try:
            with open(scale) as file:
                return x * float(file.read())
        except Exception:
            return x

    steps: list[Callable[[Any], Any]] = [
        swallowed,
        lambda x: x * float(scale.read_text()),
        lambda x: x * torch.from_numpy(np.load(tmp_path / "x.npy")),
    ]
    for step in steps:
        refused(step, "reads a file.*test_sources.py")

    def logged(x: Any) -> Any:
        with log.open("a") as file:
            file.write("x")
        with open("/proc/self/statm") as file:
            file.read()
        return x * 2

    same(logged, captures=1)


def test_generators_of_python_and_numpy() -> None:
    ours, theirs, old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
    steps: list[Callable[[Any], Any]] = [
        lambda x: x * ours.random(),
        lambda x: x * float(theirs.normal()),
        lambda x: x * float(old.normal()),
        lambda x: x * float(np.random.default_rng().normal()),
        lambda x: x * os.urandom(1)[0],
    ]
    for step in steps:
        refused(step, "random")
    states = ours.getstate()
    same(lambda x: x * 2 if ours else x, captures=1)
    assert ours.getstate() == states


def test_a_generator_that_the_step_makes_begins_anew_at_each_run() -> None:
    held = Held()
    held.k = 3

    def step(x: Any) -> Any:
        g = torch.Generator()
        g.manual_seed(held.k)
        y = torch.randn(4, generator=g) + torch.randn(4, generator=g)
        return x + y + torch.randn(4, generator=g.manual_seed(7))

    same(step, lambda: setattr(held, "k", 4), captures=2)
    hidden = [torch.Generator().manual_seed(1) for _ in range(2)]

    class Slots:
        def __call__(self, x: Any) -> Any:
            return x + torch.randn(4, generator=hidden[self.which()])

        def which(self) -> int:
            return 0

    captured, eager = capture(Slots()), [torch.Generator().manual_seed(1)]
    for _ in range(5):
        assert torch.equal(captured(torch.zeros(4)), torch.randn(4, generator=eager[0]))

    def seeded(x: Any) -> Any:
        g = torch.Generator()
        g.seed()
        return x + torch.randn(4, generator=g)

    refused(seeded, "seeds a random generator")
