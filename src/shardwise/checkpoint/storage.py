"""Files of a checkpoint: written durably, read by mapping, and seen by whoever watches events.

A file is mapped rather than read: a block can then be verified before any parameter is changed, and copied
afterwards, without being held in memory of ours or being requested twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
import mmap
import os
from pathlib import Path
import shutil
from typing import IO, Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.events import emit, observers

METADATA = ".metadata"  # torch.distributed.checkpoint's own
SIDECAR = "shardwise.json"
_ONCE = 1 << 30  # what one write call is asked to take


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """A stretch of a file was requested, or several of one length at equal distances.

    Attributes:
        file: Its path.
        offset: First byte.
        bytes: Number of bytes.
        rank: The rank that asked.
        what: "metadata", "container", "elements" or "object".
        stretches: Number of equal stretches that the bytes lie in.
        every: Bytes from the beginning of one stretch to that of the next.
    """

    file: str
    offset: int
    bytes: int
    rank: int
    what: str
    stretches: int = 1
    every: int = 0


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """A save has come to a new phase on one rank.

    Attributes:
        phase: "planned", "opened", "writing", "written", "indexed", "visible" or "pruned".
        path: Where it is being written.
    """

    phase: str
    path: str


def phase(name: str, path: Any) -> None:
    """Tell whoever watches that a save has come to a new phase."""
    if observers():
        emit(PhaseEvent(name, str(path)))


class Reader:
    """Read-only access to the files of one folder; each file is mapped once."""

    def __init__(self, folder: str | os.PathLike[str], rank: int = 0) -> None:
        self.folder, self.rank = Path(folder), rank
        self._maps: dict[str, mmap.mmap] = {}

    def size(self, file: str) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError: There is no such file.
        """
        try:
            return (self.folder / file).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / file}: {error.strerror or error}."
            ) from error

    def exists(self, file: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / file).is_file()

    def request(self, file: str, offset: int, length: int, what: str) -> Tensor:
        """A stretch of a file as a 1-D tensor of bytes, in memory that the system may drop and read again.

        Raises:
            CheckpointError: The file is missing, unreadable or too short.
        """
        if observers():
            emit(ReadEvent(str(self.folder / file), offset, length, self.rank, what))
        return self.again(file, offset, length)

    def request_stretches(
        self, file: str, block: tuple[int, int], what: str, count: int, begin: int, end: int
    ) -> Tensor:
        """A block, of which only bytes ``begin`` to ``end`` of each of ``count`` equal stretches are asked for.

        Args:
            file: The file.
            block: Offset and length of the block.
            what: See `ReadEvent`.
            count: Number of stretches.
            begin: First byte of the part in each stretch.
            end: The byte after it.

        Returns:
            The whole block, mapped: what nobody touches is not read.

        Raises:
            CheckpointError: The file is missing, unreadable or too short.
        """
        if observers():
            at, every = block[0] + begin, block[1] // count
            size = count * (end - begin)
            emit(ReadEvent(str(self.folder / file), at, size, self.rank, what, count, every))
        return self.again(file, *block)

    def again(self, file: str, offset: int, length: int) -> Tensor:
        """What was requested before."""
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapped = self._maps.get(file)
        if mapped is None:
            mapped = self._maps[file] = self._map(file)
        if offset < 0 or offset + length > len(mapped):
            raise CheckpointError(
                f"{self.folder / file} is truncated: it has {len(mapped)} bytes, and what should "
                f"be there ends at {offset + length}."
            )
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset, count=length)

    def _map(self, file: str) -> mmap.mmap:
        path = self.folder / file
        try:
            with path.open("rb") as opened:
                if os.fstat(opened.fileno()).st_size == 0:
                    raise CheckpointError(f"{path} is empty.")
                # A private mapping: torch wants memory that it may write to, and never does.
                return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}.") from error


class Writer:
    """One new file, whose every byte counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._file: IO[bytes] = path.open("xb", buffering=0)

    def write(self, data: Any) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            taken = self._file.write(view[:_ONCE])
            view = view[taken:]
            self.position += taken

    def align(self, to: int) -> None:
        """Append zeros up to a multiple."""
        self.write(bytes(-self.position % to))

    def close(self) -> None:
        """Bring everything to the disk."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_file(path: Path, data: bytes) -> None:
    """Write a new file durably."""
    writer = Writer(path)
    try:
        writer.write(data)
    finally:
        writer.close()


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk."""
    with suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_folder(path: Path) -> None:
    """Remove a folder that nobody should see any more; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


def attempt(action: Callable[[], Any], what: str) -> tuple[Any, str]:
    """The action's result, or what went wrong in one line, for all ranks to hear of."""
    try:
        return action(), ""
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        where = error.filename or what
        return None, f"{where}: {error.strerror or error}."
    except Exception as error:  # any failure of one rank has to become one of all
        return None, f"{what}: {type(error).__name__}: {error}"


def agreed(action: Callable[[], Any], what: str) -> Any:
    """The result of what all ranks work out from the same: it fails on all of them or on none.

    Raises:
        CheckpointError: Whatever went wrong.
    """
    result, error = attempt(action, what)
    if error:
        raise CheckpointError(error)
    return result


__all__ = [
    "METADATA",
    "SIDECAR",
    "PhaseEvent",
    "ReadEvent",
    "Reader",
    "Writer",
    "agreed",
    "attempt",
    "phase",
    "remove_folder",
    "sync_folder",
    "write_file",
]
