"""A captured step: a list of nodes over values, as one rank runs it.

```text
   %5 = aten.mm.default(%0, %4)  : f32[8, 64]            a call on local tensors
   %6 = move {tp: P(sum)} -> {tp: R}(%5)  : f32[8, 64]   a move between layouts, until it is lowered
   %7 = start all_reduce sum over tp(%6)                 a collective begins: %7 is its handle
   %8 = wait(%7)  : f32[8, 64]
   %9 = number 1 - %3                                    Python arithmetic on numbers of the run
```

Nodes are in program order. The memory of every tensor has a *root*; a node reads and writes roots. Two nodes may
change places unless one writes what the other reads or writes: that is all that a pass has to know about
views, in-place writes and random draws (which write the root `RNG`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.compat import laid_over
from shardwise.events import received_bytes

_ATEN = torch.ops.aten
# They count from the beginning of the memory, not from where the tensor begins.
PLACED = {
    _ATEN.as_strided.default,
    _ATEN.as_strided_.default,
    _ATEN.as_strided_copy.default,
    _ATEN.as_strided_scatter.default,
}
RNG = -1  # the root of the random generators: draws keep their order
OUTSIDE = -2  # the root of what a node does to the world that no tensor shows


class Value:
    """What a node makes or takes: a tensor, a number or the handle of a collective.

    Attributes:
        index: Its number in the text.
        fake: A tensor with its shape, strides, dtype and device and no data; None for what is no tensor.
        root: The memory that it lies in; its own index for what is no tensor.
        kind: ``"tensor"``, ``"number"`` or ``"handle"``.
    """

    __slots__ = ("fake", "index", "kind", "root")

    def __init__(
        self, index: int, fake: Tensor | None, root: int, kind: str = "tensor"
    ) -> None:
        self.index, self.fake, self.root, self.kind = index, fake, root, kind

    def __repr__(self) -> str:
        return f"%{self.index}"

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor's elements."""
        return 0 if self.fake is None else self.fake.numel() * self.fake.element_size()


