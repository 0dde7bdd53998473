"""What a checkpoint holds and where it lies in its files, whatever their format.

Invariants:
    1. The chunks of a tensor do not overlap, and cover it when the checkpoint is complete.
    2. A block is a part of a chunk that is contiguous in the file; blocks are read, checked and sent whole.
    3. File names are relative to the checkpoint's folder and stay inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
import math
from pathlib import PurePosixPath
from typing import Any

import torch

from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box, runs

BLOCK_BYTES = 1 << 22
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A stretch of a file: one saved object, or the container of one chunk."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored row-major.

    Attributes:
        box: Offsets and sizes.
        item: The container.
        start: Where the elements begin in the file; None as long as the container has not been opened.
        sums: A checksum for each block; empty if none were recorded.
        block_bytes: The size of blocks that ``sums`` are of.
        opaque: The elements do not lie there row-major: the container is loaded as a whole.
    """

    box: Box
    item: Item
    start: int | None = None
    sums: tuple[str, ...] = ()
    block_bytes: int = BLOCK_BYTES
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor; ``layout`` says in words how it was laid out when it was saved."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    layout: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """Anything else that was saved; ``sum`` is its checksum, or empty."""

    item: Item
    sum: str = ""


Entry = TensorEntry | ObjectEntry


@dataclass(slots=True)
class Index:
    """Everything about a checkpoint except its contents.

    Attributes:
        folder: Where its files are.
        kind: ``"dcp"`` or ``"safetensors"``.
        entries: By key.
        paths: For each key where it goes in the nested state.
        sizes: Size of each file in bytes, as it was recorded; empty if it was not.
        save_id: What tells this save from all others; may be empty.
        world_size: Number of ranks that wrote it; 0 if unknown.
    """

    folder: str
    kind: str
    entries: dict[str, Entry]
    paths: dict[str, KeyPath] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    save_id: str = ""
    world_size: int = 0

    def tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """The stored tensors."""
        for key, entry in self.entries.items():
            if isinstance(entry, TensorEntry):
                yield key, entry


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous part of a chunk.

    Attributes:
        key: The tensor's key.
        dtype: Its stored dtype.
        box: What it holds of the tensor.
        file: Where it lies.
        start: Byte offset in the file; of an opaque chunk, of its container.
        nbytes: Number of bytes in the file.
        sum: Its checksum, or empty.
        opaque: See `Chunk`.
    """

    key: str
    dtype: torch.dtype
    box: Box
    file: str
    start: int
    nbytes: int
    sum: str = ""
    opaque: bool = False


def blocks_of(key: str, entry: TensorEntry, chunk: Chunk) -> list[Block]:
    """Cut a chunk into blocks, in the order of the file."""
    if chunk.opaque:
        item = chunk.item
        return [
            Block(key, entry.dtype, chunk.box, item.file, item.offset, item.length, "", True)
        ]
    assert chunk.start is not None, "containers are opened before they are cut"
    offsets, sizes = chunk.box
    out, start = [], chunk.start
    sums = chunk.sums
    cut = runs(sizes, max(1, chunk.block_bytes // entry.dtype.itemsize))
    if sums and len(sums) != len(cut):
        raise CheckpointError(
            f"{key}: {len(sums)} checksums for {len(cut)} blocks in {chunk.item.file}."
        )
    for i, (at, held) in enumerate(cut):
        nbytes = math.prod(held) * entry.dtype.itemsize
        box = tuple(o + a for o, a in zip(offsets, at)), held
        out.append(
            Block(
                key, entry.dtype, box, chunk.item.file, start, nbytes, sums[i] if sums else ""
            )
        )
        start += nbytes
    return out


def located(chunk: Chunk, start: int | None) -> Chunk:
    """The chunk with its container opened; None if it must be loaded as a whole."""
    return replace(chunk, start=start, opaque=start is None)


def inside(name: Any) -> str:
    """A file name that a checkpoint gives, if it stays inside the folder.

    Raises:
        CheckpointError: It does not.
    """
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"a checkpoint names a file {name!r}.")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"a checkpoint names a file outside its folder: {name!r}.")
    return name
