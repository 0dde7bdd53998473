"""Finding a checkpoint, whatever its form, and where in its files the elements of each tensor lie."""

from __future__ import annotations

from dataclasses import replace
import os
from pathlib import Path
from typing import Any

from shardwise.checkpoint import series
from shardwise.checkpoint.archive import elements_at
from shardwise.checkpoint.metadata import read_index
from shardwise.checkpoint.records import Chunk, Index, TensorEntry, located
from shardwise.checkpoint.safetensors import read_headers
from shardwise.checkpoint.storage import METADATA, SIDECAR, Reader, agreed, attempt
from shardwise.checkpoint.world import together
from shardwise.comm.transport import Transport, current
from shardwise.errors import CheckpointError


def open_checkpoint(
    path: str | os.PathLike[str], transport: Transport | None = None
) -> tuple[Reader, Index]:
    """Reader and index of a checkpoint; rank 0 reads, and tells all.

    Raises:
        CheckpointError: On all ranks: there is no checkpoint, or what describes it is damaged.
    """
    transport = transport or current()
    raw, error = attempt(lambda: _read_raw(path) if transport.rank == 0 else None, str(path))
    raw = together(transport, error, raw)[0]
    kind, folder = raw[0], raw[1]
    index = agreed(
        lambda: (
            read_headers(folder, raw[2])
            if kind == "safetensors"
            else read_index(raw[2], raw[3], folder)
        ),
        folder,
    )
    return Reader(folder, transport.rank), index


def _read_raw(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    where = series.standing(path)
    if where.is_file() and where.suffix == ".safetensors":
        return "safetensors", str(where.parent), [_header(where)]
    reader = Reader(where)
    if reader.exists(METADATA):
        sidecar = _whole(reader, SIDECAR) if reader.exists(SIDECAR) else None
        return "dcp", str(where), _whole(reader, METADATA), sidecar
    files = sorted(where.glob("*.safetensors"))
    if files:
        return "safetensors", str(where), [_header(f) for f in files]
    if not where.exists():
        raise CheckpointError(f"{where}: there is no such checkpoint.")
    newest = series.latest(where)
    tries = (
        [] if newest is None else [f"load(state, {str(newest)!r}), or latest({str(where)!r})"]
    )
    raise CheckpointError(
        f"{where} is no checkpoint: there is no {METADATA} and no *.safetensors.", tries=tries
    )


def _whole(reader: Reader, file: str) -> bytes:
    size = reader.size(file)
    return reader.request(file, 0, size, "metadata").numpy().tobytes()


def _header(file: Path) -> tuple[str, int, bytes]:
    """Name, size and JSON header of a safetensors file."""
    reader = Reader(file.parent)
    size = reader.size(file.name)
    length = int.from_bytes(
        reader.request(file.name, 0, 8, "metadata").numpy().tobytes(), "little"
    )
    return file.name, size, reader.request(file.name, 8, length, "metadata").numpy().tobytes()


def opened(
    transport: Transport, reader: Reader, index: Index, keys: list[str]
) -> dict[str, TensorEntry]:
    """The entries, with every container opened; the ranks share the work."""
    entries = {k: e for k in keys if isinstance(e := index.entries[k], TensorEntry)}
    closed = sorted(
        (key, i)
        for key, e in entries.items()
        for i, c in enumerate(e.chunks)
        if c.start is None
    )
    if not closed:
        return entries
    size = transport.world_size

    def open_mine() -> dict[tuple[str, int], int | None]:
        return {
            (key, i): _open_container(reader, key, entries[key], entries[key].chunks[i])
            for key, i in closed[transport.rank :: size]
        }

    mine, error = attempt(open_mine, index.folder)
    known = {at: s for part in together(transport, error, mine) for at, s in part.items()}
    for key, entry in entries.items():
        chunks = tuple(
            located(c, known[key, i]) if (key, i) in known else c
            for i, c in enumerate(entry.chunks)
        )
        entries[key] = replace(entry, chunks=chunks)
    return entries


def _open_container(reader: Reader, key: str, entry: TensorEntry, chunk: Chunk) -> int | None:
    item = chunk.item
    try:
        data = reader.again(item.file, item.offset, item.length)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    view: Any = data.numpy()
    at = elements_at(memoryview(view), chunk.box[1], entry.dtype)
    return None if at is None else item.offset + at
