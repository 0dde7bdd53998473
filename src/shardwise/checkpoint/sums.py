"""The checksum of a block of bytes: fast enough to be always on.

The bytes, as 64-bit words, are written in rows of 1,024. All row sums and all column sums are hashed, with
the length. A change of up to three words always changes some sum, and so does one that stays within a row or
a column; only a change of four words at the corners of a rectangle, by amounts that cancel, could hide.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

_ROW = 1024
_PART, _FOLD = (
    64,
    8,
)  # rows that stay in the cache for both sums; how many are added up at a time


def checksum(data: Tensor) -> str:
    """The checksum of a 1-D tensor of bytes, as 16 hex digits."""
    n = data.numel()
    hashed = blake2b(n.to_bytes(8, "little"), digest_size=8)
    whole = n // (8 * _ROW) * (8 * _ROW)
    if whole:
        main = data[:whole]
        if main.storage_offset() % 8 or main.data_ptr() % 8:
            main = main.clone()
        columns, rows = _sums(main.view(torch.int64).view(-1, _ROW))
        hashed.update(columns.numpy().tobytes())
        hashed.update(rows.numpy().tobytes())
    hashed.update(data[whole:].numpy().tobytes())
    return hashed.hexdigest()


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of all columns and of all rows, in about one reading of the memory."""
    whole = len(rows) // _PART * _PART
    columns = torch.zeros((_PART // _FOLD, _ROW), dtype=torch.int64)
    lines = []
    for part in rows[:whole].split(_PART) if whole else ():
        columns += part.view(_FOLD, -1, _ROW).sum(0)
        lines.append(part.sum(1))
    rest = rows[whole:]
    return columns.sum(0).add_(rest.sum(0)), torch.cat([*lines, rest.sum(1)])


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous CPU tensor as a 1-D tensor of its bytes, sharing memory."""
    return x.reshape(-1).view(torch.uint8)
