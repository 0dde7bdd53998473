"""Reading and writing what says where everything lies.

```text
.metadata        a pickle of torch.distributed.checkpoint's classes: torch can read our checkpoints
shardwise.json   what it has no room for: where the elements begin, checksums, layouts, file sizes
```

The pickle is read without torch and without running anything: an unpickler that knows the names of those few
classes makes powerless stand-ins of them, and refuses every other name.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
import io
import json
import pickle
from typing import Any

import torch

from shardwise.checkpoint.records import (
    BLOCK_BYTES,
    Chunk,
    Entry,
    Index,
    Item,
    ObjectEntry,
    TensorEntry,
    inside,
)
from shardwise.compat import checkpoint_types
from shardwise.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_VERSION = 1


# ---- the pickle, read ------------------------------------------------------------------------------


class _Safe(pickle.Unpickler):
    """Admits the named classes of DCP's metadata and torch's Size, dtype and layout; calls none of them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known: dict[
            tuple[str, str], Any
        ] = {}  # made anew for each file: one cannot mark another

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            found = self._known[module, name] = _admitted(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside itself")


def _admitted(module: str, name: str) -> Any:
    if (module, name) in _RECORDS:
        return _stand_in(name)
    if (module, name) == ("torch", "Size"):
        return lambda sizes=(): tuple(sizes)
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if (module, name) == ("torch.serialization", "_get_layout"):
        return lambda text: text
    if (module, name) == (_METADATA, "_MEM_FORMAT_ENCODING"):
        return lambda number: number
    if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
        return lambda *parts: "/".join(map(str, parts))
    raise pickle.UnpicklingError(
        f"it names {module}.{name}, which has no place in a checkpoint's metadata"
    )


def _stand_in(name: str) -> type:
    """A class that holds the state that it is given and can do nothing."""

    def keep(self: Any, state: Any) -> None:
        self.state = state

    return type(name, (), {"__slots__": ("state",), "__setstate__": keep})


def read_pickle(data: bytes, folder: str) -> Index:
    """The index in a ``.metadata`` file.

    Raises:
        CheckpointError: It is damaged, or names a class that does not belong there.
    """
    try:
        root = _Safe(data).load()
        return _index(root, folder)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{folder}/.metadata cannot be read: {error}.",
            tries=[
                "torch.distributed.checkpoint.load, if you trust the file: it runs what it holds"
            ],
        ) from error


def _index(root: Any, folder: str) -> Index:
    state = _fields(root, "Metadata")
    places = {}
    for index, info in state["storage_data"].items():
        at, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise CheckpointError(
                f"{at['fqn']} was transformed when it was written; only torch can undo it."
            )
        offset = at.get("offset")
        item = Item(inside(where["relative_path"]), int(where["offset"]), int(where["length"]))
        places[at["fqn"], None if offset is None else _ints(offset)] = item
    entries: dict[str, Entry] = {}
    for key, stored in state["state_dict_metadata"].items():
        if type(stored).__name__ == "BytesStorageMetadata":
            entries[key] = ObjectEntry(places[key, None])
            continue
        tensor = _fields(stored, "TensorStorageMetadata")
        dtype = tensor["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{key} has no dtype.")
        chunks = []
        for chunk in tensor["chunks"]:
            box = _fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = _ints(box["offsets"]), _ints(box["sizes"])
            chunks.append(Chunk((offsets, sizes), places[key, offsets]))
        entries[key] = TensorEntry(_ints(tensor["size"]), dtype, tuple(chunks))
    given = state.get("planner_data")
    paths = given if isinstance(given, dict) else {}
    meta = state.get("storage_meta")
    save_id = "" if meta is None else str(_fields(meta, "StorageMeta").get("save_id") or "")
    return Index(
        folder, "dcp", entries, {k: tuple(paths.get(k, (k,))) for k in entries}, {}, save_id
    )


def _fields(record: Any, name: str) -> dict[str, Any]:
    if type(record).__name__ != name:
        raise CheckpointError(
            f"a {name} was expected in the metadata, not a {type(record).__name__}."
        )
    # An instance without any state of its own pickles as nothing.
    state = getattr(record, "state", {})
    if isinstance(state, tuple) and len(state) == 2:  # slots
        state = {**(state[0] or {}), **(state[1] or {})}
    assert isinstance(state, dict), "a dataclass pickles its fields"
    return state


