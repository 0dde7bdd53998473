"""Places that are read before each run: in tables, in attributes, and what can only be asked for."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable, Iterator
import contextvars
import marshal
import math
import os
import random
import sys
import time
from typing import Any

import torch

MANY = 1024  # a table of more is data
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
CLOCKS = {  # functions of ``time`` that tell the time, with their names
    getattr(time, name): name for clock in _CLOCKS for name in (clock, f"{clock}_ns")
}


class Cell:
    """A place that holds a tensor, or nothing.

    Attributes:
        name: For the text.
        role: See ``Slot``.
        holder: A dict, a list, or an object with attributes.
        key: Where in it.
    """

    __slots__ = ("holder", "key", "name", "role")

    def __init__(self, name: str, role: str, holder: Any, key: Any) -> None:
        self.name, self.role, self.holder, self.key = name, role, holder, key

    def read(self) -> Any:
        """What is there now."""
        holder = self.holder
        if isinstance(holder, dict):
            return dict.get(holder, self.key)
        if isinstance(holder, (list, deque)):
            return holder[self.key] if self.key < len(holder) else None
        if isinstance(holder, type):  # the member itself, not what it gives
            return vars(holder).get(self.key)
        return getattr(holder, self.key, None)

    def write(self, x: Any) -> None:
        """Put something there."""
        if isinstance(self.holder, (dict, list, deque)):
            self.holder[self.key] = x
        else:
            setattr(self.holder, self.key, x)


class TableCell(Cell):
    """A place in an optimizer's tables, which ``load_state_dict`` replaces: they are asked for at each access.

    Attributes:
        find: Gives the dict.
    """

    __slots__ = ("find",)

    def __init__(self, name: str, role: str, find: Callable[[], Any], key: Any) -> None:
        self.name, self.role, self.find, self.key = name, role, find, key

    @property
    def holder(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dict, now."""
        return self.find()


class Asked(Cell):
    """What can only be asked for: the numbers in an array, a setting of torch, the environment.

    Attributes:
        ask: Gives it: text, bytes, a number, several of them, or an object.
        put: Puts that back where it came from.
    """

    __slots__ = ("ask", "put")

    def __init__(
        self,
        name: str,
        holder: Any,
        ask: Callable[[], Any],
        put: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(name, "state", holder, "content")
        self.ask, self.put = ask, put

    def read(self) -> Any:
        """What it is now."""
        return self.ask()

    def write(self, x: Any) -> None:
        """Make it that again."""
        if self.put is not None:
            self.put(x)


def is_plain(x: Any) -> bool:
    """Whether it is a number, text or nothing."""
    return x is None or isinstance(x, (str, bytes, int, float))


def is_value(x: Any) -> bool:
    """Whether what counts is what ``x`` is equal to, not which object it is: numbers, text, tuples of them."""
    return is_plain(x) or (type(x) is tuple and all(map(is_plain, x)))


def is_same(now: Any, was: Any) -> bool:
    """Whether a place holds what it held: the same object, or a value that no code can tell from it."""
    if now is was:
        return True
    if type(now) is not type(was) or not is_value(was):
        return False
    if type(was) is float:
        return now == was and (was != 0 or math.copysign(1, now) == math.copysign(1, was))
    if type(was) is tuple:
        return len(now) == len(was) and all(map(is_same, now, was))
    return now == was


def exact(x: Any) -> Any:
    """A value for a key: zeros of two signs are equal, and so are 1 and 1.0, but no code takes one for the other."""
    if type(x) is tuple:
        return tuple(map(exact, x))
    if type(x) is float and x == 0:
        return float, repr(x)
    return type(x), x


# ---- what is in an object ----------------------------------------------------------------------------


def content_of(name: str, x: Any, largest: int = MANY) -> Asked | None:
    """The numbers in an array, the bytes in a buffer, what a context variable holds; None of other objects."""
    if isinstance(x, contextvars.ContextVar):
        return Asked(name, x, lambda: x.get(None))
    if isinstance(x, array.array):
        return Asked(name, x, x.tobytes, lambda was: (_cleared(x), x.frombytes(was)))
    if isinstance(x, bytearray):
        return Asked(name, x, lambda: bytes(x), lambda was: x.__setitem__(slice(None), was))
    if is_numpy(x) and x.size <= largest:
        return Asked(
            name,
            x,
            lambda: (x.dtype.str, str(x.shape), x.tobytes()),
            lambda was: _fill(x, was[2]),
        )
    return None


def numbers_in(name: str, x: Any) -> Asked:
    """A long list or dict of numbers and text, as one place; nothing where there is anything else in it."""

    def ask() -> bytes:
        try:
            return marshal.dumps(list(dict.items(x)) if isinstance(x, dict) else list(x), 2)
        except ValueError:
            return b""

    return Asked(name, x, ask)


def is_numpy(x: Any) -> bool:
    """Whether it is an array of numpy's, of numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and not x.dtype.hasobject


def _cleared(x: Any) -> None:
    del x[:]


def _fill(x: Any, was: bytes) -> None:
    import numpy as np  # noqa: PLC0415  only who has arrays has it

    if x.flags.writeable:
        x[...] = np.frombuffer(was, x.dtype).reshape(x.shape)


# ---- what code asks the language and torch for ---------------------------------------------------------

_SETTINGS: dict[str, Callable[[], Any]] = {
    "get_num_threads": torch.get_num_threads,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "getcwd": os.getcwd,
    "argv": lambda: tuple(sys.argv),
}
_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))


def settings_named(names: set[str]) -> Iterator[Asked]:
    """Settings of the process that code asks for by these names."""
    for name in sorted(names.intersection(_SETTINGS)):
        yield Asked(name, _SETTINGS[name], _SETTINGS[name])


def environment_named(names: set[str], texts: set[str]) -> Iterator[Asked]:
    """Variables of the environment that code names, if it asks for any."""
    for text in sorted(texts) if names & _ENVIRONMENT else ():
        if text.isidentifier():
            key = f"os.environ[{text!r}]"
            yield Asked(key, text, lambda text=text: os.environ.get(text))


def environment(names: set[str]) -> Asked | None:
    """All of the environment, for code that may ask for a variable by a name that it computes."""
    if not names & _ENVIRONMENT:
        return None
    return Asked("os.environ", os.environ, lambda: marshal.dumps(sorted(os.environ.items()), 2))


# ---- random numbers ------------------------------------------------------------------------------------


def random_state(x: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What reads and writes the state of a generator of Python's or numpy's; None of other objects."""
    if isinstance(x, random.Random):
        return x.getstate, x.setstate
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(x, numpy.random.RandomState):
        return lambda: x.get_state(legacy=False), x.set_state
    if isinstance(x, numpy.random.Generator):
        x = x.bit_generator
    if isinstance(x, numpy.random.BitGenerator):
        return lambda: x.state, lambda was: setattr(x, "state", was)
    return None
