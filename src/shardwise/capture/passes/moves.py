"""Moves that need not be: there and back again, and detours.

```text
   S -> R, then R -> S  of the same values     nothing
   P -> R, then R -> S  and nobody needs R     P -> S: a reduce_scatter in place of an all_reduce
```

Both are facts about layouts, so no pattern of collectives has to be known: the route of the joint move is asked for.
"""

from __future__ import annotations

from shardwise.capture.ir import Node, Step, Value, users
from shardwise.comm.execute import mover


def redundant_moves(step: Step) -> Step:
    """Join moves that follow each other directly."""
    while True:
        better = _one(step)
        if better is None:
            return step
        step = better


def _one(step: Step) -> Step | None:
    made: dict[Value, tuple[int, Node]] = {}
    uses = users(step.nodes)
    wanted = set(step.outputs)
    for at, n in enumerate(step.nodes):
        if n.kind != "move" or "mover" not in n.info:
            continue
        source: Value = n.args[0]
        if source in made:
            before, first = made[source]
            joined = _joined(step, (before, first), (at, n), uses, wanted)
            if joined is not None:
                return joined
        made[n.outs[0]] = at, n
    return None


def _joined(
    step: Step,
    one: tuple[int, Node],
    two: tuple[int, Node],
    uses: dict[Value, list[int]],
    wanted: set[Value],
) -> Step | None:
    (before, first), (at, second) = one, two
    origin, between, end = first.args[0], first.outs[0], second.outs[0]
    steady = not any(
        n.writes & {origin.root, between.root} for n in step.nodes[before + 1 : at]
    )
    if not steady:
        return None
    there, back = first.info["mover"], second.info["mover"]
    src, dst = there.src, back.dst
    nodes = list(step.nodes)
    if src.dims == dst.dims and src.partial == dst.partial and src.mesh is dst.mesh:
        quiet = not any(n.writes & {origin.root, end.root} for n in nodes[at + 1 :])
        if quiet and not src.is_partial and _alike(origin, end) and end not in wanted:
            del nodes[at]
            return step.with_nodes(nodes).substituted({end: origin})
        return None
    alone = uses.get(between, []) == [at] and between not in wanted
    if not alone or src.mesh is not dst.mesh or back.src.mesh is not src.mesh:
        return None
    direct = mover(src, dst.with_dtype(src.dtype), there.transport)
    node, index = step.tape.note_move(direct, origin, step.next_index)
    if node is None or not _alike(node.outs[0], end):
        return None
    node.site = second.site
    nodes[at] = node
    del nodes[before]
    return step.with_nodes(nodes, index).substituted({end: node.outs[0]})


def _alike(a: Value, b: Value) -> bool:
    return (
        a.fake is not None
        and b.fake is not None
        and a.fake.shape == b.fake.shape
        and a.fake.stride() == b.fake.stride()
        and a.fake.dtype == b.fake.dtype
    )
