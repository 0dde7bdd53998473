"""Writing safetensors files from sharded tensors: no rank ever has more of one than a block besides its shard.

The output is cut into blocks; each is put together by a rank that holds most of it, from what the others send,
and written to its place in the file. Files are made beside the target and appear when all are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
import math
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from shardwise.checkpoint import series
from shardwise.checkpoint.adapters import unfold
from shardwise.checkpoint.exchange import Transfer, exchange, rounds
from shardwise.checkpoint.nested import flatten
from shardwise.checkpoint.preparing import settled
from shardwise.checkpoint.records import BLOCK_BYTES, Block
from shardwise.checkpoint.safetensors import INDEX, NAMES
from shardwise.checkpoint.storage import attempt, remove_folder, sync_folder, write_file
from shardwise.checkpoint.sums import as_bytes
from shardwise.checkpoint.world import (
    Spread,
    owners,
    slots_of,
    some,
    spreads,
    tell,
    ties,
    together,
    wire_device,
)
from shardwise.comm.transport import Transport, current
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import overlap, runs, slices
from shardwise.tensor.dtensor import DTensor

_BUDGET = 1 << 25
_ALIGN = 16


def save_safetensors(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write tensors as safetensors, in Hugging Face's form; all ranks call it, and all of them write.

    Of tied tensors the first is written, as is the custom there.

    Args:
        state: Nested dicts of tensors and DTensors, or a module; no other values.
        path: A file ``*.safetensors``, or a folder: it gets ``model.safetensors``, or, if that would be larger
            than ``max_shard_bytes``, several files and ``model.safetensors.index.json``.
        max_shard_bytes: Largest file, unless one tensor is larger.
        metadata: Texts to keep in each file's header.
        overwrite: Replace what is there.

    Returns:
        The path.

    Raises:
        CheckpointError: On all ranks: a value that safetensors cannot hold, or some rank could not write.

    Example:
        >>> checkpoint.save_safetensors(model, "export")
    """
    transport = current()
    tree, error = attempt(lambda: _tensors(state), "the state")
    flat: dict[str, Any] = tree or {}
    slots, odd = attempt(lambda: slots_of(flat), "the state")
    world = tell(transport, slots or [], error or odd)
    if any(s.layout is not None and s.layout.is_partial for slots in world for s in slots):
        flat = {key: settled(value) for key, value in flat.items()}
        world = tell(transport, slots_of(flat), "")
    tied = ties(world)
    spread = {k: s for k, s in spreads(world).items() if k not in tied}

    def fetch(t: Transfer) -> Tensor:
        value = flat[t.key]
        local = value._local if isinstance(value, DTensor) else value
        box = next(s for s in world[transport.rank] if s.key == t.key).box(transport.rank)
        assert box is not None, "only who holds a box is asked for one"
        return local.detach()[slices(t.box, box)]

    return write_files(
        transport, spread, fetch, Path(path), max_shard_bytes, metadata, overwrite
    )


def _tensors(state: Any) -> dict[str, Tensor]:
    if isinstance(state, torch.nn.Module):
        flat = unfold({"": state})[""]
    else:
        flat, _ = flatten(unfold(state))
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{key} is a {type(value).__name__}: safetensors files hold tensors only.",
                tries=["checkpoint.save: it keeps other values, too"],
            )
        if value.dtype not in NAMES:
            raise CheckpointError(f"{key} is {value.dtype}, which safetensors does not know.")
        if value.is_meta:
            raise CheckpointError(f"{key} is on the meta device: it has no values to save.")
    return flat


