"""What a recorded call has left in Python: tensors in lists and attributes, counters, seeds.

A later run of the graph does none of it. A tensor that was put where a name leads (``self.hidden = h``) is an output
of the graph and is put there after each run; what cannot be repeated is refused. Either way the fakes are taken out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
import random
import sys
import types
from typing import Any
import warnings

import torch
from torch import Tensor, nn

from shardwise.capture.cells import Asked, Cell, is_same, random_state
from shardwise.capture.state import State, local_of
from shardwise.capture.tape import Tape
from shardwise.compat import is_fake

_NOTHING: Any = object()
OUTSIDE = (
    "return it, and keep it outside the step",
    "make it a tensor that the step updates in place (a buffer)",
)


class Aftermath:
    """The lists, dicts and attributes of a state as they are before a call.

    Args:
        state: What the function works on.
    """

    def __init__(self, state: State) -> None:
        held = [*state.held, *state.unnamed]
        loose = {id(c) for c, _ in (*state.loose, *state.unnamed)}
        self.held = [(c, x) for c, x in held if not isinstance(c, Asked)]
        self.asked = [(c, x) for c, x in held if isinstance(c, Asked) and id(c) not in loose]
        self.containers = [(name, c, _copied(c)) for name, c in state.containers]
        self.iterators = [(name, it, position(it)) for name, it in state.iterators]
        self.taken: list[tuple[Any, Any, Any]] = []

    def places(self, tape: Tape, cells: list[Cell]) -> list[Cell]:
        """New places that hold a tensor of the step.

        Raises:
            CaptureError: Something else was left that no later run would leave.
        """
        for name, it, was in self.iterators:
            if position(it) != was:
                raise tape.refuse(
                    f"it takes from {name}, an iterator, what a later run would not take from it",
                    ["pass what it gives as an argument"],
                )
        for cell, was in self.asked:
            if not is_same(cell.read(), was):
                raise tape.refuse(
                    f"it changes {cell.name}, which a later run of the graph would not do",
                    ["do it outside the step", OUTSIDE[1]],
                )
        known = {(id(c.holder), c.key) for c in cells}
        found: dict[Any, Cell] = {}
        for name, holder, key, was, now in self._changes():
            self.taken.append((holder, key, was))
            if (id(holder), key) in known and (now is None or isinstance(now, Tensor)):
                continue
            there = not isinstance(holder, (list, deque)) or was is not _NOTHING
            if there and isinstance(now, Tensor) and is_fake(local_of(now)):
                found[id(holder), key] = Cell(name, "state", holder, key)
                continue
            if holds_fake(now):
                raise tape.refuse(
                    f"it leaves a tensor or a number of the step in {name}, which a later run would not do",
                    OUTSIDE,
                )
            if _number(was) and _number(now) and was != now and key != "training":
                raise tape.refuse(
                    f"it changes {name}, a Python number, which a later run of the graph would not do",
                    ["count outside the step", OUTSIDE[1]],
                )
            self.taken.pop()
        return list(found.values())

    def _changes(self) -> Iterator[tuple[str, Any, Any, Any, Any]]:
        """Name, holder, key, before and after of all that is another."""
        replaced: set[int] = set()
        for cell, was in self.held:
            now = cell.read()
            if now is not was:
                replaced.add(id(was))
                yield cell.name, cell.holder, cell.key, was, now
        for name, c, old in self.containers:
            if id(c) in replaced:  # nobody looks at it any more
                continue
            if isinstance(c, dict):
                for key in [*c, *(k for k in old if k not in c)]:
                    was, now = old.get(key, _NOTHING), dict.get(c, key, _NOTHING)
                    if now is not was:
                        yield f"{name}.{key}", c, key, was, now
            else:
                for i in range(max(len(c), len(old))):
                    was = old[i] if i < len(old) else _NOTHING
                    now = c[i] if i < len(c) else _NOTHING
                    if now is not was:
                        yield f"{name}[{i}]", c, i, was, now

    def restore(self, *, everything: bool) -> None:
        """Take what the step left out again; after an error, all that it did."""
        for holder, key, was in reversed(self.taken):
            _put(holder, key, was)
        if everything:
            for cell, was in self.held:
                if cell.read() is not was:
                    cell.write(was)
            for cell, was in self.asked:
                if not is_same(cell.read(), was):
                    cell.write(was)
            for _, c, old in self.containers:
                if isinstance(c, dict):
                    for key in [k for k in c if k not in old]:
                        del c[key]
                    for key, x in old.items():
                        if dict.get(c, key, _NOTHING) is not x:
                            c[key] = x
                elif len(c) != len(old) or any(x is not y for x, y in zip(c, old)):
                    c.clear()
                    c.extend(old)


def _copied(c: Any) -> Any:
    """A copy of a container; of a class of the user's, without its methods."""
    return dict(dict.items(c)) if isinstance(c, dict) else list(c)


