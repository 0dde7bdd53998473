"""The transport between ranks that are threads of one process.

The ranks are cooperative: one runs at a time, the one that holds the baton. It runs until it
must wait for a collective, then hands the baton to the next rank that can run.

```text
   rank 0  ──run──▶ all_reduce                        (takes the result) ──run──▶
   rank 1            └─baton─▶ ──run──▶ all_reduce
   rank 2                                 └─baton─▶ ──run──▶ all_reduce ──run──▶ wait: baton ▶ 0
                                                              the last to arrive computes
                                                              everybody's result
```

What follows from that:

1. Nothing here needs a lock: only the holder of the baton touches the shared state.
2. Results are computed while nobody else runs, and from copies where the owner ran on (the
   asynchronous forms), so no in-place op of a peer can change what is still being read.
3. Runs are deterministic. Torch's global generator and default dtype are saved for the rank
   that leaves and set for the one that enters, so every rank has its own.
4. When nobody can run, that is a deadlock, and who waits for what is known: every waiting rank
   raises a `DeadlockError` that says so. Ranks that call different collectives on one group
   raise it too. A rank that raises stops the others at their next (or current) collective.
"""

from collections import deque
from collections.abc import Callable, Sequence
import pickle
import sys
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.dry import RankGroup
from shardwise.comm.reduce import reduce_in_order
from shardwise.comm.transport import Handle, Transport, _plain
from shardwise.compat import dual_level_open
from shardwise.errors import AbortedError, CommError, DeadlockError, UnsupportedError, explain
from shardwise.events import user_site

# From the members' inputs, in group order, to their results.
_Compute = Callable[[list[Any]], Sequence[Any]]


class _Slot:
    """One collective of one group, from the first member's arrival to the last one's."""

    __slots__ = ("arrived", "inputs", "ranks", "results", "signature", "starter", "waiting")

    def __init__(
        self, ranks: tuple[int, ...], signature: tuple[Any, ...], starter: int
    ) -> None:
        self.ranks = ranks
        self.signature = signature
        self.starter = starter
        self.inputs: list[Any] = [None] * len(ranks)
        self.arrived: set[int] = set()
        self.waiting: list[int] = []
        self.results: list[Any] | None = None


