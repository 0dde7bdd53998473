"""Nested state and flat keys: the same names that ``torch.distributed.checkpoint`` gives.

A dict is entered, and so is a list that has a tensor or a dict somewhere in it; everything else is a value.
The key of a value is its path, joined by dots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import itertools
from typing import Any

from torch import Tensor

from shardwise.checkpoint.records import KeyPath
from shardwise.errors import CheckpointError


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The values by flat key, and the path of each.

    Raises:
        CheckpointError: Two paths have the same key.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in _walk((), state):
        key = ".".join(map(str, path))
        if key in flat:
            raise CheckpointError(
                f"two values of the state have the key {key!r}: at {paths[key]} and at {path}."
            )
        flat[key], paths[key] = value, path
    return flat, paths


def _walk(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk((*path, str(name)), inner)
    elif isinstance(value, list) and is_entered(value):
        for i, inner in enumerate(value):
            yield from _walk((*path, i), inner)
    else:
        yield path, value


def is_entered(items: list[Any]) -> bool:
    """Whether a list is a container: a tensor, a dict or a keeper of state is somewhere in it."""
    return any(
        isinstance(x, (Tensor, Mapping))
        or hasattr(x, "state_dict")
        or (isinstance(x, list) and is_entered(x))
        for x in items
    )


def put(state: Any, path: KeyPath, value: Any) -> None:
    """Set a value in a nested state, making the dicts and lists on the way."""
    for step, following in itertools.pairwise(path):
        blank: Any = {} if isinstance(following, str) else []
        if isinstance(state, list):
            assert isinstance(step, int), "lists are entered by number"
            state += [None] * (step + 1 - len(state))
            if state[step] is None:
                state[step] = blank
            state = state[step]
        else:
            state = state.setdefault(_own_key(state, step), blank)
    last = path[-1]
    if isinstance(state, list):
        assert isinstance(last, int), "lists are entered by number"
        state += [None] * (last + 1 - len(state))
        state[last] = value
    else:
        state[_own_key(state, last)] = value


def _own_key(state: Any, step: Any) -> Any:
    """A key of the dict that is written like ``step``: numbers are keys, too."""
    if step in state or not isinstance(step, str):
        return step
    return next((k for k in state if str(k) == step), step)


def nested(values: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """A nested state from flat keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        put(out, paths.get(key, (key,)), value)
    return out
