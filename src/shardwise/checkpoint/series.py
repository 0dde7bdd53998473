"""A folder of checkpoints, one per step: the latest complete one, and how many are kept.

```text
runs/a/
  step-00000100/          complete: a folder gets this name only when all of it is on the disk
  step-00000200/
  .tmp-step-00000300-…/   being written, or left by a job that died
  .old-step-00000200-…/   was replaced, or is about to be removed
```
"""

from __future__ import annotations

from contextlib import suppress
import json
import os
from pathlib import Path
import re
import time

from shardwise.checkpoint.storage import METADATA, SIDECAR, remove_folder, sync_folder

_STEP = re.compile(r"step-(\d+)")
_OLD = re.compile(r"\.old-(.+)-[0-9a-f]{12}")
_STALE_S = 24 * 3600.0

Where = str | os.PathLike[str]


def step_folder(path: Where, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(path) / f"step-{step:08d}"


def steps(path: Where) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step, in order."""
    found: dict[int, Path] = {}
    for entry in _entries(path):
        match = _STEP.fullmatch(entry.name)
        old = _OLD.fullmatch(entry.name)
        if match and is_complete(entry):
            found[int(match[1])] = entry
        elif old and (match := _STEP.fullmatch(old[1])) and is_complete(entry):
            found.setdefault(int(match[1]), entry)
    return dict(sorted(found.items()))


def latest(path: Where) -> Path | None:
    """The newest complete checkpoint in a folder that ``save(..., step=...)`` writes to; None if there is none.

    One that is being written, or that a job left half written when it died, is never returned.

    Args:
        path: The folder.

    Example:
        >>> shardwise.checkpoint.latest("runs/a")
        PosixPath('runs/a/step-00000200')
    """
    for folder in reversed(list(steps(path).values())):
        if all_files_are_there(folder):
            return folder
    return None


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a checkpoint whose save came to its end."""
    return (folder / METADATA).is_file() or any(folder.glob("*.safetensors"))


def may_replace(target: Path) -> bool:
    """Whether a save may remove what is there: a checkpoint, damaged or not, or an empty folder."""
    if not target.is_dir():
        return False
    names = [entry.name for entry in target.iterdir()]
    return not names or any(
        name in (METADATA, SIDECAR) or name.endswith(".distcp") for name in names
    )


def all_files_are_there(folder: Path) -> bool:
    """Whether no file of a checkpoint was lost or cut since, as far as their sizes tell."""
    try:
        sizes = json.loads((folder / SIDECAR).read_bytes().partition(b"\n")[2])["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError as error:
        return error.filename == str(folder / SIDECAR)  # torch's own: there is no list of sizes
    except (OSError, ValueError, KeyError):
        return False


def standing(path: Where) -> Path:
    """The checkpoint at a path; if a job died while it replaced it, the one that was there before."""
    path = Path(path)
    if not path.exists():
        for entry in _entries(path.parent):
            old = _OLD.fullmatch(entry.name)
            if old and old[1] == path.name and is_complete(entry):
                return entry
    return path


def set_aside(folder: Path, save_id: str) -> Path:
    """Give a checkpoint a name that is looked at only when there is no other."""
    aside = folder.parent / f".old-{folder.name}-{save_id[:12]}"
    folder.rename(aside)
    return aside


def prune(path: Where, keep: int, newest: Path, save_id: str) -> list[Path]:
    """Remove all but the newest ``keep`` complete checkpoints, and what jobs that died have left.

    Returns:
        What was removed.
    """
    found = [p for _, p in sorted(steps(path).items()) if p != newest]
    gone = found[: max(0, len(found) - (keep - 1))]
    for folder in gone:
        with suppress(OSError):
            trash = folder.parent / f".tmp-{folder.name.lstrip('.')}-{save_id[:12]}-gone"
            folder.rename(trash)
            remove_folder(trash)
    now = time.time()
    for entry in _entries(path):
        if entry.name.startswith(".tmp-"):
            with suppress(OSError):
                if now - max(p.stat().st_mtime for p in (entry, *entry.iterdir())) > _STALE_S:
                    remove_folder(entry)
    sync_folder(Path(path))
    return gone


def _entries(path: Where) -> list[Path]:
    try:
        return [p for p in Path(path).iterdir() if p.is_dir()]
    except OSError:
        return []
