"""What must come before what in a step, and the check that a reordered step keeps to it.

```text
   a value      is made before it is used
   memory       two nodes change places unless one writes what the other reads or writes
   a start      may read its input until its wait: the wait counts as a reader of that memory
```

Random draws write the root ``RNG``, what the world sees writes ``OUTSIDE``: so they keep their order, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.capture.again import dispensable
from shardwise.capture.ir import Node, Step, Value, describe, flatten

# What arrives is more than what was sent, and is held.
HELD = ("all_gather", "broadcast", "all_to_all")


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


def touched(nodes: Sequence[Node]) -> dict[int, list[int]]:
    """For each memory the places of the nodes that read or write it, or name what lies in it, in order.

    What is sent is read until the wait.
    """
    found: dict[int, list[int]] = {}
    sent: dict[Value, set[int]] = {}
    for at, n in enumerate(nodes):
        roots = {*n.reads, *n.writes, *(v.root for v in (*n.inputs, *n.outs))}
        if n.kind == "start":
            sent[n.outs[0]] = {v.root for v in n.inputs}
        elif n.kind == "wait":
            roots |= sent.get(n.args[0], set())
        for r in roots:
            found.setdefault(r, []).append(at)
    return found


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


class Late:
    """Nodes that are put off, and what is put off with them.

    Attributes:
        members: Those that are put off.
        waiting: What waits for them.
    """

    __slots__ = ("members", "reads", "waiting", "writes")

    def __init__(self) -> None:
        self.members: list[Node] = []
        self.waiting: list[Node] = []
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def stops(self, n: Node) -> bool:
        """Whether a later node cannot go before them."""
        return bool((n.reads | n.writes) & self.writes or n.writes & self.reads)

    def add(self, n: Node, *, member: bool) -> None:
        """Put a node with those that wait."""
        (self.members if member else self.waiting).append(n)
        self.reads |= n.reads
        self.writes |= n.writes | {v.root for v in n.outs}


def is_scalar(n: Node) -> bool:
    """Whether a node only makes scalars of scalars: 0 dims are a global fact."""
    return n.kind in ("call", "number") and all(
        v.fake is None or v.fake.ndim == 0 for v in (*n.inputs, *n.outs)
    )


def places_of_starts(
    nodes: Sequence[Node],
    before: Sequence[Sequence[int]],
    is_heavy: Callable[[Node], bool],
    ahead: int = 1,
) -> dict[int, int]:
    """For each start from which place of the program on it may go out; -1: from the beginning.

    That is the last matrix product that what it sends is made of. What arrives from a gather is held, so a gather goes
    out once the one that is ``ahead`` of it is waited for; 0: where it is in the program.
    """
    ready: list[int] = []
    since: dict[int, int] = {}
    waits = {n.args[0]: at for at, n in enumerate(nodes) if n.kind == "wait"}
    held: dict[tuple[int, ...], list[int]] = {}  # by group: where gathers are waited for
    for at, n in enumerate(nodes):
        when = max([ready[p] for p in before[at]], default=-1)
        if n.kind == "start":
            if n.info["kind"] in HELD:
                earlier = held.setdefault(n.info["ranks"], [])
                if ahead < 1:
                    when = at
                elif len(earlier) >= ahead:
                    when = max(when, min(at, earlier[-ahead]))
                earlier.append(waits.get(n.outs[0], at))
            since[at] = when
        elif is_heavy(n):
            when = at
        ready.append(when)
    return since


def facts_of(step: Step, is_heavy: Callable[[Node], bool]) -> list[tuple[int, int, int]]:
    """For each collective of a recorded step when it may go out, whether a matrix product is before it, and its need.

    The first is a number of starts and waits of the program; the last is 0 where there is memory to keep what the
    collective brings (``again.py``). The collectives are in the order of their starts.
    A rank may know less than the others: where its piece is empty, or holds the zeros of a sum that another
    rank keeps, nothing comes before what it sends. So ranks take the largest of what all of them find (`settle`).
    """
    nodes = list(flatten(step.nodes))
    since = places_of_starts(nodes, dependencies(nodes), is_heavy)
    events = [at for at, n in enumerate(nodes) if n.kind in ("start", "wait")]
    spare = dispensable(step)
    return [
        (bisect_right(events, when), int(when >= 0), int(at not in spare))
        for at, when in since.items()
    ]


def settle(step: Step, facts: Sequence[tuple[int, int, int]]) -> None:
    """Note what the ranks have agreed on at the collectives of a recorded step; passes go by it."""
    for n, (since, heavy, needed) in zip(step.collectives(), facts, strict=True):
        n.info["since"], n.info["heavy"], n.info["needed"] = since, heavy, needed


def together(starts: Sequence[Node]) -> dict[str, Any]:
    """What is known of a collective that stands for several: which it carries, and when it may go out."""
    known: dict[str, Any] = {"carries": tuple(i for s in starts for i in s.info["carries"])}
    for name in ("since", "heavy"):
        if all(name in s.info for s in starts):
            known[name] = max(s.info[name] for s in starts)
    undivided = tuple(i for s in starts for i in s.info.get("undivided", ()))
    return {**known, "undivided": undivided} if undivided else known


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
