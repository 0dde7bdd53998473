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

from collections.abc import Mapping
from dataclasses import dataclass, replace
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import series
from shardwise.checkpoint.archive import ALIGNMENT, frame
from shardwise.checkpoint.metadata import write_pickle, write_sidecar
from shardwise.checkpoint.preparing import Job, prepare
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
from shardwise.checkpoint.world import together
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box

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
    job = prepare(state, path, step, keep, overwrite)
    part, error = attempt(lambda: write(job), str(job.folder))
    try:
        parts = together(job.transport, error, part)
    except CheckpointError:
        if job.transport.rank == 0:
            remove_folder(job.folder)
        raise
    _, error = attempt(
        lambda: commit(job, parts) if job.transport.rank == 0 else None, str(job.folder)
    )
    if error and job.transport.rank == 0:
        remove_folder(job.folder)
    together(job.transport, error)
    return job.target


# ---- phases ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """What one rank has written."""

    file: str
    size: int
    chunks: list[tuple[str, Chunk]]
    objects: dict[str, ObjectEntry]
    paths: dict[str, KeyPath]


def file_of(rank: int) -> str:
    """The file that a rank writes, named as torch names it."""
    return f"__{rank}_0.distcp"


def write(job: Job) -> Part:
    """Write this rank's file."""
    if job.error:
        raise CheckpointError(job.error)
    name = file_of(job.transport.rank)
    chunks: list[tuple[str, Chunk]] = []
    objects: dict[str, ObjectEntry] = {}
    phase("opened", job.folder)
    if not job.pieces and not job.objects:
        return Part("", 0, chunks, objects, job.paths)
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
    return Part(name, writer.position, chunks, objects, job.paths)


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


def commit(job: Job, parts: list[Part]) -> None:
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
    sync_folder(job.target.parent)
    phase("visible", job.target)
    if aside is not None:
        remove_folder(aside)
    if job.keep is not None:
        series.prune(job.target.parent, job.keep, job.target, job.save_id)
    phase("pruned", job.target)


def _bytes(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
