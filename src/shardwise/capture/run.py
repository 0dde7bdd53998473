"""The executor: a step as one Python function, without per-op overhead.

Calls are bound to what parses arguments fastest (``binding.py``), every value is a local variable and dies at its last use. It runs
below autograd (nothing is recorded, no view is tracked); written inputs get a new version at the end, so that a
graph which has saved one of them notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.binding import binding
from shardwise.capture.ir import Node, Step, Value, flatten, values_in
from shardwise.compat import below_autograd

_ATEN = torch.ops.aten
# Torch makes a tensor of a number: for a list, one for each entry. In these dtypes it may as well be given one.
_WITH_A_NUMBER = {
    _ATEN.mul.Tensor,
    _ATEN.mul_.Tensor,
    _ATEN.mul.out,
    _ATEN._foreach_mul.Scalar,
    _ATEN._foreach_mul_.Scalar,
    _ATEN._foreach_add_.Scalar,
}
MANY = 4  # entries of a list that are worth a tensor made at each run
_FACTORS = {(torch.float32, "cpu"), (torch.float64, "cpu")}
_OPERATORS = {"+", "-", "*", "/", "**", "%"}


class _Writer:
    """Writes the text of the function, and collects what it refers to."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._factors: dict[Any, Tensor] = {}

    def constant(self, x: Any) -> str:
        """A plain argument."""
        if (
            x is None
            or isinstance(x, (int, str))
            or (isinstance(x, float) and math.isfinite(x))
        ):
            return repr(x)
        name = self._known.get(id(x))
        if name is None:
            name = self._known[id(x)] = f"k{len(self.names)}"
            self.names[name] = x
        return name

    def text(self, x: Any) -> str:
        """An argument, or a result to take apart."""
        if isinstance(x, Value):
            return f"v{x.index}"
        if type(x) is list:
            return "[" + ", ".join(map(self.text, x)) + "]"
        if type(x) is tuple:
            return "(" + "".join(self.text(y) + ", " for y in x) + ")"
        return self.constant(x)

    def factor(self, x: Any, dtype: torch.dtype) -> str:
        """A number as the tensor that torch would make of it, for each entry of a list anew."""
        if isinstance(x, Value):
            make = self.constant(torch.tensor)  # scalar_tensor refuses what is too large
            return f"{make}({self.text(x)}, dtype={self.constant(dtype)})"
        known = self._factors.setdefault((repr(x), dtype), torch.tensor(float(x), dtype=dtype))
        return self.constant(known)

    def targets(self, x: Any) -> str:
        """What a result is assigned to."""
        if isinstance(x, Value):
            return f"v{x.index}"
        if isinstance(x, (tuple, list)) and x:
            return "(" + "".join(self.targets(y) + ", " for y in x) + ")"
        return "_"

    def line(self, n: Node) -> str:
        """A node as a statement."""
        if n.kind == "number" and n.name in _OPERATORS:
            call = f" {n.name} ".join(map(self.text, n.args))
        elif n.kind == "wait":
            call = f"{self.text(n.args[0])}.wait()"
        elif _is_slice(n):
            x, _, first, end = n.args
            call = f"{self.text(x)}[{first}:{end}]"
        else:
            target = binding(n) if n.kind == "call" else n.target
            args = n.args
            if target is Tensor.view and len(args) == 2 and isinstance(args[1], list):
                args = (args[0], *(args[1] or [[]]))  # sizes one by one are parsed faster
            parts = [self.text(a) for a in args]
            if n.info.get(
                "consumes"
            ):  # it empties the list: nothing else may hold what it held
                parts[0] = "taken"
            dtype = _factor_dtype(n)
            if dtype is not None:
                parts[1] = self.factor(args[1], dtype)
                if n.target is _ATEN._foreach_add_.Scalar:
                    # a list of tensors is taken as it is
                    parts[1] = f"[{parts[1]}] * {len(args[0])}"
            parts += [f"{k}={self.text(a)}" for k, a in n.kwargs.items()]
            call = f"{self.constant(target)}({', '.join(parts)})"
        return f"{self.targets(n.result)} = {call}" if n.outs else call


def _factor_dtype(n: Node) -> torch.dtype | None:
    """The dtype of the tensor that a call may be given in place of a number; None: leave it the number."""
    if n.kind != "call" or n.target not in _WITH_A_NUMBER or len(n.args) != 2:
        return None
    number, values = n.args[1], list(values_in((n.args[0], n.kwargs)))
    small = type(number) is int and abs(number) < 2**24
    many = isinstance(number, Value) and number.fake is None and len(values) >= MANY
    if not (type(number) is float or small or many):
        return None
    kinds = {(v.fake.dtype, v.fake.device.type) for v in values if v.fake is not None}
    (kind,) = kinds if len(kinds) == 1 else [(None, "")]
    return kind[0] if kind in _FACTORS else None


def _is_slice(n: Node) -> bool:
    """Whether a node is a slice of the first dim, which Python's own brackets take in half the time."""
    return (
        n.kind == "call"
        and n.target is _ATEN.slice.Tensor
        and not n.kwargs
        and len(n.args) == 4
        and n.args[1] == 0
        and type(n.args[2]) is type(n.args[3]) is int
        and n.args[0].fake.ndim > 0
    )


def source_of(step: Step) -> tuple[str, dict[str, Any]]:
    """The function's text, and what it refers to."""
    nodes = list(flatten(step.nodes))
    last: dict[Value, int] = {v: -1 for v, _ in step.inputs}
    for at, n in enumerate(nodes):
        for v in (*n.inputs, *n.outs):
            last[v] = at
    for v in step.outputs:
        last[v] = len(nodes)
    dying: dict[int, list[str]] = {}
    for v, at in last.items():
        dying.setdefault(at, []).append(f"v{v.index}")
    writer = _Writer()
    lines = ["def run(inputs):"]
    if step.inputs:
        lines.append("    (" + "".join(f"v{v.index}, " for v, _ in step.inputs) + ") = inputs")
    for at in range(-1, len(nodes)):
        gone = dying.get(at, [])
        if at >= 0:
            n = nodes[at]
            if n.info.get("consumes"):
                inside = {f"v{v.index}" for v in n.args[0]}
                lines.append(f"    taken = {writer.text(n.args[0])}")
                lines += _deleted([v for v in gone if v in inside])
                gone = [v for v in gone if v not in inside]
            lines.append("    " + writer.line(n))
        lines += _deleted(gone)
    lines.append("    return (" + "".join(f"v{v.index}, " for v in step.outputs) + ")")
    return "\n".join(lines), writer.names


def _deleted(names: list[str]) -> list[str]:
    return ["    del " + ", ".join(names)] if names else []


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
    roots = {v.root for v, _ in step.inputs if v.kind == "tensor"}
    shown = [i for i, v in enumerate(step.outputs) if v.kind == "tensor" and v.root in roots]

    def run(inputs: Sequence[Any]) -> tuple[Any, ...]:
        with torch.no_grad():
            with below_autograd():
                outs = body(inputs)
            if shown:  # a view of a parameter would require grad, and refuse to be read later
                out = list(outs)
                for i in shown:
                    out[i] = out[i].detach()
                outs = tuple(out)
        touched: list[Tensor] = [inputs[i] for i in places]
        if touched:
            torch.autograd.graph.increment_version(touched)
        return outs

    return run
