"""What a save takes of the state at once, so that training may go on: copies, and what is known from the save before.

Fresh memory costs more than the copying. So the copies lie in one buffer, which is kept from save to save, and are
made by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.world import Slot, Spread, spreads, ties
from shardwise.compat import copy_all
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box
from shardwise.tensor.dtensor import DTensor

_ALIGN = 64


class Staging:
    """Memory of the host that one rank's share is copied to. The save before must have ended."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._wanted: list[Any] = []
        self._views: list[Tensor] = []

    def copies(self, pieces: list[Tensor]) -> list[Tensor]:
        """Contiguous copies, valid until the next call; they are complete when this returns."""
        if not pieces:
            return []
        wanted = [(p.shape, p.dtype) for p in pieces]
        pinned = any(p.is_cuda for p in pieces)
        if wanted != self._wanted or pinned != self._buffer.is_pinned():
            self._lay_out(wanted, pinned)
        with torch.no_grad():
            copy_all(self._views, pieces, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        return self._views

    def _lay_out(self, wanted: list[tuple[torch.Size, torch.dtype]], pinned: bool) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        padded = [n + -n % _ALIGN for n in sizes]
        if sum(padded) > self._buffer.numel() or pinned != self._buffer.is_pinned():
            self._views, self._buffer = [], torch.empty(0, dtype=torch.uint8)  # free it first
            self._buffer = torch.empty(sum(padded), dtype=torch.uint8, pin_memory=pinned)
        self._views, at = [], 0
        for (shape, dtype), n, full in zip(wanted, sizes, padded):
            self._views.append(self._buffer[at : at + n].view(dtype).view(shape))
            at += full
        self._wanted = wanted


@dataclass(slots=True)
class Plan:
    """Who holds and who writes what. It is known from the save before if no rank's slots have changed.

    Attributes:
        mine: This rank's slots.
        digests: The digests of every rank's.
        spread: Who holds which box of each tensor.
        tied: Keys that are another key's tensor.
        pieces: Key and box of the pieces that this rank writes.
        objects: Keys of the objects that it writes.
        pending: Whether there are sums that must be settled first.
    """

    mine: list[Slot]
    digests: tuple[bytes, ...]
    spread: dict[str, Spread]
    tied: dict[str, str]
    pieces: list[tuple[str, Box]]
    objects: list[str]
    pending: bool


def has_pending(world: list[list[Slot]]) -> bool:
    """Whether some tensor is a pending sum."""
    return any(
        s.layout is not None and s.layout.is_partial
        for slots in {id(s): s for s in world}.values()
        for s in slots
    )


def make_plan(
    mine: list[Slot],
    digests: tuple[bytes, ...],
    world: list[list[Slot]],
    rank: int,
    pending: bool,
) -> Plan:
    """Decide who writes what: of the ranks that hold a piece, the one that has least to write so far."""
    spread, tied = spreads(world), ties(world)
    load = [0] * len(world)
    pieces: list[tuple[str, Box]] = []
    for key, held in spread.items():
        if key in tied:
            continue
        for box, ranks in held.boxes.items():
            writer = min(ranks, key=lambda r: (load[r], r))
            load[writer] += math.prod(box[1]) * held.dtype.itemsize
            if writer == rank:
                pieces.append((key, box))
            if 0 in held.shape:
                break
    first: dict[str, int] = {}
    for holder, slots in enumerate(world):
        for slot in slots:
            if slot.dtype is None:
                first.setdefault(slot.key, holder)
    objects = [key for key, holder in first.items() if holder == rank]
    return Plan(mine, digests, spread, tied, pieces, objects, pending)


def share(
    plan: Plan, flat: Mapping[str, Any]
) -> tuple[list[tuple[str, Box, Tensor]], dict[str, Callable[[], bytes]]]:
    """This rank's part of the state: tensors, not copied yet, and objects as they are now."""
    pieces = []
    for key, box in plan.pieces:
        value = flat[key]
        local = value._local if isinstance(value, DTensor) else value
        pieces.append((key, box, local.detach()))
    return pieces, {key: _captured(key, flat[key]) for key in plan.objects}


def _captured(key: str, value: Any) -> Callable[[], bytes]:
    """What makes the bytes of an object as it is now; later, where nobody can change it."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return lambda: _pickled(value)
    try:
        data = _pickled(value)
    except CheckpointError as error:
        reason = f"{key} {error}"
    except (
        Exception
    ) as error:  # an object raises what it likes, and all ranks have to hear of it
        reason = f"{key} cannot be pickled: {type(error).__name__}: {error}"
    else:
        return lambda: data

    def fail() -> bytes:
        raise CheckpointError(reason)

    return fail


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_Pickling)
    return buffer.getvalue()


class _WholePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise CheckpointError(
                "holds a DTensor, of which a rank has a piece only; of those in dicts and lists "
                "every rank saves its own."
            )
        return NotImplemented


class _Pickling:
    """The ``pickle`` module, as far as ``torch.save`` asks; refuses what would be saved in part."""

    __name__ = "pickle"
    Pickler = _WholePickler
