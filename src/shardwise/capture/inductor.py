"""Hand the local parts of a step to torch's compiler.

The nodes between two things that cannot be compiled (a collective, a draw, an effect) make a *part*: a flat graph of
calls that inductor compiles once. Numbers of the run would be compiled in as constants; so a part takes them as
tensors of float64, and calls that take a number take such a tensor instead.

Rounding differs from eager mode (fused kernels, in-place updates out of order): 1e-4 after some Adam steps in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.capture.ir import RNG, Node, Step, Value, flatten, values_in
from shardwise.capture.run import executor
from shardwise.compat import compile_flat
from shardwise.errors import CaptureError

if TYPE_CHECKING:
    from torch import fx

_ATEN = torch.ops.aten
LEAST = 4  # calls: a smaller part costs more to enter than it saves


def compiled(step: Step) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The step as a function of its inputs, local parts compiled at the first run.

    Args:
        step: The step.

    Returns:
        Like `shardwise.capture.run.executor`.

    Raises:
        CaptureError: There is no C++ compiler, or inductor failed; the message says which.
    """
    step = step.with_nodes(_gathered(list(flatten(step.nodes))))
    nodes = list(step.nodes)
    out: list[Node] = []
    at = 0
    while at < len(nodes):
        end = at
        while end < len(nodes) and _local(nodes[end]):
            end += 1
        part = nodes[at:end]
        if sum(n.kind == "call" for n in part) >= LEAST:
            later = {v for n in nodes[end:] for v in n.inputs} | set(step.outputs)
            out.append(_part(part, later))
        else:
            out += part
        if end < len(nodes):
            out.append(nodes[end])
        at = end + 1
    return executor(step.with_nodes(out))


def _local(n: Node) -> bool:
    return (n.kind == "call" and RNG not in n.reads) or n.kind == "number"


def _gathered(nodes: list[Node]) -> list[Node]:
    """Draws and constants go first, where they wait for nothing: fewer, larger parts."""
    early: list[Node] = []
    rest: list[Node] = []
    written: set[int] = set()
    blocked = False
    for n in nodes:
        free = n.kind == "opaque" and not n.inputs and not blocked
        if free:
            early.append(n)
            continue
        if RNG in n.reads:
            blocked = True
        written |= n.writes
        rest.append(n)
    return early + rest


# ---- one part ------------------------------------------------------------------------------------------


def _part(part: list[Node], later: set[Value]) -> Node:
    made = {v for n in part for v in n.outs}
    takes = [v for v in dict.fromkeys(v for n in part for v in n.inputs) if v not in made]
    gives = [v for v in dict.fromkeys(v for n in part for v in n.outs) if v in later]
    run = _Compiled(part, takes, gives)
    reads = frozenset(r for n in part for r in n.reads)
    writes = frozenset(r for n in part for r in n.writes)
    return Node(
        "opaque",
        f"compiled[{len(part)}]",
        run,
        tuple(takes),
        {},
        tuple(gives),
        tuple(gives),
        reads,
        writes,
        part[0].site,
    )


