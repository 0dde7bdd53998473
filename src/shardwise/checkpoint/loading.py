"""Loading: every stored byte is requested once, checked, and only then does any parameter change.

```text
   index      rank 0 reads what says where everything lies, and tells all
   match      what the state wants against what is stored: a report, or an error on all ranks
   read       each block by ranks that need it; its checksum is verified while it is only mapped
   agree      did every rank find its blocks right?
   exchange   what others need of them is sent, in rounds; the rest is copied straight into place
```

Extra memory: the buffers of one round, which together are smaller than the largest local shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
import io
import os
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.adapters import fold, refuse, unfold_for
from shardwise.checkpoint.exchange import Source, Transfer, exchange, plan, rounds
from shardwise.checkpoint.matching import LoadReport, Options, match, raise_if_strict
from shardwise.checkpoint.nested import flatten, put
from shardwise.checkpoint.opening import open_checkpoint, opened
from shardwise.checkpoint.reading import damaged, elements, read, requests
from shardwise.checkpoint.records import Index, KeyPath, ObjectEntry, TensorEntry
from shardwise.checkpoint.storage import Reader, agreed, attempt
from shardwise.checkpoint.sums import checksum
from shardwise.checkpoint.world import (
    Slot,
    all_slots,
    digest_of,
    largest_piece,
    machine,
    slots_of,
    spreads,
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
class _Told:
    """What each rank tells the others before anything is read."""

    digest: bytes
    options: Options
    machine: str
    quiet: tuple[str, ...]
    flat_state: bool


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
        CheckpointError: On all ranks, naming file and key; nothing of the state has changed, unless a
            ``load_state_dict`` of yours raises: it is called when the tensors have been loaded.

    Example:
        >>> state = {"model": model, "optimizer": optimizer, "step": 0}
        >>> checkpoint.load(state, checkpoint.latest("runs/a"))
        >>> state["step"]
        200
    """
    transport = current()
    if keys is not None:
        keys = tuple(sorted({keys} if isinstance(keys, str) else {*keys}))
    options = Options(keys, strict, cast, unsafe_objects, verify)
    reader, index = open_checkpoint(path, transport)
    prepared, error = attempt(lambda: unfold_for(state, index), "the state")
    nested, quiet = prepared if prepared is not None else ({}, [])
    taken, found = attempt(lambda: flatten(nested), "the state")
    flat, paths = taken if taken is not None else ({}, {})
    slots, odd = attempt(lambda: slots_of(flat), "the state")
    error = error or found or odd or _unwritable(flat)
    mine = slots or []
    flat_state = all(len(p) == 1 for p in paths.values())
    told = together(
        transport, error, _Told(digest_of(mine), options, machine(), tuple(quiet), flat_state)
    )
    if any(t.options != options for t in told):
        raise CheckpointError("not all ranks call load with the same arguments.")
    world = all_slots(transport, mine, tuple(t.digest for t in told))
    quiet = tuple(sorted({prefix for t in told for prefix in t.quiet}))
    report, chosen = match(index, world, options, quiet, all(t.flat_state for t in told))
    raise_if_strict(report, options, index)
    objects = _read_objects(transport, reader, index, chosen, options)
    for key, value in objects.items():
        if key in flat:
            put(nested, paths[key], value)
    _, error = attempt(lambda: refuse(state, nested), "the state")
    machines = [t.machine for t in told]
    tensors = _Tensors(reader, index, world, machines, chosen, verify)
    _load_tensors(transport, tensors, flat, paths, nested, error)
    _, error = attempt(lambda: fold(state, nested), "what was loaded is not taken")
    together(transport, error)
    return report


def _unwritable(flat: Mapping[str, Any]) -> str:
    for key, value in flat.items():
        if isinstance(value, DTensor) and value._spec.guards is not None:
            return (
                f"{key} is a copy that stands for a view: what is loaded into it would be lost."
            )
        local = value._local if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and any(
            s == 0 and n > 1 for n, s in zip(local.shape, local.stride())
        ):
            return f"{key} is expanded: several of its elements share memory."
    return ""


# ---- objects ---------------------------------------------------------------------------------------


def _read_objects(
    transport: Transport, reader: Reader, index: Index, chosen: list[str], options: Options
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


def _object_bytes(reader: Reader, key: str, entry: ObjectEntry, options: Options) -> bytes:
    item = entry.item
    try:
        data = reader.request(item.file, item.offset, item.length, "object")
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    if options.verify and entry.sum and checksum(data) != entry.sum:
        raise CheckpointError(damaged(reader, key, item.file, item.offset))
    return data.numpy().tobytes()


def _decode(key: str, data: bytes, index: Index, options: Options) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=not options.unsafe_objects)
    except Exception as error:  # torch raises what the damage makes it raise
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(
            f"{index.folder}: the object {key} cannot be read safely: {type(error).__name__}: {reason}",
            tries=["unsafe_objects=True, if you trust the file: it runs what it holds"],
        ) from error


# ---- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensors:
    """What there is to load, and for whom; the same on all ranks."""

    reader: Reader
    index: Index
    world: list[list[Slot]]
    machines: list[str]
    chosen: list[str]
    verify: bool


def _load_tensors(
    transport: Transport,
    what: _Tensors,
    flat: dict[str, Any],
    paths: Mapping[str, KeyPath],
    nested: dict[str, Any],
    error: str,
) -> None:
    """Load, unless this or another rank has an error, or finds one."""
    reader, index, world = what.reader, what.index, what.world
    keys = {k for k in what.chosen if isinstance(index.entries[k], TensorEntry)}
    held = agreed(lambda: spreads(world), "the state")
    keys = _without_twins(keys, world, index)
    entries = opened(transport, reader, index, keys)
    wanted = {k: held[k] for k in entries if held[k].boxes}
    blocks, parts = agreed(lambda: requests(entries, wanted, what.machines), index.folder)
    most = max(_LEAST_BUDGET, min(_MOST_BUDGET, largest_piece(world, wanted) // 4))
    found = read(transport, reader, blocks, parts, what.verify, most)
    together(transport, error or (found.errors[0] if found.errors else ""))
    # From here on nothing is expected to fail, and parameters change.
    targets = {
        key: _target(transport, key, flat, paths, nested) for key in entries if key in flat
    }

    def fetch(t: Transfer) -> Tensor:
        number = parts[t.source].block
        block = blocks[number]
        data = found.whole.get(number)
        if data is None:
            data = elements(block, reader.again(block.file, block.start, block.nbytes))
        return data[slices(t.box, block.box)]

    def store(t: Transfer, piece: Tensor) -> None:
        local, box = targets[t.key]
        assert box is not None, "only who holds a box is sent one"
        local[slices(t.box, box)].copy_(piece)

    sources = [Source(blocks[p.block].key, p.box, p.rank, blocks[p.block].dtype) for p in parts]
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
