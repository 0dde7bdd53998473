"""The place where lower floors ask whether a step is being recorded.

A recorder runs a training step on fake tensors: what would be sent, moved or drawn is noted instead. The lower
floors know only the protocol here; ``capture/tape.py`` implements it.

The recorder lives in a ContextVar. Autograd threads have none of it, so backward must run on the caller's thread
while a recorder is in force (``torch.autograd.set_multithreading_enabled(False)``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    """Notes what is done, in place of doing it. All tensors that it takes and gives are fake."""

    def collective(
        self, kind: str, x: Any, ranks: tuple[int, ...], *, transport: Any, **how: Any
    ) -> Any:
        """Note the start of a collective; the handle notes where it is waited for."""

    def move(self, mover: Any, x: Any) -> Any:
        """Note a move from one layout to another."""

    def opaque(
        self, name: str, call: Callable[..., Any], like: Callable[[], Any], *args: Any
    ) -> Any:
        """Note a call to be made again at every run, whose result is a fresh tensor like ``like``."""

    def generator_position(self, generator: Any) -> Any:
        """What stands for the state of a generator: equal before the same draws."""

    def effect(
        self,
        name: str,
        call: Callable[..., Any],
        *args: Any,
        random: bool = False,
        writes: bool = True,
    ) -> None:
        """Note a call to be made again at every run for what it does, to the memory of its arguments above all."""

    def block(self, name: str, x: Any, call: Callable[[Any], Any]) -> Any:
        """Note ``call(x)`` as one thing, as a move is: what it sends may travel with others."""

    def fact(self, text: str) -> None:
        """Note what all ranks must have alike, and nothing else shows."""

    def afterwards(self, restore: Callable[[], None]) -> None:
        """Have something put back when the recording ends, however it ends."""

    def at_end(self, check: Callable[[], None]) -> None:
        """Have something looked at when the recorded call is over; it may raise what `refuse` gives."""

    def refuse(self, what: str, tries: Sequence[str] = ()) -> Exception:
        """The error for what no later run could repeat."""
        ...


_RECORDER: ContextVar[Recorder | None] = ContextVar("shardwise_recorder", default=None)

recorder = _RECORDER.get
"""The recorder in force, or None."""


@contextmanager
def record_with(tape: Recorder | None) -> Iterator[None]:
    """Put a recorder (or none) in force."""
    token = _RECORDER.set(tape)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def at_each_run(name: str, check: Callable[..., None], *args: Any) -> None:
    """Make a check of values: now, and if a step is being recorded, at each of its runs instead."""
    tape = recorder()
    if tape is None:
        check(*args)
    else:
        tape.effect(name, check, *args, writes=False)