@dataclass(eq=False, slots=True)
class Node:
    """One thing that a step does.

    Attributes:
        kind: ``"call"``, ``"move"``, ``"start"``, ``"wait"``, ``"number"``, ``"opaque"`` or ``"effect"``.
        name: For the text.
        target: What runs, on the arguments.
        args: Positional arguments, with values in them.
        kwargs: Arguments by name, likewise.
        outs: What it makes.
        result: Shape of the result: a value, None, or tuples and lists of these.
        reads: Roots that it reads.
        writes: Roots that it writes, those of new memory included.
        site: The user's line.
        info: Facts for passes (of a collective: kind, ranks, op, tag; of a move: the mover) and for the executor
            (``consumes``: the first argument is a list, and its tensors may die within the call).
        body: Of a move: the nodes that carry it out.
    """

    kind: str
    name: str
    target: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value, ...]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    site: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    body: tuple[Node, ...] = ()

    @property
    def inputs(self) -> list[Value]:
        """The values among the arguments, in order."""
        return list(values_in((self.args, self.kwargs)))

    def with_values(self, new: dict[Value, Value], roots: dict[int, int] | None = None) -> Node:
        """The node with other values for some; roots follow. Itself if none of them is in it.

        Args:
            new: What each value becomes.
            roots: What each root becomes, if that is known already.
        """
        if not new:
            return self
        if roots is None:
            roots = moved_roots(new)
        body = tuple([n.with_values(new, roots) for n in self.body])
        if (
            roots.keys().isdisjoint(self.reads)
            and roots.keys().isdisjoint(self.writes)
            and new.keys().isdisjoint(self.outs)
            and new.keys().isdisjoint(self.inputs)
            and all(a is b for a, b in zip(body, self.body))
        ):
            return self
        return replace(
            self,
            args=self._placed(new) if self.target in PLACED else substitute(self.args, new),
            kwargs=substitute(self.kwargs, new),
            outs=tuple(new.get(v, v) for v in self.outs),
            result=substitute(self.result, new),
            reads=frozenset([roots.get(r, r) for r in self.reads]),
            writes=frozenset([roots.get(r, r) for r in self.writes]),
            body=body,
        )

    def _placed(self, new: dict[Value, Value]) -> tuple[Any, ...]:
        """The arguments of a call of `PLACED`, its place in the memory moved along."""
        args, old = substitute(self.args, new), self.args[0]
        place = 4 if self.target is _ATEN.as_strided_scatter.default else 3
        if len(args) <= place or args[place] is None or args[0] is old:
            return args
        by = args[0].fake.storage_offset() - old.fake.storage_offset()
        return (*args[:place], args[place] + by, *args[place + 1 :])

    def __str__(self) -> str:
        outs = ", ".join(map(repr, self.outs))
        kwargs = {k: v for k, v in self.kwargs.items() if v is not None}
        parts = [_text(a) for a in self.args] + [f"{k}={_text(v)}" for k, v in kwargs.items()]
        line = f"{self.name}({', '.join(parts)})"
        if outs:
            line = f"{outs} = {line}"
        kinds = [describe(v) for v in self.outs if v.kind == "tensor"]
        return f"{line}  : {', '.join(kinds)}" if kinds and len(kinds) <= 3 else line


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an input comes from at each run.

    Attributes:
        name: For the text: ``"params.0.weight"``.
        role: ``"argument"``, ``"state"``, ``"grad"``, ``"number"`` or ``"closed-over"``.
        get: Reads it.
        layout: The layout of a DTensor's local, for the text; else None.
        cell: The place in the state that it reads, if it is one.
    """

    name: str
    role: str
    get: Callable[[Any], Any]
    layout: Any = None
    cell: Any = None


@dataclass(frozen=True, slots=True)
class Step:
    """A captured step.

    Attributes:
        nodes: In program order.
        inputs: The values that come from outside, with where from.
        outputs: The values that are handed out at the end, in the order of the bindings.
        next_index: The next free number of a value.
        rank: This rank.
        tape: What it was recorded with; passes note more with it.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[tuple[Value, Slot], ...]
    outputs: tuple[Value, ...]
    next_index: int
    rank: int = 0
    tape: Any = None

    def with_nodes(self, nodes: Iterable[Node], next_index: int | None = None) -> Step:
        """The step with other nodes."""
        index = self.next_index if next_index is None else next_index
        return replace(self, nodes=tuple(nodes), next_index=index)

    def substituted(self, new: dict[Value, Value]) -> Step:
        """The step with other values for some, everywhere; views of what is replaced show the new memory.

        The others must be like those: what is computed from them has been recorded by their shapes and strides.
        """
        if not new:
            return self
        for old, to in new.items():
            assert old.fake is to.fake or alike(old.fake, to.fake), (
                f"{to} cannot take the place of {old}: {describe(to)}"
            )
        roots = moved_roots(new)
        if roots:
            new, roots = self._shown_elsewhere(new, roots)
        return replace(
            self,
            nodes=tuple([n.with_values(new, roots) for n in self.nodes]),
            outputs=tuple([new.get(v, v) for v in self.outputs]),
        )

    def _shown_elsewhere(
        self, new: dict[Value, Value], roots: dict[int, int]
    ) -> tuple[dict[Value, Value], dict[int, int]]:
        """With the values that stay, but in other memory: their fakes tell how they lie there.

        What takes the place of one may itself lie in memory that becomes another's.
        """
        over = {old.root: (old, to) for old, to in new.items() if old.root in roots}
        found: dict[Value, Value] = {}

        def shown(v: Value) -> Value:
            if v.root not in over or v in found:
                return found.get(v, v)
            old, to = over[v.root]
            base = shown(to)
            fake = v.fake
            if fake is not None and old.fake is not None:
                fake = laid_over(fake, old.fake, base.fake)
            found[v] = other = Value(v.index, fake, base.root, v.kind)
            if fake is not None:
                fake._shardwise_value = other  # pyright: ignore[reportAttributeAccessIssue]
            return other

        closed = {old: shown(to) for old, to in new.items()}
        for n in (x for top in self.nodes for x in (top, *top.body)):
            for v in n.outs:
                if v.root in over and v not in new:
                    shown(v)
        return {**found, **closed}, {r: shown(to).root for r, (_, to) in over.items()}

    def lowered(self) -> Step:
        """The step with each move replaced by what carries it out."""
        return self.with_nodes(flatten(self.nodes))

    def collectives(self) -> list[Node]:
        """The starts of collectives, in order, those inside moves included."""
        return [n for n in flatten(self.nodes) if n.kind == "start"]

    @property
    def written_inputs(self) -> list[Value]:
        """Inputs whose memory some node writes."""
        written = {r for n in flatten(self.nodes) for r in n.writes}
        return [v for v, _ in self.inputs if v.root in written and v.kind == "tensor"]

    def __str__(self) -> str:
        lines = [
            f"{v!r} = {slot.role} {slot.name}  : {describe(v)}"
            + (f" {placed(slot.layout)}" if slot.layout is not None else "")
            for v, slot in self.inputs
        ]
        lines += [str(n) for n in self.nodes]
        lines.append(f"return {', '.join(map(repr, self.outputs))}")
        return "\n".join(lines)


