"""Saving in the background: the state is copied, and then written while training goes on.

Nothing is communicated while it is written, since training may be communicating: the ranks leave notes in the
folder, and rank 0 waits for those of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
import json
import os
from pathlib import Path
import time
from typing import Any

from shardwise.checkpoint.preparing import PENDING, Job, prepare
from shardwise.checkpoint.records import Chunk, Item, ObjectEntry
from shardwise.checkpoint.saving import Part, commit, file_of, write
from shardwise.checkpoint.storage import attempt, remove_folder, write_file
from shardwise.checkpoint.world import some
from shardwise.errors import CheckpointError

_WORKER = "checkpoint_worker"  # the thread that writes is kept between saves: starting one may take a while
_POLL_S = 0.02
_MOST_GRACE_S = 1.0
_MOST_NOTE_S = 30.0


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

    It returns when what this rank writes has been copied to memory of the host: from the second save of the
    same keys, shapes and layouts on, the time of one copy into memory that is at hand. Nothing is communicated
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
    job = prepare(state, path, step, keep, overwrite, staged=True)
    saving = Saving(job, timeout_s)
    job.transport.state[PENDING] = saving
    if job.transport.name == "threads":
        # One virtual rank runs at a time: all must have begun before one waits for the end.
        job.transport.barrier(tuple(range(job.transport.world_size)))
    return saving


class Saving:
    """A save under way in the background."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._error: str = job.error
        self._told = False
        worker = job.transport.state.get(_WORKER)
        if worker is None:
            worker = ThreadPoolExecutor(1, thread_name_prefix="shardwise.checkpoint")
            job.transport.state[_WORKER] = worker
        self._end: Future[None] = worker.submit(copy_context().run, self._run)

    def done(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self._end.done()

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is visible.

        Raises:
            CheckpointError: It could not be written, or the time is over.
        """
        if wait([self._end], timeout_s).not_done:
            raise CheckpointError(
                f"{self._job.target} is still being written after {timeout_s} s."
            )
        self._told = True
        if self._error:
            raise CheckpointError(self._error)
        return self._job.target

    def _unheard(self) -> str:
        """Wait; the error, if there was one and nobody has asked."""
        wait([self._end])
        told, self._told = self._told, True
        return "" if told else self._error

    def _run(self) -> None:
        job = self._job
        if job.transport.world_size > 1:
            # Other ranks may still be copying: writing would slow them down.
            time.sleep(min(2 * job.copy_s, _MOST_GRACE_S))
        rank, error = job.transport.rank, self._error
        part = None
        if not error:
            part, error = attempt(lambda: write(job), str(job.folder))
        job.pieces, job.objects = [], {}
        error = self._tell(error, part)
        if rank == 0:
            _, error = attempt(lambda: self._gather_and_commit(error), str(job.folder))
        else:
            _, error = attempt(lambda: self._wait_for_verdict(error), str(job.folder))
        if error:
            self._remove_mine()
        self._error = error

    def _tell(self, error: str, part: Part | None) -> str:
        """Leave a note of what this rank has written, or that it could not; its error, then."""
        job = self._job
        name = f"part-{job.transport.rank}"
        end = time.monotonic() + min(self._timeout_s, _MOST_NOTE_S)
        while True:
            if error:  # a full disk has no room for a note either, as long as all ranks leave what they wrote
                self._remove_mine()
            told = {"error": error, "part": None if part is None or error else _as_json(part)}
            text = json.dumps(told)
            _, failed = attempt(lambda text=text: _leave_note(job, name, text), str(job.folder))
            error = error or failed
            if not failed or time.monotonic() > end or not job.folder.exists():
                return error
            time.sleep(_POLL_S)

    def _remove_mine(self) -> None:
        job = self._job
        file = job.folder / file_of(job.transport.rank)
        attempt(lambda: file.unlink(missing_ok=True), str(file))

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
                lambda: commit(job, [_from_json(parts[r]) for r in range(size)]),
                str(job.folder),
            )
        if error:
            for leftover in job.folder.glob("__*.distcp"):
                leftover.unlink(missing_ok=True)
            attempt(lambda: _leave_note(job, "verdict", error), str(job.folder))
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


def _leave_note(job: Job, name: str, text: str) -> None:
    """A file that others see whole or not at all."""
    made = job.folder / f"{name}.tmp"
    try:
        write_file(made, text.encode())
    except OSError:
        made.unlink(missing_ok=True)
        raise
    made.rename(job.folder / name)


def _as_json(part: Part) -> Any:
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


def _from_json(told: Any) -> Part:
    chunks = [
        (key, Chunk((tuple(box[0]), tuple(box[1])), Item(*item), start, tuple(sums)))
        for key, box, item, start, sums in told["chunks"]
    ]
    objects = {
        k: ObjectEntry(Item(*item), total) for k, (item, total) in told["objects"].items()
    }
    paths = {k: tuple(path) for k, path in told["paths"].items()}
    return Part(told["file"], told["size"], chunks, objects, paths)
