"""Lower: a traced call as a straight line of moves and local ATen calls.

The nodes are decided one after the other, each by its rule, from the layouts that its operands have by
then. A node without a rule is gathered and run whole, alone: the rest of the call stays sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.comm.execute import mover
from shardwise.comm.transport import Transport
from shardwise.layout.layout import Layout
from shardwise.program.compile import Program, Slot, compile_rule, fill, slot
from shardwise.program.spec import Spec, spec_of
from shardwise.program.trace import Graph, Node, used
from shardwise.rules.notation import Arg
from shardwise.rules.registry import lookup


@dataclass(slots=True)
class GraphProgram:
    """A lowered call.

    Attributes:
        name: Of the call.
        steps: Each takes the registers and fills new ones.
        size: Number of registers.
        result: The call's result, with slots that number registers.
        specs: The spec of each register that the result uses.
        gathered: Names of the nodes that had to be gathered.
    """

    name: str
    steps: list[Callable[[list[Any]], None]]
    size: int
    result: Any
    specs: dict[int, Spec]
    gathered: list[str] = field(default_factory=list)

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Run on local tensors; returns the registers."""
        registers: list[Any] = [*tensors, *([None] * (self.size - len(tensors)))]
        for step in self.steps:
            step(registers)
        return registers


class _Lowering:
    def __init__(self, graph: Graph, operands: Sequence[Arg], transport: Transport) -> None:
        self.graph, self.transport = graph, transport
        self.mesh = operands[0].layout.mesh
        self.layouts: dict[int, Layout] = {a.index: a.layout for a in operands}
        self.size = len(graph.values)
        self.steps: list[Callable[[list[Any]], None]] = []
        self.moved: dict[tuple[int, Layout], int] = {}
        self.gathered: list[str] = []

    def move(self, value: int, dst: Layout) -> int:
        """The register that holds a value in another layout."""
        src = self.layouts[value]
        if src is dst:
            return value
        key = (value, dst)
        if key not in self.moved:
            how, to = mover(src, dst, self.transport), self.size
            self.size += 1
            self.steps.append(lambda r: r.__setitem__(to, how(r[value])))
            self.moved[key] = to
        return self.moved[key]

    def lower(self, node: Node) -> None:
        """Add the steps of one node."""
        # Each place is an operand of its own, as in a call: in mm(x, x) the two have unlike labels.
        places = _Places()
        args, kwargs = _renumbered(node.args, places), _renumbered(node.kwargs, places)
        inputs = places.values
        operands = [Arg(i, self.layouts[v]) for i, v in enumerate(inputs)]
        program, layouts = self._decided(node, operands, args, kwargs) if inputs else (None, [])
        if program is None:
            program, layouts = self._whole(node, operands)
        # A value that several nodes want in the same layout moves once.
        moves: list[Any] = list(program.movers)
        registers = [v if m is None else self.move(v, m.dst) for v, m in zip(inputs, moves)]
        program.movers = (None,) * len(inputs)
        outs = node.outs
        for v, layout in zip(outs, layouts):
            self.layouts[v] = layout

        def step(r: list[Any]) -> None:
            got = program.run([r[i] for i in registers], args, kwargs)
            if isinstance(got, Tensor):
                r[outs[0]] = got
            elif got is not None:
                kept = [t for t in got if isinstance(t, Tensor)]
                for v, t in zip(outs, kept):
                    r[v] = t

        self.steps.append(step)

    def _decided(
        self, node: Node, operands: list[Arg], args: Any, kwargs: Any
    ) -> tuple[Program | None, list[Layout]]:
        entry = lookup(node.op)
        if entry is None:
            return None, []
        known = [self.graph.values[v] for v in node.outs]
        try:
            made = compile_rule(entry, node.op, operands, args, kwargs, self.transport, known)
        except TypeError:  # the rule does not know this form of the op
            return None, []
        return made if made is not None else (None, [])

    def _whole(self, node: Node, operands: list[Arg]) -> tuple[Program, list[Layout]]:
        movers = tuple(
            None
            if a.layout.is_replicated
            else mover(a.layout, a.layout.replicated(), self.transport)
            for a in operands
        )
        # A check of what a kernel reports has no result: all ranks see all of it, so that all of them raise.
        if node.outs and any(m is not None and m.communicates for m in movers):
            self.gathered.append(str(node.op))
        layouts = [Layout.of(self.mesh, None, *self.graph.values[v]) for v in node.outs]
        return Program(node.op, movers), layouts


def lower(
    graph: Graph, operands: Sequence[Arg], transport: Transport, name: str
) -> GraphProgram:
    """Decide and lower all nodes of a traced call."""
    work = _Lowering(graph, operands, transport)
    for node in graph.nodes:
        work.lower(node)
    specs = {v: spec_of(work.layouts[v], transport) for v in used(graph.result)}
    return GraphProgram(name, work.steps, work.size, graph.result, specs, work.gathered)


def _renumbered(tree: Any, places: _Places) -> Any:
    return places[tree.index] if isinstance(tree, Slot) else fill(tree, places)


class _Places:
    """Numbers the places where values are used, in order; ``values`` says which value is at each."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def __getitem__(self, index: int) -> Slot:
        self.values.append(index)
        return slot(len(self.values) - 1)
