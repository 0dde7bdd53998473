"""Gradients in buckets, reduced while backward still runs.

```text
   backward      ...  w9  w8 | w7 w6 w5 | w4 ...       a hook per parameter copies its gradient into its place
   bucket 0      -----[copied]                         complete: its all-reduce starts
   bucket 1               ------------[copied]         starts next: always in this order, on every rank
   end of backward: what is not complete starts, all are waited for, .grad becomes a view of the bucket
```

A parameter that a rank did not use counts as zero there. Whether *any* rank used it travels in the same
all-reduce, as one number per parameter behind the gradients; unused everywhere, it has no gradient.

The first backward notes the order in which gradients really come; the buckets are then cut anew in the order
of the group's first rank, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Handle, Transport
from shardwise.compat import (
    current_graph_task,
    left_to_outer_backward,
    queue_callback,
    storage_users,
)
from shardwise.errors import GradientError
from shardwise.recording import Recorder, recorder
from shardwise.tensor.gradients import Leaf, syncing

_REGISTER = "register_post_accumulate_grad_hook"
_REDUCED = "_shardwise_reduced"  # marks what is in a bucket
FIRST_BUCKET_BYTES = 1024 * 1024  # a small one first: sending begins early


def is_reduced(local: Tensor) -> bool:
    """Whether a parameter, or a DTensor's local tensor, is in the buckets of a data parallel module."""
    return _REDUCED in vars(local)


class Deferred:
    """A user's hook on a plain parameter: it does nothing when the gradient comes, and runs once it is reduced."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, _: Tensor) -> None:
        """What autograd calls."""


def _defer_hooks(local: Tensor) -> Callable[[], None]:
    """Have post-accumulate hooks, those of now and later ones, wait for the reduction; returns what undoes that."""
    hooks: Any = local._post_accumulate_grad_hooks or {}
    for key, hook in hooks.items():
        hooks[key] = Deferred(hook)
    vars(local)[_REGISTER] = lambda hook: Tensor.register_post_accumulate_grad_hook(
        local, Deferred(hook)
    )

    def undo() -> None:
        del vars(local)[_REGISTER]
        hooks: Any = local._post_accumulate_grad_hooks or {}
        for key, hook in hooks.items():
            if isinstance(hook, Deferred):
                hooks[key] = hook.hook

    return undo


class Slot:
    """The place of one parameter's gradient in a bucket.

    Attributes:
        name: The parameter's, for messages.
        local: The plain parameter, or the local tensor of a DTensor.
        leaf: The record of a DTensor's pending gradient; None for a gradient that ``local`` has itself.
        scale: What the gradient is multiplied with before it is summed.
        bucket: Its bucket.
        place: Its part of the bucket's buffer.
        arrived: Whether its gradient is there.
    """

    __slots__ = ("arrived", "bucket", "leaf", "local", "name", "place", "scale")

    bucket: Bucket
    place: Tensor

    def __init__(self, name: str, local: Tensor, leaf: Leaf | None, scale: float) -> None:
        self.name, self.local, self.leaf, self.scale = name, local, leaf, scale
        self.arrived = False

    def fill(self) -> None:
        """Copy the gradient into the bucket."""
        g = self.local.grad if self.leaf is None else self.leaf.pending
        assert g is not None, "a hook runs after a gradient has come"
        if g.requires_grad:
            raise GradientError(
                f'the gradient of "{self.name}" has a history (create_graph=True), which data parallel '
                "reductions do not keep.",
                tries=["distribute_module: its gradients can be differentiated again"],
            )
        if g.layout is not torch.strided:
            g = g.to_dense()
        if self.scale == 1:
            self.place.copy_(g)
        else:
            torch.mul(g, self.scale, out=self.place)
        self.arrived = True

    def drop(self) -> None:
        """Free the gradient: it is in the bucket now."""
        if self.leaf is None:
            self.local.grad = None
        else:
            self.leaf.pending = None

    def give(self, reduced: Tensor) -> None:
        """Take the reduced gradient."""
        if self.leaf is None:
            self.local.grad = reduced
            hooks: Any = self.local._post_accumulate_grad_hooks
            if len(hooks) > 1:
                for hook in list(hooks.values()):
                    if isinstance(hook, Deferred):
                        hook.hook(self.local)
            return
        self.leaf.shown = None
        self.leaf.add(reduced)
        for hook in list(self.leaf.hooks.values()):
            hook()


class Bucket:
    """Gradients that are reduced together.

    Attributes:
        slots: In the order of the buffer.
        missing: How many have not come yet in this backward.
        handle: The reduction under way.
    """

    __slots__ = ("_buffer", "_idle", "_places", "handle", "missing", "slots")

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)
        self.handle: Handle | None = None
        self._make_buffer()

    def _make_buffer(self) -> None:
        like = self.slots[0].local
        sizes = [slot.local.numel() for slot in self.slots]
        self._buffer = torch.zeros(
            sum(sizes) + len(sizes), dtype=like.dtype, device=like.device
        )
        for slot, place in zip(self.slots, self._pieces(self._buffer)):
            slot.bucket, slot.place = self, place
        self._idle = storage_users(self._buffer)

    def _pieces(self, buffer: Tensor) -> list[Tensor]:
        """The parts of a buffer, one per slot, in the parameters' shapes and strides."""
        out, start = [], 0
        for slot in self.slots:
            local = slot.local
            if local.is_contiguous():
                out.append(buffer[start : start + local.numel()].view(local.shape))
            else:
                out.append(buffer.as_strided(local.shape, local.stride(), start))
            start += local.numel()
        return out

    def begin(self) -> None:
        """Before the first gradient of a backward: nobody may still look at the last one's."""
        self.missing, self.handle = len(self.slots), None
        for slot in self.slots:
            slot.arrived = False
        if storage_users(self._buffer) > self._idle:
            self._make_buffer()

    def start(self, transport: Transport, ranks: tuple[int, ...], tag: str) -> None:
        """Send what is there; zeros for the rest."""
        count = len(self.slots)
        flags = self._buffer[-count:]
        if self.missing:
            for slot in self.slots:
                if not slot.arrived:
                    slot.place.zero_()
            flags.copy_(torch.tensor([float(slot.arrived) for slot in self.slots]))
        else:
            flags.fill_(1)
        for slot in self.slots:
            if slot.arrived:
                slot.drop()
        self.handle = transport.all_reduce_owned_async(self._buffer, ranks, "sum", tag=tag)

    def finish(self) -> None:
        """Wait, and hand the gradients out."""
        assert self.handle is not None, "every bucket starts before it ends"
        reduced, self.handle = self.handle.wait(), None
        used = [True] * len(self.slots)
        if self.missing:
            used = (reduced[-len(used) :] != 0).tolist()
        for slot, piece, any_rank in zip(self.slots, self._pieces(reduced), used):
            if any_rank:
                slot.give(piece)


