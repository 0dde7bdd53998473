"""An all-reduce overwrites what it is given if nobody needs that afterwards: one buffer and one copy less."""

from __future__ import annotations

from dataclasses import replace

from shardwise.capture.ir import Node, Step
from shardwise.capture.order import touched
from shardwise.capture.tape import starter


def in_place(step: Step) -> Step:
    """Let all-reduces take over memory that nobody reads later. Moves are lowered."""
    nodes = list(step.lowered().nodes)
    kept = {v.root for v, _ in step.inputs} | {v.root for v in step.outputs}
    places = touched(nodes)
    waits = {n.args[0]: at for at, n in enumerate(nodes) if n.kind == "wait"}
    done = False
    for at, n in enumerate(nodes):
        if n.kind != "start" or n.info["kind"] != "all_reduce" or n.info.get("owned"):
            continue
        root = n.args[0].root
        # another collective that is under way may be sending it, too
        later = [p for p in places[root] if p > at and p != waits.get(n.outs[0])]
        if root not in kept and not later:
            nodes[at], done = _owning(n, root), True
    return step.with_nodes(nodes) if done else step


def _owning(n: Node, root: int) -> Node:
    info = {**n.info, "owned": True}
    return replace(n, info=info, target=starter(info), writes=n.writes | {root})
