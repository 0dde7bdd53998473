"""Files in the safetensors format, and Hugging Face's folders of them.

```text
8 bytes   length of the header, little-endian
header    JSON: key -> dtype, shape, byte offsets after the header
elements  row-major, one tensor after the other
```
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import math
from typing import Any

import torch

from shardwise.checkpoint.records import Chunk, Entry, Index, Item, TensorEntry
from shardwise.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"


def read_headers(folder: str, headers: Sequence[tuple[str, int, bytes]]) -> Index:
    """The index of one or several files.

    Args:
        folder: Where they are.
        headers: Name, size and header of each.

    Raises:
        CheckpointError: A header is damaged, a file is truncated, or two files have the same key.
    """
    entries: dict[str, Entry] = {}
    sizes = {}
    for file, size, header in headers:
        sizes[file] = size
        for key, entry in _entries(folder, file, size, header).items():
            if key in entries:
                raise CheckpointError(
                    f"{folder}: {key} is in more than one file, in {file} again."
                )
            entries[key] = entry
    return Index(folder, "safetensors", entries, {key: (key,) for key in entries}, sizes)


def _entries(folder: str, file: str, size: int, header: bytes) -> dict[str, TensorEntry]:
    where = f"{folder}/{file}"
    base = 8 + len(header)
    try:
        described = json.loads(header, object_pairs_hook=_named_once)
        if not isinstance(described, dict):
            raise CheckpointError(f"{where}: the header is damaged: it is no object.")
        described.pop("__metadata__", None)
        out = {}
        for key, info in described.items():
            try:
                dtype, shape = DTYPES[info["dtype"]], tuple(info["shape"])
                begin, end = info["data_offsets"]
            except (KeyError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{where}, {key}: the header is damaged: {error!r}."
                ) from error
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise CheckpointError(
                    f"{where}, {key}: the header is damaged: shape {list(shape)}, bytes {begin} to {end}."
                )
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise CheckpointError(
                    f"{where}, {key}: {end - begin} bytes for {dtype}{list(shape)}."
                )
            if base + end > size:
                raise CheckpointError(
                    f"{where} is truncated: it has {size} bytes, and {key} ends at {base + end}."
                )
            item = Item(file, base + begin, end - begin)
            chunk = Chunk(((0,) * len(shape), shape), item, base + begin)
            out[key] = TensorEntry(shape, dtype, (chunk,))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: the header is damaged: {error!r}.") from error
    return out


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key is there twice")
    return out
