"""What a step reads that is another thing at each call: the clock, the system's randomness, files, large arrays.

While a step is recorded these are watched. What is read of the clock may only be printed: so a step that reads it is
recorded once more, at another time, and if another step comes of it, the step depends on the time and is refused.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
import io
import os
import random
import sys
from threading import get_ident
import time
from typing import Any
from unittest.mock import patch

import torch

from shardwise.capture.cells import CLOCKS, MANY, is_numpy
from shardwise.capture.names import is_frozen
from shardwise.capture.state import State
from shardwise.capture.tape import Tape
from shardwise.errors import CaptureError

_LATER = 100_003.0  # seconds; each look at the clock adds as much
MAX_BYTES = 1 << 26  # of large arrays; so many are compared at each call, if need be
_MAKERS = ("tensor", "as_tensor", "asarray", "from_numpy")
_READERS = ("numpy", "pathlib", "torch")  # what is read through these is read for the program
_OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/")


class Watch:
    """Notes on a tape what this thread reads.

    Args:
        state: What the function works on.
        tape: Where it is noted.
        later: Whether clocks are to go wrong, and ever more so.
    """

    def __init__(self, state: State, tape: Tape, *, later: bool) -> None:
        self.state, self.tape, self.later = state, tape, later
        self.thread, self.looks = get_ident(), 0
        sizes = {name: getattr(x, "nbytes", 8 * len(x)) for name, x in state.arrays}
        self.too_large = ""
        if sum(sizes.values()) > MAX_BYTES:
            self.too_large = ", ".join(f"{n}: {size >> 20} MiB" for n, size in sizes.items())

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the function runs."""
        clocks = {real: self._clock(real) for real in CLOCKS}
        with ExitStack() as stack:
            for real, name in CLOCKS.items():
                stack.enter_context(patch.object(time, name, clocks[real]))
            for cell, real in self.state.clocks:  # under names of the user's
                cell.write(clocks[real])
                stack.callback(cell.write, real)
            for holder, name in ((os, "urandom"), (random, "_urandom")):
                stack.enter_context(patch.object(holder, name, self._urandom))
            for holder in (builtins, io):
                stack.enter_context(patch.object(holder, "open", self._opener(open)))
            for name in _MAKERS if self.state.arrays else ():
                made = self._maker(getattr(torch, name))
                stack.enter_context(patch.object(torch, name, made))
            yield

    def _here(self) -> bool:
        return get_ident() == self.thread

    def _clock(self, real: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            now = real()
            if self._here() and not is_frozen(_caller()):
                self.tape.doubts.append(f"reads the clock (time.{CLOCKS[real]} at {_site()})")
                self.looks += 1
                ahead = self.looks * _LATER if self.later else 0
                now += int(ahead * 1e9) if isinstance(now, int) else ahead
            return now

        return read

    def _urandom(self, size: int, real: Callable[[int], bytes] = os.urandom) -> bytes:
        if self._here():
            self.tape.doubts.append(f"asks the system for random numbers (at {_site()})")
        return real(size)

    def _opener(self, real: Any) -> Any:
        def read(file: Any, mode: str = "r", *more: Any, **how: Any) -> Any:
            if self._here() and _is_read(file, mode):
                self.tape.reads_file = CaptureError(
                    f"this step cannot be captured: it reads a file, {os.fspath(file)}, whose contents would be those "
                    f"of the recorded call (at {_site()}).",
                    tries=["read it before the step, and pass on what is in it"],
                )
                raise self.tape.reads_file
            return real(file, mode, *more, **how)

        return read

    def _maker(self, real: Any) -> Any:
        def make(data: Any, *more: Any, **how: Any) -> Any:
            large = is_numpy(data) or (isinstance(data, list) and len(data) > MANY)
            if self._here() and large:
                self.tape.from_arrays = True
                if self.too_large:
                    raise self.tape.refuse(
                        "it makes a tensor of an array, and those that it can reach are too large to be compared at "
                        f"each call ({self.too_large})",
                        ["make the tensor before the step, and pass it as an argument"],
                    )
            return real(data, *more, **how)

        return make


def _site() -> str:
    """The line of the program that this is for."""
    frame: Any = sys._getframe(2)
    while frame is not None and is_frozen(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _caller() -> str:
    """The module that calls what calls this."""
    return sys._getframe(2).f_globals.get("__name__", "")


def _is_read(file: Any, mode: str) -> bool:
    """Whether a file is opened for what is in it: by the program, or for it."""
    if isinstance(file, int) or set(mode) & set("wax"):
        return False
    if str(os.fspath(file)).startswith(_OF_THE_SYSTEM):
        return False
    caller: Any = sys._getframe(2)
    while (name := caller.f_globals.get("__name__", "")).split(".")[0] in _READERS:
        if caller.f_back is None or name.startswith(("torch._", "torch.utils.")):
            return False
        caller = caller.f_back
    return not is_frozen(name)
