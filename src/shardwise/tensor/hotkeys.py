"""How a program is stored where the hot path finds it: the mirror of the look-ups in ``dtensor.py``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.tensor.dtensor import (
    GETITEM,
    LIFTED,
    DTensor,
    flatten_kwargs,
    flatten_list,
    one_tensor_key,
)
from shardwise.tensor.plainkeys import NO_KEY, index_key, plain_key


def fast_key(  # noqa: C901, PLR0912  one branch for each that the hot path has
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lifts: bool
) -> tuple[Any, ...] | None:
    """The hot path's key for a call, or None where a number that changes at every call would be part of it."""
    if not args:
        return None
    if len(args) == 2 and not kwargs and type(args[0]) is DTensor and type(args[1]) is float:
        return (func, args[0]._spec, float) if lifts else None
    if lifts and any(type(a) is complex for a in (*args, *kwargs.values())):
        return None
    (LIFTED.add if lifts else LIFTED.discard)(func)
    if not kwargs and 1 <= len(args) <= 3 and all(type(a) is DTensor for a in args):
        return func, *[a._spec for a in args]
    if (
        not kwargs
        and len(args) == 3
        and args[2] is None
        and type(args[0]) is type(args[1]) is DTensor
    ):
        return func, args[0]._spec, args[1]._spec, None
    if type(args[0]) is DTensor and not kwargs:
        if len(args) == 2 and type(args[1]) is int:
            return func, args[0]._spec, args[1]
        if len(args) == 3 and type(args[1]) is type(args[2]) is int:
            return func, args[0]._spec, args[1], args[2]
        if len(args) == 2 and type(args[1]) is tuple and func is GETITEM:
            index = (func, args[0]._spec, *map(index_key, args[1]))
            if NO_KEY not in index and _hashable(index):
                return index
    if type(args[0]) is DTensor and len(args) == len(kwargs) == 1:
        ((name, value),) = kwargs.items()
        if type(value) is bool:
            return func, args[0]._spec, name, value
    one = one_tensor_key(func, args, kwargs)
    if one is not None:
        return (
            one
            if _hashable(one)
            and not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values()))
            else None
        )
    key: list[Any] = [func]
    for a in args:
        if type(a) is DTensor:
            key.append(a._spec)
        elif type(a) is list or (type(a) is tuple and a and isinstance(a[0], Tensor)):
            flatten_list(a, key, [], None)
        elif type(a) is slice or type(a) is tuple:
            plain = plain_key(a)
            if plain is None:
                return None
            key.append(plain)
        else:
            key += (float,) if lifts and type(a) is float else (type(a), a)
    if kwargs:
        if any(isinstance(x, Tensor) and type(x) is not DTensor for x in kwargs.values()):
            return None
        flatten_kwargs(func, kwargs, key)
    if any(
        isinstance(k, Tensor) for k in key
    ):  # plain tensors are told apart on the slow path only
        return None
    return tuple(key) if _hashable(tuple(key)) else None


def _hashable(key: tuple[Any, ...]) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