def flatten(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, bodies in place of moves."""
    for n in nodes:
        if n.kind == "move":
            yield from n.body
        else:
            yield n


def moved_roots(new: dict[Value, Value]) -> dict[int, int]:
    """What becomes of roots when values become others."""
    return {old.root: to.root for old, to in new.items() if old.root != to.root}


def alike(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two tensors have the same dtype, device, shape and strides (those that count)."""
    if x is None or y is None:
        return x is y
    if (x.is_conj(), x.is_neg()) != (y.is_conj(), y.is_neg()):
        return False
    if (x.dtype, x.shape, x.device) != (y.dtype, y.shape, y.device):
        return False
    return not x.numel() or all(
        n == 1 or i == j for n, i, j in zip(x.shape, x.stride(), y.stride(), strict=True)
    )


def values_in(tree: Any) -> Iterator[Value]:
    """The values in a tree of arguments, in order."""
    kind = type(tree)
    if kind is Value:
        yield tree
    elif kind in (tuple, list):
        for x in tree:
            yield from values_in(x)
    elif kind is dict:
        for x in tree.values():
            yield from values_in(x)


def substitute(tree: Any, new: dict[Value, Value]) -> Any:
    """A tree of arguments with other values for some."""
    kind = type(tree)
    if kind is Value:
        return new.get(tree, tree)
    if kind in (tuple, list):
        return kind([substitute(x, new) for x in tree])
    if kind is dict:
        return {k: substitute(x, new) for k, x in tree.items()}
    return tree


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


def describe(value: Value) -> str:
    """Dtype and shape of a tensor, ``f32[8, 64]``; the kind of anything else."""
    if value.fake is None:
        return value.kind
    dtype = _SHORT.get(value.fake.dtype, str(value.fake.dtype).removeprefix("torch."))
    return f"{dtype}{list(value.fake.shape)}"


def placed(layout: Any) -> str:
    """Placements by axis, ``{dp: S(0), tp: R}``."""
    names = [layout.mesh.axis_name(a) for a in range(layout.mesh.ndim)]
    return "{" + ", ".join(f"{n}: {p}" for n, p in zip(names, layout.placements)) + "}"


def _text(x: Any) -> str:
    if isinstance(x, (tuple, list)):
        inner = ", ".join(map(_text, x))
        return f"[{inner}]"
    if isinstance(x, (torch.dtype, torch.memory_format, torch.layout)):
        return str(x).removeprefix("torch.")
    return repr(x)


def users(nodes: Sequence[Node]) -> dict[Value, list[int]]:
    """For each value the places of the nodes that take it."""
    found: dict[Value, list[int]] = {}
    for at, n in enumerate(nodes):
        for v in dict.fromkeys(n.inputs):
            found.setdefault(v, []).append(at)
    return found


def sent_bytes(start: Node) -> int:
    """Bytes that this rank receives in a collective: what the log will count."""
    info = start.info
    value = start.args[0]
    if info["kind"] == "all_to_all":
        here = info["out_splits"][info["ranks"].index(info["transport"].rank)]
        return (sum(info["out_splits"]) - here) * value.fake.element_size()
    if info["kind"] == "broadcast" and info["src"] == info["transport"].rank:
        return 0
    return received_bytes(info["kind"], value.nbytes, len(info["ranks"]))
