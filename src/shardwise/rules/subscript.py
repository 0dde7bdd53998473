"""What an index expression means: ``x[0, 1:3, ..., None, ids]`` as one item per dim.

Works alike on the ``Arg``s that rules see and on the tensors of a local program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import boxes
from shardwise.layout.cut import plain
from shardwise.layout.layout import Layout
from shardwise.rules.edges import end_to_end
from shardwise.rules.notation import Arg

MAX_RANKS = 1024  # of how many a cut is looked at piece by piece


@dataclass(frozen=True, slots=True)
class Rows:
    """An int or a slice on a dim.

    Attributes:
        dim: The dim of the indexed tensor.
        rows: The rows that are taken.
        drop: An int: the result lacks the dim.
        size: Size of the dim.
    """

    dim: int
    rows: range
    drop: bool
    size: int

    @property
    def full(self) -> bool:
        """Whether all rows are taken, in order."""
        return not self.drop and self.rows == range(self.size)


@dataclass(frozen=True, slots=True)
class New:
    """``None``: a dim of size one in the result."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A tensor of positions on a dim, or a mask over several.

    Attributes:
        dim: The first dim of the indexed tensor that it covers.
        index: The ``Arg`` or tensor, or a list of ints.
        shape: Its shape.
        mask: Whether it is a mask.
    """

    dim: int
    index: Any
    shape: tuple[int, ...]
    mask: bool = False


Item = Rows | New | Picked


def parse(shape: Sequence[int], index: Any) -> list[Item] | None:
    """The items of an index expression on a tensor of this shape; every dim is covered once, in order.

    Returns:
        None if it is out of range, or not for a rule: bools, positions of different numbers of dims of
        which some have none (torch reads those first).
    """
    given = list(index) if type(index) is tuple else [index]
    used = [_covered(i) for i in given]
    if None in used or sum(i is Ellipsis for i in given) > 1:
        return None
    missing = len(shape) - sum(n for n in used if n is not None)
    if missing < 0:
        return None
    if not any(i is Ellipsis for i in given):
        given.append(Ellipsis)
    items: list[Item] = []
    dim = 0
    for i in given:
        for one in [slice(None)] * missing if i is Ellipsis else [i]:
            item = _item(one, dim, shape)
            if item is None:
                return None
            items.append(item)
            dim += _covered(one) or 0
    picked = [item.shape for item in items if isinstance(item, Picked)]
    return None if () in picked and any(picked) else items


def _is_tensor(i: Any) -> bool:
    return isinstance(i, (Arg, Tensor))


def _covered(i: Any) -> int | None:
    """How many dims an entry covers; None if it is not for a rule."""
    if i is None or i is Ellipsis:
        return 0
    if type(i) is int:
        return 1
    if isinstance(i, slice):
        plain = all(b is None or type(b) is int for b in (i.start, i.stop, i.step))
        return 1 if plain and (i.step is None or i.step > 0) else None
    if _is_tensor(i):
        if i.dtype in (torch.bool, torch.uint8):
            return i.ndim or None
        return 1
    if isinstance(i, list) and i and all(type(n) is int for n in i):
        return 1
    return None


def _item(i: Any, dim: int, shape: Sequence[int]) -> Item | None:
    if i is None:
        return New()
    if _is_tensor(i):
        mask = i.dtype in (torch.bool, torch.uint8)
        if mask and tuple(i.shape) != tuple(shape[dim : dim + i.ndim]):
            return None
        return Picked(dim, i, tuple(i.shape), mask)
    n = shape[dim]
    if isinstance(
        i, list
    ):  # one out of range is for torch to refuse, on the whole: all ranks must
        return Picked(dim, i, (len(i),)) if all(-n <= k < n for k in i) else None
    if isinstance(i, slice):
        return Rows(dim, range(*i.indices(n)), False, n)
    return Rows(dim, range(i % n, i % n + 1), True, n) if -n <= i < n else None


def stays(layout: Layout, dim: int, rows: range) -> bool:
    """Whether every rank's piece of ``rows`` lies in its piece of the dim."""
    axes, ranks = layout.dims[dim], layout.mesh.shape
    if math.prod(ranks[a] for a in axes) > MAX_RANKS:
        return False
    held = boxes.pieces(layout.shape[dim], axes, ranks)
    for (have, n), (want, m) in zip(held, boxes.pieces(len(rows), plain(axes), ranks)):
        if m and not (rows[want] >= have and rows[want + m - 1] < have + n):
            return False
    return True


def bounds(item: Rows) -> Any:
    """An int or a slice again."""
    rows = item.rows
    if item.full:
        return slice(None)
    return rows.start if item.drop else slice(rows.start, rows.stop, rows.step)


def as_slice(rows: range, start: int) -> slice:
    """Rows as a slice of a piece that begins at row ``start``."""
    if not rows:
        return slice(0, 0, 1)
    return slice(rows[0] - start, rows[-1] - start + 1, rows.step)


def held(rows: range, start: int, count: int) -> tuple[int, int]:
    """The part ``rows[i:j]`` that a piece of ``count`` rows from ``start`` holds."""
    i, j = (
        min(max(-(-(edge - rows.start) // rows.step), 0), len(rows))
        for edge in (start, start + count)
    )
    return i, j


def taken(x: Tensor, dim: int, start: int, rows: range) -> Tensor:
    """``rows`` of a dim of which ``x`` is the piece from ``start``: a copy, zeros for rows held elsewhere."""
    i, j = held(rows, start, x.shape[dim])
    index = [slice(None)] * x.ndim
    index[dim] = as_slice(rows[i:j], start)
    piece = x[tuple(index)]
    if i == 0 and j == len(rows):
        return piece.clone(memory_format=torch.contiguous_format)
    ends = []
    for n in (i, len(rows) - j):
        shape = list(x.shape)
        shape[dim] = n
        ends.append(x.detach().new_zeros(shape))
    return end_to_end([ends[0], piece, ends[1]], dim)


def shifted(
    index: Tensor, start: int, count: int, size: int, elsewhere: int = 0, *, wrap: bool = False
) -> tuple[Tensor, Tensor]:
    """Positions in a piece of ``count`` rows from ``start``, and which of them are in it.

    A position that another rank holds becomes ``elsewhere``; one outside the whole dim becomes one that
    torch will refuse, on all ranks alike. With ``wrap`` negative ones count from the end.
    """
    if wrap:
        index = torch.where(index < 0, index + size, index)
    inside = (index >= start) & (index < start + count)
    bad = (index < 0) | (index >= size)
    out = torch.where(bad, index.new_full((), count + size + 1), index.new_full((), elsewhere))
    return torch.where(inside, index - start, out), inside


def padded(x: Tensor, dim: int, rows: int = 1) -> Tensor:
    """``x`` with rows of zeros at the end of a dim."""
    shape = list(x.shape)
    shape[dim] = rows
    return end_to_end([x, x.detach().new_zeros(shape)], dim)
