"""Boxes of tensors from the ranks that have them to the ranks that want them, in rounds of bounded memory.

```text
   sources   (key, box) on one rank       a block of a file, or a shard in memory
   targets   (key, box) on some ranks     a shard to fill, or a block to write
   transfer  what a source and a target share: one box
   round     transfers whose bytes fit the budget on every rank: one all_to_all
```

What stays on its rank is copied directly and needs no memory. All ranks work out the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
import math

import torch
from torch import Tensor

from shardwise.comm.transport import Handle, Transport
from shardwise.layout.boxes import Box, overlap, runs

_ALIGN = 16  # the largest element


@dataclass(frozen=True, slots=True)
class Source:
    """A box that one rank has."""

    key: str
    box: Box
    rank: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that goes from a source to a rank."""

    source: int
    key: str
    box: Box
    src: int
    dst: int
    dtype: torch.dtype
    nbytes: int  # as sent, padded


def plan(
    sources: Sequence[Source],
    targets: Mapping[str, Mapping[Box, Iterable[int]]],
    limit: int,
) -> list[Transfer]:
    """Every transfer, in the order of the sources; what leaves a rank is cut into ``limit`` bytes at most."""
    out = []
    for i, source in enumerate(sources):
        itemsize = source.dtype.itemsize
        for box, ranks in targets[source.key].items():
            shared = overlap(source.box, box)
            if shared is None:
                continue
            for dst in ranks:
                parts = [shared]
                if dst != source.rank and math.prod(shared[1]) * itemsize > limit:
                    parts = [
                        (tuple(o + a for o, a in zip(shared[0], at)), held)
                        for at, held in runs(shared[1], max(1, limit // itemsize))
                    ]
                for part in parts:
                    nbytes = math.prod(part[1]) * itemsize
                    padded = nbytes + -nbytes % _ALIGN
                    out.append(
                        Transfer(i, source.key, part, source.rank, dst, source.dtype, padded)
                    )
    return out


def rounds(transfers: Iterable[Transfer], size: int, budget: int) -> list[list[Transfer]]:
    """Cut a list of transfers so that no rank sends or receives more than ``budget`` bytes in a round.

    A transfer that is larger has a round to itself.
    """
    out: list[list[Transfer]] = []
    now: list[Transfer] = []
    sent, received = [0] * size, [0] * size
    for t in transfers:
        if t.src != t.dst:
            full = sent[t.src] + t.nbytes > budget or received[t.dst] + t.nbytes > budget
            if full and now:
                out.append(now)
                now, sent, received = [], [0] * size, [0] * size
            sent[t.src] += t.nbytes
            received[t.dst] += t.nbytes
        now.append(t)
    return [*out, now] if now else out


def exchange(
    transport: Transport,
    work: Iterable[list[Transfer]],
    fetch: Callable[[Transfer], Tensor],
    store: Callable[[Transfer, Tensor], None],
    device: torch.device,
) -> None:
    """Carry out rounds of transfers; while one is under way, what stays here and what has come is copied.

    Args:
        transport: This rank's transport.
        work: The rounds, the same on all ranks.
        fetch: The box of a transfer, of a source on this rank.
        store: Takes the box of a transfer to this rank.
        device: Where the bytes lie when they are exchanged.
    """
    ranks, rank = tuple(range(transport.world_size)), transport.rank
    under_way: tuple[Handle, list[Transfer]] | None = None
    for one in work:
        leaving: list[list[Transfer]] = [[] for _ in ranks]
        coming: list[list[Transfer]] = [[] for _ in ranks]
        staying: list[Transfer] = []
        for t in one:
            if t.src == t.dst:
                if t.src == rank:
                    staying.append(t)
            elif t.src == rank:
                leaving[t.dst].append(t)
            elif t.dst == rank:
                coming[t.src].append(t)
        started = None
        if any(t.src != t.dst for t in one):
            sizes = [sum(t.nbytes for t in ts) for ts in leaving]
            packed = _pack([t for ts in leaving for t in ts], fetch, sum(sizes), device)
            wanted = [sum(t.nbytes for t in ts) for ts in coming]
            handle = transport.all_to_all_async(packed, ranks, sizes, wanted, tag="checkpoint")
            started = handle, [t for ts in coming for t in ts]
        for t in staying:
            store(t, fetch(t))
        if under_way is not None:
            _unpack(*under_way, store)
        under_way = started
    if under_way is not None:
        _unpack(*under_way, store)


def _unpack(
    handle: Handle, coming: list[Transfer], store: Callable[[Transfer, Tensor], None]
) -> None:
    got = handle.wait()
    at = 0
    for t in coming:
        n = math.prod(t.box[1]) * t.dtype.itemsize
        store(t, got[at : at + n].view(t.dtype).view(t.box[1]))
        at += t.nbytes


def _pack(
    leaving: list[Transfer],
    fetch: Callable[[Transfer], Tensor],
    nbytes: int,
    device: torch.device,
) -> Tensor:
    out = torch.empty(nbytes, dtype=torch.uint8, device=device)
    at = 0
    for t in leaving:
        n = math.prod(t.box[1]) * t.dtype.itemsize
        out[at : at + n].view(t.dtype).view(t.box[1]).copy_(fetch(t))
        at += t.nbytes
    return out