class _Compiled:
    """A part that is compiled when it first runs, on what it then gets."""

    __slots__ = ("_gives", "_numbers", "_run", "_takes", "graph")

    def __init__(self, part: list[Node], takes: list[Value], gives: list[Value]) -> None:
        self._takes, self._gives = takes, gives
        self._numbers = [i for i, v in enumerate(takes) if v.kind == "number"]
        self.graph = _graph(part, takes, gives)
        self._run: Any = None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the part."""
        if self._numbers:
            values = list(args)
            for i in self._numbers:
                values[i] = torch.scalar_tensor(values[i], dtype=torch.float64)
            args = tuple(values)
        if self._run is None:
            self._run = self._compile(args)
        outs = self._run(*args)
        return tuple([o.item() if v.kind == "number" else o for v, o in zip(self._gives, outs)])

    def _compile(self, args: tuple[Any, ...]) -> Any:
        try:
            return compile_flat(self.graph, [a.detach() for a in args])
        except Exception as error:
            raise CaptureError(
                f"torch's compiler failed on a part of the step: {type(error).__name__}: {error}",
                tries=["install a C++ compiler (g++)", "capture without compile="],
            ) from error


def _graph(part: list[Node], takes: list[Value], gives: list[Value]) -> fx.GraphModule:
    """The part as a graph of calls on tensors."""
    from torch import fx  # noqa: PLC0415  what nobody compiles need not be imported

    graph = fx.Graph()
    known: dict[Value, Any] = {v: graph.placeholder(f"v{v.index}") for v in takes}

    def look(x: Any) -> Any:
        if isinstance(x, Value):
            return known[x]
        if isinstance(x, (list, tuple)):
            return type(x)([look(y) for y in x])
        return x

    for n in part:
        if n.kind == "number":
            known[n.outs[0]] = _number(graph, n, look)
            continue
        if any(v.kind == "number" for v in n.inputs):
            _with_numbers(graph, n, known, look)
            continue
        args, kwargs = look(n.args), {k: look(a) for k, a in n.kwargs.items()}
        made = graph.call_function(n.target, args, kwargs)  # pyright: ignore[reportArgumentType]
        _bind(graph, known, n.result, made)
    graph.output(tuple(known[v] for v in gives))
    return fx.GraphModule(torch.nn.Module(), graph)


def _bind(graph: fx.Graph, known: dict[Value, Any], result: Any, made: Any) -> None:
    if isinstance(result, Value):
        known.setdefault(result, made)
    elif isinstance(result, (tuple, list)):
        for i, r in enumerate(result):
            if any(True for _ in values_in(r)):
                _bind(graph, known, r, graph.call_function(_pick, (made, i)))


def _pick(x: Any, i: int) -> Any:
    return x[i]


_ARITHMETIC = {
    "+": _ATEN.add.Tensor,
    "-": _ATEN.sub.Tensor,
    "*": _ATEN.mul.Tensor,
    "/": _ATEN.div.Tensor,
    "**": _ATEN.pow.Tensor_Tensor,
}


def _number(graph: fx.Graph, n: Node, look: Callable[[Any], Any]) -> Any:
    """Arithmetic on numbers as arithmetic on tensors of float64."""
    if n.name == "item":
        return graph.call_function(
            _ATEN._to_copy.default, (look(n.args[0]),), {"dtype": torch.float64}
        )
    if n.name == "neg":
        return graph.call_function(_ATEN.neg.default, (look(n.args[0]),))
    if n.name == "sqrt":
        return graph.call_function(_ATEN.sqrt.default, (look(n.args[0]),))
    args = [
        look(a)
        if isinstance(a, Value)
        else graph.call_function(_ATEN.full.default, ([], float(a)), {"dtype": torch.float64})
        for a in n.args
    ]
    op = _ARITHMETIC.get(n.name)
    if op is None:
        raise CaptureError(
            f"a number is computed with {n.name}, which the compiled form does not know",
            tries=["capture without compile="],
        )
    return graph.call_function(op, tuple(args))


# ---- calls that take a number --------------------------------------------------------------------------


def _with_numbers(
    graph: fx.Graph, n: Node, known: dict[Value, Any], look: Callable[[Any], Any]
) -> None:
    """A call with a number, as calls with a tensor of no dims; list calls entry by entry."""
    name = str(n.target).removeprefix("aten.").split(".")[0]
    args, kwargs = look(n.args), {k: look(a) for k, a in n.kwargs.items()}
    if not name.startswith("_foreach_"):
        made = _one(graph, name, args, kwargs)
        _bind(graph, known, n.result, made)
        return
    single = name.removeprefix("_foreach_")
    count = len(n.args[0])
    results = []
    for i in range(count):
        one = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        named = {k: a[i] if isinstance(a, (list, tuple)) else a for k, a in kwargs.items()}
        if single.rstrip("_") in ("addcmul", "addcdiv") and len(one) == 4:
            named["value"] = one.pop()
        results.append(_one(graph, single, one, named))
    if n.outs:
        known.update(zip(n.outs, results))


_BY_NUMBER = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "pow"}


def _one(graph: fx.Graph, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    base, inplace = name.rstrip("_"), name.endswith("_")
    call = graph.call_function
    if base not in _BY_NUMBER:
        raise CaptureError(
            f"{name} takes a number of the run, which the compiled form does not know",
            tries=["capture without compile="],
        )
    x, *rest = args
    if base in ("addcmul", "addcdiv"):
        middle = _ATEN.mul.Tensor if base == "addcmul" else _ATEN.div.Tensor
        change = call(middle, (rest[0], rest[1]))
        change = _times(graph, change, kwargs.get("value", 1))
        made = call(_ATEN.add.Tensor, (x, change))
    elif base in ("add", "sub"):
        other = _times(graph, rest[0], kwargs.get("alpha", 1))
        made = call(getattr(_ATEN, base).Tensor, (x, other))
    elif base == "lerp":
        change = call(_ATEN.sub.Tensor, (rest[0], x))
        made = call(_ATEN.add.Tensor, (x, _times(graph, change, rest[1])))
    elif base == "pow":
        made = call(_ATEN.pow.Tensor_Tensor, (x, rest[0]))
    else:
        made = call(getattr(_ATEN, base).Tensor, (x, rest[0]))
    return call(_ATEN.copy_.default, (x, made)) if inplace else made


def _times(graph: fx.Graph, x: Any, factor: Any) -> Any:
    if not isinstance(factor, (int, float, Tensor)):
        return graph.call_function(_ATEN.mul.Tensor, (x, factor))
    return (
        x
        if factor == 1
        else graph.call_function(
            _ATEN.mul.Scalar if not isinstance(factor, Tensor) else _ATEN.mul.Tensor,
            (x, factor),
        )
    )
