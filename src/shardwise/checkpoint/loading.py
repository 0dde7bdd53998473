"""Loading: every stored byte is requested once, checked, and only then does any parameter change.

```text
   index      rank 0 reads what says where everything lies, and tells all
   match      what the state wants against what is stored: a report, or an error on all ranks
   read       each block by one rank that needs it; its checksum is verified while it is only mapped
   agree      did every rank find its blocks right?
   exchange   what others need of them is sent, in rounds; the rest is copied straight into place
```

Extra memory: the buffers of one round, which together are smaller than the largest local shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import series
from shardwise.checkpoint.adapters import fold, unfold_for
from shardwise.checkpoint.archive import elements_at
from shardwise.checkpoint.exchange import Source, Transfer, exchange, plan, rounds
from shardwise.checkpoint.metadata import read_index
from shardwise.checkpoint.nested import flatten, put
from shardwise.checkpoint.records import (
    Block,
    Chunk,
    Entry,
    Index,
    KeyPath,
    ObjectEntry,
    TensorEntry,
    blocks_of,
    located,
)
from shardwise.checkpoint.safetensors import read_headers
from shardwise.checkpoint.storage import METADATA, SIDECAR, Reader, attempt
from shardwise.checkpoint.sums import checksum
from shardwise.checkpoint.world import (
    Slot,
    Spread,
    largest_piece,
    owners,
    slots_of,
    some,
    spreads,
    tell,
    together,
    wire_device,
)
from shardwise.comm.transport import Transport, current
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import slices
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap

_LEAST_BUDGET, _MOST_BUDGET = 1 << 20, 1 << 23


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


@dataclass(slots=True)
class _Options:
    keys: tuple[str, ...] | None
    strict: bool
    cast: bool
    unsafe_objects: bool
    verify: bool


def load(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    unsafe_objects: bool = False,
    verify: bool = True,
) -> LoadReport:
    """Load a checkpoint into a state, in place; all ranks call it.

    It may have been saved under any layout, on any mesh, by any number of processes, by `save` or by
    ``torch.distributed.checkpoint``, or be a safetensors file or a folder of them. Tensors on the meta device
    are replaced by real ones, of which each rank makes its own piece only.

    Args:
        state: What to load into: as for `save`.
        path: The folder of one checkpoint (see `latest`), or a safetensors file.
        keys: Load only keys that match one of these patterns (``"model.*"``).
        strict: Raise when a key is missing, unexpected or mismatched. Of a state that names only some of the
            containers at the top, what is stored in the others is not unexpected. With False these keys are
            left as they are, and reported.
        cast: Convert where the stored dtype is another one; complex numbers only to complex ones.
        unsafe_objects: Unpickle stored objects without restraint, which runs any code that the file
            holds. Without it numbers, strings, tensors and containers of them can be read.
        verify: Check the checksums, where there are some.

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointError: On all ranks, naming file and key; nothing of the state has changed.

    Example:
        >>> state = {"model": model, "optimizer": optimizer, "step": 0}
        >>> checkpoint.load(state, checkpoint.latest("runs/a"))
        >>> state["step"]
        200
    """
    transport = current()
    options = _Options(
        None if keys is None else tuple(keys), strict, cast, unsafe_objects, verify
    )
    reader, index = open_checkpoint(path, transport)
    prepared, error = attempt(lambda: unfold_for(state, index), "the state")
    nested, quiet = prepared if prepared is not None else ({}, [])
    read, found = attempt(lambda: flatten(nested), "the state")
    flat, paths = read if read is not None else ({}, {})
    error = error or found or _unwritable(flat)
    world = tell(transport, slots_of(flat), error)
    report, chosen = _match(
        index, world, options, tuple(quiet), all(len(p) == 1 for p in paths.values())
    )
    _raise_if_strict(report, options, index)
    objects = _read_objects(transport, reader, index, chosen, options)
    _load_tensors(transport, reader, index, world, chosen, flat, paths, nested, options)
    for key, value in objects.items():
        if key in flat:
            put(nested, paths[key], value)
    _, error = attempt(lambda: fold(state, nested), "what was loaded is not taken")
    together(transport, error)
    return report


def _unwritable(flat: Mapping[str, Any]) -> str:
    for key, value in flat.items():
        if isinstance(value, DTensor) and value._spec.guards is not None:
            return (
                f"{key} is a copy that stands for a view: what is loaded into it would be lost."
            )
        if isinstance(value, Tensor) and value.layout != torch.strided:
            return f"{key} is not strided ({value.layout})."
        local = value._local if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and any(
            s == 0 and n > 1 for n, s in zip(local.shape, local.stride())
        ):
            return f"{key} is expanded: several of its elements share memory."
    return ""


# ---- the index -------------------------------------------------------------------------------------


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
    made, error = attempt(
        lambda: (
            read_headers(folder, raw[2])
            if kind == "safetensors"
            else read_index(raw[2], raw[3], folder)
        ),
        folder,
    )
    together(transport, error)
    return Reader(folder, transport.rank), made


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


# ---- what is wanted against what is stored ------------------------------------------------------------


def _match(
    index: Index,
    world: list[list[Slot]],
    options: _Options,
    quiet: tuple[str, ...],
    flat_state: bool,
) -> tuple[LoadReport, list[str]]:
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


def _mismatch(slot: Slot, entry: Entry, options: _Options) -> tuple[str, str] | None:
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


def _raise_if_strict(report: LoadReport, options: _Options, index: Index) -> None:
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


# ---- objects ---------------------------------------------------------------------------------------


def _read_objects(
    transport: Transport, reader: Reader, index: Index, chosen: list[str], options: _Options
) -> dict[str, Any]:
    """The stored objects: rank 0 reads them, and every rank decodes them."""
    wanted = {k: e for k in chosen if isinstance(e := index.entries[k], ObjectEntry)}
    if not wanted:
        return {}
    raw, error = attempt(
        lambda: (
            {k: _object_bytes(reader, k, e, options) for k, e in wanted.items()}
            if transport.rank == 0
            else None
        ),
        index.folder,
    )
    raw = together(transport, error, raw)[0]
    out, error = attempt(
        lambda: {k: _decode(k, data, index, options) for k, data in raw.items()}, index.folder
    )
    together(transport, error)
    return out


def _object_bytes(reader: Reader, key: str, entry: ObjectEntry, options: _Options) -> bytes:
    item = entry.item
    try:
        data = reader.request(item.file, item.offset, item.length, "object")
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    if options.verify and entry.sum and checksum(data) != entry.sum:
        raise CheckpointError(_damaged(reader, key, item.file, item.offset))
    return data.numpy().tobytes()


def _decode(key: str, data: bytes, index: Index, options: _Options) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=not options.unsafe_objects)
    except Exception as error:  # torch raises what the damage makes it raise
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(
            f"{index.folder}: the object {key} cannot be read safely: {type(error).__name__}: {reason}",
            tries=["unsafe_objects=True, if you trust the file: it runs what it holds"],
        ) from error


def _damaged(reader: Reader, key: str, file: str, at: int) -> str:
    return f"{reader.folder / file}, {key}: damaged at byte {at}: the checksum is wrong."


# ---- tensors ---------------------------------------------------------------------------------------


def _load_tensors(
    transport: Transport,
    reader: Reader,
    index: Index,
    world: list[list[Slot]],
    chosen: list[str],
    flat: dict[str, Any],
    paths: Mapping[str, KeyPath],
    nested: dict[str, Any],
    options: _Options,
) -> None:
    keys = {k for k in chosen if isinstance(index.entries[k], TensorEntry)}
    wanted, error = attempt(
        lambda: {k: s for k, s in spreads(world).items() if k in keys}, "the state"
    )
    together(transport, error)
    keys = _without_twins(keys, world, index)
    entries = opened(transport, reader, index, keys)
    wanted = {k: wanted[k] for k in entries if wanted[k].boxes}
    blocks, error = attempt(lambda: _blocks(entries, wanted), index.folder)
    together(transport, error)
    assert blocks is not None, "else all ranks have raised"
    rank = transport.rank
    readers = owners(blocks, wanted, transport.world_size)
    whole: dict[int, Tensor] = {}
    _, error = attempt(
        lambda: _verify(reader, blocks, readers, rank, options, whole), index.folder
    )
    together(transport, error)
    # From here on nothing is expected to fail, and parameters change.
    targets = {
        key: _target(transport, key, flat, paths, nested) for key in entries if key in flat
    }

    def fetch(t: Transfer) -> Tensor:
        block = blocks[t.source]
        data = whole.get(t.source)
        if data is None:
            data = _elements(block, reader.again(block.file, block.start, block.nbytes))
        return data[slices(t.box, block.box)]

    def store(t: Transfer, piece: Tensor) -> None:
        local, box = targets[t.key]
        assert box is not None, "only who holds a box is sent one"
        local[slices(t.box, box)].copy_(piece)

    sources = [Source(b.key, b.box, r, b.dtype) for b, r in zip(blocks, readers)]
    most = max(_LEAST_BUDGET, min(_MOST_BUDGET, largest_piece(world, wanted) // 4))
    transfers = plan(sources, {k: s.boxes for k, s in wanted.items()}, most)
    with torch.no_grad():
        exchange(
            transport,
            rounds(transfers, transport.world_size, most),
            fetch,
            store,
            wire_device(transport),
        )


def _without_twins(keys: set[str], world: list[list[Slot]], index: Index) -> list[str]:
    """The keys to load, in stored order; of tied tensors that are stored once, one."""
    group: dict[str, str] = {}
    for slots in {id(s): s for s in world}.values():
        for slot in slots:
            group.setdefault(slot.key, slot.tied or slot.key)
    seen: set[Any] = set()
    out = []
    for key, entry in index.tensors():
        if key not in keys:
            continue
        twin = (group[key], tuple(c.item for c in entry.chunks))
        if entry.chunks and twin in seen:
            continue
        seen.add(twin)
        out.append(key)
    return out


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


def _blocks(entries: Mapping[str, TensorEntry], wanted: Mapping[str, Spread]) -> list[Block]:
    """The blocks of which somebody needs something.

    Raises:
        CheckpointError: The chunks of a tensor do not cover it.
    """
    out = []
    for key, spread in wanted.items():
        entry = entries[key]
        held = sum(torch.Size(c.box[1]).numel() for c in entry.chunks)
        if held != torch.Size(entry.shape).numel():
            raise CheckpointError(
                f"{key}: the stored chunks hold {held} of {torch.Size(entry.shape).numel()} elements."
            )
        boxes = [*spread.boxes]
        for chunk in entry.chunks:
            if 0 in chunk.box[1]:
                continue
            out += [
                block
                for block in blocks_of(key, entry, chunk)
                if any(_meets(block.box, box) for box in boxes)
            ]
    return out


def _meets(a: Any, b: Any) -> bool:
    return all(max(o1, o2) < min(o1 + n1, o2 + n2) for o1, n1, o2, n2 in zip(*a, *b))


def _verify(
    reader: Reader,
    blocks: list[Block],
    readers: list[int],
    rank: int,
    options: _Options,
    whole: dict[int, Tensor],
) -> None:
    """Request this rank's blocks, and compare their checksums."""
    for i, (block, owner) in enumerate(zip(blocks, readers)):
        if owner == rank:
            data = _requested(reader, block, options.verify)
            if block.opaque:
                whole[i] = _whole_chunk(reader, block, data)