class Reducer:
    """The buckets of one group of ranks.

    Args:
        slots: The parameters' places, in the order in which their gradients are expected.
        transport: The rank's transport.
        ranks: The ranks over which the gradients are sums.
        tag: Names of the axes, for the log.
        cap_bytes: About the size of a bucket.
    """

    def __init__(
        self,
        slots: list[Slot],
        transport: Transport,
        ranks: tuple[int, ...],
        tag: str,
        cap_bytes: int,
    ) -> None:
        self.transport, self.ranks, self.tag, self.cap_bytes = transport, ranks, tag, cap_bytes
        self.buckets: list[Bucket] = []
        self.order: list[Slot] | None = []  # as gradients come, in the first backward
        self._next = 0
        self._cut(slots)
        self.slots = slots

    def _cut(self, slots: list[Slot]) -> None:
        """Buckets of about a size, first a small one; one dtype and device each."""
        self.buckets = []
        part: list[Slot] = []
        size, cap = 0, min(FIRST_BUCKET_BYTES, self.cap_bytes)
        for slot in slots:
            kind = (slot.local.dtype, slot.local.device)
            if part and (size >= cap or kind != (part[0].local.dtype, part[0].local.device)):
                self.buckets.append(Bucket(part))
                part, size, cap = [], 0, self.cap_bytes
            part.append(slot)
            size += slot.local.nbytes
        if part:
            self.buckets.append(Bucket(part))

    def begin(self) -> None:
        """A backward begins."""
        self._next = 0
        for bucket in self.buckets:
            bucket.begin()
        if self.order is not None:
            self.order = []

    def start(self, *, rest: bool = False) -> None:
        """Start the complete buckets whose turn it is; or all that have not started."""
        buckets = self.buckets
        while self._next < len(buckets) and (rest or not buckets[self._next].missing):
            buckets[self._next].start(self.transport, self.ranks, self.tag)
            self._next += 1

    def finish(self) -> None:
        """Wait for all."""
        for bucket in self.buckets:
            bucket.finish()
        if self.order is not None:
            self._settle(self.order)
            self.order = None

    def _settle(self, came: list[Slot]) -> None:
        """Cut the buckets anew, in the order in which the first rank's gradients came."""
        places = {id(slot): i for i, slot in enumerate(self.slots)}
        mine = [places[id(slot)] for slot in came]
        first: list[int] = self.transport.all_gather_object(mine, self.ranks, tag=self.tag)[0]
        known = set(first)
        order = first + [i for i in range(len(self.slots)) if i not in known]
        if order != list(range(len(order))):
            self.slots = [self.slots[i] for i in order]
            self._cut(self.slots)


