"""One form of checkpoint into another, and the check of a whole one; in one process, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.exchange import Transfer
from shardwise.checkpoint.export import write_files
from shardwise.checkpoint.opening import open_checkpoint, opened
from shardwise.checkpoint.reading import block_values
from shardwise.checkpoint.records import Block, Index, ObjectEntry, TensorEntry, blocks_of
from shardwise.checkpoint.safetensors import NAMES
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.storage import Reader
from shardwise.checkpoint.sums import checksum
from shardwise.checkpoint.world import Spread
from shardwise.comm.transport import current
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box, overlap, slices

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Verified:
    """What `verify` found: pieces that are right, pieces without a checksum, and what is wrong."""

    checked: int = 0
    unchecked: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` wrote, and the keys that it left out because they are no tensors."""

    path: Path
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]


def verify(
    reader: Reader, index: Index, progress: Callable[[int], None] = lambda n: None
) -> Verified:
    """Read all of a checkpoint and compare every checksum there is.

    Args:
        reader: Its reader.
        index: Its index, both from `open_checkpoint`.
        progress: Called with the bytes of each block.
    """
    out = Verified()
    seen: set[Any] = set()
    for key, entry in index.entries.items():
        try:
            if isinstance(entry, ObjectEntry):
                item = entry.item
                data = reader.request(item.file, item.offset, item.length, "object")
                _compare(out, entry.sum, data, f"{item.file}, {key}")
                continue
            held = sum(math.prod(c.box[1]) for c in entry.chunks)
            if held != math.prod(entry.shape):
                out.problems.append(
                    f"{key}: {held} of {math.prod(entry.shape)} elements are stored"
                )
            for chunk in opened(current(), reader, index, [key])[key].chunks:
                if chunk.item in seen:
                    continue
                seen.add(chunk.item)
                for block in blocks_of(key, entry, chunk):
                    data = reader.request(block.file, block.start, block.nbytes, "elements")
                    _compare(out, block.sum, data, f"{block.file}, {key} at byte {block.start}")
                    progress(block.nbytes)
        except CheckpointError as error:
            text = str(error)
            out.problems.append(text if key in text else f"{key}: {text}")
    return out


def _compare(out: Verified, total: str, data: Tensor, where: str) -> None:
    if not total:
        out.unchecked += 1
    elif checksum(data) == total:
        out.checked += 1
    else:
        out.problems.append(f"{where}: the checksum is wrong")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "",
    keys: Iterable[str] | None = None,
    strip: str = "",
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Progress = lambda n, total: None,
) -> Converted:
    """Write a checkpoint again in the other form; in one process, holding one block at a time.

    Args:
        source: A checkpoint of ours or torch's, or safetensors.
        target: Where to write.
        to: ``"dcp"`` or ``"safetensors"``; by default the form that the source does not have.
        keys: Only keys that match one of these patterns.
        strip: A prefix to take off the keys (``"model."``).
        max_shard_bytes: Largest safetensors file.
        overwrite: Replace what is there.
        progress: Called with the bytes of each block and the total.

    Raises:
        CheckpointError: The source is damaged, or holds what the target cannot.
    """
    reader, index = open_checkpoint(source)
    to = to or ("safetensors" if index.kind == "dcp" else "dcp")
    if to not in ("dcp", "safetensors"):
        raise CheckpointError(f"there is no form {to!r}.", tries=["dcp", "safetensors"])
    patterns = None if keys is None else list(keys)
    chosen = [
        k for k in index.entries if patterns is None or any(fnmatchcase(k, p) for p in patterns)
    ]
    names = {k: k.removeprefix(strip) for k in chosen}
    if len(set(names.values())) < len(names):
        raise CheckpointError(f"without {strip!r} two keys are the same.")
    tensors = {k: e for k in chosen if isinstance(e := index.entries[k], TensorEntry)}
    if not tensors:
        raise CheckpointError(f"{index.folder}: there is no tensor to convert.")
    entries = opened(current(), reader, index, list(tensors))
    total = sum(e.nbytes for e in entries.values())
    sources = {names[k]: _Stored(reader, k, e) for k, e in entries.items()}
    if to == "dcp":
        state = {n: s.whole(lambda n: progress(n, total)) for n, s in sources.items()}
        path = save(state, target, overwrite=overwrite)
    else:
        odd = [k for k, e in entries.items() if e.dtype not in NAMES]
        if odd:
            raise CheckpointError(
                f"{odd[0]} is {entries[odd[0]].dtype}, which safetensors does not know."
            )
        spread = {
            names[k]: Spread(e.shape, e.dtype, "", sources[names[k]].boxes())
            for k, e in entries.items()
        }
        path = write_files(
            current(),
            spread,
            lambda t: sources[t.key].part(t),
            Path(target),
            max_shard_bytes,
            None,
            overwrite,
            lambda n: progress(n, total),
        )
    return Converted(path, len(tensors), total, tuple(k for k in chosen if k not in tensors))


class _Stored:
    """A stored tensor, by blocks; each block is checked when it is first used."""

    def __init__(self, reader: Reader, key: str, entry: TensorEntry) -> None:
        self._reader, self._entry = reader, entry
        self._blocks = {
            b.box: b
            for chunk in entry.chunks
            if 0 not in chunk.box[1]
            for b in blocks_of(key, entry, chunk)
        }
        self._last: tuple[Box, Tensor] | None = None
        self._checked: set[Box] = set()

    def boxes(self) -> dict[Box, list[int]]:
        return {box: [0] for box in self._blocks}

    def _values(self, block: Block) -> Tensor:
        if self._last is None or self._last[0] != block.box:
            values = block_values(self._reader, block, block.box not in self._checked)
            self._checked.add(block.box)
            self._last = block.box, values
        return self._last[1]

    def part(self, t: Transfer) -> Tensor:
        """What a transfer asks for: it lies within one block."""
        block = next(b for box, b in self._blocks.items() if overlap(t.box, box) == t.box)
        return self._values(block)[slices(t.box, block.box)]

    def whole(self, progress: Callable[[int], None]) -> Tensor:
        """The whole tensor; of one chunk that lies aligned it is the file's own memory."""
        for block in self._blocks.values():
            self._values(block)
            progress(block.nbytes)
        return whole_tensor(self._reader, self._entry, list(self._blocks.values()))


def whole_tensor(reader: Reader, entry: TensorEntry, blocks: list[Block]) -> Tensor:
    """A stored tensor: mapped, if it lies in one piece; else put together in memory."""
    chunk = entry.chunks[0] if len(entry.chunks) == 1 else None
    if chunk is not None and chunk.start is not None and not chunk.start % entry.dtype.itemsize:
        data = reader.again(chunk.item.file, chunk.start, entry.nbytes)
        return data.view(entry.dtype).view(entry.shape)
    out = torch.empty(entry.shape, dtype=entry.dtype)
    whole = (0,) * len(entry.shape), entry.shape
    for block in blocks:
        out[slices(block.box, whole)].copy_(block_values(reader, block))
    return out