def _requested(reader: Reader, block: Block, verify: bool) -> Tensor:
    """The bytes of a block, checked."""
    try:
        data = reader.request(block.file, block.start, block.nbytes, "elements")
    except CheckpointError as error:
        raise CheckpointError(f"{block.key}: {error}") from error
    if verify and block.sum and checksum(data) != block.sum:
        raise CheckpointError(_damaged(reader, block.key, block.file, block.start))
    return data


def block_values(reader: Reader, block: Block, verify: bool = True) -> Tensor:
    """The elements of a block, checked.

    Raises:
        CheckpointError: It is damaged.
    """
    data = _requested(reader, block, verify)
    return _whole_chunk(reader, block, data) if block.opaque else _elements(block, data)


def _elements(block: Block, data: Tensor) -> Tensor:
    if block.start % block.dtype.itemsize:  # as torch and others write
        data = data.clone()
    return data.view(block.dtype).view(block.box[1])


def _whole_chunk(reader: Reader, block: Block, data: Tensor) -> Tensor:
    try:
        value = torch.load(
            io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu"
        )
    except Exception as error:  # torch raises what the damage makes it raise
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(
            f"{reader.folder / block.file}, {block.key}: cannot be read: {type(error).__name__}: {reason}"
        ) from error
    if (
        not isinstance(value, Tensor)
        or tuple(value.shape) != block.box[1]
        or value.dtype != block.dtype
    ):
        raise CheckpointError(
            f"{reader.folder / block.file}, {block.key}: holds something else than a "
            f"{block.dtype} tensor of shape {block.box[1]}."
        )
    return value.detach()


def _target(
    transport: Transport,
    key: str,
    flat: dict[str, Any],
    paths: Mapping[str, KeyPath],
    nested: dict[str, Any],
) -> tuple[Tensor, Any]:
    """This rank's memory for a tensor, and the box that it holds; what is on the meta device is made."""
    value = flat[key]
    if value.is_meta:
        value = flat[key] = _made(value)
        put(nested, paths[key], value)
    slot = Slot(
        key,
        tuple(value.shape),
        value.dtype,
        value._spec.layout if isinstance(value, DTensor) else None,
    )
    local = (value._local if isinstance(value, DTensor) else value).detach()
    box = slot.box(transport.rank)
    if box is None and local.numel():  # the others' part of a pending sum
        product = slot.layout is not None and "product" in slot.layout.partial
        with torch.no_grad():
            local.fill_(1 if product else 0)
    return local, box


def _made(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return torch.empty_like(value, device="cuda" if torch.cuda.is_available() else "cpu")
    layout = value._spec.layout
    local = torch.empty_strided(
        value._local.shape,
        value._local.stride(),
        dtype=value.dtype,
        device=layout.mesh.device_type,
    )
    return wrap(local, spec_of(layout, value._spec.transport))
