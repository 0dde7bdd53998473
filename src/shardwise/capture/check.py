"""Ranks prove to each other that they have captured the same step, once, before anything of it runs.

What must agree is what every rank would write down alike: where inputs come from and how they lie, moves between
layouts, collectives, draws. Local calls are left out: the first and the last rank of a halo differ in them, and rightly so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
import time
from typing import Any

from shardwise.capture.ir import Node, Step, flatten, placed
from shardwise.comm.transport import Transport
from shardwise.errors import CaptureError
from shardwise.recording import record_with


def lines_of(step: Step) -> list[str]:
    """What all ranks must have alike, in order, one line each."""
    lines = []
    for value, slot in step.inputs:
        if slot.layout is not None and slot.layout.has_empty():
            continue  # a rank that holds nothing of it may not need it
        if slot.layout is not None:
            shape = list(slot.layout.shape)
            lines.append(f"{slot.role} {slot.name}: {shape} {placed(slot.layout)}")
        elif slot.role == "number" or value.fake is None:
            lines.append(f"{slot.role} {slot.name}")
        elif slot.role != "closed-over":
            lines.append(f"{slot.role} {slot.name}: {value.fake.dtype}")
    for n in step.nodes:
        lines += _node_lines(n)
    return lines + (step.tape.facts if step.tape is not None else [])


def _node_lines(n: Node) -> Iterator[str]:
    at = f" at {n.site}" if n.site else ""
    if n.kind == "move":
        mover = n.info.get("mover")
        shape = "" if mover is None else f" of {list(mover.src.shape)} {mover.src.dtype}"
        yield f"{n.name}{shape}{at}"
    elif n.kind == "start":
        info = n.info
        what = f"{info['kind']} {info.get('op', '')}".strip()
        over = info.get("tag") or f"{len(info['ranks'])} ranks"
        yield f"{what} over {over}, {n.args[0].fake.dtype}{at}"
    elif n.kind == "opaque" and n.name == "draw":
        yield f"draw {n.args[0]} of {n.args[1]}{at}"


def ranks_of(layouts: Iterable[Any]) -> tuple[int, ...]:
    """The ranks of the largest mesh."""
    best: tuple[int, ...] = ()
    for layout in layouts:
        if len(layout.mesh.ranks) > len(best):
            best = tuple(layout.mesh.ranks)
    return best


def group_of(step: Step) -> tuple[int, ...]:
    """The ranks that a step talks to: those of its largest mesh or collective."""
    best = ranks_of(slot.layout for _, slot in step.inputs if slot.layout is not None)
    for n in flatten(step.nodes):
        if n.kind == "start" and len(n.info["ranks"]) > len(best):
            best = tuple(n.info["ranks"])
    return best


def groups_of(step: Step, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The groups that must agree about a step, one after the other: the ranks given, and others it talks to.

    A mesh for tensors and another for data are known to a rank as two groups. If each in turn hands on what the one
    before has found, all ranks of both know it.
    """
    groups = [tuple(ranks) or group_of(step)]
    for n in flatten(step.nodes):
        if n.kind == "start" and not any(set(n.info["ranks"]) <= set(g) for g in groups):
            groups.append(tuple(n.info["ranks"]))
    return groups


def order_of(step: Step) -> str:
    """The collectives of a step in the order of their starts, told apart by what they carry: one for all ranks.

    And what of that is divided only when it has arrived (``passes/late_mean.py``).
    """
    return "\n".join(
        f"{n.info['carries']} {n.info['kind']} {n.info.get('op')} {n.args[0].fake.dtype}"
        f" {n.info.get('undivided', '')}"
        for n in step.collectives()
    )


def alike(transport: Transport, groups: Iterable[Sequence[int]], text: str) -> bool:
    """Whether all ranks have the same text; they all get the same answer."""
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    same = True
    for group in map(tuple, groups):
        if len(group) < 2 or transport.rank not in group:
            continue
        with record_with(None):
            everyone = transport.all_gather_object((digest, same), group, tag="capture")
        same = all(x == (digest, True) for x in everyone)
    return same


Facts = list[tuple[int, int, int]]  # of each collective: see ``order.facts_of``


def digest_of(lines: list[str]) -> str:
    """What stands for a step that all ranks have written down alike."""
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def leave_word(transport: Transport, ranks: Sequence[int], error: str) -> None:
    """Tell whoever comes to the next `meet` that this rank could not record; nobody is waited for.

    A rank that records anew may be the only one that does, so it cannot ask the others to agree on its error.
    """
    _signed(transport, tuple(ranks), error)


