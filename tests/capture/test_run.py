"""The executor's text: the cheapest way to make each call."""

from __future__ import annotations

from typing import Any

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
