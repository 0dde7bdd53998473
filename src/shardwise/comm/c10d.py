"""The transport over torch.distributed process groups: NCCL, Gloo, fake.

It calls the ProcessGroup's own methods: torch's python wrappers cost more than the rest of a
warm call. Groups are made lazily, for the members only, and kept by their ranks.

A torch group is in rank order. When a group is given in another order the chunks are permuted
on the way, so that chunk i is ``ranks[i]``'s here as everywhere.

What a backend cannot do with a dtype is done in another way, of the same value:

```text
moving bools, complex numbers, int16, float8, ...   as bytes
reducing bools                                      as 0/1 bytes: or = max, and = min
adding or averaging complex numbers                 as pairs of reals
any other (op, dtype)                               gather, then `reduce_in_order` on every rank
```
"""

import atexit
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
import os
from typing import Any
import warnings

import torch
from torch import Tensor
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,  # pyright: ignore[reportPrivateImportUsage]
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from shardwise.comm.direct import LARGE_BYTES, start_gather, start_reduce
from shardwise.comm.reduce import ALLOWED, BOOL_AS, COMPLEX, reduce_in_order
from shardwise.comm.transport import Handle, Ready, Transport, _fallback, _plain
from shardwise.compat import default_store, named_by_members
from shardwise.errors import CommError
from shardwise.events import observers
from shardwise.recording import recorder

# What NCCL and Gloo both do as it is.
_PLAIN = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)
_MOVES = frozenset(_PLAIN)
_REDUCES = frozenset(
    [(op, dtype) for op in ("sum", "max", "min", "product") for dtype in _PLAIN]
    + [("avg", dtype) for dtype in _PLAIN if dtype.is_floating_point]
)
_GLOO_REDUCES = frozenset(
    (op, dtype)
    for op in ("band", "bor", "bxor")
    for dtype in _PLAIN
    if not dtype.is_floating_point
)

_REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}


def _options(kind: type, blocking: bool, **fields: Any) -> Any:
    """Build an options object; they cost more than they look, so all are built once."""
    options = kind()
    options.asyncOp = not blocking
    for name, value in fields.items():
        setattr(options, name, value)
    return options


_BOTH = (True, False)
_ALL_REDUCE = {
    (op, blocking): _options(AllreduceOptions, blocking, reduceOp=reduce_op)
    for op, reduce_op in _REDUCE_OPS.items()
    for blocking in _BOTH
}
_REDUCE_SCATTER = {
    (op, blocking): _options(ReduceScatterOptions, blocking, reduceOp=reduce_op)
    for op, reduce_op in _REDUCE_OPS.items()
    for blocking in _BOTH
}
_ALL_GATHER = {blocking: _options(AllgatherOptions, blocking) for blocking in _BOTH}
_ALL_TO_ALL = {blocking: _options(AllToAllOptions, blocking) for blocking in _BOTH}


