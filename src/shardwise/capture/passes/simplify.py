"""Remove dead and duplicate work: what nobody needs, what is computed twice, copies that only change a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.capture.ir import OUTSIDE, RNG, Node, Slot, Step, Value, flatten, values_in
from shardwise.capture.order import touched

_ATEN = torch.ops.aten
_EMPTY = {
    _ATEN.new_empty_strided.default,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.empty.memory_format,
    _ATEN.new_empty.default,
}


def simplify(step: Step) -> Step:
    """All of it, to the end."""
    step = constants(step)
    while True:
        before = len(step.nodes)
        step = dead(copies(duplicates(views(step))))
        if len(step.nodes) == before:
            return step


def constants(step: Step) -> Step:
    """A constant that nothing writes to need not be made anew: it becomes a closed-over input."""
    written = _write_counts(step.nodes)
    given = {v.root for v in step.outputs}  # the user may write to it
    nodes: list[Node] = []
    inputs = list(step.inputs)
    for n in step.nodes:
        made = n.kind == "opaque" and n.name == "constant"
        if made and written[n.outs[0].root] == 1 and n.outs[0].root not in given:
            kept = n.target.__self__  # pyright: ignore[reportOptionalMemberAccess,reportFunctionMemberAccess]
            inputs.append(
                (n.outs[0], Slot("constant", "closed-over", lambda _, kept=kept: kept))
            )
        else:
            nodes.append(n)
    if len(nodes) == len(step.nodes):
        return step
    return replace(step, nodes=tuple(nodes), inputs=tuple(inputs))


# ---- views -----------------------------------------------------------------------------------------


def _geometry(v: Value) -> Any:
    t = v.fake
    assert t is not None, "only tensors have a geometry"
    return (
        v.root,
        t.shape,
        t.stride(),
        t.storage_offset(),
        t.dtype,
        t.device,
        t.is_conj(),
        t.is_neg(),
    )


def views(step: Step) -> Step:
    """A view that shows what another value shows already is that value (``detach``, ``t`` of ``t``).

    What is handed out stays an object of its own: not one that the user has given or gets beside it.
    """
    outputs = set(step.outputs)
    taken = {v for v, _ in step.inputs} | outputs
    known: dict[Any, Value] = {_geometry(v): v for v, _ in step.inputs if v.fake is not None}
    new: dict[Value, Value] = {}
    nodes: list[Node] = []
    for n in step.nodes:
        pure = n.kind == "call" and not n.writes and n.outs
        if pure:
            same = [known.get(_geometry(v)) for v in n.outs]
            own = [s for v, s in zip(n.outs, same) if v in outputs]
            if all(s is not None for s in same) and taken.isdisjoint(own):
                new.update({v: s for v, s in zip(n.outs, same) if s is not None})
                taken.update(s for s in own if s is not None)
                continue
        for v in n.outs:
            if v.fake is not None:
                known.setdefault(_geometry(v), v)
        nodes.append(n)
    return step.with_nodes(nodes).substituted(_closed(new))


def _closed(new: dict[Value, Value]) -> dict[Value, Value]:
    """Chains of replacements followed to the end."""
    out: dict[Value, Value] = {}
    for v, to in new.items():
        while to in new:
            to = new[to]
        out[v] = to
    return out


# ---- duplicates --------------------------------------------------------------------------------------


def duplicates(step: Step) -> Step:
    """Work that was done before on the same values is not done again; moves with their waits included."""
    writers = _write_counts(step.nodes)
    version: dict[int, int] = {}
    known: dict[Any, Node] = {}
    new: dict[Value, Value] = {}
    nodes: list[Node] = []
    kept_roots = {v.root for v in step.outputs}
    for old in step.nodes:
        n = old.with_values({v: new[v] for v in values_in((old.args, old.kwargs)) if v in new})
        fresh = {v.root for v in n.outs}
        pure = (
            n.kind in ("call", "move", "number")
            and n.outs
            and RNG not in n.reads
            and OUTSIDE not in n.reads
            and all(r in fresh or _inner(n, r) for r in n.writes)
            and all(writers.get(v.root, 0) <= 1 for v in n.outs)
            and not (fresh & kept_roots and n.kind != "number")
            # a view of what lies elsewhere from now on: its turn comes when that is known
            and (n is old or fresh <= n.writes)
        )
        if pure:
            key = _key(n, version)
            twin = known.get(key) if key is not None else None
            if twin is not None:
                new.update(zip(n.outs, twin.outs))
                continue
            if key is not None:
                known[key] = n
        for r in n.writes:
            version[r] = version.get(r, 0) + 1
        nodes.append(n)
    return step.with_nodes(nodes).substituted(_closed(new))


def _inner(n: Node, root: int) -> bool:
    """Whether a root is only used inside a move."""
    return n.kind == "move" and root not in n.reads


def _write_counts(nodes: Sequence[Node]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for n in nodes:
        for r in n.writes:
            counts[r] = counts.get(r, 0) + 1
    return counts


def _key(n: Node, version: dict[int, int]) -> Any:
    what: Any = n.info.get("mover") if n.kind == "move" else n.target
    if what is None:
        return None
    versions = tuple(sorted((r, version.get(r, 0)) for r in n.reads))
    key = (n.kind, n.name, id(what), _frozen(n.args), _frozen(n.kwargs), versions)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_frozen, x))
    if isinstance(x, dict):
        return tuple((k, _frozen(v)) for k, v in x.items())
    return type(x), repr(x) if type(x) is float else x  # 0.0 and -0.0 are equal


# ---- copies ------------------------------------------------------------------------------------------


def copies(step: Step) -> Step:
    """A copy of what nobody looks at afterwards is the original (autograd copies what it cannot take over)."""
    nodes = list(step.nodes)
    places_of = touched(nodes)
    last = {r: places[-1] for r, places in places_of.items()}
    handed_out = {v.root for v in step.outputs}
    forever = {v.root for v, _ in step.inputs} | handed_out
    made = {v: at for at, n in enumerate(nodes) for v in n.outs}
    new: dict[Value, Value] = {}
    moved: set[int] = set()  # memory that has become another's
    gone: set[int] = set()
    for at, n in enumerate(nodes):
        pair = _copied(n, at, nodes, made, places_of)
        if pair is None:
            continue
        dst, src, places = pair
        if src.root in moved or src.root in forever or last[src.root] > at:
            continue
        if not _same_memory(dst, src):
            continue
        new[dst] = src
        moved.add(dst.root)
        gone.update(places)
        last[src.root] = last.get(dst.root, at)
        if dst.root in handed_out:
            forever.add(src.root)
    kept = [n for at, n in enumerate(nodes) if at not in gone]
    return step.with_nodes(kept).substituted(new)


def _copied(
    n: Node,
    at: int,
    nodes: list[Node],
    made: dict[Value, int],
    places_of: dict[int, list[int]],
) -> tuple[Value, Value, tuple[int, ...]] | None:
    """The copy, the original and the places of the nodes, if a node only copies."""
    if n.kind != "call":
        return None
    if n.target is _ATEN.clone.default:
        src = n.args[0]
        return (n.outs[0], src, (at,)) if isinstance(src, Value) else None
    if n.target is _ATEN.copy_.default:
        dst, src = n.args[0], n.args[1]
        if not (isinstance(dst, Value) and isinstance(src, Value)) or dst not in made:
            return None
        first = made[dst]
        if nodes[first].target in _EMPTY and places_of[dst.root][:2] == [first, at]:
            return dst, src, (first, at)
    return None


def _same_memory(dst: Value, src: Value) -> bool:
    a, b = dst.fake, src.fake
    return (
        a is not None
        and b is not None
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
        and not b.is_conj()
        and not b.is_neg()
        and a.storage_offset() == b.storage_offset() == 0
        and b.untyped_storage().nbytes() == src.nbytes
    )


# ---- dead --------------------------------------------------------------------------------------------


def dead(step: Step) -> Step:
    """What changes nothing that is handed out, kept, drawn or seen outside is not done."""
    live = {v.root for v, _ in step.inputs} | {v.root for v in step.outputs} | {RNG, OUTSIDE}
    needed = set(step.outputs)
    kept: list[Node] = []
    for n in reversed(step.nodes):
        effect = n.writes - {v.root for v in n.outs}
        fresh = {v.root for v in n.outs} & n.writes
        if (
            effect & live
            or fresh & live
            or any(v in needed for v in n.outs)
            or n.kind == "effect"
            or (n.kind == "start" and n.info["kind"] == "broadcast")  # others wait for it
        ):
            kept.append(n)
            live |= n.reads
            needed.update(n.inputs)
    kept.reverse()
    # what a move is given it may not need on this rank (zeros of a pending sum), but other passes name it
    used = {v for n in (*kept, *flatten(kept)) for v in n.inputs} | set(step.outputs)
    inputs = tuple((v, s) for v, s in step.inputs if v in used)
    return replace(step, nodes=tuple(kept), inputs=inputs)
