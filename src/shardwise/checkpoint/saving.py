"""Saving: every rank writes its share, and the whole appears at once.

```text
   prepare   what every rank holds is told to all; who writes what follows        collective
   open      rank 0 makes .tmp-<name>-<id>/ next to the target                    collective
   write     each rank one file: its chunks, its objects; on the disk when done
   gather    what each rank wrote, or what went wrong                             collective, or by files
   commit    rank 0 writes the metadata and renames the folder: now it is visible
   prune     rank 0 removes the oldest, if asked to
```

A job may die at any point: the target is there, whole, or it is not there, and what was there before still is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field, replace
import json
import os
from pathlib import Path
from threading import Event, Thread
import time
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from shardwise.checkpoint import series
from shardwise.checkpoint.adapters import unfold
from shardwise.checkpoint.archive import ALIGNMENT, frame
from shardwise.checkpoint.metadata import write_pickle, write_sidecar
from shardwise.checkpoint.nested import flatten
from shardwise.checkpoint.records import (
    Chunk,
    Entry,
    Index,
    Item,
    KeyPath,
    ObjectEntry,
    TensorEntry,
    blocks_of,
)
from shardwise.checkpoint.staging import Plan, Staging, has_pending, make_plan, share
from shardwise.checkpoint.storage import (
    METADATA,
    SIDECAR,
    Writer,
    attempt,
    phase,
    remove_folder,
    sync_folder,
    write_file,
)
from shardwise.checkpoint.sums import as_bytes, checksum
from shardwise.checkpoint.world import (
    Slot,
    Spread,
    all_slots,
    digest_of,
    slots_of,
    some,
    tell,
    together,
)
from shardwise.comm.execute import mover
from shardwise.comm.transport import Transport, current
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box
from shardwise.layout.layout import Layout
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap

_PENDING, _PLAN, _STAGING = (
    "checkpoint_being_saved",
    "checkpoint_plan",
    "checkpoint_staging",
)  # what is kept between saves
_POLL_S = 0.02


@dataclass(slots=True)
class _Job:
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

    @property
    def root(self) -> Path:
        return self.target.parent


# ---- public ----------------------------------------------------------------------------------------


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Save a state; all ranks call it. It becomes visible when it is complete on every rank, and at once.

    The files are those of ``torch.distributed.checkpoint``: its ``load`` reads them, too. A tensor that is in
    the state twice (tied weights) is stored once. A pending sum is reduced first.

    Args:
        state: Nested dicts and lists of tensors, DTensors and other values. A module, an optimizer of a module
            that is also in the state, and anything else with a ``state_dict`` may stand for its state. What
            is no DTensor counts as equal on all ranks, and is taken from one of them.
        path: The folder of the checkpoint; with ``step`` the folder that holds one for each step.
        step: Save as the checkpoint of this step, below ``path``.
        keep: Afterwards remove all but the newest so many complete checkpoints. Needs ``step``.
        overwrite: Replace a checkpoint that is there. It is removed only when the new one is complete. A file, or
            a folder that has things in it and is no checkpoint, is never replaced.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: On all ranks: a checkpoint is there already, or some rank could not write. What was
            there before is as it was.

    Example:
        >>> checkpoint.save({"model": model, "optimizer": optimizer, "step": 100}, "runs/a", step=100, keep=3)
        PosixPath('runs/a/step-00000100')
    """
    job = _prepare(state, path, step, keep, overwrite)
    part, error = attempt(lambda: _write(job), str(job.folder))
    try:
        parts = together(job.transport, error, part)
    except CheckpointError:
        if job.transport.rank == 0:
            remove_folder(job.folder)
        raise
    _, error = attempt(
        lambda: _commit(job, parts) if job.transport.rank == 0 else None, str(job.folder)
    )
    if error and job.transport.rank == 0:
        remove_folder(job.folder)
    together(job.transport, error)
    return job.target