def write_files(
    transport: Transport,
    spread: Mapping[str, Spread],
    fetch: Callable[[Transfer], Tensor],
    target: Path,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None,
    overwrite: bool,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write files from boxes that ranks hold.

    Args:
        transport: This rank's transport.
        spread: Which ranks hold which box of each tensor.
        fetch: A part of a box that this rank holds.
        target: A file or a folder.
        max_shard_bytes: See `save_safetensors`.
        metadata: See `save_safetensors`.
        overwrite: See `save_safetensors`.
        progress: Called with the bytes of each block that was written here.
    """
    single = target.suffix == ".safetensors"
    files = _files(
        spread, math.inf if single else max_shard_bytes, target.name if single else ""
    )
    chosen = together(transport, "", uuid4().hex)[0]
    folder = target.parent / f".tmp-{target.name}-{chosen[:12]}"
    layouts = {name: _header(spread, keys, metadata) for name, keys in files.items()}

    def open_all() -> None:
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} is there already.", tries=["overwrite=True"])
        others = [] if single or not target.exists() else _others(target)
        if others:
            raise CheckpointError(
                f"{target} has other things in it, which would be lost: {some(others)}.",
                tries=["another path; what belongs together can be moved there afterwards"],
            )
        folder.mkdir(parents=True)
        for name, (head, _, size) in layouts.items():
            write_file(folder / name, head)
            os.truncate(folder / name, size)

    _, error = attempt(lambda: open_all() if transport.rank == 0 else None, str(folder))
    together(transport, error)
    told, error = attempt(
        lambda: _write_blocks(transport, spread, fetch, folder, layouts, progress), str(folder)
    )
    error = error or told or ""
    try:
        together(transport, error)
    except CheckpointError:
        if transport.rank == 0:
            remove_folder(folder)
        raise

    def commit() -> None:
        if len(files) > 1:
            total = sum(math.prod(s.shape) * s.dtype.itemsize for s in spread.values())
            weight_map = {key: name for name, keys in files.items() for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        sync_folder(folder)
        if single:
            (folder / target.name).replace(target)
            folder.rmdir()
        else:
            aside = series.set_aside(target, chosen) if target.exists() else None
            folder.rename(target)
            if aside is not None:
                remove_folder(aside)
        sync_folder(target.parent)

    _, error = attempt(lambda: commit() if transport.rank == 0 else None, str(target))
    if error and transport.rank == 0:
        remove_folder(folder)
    together(transport, error)
    return target


def _others(target: Path) -> list[str]:
    """What is at a path and is no export."""
    if not target.is_dir():
        return [target.name]
    names = sorted(entry.name for entry in target.iterdir())
    return [name for name in names if name != INDEX and not name.endswith(".safetensors")]


def _files(spread: Mapping[str, Spread], most: float, only: str) -> dict[str, list[str]]:
    """Which keys go into which file, in order."""
    groups: list[list[str]] = [[]]
    held = 0
    for key, s in spread.items():
        size = math.prod(s.shape) * s.dtype.itemsize
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += size
    if len(groups) == 1:
        return {only or "model.safetensors": groups[0]}
    n = len(groups)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _header(
    spread: Mapping[str, Spread], keys: list[str], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int], int]:
    """Header of a file, where each tensor begins, and the file's size."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begin = 0
    at: dict[str, int] = {}
    # Large elements first: then every tensor is aligned.
    for key in sorted(keys, key=lambda k: -spread[k].dtype.itemsize):
        s = spread[key]
        size = math.prod(s.shape) * s.dtype.itemsize
        described[key] = {
            "dtype": NAMES[s.dtype],
            "shape": list(s.shape),
            "data_offsets": [begin, begin + size],
        }
        at[key] = begin
        begin += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: len(head) + start for key, start in at.items()}, len(head) + begin


def _write_blocks(
    transport: Transport,
    spread: Mapping[str, Spread],
    fetch: Callable[[Transfer], Tensor],
    folder: Path,
    layouts: Mapping[str, tuple[bytes, dict[str, int], int]],
    progress: Callable[[int], None] | None,
) -> str:
    """Put this rank's blocks together and write them; what went wrong."""
    blocks: list[Block] = []
    for name, (_, at, _) in layouts.items():
        for key, start in at.items():
            s = spread[key]
            held = sum(math.prod(box[1]) for box in s.boxes)
            assert held == math.prod(s.shape), "the boxes of all ranks tile a tensor"
            for box in runs(s.shape, max(1, BLOCK_BYTES // s.dtype.itemsize)):
                nbytes = math.prod(box[1]) * s.dtype.itemsize
                blocks.append(Block(key, s.dtype, box, name, start, nbytes))
                start += nbytes
    writers = owners(blocks, spread, transport.world_size)
    transfers = _transfers(blocks, writers, spread)
    open_blocks: dict[int, tuple[Tensor, int]] = {}
    handles: dict[str, int] = {}
    errors: list[str] = []

    def store(t: Transfer, piece: Tensor) -> None:
        block = blocks[t.source]
        if t.source not in open_blocks:
            open_blocks[t.source] = (torch.empty(block.box[1], dtype=block.dtype), 0)
        buffer, filled = open_blocks[t.source]
        buffer[slices(t.box, block.box)].copy_(piece)
        filled += piece.numel()
        open_blocks[t.source] = buffer, filled
        if filled == buffer.numel():
            del open_blocks[t.source]
            _, error = attempt(
                lambda: _put(handles, folder, block, buffer), str(folder / block.file)
            )
            if error:  # go on, so that the other ranks are not left waiting
                errors.append(error)
            elif progress is not None:
                progress(block.nbytes)

    with torch.no_grad():
        exchange(
            transport,
            rounds(transfers, transport.world_size, _BUDGET),
            fetch,
            store,
            wire_device(transport),
        )
    for handle in handles.values():
        _, error = attempt(lambda handle=handle: os.fsync(handle), str(folder))
        errors += [error] if error else []
        os.close(handle)
    assert errors or not open_blocks, "every block was completed"
    return some(errors[:1])


def _transfers(
    blocks: list[Block], writers: list[int], spread: Mapping[str, Spread]
) -> list[Transfer]:
    out = []
    for i, (block, writer) in enumerate(zip(blocks, writers)):
        for box, ranks in spread[block.key].boxes.items():
            shared = overlap(block.box, box)
            if shared is None:
                continue
            nbytes = math.prod(shared[1]) * block.dtype.itemsize
            src = writer if writer in ranks else ranks[i % len(ranks)]
            padded = nbytes + -nbytes % _ALIGN
            out.append(Transfer(i, block.key, shared, src, writer, block.dtype, padded))
    return out


def _put(handles: dict[str, int], folder: Path, block: Block, buffer: Tensor) -> None:
    handle = handles.get(block.file)
    if handle is None:
        handle = handles[block.file] = os.open(folder / block.file, os.O_WRONLY)
    view: Any = as_bytes(buffer).numpy()
    data = memoryview(view)
    at = block.start
    while len(data):
        taken = os.pwrite(handle, data, at)
        data, at = data[taken:], at + taken
