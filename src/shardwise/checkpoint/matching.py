"""What a state wants against what is stored: a report, or an error that names the keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardwise.checkpoint.records import Entry, Index, ObjectEntry, TensorEntry
from shardwise.checkpoint.world import Slot, some
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A key that is stored as something else than the state wants."""

    key: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.key}: stored {self.stored}, wanted {self.wanted}"


@dataclass(slots=True)
class LoadReport:
    """What a load has done, the same on all ranks.

    Attributes:
        loaded: Keys that were loaded.
        missing: Keys of the state that the checkpoint does not have; they are as before.
        unexpected: Keys of the checkpoint that the state does not have.
        mismatched: Keys whose shape, dtype or kind differs; they are as before.
        converted: Keys whose dtype was converted.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Options:
    """What `load` was asked for; the same on all ranks."""

    keys: tuple[str, ...] | None
    strict: bool
    cast: bool
    unsafe_objects: bool
    verify: bool


def match(
    index: Index,
    world: list[list[Slot]],
    options: Options,
    quiet: tuple[str, ...],
    flat_state: bool,
) -> tuple[LoadReport, list[str]]:
    """The report, and the keys to load.

    Args:
        index: What is stored.
        world: What every rank wants.
        options: What `load` was asked for.
        quiet: Prefixes of keys that nobody misses if they are not loaded.
        flat_state: Whether the state has no containers.
    """
    report = LoadReport()
    wanted: dict[str, Slot] = {}
    for slots in {id(s): s for s in world}.values():
        for slot in slots:
            wanted.setdefault(slot.key, slot)
    tops = {key.split(".")[0] for key in wanted}

    def asked(key: str) -> bool:
        return options.keys is None or any(fnmatchcase(key, p) for p in options.keys)

    group = {key: slot.tied or key for key, slot in wanted.items()}
    satisfied = {group[key] for key in wanted if key in index.entries}
    for key, slot in wanted.items():
        if not asked(key):
            continue
        entry = index.entries.get(key)
        if entry is None:
            if group[key] not in satisfied or slot.dtype is None:
                report.missing.append(key)
            continue
        wrong = _mismatch(slot, entry, options)
        if wrong:
            report.mismatched.append(Mismatch(key, *wrong))
            continue
        report.loaded.append(key)
        if isinstance(entry, TensorEntry) and entry.dtype != slot.dtype:
            report.converted.append(key)
    for key in index.entries:
        top = str(index.paths.get(key, (key,))[0]).split(".")[0]
        if (
            key not in wanted
            and not key.startswith(quiet)
            and asked(key)
            and (flat_state or top in tops)
        ):
            report.unexpected.append(key)
    return report, report.loaded


def _mismatch(slot: Slot, entry: Entry, options: Options) -> tuple[str, str] | None:
    if isinstance(entry, ObjectEntry):
        return None if slot.dtype is None else ("an object", slot.text())
    stored = f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"
    if slot.dtype is None:
        return stored, "an object"
    lossless = slot.dtype.is_complex or not entry.dtype.is_complex
    right = entry.shape == slot.shape and (
        entry.dtype == slot.dtype or (options.cast and lossless)
    )
    return None if right else (stored, slot.text())


def raise_if_strict(report: LoadReport, options: Options, index: Index) -> None:
    """Raise for what is not as the state wants it, if ``strict`` is on."""
    if not options.strict:
        return
    lines = []
    if report.missing:
        lines.append(f"missing in the checkpoint: {some(report.missing)}.")
    if report.unexpected:
        lines.append(f"in the checkpoint only: {some(report.unexpected)}.")
    if report.mismatched:
        lines.append(f"stored as something else: {some(map(str, report.mismatched))}.")
    if lines:
        tries = ["strict=False: the rest is loaded, and a report says what was not"]
        if any(m.stored.split("[")[1:] == m.wanted.split("[")[1:] for m in report.mismatched):
            tries.append("cast=True: another dtype is converted")
        if report.unexpected:
            tries.append('keys=["model.*"]: load only what matches')
        raise CheckpointError(f"{index.folder}: " + " ".join(lines), tries=tries)
