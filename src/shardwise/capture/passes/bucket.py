"""Collectives of the same kind travel together: one message in place of many.

Moves are put in one bucket if they are one collective each over the same ranks, in the same way and dtype, and none
waits for another. The order in a bucket is the order of the moves, which for gradients is that in which the
leaves were made: the same on all ranks, and bit for bit the sums of eager mode.

Reductions wait for the last of them, and scalars that are made of their results wait with them; what no matrix
product has gone into does not wait for what has. Gathers go with the first that needs one.

The size: given, or that for which latency hardly counts by what is known of the network, else 25 MiB.
"""

from __future__ import annotations

from dataclasses import replace
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.cost import Network, is_heavy, network
from shardwise.capture.ir import Node, Step, Value, alike, substitute
from shardwise.capture.order import Late, is_scalar, readiness, together
from shardwise.route.cost import Profile

_ATEN = torch.ops.aten
CAP_BYTES = 25 * 2**20  # where nothing is known of the network
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def bucket(step: Step, cap_bytes: int | None = None, profile: Profile | None = None) -> Step:
    """Put all-reduces, reduce-scatters and all-gathers into buckets, exactly ceil(bytes / cap) of them.

    Args:
        step: A step.
        cap_bytes: About so many bytes in a bucket; the same on all ranks.
        profile: How fast the mesh talks, for a size where none is given; default what ``mesh.profile()`` found.
    """
    step = as_moves(step)
    net = network(step, profile) if cap_bytes is None else None
    for kind in KINDS:
        parts = [
            part
            for run in _runs(step, kind)
            for part in _parts(run, _cap(cap_bytes, net, run))
            if len(part) > 1
        ]
        if parts:
            step = _together(step, parts, kind)
    return step


def _cap(cap_bytes: int | None, net: Network | None, run: list[Node]) -> int:
    if net is None:
        assert cap_bytes is not None, "the network is asked where no size is given"
        return cap_bytes
    return net.bucket_bytes(start_of(run[0]).info["ranks"]) or CAP_BYTES


def single(n: Node, kind: str) -> Node | None:
    """The start in a move that is one collective of a kind, else None."""
    if n.kind != "move":
        return None
    starts = [b for b in n.body if b.kind == "start"]
    if len(starts) != 1 or starts[0].info["kind"] != kind:
        return None
    after = n.body[n.body.index(starts[0]) + 1 :]
    if not after or after[0].kind != "wait" or any(b.kind != "call" for b in after[1:]):
        return None
    return starts[0]


def as_moves(step: Step) -> Step:
    """The step with the sums that rules have started themselves as moves, too."""
    sums = {
        n.outs[0] for n in step.nodes if n.kind == "start" and n.info["kind"] == "all_reduce"
    }
    alone = {n.args[0]: n for n in step.nodes if n.kind == "wait" and n.args[0] in sums}
    nodes: list[Node] = []
    for n in step.nodes:
        if n.kind == "start" and n.outs[0] in alone:
            wait = alone[n.outs[0]]
            reads, writes = n.reads, n.writes | wait.writes
            move = Node(
                "move", n.name, None, n.args, {}, wait.outs, wait.result, reads, writes, n.site
            )
            nodes.append(replace(move, body=(n, wait)))
        elif n.kind != "wait" or n is not alone.get(n.args[0]):
            nodes.append(n)
    return step.with_nodes(nodes)


def start_of(n: Node) -> Node:
    """The first collective of a move."""
    return next(b for b in n.body if b.kind == "start")


def payload(start: Node) -> int:
    """Bytes that a rank puts in: a global fact for reductions of replicas; of pieces, those of the padded piece."""
    return start.args[0].nbytes


# ---- which may travel together -----------------------------------------------------------------------


def _runs(step: Step, kind: str) -> list[list[Node]]:
    """Moves that could travel together."""
    runs = _gathers(step) if kind == "all_gather" else _reductions(step, kind)
    return [run for run in runs if len(run) > 1]


def key_of(start: Node) -> tuple[Any, ...]:
    """What collectives of a kind have in common that may travel together."""
    return start.info["ranks"], start.info.get("op"), start.args[0].fake.dtype


def _reductions(step: Step, kind: str) -> list[list[Node]]:
    ready = readiness(step.nodes, is_heavy)
    open_runs: dict[Any, Late] = {}
    done: list[Late] = []
    for n, since in zip(step.nodes, ready):
        for k, run in list(open_runs.items()):
            if run.stops(n):
                if is_scalar(n):
                    run.add(n, member=False)
                else:
                    done.append(open_runs.pop(k))
        start = single(n, kind)
        if start is not None:
            late = start.info.get("heavy", since >= 0)  # what the ranks have agreed on
            key = (*key_of(start), bool(late))
            open_runs.setdefault(key, Late()).add(n, member=True)
    return [run.members for run in (*done, *open_runs.values())]


