"""Plain arguments as parts of a key: slices and tuples by value and by type (1, 1.0 and True hash alike)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

NO_KEY: Any = object()  # in no table
_INDEX_KINDS = frozenset((int, bool, type(None), type(...)))


def index_key(x: Any) -> Any:
    """One part of an index, as part of a key; a number is told from a bool."""
    kind = type(x)
    if kind is slice:
        return x.start, x.stop, x.step
    return (kind, x) if kind in _INDEX_KINDS else NO_KEY


_INTS = {n: (int,) * n for n in range(16)}


def plain_key(a: Any) -> tuple[Any, ...] | None:
    """A tuple or a slice by the values and types in it (slices cannot be hashed); None if it holds a tensor."""
    if type(a) is slice:
        return slice, a.start, a.stop, a.step
    if tuple(map(type, a)) == _INTS.get(len(a)):
        return a
    out: list[Any] = []
    for x in a:
        kind = type(x)
        if kind is slice or kind is tuple:
            x = plain_key(x)
            if x is None:
                return None
        elif kind is not int and isinstance(x, Tensor):
            return None
        out.append(kind)
        out.append(x)
    return tuple(out)
