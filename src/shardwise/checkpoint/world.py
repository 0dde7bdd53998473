"""What every rank holds, told to all: the basis of every plan, so that all ranks make the same one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
import math
from pathlib import Path
import platform
from typing import Any

import torch
from torch import Tensor
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from shardwise.checkpoint.records import Block
from shardwise.comm.transport import Transport
from shardwise.compat import storage_id
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box, overlap
from shardwise.layout.layout import Layout
from shardwise.tensor.dtensor import DTensor

SHOWN = 6  # how many of many offenders a message names


@dataclass(frozen=True, slots=True)
class Slot:
    """One value of a rank's state, without the value.

    Attributes:
        key: Its flat key.
        shape: Global shape.
        dtype: The dtype, or None of something that is no tensor.
        layout: The layout, or None of a plain tensor, which counts as replicated.
        tied: The first key that is the same tensor; empty if none is.
    """

    key: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: Layout | None = None
    tied: str = ""

    def box(self, rank: int) -> Box | None:
        """What a rank holds of the value; None if nothing that counts.

        Of a pending sum the first rank holds the value, and the others hold nothing.
        """
        if self.layout is None:
            return (0,) * len(self.shape), self.shape
        coord = self.layout.mesh.coordinate_of(rank)
        if coord is None:
            return None
        if any(c and op in ("sum", "product") for c, op in zip(coord, self.layout.partial)):
            return None
        offsets, sizes = self.layout.box(coord)
        if 0 in sizes and 0 not in self.shape:
            return None
        return tuple(offsets), tuple(sizes)

    def text(self) -> str:
        """Short typed form: ``f32[8, 6] {dp: S(0)}``."""
        if self.dtype is None:
            return "an object"
        if self.layout is not None:
            return str(self.layout)
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def digest(self) -> str:
        """The same text on ranks that hold the same."""
        layout = None if self.layout is None else self.layout.__reduce__()[1]
        return repr((self.key, self.shape, self.dtype, layout, self.tied))


@dataclass(slots=True)
class Spread:
    """A tensor over all ranks: which ranks hold which box of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    text: str
    boxes: dict[Box, list[int]] = field(default_factory=dict)


def slots_of(flat: Mapping[str, Any]) -> list[Slot]:
    """The slots of this rank's state; tensors that share their memory are tied to the first of them.

    Raises:
        CheckpointError: A tensor's elements do not lie in memory of its own, one beside the other.
    """
    seen: dict[Any, str] = {}
    out = []
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            out.append(Slot(key))
            continue
        ours = isinstance(value, DTensor)
        local = value._local if ours else value
        wrong = _unfit(local)
        if wrong:
            raise CheckpointError(f"{key} {wrong}")
        layout = value._spec.layout if ours else None
        shape = tuple(value.shape)
        same = (
            storage_id(local), local.storage_offset(), tuple(local.shape), local.stride(),
            local.dtype, layout, shape,
        )  # fmt: skip
        first = seen.setdefault(same, key)
        out.append(Slot(key, shape, value.dtype, layout, "" if first == key else first))
    return out


def _unfit(local: Tensor) -> str:
    """Why a tensor has no elements that could be written or read one by one; empty if it has."""
    if is_lazy(local):
        return "is not initialized: it has no shape yet."
    kind: Any = type(local)
    plain: Any = Tensor
    if kind.__torch_dispatch__ is not plain.__torch_dispatch__:
        return f"is a {kind.__module__}.{kind.__qualname__}, which only its own class can take apart."
    if local.layout != torch.strided:
        return f"is not strided ({local.layout})."
    return (
        "is quantized: its elements mean nothing without its scale."
        if local.is_quantized
        else ""
    )


def tell(transport: Transport, mine: list[Slot], error: str) -> list[list[Slot]]:
    """Every rank's slots, by rank; ranks whose slots are equal share one list.

    Raises:
        CheckpointError: On all ranks, if one has an error to report.
    """
    if transport.world_size == 1 and not error:
        return [mine]
    return all_slots(transport, mine, tuple(together(transport, error, digest_of(mine))))


def digest_of(slots: list[Slot]) -> bytes:
    """The same on ranks that hold the same."""
    text = "\n".join(slot.digest() for slot in slots)
    return blake2b(text.encode(), digest_size=16).digest()


def all_slots(
    transport: Transport, mine: list[Slot], digests: tuple[bytes, ...]
) -> list[list[Slot]]:
    """Every rank's slots, by rank, when the digests of all are known."""
    if len(set(digests)) == 1:
        return [mine] * len(digests)
    return transport.all_gather_object(mine, tuple(range(transport.world_size)))