def _gathers(step: Step) -> list[list[Node]]:
    open_runs: dict[Any, list[Node]] = {}
    since: dict[
        Any, tuple[set[int], set[Value]]
    ] = {}  # what changed or was made since the first of a run
    done: list[list[Node]] = []
    for n in step.nodes:
        start = single(n, "all_gather")
        if start is not None:
            key = key_of(start)
            if key in open_runs:
                roots, values = since[key]
                if n.reads & roots or not values.isdisjoint(n.inputs):
                    done.append(open_runs.pop(key))
            if key not in open_runs:
                open_runs[key], since[key] = [], (set(), set())
            open_runs[key].append(n)
        for roots, values in since.values():
            roots |= n.writes
            values.update(n.outs)
    return [*done, *open_runs.values()]


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


# ---- one message in place of many ----------------------------------------------------------------------


def _together(step: Step, parts: list[list[Node]], kind: str) -> Step:
    """Each part as one collective: reductions where the last of them was, gathers where the first was."""
    index = step.next_index
    bound: dict[Value, Value] = {}
    made: dict[int, list[Node]] = {}  # by part
    part_of: dict[int, int] = {}
    sizes = _element_sizes(step)
    for i, part in enumerate(parts):
        made[i], new, index = _one_message(step, part, kind, index, sizes)
        bound.update(new)
        part_of.update({id(n): i for n in part})
    out: list[Node] = []
    waiting: dict[int, Late] = {}

    def place(n: Node) -> None:
        for late in waiting.values():
            if late.stops(n):
                late.add(n, member=False)
                return
        out.append(n)

    for n in step.nodes:
        i = part_of.get(id(n))
        if i is None:
            place(n)
        elif kind == "all_gather":
            out.extend(made.pop(i, ()))
        elif n is not parts[i][-1]:
            waiting.setdefault(i, Late()).add(n, member=True)
        else:
            late = waiting.pop(i)
            out.extend(made.pop(i))
            for x in late.waiting:
                place(x)
    return step.with_nodes(out, index).substituted(bound)


def _one_message(
    step: Step, part: list[Node], kind: str, index: int, element_sizes: dict[int, int]
) -> tuple[list[Node], dict[Value, Value], int]:
    """The nodes of a part's collective, what becomes of its results, the next free number."""
    starts = [start_of(n) for n in part]
    packs = [list(n.body[: n.body.index(s)]) for n, s in zip(part, starts)]
    info = starts[0].info
    transport, ranks = info["transport"], info["ranks"]
    rests = [n.body[n.body.index(s) + 1 :] for n, s in zip(part, starts)]
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
        pieces = got.split([f.numel() // n for f in fakes if f is not None], -1)
        shaped = [p.reshape(f.shape) for p, f in zip(pieces, fakes) if f is not None]
        most = [element_sizes[n.outs[0].root] for n in part]
        return [_unpacked(n, p, r, size) for n, p, r, size in zip(part, shaped, rests, most)]

    made = {v for rest in rests for b in rest for v in b.outs}
    others = [
        v
        for rest in rests
        for b in rest[1:]
        for v in b.inputs
        if v not in made and v.fake is not None
    ]
    nodes, outs, index = step.tape.note_together(send, apart, packed, index, others)
    for n in nodes:
        n.site = part[0].site
        if n.kind == "start":
            n.info["members"] = len(part)
            n.info.update(together(starts))
    before = [b for p in packs for b in p]
    bound = {n.outs[0]: out for n, out in zip(part, outs)}
    return [*before, *nodes], bound, index


def _element_sizes(step: Step) -> dict[int, int]:
    """For each memory the bytes of the largest elements that it is seen in: a piece has to begin at one."""
    found: dict[int, int] = {}
    for n in step.nodes:
        for v in n.outs:
            if v.fake is not None:
                found[v.root] = max(found.get(v.root, 1), v.fake.element_size())
    return found


def _unpacked(n: Node, piece: Tensor, rest: tuple[Node, ...], element_size: int) -> Tensor:
    """What a move gives, from what has arrived for it: the calls after its wait, on other memory and strides."""
    first = [b.target for b in rest[1:3]]
    if first and first != [_ATEN.permute.default, _ATEN.clone.default]:
        piece = piece.contiguous()  # as it would have arrived alone; else it is copied next
    known: dict[Value, Any] = {rest[0].outs[0]: piece}
    for b in rest[1:]:
        fakes = {v: known.get(v, v.fake) for v in b.inputs}
        assert b.target is not None, "calls have a target"
        made = b.target(*substitute(b.args, fakes), **substitute(b.kwargs, fakes))
        known.update(zip(b.outs, made if isinstance(made, (tuple, list)) else [made]))
    whole, alone = known[n.outs[0]], n.outs[0].fake
    assert alone is not None, "a move gives a tensor"
    start = whole.storage_offset() * whole.element_size()
    if alike(whole, alone) and start % element_size == 0:
        return whole
    # what follows has been recorded by its strides, and may see it in another dtype
    return whole.new_empty_strided(alone.shape, alone.stride()).copy_(whole)
