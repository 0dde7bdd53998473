"""A part of a step as a flat graph of calls on tensors: what torch's compiler takes.

Numbers of the run (learning rates, step counts) would be compiled in as constants. So those that a part takes come
as one tensor of float64, arithmetic on them is arithmetic on tensors of no dims, and a call that takes a number is
written as calls that take such a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.capture.ir import PLACED, RNG, Node, Value, values_in

if TYPE_CHECKING:
    from torch import fx

_ATEN = torch.ops.aten
_ARITHMETIC = {
    "+": _ATEN.add.Tensor,
    "-": _ATEN.sub.Tensor,
    "*": _ATEN.mul.Tensor,
    "/": _ATEN.div.Tensor,
    "**": _ATEN.pow.Tensor_Tensor,
    "neg": _ATEN.neg.default,
    "sqrt": _ATEN.sqrt.default,
}
# Calls that may take a number: where. All other arguments are tensors.
_BY_NUMBER: dict[str, tuple[int | str, ...]] = {
    "add": (1, 2, "alpha"),
    "sub": (1, 2, "alpha"),
    "mul": (1,),
    "div": (1,),
    "pow": (1,),
    "lerp": (2,),
    "addcmul": (3, "value"),
    "addcdiv": (3, "value"),
}
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what kernels compute in


def compiles(n: Node) -> bool:
    """Whether a node can be in a part: a local call, or arithmetic on numbers, that a flat graph can hold."""
    if n.kind == "number":
        return n.name == "item" or n.name in _ARITHMETIC
    if n.kind != "call" or RNG in n.reads or n.target in PLACED:
        return False  # a part does not know where in its memory a tensor begins
    return not _takes_number(n) or _by_number(n)


def _takes_number(n: Node) -> bool:
    return any(v.kind == "number" for v in n.inputs)


def _by_number(n: Node) -> bool:
    """Whether a call that takes a number is one that `_one` can write with a tensor."""
    base, is_list, _ = _name_of(n)
    places = _BY_NUMBER.get(base)
    if places is None or (is_list and not isinstance(n.args[0], (list, tuple))):
        return False
    given = {**dict(enumerate(n.args)), **n.kwargs}
    return all(
        place in places
        or (isinstance(place, int) and all(v.kind == "tensor" for v in values_in(x)))
        for place, x in given.items()
    )


def _name_of(n: Node) -> tuple[str, bool, bool]:
    """The bare name of a call, whether it is of lists, and whether in place."""
    name = str(n.target).removeprefix("aten.").split(".")[0]
    single = name.removeprefix("_foreach_")
    return single.rstrip("_"), single != name, name.endswith("_")


def graph_of(
    part: Sequence[Node],
    takes: Sequence[Value],
    numbers: Sequence[Value],
    gives: Sequence[Value],
) -> fx.GraphModule:
    """The part as a graph.

    Args:
        part: Its nodes.
        takes: The tensors that it takes, in order.
        numbers: The numbers that it takes: the last input is a vector of float64 with all of them, if there are any.
        gives: What it gives; numbers as tensors of no dims.
    """
    from torch import fx  # noqa: PLC0415  what nobody compiles need not be imported

    writer = _Writer(fx.Graph(), takes, numbers)
    for n in part:
        if n.kind == "number":
            writer.number(n)
        elif _takes_number(n):
            writer.by_number(n)
        else:
            writer.call(n)
    writer.graph.output(tuple([writer.known[v] for v in gives]))
    return fx.GraphModule(torch.nn.Module(), writer.graph)


class _Writer:
    """Writes the nodes of a part into a graph.

    Attributes:
        graph: The graph.
        known: What stands in it for each value.
    """

    def __init__(
        self, graph: fx.Graph, takes: Sequence[Value], numbers: Sequence[Value]
    ) -> None:
        self.graph = graph
        self.known: dict[Value, Any] = {v: graph.placeholder(f"v{v.index}") for v in takes}
        if numbers:
            given = graph.placeholder("numbers")
            for i, v in enumerate(numbers):
                self.known[v] = self._do(_ATEN.select.int, given, 0, i)

    def _do(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.graph.call_function(op, args, kwargs)

    def _look(self, x: Any) -> Any:
        if isinstance(x, Value):
            return self.known[x]
        if isinstance(x, (list, tuple)):
            return type(x)([self._look(y) for y in x])
        return x

    def _bind(self, result: Any, made: Any) -> None:
        if isinstance(result, Value):
            self.known.setdefault(result, made)
        elif isinstance(result, (tuple, list)):
            for i, r in enumerate(result):
                if any(True for _ in values_in(r)):
                    self._bind(r, self._do(_pick, made, i))

    def call(self, n: Node) -> None:
        """A call on tensors, as it is."""
        args, kwargs = self._look(n.args), {k: self._look(a) for k, a in n.kwargs.items()}
        self._bind(n.result, self._do(n.target, *args, **kwargs))

    def number(self, n: Node) -> None:
        """Arithmetic on numbers, as eager mode does it: in float64."""
        if n.name == "item":
            made = self._do(_ATEN._to_copy.default, self._look(n.args[0]), dtype=torch.float64)
            made = self._do(_ATEN.view.default, made, [])
        else:
            made = self._do(_ARITHMETIC[n.name], *map(self._scalar, n.args))
        self.known[n.outs[0]] = made

    def _scalar(self, x: Any) -> Any:
        """A number as a tensor of no dims."""
        if isinstance(x, Value):
            return self.known[x]
        return self._do(_ATEN.full.default, [], float(x), dtype=torch.float64)

    def by_number(self, n: Node) -> None:
        """A call with a number, as calls with a tensor of no dims; list calls entry by entry."""
        base, is_list, in_place = _name_of(n)
        if not is_list:
            self._bind(n.result, self._one(base, in_place, n.args, n.kwargs, n.outs))
            return
        made = []
        for i in range(len(n.args[0])):
            args = [a[i] if isinstance(a, (list, tuple)) else a for a in n.args]
            kwargs = {
                k: a[i] if isinstance(a, (list, tuple)) else a for k, a in n.kwargs.items()
            }
            made.append(self._one(base, in_place, args, kwargs, n.outs[i : i + 1]))
        self.known.update(zip(n.outs, made))

    def _one(
        self,
        base: str,
        in_place: bool,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outs: Sequence[Value],
    ) -> Any:
        like: Value = args[0] if in_place else outs[0]
        assert like.fake is not None, "it computes with tensors"
        own = like.fake.dtype
        dtype = _WIDE.get(own, own)
        x, *rest = self._as(args, dtype)
        named = dict(zip(kwargs, self._as(list(kwargs.values()), dtype)))
        made = self._computed(base, x, rest, named)
        if in_place:
            return self._do(_ATEN.copy_.default, self.known[args[0]], made)
        return made if dtype == own else self._do(_ATEN._to_copy.default, made, dtype=own)

    def _as(self, args: Sequence[Any], dtype: torch.dtype) -> Iterator[Any]:
        """Arguments in one dtype, so that nothing is promoted: numbers are tensors of float64 here."""
        for a in args:
            if not isinstance(a, Value):
                yield a
            elif a.fake is not None and a.fake.dtype == dtype:
                yield self.known[a]
            else:
                yield self._do(_ATEN._to_copy.default, self.known[a], dtype=dtype)

    def _computed(self, base: str, x: Any, rest: list[Any], named: dict[str, Any]) -> Any:
        if base in ("addcmul", "addcdiv"):
            change = self._do(
                _ATEN.mul.Tensor if base == "addcmul" else _ATEN.div.Tensor, *rest[:2]
            )
            value = rest[2] if len(rest) > 2 else named["value"]
            return self._do(_ATEN.add.Tensor, x, self._do(_ATEN.mul.Tensor, change, value))
        if base in ("add", "sub"):
            alpha = rest[1] if len(rest) > 1 else named.get("alpha", 1)
            other = rest[0] if alpha == 1 else self._do(_ATEN.mul.Tensor, rest[0], alpha)
            return self._do(getattr(_ATEN, base).Tensor, x, other)
        op = _ATEN.pow.Tensor_Tensor if base == "pow" else getattr(_ATEN, base).Tensor
        return self._do(op, x, *rest)


def _pick(x: Any, i: int) -> Any:
    return x[i]
