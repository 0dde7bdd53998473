"""Collectives of the same kind travel together: one message in place of many.

Moves are put in one bucket if they are one collective each over the same ranks, in the same way and dtype, and none
waits for another. The order in a bucket is the order of the moves, which for gradients is that in which the
leaves were made: the same on all ranks, and bit for bit the sums of eager mode.

Reductions wait for the last of them; gathers go with the first that needs one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.ir import Node, Step

CAP_BYTES = 25 * 2**20


def bucket(step: Step, cap_bytes: int = CAP_BYTES) -> Step:
    """Put all-reduces, reduce-scatters and all-gathers into buckets of about ``cap_bytes``, exactly ceil(bytes / cap) of them."""
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        for run in _runs(step, kind):
            for part in _parts(run, cap_bytes):
                if len(part) > 1:
                    step = _together(step, part, kind)
    return step


def single(n: Node, kind: str) -> Node | None:
    """The start in a move that is one collective of a kind, else None."""
    if n.kind != "move":
        return None
    starts = [b for b in n.body if b.kind == "start"]
    if len(starts) != 1 or starts[0].info["kind"] != kind:
        return None
    return starts[0]


def payload(start: Node) -> int:
    """Bytes that a rank puts in: a global fact for reductions of replicas; of pieces, those of the padded piece."""
    return start.args[0].nbytes


def _runs(step: Step, kind: str) -> list[list[Node]]:
    """Moves that could travel together."""
    open_runs: dict[Any, list[Node]] = {}
    blocked: dict[Any, set[int]] = {}  # roots that depend on what an open run brings
    done: list[list[Node]] = []
    for n in step.nodes:
        start = single(n, kind)
        key = None
        if start is not None:
            value = start.args[0]
            key = (start.info["ranks"], start.info.get("op"), value.fake.dtype)
        for k in list(open_runs):
            hit = (n.reads | n.writes) & blocked[k]
            if (
                kind == "all_gather"
            ):  # goes early: what it takes must be there, and stay as it is
                touched = n.writes - {v.root for v in n.outs}
                if k == key and n.reads & blocked[k]:
                    done.append(open_runs.pop(k))
                    del blocked[k]
                else:
                    blocked[k] |= touched | {v.root for v in n.outs if n.kind != "move"}
            elif hit:
                done.append(open_runs.pop(k))
                del blocked[k]
        if start is None:
            continue
        if key not in open_runs:
            open_runs[key], blocked[key] = [], set()
        open_runs[key].append(n)
        if kind != "all_gather":
            blocked[key] |= {v.root for v in n.outs}
    return [run for run in (*done, *open_runs.values()) if len(run) > 1]


def _parts(run: list[Node], cap_bytes: int) -> list[list[Node]]:
    """The run cut into ceil(bytes / cap) parts of about the same size."""
    sizes = [sum(payload(b) for b in n.body if b.kind == "start") for n in run]
    count = min(max(1, math.ceil(sum(sizes) / cap_bytes)), len(run))
    goal = sum(sizes) / count
    parts: list[list[Node]] = []
    filled = 0.0
    for i, (n, size) in enumerate(zip(run, sizes)):
        left = len(run) - i
        full = parts and filled + size / 2 > goal * len(parts)
        if not parts or (full and len(parts) < count) or left <= count - len(parts):
            parts.append([])
        parts[-1].append(n)
        filled += size
    return parts


def _together(step: Step, part: list[Node], kind: str) -> Step:
    starts = [next(b for b in n.body if b.kind == "start") for n in part]
    packs = [list(n.body[: n.body.index(s)]) for n, s in zip(part, starts)]
    info = starts[0].info
    transport, ranks = info["transport"], info["ranks"]
    rests = [list(n.body[n.body.index(s) + 1 :]) for n, s in zip(part, starts)]
    packed = [s.args[0] for s in starts]
    arrived = [r[0].outs[0] for r in rests]  # of the waits

    def send(*xs: Tensor) -> Any:
        if kind == "all_reduce":
            flat = torch.cat([x.reshape(-1) for x in xs])  # nobody else has it
            return transport.all_reduce_owned_async(flat, ranks, info["op"], tag=info["tag"])
        if kind == "reduce_scatter":
            flat = torch.cat([x.reshape(len(ranks), -1) for x in xs], 1)
            return transport.reduce_scatter_async(flat, ranks, info["op"], tag=info["tag"])
        flat = torch.cat([x.reshape(-1) for x in xs])
        return transport.all_gather_async(flat, ranks, tag=info["tag"])

    def apart(got: Tensor) -> list[Tensor]:
        fakes = [a.fake for a in arrived]
        n = len(ranks) if kind == "all_gather" else 1
        sizes = [f.numel() // n for f in fakes if f is not None]
        pieces = got.split(sizes, -1)
        if kind == "all_gather":
            return [p.reshape(f.shape) for p, f in zip(pieces, fakes) if f is not None]
        return [p.view(f.shape) for p, f in zip(pieces, fakes) if f is not None]

    nodes, outs, index = step.tape.note_together(send, apart, packed, step.next_index)
    for n in nodes:
        n.site = part[0].site
        if n.kind == "start":
            n.info["members"] = len(part)
    before = [b for p in packs for b in p]
    new = dict(zip(arrived, outs))
    after = [b.with_values(new) for rest in rests for b in rest[1:]]
    bound = {
        n.outs[0]: new[n.outs[0]] for n in part if n.outs[0] in new
    }  # the wait's own result was the move's
    all_nodes = [*before, *nodes, *after]
    chosen = set(map(id, part))
    anchor = part[0] if kind == "all_gather" else part[-1]
    out: list[Node] = []
    for n in step.nodes:
        if n is anchor:
            out += all_nodes
        elif id(n) not in chosen:
            out.append(n)
    return step.with_nodes(out, index).substituted(bound)
