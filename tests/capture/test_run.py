"""The executor's text: the cheapest way to make each call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import capture
from shardwise.capture.run import source_of


def text_of(fn: Any, *args: torch.Tensor) -> tuple[list[str], dict[str, Any]]:
    """The lines of a captured function that call something, and what they refer to; the function is right."""
    step = capture(fn)
    for _ in range(4):
        assert torch.equal(step(*args), fn(*args))
    text, names = source_of(step.last.step)
    return [line.strip() for line in text.split("\n") if " = " in line], names


def targets(lines: list[str], names: dict[str, Any]) -> list[Any]:
    found = [names.get(line.split(" = ")[1].split("(")[0]) for line in lines]
    return [f for f in found if f is not None]


def test_a_view_gets_its_sizes_one_by_one() -> None:
    lines, names = text_of(
        lambda x: x.view(4, 3).relu() + x.view(-1, 3).exp().view(4, 3),
        torch.randn(12),
    )
    views = [
        line
        for line in lines
        if names.get(line.split(" = ")[1].split("(")[0]) is torch.Tensor.view
    ]
    assert views
    assert not any("[" in line for line in views)


def test_a_view_of_no_dims() -> None:
    lines, names = text_of(lambda x: x.view([]) + 1, torch.randn(1))
    assert torch.Tensor.view in targets(lines, names)


def test_what_a_linear_layer_reshapes_is_a_view() -> None:
    layer = nn.Linear(3, 4, bias=False)
    lines, names = text_of(lambda x: layer(x).detach(), torch.randn(2, 5, 3))
    called = targets(lines, names)
    assert called.count(torch.Tensor.view) == 2
    assert {type(f).__name__ for f in called} == {"method_descriptor"}


def test_slices_of_the_first_dim_are_cut_by_brackets() -> None:
    def cut(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y[1:3].sum() + y[-2:].sum() + y[:1, 1:].sum() + y[0:4].sum() + y[::2].sum()

    lines, _ = text_of(cut, torch.randn(4, 3))
    assert sum(line.endswith("]") for line in lines) == 3  # all of y is y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_factor_is_a_tensor_and_the_product_the_same(dtype: torch.dtype) -> None:
    numbers = (0.1, 2, 0.0, -0.0, -1.0, 1e-40, 3e38, float("inf"), float("nan"))
    if not dtype.is_floating_point:
        numbers = (2, -3)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = [x, y.clone()]
        for a in numbers:
            found.append(x * a)
            found += torch._foreach_mul([x, y], a)
            found.append(torch.mul(x, a, out=torch.empty_like(x)))
        torch._foreach_mul_(found[:2], 3)
        torch._foreach_add_(found[1:3], numbers[0])
        found[0].mul_(numbers[0])
        found.append(found[0][0] * numbers[0])
        return torch.cat([f.reshape(-1) for f in (*found, *[1 / f for f in found[2:]])])

    def inputs() -> list[torch.Tensor]:
        return [
            (torch.randn(n, 5) * 10.0 ** torch.randint(-38, 38, (n, 5))).to(dtype)
            for n in (7, 3)
        ]

    step = capture(fn)
    for _ in range(4):
        given = inputs()
        again = [x.clone() for x in given]
        assert torch.equal(step(*given).view(-1).nan_to_num(7), fn(*again).nan_to_num(7))
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(given, again))
    lines, names = (t := source_of(step.last.step))[0].split("\n"), t[1]
    given_a_number = [
        line
        for line in lines
        if re.search(
            "mul|foreach_add", str(names.get(line.strip().split(" = ")[-1].split("(")[0]))
        )
        and re.search(r", -?[0-9.e+-]+[,)]", line)
    ]
    assert bool(given_a_number) == (dtype in (torch.bfloat16, torch.int64))


@pytest.mark.parametrize("lr", [0.1, 1e30])
def test_a_factor_that_is_known_at_the_run_only(lr: float) -> None:
    made = []
    for wrap in (lambda f: f, capture):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1, foreach=True)

        def step(x: torch.Tensor, layers: Any = layers, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            layers(x).sum().backward()
            optimizer.step()

        step = wrap(step)
        for i in range(5):
            optimizer.param_groups[0]["lr"] = lr if i == 4 else 0.1 / (i + 1)
            step(torch.ones(2, 2))
        made.append([p.detach().nan_to_num(7) for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    text, names = source_of(step.last.step)  # pyright: ignore[reportFunctionMemberAccess]
    decay = [line for line in text.split("\n") if ", dtype=" in line]
    assert len(decay) == 1
    assert names[decay[0].split("(")[0].strip()] is torch._foreach_mul_