def meet(transport: Transport, ranks: Sequence[int]) -> None:
    """Before ranks agree on a step that is not their first: all are here, or one has left word why not.

    Raises:
        CaptureError: A rank could not record, or does not come within the store's timeout.
    """
    group = tuple(ranks)
    place = _signed(transport, group, "")
    missing = [] if place is None else [r for r in group if r != transport.rank]
    store, pause = transport.store, 0.001
    deadline = time.monotonic() + (store.timeout.total_seconds() if missing else 0)
    while missing:
        for r in [r for r in missing if store.check([f"{place}{r}"])]:
            text = store.get(f"{place}{r}").decode()
            if text:
                raise CaptureError(f"rank {r} could not capture the step: {text}")
            missing.remove(r)
        if missing and time.monotonic() > deadline:
            raise CaptureError(
                f"rank {missing[0]} does not record the step anew, as this rank does.",
                tries=["give all ranks batches of one layout, and modes that are alike"],
            )
        time.sleep(pause if missing else 0)
        pause = min(2 * pause, 0.1)


def _signed(transport: Transport, group: tuple[int, ...], word: str) -> str | None:
    """Put this rank's word where the ranks of a group look for it; None if there is no such place."""
    if len(group) < 2 or transport.rank not in group or transport.store is None:
        return None
    key = "capture", group
    count = transport.state[key] = transport.state.get(key, 0) + 1
    place = f"shardwise/capture/{','.join(map(str, group))}/{count}/"
    transport.store.set(f"{place}{transport.rank}", word)
    return place


def agree(
    transport: Transport,
    groups: Iterable[Sequence[int]],
    lines: list[str],
    error: str | None,
    facts: Facts | None = None,
) -> Facts:
    """Compare what the ranks have written down; all raise, or none.

    Args:
        transport: This rank's transport.
        groups: Who takes part; this rank alone: nothing is compared. The ranks of the first group must have the same
            lines; those of others hear of errors, and of facts where they have as many.
        lines: This rank's lines.
        error: Why this rank could not record, or None.
        facts: What this rank has found of its collectives.

    Returns:
        The largest of what the ranks have found, fact by fact.

    Raises:
        CaptureError: Some rank could not record, or recorded another step: the first difference is named.
    """
    facts, failure, digest = facts or [], None, digest_of(lines)
    for i, group in enumerate(map(tuple, groups)):
        if len(group) < 2 or transport.rank not in group:
            continue
        with record_with(None):
            everyone = transport.all_gather_object((digest, error, facts), group, tag="capture")
        failed = [(r, e) for r, (_, e, _) in zip(group, everyone) if e is not None]
        if failed:
            if (
                error is None
            ):  # else it raises its own; the ranks of the next group must hear of it, too
                error = f"rank {failed[0][0]} could not capture the step: {failed[0][1]}"
                failure = CaptureError(error)
        elif i == 0 and any(d != digest for d, _, _ in everyone):
            failure = _difference(transport, group, lines, [d for d, _, _ in everyone])
            error = str(failure)
        elif len({len(f) for _, _, f in everyone}) == 1:
            facts = [
                (
                    max(s for s, _, _ in each),
                    max(h for _, h, _ in each),
                    max(n for _, _, n in each),
                )
                for each in zip(*(f for _, _, f in everyone))
            ]
    if failure is not None:
        raise failure
    return facts


def _difference(
    transport: Transport, group: tuple[int, ...], lines: list[str], digests: list[str]
) -> CaptureError:
    with record_with(None):
        texts = transport.all_gather_object(lines, group, tag="capture")
    other = next(i for i, d in enumerate(digests) if d != digests[0])
    first, second = texts[0], texts[other]
    at = next(
        (i for i, (a, b) in enumerate(zip(first, second)) if a != b),
        min(len(first), len(second)),
    )

    def line(text: list[str]) -> str:
        return text[at] if at < len(text) else "nothing more"

    return CaptureError(
        f"the ranks captured different steps. The first difference: rank {group[0]} has "
        f"`{line(first)}`, rank {group[other]} has `{line(second)}`.",
        tries=[
            "let every rank run the same program: no branch on the rank around distributed calls"
        ],
    )