class _Channel:
    """A group of ranks: how many collectives each has called, and those not complete."""

    __slots__ = ("calls", "open", "place", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.place = {rank: i for i, rank in enumerate(ranks)}
        self.calls = [0] * len(ranks)
        self.open: dict[int, _Slot] = {}


class World:
    """What the ranks of one simulation share. Only the holder of the baton may touch it.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.channels: dict[tuple[int, ...], _Channel] = {}
        self.runnable: deque[int] = deque(range(size))
        self.waiting: dict[int, _Slot] = {}
        self.ended: dict[int, str] = {}
        self.threads: dict[int, int] = {}
        self.failure: Callable[[], CommError] | None = None
        self.origin: tuple[int, BaseException] | None = None
        self.saved: list[_RankGlobals] = [_RankGlobals.read()] * size
        self.done = Lock()
        self.done.acquire()
        self._turns = [Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()

    # ---- the baton --------------------------------------------------------------------------

    def start(self) -> None:
        """Give the baton to the first rank."""
        self._turns[self.runnable.popleft()].release()

    def enter(self, rank: int) -> None:
        """Wait for the baton, then run as ``rank``."""
        self._turns[rank].acquire()
        if self.size > 1:
            self.saved[rank].restore()

    def finish(self, rank: int, error: BaseException | None) -> None:
        """End ``rank`` and pass the baton on."""
        if error is None:
            self.ended[rank] = "has returned"
        else:
            self.ended[rank] = f"has raised {type(error).__name__}"
            if self.origin is None:
                self.origin = (rank, error)
            text = f"rank {rank} raised {type(error).__name__}: {error}"
            self.fail(lambda: AbortedError(text))
        self.saved[rank] = _RankGlobals.read()
        if len(self.ended) == self.size:
            self.done.release()
            return
        self._turns[self._next()].release()

    def wait(self, rank: int, slot: _Slot) -> None:
        """Let others run until ``slot`` is complete."""
        if self.failure is not None and slot.results is None:
            raise self.failure()
        if slot.results is not None:
            return
        self.waiting[rank] = slot
        slot.waiting.append(rank)
        following = self._next()
        if following != rank:
            self.saved[rank] = _RankGlobals.read()
            self._turns[following].release()
            self.enter(rank)
        if slot.results is None:
            assert self.failure is not None, "the baton comes back with a result or a failure"
            raise self.failure()

    def _next(self) -> int:
        """Take the next rank that can run."""
        if not self.runnable:
            text = self._deadlock_text()
            self.fail(lambda: DeadlockError(text))
        return self.runnable.popleft()

    def fail(self, failure: Callable[[], CommError]) -> None:
        """Make every rank that waits, or will wait, raise; the first failure counts."""
        if self.failure is None:
            self.failure = failure
        self.runnable.extend(self.waiting)
        self.waiting.clear()

    # ---- collectives ------------------------------------------------------------------------

    def channel(self, rank: int, ranks: tuple[int, ...]) -> _Channel:
        """Find the group of ``ranks``."""
        channel = self.channels.get(ranks)
        if channel is None:
            bad = [member for member in ranks if not 0 <= member < self.size]
            if bad or len(set(ranks)) != len(ranks):
                raise CommError(f"a world of {self.size} ranks has no group of ranks {ranks}.")
            channel = self.channels[ranks] = _Channel(ranks)
        if rank not in channel.place:
            raise CommError(f"rank {rank} is not in the group {ranks}.")
        return channel

    def post(
        self,
        rank: int,
        ranks: tuple[int, ...],
        signature: tuple[Any, ...],
        payload: Any,
        compute: _Compute,
    ) -> _Slot:
        """Bring ``rank``'s input to its next collective on the group.

        The last to come computes everybody's result. ``signature`` starts with the kind and
        must be equal on all members.
        """
        if self.failure is not None:
            raise self.failure()
        channel = self.channel(rank, ranks)
        place = channel.place[rank]
        call = channel.calls[place]
        channel.calls[place] = call + 1
        slot = channel.open.get(call)
        if slot is None:
            slot = channel.open[call] = _Slot(ranks, signature, rank)
        elif slot.signature != signature:
            text = self._mismatch_text(slot, rank, signature)
            self.fail(lambda: DeadlockError(text))
            raise DeadlockError(text)
        slot.inputs[place] = payload
        slot.arrived.add(rank)
        if len(slot.arrived) == len(ranks):
            del channel.open[call]
            try:
                slot.results = list(compute(slot.inputs))
            except Exception as error:
                text = str(error)
                kind = type(error) if isinstance(error, CommError) else AbortedError
                self.fail(lambda: kind(text))
                raise
            slot.inputs = []
            for member in slot.waiting:
                del self.waiting[member]
            self.runnable.extend(slot.waiting)
        return slot

    # ---- what to say ------------------------------------------------------------------------

    def _site(self, rank: int) -> str:
        frame = sys._current_frames().get(self.threads.get(rank, 0))
        site = user_site(frame) if frame is not None else ""
        return f", at {site}" if site else ""

    def _deadlock_text(self) -> str:
        lines = []
        for rank in range(self.size):
            slot = self.waiting.get(rank)
            if slot is None:
                lines.append(f"rank {rank} {self.ended.get(rank, 'runs')}")
                continue
            missing = [member for member in slot.ranks if member not in slot.arrived]
            lines.append(
                f"rank {rank} waits in {slot.signature[0]} over ranks {slot.ranks}"
                f" for {_and(missing)}{self._site(rank)}"
            )
        return explain(
            "the ranks cannot go on: each waits for one that does not come.",
            {"ranks": "\n".join(lines)},
            ["let all ranks of a group call the same collectives in the same order"],
        )

    def _mismatch_text(self, slot: _Slot, rank: int, signature: tuple[Any, ...]) -> str:
        lines = [
            f"rank {slot.starter} calls {_call_text(slot.signature)}{self._site(slot.starter)}",
            f"rank {rank} calls {_call_text(signature)}{self._site(rank)}",
        ]
        return explain(
            f"the ranks disagree about a collective over ranks {slot.ranks}.",
            {"ranks": "\n".join(lines)},
            ["let all ranks of a group call the same collectives in the same order"],
        )


class _RankGlobals:
    """What torch keeps once per process and every rank must have for itself."""

    __slots__ = ("cuda_rng", "dtype", "rng")

    def __init__(self, rng: Tensor, cuda_rng: Tensor | None, dtype: torch.dtype) -> None:
        self.rng = rng
        self.cuda_rng = cuda_rng
        self.dtype = dtype

    @classmethod
    def read(cls) -> "_RankGlobals":
        cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.default_generator.get_state(), cuda_rng, torch.get_default_dtype())

    def restore(self) -> None:
        torch.default_generator.set_state(self.rng)
        if self.cuda_rng is not None:
            torch.cuda.set_rng_state(self.cuda_rng)
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)


class _Pending(Handle):
    """A collective that this rank has brought its input to."""

    __slots__ = ("_out", "_rank", "_slot", "_world")

    def __init__(self, world: World, rank: int, slot: _Slot) -> None:
        self._world = world
        self._rank = rank
        self._slot: _Slot | None = slot
        self._out: Any = None

    def wait(self) -> Any:
        slot = self._slot
        if slot is not None:
            if slot.results is None:
                self._world.wait(self._rank, slot)
            assert slot.results is not None, "a wait ends with results or raises"
            place = slot.ranks.index(self._rank)
            self._out, slot.results[place] = slot.results[place], None
            self._slot = None
        return self._out


class ThreadsTransport(Transport):
    """One rank of a `World` of threads.

    Args:
        world: The world, shared by its ranks.
        rank: This rank.
    """

    __slots__ = ("world",)

    def __init__(self, world: World, rank: int) -> None:
        super().__init__("threads", rank, world.size)
        self.world = world

    def group(self, ranks: tuple[int, ...]) -> RankGroup:
        """Return a stand-in with size() and rank()."""
        self.world.channel(self.rank, ranks)
        return RankGroup(ranks, self.rank)

    def _post(
        self,
        ranks: tuple[int, ...],
        signature: tuple[Any, ...],
        payload: Any,
        compute: _Compute,
    ) -> _Pending:
        if dual_level_open() and len(ranks) > 1:
            raise UnsupportedError(
                "virtual ranks cannot exchange anything inside a forward-mode derivative (jvp, jacfwd, hessian): its "
                "level belongs to the whole process.",
                tries=["torch.func.jacrev, which works in reverse", "real processes: torchrun"],
            )
        slot = self.world.post(self.rank, ranks, signature, payload, compute)
        return _Pending(self.world, self.rank, slot)

    def _all_gather(self, x: Tensor, ranks: tuple[int, ...], blocking: bool) -> Handle:
        signature = ("all_gather", x.dtype, x.shape)
        return self._post(ranks, signature, x if blocking else x.clone(), _gather_all)

    def _reduce_scatter(
        self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool
    ) -> Handle:
        def compute(inputs: list[Tensor]) -> Sequence[Tensor]:
            columns = zip(*(each.unbind(0) for each in inputs), strict=True)
            return [reduce_in_order(column, op) for column in columns]

        signature = ("reduce_scatter", x.dtype, x.shape, op)
        return self._post(ranks, signature, x if blocking else x.clone(), compute)

    def _all_reduce(self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool) -> Handle:
        def compute(inputs: list[Tensor]) -> Sequence[Tensor]:
            return _one_each(reduce_in_order(inputs, op), len(inputs))

        signature = ("all_reduce", x.dtype, x.shape, op)
        return self._post(ranks, signature, x if blocking else x.clone(), compute)

    def _all_to_all(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        blocking: bool,
    ) -> Handle:
        def compute(inputs: list[tuple[Tensor, list[int], list[int]]]) -> Sequence[Tensor]:
            for i, (_, sent, _) in enumerate(inputs):
                for j, (_, _, expected) in enumerate(inputs):
                    if sent[j] != expected[i]:
                        raise CommError(
                            f"all_to_all: rank {ranks[i]} sends {sent[j]} elements to rank"
                            f" {ranks[j]}, which expects {expected[i]}."
                        )
            pieces = [each.split(sent) for each, sent, _ in inputs]
            return [torch.cat([row[j] for row in pieces]) for j in range(len(inputs))]

        payload = (x if blocking else x.clone(), list(in_splits), list(out_splits))
        return self._post(ranks, ("all_to_all", x.dtype), payload, compute)

    def _broadcast(self, x: Tensor, ranks: tuple[int, ...], src: int) -> Tensor:
        place = ranks.index(src)

        def compute(inputs: list[Tensor]) -> Sequence[Tensor]:
            return [inputs[place].clone() for _ in inputs]

        return self._post(
            ranks, ("broadcast", x.dtype, x.shape, f"from {src}"), x, compute
        ).wait()

    def _scatter(
        self, x: list[Tensor] | None, out_like: Tensor, ranks: tuple[int, ...], src: int
    ) -> Tensor:
        place = ranks.index(src)
        x = None if x is None else [_plain(piece) for piece in x]

        def compute(inputs: list[tuple[list[Tensor] | None, torch.Size]]) -> Sequence[Tensor]:
            pieces = inputs[place][0]
            assert pieces is not None, "the source has brought its list"
            for rank, piece, (_, shape) in zip(ranks, pieces, inputs, strict=True):
                if piece.shape != shape:
                    raise CommError(
                        f"scatter: rank {rank} expects {tuple(shape)}, rank {src} sends it"
                        f" {tuple(piece.shape)}."
                    )
            return [piece.clone() for piece in pieces]

        signature = ("scatter", out_like.dtype, f"from {src}")
        return self._post(ranks, signature, (x, out_like.shape), compute).wait()

    def _all_gather_object(self, obj: Any, ranks: tuple[int, ...]) -> list[Any]:
        # Through pickle, as between processes: nobody shares an object with another rank.
        blob = pickle.dumps(obj)

        def compute(inputs: list[bytes]) -> Sequence[list[bytes]]:
            return [list(inputs) for _ in inputs]

        blobs = self._post(ranks, ("all_gather_object",), blob, compute).wait()
        return [pickle.loads(each) for each in blobs]

    def _barrier(self, ranks: tuple[int, ...]) -> None:
        self._post(ranks, ("barrier",), None, lambda inputs: inputs).wait()


def _one_each(x: Tensor, num_copies: int) -> list[Tensor]:
    """Return ``x`` and as many copies as make ``num_copies`` in all."""
    return [x, *(x.clone() for _ in range(num_copies - 1))]


def _gather_all(inputs: list[Tensor]) -> Sequence[Tensor]:
    return _one_each(torch.stack(inputs), len(inputs))


def _and(ranks: Sequence[int]) -> str:
    """Write [1] as "rank 1", [1, 2] as "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _call_text(signature: tuple[Any, ...]) -> str:
    """Write a signature: "all_reduce(float32, [2, 3], sum)"."""
    kind, *rest = signature
    texts = [
        str(list(part)) if isinstance(part, torch.Size) else str(part).removeprefix("torch.")
        for part in rest
    ]
    return f"{kind}({', '.join(texts)})"
