"""Moves that need not be: there and back again, and detours.

```text
   S -> R, then R -> S  of the same values     nothing
   P -> R, then R -> S  and nobody needs R     P -> S: a reduce_scatter in place of an all_reduce
```

Both are facts about layouts, so no pattern of collectives has to be known: the route of the joint move is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from shardwise.capture.ir import Node, Step, Value, users
from shardwise.capture.order import together
from shardwise.comm.execute import mover
from shardwise.layout.layout import Layout


def redundant_moves(step: Step) -> Step:
    """Join moves that follow each other directly."""
    while True:
        better = _sweep(step)
        if better is step:
            return step
        step = better


def _sweep(step: Step) -> Step:
    """All joins of two moves none of which has been joined in this sweep; the step itself if there are none."""
    facts = _Facts.of(step)
    made: dict[Value, int] = {}
    nodes: list[Node | None] = list(step.nodes)
    index, new = step.next_index, {}
    for at, n in enumerate(step.nodes):
        if n.kind != "move" or "mover" not in n.info:
            continue
        before = made.pop(n.args[0], None)
        if before is None:
            made[n.outs[0]] = at
            continue
        end = n.outs[0]
        if _undone(facts, before, at):
            nodes[at] = None
            origin = step.nodes[before].args[0]
            new[end] = new.get(origin, origin)
            made[n.args[0]] = before  # others may go back, too
            continue
        node, index = _direct(facts, before, at, index)
        if node is None:
            made[n.args[0]] = before
            made[end] = at
            continue
        nodes[before], nodes[at] = None, node
        new[end] = node.outs[0]
    if not new:
        return step
    kept = [n for n in nodes if n is not None]
    return step.with_nodes(kept, index).substituted(new)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is asked about a step.

    Attributes:
        step: The step.
        uses: For each value the places of the nodes that take it.
        written: For each root the places of the nodes that write it.
        given: Roots of what is handed out: the user may write to it.
    """

    step: Step
    uses: dict[Value, list[int]]
    written: dict[int, list[int]]
    given: frozenset[int]

    @classmethod
    def of(cls, step: Step) -> _Facts:
        written: dict[int, list[int]] = {}
        for at, n in enumerate(step.nodes):
            for r in n.writes:
                written.setdefault(r, []).append(at)
        given = frozenset([v.root for v in step.outputs])
        return cls(step, users(step.nodes), written, given)

    def quiet(self, root: int, after: int, before: int | None = None) -> bool:
        """Whether nothing writes a root after a place, and before another if one is given."""
        places = self.written.get(root, [])
        first = bisect_right(places, after)
        return first == len(places) or (before is not None and places[first] >= before)


def _pair(facts: _Facts, before: int, at: int) -> tuple[Value, Value, Value]:
    one, two = facts.step.nodes[before], facts.step.nodes[at]
    return one.args[0], one.outs[0], two.outs[0]


def _steady(facts: _Facts, before: int, at: int) -> bool:
    origin, between, _ = _pair(facts, before, at)
    return facts.quiet(origin.root, before, at) and facts.quiet(between.root, before, at)


def _continues(there: Layout, back: Layout) -> bool:
    """Whether what has arrived is taken for what it is: a local tensor may have been given another layout."""
    return there.with_dtype(back.dtype) is back


def _undone(facts: _Facts, before: int, at: int) -> bool:
    """Whether the second move brings back what the first has taken."""
    nodes = facts.step.nodes
    origin, _, end = _pair(facts, before, at)
    there, back = nodes[before].info["mover"], nodes[at].info["mover"]
    src, dst = there.src, back.dst
    return (
        _continues(there.dst, back.src)
        and (src.dims, src.shape) == (dst.dims, dst.shape)
        and src.partial == dst.partial
        and src.mesh is dst.mesh
        and not src.is_partial
        and end.root not in facts.given
        and _steady(facts, before, at)
        and facts.quiet(origin.root, at)
        and facts.quiet(end.root, at)
        and _alike(origin, end)
    )


def _direct(facts: _Facts, before: int, at: int, index: int) -> tuple[Node | None, int]:
    """One move in place of two, and the next free number."""
    step = facts.step
    origin, between, end = _pair(facts, before, at)
    there, back = step.nodes[before].info["mover"], step.nodes[at].info["mover"]
    src, dst = there.src, back.dst
    same = src.dims == dst.dims and src.partial == dst.partial
    alone = facts.uses.get(between, []) == [at] and between not in step.outputs
    if same or not alone or src.mesh is not dst.mesh or not _continues(there.dst, back.src):
        return None, index
    if not _steady(facts, before, at):
        return None, index
    direct = mover(src, dst.with_dtype(src.dtype), there.transport)
    node, index = step.tape.note_move(direct, origin, index)
    if node is None or not _alike(node.outs[0], end):
        return None, index
    node.site = step.nodes[at].site
    starts = [
        b for n in (step.nodes[before], step.nodes[at]) for b in n.body if b.kind == "start"
    ]
    for b in node.body:
        if b.kind == "start":
            b.info.update(together(starts))
    return node, index


def _alike(a: Value, b: Value) -> bool:
    return (
        a.fake is not None
        and b.fake is not None
        and a.fake.shape == b.fake.shape
        and a.fake.stride() == b.fake.stride()
        and a.fake.storage_offset() == b.fake.storage_offset()
        and a.fake.dtype == b.fake.dtype
        and (a.fake.is_conj(), a.fake.is_neg()) == (b.fake.is_conj(), b.fake.is_neg())
    )
