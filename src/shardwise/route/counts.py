"""How much of a tensor ranks hold, need and receive under any placement: means over the ranks, in elements.

The pieces of a dim tile it, so their mean is ``n / k`` however uneven they are; and different axes cut different
dims, so the mean of a product over dims is the product of the means. What is held of what is needed factors too,
by dims that share no axis: only for dims that do, ranks are looked at one by one, ``SAMPLE`` of them at most.
So the price of a move is a product of a few numbers, each found once per dim, whatever the size of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from operator import mul

from shardwise.layout import boxes
from shardwise.layout.boxes import Range
from shardwise.layout.cut import Cut
from shardwise.layout.layout import Dims, Layout
from shardwise.route.cost import SAMPLE, sample

Axes = tuple[int, ...]


class Counts:
    """Elements of the pieces of one tensor on one mesh.

    Attributes:
        exact: Whether no count is an estimate from a sample of the ranks.
    """

    def __init__(self, layout: Layout) -> None:
        self.mesh, self.shape = layout.mesh, layout.shape
        self.exact = len(layout.mesh.ranks) <= SAMPLE
        self._columns: list[tuple[int, ...]] = []
        self._at: dict[Axes, Sequence[int]] = {}
        self._sizes: dict[Axes, int] = {}
        self._masks: dict[Dims, list[int]] = {}
        self._numels: dict[Dims, float] = {}
        self._largest: dict[tuple[int, Axes, int], float] = {}
        self._pieces: dict[tuple[int, Axes], list[Range]] = {}
        self._overlaps: dict[tuple[int, Axes, Axes], list[int]] = {}
        self._shared: dict[tuple[int, Axes, Axes], float] = {}

    def size(self, axes: Axes) -> int:
        """Ranks of a group."""
        found = self._sizes.get(axes)
        if found is None:
            found = self._sizes[axes] = math.prod([self.mesh.shape[a] for a in axes])
        return found

    def numel(self, dims: Dims) -> float:
        """What a rank holds."""
        found = self._numels.get(dims)
        if found is None:
            found = 1.0
            for n, axes in zip(self.shape, dims):
                found *= n / self.size(axes) if axes else n
            self._numels[dims] = found
        return found

    def padded(self, dims: Dims, dim: int, m: int) -> float:
        """The largest piece of the group of the minor ``m`` axes of a dim: what a collective of equal pieces sends."""
        axes, n = dims[dim], self.shape[dim]
        if not n:
            return 0.0
        key = (dim, axes, m)
        found = self._largest.get(key)
        if found is None:
            if isinstance(axes, Cut):  # it is gathered, or scattered, as a whole
                found = max(axes.sizes) * self.size(axes) / n
            elif n % self.size(axes) == 0:
                found = 1.0
            else:
                sizes = [self.mesh.shape[a] for a in axes]
                found = _largest(n, sizes[: len(sizes) - m], sizes[len(sizes) - m :])
                found *= self.size(axes) / n
            self._largest[key] = found
        return found * self.numel(dims)

    def held(self, have: Dims, want: Dims) -> float:
        """What a rank holds of what it needs."""
        seen = shared = 0
        together: list[int] = []
        for a, b in zip(self._mask(have), self._mask(want)):
            both = a | b
            together.append(both)
            shared |= seen & both
            seen |= both
        out, cut = 1.0, None
        for d, (a, b) in enumerate(zip(have, want)):
            if not together[d] & shared:
                out *= self._share(d, a, b)
            elif cut is None:
                cut = self._overlap(d, a, b)
            else:
                cut = list(map(mul, cut, self._overlap(d, a, b)))
        return out if cut is None else out * sum(cut) / len(cut)

    def _mask(self, dims: Dims) -> list[int]:
        """For each dim its axes, as bits."""
        found = self._masks.get(dims)
        if found is None:
            found = self._masks[dims] = [sum([1 << a for a in axes]) for axes in dims]
        return found

    def most_held(self, have: Dims, want: Dims) -> float:
        """``held``, or where that is an estimate more than it can be."""
        if self.exact:
            return self.held(have, want)
        return min(self.numel(have), self.numel(want))

    def _share(self, dim: int, a: Axes, b: Axes) -> float:
        """How much of a dim a rank holds under both of two cuts."""
        n = self.shape[dim]
        if a == b or not b:
            return n / self.size(a)
        if not a:
            return n / self.size(b)
        found = self._shared.get((dim, a, b))
        if found is None:
            k = min(len(a), len(b))
            if isinstance(a, Cut) or isinstance(b, Cut) or a[:k] != b[:k]:
                each = self._overlap(dim, a, b)
                found = sum(each) / len(each)
            else:  # the one cuts the other's pieces
                found = n / max(self.size(a), self.size(b))
            self._shared[dim, a, b] = found
        return found

    def _overlap(self, dim: int, a: Axes, b: Axes) -> list[int]:
        """``_share`` of each rank looked at."""
        found = self._overlaps.get((dim, a, b))
        if found is None:
            found = []
            for (start, n), (other, m) in zip(self._ranges(dim, a), self._ranges(dim, b)):
                end, low = start + n, start
                if other + m < end:
                    end = other + m
                if other > low:
                    low = other
                found.append(end - low if end > low else 0)
            self._overlaps[dim, a, b] = found
        return found

    def _ranges(self, dim: int, axes: Axes) -> list[Range]:
        """The pieces of a dim that the ranks looked at hold."""
        found = self._pieces.get((dim, axes))
        if found is None:
            pieces = boxes.pieces(self.shape[dim], axes, self.mesh.shape)
            found = self._pieces[dim, axes] = [pieces[i] for i in self._places(axes)]
        return found

    def _places(self, axes: Axes) -> Sequence[int]:
        """Which piece of a dim cut over these axes each rank looked at holds."""
        found = self._at.get(axes)
        if found is None:
            if not axes:
                found = [0] * min(SAMPLE, len(self.mesh.ranks))
            else:
                if not self._columns:
                    self._columns = list(zip(*sample(self.mesh)))
                column = self._columns[axes[-1]]
                if len(axes) == 1:
                    found = column
                else:
                    k = self.mesh.shape[axes[-1]]
                    found = [i * k + j for i, j in zip(self._places(axes[:-1]), column)]
            self._at[axes] = found
        return found


def _largest(n: int, major: Sequence[int], minor: Sequence[int]) -> float:
    """The first piece of ``n`` elements cut over minor axes, in the mean over the major ones that cut before.

    Pieces of equal size are counted together: there are a few sizes, however many ranks.
    """
    alike = {n: 1}
    for k in major:
        after: dict[int, int] = {}
        for size, times in alike.items():
            step = -(-size // k)
            full, rest = divmod(size, step) if step else (0, 0)
            for m, count in ((step, full), (rest, 1), (0, k - full - 1)):
                if m and count:
                    after[m] = after.get(m, 0) + count * times
        alike = after
    total = sum(
        times * boxes.nested(m, minor, [0] * len(minor))[1] for m, times in alike.items()
    )
    return total / math.prod(major)