def _ints(values: Any) -> tuple[int, ...]:
    out = tuple(values)
    if not all(type(v) is int and v >= 0 for v in out):
        raise CheckpointError(f"a size or an offset is {values!r}.")
    return out


# ---- both, written ---------------------------------------------------------------------------------


def write_pickle(index: Index) -> bytes:
    """A ``.metadata`` file that torch reads, too."""
    types = checkpoint_types()
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key, entry in index.entries.items():
        if isinstance(entry, ObjectEntry):
            described[key] = types.BytesStorageMetadata()
            places[types.MetadataIndex(key)] = _info(types, entry.item)
            continue
        chunks = []
        for i, chunk in enumerate(entry.chunks):
            offsets, sizes = map(types.Size, chunk.box)
            chunks.append(types.ChunkStorageMetadata(offsets, sizes))
            places[types.MetadataIndex(key, offsets, i)] = _info(types, chunk.item)
        described[key] = types.TensorStorageMetadata(
            types.TensorProperties(dtype=entry.dtype), types.Size(entry.shape), chunks
        )
    meta = types.StorageMeta(checkpoint_id=None, save_id=index.save_id)
    return pickle.dumps(
        types.Metadata(described, dict(index.paths), places, meta, version="1.0.0")
    )


def _info(types: Any, item: Item) -> Any:
    return types.StorageInfo(item.file, item.offset, item.length)


def write_sidecar(index: Index, pickled: bytes) -> bytes:
    """The ``shardwise.json`` file next to a ``.metadata`` file; its first line is the checksum of the rest."""
    body: dict[str, Any] = {
        "version": _VERSION,
        "save_id": index.save_id,
        "world_size": index.world_size,
        "block_bytes": BLOCK_BYTES,
        "metadata": _digest(pickled),
        "sizes": index.sizes,
        "objects": {k: e.sum for k, e in index.entries.items() if isinstance(e, ObjectEntry)},
        "tensors": {
            key: {
                "layout": entry.layout,
                "chunks": [[list(c.box[0]), c.start, list(c.sums)] for c in entry.chunks],
            }
            for key, entry in index.tensors()
        },
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    return _digest(text).encode() + b"\n" + text


def read_index(pickled: bytes, sidecar: bytes | None, folder: str) -> Index:
    """The index of a checkpoint that torch or we have written.

    Args:
        pickled: The ``.metadata`` file.
        sidecar: The ``shardwise.json`` file, if there is one.
        folder: For messages.

    Raises:
        CheckpointError: Either is damaged, or they contradict each other.
    """
    body = None
    if sidecar is not None:
        first, _, text = sidecar.partition(b"\n")
        if first.decode(errors="replace") != _digest(text):
            raise CheckpointError(f"{folder}/shardwise.json is damaged: its checksum is wrong.")
        body = json.loads(text)
        if body["version"] != _VERSION:
            raise CheckpointError(
                f"{folder}/shardwise.json has format {body['version']}; this version reads {_VERSION}."
            )
        if body["metadata"] != _digest(pickled):
            try:
                other = read_pickle(pickled, folder)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{folder}/.metadata is damaged: its checksum is wrong."
                ) from error
            if other.save_id in ("", body["save_id"]):
                raise CheckpointError(f"{folder}/.metadata is damaged: its checksum is wrong.")
            return (
                other  # torch has saved over our checkpoint: what we noted is about other files
            )
    index = read_pickle(pickled, folder)
    if body is None:
        return index
    index.sizes, index.world_size = dict(body["sizes"]), int(body["world_size"])
    for key, entry in index.entries.items():
        if isinstance(entry, ObjectEntry):
            index.entries[key] = replace(entry, sum=body["objects"][key])
            continue
        noted = body["tensors"][key]
        by_offset = {tuple(at): (start, tuple(sums)) for at, start, sums in noted["chunks"]}
        chunks = [
            replace(
                c,
                start=by_offset[c.box[0]][0],
                sums=by_offset[c.box[0]][1],
                block_bytes=body["block_bytes"],
            )
            for c in entry.chunks
        ]
        index.entries[key] = replace(entry, chunks=tuple(chunks), layout=noted["layout"])
    return index


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
