"""All arithmetic on local shapes and offsets; nobody else does any.

A dim of ``n`` elements cut over one axis of ``k`` ranks is cut as ``torch.chunk`` cuts: pieces of
``ceil(n / k)``, the last ones shorter or empty. Several axes cut one after the other, major to minor.
A ``Cut`` has the sizes of its pieces with it.

Invariant: the boxes of all ranks tile the tensor exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
import itertools
import math

from shardwise.layout.cut import Cut

Range = tuple[int, int]  # offset, size
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def chunk(n: int, k: int, i: int) -> Range:
    """Offset and size of piece ``i`` of ``n`` elements cut into ``k``."""
    step = -(-n // k)
    start = min(i * step, n)
    return start, min(step, n - start)


def nested(n: int, sizes: Sequence[int], coords: Sequence[int]) -> Range:
    """Offset and size after cutting over several axes, major to minor."""
    offset = 0
    for k, i in zip(sizes, coords):
        start, n = chunk(n, k, i)
        offset += start
    return offset, n


def piece(
    n: int, axes: tuple[int, ...], mesh_shape: Sequence[int], coord: Sequence[int]
) -> Range:
    """Offset and size of the piece of a dim at a coordinate; ``axes`` is the dim's entry in a layout."""
    if isinstance(axes, Cut):
        at = 0
        for a in axes:
            at = at * mesh_shape[a] + coord[a]
        return axes.starts[at], axes.sizes[at]
    return nested(n, [mesh_shape[a] for a in axes], [coord[a] for a in axes])


def pieces(n: int, axes: tuple[int, ...], mesh_shape: Sequence[int]) -> list[Range]:
    """All pieces of a dim, the coordinate on the last of its axes running fastest."""
    if isinstance(axes, Cut):
        return list(zip(axes.starts, axes.sizes))
    out: list[Range] = [(0, n)]
    for a in axes:
        k = mesh_shape[a]
        out = [
            (base + start, m)
            for base, size in out
            for start, m in (chunk(size, k, i) for i in range(k))
        ]
    return out


def box(
    shape: Sequence[int],
    dims: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int],
    coord: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the piece at ``coord``; ``dims`` names the axes that cut each dim."""
    offsets, sizes = [], []
    for n, axes in zip(shape, dims):
        if axes:
            start, n = piece(n, axes, mesh_shape, coord)
            offsets.append(start)
        else:
            offsets.append(0)
        sizes.append(n)
    return tuple(offsets), tuple(sizes)


def intersect(a: Box, b: Box) -> Box:
    """The overlap of two boxes; some size is 0 when they do not meet."""
    offsets = tuple(max(x, y) for x, y in zip(a[0], b[0]))
    ends = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1]))
    return offsets, tuple(max(0, e - o) for o, e in zip(offsets, ends))


def touching(
    n: int, sizes: Sequence[int], wanted: Range, base: int = 0
) -> Iterator[tuple[tuple[int, ...], Range]]:
    """The coordinates whose pieces of a dim meet the range ``wanted``, each with the overlap.

    Found by division, not by trying all: the cost is that of the answer.
    """
    start, end = max(wanted[0], base), min(wanted[0] + wanted[1], base + n)
    if start >= end:
        return
    if not sizes:
        yield (), (start, end - start)
        return
    step = -(-n // sizes[0])
    for i in range((start - base) // step, (end - 1 - base) // step + 1):
        offset, size = chunk(n, sizes[0], i)
        for rest, overlap in touching(size, sizes[1:], wanted, base + offset):
            yield (i, *rest), overlap


def meeting(
    n: int, axes: tuple[int, ...], mesh_shape: Sequence[int], wanted: Range
) -> Iterator[tuple[tuple[int, ...], Range]]:
    """``touching`` for a dim's entry in a layout: coordinates on its axes, each with the overlap."""
    sizes = [mesh_shape[a] for a in axes]
    if not isinstance(axes, Cut):
        yield from touching(n, sizes, wanted)
        return
    end = wanted[0] + wanted[1]
    at = max(0, bisect_right(axes.starts, wanted[0]) - 1)
    while at < len(axes.starts) and axes.starts[at] < end:
        low = max(wanted[0], axes.starts[at])
        high = min(end, axes.starts[at] + axes.sizes[at])
        if low < high:
            coord, rest = [], at
            for k in reversed(sizes):
                coord.append(rest % k)
                rest //= k
            yield tuple(reversed(coord)), (low, high - low)
        at += 1


def is_even(n: int, sizes: Sequence[int]) -> bool:
    """Whether all pieces of the dim are equal."""
    total = 1
    for k in sizes:
        total *= k
    return n % total == 0


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch counts them (a size of zero counts as one)."""
    stride, out = 1, []
    for n in reversed(shape):
        out.append(stride)
        stride *= max(n, 1)
    return tuple(reversed(out))


def restride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for ``shape`` whose dims are ordered as the strides ``like`` order them.

    A zero stride (an expanded dim) stays zero.
    """
    order = sorted(range(len(shape)), key=lambda d: (-like[d], d))
    out, stride = [0] * len(shape), 1
    for d in reversed(order):
        if like[d] == 0 and shape[d] > 1:
            continue
        out[d] = stride
        stride *= max(shape[d], 1)
    return tuple(out)


def overlap(a: Box, b: Box) -> Box | None:
    """The box that two boxes share; None if they share no element."""
    both = intersect(a, b)
    return None if 0 in both[1] else both


def slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in a larger one, as an index."""
    return tuple(
        slice(start - base, start - base + n)
        for start, n, base in zip(inner[0], inner[1], outer[0])
    )


def num_runs(sizes: Sequence[int], limit: int) -> int:
    """How many boxes ``runs`` makes, by arithmetic."""
    if 0 in sizes:
        return 0
    if not sizes:
        return 1
    dim, inner = _run_dim(sizes, limit)
    return math.prod(sizes[:dim]) * -(-sizes[dim] // max(1, limit // inner))


def _run_dim(sizes: Sequence[int], limit: int) -> tuple[int, int]:
    """The outermost dim of which one index fits into a run, and the elements of that."""
    dim, inner = 0, math.prod(sizes[1:])
    while inner > limit and dim < len(sizes) - 1:
        dim += 1
        inner //= sizes[dim]
    return dim, inner


def runs(sizes: Sequence[int], limit: int) -> list[Box]:
    """Cut a row-major block into boxes that are contiguous in memory, of ``limit`` elements at most.

    They come in the order of memory, and have one element at least.
    """
    if 0 in sizes:
        return []
    if not sizes:
        return [((), ())]
    dim, inner = _run_dim(sizes, limit)
    step = max(1, limit // inner)
    out: list[Box] = []
    for lead in itertools.product(*(range(n) for n in sizes[:dim])):
        for start in range(0, sizes[dim], step):
            rest = len(sizes) - dim - 1
            offsets = (*lead, start, *(0,) * rest)
            held = (*(1,) * dim, min(step, sizes[dim] - start), *sizes[dim + 1 :])
            out.append((offsets, held))
    return out
