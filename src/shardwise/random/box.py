"""A box of a contiguous global tensor, and where its elements lie on the flat line.

Legend: *position* = flat index in the global tensor, *index* = flat index in the local box.
Local elements in row-major order are in the order of their positions, so the part of a box
that lies in an interval of positions is an interval of indices too.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul

from torch import Tensor

from shardwise.errors import LayoutError


@dataclass(frozen=True)
class Box:
    """The elements ``offsets[d] <= i[d] < offsets[d] + sizes[d]`` of a tensor of ``shape``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        shape, offsets, sizes = self.shape, self.offsets, self.sizes
        fits = len(shape) == len(offsets) == len(sizes) and all(
            o >= 0 and s >= 0 and (s == 0 or o + s <= n)
            for n, o, s in zip(shape, offsets, sizes)
        )
        if not fits:
            raise LayoutError(
                f"the box at {offsets} of sizes {sizes} does not lie in a tensor of {shape}."
            )

    @cached_property
    def total(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the box."""
        return prod(self.sizes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the contiguous global tensor."""
        return tuple(accumulate((1, *self.shape[:0:-1]), mul))[::-1] if self.shape else ()

    @cached_property
    def first(self) -> int:
        """Position of the first element."""
        return sum(o * st for o, st in zip(self.offsets, self.strides))

    def count_before(self, position: int) -> int:
        """How many elements of the box lie before ``position``."""
        if position >= self.total:
            return self.numel
        count, inner = 0, self.numel
        for offset, size, stride in zip(self.offsets, self.sizes, self.strides):
            if not size:
                return 0
            inner //= size
            i, position = divmod(position, stride)
            i -= offset
            if not 0 <= i < size:
                return count + (0 if i < 0 else size * inner)
            count += i * inner
        return count

    def position(self, index: int) -> int:
        """Position of the element with local flat ``index``."""
        position = self.first
        for size, stride in zip(reversed(self.sizes), reversed(self.strides)):
            index, i = divmod(index, size)
            position += i * stride
        return position

    def merged(self) -> "Box":
        """The same positions with as few dims as possible: dims taken whole join the one before."""
        shape, offsets, sizes = [1], [0], [1]
        for n, o, s in zip(self.shape, self.offsets, self.sizes):
            if sizes[-1] == 1 or s == n:
                shape[-1], offsets[-1], sizes[-1] = (
                    shape[-1] * n,
                    offsets[-1] * n + o,
                    sizes[-1] * s,
                )
            else:
                shape.append(n)
                offsets.append(o)
                sizes.append(s)
        return Box(tuple(shape), tuple(offsets), tuple(sizes))


def paste(
    local: Tensor, first: int, strides: tuple[int, ...], buffer: Tensor, start: int
) -> None:
    """Copy what ``local`` shares with positions ``start ...`` from the flat ``buffer``.

    Args:
        local: A part of the local tensor, written in place.
        first: Position of its first element.
        strides: Strides of the global tensor, one for each dim of ``local``.
        buffer: Values of the positions from ``start`` on, flat and contiguous.
        start: Position of the buffer's first value.
    """
    if not local.numel():
        return
    last = first + sum((n - 1) * st for n, st in zip(local.shape, strides))
    end = start + buffer.numel()
    if last < start or first >= end:
        return
    if start <= first and last < end:
        local.copy_(buffer.as_strided(local.shape, strides, first - start))
        return
    # Cut along the outermost dim: slabs wholly inside go at once, at most two stick out.
    dim = next(d for d, n in enumerate(local.shape) if n > 1)
    size, stride = local.shape[dim], strides[dim]
    extent = last - first - (size - 1) * stride
    lo = min(max(-((first - start) // stride), 0), size)
    hi = min(max((end - 1 - extent - first) // stride + 1, 0), size)
    if lo < hi:
        paste(local.narrow(dim, lo, hi - lo), first + lo * stride, strides, buffer, start)
    for i in {lo - 1, hi}:
        if 0 <= i < size:
            paste(local.narrow(dim, i, 1), first + i * stride, strides, buffer, start)
