"""Live bytes of a step while it runs, by its memory (*roots*), as the executor frees it: at the last use.

What comes from outside is the caller's and counts nothing; what is handed out stays. A collective holds its input
and what it receives from start to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.capture.ir import Node, Step, Value, flatten


class Memory:
    """Counts live bytes; `run` nodes in any order that keeps to the dependencies.

    Attributes:
        live: Bytes that are live now.
        peak: The most so far.
    """

    def __init__(self, step: Step, nodes: Sequence[Node]) -> None:
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._now: dict[int, int] = {}  # bytes by root, of what is live
        self._left: dict[int, int] = {}  # uses to come
        self._same: dict[int, int] = {}  # a sum in place is received where it was sent from
        self._outside = {v.root for v, _ in step.inputs}
        self._kept = self._outside | {v.root for v in step.outputs}
        got = {n.args[0]: n.outs[0] for n in nodes if n.kind == "wait"}
        sent: dict[Value, Node] = {n.outs[0]: n for n in nodes if n.kind == "start"}
        self._touched: dict[int, tuple[int, ...]] = {}
        for n in nodes:
            if n.kind == "start" and n.info.get("owned") and n.outs[0] in got:
                self._same[got[n.outs[0]].root] = n.args[0].root
            for v in n.outs:
                if v.fake is not None:
                    self._sizes.setdefault(v.root, v.fake.untyped_storage().nbytes())
        for v, _ in step.inputs:
            if v.fake is not None:
                self._sizes[v.root] = v.fake.untyped_storage().nbytes()
        for n in nodes:
            roots = {v.root for v in (*n.inputs, *n.outs)} | n.reads | n.writes
            if n.kind == "start" and n.outs[0] in got:
                roots.add(got[n.outs[0]].root)
            elif n.kind == "wait" and n.args[0] in sent:
                roots |= {v.root for v in sent[n.args[0]].inputs}
            roots = {self._same.get(r, r) for r in roots}
            touched = tuple(r for r in roots if r in self._sizes)
            self._touched[id(n)] = touched
            for r in touched:
                self._left[r] = self._left.get(r, 0) + 1

    def needs(self, *nodes: Node) -> int:
        """Bytes that nodes take, nothing given back between them."""
        roots = {r for n in nodes for r in self._touched[id(n)]}
        new = sum(
            self._sizes[r] for r in roots if r not in self._now and r not in self._outside
        )
        return new + sum(
            n.args[1] for n in nodes if n.kind == "effect" and n.name == "allocate"
        )

    def gives(self, nodes: Sequence[Node]) -> int:
        """Bytes of what is live now that nobody uses after these nodes."""
        uses: dict[int, int] = {}
        for n in nodes:
            for r in self._touched[id(n)]:
                uses[r] = uses.get(r, 0) + 1
        return sum(
            self._now.get(r, 0)
            for r, count in uses.items()
            if count == self._left[r] and r not in self._kept
        )

    def run(self, n: Node) -> None:
        """Count a node: what it takes, then what nobody uses any more."""
        for r in self._touched[id(n)]:
            if r not in self._now and r not in self._outside:
                self._resize(r, self._sizes[r])
        if n.kind == "effect" and n.name in ("allocate", "free"):
            self._resize(n.args[0].root, n.args[1])
        for r in self._touched[id(n)]:
            self._left[r] -= 1
            if not self._left[r] and r not in self._kept:
                self._resize(r, 0)

    def _resize(self, root: int, size: int) -> None:
        before = self._now.get(root, 0)
        if root not in self._now and root in self._outside and not size:
            before = self._sizes[root]  # the caller's, given back
        self._now[root] = size
        self.live += size - before
        self.peak = max(self.peak, self.live)


def peak_bytes(step: Step, nodes: Iterable[Node] | None = None) -> int:
    """The most bytes that are live at once, beside the inputs.

    Args:
        step: A step.
        nodes: Its nodes in another order; default as they are. Moves count as what carries them out.
    """
    order = list(flatten(step.nodes if nodes is None else nodes))
    memory = Memory(step, order)
    for n in order:
        memory.run(n)
    return memory.peak


def most_live(step: Step, nodes: Sequence[Node]) -> tuple[list[int], int]:
    """The most bytes that are live at each node of the program, run as it is, and the most of all."""
    memory = Memory(step, nodes)
    row: list[int] = []
    for n in nodes:
        needs = memory.live + memory.needs(n)
        memory.run(n)
        row.append(max(needs, memory.live))
    return row, memory.peak
