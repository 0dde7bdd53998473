"""Where a tensor dim is cut: as ``torch.chunk`` cuts, or at chosen sizes.

A dim's entry in ``Layout.dims`` is a tuple of mesh axes. A plain tuple is cut as ``torch.chunk`` cuts; a
``Cut`` is the same tuple with the sizes of all pieces. Wherever a dim's entry is passed on, its sizes go along;
wherever new axes are put together, the result is a plain tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
import math
from typing import Any


class Cut(tuple[int, ...]):
    """The mesh axes that cut a dim, major to minor, and the sizes of its pieces.

    Never equal to a plain tuple: ``cut`` makes a plain one where the sizes are those of ``torch.chunk``, so
    that equal layouts are equal values.

    Attributes:
        sizes: The size of each piece, the coordinate on the last axis running fastest.
        starts: Where each piece starts.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    def __new__(cls, axes: Sequence[int], sizes: Sequence[int]) -> Cut:
        """The axes with the sizes of all pieces."""
        self = super().__new__(cls, axes)
        self.sizes = tuple(sizes)
        self.starts = (0, *accumulate(self.sizes[:-1]))
        return self

    def __eq__(self, other: object) -> bool:
        """The same axes and the same sizes."""
        return (
            isinstance(other, Cut) and tuple.__eq__(self, other) and self.sizes == other.sizes
        )

    def __ne__(self, other: object) -> bool:
        """Not equal."""
        return not self == other

    def __hash__(self) -> int:
        """Of axes and sizes."""
        return hash((tuple(self), self.sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the values."""
        return Cut, (tuple(self), self.sizes)

    def __repr__(self) -> str:
        """Axes and sizes."""
        return f"Cut({tuple(self)}, sizes={self.sizes})"

    @property
    def total(self) -> int:
        """The size of the dim."""
        return self.starts[-1] + self.sizes[-1]


def renumbered(axes: tuple[int, ...], number: Callable[[int], int]) -> tuple[int, ...]:
    """The same cut over axes with other numbers."""
    new = tuple(number(a) for a in axes)
    return Cut(new, axes.sizes) if isinstance(axes, Cut) else new


def plain(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The same axes, cut as ``torch.chunk`` cuts."""
    return tuple(axes) if isinstance(axes, Cut) else axes


def cut(axes: Sequence[int], sizes: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The cut at these sizes: a plain tuple of axes where ``torch.chunk`` would give the same.

    Args:
        axes: Mesh axes, major to minor.
        sizes: Sizes of all pieces, the last axis running fastest.
        ranks: Number of ranks on each of the axes.
    """
    chunked = [sum(sizes)]
    for k in ranks:
        chunked = [m for n in chunked for m in chunks(n, k)]
    return tuple(axes) if list(sizes) == chunked else Cut(axes, sizes)


def within(axes: tuple[int, ...], axis: int, k: int) -> tuple[int, ...]:
    """The pieces of a cut, cut once more over another axis of ``k`` ranks, as ``torch.chunk`` cuts."""
    if not isinstance(axes, Cut):
        return (*axes, axis)
    return Cut((*axes, axis), [m for n in axes.sizes for m in chunks(n, k)])


def gathered(
    axes: tuple[int, ...], minor: Sequence[int], ranks: Sequence[int]
) -> tuple[int, ...]:
    """The cut without some axes, which are its minor ones; ``ranks`` is the shape of the mesh."""
    left = tuple(a for a in axes if a not in minor)
    if not isinstance(axes, Cut) or not left:
        return left
    assert axes[: len(left)] == left, "a cut is undone from its minor axes on"
    k = math.prod(ranks[a] for a in axes[len(left) :])
    sizes = [sum(axes.sizes[i : i + k]) for i in range(0, len(axes.sizes), k)]
    return cut(left, sizes, [ranks[a] for a in left])


def chunks(n: int, k: int, unit: int = 1) -> Iterator[int]:
    """Sizes of ``n`` elements cut into ``k`` pieces of whole units, as ``torch.chunk`` would cut the units."""
    step = -(-n // (unit * k)) * unit
    for i in range(k):
        start = min(i * step, n)
        yield min(step, n - start)