class _Group:
    """A process group and its order.

    Attributes:
        pg: The process group, in rank order.
        size: Number of members.
        to_given: For every place in the given order the place in rank order.
        to_sorted: The inverse; None when the two orders are the same.
    """

    __slots__ = ("_broadcasts", "pg", "size", "to_given", "to_sorted")

    def __init__(self, pg: ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.pg = pg
        self.size = len(ranks)
        in_order = tuple(sorted(ranks))
        self.to_given: list[int] = [in_order.index(rank) for rank in ranks]
        self.to_sorted: list[int] | None = None
        if in_order != ranks:
            self.to_sorted = [ranks.index(rank) for rank in in_order]
        self._broadcasts: dict[int, Any] = {}

    def broadcast_options(self, ranks: tuple[int, ...], src: int) -> Any:
        options = self._broadcasts.get(src)
        if options is None:
            root = sorted(ranks).index(src)
            options = _options(BroadcastOptions, True, rootRank=root)
            self._broadcasts[src] = options
        return options

    def reduces(self, op: str, x: Tensor) -> bool:
        """Tell whether the backend can reduce ``x`` as it is."""
        if (op, x.dtype) in _REDUCES:
            return True
        return (op, x.dtype) in _GLOO_REDUCES and self.backend(x) == "gloo"

    def backend(self, x: Tensor) -> str:
        """Name the backend that moves ``x``."""
        return self.pg._get_backend(x.device).name()

    def is_direct(self, x: Tensor, message_bytes: int) -> bool:
        """Tell whether messages of this size are better sent from rank to rank; see `direct`."""
        return (
            message_bytes >= LARGE_BYTES
            and x.device.type == "cpu"
            and self.backend(x) == "gloo"
        )


class _Work(Handle):
    """Holds work, inputs and output until waited for, then only the output.

    Gloo reads and writes these tensors from its own threads: freeing one too early corrupts the
    heap. So a handle that is dropped un-waited waits in its finaliser.
    """

    __slots__ = ("_finish", "_inputs", "_kind", "_out", "_work")

    def __init__(
        self,
        kind: str,
        work: Any,
        inputs: object,
        out: Tensor,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._kind = kind
        self._work = work
        self._inputs = inputs
        self._out = out
        self._finish = finish

    def wait(self) -> Tensor:
        work = self._work
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise CommError(f"{self._kind} failed: {error}") from error
            self._work = self._inputs = None
            if self._finish is not None:
                self._out = self._finish(self._out)
                self._finish = None
        return self._out

    def __del__(self) -> None:
        work = getattr(self, "_work", None)
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                warnings.warn(f"un-waited {self._kind} failed: {error}", stacklevel=1)


class C10dTransport(Transport):
    """This process's rank of torch.distributed's world.

    Args:
        world: The group of all ranks; None makes a world of one rank that talks to nobody.
    """

    __slots__ = ("_groups", "world")

    def __init__(self, world: ProcessGroup | None) -> None:
        rank, size = (0, 1) if world is None else (world.rank(), world.size())
        super().__init__("c10d", rank, size)
        self.world = world
        self._groups: dict[tuple[int, ...], _Group] = {}
        if world is not None:
            self.adopt(world, tuple(range(size)))

    @property
    def store(self) -> Any:
        """The store of the default process group."""
        return None if self.world is None else default_store()

    def adopt(self, pg: ProcessGroup, ranks: Sequence[int]) -> None:
        """Use ``pg`` (of a torch DeviceMesh, say) for ``ranks`` rather than a new group.

        Args:
            pg: A process group of exactly these ranks, in rank order.
            ranks: Global ranks, in any order.
        """
        ranks = tuple(ranks)
        self._groups[ranks] = _Group(pg, ranks)

    def group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of ``ranks``; its own order is rank order."""
        return self._group(ranks).pg

    def _group(self, ranks: tuple[int, ...]) -> _Group:
        found = self._groups.get(ranks)
        if found is not None:
            return found
        if self.world is None:
            raise CommError(
                f"this process is alone, so there is no group {ranks}; start it with torchrun or"
                " call torch.distributed.init_process_group."
            )
        bad = [rank for rank in ranks if not 0 <= rank < self.world_size]
        if bad or self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise CommError(
                f"rank {self.rank} of {self.world_size} cannot join a group of ranks {ranks}."
            )
        in_order = tuple(sorted(ranks))
        known = self._groups.get(in_order)
        pg = _new_group(self.world, in_order) if known is None else known.pg
        self._groups[in_order] = _Group(pg, in_order)
        found = self._groups[ranks] = _Group(pg, ranks)
        return found

    # ---- collectives: the transport's rules are checked before these are called ------------

    def _all_gather(self, x: Tensor, ranks: tuple[int, ...], blocking: bool) -> Handle:
        group = self._groups.get(ranks) or self._group(ranks)
        shape = (group.size, *x.shape)
        if x.numel() == 0:
            return Ready(x.new_empty(shape))
        dtype = None
        if x.dtype not in _MOVES:
            dtype = x.dtype
            x = x.view(-1).view(torch.uint8)
        if group.is_direct(x, x.nbytes):
            works, rows = start_gather(x, group.to_given, ranks.index(self.rank), group.pg)
            return _Work(
                "all_gather", works, x, rows if dtype is None else rows.view(dtype).view(shape)
            )
        # Gloo wants the members' rows joined, not stacked.
        if x.dim() == 0:
            x = x.view(1)
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        work = group.pg._allgather_base(out, x, _ALL_GATHER[blocking])
        out = (out if dtype is None else out.view(dtype)).view(shape)
        if group.to_sorted is None:
            return _Work("all_gather", work, x, out)
        order = group.to_given
        return _Work("all_gather", work, x, out, lambda rows: rows[order])

    def _reduce_scatter(
        self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool
    ) -> Handle:
        group = self._groups.get(ranks) or self._group(ranks)
        shape = x.shape[1:]
        if x.numel() == 0:
            return Ready(x.new_empty(shape))
        if not group.reduces(op, x):
            other = _as_plain(op, x)
            if other is not None and group.reduces(*other):
                back = _back_to(x.dtype)
                handle = self._reduce_scatter(other[1], ranks, other[0], blocking)
                return _Work("reduce_scatter", handle, None, x, lambda _: back(handle.wait()))
            return self._gather_and_reduce_chunk(x, ranks, op, blocking)
        if group.is_direct(x, x.nbytes // group.size):
            own = ranks.index(self.rank)
            works, parts = start_reduce(x, group.to_given, own, group.pg)
            return _Work("reduce_scatter", works, x, x, lambda _: reduce_in_order(parts, op))
        if group.to_sorted is not None:
            x = x[group.to_sorted]
        rows = x if x.dim() == 1 else x.flatten(0, 1)
        out = x.new_empty(shape or 1)
        work = group.pg._reduce_scatter_base(out, rows, _REDUCE_SCATTER[op, blocking])
        return _Work("reduce_scatter", work, rows, out if shape else out.view(()))

    def _gather_and_reduce_chunk(
        self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool
    ) -> Handle:
        n, shape = len(ranks), x.shape[1:]
        splits = [x[0].numel()] * n
        handle = self._all_to_all(x.view(-1), ranks, splits, splits, blocking)

        def finish(_: Tensor) -> Tensor:
            return reduce_in_order(handle.wait().view(n, *shape).unbind(0), op)

        return _Work("reduce_scatter", handle, None, x, finish)

    def all_reduce_owned_async(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Handle:
        """Start an `all_reduce` in place, where the backend has the reduction."""
        if (
            len(ranks) > 1
            and not observers()
            and recorder() is None
            and x.is_contiguous()
            and (op, x.dtype) in ALLOWED
        ):
            group = self._groups.get(ranks) or self._group(ranks)
            if group.reduces(op, x):
                x = x.detach()
                return _Work(
                    "all_reduce", group.pg.allreduce([x], _ALL_REDUCE[op, False]), None, x
                )
        return super().all_reduce_owned_async(x, ranks, op, tag=tag)

    # The two blocking forms are on the way of every small step: no handle is made for what is done at once.

    def all_reduce(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Tensor:
        """Combine everybody's ``x``; see `Transport.all_reduce`."""
        group = self._at_once(x, ranks, op)
        if group is None:
            return super().all_reduce(x, ranks, op, tag=tag)
        return _reduced(group, _plain(x).clone(), op)

    def all_reduce_owned(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Tensor:
        """Combine in place; see `Transport.all_reduce_owned`."""
        group = self._at_once(x, ranks, op)
        if group is None or not x.is_contiguous():
            return super().all_reduce_owned(x, ranks, op, tag=tag)
        return _reduced(group, x.detach() if x.requires_grad else x, op)

    def _at_once(self, x: Tensor, ranks: tuple[int, ...], op: str) -> _Group | None:
        """The group, where the backend has the reduction and nobody wants to know of it."""
        if (op, x.dtype) not in _REDUCES or observers() or recorder() is not None:
            return None
        group = self._groups.get(ranks)
        return None if group is None or group.size == 1 else group

    def _all_reduce(self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool) -> Handle:
        group = self._groups.get(ranks) or self._group(ranks)
        if not group.reduces(op, x):
            other = _as_plain(op, x)
            if other is not None and group.reduces(*other):
                back = _back_to(x.dtype)
                handle = self._all_reduce(other[1], ranks, other[0], blocking)
                return _Work("all_reduce", handle, None, x, lambda _: back(handle.wait()))
            handle = self._all_gather(x, ranks, blocking)
            return _Work(
                "all_reduce",
                handle,
                None,
                x,
                lambda _: reduce_in_order(handle.wait().unbind(0), op),
            )
        out = x.clone()
        work = group.pg.allreduce([out], _ALL_REDUCE[op, blocking])
        return _Work("all_reduce", work, None, out)

    def _all_to_all(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        blocking: bool,
    ) -> Handle:
        group = self._groups.get(ranks) or self._group(ranks)
        finish = None
        if group.to_sorted is not None:
            to_sorted = group.to_sorted
            pieces = x.split(list(in_splits))
            x = torch.cat([pieces[i] for i in to_sorted])
            in_splits = [in_splits[i] for i in to_sorted]
            out_splits = [out_splits[i] for i in to_sorted]
            finish = _reorder(out_splits, group.to_given)
        out = x.new_empty(sum(out_splits))
        if x.shape[0] == 0 and out.shape[0] and group.backend(x) == "fake":
            return Ready(
                out.zero_()
            )  # it fills outputs from the input, and this one has nothing
        wire_out, wire_in = out, x
        if x.dtype not in _MOVES:
            wire_out, wire_in = out.view(torch.uint8), x.view(torch.uint8)
            in_splits = [count * x.itemsize for count in in_splits]
            out_splits = [count * x.itemsize for count in out_splits]
        work = group.pg.alltoall_base(
            wire_out, wire_in, list(out_splits), list(in_splits), _ALL_TO_ALL[blocking]
        )
        return _Work("all_to_all", work, (wire_in, wire_out), out, finish)

    def _broadcast(self, x: Tensor, ranks: tuple[int, ...], src: int) -> Tensor:
        group = self._groups.get(ranks) or self._group(ranks)
        out = x.clone() if src == self.rank else x.new_empty(x.shape)
        if out.numel() == 0:
            return out
        wire = out if out.dtype in _MOVES else out.view(-1).view(torch.uint8)
        work = group.pg.broadcast([wire], group.broadcast_options(ranks, src))
        return _Work("broadcast", work, None, out).wait()

    def _scatter(
        self, x: list[Tensor] | None, out_like: Tensor, ranks: tuple[int, ...], src: int
    ) -> Tensor:
        group = self._groups.get(ranks) or self._group(ranks)
        if group.backend(out_like) == "gloo":
            return self._send_each(x, out_like, group, ranks, src)
        # Backends scatter equal shapes only; an all_to_all in which one rank talks does it.
        idle = [0] * len(ranks)
        if x is None:
            out_splits = idle.copy()
            out_splits[ranks.index(src)] = out_like.numel()
            flat = self._all_to_all(out_like.new_empty(0), ranks, idle, out_splits, True).wait()
            return flat.view(out_like.shape)
        own = ranks.index(src)
        sent = [
            piece.new_empty(0) if i == own else _plain(piece).view(-1)
            for i, piece in enumerate(x)
        ]
        self._all_to_all(
            torch.cat(sent), ranks, [piece.numel() for piece in sent], idle, True
        ).wait()
        return torch.empty_like(out_like, memory_format=torch.contiguous_format).copy_(x[own])

    def _send_each(
        self,
        x: list[Tensor] | None,
        out_like: Tensor,
        group: _Group,
        ranks: tuple[int, ...],
        src: int,
    ) -> Tensor:
        """A scatter that needs no memory beyond the pieces: one message after the other."""
        out = torch.empty_like(out_like, memory_format=torch.contiguous_format)
        if x is None:
            if out.numel():
                sender = group.to_given[ranks.index(src)]
                group.pg.recv([_on_wire(out)], sender, _SCATTER_TAG).wait()
            return out
        for rank, place, piece in zip(ranks, group.to_given, x, strict=True):
            if rank != src and piece.numel():
                group.pg.send([_on_wire(_plain(piece))], place, _SCATTER_TAG).wait()
        return out.copy_(x[ranks.index(src)])

    def _all_gather_object(self, obj: Any, ranks: tuple[int, ...]) -> list[Any]:
        group = self._group(ranks)
        objects: list[Any] = [None] * group.size
        dist.all_gather_object(objects, obj, group=group.pg)
        return [objects[i] for i in group.to_given]

    def _barrier(self, ranks: tuple[int, ...]) -> None:
        dist.barrier(group=self._group(ranks).pg)


def _reduced(group: _Group, x: Tensor, op: str) -> Tensor:
    """Reduce a contiguous tensor in place."""
    work = group.pg.allreduce([x], _ALL_REDUCE[op, True])
    try:
        work.wait()
    except RuntimeError as error:
        raise CommError(f"all_reduce failed: {error}") from error
    return x


def _reorder(splits: list[int], order: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Make the function that cuts a flat tensor by ``splits`` and joins the pieces in order."""

    def finish(flat: Tensor) -> Tensor:
        pieces = flat.split(splits)
        return torch.cat([pieces[i] for i in order])

    return finish


_SCATTER_TAG = 0x5C47  # so that these messages are not taken for a user's own


def _on_wire(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor in a dtype that the backend moves."""
    return x if x.dtype in _MOVES else x.view(-1).view(torch.uint8)


def _as_plain(op: str, x: Tensor) -> tuple[str, Tensor] | None:
    """Write a reduction of bools or complex numbers as one of bytes or reals, if it is one."""
    if x.dtype == torch.bool:
        return BOOL_AS[op], x.view(torch.uint8)
    if x.dtype in COMPLEX and op in ("sum", "avg"):
        return op, torch.view_as_real(x)
    return None


def _back_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Undo `_as_plain`."""
    return (lambda x: x.view(torch.bool)) if dtype == torch.bool else torch.view_as_complex


def _new_group(world: ProcessGroup, ranks: tuple[int, ...]) -> ProcessGroup:
    """Make a group that only its members know about."""
    # A world bound to a device would make its groups by splitting NCCL's communicator, in which
    # every rank of the world has to take part.
    bound = world.bound_device_id
    if bound is not None:
        world.bound_device_id = None
    try:
        with named_by_members():
            group = dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        if bound is not None:
            world.bound_device_id = bound
    assert isinstance(group, ProcessGroup), "this rank is a member"
    return group


# ---- the process's own transport ----------------------------------------------------------


class _Process:
    """Remembers the transport of this process."""

    transport: C10dTransport | None = None


def process_transport() -> C10dTransport:
    """Return the transport over torch.distributed's world, following init and destroy."""
    transport = _Process.transport
    world = dist.group.WORLD
    if transport is not None and transport.world is world:
        return transport
    if world is None and "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        _start_from_environment()
        world = dist.group.WORLD
    transport = _Process.transport = C10dTransport(world)
    return transport


def _start_from_environment() -> None:
    """Join the world that a launcher such as torchrun has described in the environment."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group(backend)
    atexit.register(_stop)


def _stop() -> None:
    """Leave the world that we joined, if nobody has before.

    Together, where the others come too: Gloo may abort a process that still runs down when a peer
    leaves. Not for long: a peer that waits in a collective for this one, which has failed, never comes.
    """
    if not dist.is_initialized():
        return
    with suppress(Exception):
        store = default_store()
        store.set(f"shardwise leaves {dist.get_rank()}", "1")
        everyone = [f"shardwise leaves {rank}" for rank in range(dist.get_world_size())]
        store.wait(everyone, timedelta(seconds=2))
    dist.destroy_process_group()


_fallback.make = process_transport
