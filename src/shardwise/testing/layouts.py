"""The ways to lay out the arguments of a call, and what each rank then holds.

```text
   one at a time   [R,R] [S(0),R] [S(1),R] [P,R] [R,S(0)] ...   every tensor in every placement, the rest whole
   then random     [S(1),P] ...                                  seeded, over all tensors and mesh axes
   chosen sizes    S(0: unit 2) S(0: unit 3) S(0: owner 1) ...   in place of even pieces, where asked for
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
import random

import torch
from torch import Tensor

from shardwise.layout.cut import chunks
from shardwise.layout.placement import Partial, Placement, Replicate, Shard

Combo = tuple[tuple[Placement, ...], ...]  # for each tensor, one placement per mesh axis


def choices(t: Tensor, *, chosen: int = 0) -> list[Placement]:
    """What one axis can do to a tensor; of ``chosen`` ranks, it cuts at other places than `torch.chunk`."""
    out: list[Placement] = [Replicate()]
    for d, n in enumerate(t.shape):
        if not chosen:
            out.append(Shard(d))
            continue
        ends = [n * i**2 // chosen**2 for i in range(chosen + 1)]  # the last has the most
        sizes = tuple(b - a for a, b in pairwise(ends))
        out += [Shard(d, unit=2), Shard(d, owner=1), Shard(d, sizes=sizes)]
    summable = (t.is_floating_point() and t.element_size() > 1) or t.is_complex()
    return [*out, Partial()] if summable else out


def combos(
    tensors: Sequence[Tensor], axes: int, extra: int, seed: int, *, chosen: int = 0
) -> Iterator[Combo]:
    """One tensor at a time in every placement on the last axis, then ``extra`` random combinations."""
    yield from singles(tensors, axes, chosen=chosen)
    yield from randoms(tensors, axes, extra, random.Random(seed), chosen=chosen)


def singles(tensors: Sequence[Tensor], axes: int = 1, *, chosen: int = 0) -> Iterator[Combo]:
    """All whole; then one tensor at a time in every placement on the last axis."""
    whole = tuple((Replicate(),) * axes for _ in tensors)
    yield whole
    for i, t in enumerate(tensors):
        for p in choices(t, chosen=chosen)[1:]:
            one = (*(Replicate(),) * (axes - 1), p)
            yield (*whole[:i], one, *whole[i + 1 :])


def randoms(
    tensors: Sequence[Tensor],
    axes: int,
    count: int,
    rng: random.Random,
    *,
    chosen: int = 0,
) -> Iterator[Combo]:
    """Random placements for every tensor and axis; with ``chosen`` some are cut at chosen sizes."""
    for _ in range(count):
        yield tuple(
            _fitting(
                [
                    rng.choice(choices(t, chosen=chosen if rng.random() < 0.7 else 0))
                    for _ in range(axes)
                ]
            )
            for t in tensors
        )


def _fitting(placements: list[Placement]) -> tuple[Placement, ...]:
    """Sizes are for an axis that cuts a dim alone: else a unit."""
    dims = [p.dim if isinstance(p, Shard) else None for p in placements]
    return tuple(
        Shard(p.dim, unit=3)
        if isinstance(p, Shard) and p.sizes and dims.count(p.dim) > 1
        else p
        for p in placements
    )


def addend_weights(n: int) -> list[float]:
    """The part of the whole that each rank of ``n`` holds of a pending sum: unequal, of both signs.

    Powers of two whose running sums are powers of two or zero, so that the sum is the whole to the bit.

    >>> addend_weights(2), addend_weights(4)
    ([2.0, -1.0], [2.0, -1.0, -2.0, 2.0])
    """
    first = [1.0] if n == 1 else [2.0, -1.0] if n % 2 == 0 else [2.0, -2.0, 1.0]
    return first + [-2.0, 2.0] * ((n - len(first)) // 2)


def piece(t: Tensor, placement: Placement, rank: int, n: int) -> Tensor:
    """What ``rank`` of ``n`` holds of ``t`` on a mesh of one axis."""
    if isinstance(placement, Shard) and placement.is_sized:
        whole = t.shape[placement.dim]
        cut = placement.unit or 1
        sizes = placement.sizes or [*chunks(whole, n, cut)]
        if placement.owner is not None:
            sizes = [whole if r == placement.owner else 0 for r in range(n)]
        return t.narrow(placement.dim, sum(sizes[:rank]), sizes[rank])
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
