"""What must come before what in a step, and the check that a reordered step keeps to it.

```text
   a value      is made before it is used
   memory       two nodes change places unless one writes what the other reads or writes
   a start      may read its input until its wait: the wait counts as a reader of that memory
```

Random draws write the root ``RNG``, what the world sees writes ``OUTSIDE``: so they keep their order, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.capture.ir import Node, Step, Value, describe, flatten


def dependencies(nodes: Sequence[Node]) -> list[list[int]]:
    """For each node of a lowered step the places of nodes that must come before it.

    Only the direct ones: what follows from others may be left out.

    Cost: linear in the values and roots that the nodes name.
    """
    made: dict[Value, int] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    sent: dict[Value, frozenset[int]] = {}  # by handle: the memory that is being sent
    out: list[list[int]] = []
    for at, n in enumerate(nodes):
        before: dict[int, None] = {}
        reads = n.reads
        if n.kind == "start":
            sent[n.outs[0]] = frozenset(v.root for v in n.inputs)
        elif n.kind == "wait":
            reads = reads | sent.get(n.args[0], frozenset())
        for v in n.inputs:
            if v in made:
                before[made[v]] = None
        for r in reads:
            if r in writer:
                before[writer[r]] = None
        for r in n.writes:
            if r in writer:
                before[writer[r]] = None
            before.update(dict.fromkeys(readers.get(r, ())))
        for r in reads - n.writes:
            readers.setdefault(r, []).append(at)
        for r in n.writes:
            writer[r] = at
            readers[r] = []
        for v in n.outs:
            made[v] = at
        before.pop(at, None)
        out.append(list(before))
    return out


def followers(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same the other way round: for each node those that must come after it."""
    out: list[list[int]] = [[] for _ in before]
    for at, places in enumerate(before):
        for p in places:
            out[p].append(at)
    return out


def readiness(nodes: Sequence[Node], is_heavy: Callable[[Node], bool]) -> list[int]:
    """For each node the place of the last heavy one that it depends on, itself included; -1 if there is none."""
    out: list[int] = []
    for at, before in enumerate(dependencies(nodes)):
        when = at if is_heavy(nodes[at]) else -1
        out.append(max([when, *[out[p] for p in before]]))
    return out


def violations(step: Step, reordered: Step) -> list[str]:
    """Where a reordered step breaks what must come before what; empty if it is the same step in another order.

    Args:
        step: A step.
        reordered: Its nodes in another order; both are compared as lowered.
    """
    nodes, others = list(flatten(step.nodes)), list(flatten(reordered.nodes))
    places = {id(n): at for at, n in enumerate(others)}
    if len(places) != len(others) or set(places) != set(map(id, nodes)):
        return ["other nodes"]
    return [
        f"{nodes[p]} must come before {n}"
        for n, before in zip(nodes, dependencies(nodes))
        for p in before
        if places[id(nodes[p])] > places[id(n)]
    ]


def starts(step: Step) -> tuple[str, ...]:
    """The collectives of a step in the order in which it starts them: what all members of a group must agree on."""
    lines: list[str] = []
    for n in step.collectives():
        kind, x = n.info["kind"], n.args[0]
        what = (
            str(x.fake.dtype) if kind == "all_to_all" else describe(x)
        )  # a rank sends what it has
        lines.append(f"{kind} {n.info.get('op') or ''} over {n.info['ranks']}: {what}")
    return tuple(lines)
