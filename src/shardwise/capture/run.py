"""The executor: a step as one Python function, without per-op overhead.

Overloads are bound without their Python layer, every value is a local variable and dies at its last use. It runs
below autograd (nothing is recorded, no view is tracked); written inputs get a new version at the end, so that a
graph which has saved one of them notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.ir import Step, Value, flatten
from shardwise.compat import below_autograd, direct_op

_OPERATORS = {"+", "-", "*", "/", "**", "%"}


def source_of(step: Step) -> tuple[str, dict[str, Any]]:
    """The function's text, and what it refers to."""
    nodes = list(flatten(step.nodes))
    last: dict[Value, int] = {}
    for at, n in enumerate(nodes):
        for v in (*n.inputs, *n.outs):
            last[v] = at
    for v in step.outputs:
        last[v] = len(nodes)
    dying: dict[int, list[Value]] = {}
    for v, at in last.items():
        dying.setdefault(at, []).append(v)
    names: dict[str, Any] = {}
    known: dict[int, str] = {}

    def constant(x: Any) -> str:
        if isinstance(x, (int, str, type(None), bool)):
            return repr(x)
        if isinstance(x, float) and x == x and abs(x) != float("inf"):
            return repr(x)
        name = known.get(id(x))
        if name is None:
            name = known[id(x)] = f"k{len(names)}"
            names[name] = x
        return name

    def text(x: Any) -> str:
        if isinstance(x, Value):
            return f"v{x.index}"
        if type(x) is list:
            return "[" + ", ".join(map(text, x)) + "]"
        if type(x) is tuple:
            return "(" + "".join(text(y) + ", " for y in x) + ")"
        return constant(x)

    def targets(x: Any) -> str:
        if isinstance(x, Value):
            return f"v{x.index}"
        if isinstance(x, (tuple, list)):
            inner = "".join(targets(y) + ", " for y in x)
            return f"({inner})" if x else "_"
        return "_"

    lines = ["def run(inputs):"]
    if step.inputs:
        lines.append("    (" + "".join(f"v{v.index}, " for v, _ in step.inputs) + ") = inputs")
        lines.append("    del inputs")
    unused = [v for v, _ in step.inputs if v not in last]
    if unused:
        lines.append("    del " + ", ".join(f"v{v.index}" for v in unused))
    for at, n in enumerate(nodes):
        if n.kind == "number" and n.name in _OPERATORS:
            call = f" {n.name} ".join(map(text, n.args))
        elif n.kind == "wait":
            call = f"{text(n.args[0])}.wait()"
        else:
            target = direct_op(n.target) if n.kind == "call" else n.target
            parts = [text(a) for a in n.args] + [f"{k}={text(a)}" for k, a in n.kwargs.items()]
            call = f"{constant(target)}({', '.join(parts)})"
        made = targets(n.result) if n.outs else ""
        lines.append(f"    {made} = {call}" if made else f"    {call}")
        gone = [v for v in dying.get(at, ())]
        if gone:
            lines.append("    del " + ", ".join(f"v{v.index}" for v in gone))
    outs = "".join(f"v{v.index}, " for v in step.outputs)
    lines.append(f"    return ({outs})")
    return "\n".join(lines), names


def executor(step: Step) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The step as a function of its inputs, in their order; gives the outputs.

    Args:
        step: The step; moves still in it run as they are.

    Returns:
        A function that takes the input tensors and numbers, and returns the outputs.
    """
    text, names = source_of(step)
    space: dict[str, Any] = dict(names)
    exec(compile(text, "<captured step>", "exec"), space)
    body = space["run"]
    written = {id(v) for v in step.written_inputs}
    places = [i for i, (v, _) in enumerate(step.inputs) if id(v) in written]

    def run(inputs: Sequence[Any]) -> tuple[Any, ...]:
        with torch.no_grad(), below_autograd():
            outs = body(inputs)
        touched: list[Tensor] = [inputs[i] for i in places]
        if touched:
            torch.autograd.graph.increment_version(touched)
        return outs

    return run
