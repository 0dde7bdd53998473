"""All arithmetic on local shapes and offsets; nobody else does any.

A dim of ``n`` elements cut over one axis of ``k`` ranks is cut as ``torch.chunk`` cuts: pieces of
``ceil(n / k)``, the last ones shorter or empty. Several axes cut one after the other, major to minor.

Invariant: the boxes of all ranks tile the tensor exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]  # offset, size


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
            start, n = nested(n, [mesh_shape[a] for a in axes], [coord[a] for a in axes])
            offsets.append(start)
        else:
            offsets.append(0)
        sizes.append(n)
    return tuple(offsets), tuple(sizes)


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