class Reducers:
    """All buckets of a module: one backward begins and ends for them together."""

    def __init__(self, parts: list[Reducer]) -> None:
        self.parts = parts
        self._task: int | None = None
        self._noted_sums: dict[
            Slot, tuple[Tensor, Tensor]
        ] = {}  # what this rank has, and the sum
        self._remove = [self._hook(part, slot) for part in parts for slot in part.slots]

    def _hook(self, part: Reducer, slot: Slot) -> Callable[[], None]:
        """Call `_arrived` when the slot's gradient has come; returns what undoes that."""
        arrived, leaf, local = self._arrived, slot.leaf, slot.local
        setattr(local, _REDUCED, True)
        if leaf is not None:
            leaf.owner = lambda: arrived(part, slot)

            def undo() -> None:
                delattr(local, _REDUCED)
                leaf.owner = None

            return undo
        hook = local.register_post_accumulate_grad_hook(lambda _: arrived(part, slot))
        restore = _defer_hooks(local)
        ours: Any = local._post_accumulate_grad_hooks
        ours[hook.id] = ours[hook.id].hook  # it alone runs at once

        def undo_plain() -> None:
            delattr(local, _REDUCED)
            hook.remove()
            restore()

        return undo_plain

    def remove(self) -> None:
        """Take the hooks off."""
        for remove in self._remove:
            remove()
        self._remove = []

    def _arrived(self, part: Reducer, slot: Slot) -> None:
        if not syncing():
            return
        if (tape := recorder()) is not None:
            self._noted(tape, part, slot)
            return
        if self._task is None:
            for each in self.parts:
                each.begin()
        if self._task is None or self._task < 0:
            self._task = current_graph_task()
            queue_callback(self._end)
        bucket = slot.bucket
        if slot.arrived:
            if bucket.handle is not None:
                raise GradientError(
                    f'a gradient of "{slot.name}" comes after its sum was sent.',
                    tries=["checkpoint(..., use_reentrant=False)"],
                )
            slot.fill()
            return
        slot.fill()
        if part.order is not None:
            part.order.append(slot)
        bucket.missing -= 1
        if not bucket.missing:
            part.start()

    def _noted(self, tape: Recorder, part: Reducer, slot: Slot) -> None:
        """In a step that is recorded each gradient is summed for itself: buckets are cut over the whole step."""
        g = slot.local.grad if slot.leaf is None else slot.leaf.pending
        assert g is not None, "a hook runs after a gradient has come"
        slot.drop()
        queued = bool(self._noted_sums)
        before = self._noted_sums.pop(slot, None)
        if before is not None:  # it comes in parts: the sum of some of them is not needed
            g = before[0] + g
        own = g
        if slot.scale != 1:
            g = g * slot.scale

        def summed(x: Tensor) -> Tensor:
            return part.transport.all_reduce(x, part.ranks, "sum", tag=part.tag)

        if not queued:
            queue_callback(self._give_noted)
        self._noted_sums[slot] = own, tape.block(f"sum over {part.tag}", g, summed)

    def _give_noted(self) -> None:
        """Nothing uses one sum before all are there, so that they may travel together."""
        if not self._noted_sums or left_to_outer_backward(self._give_noted):
            return
        noted, self._noted_sums = self._noted_sums, {}
        for slot, (_, g) in noted.items():
            slot.give(g)

    def _end(self) -> None:
        """Backward is over: send the rest, wait for all."""
        if self._task is None:  # it was called back more than once
            return
        if left_to_outer_backward(self._end):
            self._task = -1
            return
        self._task = None
        with torch.no_grad():
            for part in self.parts:
                part.start(rest=True)
            for part in self.parts:
                part.finish()

    def forget(self) -> None:
        """What a backward that raised has left behind."""
        if current_graph_task() < 0:
            self._task, self._noted_sums = None, {}