def async_save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    timeout_s: float = 1800.0,
) -> Saving:
    """Save a state in the background; all ranks call it. Training may go on, and change it, at once.

    It returns when what this rank writes has been copied to memory of the host. Nothing is communicated
    afterwards: the ranks meet in the folder that is being written. The next save waits for this one.

    Args:
        state: As for `save`.
        path: As for `save`.
        step: As for `save`.
        keep: As for `save`.
        overwrite: As for `save`.
        timeout_s: How long rank 0 waits for the files of the others.

    Returns:
        What to wait for. An error that nobody asked it for is raised by the next save.

    Raises:
        CheckpointError: As for `save`, if it is known before anything is written.

    Example:
        >>> saving = checkpoint.async_save(state, "runs/a", step=100)
        >>> ...                        # more steps
        >>> saving.result()            # on the disk, or an error
        PosixPath('runs/a/step-00000100')
    """
    job = _prepare(state, path, step, keep, overwrite)
    saving = Saving(job, timeout_s)
    staging: Staging = job.transport.state.setdefault(_STAGING, Staging())
    copies, error = attempt(
        lambda: staging.copies([piece for _, _, piece in job.pieces]), str(job.target)
    )
    job.pieces = [(key, box, copy) for (key, box, _), copy in zip(job.pieces, copies or ())]
    ranks = tuple(range(job.transport.world_size))
    job.transport.barrier(ranks)  # no rank's writing slows down another's copying
    job.transport.state[_PENDING] = saving
    saving._begin(error)
    if job.transport.name == "threads":
        # One virtual rank runs at a time: all must have begun before one waits for the end.
        job.transport.barrier(ranks)
    return saving


