"""The ways to lay out the arguments of a call, and what each rank then holds.

```text
   one at a time   [R,R] [S(0),R] [S(1),R] [P,R] [R,S(0)] ...   every tensor in every placement, the rest whole
   then random     [S(1),P] ...                                  seeded, over all tensors and mesh axes
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import random

import torch
from torch import Tensor

from shardwise.layout.placement import Partial, Placement, Replicate, Shard

Combo = tuple[tuple[Placement, ...], ...]  # for each tensor, one placement per mesh axis


def choices(t: Tensor) -> list[Placement]:
    """What one axis can do to a tensor."""
    out: list[Placement] = [Replicate(), *(Shard(d) for d in range(t.ndim))]
    summable = (t.is_floating_point() and t.element_size() > 1) or t.is_complex()
    return [*out, Partial()] if summable else out


def combos(tensors: Sequence[Tensor], axes: int, extra: int, seed: int) -> Iterator[Combo]:
    """One tensor at a time in every placement on the last axis, then ``extra`` random combinations."""
    yield from singles(tensors, axes)
    yield from randoms(tensors, axes, extra, random.Random(seed))


def singles(tensors: Sequence[Tensor], axes: int = 1) -> Iterator[Combo]:
    """All whole; then one tensor at a time in every placement on the last axis."""
    whole = tuple((Replicate(),) * axes for _ in tensors)
    yield whole
    for i, t in enumerate(tensors):
        for p in choices(t)[1:]:
            one = (*(Replicate(),) * (axes - 1), p)
            yield (*whole[:i], one, *whole[i + 1 :])


def randoms(
    tensors: Sequence[Tensor], axes: int, count: int, rng: random.Random
) -> Iterator[Combo]:
    """Random placements for every tensor and axis."""
    for _ in range(count):
        yield tuple(tuple(rng.choice(choices(t)) for _ in range(axes)) for t in tensors)


def addend_weights(n: int) -> list[float]:
    """The part of the whole that each rank of ``n`` holds of a pending sum: unequal, of both signs.

    Powers of two whose running sums are powers of two or zero, so that the sum is the whole to the bit.

    >>> addend_weights(2), addend_weights(4)
    ([2.0, -1.0], [2.0, -1.0, -2.0, 2.0])
    """
    first = [1.0] if n == 1 else [2.0, -1.0] if n % 2 == 0 else [2.0, -2.0, 1.0]
    return first + [-2.0, 2.0] * ((n - len(first)) // 2)


def piece(t: Tensor, placement: Placement, rank: int, n: int) -> Tensor:
    """What ``rank`` of ``n`` holds of ``t`` on a mesh of one axis: even pieces, as `torch.chunk` cuts."""
    if isinstance(placement, Shard):
        size = t.shape[placement.dim]
        step = -(-size // n)
        start = min(rank * step, size)
        return t.narrow(placement.dim, start, min(step, size - start))
    if placement.is_partial():
        return addend(t, addend_weights(n)[rank], first=rank == 0)
    return t


def addend(t: Tensor, weight: float, *, first: bool) -> Tensor:
    """``weight`` times ``t``; what is not finite is the ``first`` rank's alone, for inf - inf is no addend."""
    rest = t if first else torch.zeros((), dtype=t.dtype)
    return torch.where(torch.isfinite(t), t * weight, rest)


def combo_text(combo: Combo) -> str:
    """The placements in one line, tensors apart by ";"."""
    return "; ".join(",".join(map(str, ps)) for ps in combo)


__all__ = [
    "Combo",
    "addend",
    "addend_weights",
    "choices",
    "combo_text",
    "combos",
    "piece",
    "randoms",
    "singles",
]
