"""What all ranks agree on before a save: where it goes, who writes what, and that nothing is wrong.

A rank tells the others 49 bytes. If their digests are those of the save before, so is the plan, and what this rank
writes has been copied while they were under way; else the ranks tell each other what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
import os
from pathlib import Path
import time
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from shardwise.checkpoint import series
from shardwise.checkpoint.adapters import unfold
from shardwise.checkpoint.nested import flatten
from shardwise.checkpoint.records import KeyPath
from shardwise.checkpoint.staging import Plan, Staging, has_pending, make_plan, share
from shardwise.checkpoint.storage import attempt, phase, remove_folder
from shardwise.checkpoint.world import (
    Slot,
    Spread,
    all_slots,
    digest_of,
    slots_of,
    tell,
    together,
    wire_device,
)
from shardwise.comm.execute import mover
from shardwise.comm.transport import Transport, current
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box
from shardwise.layout.layout import Layout
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap

PENDING, _PLAN, STAGING = (
    "checkpoint_being_saved",
    "checkpoint_plan",
    "checkpoint_staging",
)  # what is kept between saves


@dataclass(slots=True)
class Job:
    """One save, as one rank sees it."""

    transport: Transport
    target: Path
    folder: Path  # where it is written; named by rank 0
    save_id: str
    keep: int | None
    overwrite: bool
    pieces: list[tuple[str, Box, Tensor]]  # what this rank writes
    objects: dict[str, Callable[[], bytes]]
    spread: dict[str, Spread]
    tied: dict[str, str]
    paths: dict[str, KeyPath] = field(default_factory=dict)
    error: str = ""  # why this rank cannot write
    copy_s: float = 0.0  # how long the copies took


@dataclass(slots=True)
class _Share:
    """What this rank writes, or why it cannot."""

    pieces: list[tuple[str, Box, Tensor]] = field(default_factory=list)
    objects: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    error: str = ""
    copy_s: float = 0.0


def prepare(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    step: int | None,
    keep: int | None,
    overwrite: bool,
    staged: bool = False,
) -> Job:
    """Agree with all ranks on a save; with ``staged`` its tensors are copies that nobody changes.

    Raises:
        CheckpointError: On all ranks; nothing has been written.
    """
    transport = current()
    before = transport.state.pop(PENDING, None)
    unheard = "" if before is None else before._unheard()
    prepared, error = attempt(lambda: _look(state, keep, step), "the state")
    error = f"the save before this one failed: {unheard}" if unheard else error
    flat, paths, mine = prepared if prepared is not None else ({}, {}, [])
    known: Plan | None = transport.state.get(_PLAN)
    if known is not None and known.mine != mine:
        known = None
    digest = digest_of(mine) if known is None else known.digests[transport.rank]
    target = Path(path) if step is None else series.step_folder(path, step)
    save_id = uuid4().bytes
    folder = _folder(target, save_id)
    opened = transport.rank == 0 and not error
    if opened:
        _, error = attempt(lambda: _open(target, folder, overwrite), str(target))
        opened = not error
    where = blake2b(str(target).encode(), digest_size=16).digest()
    answers = _ask(transport, bytes([bool(error)]) + digest + where + save_id)
    mine_early = None
    if known is not None and not known.pending and not error:
        mine_early = _share(transport, known, flat, staged)
    try:
        told = [(a[0], a[1:17], a[17:33], a[33:]) for a in answers()]
        if any(failed for failed, _, _, _ in told):
            together(transport, error)
        save_id = told[0][3]
        folder = _folder(target, save_id)
        if any(other != told[0][2] for _, _, other, _ in told):  # rank 0 says where
            folder = Path(together(transport, "", str(folder))[0])
        plan, flat = _planned(transport, mine, tuple(d for _, d, _, _ in told), flat)
    except CheckpointError:  # on all ranks
        if opened:
            remove_folder(folder)
        raise
    if plan is not known or mine_early is None:
        mine_early = _share(transport, plan, flat, staged)
    phase("planned", folder)
    return Job(
        transport,
        target,
        folder,
        save_id.hex(),
        keep,
        overwrite,
        mine_early.pieces,
        mine_early.objects,
        plan.spread,
        plan.tied,
        paths,
        mine_early.error,
        mine_early.copy_s,
    )


def _folder(target: Path, save_id: bytes) -> Path:
    return target.parent / f".tmp-{target.name}-{save_id.hex()[:12]}"


def _ask(transport: Transport, message: bytes) -> Callable[[], list[bytes]]:
    """Tell all ranks a few bytes; what is returned waits for those of all."""
    if transport.world_size == 1:
        return lambda: [message]
    ranks = tuple(range(transport.world_size))
    x = torch.tensor(list(message), dtype=torch.uint8, device=wire_device(transport))
    handle = transport.all_gather_async(x, ranks, tag="checkpoint")
    return lambda: [bytes(row) for row in handle.wait().tolist()]


def _share(transport: Transport, plan: Plan, flat: dict[str, Any], staged: bool) -> _Share:
    made = _Share()

    def take() -> None:
        made.pieces, made.objects = share(plan, flat)
        if not staged:
            return
        begin = time.monotonic()
        staging: Staging = transport.state.setdefault(STAGING, Staging())
        copies = staging.copies([piece for _, _, piece in made.pieces])
        made.pieces = [(k, box, copy) for (k, box, _), copy in zip(made.pieces, copies)]
        made.copy_s = time.monotonic() - begin

    _, made.error = attempt(take, "the state")
    return made


def _planned(
    transport: Transport, mine: list[Slot], digests: tuple[bytes, ...], flat: dict[str, Any]
) -> tuple[Plan, dict[str, Any]]:
    """The plan, that of the save before where nothing has changed, and the state without pending sums."""
    plan: Plan | None = transport.state.get(_PLAN)
    if plan is not None and plan.digests == digests:
        return plan, _settled_all(flat) if plan.pending else flat
    world = all_slots(transport, mine, digests)
    pending = has_pending(world)
    if pending:
        flat = _settled_all(flat)
        world = tell(transport, slots_of(flat), "")
    plan = transport.state[_PLAN] = make_plan(mine, digests, world, transport.rank, pending)
    return plan, flat


def _settled_all(flat: dict[str, Any]) -> dict[str, Any]:
    return {key: settled(value) for key, value in flat.items()}


def _look(state: Mapping[str, Any], keep: int | None, step: int | None) -> Any:
    if keep is not None and (step is None or keep < 1):
        raise CheckpointError(
            f"keep={keep} with step={step}: the newest {keep} of a series of steps cannot be kept.",
            tries=["save(state, path, step=step, keep=3)"],
        )
    if step is not None and step < 0:
        raise CheckpointError(f"step={step}: steps are counted from 0.")
    flat, paths = flatten(unfold(state))
    for key, value in flat.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(f"{key} is on the meta device: it has no values to save.")
    return flat, paths, slots_of(flat)


def settled(value: Any) -> Any:
    """A tensor without pending sums: what was pending over an axis is sharded over it, where it can be."""
    if not isinstance(value, DTensor) or not value._spec.layout.is_partial:
        return value
    src, transport = value._spec.layout, value._spec.transport
    pending = tuple(a for a, op in enumerate(src.partial) if op is not None)
    dims = src.dims
    if dims and not any(op not in ("sum", None) for op in src.partial):
        dims = (dims[0] + pending, *dims[1:])
    dst: Layout = src.with_placement(dims, (None,) * src.mesh.ndim)
    return wrap(mover(src, dst, transport)(value._local.detach()), spec_of(dst, transport))


def _open(target: Path, folder: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} is there already.",
            tries=[
                "overwrite=True: it is removed when the new one is complete",
                "another path, or step=",
            ],
        )
    if target.exists() and not series.may_replace(target):
        raise CheckpointError(
            f"{target} is no checkpoint, and so is not replaced, overwrite=True or not.",
            tries=["another path"],
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
