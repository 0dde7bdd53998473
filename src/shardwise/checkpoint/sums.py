"""The checksum of a block of bytes: fast enough to be always on, and added up from parts.

The bytes, as 64-bit words, are written in rows of 1,024. All row sums and all column sums are hashed, with
the length. A change of up to three words always changes some sum, and so does one that stays within a row or
a column; only a change of four words at the corners of a rectangle, by amounts that cancel, could hide.

Sums are linear. So ranks that each read a part of a block need not have the rest: what each finds, with zeros
where the others' bytes are, adds up to the sums of the whole (`part_sums`, `sum_up`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
import math

import torch
from torch import Tensor

_ROW = 1024
_ROW_BYTES = 8 * _ROW
_PART, _FOLD = (
    64,
    8,
)  # rows that stay in the cache for both sums; how many are added up at a time
_MOST_PHASES = 16
_STRIP = 1 << 18  # bytes that are looked at in a copy of their own; they stay in the cache


def checksum(data: Tensor) -> str:
    """The checksum of a 1-D tensor of bytes, as 16 hex digits."""
    n = data.numel()
    hashed = blake2b(n.to_bytes(8, "little"), digest_size=8)
    whole = n // _ROW_BYTES * _ROW_BYTES
    if whole:
        main = data[:whole]
        if main.data_ptr() % 8:
            main = main.clone()
        columns, rows = _sums(_words(main))
        hashed.update(columns.numpy().tobytes())
        hashed.update(rows.numpy().tobytes())
    hashed.update(data[whole:].numpy().tobytes())
    return hashed.hexdigest()


def _words(data: Tensor) -> Tensor:
    return data.view(torch.int64).view(-1, _ROW)


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of all columns and of all rows, in about one reading of the memory."""
    whole = len(rows) // _PART * _PART
    columns = torch.zeros((_PART // _FOLD, rows.shape[1]), dtype=torch.int64)
    lines = []
    for part in rows[:whole].split(_PART) if whole else ():
        columns += part.unflatten(0, (_FOLD, -1)).sum(0)
        lines.append(part.sum(1))
    rest = rows[whole:]
    return columns.sum(0).add_(rest.sum(0)), torch.cat([*lines, rest.sum(1)])


# ---- of parts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stripe:
    """A part of a block: bytes ``begin`` to ``end`` of each of ``count`` equal stretches."""

    count: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.count * (self.end - self.begin)


def sums_length(nbytes: int) -> int:
    """The number of 64-bit words that `part_sums` gives of a block."""
    whole, rest = divmod(nbytes, _ROW_BYTES)
    return _ROW + whole + math.ceil(rest / 8)


def part_sums(block: Tensor, stripe: Stripe) -> Tensor:
    """What a part adds to the sums of its block.

    Args:
        block: The bytes of the block, of which those of the part are read; it begins at a multiple of 8.
        stripe: The part.

    Returns:
        Sums of columns, of rows, and the bytes after the last whole row.
    """
    found = _Sums(block)
    row = len(block) // stripe.count
    phases = _ROW // math.gcd(_ROW, max(1, row // 8))
    done = 0
    if stripe.count == 1 or stripe.end - stripe.begin >= _STRIP:
        done = stripe.count
        for at in range(0, len(block), row):
            found.add_run(at + stripe.begin, at + stripe.end)
    elif not (row % 8 or stripe.begin % 8 or stripe.end % 8) and phases <= _MOST_PHASES:
        done = stripe.count // phases * phases
        found.add_words(done, phases, row // 8, stripe)
    found.add_strips(done, row, stripe)
    return found.sums


def sum_up(nbytes: int, sums: Tensor) -> str:
    """The checksum of a block, from its length and the sum of what all parts add."""
    hashed = blake2b(nbytes.to_bytes(8, "little"), digest_size=8)
    whole, rest = divmod(nbytes, _ROW_BYTES)
    data = sums.contiguous().numpy().tobytes()
    at = 8 * (_ROW + whole)
    if whole:
        hashed.update(data[:at])
    hashed.update(data[at : at + rest])
    return hashed.hexdigest()


class _Sums:
    """The sums of a block that grow as stretches of it are added."""

    def __init__(self, block: Tensor) -> None:
        self._block = block
        self._whole = len(block) // _ROW_BYTES
        self.sums = torch.zeros(sums_length(len(block)), dtype=torch.int64)
        self._columns = self.sums[:_ROW]
        self._lines = self.sums[_ROW : _ROW + self._whole]
        self._tail = self.sums[_ROW + self._whole :].view(torch.uint8)

    def _add_rows(self, first: int, rows: Tensor) -> None:
        """Add whole rows, zeros where there is nothing to add; past the last whole row is the tail."""
        inside = max(0, min(len(rows), self._whole - first))
        if inside:
            columns, lines = _sums(rows[:inside])
            self._columns += columns
            self._lines[first : first + inside] += lines
        if inside < len(rows):
            tail = rows[inside].view(torch.uint8)
            self._tail += tail[: len(self._tail)]  # other parts have zeros there: no carry

    def add_run(self, begin: int, end: int) -> None:
        """Add a contiguous stretch of bytes."""
        first, last = -(-begin // _ROW_BYTES), end // _ROW_BYTES
        if first >= last:
            self._add_copy(begin, end)
            return
        self._add_copy(begin, first * _ROW_BYTES)
        self._add_rows(first, _words(self._block[first * _ROW_BYTES : last * _ROW_BYTES]))
        self._add_copy(last * _ROW_BYTES, end)

    def _add_copy(self, begin: int, end: int) -> None:
        if begin < end:
            self.add_strips(0, end - begin, Stripe(1, 0, end - begin), begin)

    def add_strips(self, done: int, row: int, stripe: Stripe, start: int = 0) -> None:
        """Add the part in all stretches from ``done`` on, a few at a time, in a copy.

        The first stretch begins at byte ``start`` and has ``row`` bytes.
        """
        step = max(1, _STRIP // row)
        for first in range(done, stripe.count, step):
            count = min(step, stripe.count - first)
            begin, end = start + first * row, start + (first + count) * row
            base = begin // _ROW_BYTES * _ROW_BYTES
            copy = torch.zeros(-(-(end - base) // _ROW_BYTES) * _ROW_BYTES, dtype=torch.uint8)
            to = copy[begin - base : end - base].view(count, row)
            of = self._block[begin:end].view(count, row)
            to[:, stripe.begin : stripe.end] = of[:, stripe.begin : stripe.end]
            self._add_rows(base // _ROW_BYTES, _words(copy))

    def add_words(self, count: int, phases: int, row: int, stripe: Stripe) -> None:
        """Add the part in the first ``count`` stretches of ``row`` words where they lie.

        Every ``phases`` stretches the columns are the same again.
        """
        begin, end = stripe.begin // 8, stripe.end // 8
        stretches = self._block[: 8 * count * row].view(torch.int64).view(-1, phases, row)
        step = phases * row // _ROW
        for phase in range(phases if count else 0):
            at, last = phase * row + begin, phase * row + end
            while at < last:
                line, column = divmod(at, _ROW)
                stop = min(last, (line + 1) * _ROW)
                words = stretches[:, phase, at - phase * row : stop - phase * row]
                columns, lines = _sums(words)
                self._columns[column : column + stop - at] += columns
                self._lines[line::step][: len(lines)] += lines
                at = stop


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous CPU tensor as a 1-D tensor of its bytes, sharing memory."""
    return x.reshape(-1).view(torch.uint8)