def _put(holder: Any, key: Any, x: Any) -> None:
    if x is not _NOTHING:
        Cell("", "", holder, key).write(x)
    elif isinstance(holder, dict):
        holder.pop(key, None)
    elif isinstance(holder, list):
        del holder[key:]
    elif isinstance(holder, deque):
        while len(holder) > key:
            holder.pop()


def position(it: Any) -> Any:
    """What is another when something was taken from an iterator, as far as it shows."""
    if isinstance(it, types.GeneratorType):
        frame = it.gi_frame
        return frame and (frame.f_lasti, [id(x) for x in frame.f_locals.values()])
    yielded = vars(it).get("_num_yielded") if hasattr(it, "__dict__") else None
    if yielded is not None:  # of a DataLoader
        return yielded
    if type(it).__module__ not in ("builtins", "itertools"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = it.__reduce__()
    except TypeError:  # a file, say
        return None
    return [_shown(x) for x in parts]


def _shown(x: Any) -> Any:
    if isinstance(x, Iterator):
        return position(x)
    if isinstance(x, tuple):
        return [_shown(y) for y in x]
    return len(x) if isinstance(x, list) else id(x) if not _number(x) else x


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, torch.SymFloat)


def holds_fake(x: Any, depth: int = 4) -> bool:
    """Whether there is a tensor or a number of a recording in ``x``."""
    if isinstance(x, Tensor):
        return is_fake(local_of(x))
    if isinstance(x, (torch.SymFloat, torch.SymBool)):
        return True
    if depth == 0 or isinstance(x, (type, nn.Module, torch.optim.Optimizer)):
        return False
    if isinstance(x, dict):
        return any(holds_fake(y, depth - 1) for y in x.values())
    if isinstance(x, (list, tuple, set, frozenset)):
        return any(holds_fake(y, depth - 1) for y in x)
    held = getattr(x, "__dict__", None)
    return isinstance(held, dict) and holds_fake(held, depth - 1)


class Seeds:
    """The generators of torch, ``random`` and numpy before a call: recorded draws leave them as they are.

    Args:
        state: What the function works on.
    """

    def __init__(self, state: State) -> None:
        self.generators = [torch.default_generator, *state.generators]
        self.states = [g.get_state() for g in self.generators]
        self.python = random.getstate()
        self.others = [(*how, how[0]()) for x in state.randoms if (how := random_state(x))]
        self.numpy: Any = sys.modules.get("numpy")
        self.numpy_state = (
            None if self.numpy is None else self.numpy.random.get_state(legacy=False)
        )

    def changed(self) -> str | None:
        """What the call has done to one of them, put back; None if nothing."""
        found = None
        for g, was in zip(self.generators, self.states):
            if not torch.equal(g.get_state(), was):
                g.set_state(was)
                found = (
                    "it seeds a random generator, which a later run of the graph would not do"
                )
        for read, write, was in self.others:
            if repr(read()) != repr(was):
                write(was)
                found = "it draws from a random generator of Python's or numpy's, whose numbers a later run would not draw again"
        if random.getstate() != self.python:
            random.setstate(self.python)
            found = (
                "it draws from Python's random, whose numbers a later run would not draw again"
            )
        if self.numpy is not None:
            now = self.numpy.random.get_state(legacy=False)
            if repr(now) != repr(self.numpy_state):
                self.numpy.random.set_state(self.numpy_state)
                found = (
                    "it draws from numpy.random, whose numbers a later run would not draw again"
                )
        return found