class Saving:
    """A save under way in the background."""

    def __init__(self, job: _Job, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._error: str = ""
        self._told = False
        self._go = Event()
        self._thread = Thread(
            target=copy_context().run, args=(self._run,), name="shardwise.checkpoint"
        )
        self._thread.start()

    def _begin(self, error: str = "") -> None:
        """The copies are made; or they could not be. The thread has started before: that may take a while."""
        self._error = error
        self._go.set()

    def done(self) -> bool:
        """Whether it has come to its end, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is visible.

        Raises:
            CheckpointError: It could not be written, or the time is over.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"{self._job.target} is still being written after {timeout_s} s."
            )
        self._told = True
        if self._error:
            raise CheckpointError(self._error)
        return self._job.target

    def _unheard(self) -> str:
        """Wait; the error, if there was one and nobody has asked."""
        self._thread.join()
        told, self._told = self._told, True
        return "" if told else self._error

    def _run(self) -> None:
        self._go.wait()
        job = self._job
        rank, error = job.transport.rank, self._error
        part = None
        if not error:
            part, error = attempt(lambda: _write(job), str(job.folder))
        job.pieces, job.objects = [], {}
        note = json.dumps({"error": error, "part": None if part is None else _as_json(part)})
        _, failed = attempt(lambda: _leave_note(job, f"part-{rank}", note), str(job.folder))
        error = error or failed
        if rank == 0:
            _, error = attempt(lambda: self._gather_and_commit(error), str(job.folder))
        else:
            _, error = attempt(lambda: self._wait_for_verdict(error), str(job.folder))
        self._error = error

    def _gather_and_commit(self, error: str) -> None:
        job = self._job
        size = job.transport.world_size
        end = time.monotonic() + self._timeout_s
        parts: dict[int, Any] = {}
        while len(parts) < size and not error:
            for rank in range(size):
                note = job.folder / f"part-{rank}"
                if rank not in parts and note.exists():
                    told = json.loads(note.read_text())
                    parts[rank] = told["part"]
                    if told["error"]:
                        error = f"rank {rank}: {told['error']}"
                    note.unlink()
            if len(parts) < size and not error:
                if time.monotonic() > end:
                    late = some(str(r) for r in range(size) if r not in parts)
                    error = f"{job.target}: ranks {late} have not written after {self._timeout_s} s."
                time.sleep(_POLL_S)
        if not error:
            _, error = attempt(
                lambda: _commit(job, [_from_json(parts[r]) for r in range(size)]),
                str(job.folder),
            )
        if error:
            attempt(lambda: _leave_note(job, "verdict", error), str(job.folder))
            for leftover in job.folder.glob("__*.distcp"):
                leftover.unlink(missing_ok=True)
            if size == 1:
                remove_folder(job.folder)
            raise CheckpointError(error)

    def _wait_for_verdict(self, error: str) -> None:
        """Rank 0 renames the folder, or leaves a note in it that says why not."""
        job = self._job
        end = time.monotonic() + 2 * self._timeout_s
        while job.folder.exists():
            verdict = job.folder / "verdict"
            if verdict.exists():
                raise CheckpointError(error or verdict.read_text())
            if time.monotonic() > end:
                raise CheckpointError(f"{job.target}: rank 0 has not finished the save.")
            time.sleep(_POLL_S)
        if error:
            raise CheckpointError(error)


# ---- phases ----------------------------------------------------------------------------------------


def _prepare(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    step: int | None,
    keep: int | None,
    overwrite: bool,
) -> _Job:
    transport = current()
    before: Saving | None = transport.state.pop(_PENDING, None)
    unheard = "" if before is None else before._unheard()
    prepared, error = attempt(lambda: _look(state, keep, step), "the state")
    error = f"the save before this one failed: {unheard}" if unheard else error
    flat, paths = prepared if prepared is not None else ({}, {})
    mine = slots_of(flat)
    known: Plan | None = transport.state.get(_PLAN)
    digest = known.digests[transport.rank] if known and known.mine == mine else digest_of(mine)
    target = Path(path) if step is None else series.step_folder(path, step)
    save_id = uuid4().hex
    folder = target.parent / f".tmp-{target.name}-{save_id[:12]}"
    opened = transport.rank == 0 and not error
    if opened:
        _, error = attempt(lambda: _open(target, folder, overwrite), str(target))
    try:
        told = together(transport, error, (digest, str(folder), save_id))
    except CheckpointError:
        if opened and not error:
            remove_folder(folder)
        raise
    digests = tuple(d for d, _, _ in told)
    try:
        plan, flat = _planned(transport, mine, digests, flat)
    except CheckpointError:  # on all ranks
        if opened:
            remove_folder(folder)
        raise
    job = _Job(
        transport,
        target,
        Path(told[0][1]),
        told[0][2],
        keep,
        overwrite,
        *share(plan, flat),
        plan.spread,
        plan.tied,
        paths,
    )
    phase("planned", job.folder)
    return job


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
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise CheckpointError(f"{key} is not strided ({value.layout}).")
    return flat, paths


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


@dataclass(slots=True)
class _Part:
    """What one rank has written."""

    file: str
    size: int
    chunks: list[tuple[str, Chunk]]
    objects: dict[str, ObjectEntry]
    paths: dict[str, KeyPath]


def _write(job: _Job) -> _Part:
    """Write this rank's file."""
    name = f"__{job.transport.rank}_0.distcp"
    chunks: list[tuple[str, Chunk]] = []
    objects: dict[str, ObjectEntry] = {}
    phase("opened", job.folder)
    if not job.pieces and not job.objects:
        return _Part("", 0, chunks, objects, job.paths)
    writer = Writer(job.folder / name)
    try:
        for key, pickled in job.objects.items():
            data = pickled()
            item = Item(name, writer.position, len(data))
            writer.write(data)
            objects[key] = ObjectEntry(item, checksum(_bytes(data)))
        for key, box, piece in job.pieces:
            phase("writing", job.folder)
            chunks.append((key, _write_chunk(writer, name, key, box, piece)))
    finally:
        writer.close()
    phase("written", job.folder)
    return _Part(name, writer.position, chunks, objects, job.paths)


def _write_chunk(writer: Writer, name: str, key: str, box: Box, piece: Tensor) -> Chunk:
    data = as_bytes(piece.cpu().resolve_neg().resolve_conj().contiguous())
    head, tail = frame(tuple(piece.shape), piece.dtype)
    writer.align(ALIGNMENT)
    begin = writer.position
    writer.write(head)
    start = writer.position
    writer.write(data.numpy())
    writer.write(tail)
    chunk = Chunk(box, Item(name, begin, writer.position - begin), start)
    entry = TensorEntry(tuple(piece.shape), piece.dtype, (chunk,))
    sums = tuple(
        checksum(data[b.start - start : b.start - start + b.nbytes])
        for b in blocks_of(key, entry, chunk)
    )
    return replace(chunk, sums=sums)


def _commit(job: _Job, parts: list[_Part]) -> None:
    """Describe the whole, and make it visible."""
    entries: dict[str, Entry] = {}
    paths: dict[str, KeyPath] = {}
    by_key: dict[str, list[Chunk]] = {}
    for part in parts:
        entries.update(part.objects)
        paths = {**part.paths, **paths}
        for key, chunk in part.chunks:
            by_key.setdefault(key, []).append(chunk)
    for key, spread in job.spread.items():
        chunks = tuple(by_key.get(job.tied.get(key, key), ()))
        entries[key] = TensorEntry(spread.shape, spread.dtype, chunks, spread.text)
    index = Index(
        str(job.target),
        "dcp",
        entries,
        {key: paths.get(key, (key,)) for key in entries},
        {part.file: part.size for part in parts if part.file},
        job.save_id,
        job.transport.world_size,
    )
    pickled = write_pickle(index)
    write_file(job.folder / SIDECAR, write_sidecar(index, pickled))
    write_file(job.folder / METADATA, pickled)
    sync_folder(job.folder)
    phase("indexed", job.folder)
    aside = None
    if job.overwrite and job.target.exists():
        aside = series.set_aside(job.target, job.save_id)
        phase("replacing", job.folder)
    try:
        job.folder.rename(job.target)
    except OSError as error:
        if aside is not None and not job.target.exists():
            aside.rename(job.target)
        if job.target.exists():
            raise CheckpointError(
                f"{job.target} was written by another job meanwhile; what it wrote is untouched.",
                tries=["one path for each job"],
            ) from error
        raise
    sync_folder(job.root)
    phase("visible", job.target)
    if aside is not None:
        remove_folder(aside)
    if job.keep is not None:
        series.prune(job.root, job.keep, job.target, job.save_id)
    phase("pruned", job.target)


# ---- notes between ranks of a save in the background -------------------------------------------------


def _leave_note(job: _Job, name: str, text: str) -> None:
    """A file that others see whole or not at all."""
    write_file(job.folder / f"{name}.tmp", text.encode())
    (job.folder / f"{name}.tmp").rename(job.folder / name)


def _as_json(part: _Part) -> Any:
    return {
        "file": part.file,
        "size": part.size,
        "chunks": [
            [key, c.box, [c.item.file, c.item.offset, c.item.length], c.start, c.sums]
            for key, c in part.chunks
        ],
        "objects": {
            k: [[o.item.file, o.item.offset, o.item.length], o.sum]
            for k, o in part.objects.items()
        },
        "paths": part.paths,
    }


def _from_json(told: Any) -> _Part:
    chunks = [
        (key, Chunk((tuple(box[0]), tuple(box[1])), Item(*item), start, tuple(sums)))
        for key, box, item, start, sums in told["chunks"]
    ]
    objects = {
        k: ObjectEntry(Item(*item), total) for k, (item, total) in told["objects"].items()
    }
    paths = {k: tuple(path) for k, path in told["paths"].items()}
    return _Part(told["file"], told["size"], chunks, objects, paths)


def _bytes(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
