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


def checksum(data: Tensor) -> str:
    """The checksum of a 1-D tensor of bytes, as 16 hex digits."""
    n = data.numel()
    hashed = blake2b(n.to_bytes(8, "little"), digest_size=8)
    whole = n // (8 * _ROW) * (8 * _ROW)
    if whole:
        main = data[:whole]
        if main.storage_offset() % 8 or main.data_ptr() % 8:
            main = main.clone()
        rows = main.view(torch.int64).view(-1, _ROW)
        hashed.update(rows.sum(0).numpy().tobytes())
        hashed.update(rows.sum(1).numpy().tobytes())
    hashed.update(data[whole:].numpy().tobytes())
    return hashed.hexdigest()


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous CPU tensor as a 1-D tensor of its bytes, sharing memory."""
    return x.reshape(-1).view(torch.uint8)
