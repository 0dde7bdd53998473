"""What a step gives back and gathers again, and whether there was memory to keep it.

```text
   gather, fill   used   free  ...  gather again, allocate, fill again   used   free
                         |--------------------------------------------|   kept: nothing in here is done
```

A fully sharded module frees its parameters after forward and gathers them before backward. For the module that runs
last the one follows the other at once. Kept, its parameters take no more than the step takes elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.capture.ir import Node, Step, Value, flatten, users
from shardwise.capture.memory import most_live

_FILL = torch.ops.aten.split_with_sizes_copy.out


@dataclass(frozen=True, slots=True)
class Again:
    """Places of the nodes that are not needed if memory is kept, and how much that is.

    Attributes:
        free: Gives the memory back.
        allocate: Takes it again.
        start: Gathers what was there.
        wait: Of that gather.
        fill: Writes what has arrived.
        size_bytes: How much memory.
    """

    free: int
    allocate: int
    start: int
    wait: int
    fill: int
    size_bytes: int

    @property
    def places(self) -> tuple[int, ...]:
        """All of them."""
        return self.free, self.allocate, self.start, self.wait, self.fill


def gathered_again(nodes: Sequence[Node]) -> list[Again]:
    """Memory that is freed, and then filled as it was with what the same ranks send once more.

    Args:
        nodes: Of a step, in order; lowered or not.
    """
    found: list[Again] = []
    uses = users(nodes)
    version: dict[int, int] = {}  # how often a root was written
    started: dict[
        Value, tuple[int, int]
    ] = {}  # by handle: where, and the version of what is sent
    came: dict[
        Value, tuple[int, int]
    ] = {}  # by what has arrived: where its start and its wait are
    filled: dict[
        int, list[int]
    ] = {}  # by root: where it was filled, then freed, then allocated
    for at, n in enumerate(nodes):
        written = n.writes
        if n.kind == "start":
            started[n.outs[0]] = at, version.get(n.args[0].root, 0)
        elif n.kind == "wait" and n.args[0] in started:
            came[n.outs[0]] = started[n.args[0]][0], at
        elif n.kind == "effect" and n.name in ("free", "allocate"):
            so_far = filled.get(n.args[0].root, [])
            if len(so_far) == ("free", "allocate").index(n.name) + 1:
                so_far.append(at)
                written = frozenset()
        elif n.target is _FILL and n.args[0] in came and len(written) == 1:
            (root,) = written
            start, wait = came[n.args[0]]
            if len(so_far := filled.get(root, [])) == 3:
                first, free, allocate = so_far
                old = came[nodes[first].args[0]][0]
                alone = len(uses[nodes[start].outs[0]]) == len(uses[n.args[0]]) == 1
                if alone and _same(nodes, started, old, start, first, at):
                    size = nodes[allocate].args[1]
                    found.append(Again(free, allocate, start, wait, at, size))
            filled[root], written = [at], frozenset()
        for r in n.writes:
            version[r] = version.get(r, 0) + 1
        for r in written:
            filled.pop(r, None)
    return found


def _same(
    nodes: Sequence[Node],
    started: dict[Value, tuple[int, int]],
    old: int,
    new: int,
    first: int,
    again: int,
) -> bool:
    """Whether the second gather brings what the first has brought, to the same places."""
    a, b = nodes[old], nodes[new]
    return (
        a.args[0] is b.args[0]
        and a.info["kind"] == b.info["kind"] == "all_gather"
        and a.info["ranks"] == b.info["ranks"]
        and started[a.outs[0]][1] == started[b.outs[0]][1]
        and nodes[first].args[1:] == nodes[again].args[1:]
        and nodes[first].kwargs == nodes[again].kwargs
    )


def dispensable(step: Step) -> set[int]:
    """Places (of the lowered step) of gathers that need not be, for there is memory to keep what they bring.

    The step must not take more memory at its peak than it does as it is.
    """
    nodes = list(flatten(step.nodes))
    candidates = gathered_again(nodes)
    if not candidates:
        return set()
    row, peak = most_live(step, nodes)
    chosen: set[int] = set()
    for c in sorted(candidates, key=lambda c: c.allocate - c.free):
        between = range(c.free, c.allocate)
        if max(row[at] for at in between) + c.size_bytes <= peak:
            chosen.add(c.start)
            for at in between:
                row[at] += c.size_bytes
    return chosen