def together(transport: Transport, error: str, value: Any = None) -> list[Any]:
    """Every rank's value, by rank, when no rank has an error to report.

    Raises:
        CheckpointError: On all ranks, with the errors of all.
    """
    everyone = transport.all_gather_object((error, value), tuple(range(transport.world_size)))
    raise_together([e for e, _ in everyone])
    return [v for _, v in everyone]


def raise_together(errors: list[str]) -> None:
    """Raise what any rank reported."""
    found = {}
    for rank, error in enumerate(errors):
        if error:
            found.setdefault(error, []).append(rank)
    if not found:
        return
    if len(errors) == 1 or all(len(ranks) == len(errors) for ranks in found.values()):
        raise CheckpointError("\n".join(found))
    lines = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {error}"
        for error, ranks in found.items()
    ]
    raise CheckpointError("\n".join(lines))


def spreads(world: list[list[Slot]]) -> dict[str, Spread]:
    """For each tensor who holds what, the same on all ranks.

    Raises:
        CheckpointError: Two ranks disagree about a tensor's shape or dtype.
    """
    out: dict[str, Spread] = {}
    if all(slots is world[0] for slots in world):
        order: Iterable[tuple[int, Slot]] = (
            (rank, slot) for slot in world[0] for rank in range(len(world))
        )
    else:
        order = ((rank, slot) for rank, slots in enumerate(world) for slot in slots)
    for rank, slot in order:
        if slot.dtype is None:
            continue
        spread = out.get(slot.key)
        if spread is None:
            spread = out[slot.key] = Spread(slot.shape, slot.dtype, slot.text())
        elif (spread.shape, spread.dtype) != (slot.shape, slot.dtype):
            raise CheckpointError(
                f"{slot.key}: rank {rank} holds {slot.text()}, another rank {spread.text}."
            )
        box = slot.box(rank)
        if box is not None:
            spread.boxes.setdefault(box, []).append(rank)
    return out


def ties(world: list[list[Slot]]) -> dict[str, str]:
    """Keys that are another key's tensor on every rank that has them."""
    out: dict[str, str] = {}
    loose: set[str] = set()
    for slots in {id(s): s for s in world}.values():
        for slot in slots:
            if slot.tied and out.setdefault(slot.key, slot.tied) == slot.tied:
                continue
            loose.add(slot.key)
    return {key: first for key, first in out.items() if key not in loose}


def owners(blocks: list[Block], wanted: Mapping[str, Spread], size: int) -> list[int]:
    """For each block the rank that reads it: one that needs most of it, and has least to read so far."""
    load = [0] * size
    return [
        owner(block.nbytes, shared(block.box, wanted[block.key].boxes), load)
        for block in blocks
    ]


def shared(box: Box, boxes: Mapping[Box, list[int]]) -> list[tuple[Box, list[int]]]:
    """What a box has in common with each of others, and the ranks of those."""
    return [
        (both, ranks)
        for other, ranks in boxes.items()
        if (both := overlap(box, other)) is not None
    ]


def owner(nbytes: int, needs: list[tuple[Box, list[int]]], load: list[int]) -> int:
    """The rank that needs most and has least to read so far; its load grows by ``nbytes``."""
    need: dict[int, int] = {}
    for box, ranks in needs:
        for rank in ranks:
            need[rank] = need.get(rank, 0) + math.prod(box[1])
    most = max(need.values())
    reader = min((r for r, n in need.items() if n == most), key=lambda r: (load[r], r))
    load[reader] += nbytes
    return reader


def largest_piece(world: list[list[Slot]], wanted: Mapping[str, Spread]) -> int:
    """Bytes of the largest local shard on the rank that has the smallest largest one."""
    largest = [0] * len(world)
    for spread in wanted.values():
        for (_, sizes), ranks in spread.boxes.items():
            nbytes = math.prod(sizes) * spread.dtype.itemsize
            for rank in ranks:
                largest[rank] = max(largest[rank], nbytes)
    return min((n for n in largest if n), default=0)


def machine() -> str:
    """What tells this machine from all others: its processes share the pages of a file."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def wire_device(transport: Transport) -> torch.device:
    """Where bytes must lie for the ranks to exchange them."""
    if transport.name == "c10d" and dist.is_initialized():
        config = str(dist.get_backend_config())
        if "cpu:" not in config and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def some(keys: Iterable[str]) -> str:
    """The first few of many names."""
    names = list(keys)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
