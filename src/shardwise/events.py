"""What happened, told to whoever watches.

```text
   comm, tensor, ...  --- if observing(): emit(CommEvent(...)) --->  observers
                                                                       CommLog   collects, counts
                                                                       observe(fn)  your function
```

Observers live in a ContextVar, so a `with CommLog()` sees what happens inside it and in the
virtual ranks started inside it, and nothing else. Nobody observing costs one ContextVar read:
build the event only after `observing()` said yes.

A thread that autograd starts for a CUDA backward has no context of ours: code that runs there
and wants to be seen captures `observers()` in forward and calls them itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
import sys
from types import FrameType, TracebackType
from typing import Any, Self

Observer = Callable[[Any], None]

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("shardwise_observers", default=())

observers = _observers.get
"""The observers in force, a tuple: empty (falsy) when nobody watches."""


def observing() -> bool:
    """Tell whether anybody watches; ask before building an event."""
    return bool(_observers.get())


def emit(event: object) -> None:
    """Hand ``event`` to every observer, oldest first; nothing happens when there is none."""
    for observer in _observers.get():
        observer(event)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer`` with every event that is emitted inside the block.

    Args:
        observer: A function of one argument, the event. What it raises reaches the code that
            emitted.

    Example:
        >>> seen = []
        >>> with observe(seen.append):
        ...     emit("hello")
        >>> seen
        ['hello']
    """
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One rank's part in one collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter",
            "all_gather_object" or "barrier".
        bytes: Bytes that this rank receives, see `received_bytes`.
        ranks: The group, in its own order.
        rank: The rank that reports.
        tag: Names of the mesh axes, as the caller gave them; may be empty.
        op: The reduction, for the kinds that have one.
        shape: Shape of the tensor that this rank put in (for a scatter: got out).
        dtype: Its dtype, as text ("float32").
        blocking: False for the asynchronous forms.
        transport: Name of the transport.
        site: "file.py:31", the user's line; "" when there is none.
    """

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    rank: int
    tag: str = ""
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    blocking: bool = True
    transport: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True)
class FallbackEvent:
    """Something was done the slow way.

    Attributes:
        what: The op or feature ("aten.foo").
        why: Why it had no better way.
        site: The user's line.
    """

    what: str
    why: str
    site: str = ""


def received_bytes(kind: str, nbytes: int, num_ranks: int) -> int:
    """Bytes that one rank of a group receives in one collective, with the best algorithm known.

    Predictions and counts both come from here, so they agree to the byte.

    ```text
    all_gather       (n-1) * nbytes        nbytes: what one rank puts in
    reduce_scatter   (n-1)/n * nbytes      nbytes: what one rank puts in (n chunks)
    all_reduce       2(n-1)/n * nbytes     a reduce_scatter and an all_gather of the chunks
    broadcast        nbytes                except on the source: 0
    scatter          nbytes                nbytes: what comes out; on the source 0
    ```

    Args:
        kind: The collective. For an all_to_all add up what comes from the others instead.
        nbytes: Size of the tensor, see above.
        num_ranks: Size of the group.

    Returns:
        Bytes, rounded down.
    """
    match kind:
        case "all_gather":
            return (num_ranks - 1) * nbytes
        case "reduce_scatter":
            return (num_ranks - 1) * nbytes // num_ranks
        case "all_reduce":
            return 2 * (num_ranks - 1) * nbytes // num_ranks
        case "broadcast" | "scatter":
            return nbytes
    assert kind in ("barrier", "all_gather_object"), f"no formula for {kind!r}"
    return 0


_QUIET_MODULES = frozenset({"shardwise", "torch", "contextlib", "functools", "threading"})


def user_site(frame: FrameType | None = None) -> str:
    """Find the line of user code that led here.

    Args:
        frame: Where to start; default: the caller.

    Returns:
        "path/file.py:31", the first frame outside shardwise and torch, or "".
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _QUIET_MODULES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(slots=True)
class CommLog:
    """Collects the collectives that run inside a ``with`` block.

    Inside `simulate` the virtual ranks share the caller's log; ``log.on(rank)`` is one rank's
    part of it.

    Attributes:
        events: The events, in order.

    Example:
        >>> with CommLog() as log:
        ...     pass
        >>> log.count(), log.bytes
        (0, 0)
    """

    events: list[CommEvent] = field(default_factory=list)
    _tokens: list[Token[tuple[Observer, ...]]] = field(default_factory=list, repr=False)

    def __enter__(self) -> Self:
        self._tokens.append(_observers.set((*_observers.get(), self._take)))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _observers.reset(self._tokens.pop())

    def _take(self, event: object) -> None:
        if isinstance(event, CommEvent):
            self.events.append(event)

    def on(self, rank: int) -> "CommLog":
        """Keep the events of one rank."""
        return CommLog([event for event in self.events if event.rank == rank])

    def count(self, kind: str | None = None) -> int:
        """Count the events, all or those of one kind."""
        return sum(kind is None or event.kind == kind for event in self.events)

    @property
    def bytes(self) -> int:
        """Bytes received, all ranks of the log together."""
        return sum(event.bytes for event in self.events)

    def clear(self) -> None:
        """Forget the events."""
        self.events.clear()

    def __str__(self) -> str:
        """Draw a table: one row per kind, group, axes and user line."""
        rows: dict[tuple[str, ...], tuple[int, int]] = {}
        for event in self.events:
            op = f" {event.op}" if event.op else ""
            key = (event.kind + op, _ranks_text(event.ranks), event.tag, event.site)
            calls, size = rows.get(key, (0, 0))
            rows[key] = (calls + 1, size + event.bytes)
        cells = [("collective", "ranks", "axes", "calls", "bytes", "at")]
        for (kind, ranks, tag, site), (calls, size) in rows.items():
            cells.append((kind, ranks, tag, str(calls), str(size), site))
        cells.append(("total", "", "", str(self.count()), str(self.bytes), ""))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            texts = [
                text.rjust(width) if column in (3, 4) else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(texts).rstrip())
        return "\n".join(lines)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    """Write (0, 1, 2, 3) as "0-3", (0, 2, 4) as "0-4 by 2", anything else in full."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ",".join(map(str, ranks))
