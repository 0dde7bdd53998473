"""Hand the local parts of a step to torch's compiler.

Each part (`parts.py`) is a flat graph of calls (`flat.py`) that inductor compiles once, on fake tensors, before
anything of the step has run. A run calls what inductor made directly: without guards, for the step's key has been
looked at, and without autograd's wrapper, for the step runs below autograd.

Rounding differs from eager mode (fused kernels): 1e-6 in a step in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
import time
from typing import Any

import torch

from shardwise.capture.cost import is_heavy
from shardwise.capture.flat import compiles, graph_of
from shardwise.capture.ir import Node, Step, Value
from shardwise.capture.parts import cut
from shardwise.capture.run import executor
from shardwise.compat import compile_flat, fake_mode
from shardwise.errors import CaptureError

MANY_KERNELS = 8  # matrix products and their like


@dataclass(frozen=True, slots=True)
class Compiled:
    """A step whose local parts are compiled.

    Attributes:
        run: The step as a function of its inputs; see `shardwise.capture.run.executor`.
        step: The step with its parts as nodes.
        parts: How many calls each part has.
        seconds: How long the compiler took.
    """

    run: Callable[[Sequence[Any]], tuple[Any, ...]]
    step: Step
    parts: tuple[int, ...]
    seconds: float

    @property
    def loose(self) -> int:
        """How many calls are in no part."""
        return sum(n.kind == "call" for n in self.step.nodes)


def compiled(step: Step) -> Compiled:
    """The step, its local parts compiled.

    Args:
        step: The step.

    Raises:
        CaptureError: There is no C++ compiler, or inductor failed; the message says which.
    """
    start, parts = time.perf_counter(), []

    def part(nodes: list[Node], takes: list[Value], gives: list[Value]) -> Node:
        parts.append(sum(n.kind == "call" for n in nodes))
        return _part(nodes, takes, gives)

    step = cut(step, compiles, part)
    return Compiled(executor(step), step, tuple(parts), time.perf_counter() - start)


def _part(nodes: list[Node], takes: list[Value], gives: list[Value]) -> Node:
    """A node that runs the nodes compiled; its arguments are a list of tensors, then numbers."""
    tensors = [v for v in takes if v.kind == "tensor"]
    numbers = [v for v in takes if v.kind == "number"]
    mode = fake_mode(shapes=True)
    fakes = _fakes_like(tensors, len(numbers), mode)
    try:
        call = _compiled(nodes, lambda: graph_of(nodes, tensors, numbers, gives), fakes, mode)
    except Exception as error:
        raise CaptureError(
            f"torch's compiler failed on a part of the step: {type(error).__name__}: {error}",
            tries=["install a C++ compiler (g++)", "capture without compile="],
        ) from error
    read = [i for i, v in enumerate(gives) if v.kind == "number"]
    return Node(
        "opaque",
        f"compiled[{len(nodes)}]",
        _with_numbers(call, read) if numbers or read else call,
        (tensors, *numbers),
        {},
        tuple(gives),
        tuple(gives),
        frozenset(r for n in nodes for r in n.reads),
        frozenset(r for n in nodes for r in n.writes),
        nodes[0].site,
        {"consumes": True},
    )


def _compiled(nodes: list[Node], graph: Callable[[], Any], fakes: list[Any], mode: Any) -> Any:
    """A graph compiled, its kernels called from C++ where there are many that cannot be fused."""
    if sum(map(is_heavy, nodes)) >= MANY_KERNELS:
        with suppress(Exception):  # not every call can be made from there
            return compile_flat(graph(), fakes, mode, all_cpp=True)
    return compile_flat(graph(), fakes, mode)


def _with_numbers(call: Callable[[list[Any]], Sequence[Any]], read: list[int]) -> Any:
    """A compiled part that takes numbers as one tensor, and gives some of its results as numbers."""

    def run(tensors: list[Any], *numbers: float) -> Sequence[Any]:
        if numbers:
            tensors.append(torch.tensor(numbers, dtype=torch.float64))
        outs = call(tensors)
        if read:
            outs = list(outs)
            for i in read:
                outs[i] = outs[i].item()
        return outs

    return run


def _fakes_like(values: Sequence[Value], numbers: int, mode: Any) -> list[Any]:
    """Fake tensors of their shapes and strides. None of those that the part writes shares memory (``parts.cut``)."""
    fakes: list[Any] = []
    with mode:
        for v in values:
            f = v.fake
            assert f is not None, "a tensor has a fake"
            made = torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=f.device)
            fakes.append(made)
        if numbers:
            fakes.append(torch.empty(numbers, dtype=torch.float64))
    return fakes
