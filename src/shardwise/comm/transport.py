"""The protocol of everything that moves bytes, and which one is current.

A `Transport` is one rank's view of a world of ranks. Three exist:

```text
c10d      torch.distributed process groups: NCCL, Gloo, fake        the default
threads   every rank is a thread of this process, one runs at a time   simulate(...)
dry       moves nothing, counts everything
```

What holds for every transport:

1. ``ranks`` is the ordered tuple of the group's global ranks; this rank is one of them. Chunk i
   of anything belongs to ``ranks[i]``, whether or not the tuple is sorted.
2. All members call the same collectives on a group in the same order.
3. Inputs are never written to, results are fresh tensors that alias nothing, and neither is
   part of an autograd graph. 0-dim and empty tensors are fine everywhere.
4. A group of one rank is the identity: nothing is sent, no event is emitted.
5. Every other call emits one `CommEvent` when somebody observes.
6. The input of an asynchronous form must not be changed before its `Handle.wait`. Nothing but a
   `Handle` leaves: it keeps the work, the inputs and the outputs alive until it was waited for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.reduce import ALLOWED, refuse
from shardwise.errors import CommError
from shardwise.events import CommEvent, emit, observers, received_bytes, user_site
from shardwise.recording import recorder


class Handle(ABC):
    """A collective under way; `wait` for its result exactly where it is needed."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the result once it has arrived; called again, the same tensor.

        On a GPU it need not have arrived yet: it will have for what follows on the current
        stream.
        """


class Ready(Handle):
    """A handle whose result is already there."""

    __slots__ = ("_out",)

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def wait(self) -> Tensor:
        """Return the result."""
        return self._out


class Transport(ABC):
    """One rank's view of the world of ranks. The module's docstring has the rules.

    Attributes:
        rank: This rank.
        world_size: Number of ranks; they are 0 .. world_size - 1.
        name: "c10d", "threads" or "dry".
        state: Storage of the floors above that belongs to this rank; starts empty.
    """

    __slots__ = ("name", "rank", "state", "world_size")

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.state: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<{self.name} transport, rank {self.rank} of {self.world_size}>"

    @property
    def store(self) -> Any:
        """The key-value store that all ranks see, where there is one: words for who does not come."""
        return None

    # ---- the collectives ------------------------------------------------------------------

    def all_gather(self, x: Tensor, ranks: tuple[int, ...], *, tag: str = "") -> Tensor:
        """Stack every member's ``x`` (equal shapes and dtypes): [n, *x.shape]."""
        return self._all_gather_checked(x, ranks, tag, True).wait()

    def all_gather_async(self, x: Tensor, ranks: tuple[int, ...], *, tag: str = "") -> Handle:
        """Start an `all_gather`."""
        return self._all_gather_checked(x, ranks, tag, False)

    def reduce_scatter(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Tensor:
        """Reduce everybody's ``x`` of shape [n, ...]; keep chunk i on ``ranks[i]``."""
        return self._reduce_scatter_checked(x, ranks, op, tag, True).wait()

    def reduce_scatter_async(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Handle:
        """Start a `reduce_scatter`."""
        return self._reduce_scatter_checked(x, ranks, op, tag, False)

    def all_reduce(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Tensor:
        """Combine everybody's ``x``; the same value, bit for bit, on all members.

        Args:
            x: Same shape and dtype on all members.
            ranks: The group.
            op: "sum", "avg", "product", "max", "min", or for ints "band", "bor", "bxor".
            tag: Axis names, for the event.

        Returns:
            The combined tensor.

        Raises:
            CommError: The op does not exist or means nothing for the dtype.
        """
        return self._all_reduce_checked(x, ranks, op, tag, True).wait()

    def all_reduce_async(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Handle:
        """Start an `all_reduce`."""
        return self._all_reduce_checked(x, ranks, op, tag, False)

    def all_reduce_owned_async(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Handle:
        """Start an `all_reduce` of a contiguous tensor that the caller gives away.

        The result may be ``x`` itself, overwritten: no copy is made where none is needed.
        """
        if (tape := recorder()) is not None and len(ranks) > 1:
            return tape.collective(
                "all_reduce", _plain(x), ranks, transport=self, op=op, tag=tag, owned=True
            )
        return self._all_reduce_checked(x, ranks, op, tag, False)

    def all_reduce_owned(
        self, x: Tensor, ranks: tuple[int, ...], op: str = "sum", *, tag: str = ""
    ) -> Tensor:
        """Carry out an `all_reduce_owned_async`, for small tensors that are needed at once."""
        return self.all_reduce_owned_async(x, ranks, op, tag=tag).wait()

    def all_to_all(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        *,
        tag: str = "",
    ) -> Tensor:
        """Send the i-th piece of ``x`` to ``ranks[i]``; join what the members send here.

        Args:
            x: 1-D.
            ranks: The group.
            in_splits: Elements for each member, in group order; 0 is allowed.
            out_splits: Elements from each member.
            tag: Axis names, for the event.

        Returns:
            1-D, the pieces in group order.

        Raises:
            CommError: The splits do not add up.
        """
        return self._all_to_all_checked(x, ranks, in_splits, out_splits, tag, True).wait()

    def all_to_all_async(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        *,
        tag: str = "",
    ) -> Handle:
        """Start an `all_to_all`."""
        return self._all_to_all_checked(x, ranks, in_splits, out_splits, tag, False)

    def broadcast(
        self, x: Tensor, ranks: tuple[int, ...], src: int, *, tag: str = ""
    ) -> Tensor:
        """Give everybody the ``x`` of global rank ``src``.

        On the others only the shape, the dtype and the device of ``x`` are used.
        """
        if len(ranks) == 1:
            return _fresh(x)
        if src not in ranks:
            raise CommError(f"rank {src} cannot broadcast: it is not in the group {ranks}.")
        if (tape := recorder()) is not None:
            x = _plain(x)
            return tape.collective(
                "broadcast", x, ranks, transport=self, tag=tag, src=src
            ).wait()
        if observers():
            size = 0 if src == self.rank else x.nbytes
            self._report("broadcast", size, ranks, x, tag=tag)
        return self._broadcast(_plain(x) if src == self.rank else x, ranks, src)

    def scatter(
        self,
        x: Sequence[Tensor] | None,
        out_like: Tensor,
        ranks: tuple[int, ...],
        src: int,
        *,
        tag: str = "",
    ) -> Tensor:
        """Give ``ranks[i]`` the i-th tensor of rank ``src``'s list.

        Args:
            x: On ``src`` one tensor per member, of any shapes, one dtype; None elsewhere.
            out_like: A tensor with the shape, dtype and device of what comes out here.
            ranks: The group.
            src: A global rank.
            tag: Axis names, for the event.

        Returns:
            This rank's tensor.
        """
        if src not in ranks:
            raise CommError(f"rank {src} cannot scatter: it is not in the group {ranks}.")
        if (tape := recorder()) is not None:
            raise tape.refuse("scatter of a list of pieces", ["do it before the captured step"])
        pieces = None
        if src == self.rank:
            if x is None or len(x) != len(ranks):
                given = "none" if x is None else len(x)
                raise CommError(
                    f"scatter to {len(ranks)} ranks needs as many tensors, got {given}."
                )
            mine = x[ranks.index(src)]
            if mine.shape != out_like.shape:
                raise CommError(
                    f"scatter: own piece is {tuple(mine.shape)}, expected {tuple(out_like.shape)}."
                )
            if len(ranks) == 1:
                return _fresh(mine)
            pieces = list(
                x
            )  # not made contiguous yet: that would be another whole copy at once
            odd = [piece.dtype for piece in pieces if piece.dtype != out_like.dtype]
            if odd:
                raise CommError(f"scatter of {odd[0]} where {out_like.dtype} is expected.")
        if observers():
            size = 0 if src == self.rank else out_like.nbytes
            self._report("scatter", size, ranks, out_like, tag=tag)
        return self._scatter(pieces, out_like, ranks, src)

    def all_gather_object(
        self, obj: Any, ranks: tuple[int, ...], *, tag: str = ""
    ) -> list[Any]:
        """Collect a small picklable object from everybody, in group order. Slow; for checks."""
        if len(ranks) == 1:
            return [obj]
        if (tape := recorder()) is not None:
            raise tape.refuse(
                "Python objects are exchanged between ranks",
                [
                    "from_local(..., run_check=False), or shape=...",
                    "local_map: one eager call with these shapes",
                ],
            )
        if observers():
            self._report("all_gather_object", 0, ranks, None, tag=tag)
        return self._all_gather_object(obj, ranks)

    def barrier(self, ranks: tuple[int, ...], *, tag: str = "") -> None:
        """Wait until every member has come here."""
        if len(ranks) == 1:
            return
        if observers():
            self._report("barrier", 0, ranks, None, tag=tag)
        self._barrier(ranks)

    @abstractmethod
    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return what stands for the group: a ProcessGroup (c10d), else size() and rank()."""

    # ---- checks and events, common to the blocking and the asynchronous forms ---------------

    def _all_gather_checked(
        self, x: Tensor, ranks: tuple[int, ...], tag: str, blocking: bool
    ) -> Handle:
        if len(ranks) == 1:
            return Ready(_fresh(x).unsqueeze(0))
        if (tape := recorder()) is not None:
            return tape.collective("all_gather", _plain(x), ranks, transport=self, tag=tag)
        if observers():
            size = received_bytes("all_gather", x.nbytes, len(ranks))
            self._report("all_gather", size, ranks, x, tag=tag, blocking=blocking)
        return self._all_gather(_plain(x), ranks, blocking)

    def _reduce_scatter_checked(
        self, x: Tensor, ranks: tuple[int, ...], op: str, tag: str, blocking: bool
    ) -> Handle:
        if x.dim() == 0 or x.shape[0] != len(ranks):
            raise CommError(
                f"reduce_scatter over {len(ranks)} ranks takes [{len(ranks)}, ...],"
                f" not {list(x.shape)}."
            )
        if (op, x.dtype) not in ALLOWED:
            raise refuse(op, x.dtype)
        if len(ranks) == 1:
            return Ready(_fresh(x).squeeze(0))
        if (tape := recorder()) is not None:
            return tape.collective(
                "reduce_scatter", _plain(x), ranks, transport=self, op=op, tag=tag
            )
        if observers():
            size = received_bytes("reduce_scatter", x.nbytes, len(ranks))
            self._report("reduce_scatter", size, ranks, x, tag=tag, op=op, blocking=blocking)
        return self._reduce_scatter(_plain(x), ranks, op, blocking)

    def _all_reduce_checked(
        self, x: Tensor, ranks: tuple[int, ...], op: str, tag: str, blocking: bool
    ) -> Handle:
        if (op, x.dtype) not in ALLOWED:
            raise refuse(op, x.dtype)
        if len(ranks) == 1:
            return Ready(_fresh(x))
        if (tape := recorder()) is not None:
            return tape.collective(
                "all_reduce", _plain(x), ranks, transport=self, op=op, tag=tag
            )
        if observers():
            size = received_bytes("all_reduce", x.nbytes, len(ranks))
            self._report("all_reduce", size, ranks, x, tag=tag, op=op, blocking=blocking)
        return self._all_reduce(_plain(x), ranks, op, blocking)

    def _all_to_all_checked(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        tag: str,
        blocking: bool,
    ) -> Handle:
        n = len(ranks)
        if (
            x.dim() != 1
            or sum(in_splits) != x.shape[0]
            or len(in_splits) != n
            or len(out_splits) != n
        ):
            raise CommError(
                f"all_to_all over {n} ranks of {list(x.shape)}: the splits {list(in_splits)} and"
                f" {list(out_splits)} need {n} entries each, the first adding up to a 1-D x."
            )
        if n == 1:
            if in_splits[0] != out_splits[0]:
                raise CommError(
                    f"all_to_all with itself: {in_splits[0]} is not {out_splits[0]}."
                )
            return Ready(_fresh(x))
        if (tape := recorder()) is not None:
            return tape.collective(
                "all_to_all",
                _plain(x),
                ranks,
                transport=self,
                tag=tag,
                in_splits=tuple(in_splits),
                out_splits=tuple(out_splits),
            )
        if observers():
            here = out_splits[ranks.index(self.rank)]
            size = (sum(out_splits) - here) * x.element_size()
            self._report("all_to_all", size, ranks, x, tag=tag, blocking=blocking)
        return self._all_to_all(_plain(x), ranks, in_splits, out_splits, blocking)

    def _report(
        self,
        kind: str,
        size: int,
        ranks: tuple[int, ...],
        x: Tensor | None,
        *,
        tag: str,
        op: str = "",
        blocking: bool = True,
    ) -> None:
        emit(
            CommEvent(
                kind=kind,
                bytes=size,
                ranks=ranks,
                rank=self.rank,
                tag=tag,
                op=op,
                shape=() if x is None else tuple(x.shape),
                dtype="" if x is None else str(x.dtype).removeprefix("torch."),
                blocking=blocking,
                transport=self.name,
                site=user_site(),
            )
        )

    # ---- what a transport implements: groups of two ranks or more, plain tensors ------------

    @abstractmethod
    def _all_gather(self, x: Tensor, ranks: tuple[int, ...], blocking: bool) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(
        self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool
    ) -> Handle: ...

    @abstractmethod
    def _all_reduce(
        self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool
    ) -> Handle: ...

    @abstractmethod
    def _all_to_all(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        blocking: bool,
    ) -> Handle: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, ranks: tuple[int, ...], src: int) -> Tensor: ...

    @abstractmethod
    def _scatter(
        self, x: list[Tensor] | None, out_like: Tensor, ranks: tuple[int, ...], src: int
    ) -> Tensor: ...

    @abstractmethod
    def _all_gather_object(self, obj: Any, ranks: tuple[int, ...]) -> list[Any]: ...

    @abstractmethod
    def _barrier(self, ranks: tuple[int, ...]) -> None: ...


def _plain(x: Tensor) -> Tensor:
    """Give a backend what it can read raw: no grad, contiguous, no lazy conj or neg bit."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg() or x.is_conj():
        x = x.resolve_neg().resolve_conj()
    return x if x.is_contiguous() else x.contiguous()


def _fresh(x: Tensor) -> Tensor:
    """Copy."""
    return x.detach().clone(memory_format=torch.contiguous_format)


# ---- which transport is current -------------------------------------------------------------

_current: ContextVar[Transport | None] = ContextVar("shardwise_transport", default=None)


class _Fallback:
    """Holds the maker of the default transport; `c10d` puts it here when it is imported."""

    __slots__ = ("make",)
    make: Callable[[], Transport]


_fallback = _Fallback()


def current() -> Transport:
    """Return the transport of this rank.

    Inside `use` it is the one given there; else the process's own: torch.distributed's world if
    there is one (it is started here when the launcher has set WORLD_SIZE), else a world of 1.
    """
    transport = _current.get()
    return _fallback.make() if transport is None else transport


@contextmanager
def use(transport: Transport) -> Iterator[Transport]:
    """Make ``transport`` the current one inside the block.

    Args:
        transport: This rank's transport.
    """
    token = _current.set(transport)
    try:
        yield transport
    finally:
        _current.reset(token)
