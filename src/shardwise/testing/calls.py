"""A call whose tensors can be exchanged: what the checks run, plain and distributed.

```text
   op(input, *args, **kwargs)  -->  Call.fn(t0, t1, ...)      the tensors, pulled out of the arguments' tree
                                    Call.tensors = [t0, ...]  plain ones, float64 where floating
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor stood.

    Attributes:
        index: Its place in the list of tensors.
    """

    index: int


def take(tree: Any, out: list[Tensor]) -> Any:
    """Move the tensors of a tree of arguments into ``out``, slots into their places.

    The same tensor twice is two slots, as autograd would have it for two leaves of equal value.
    """
    if isinstance(tree, Tensor):
        out.append(tree)
        return Slot(len(out) - 1)
    return _mapped(tree, lambda leaf: take(leaf, out))


def put(tree: Any, tensors: list[Any] | tuple[Any, ...]) -> Any:
    """Move tensors back to their slots."""
    if isinstance(tree, Slot):
        return tensors[tree.index]
    return _mapped(tree, lambda leaf: put(leaf, tensors))


def _mapped(tree: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[fn(x) for x in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)([fn(x) for x in tree])
    if isinstance(tree, dict):
        return {key: fn(value) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(fn(tree.start), fn(tree.stop), fn(tree.step))
    return tree


def results_of(value: Any) -> list[Any]:
    """The leaves of what a call returned, in order."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in results_of(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in results_of(item)]
    return [value]


def same(value: Any) -> Any:
    """Nothing to be done with a result before it is differentiated."""
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A function of tensors, and the tensors.

    Attributes:
        fn: Takes the tensors; returns a tensor or a tree of tensors.
        tensors: Plain arguments; those that require grad are differentiated.
        post: Takes the result to the part of it that can be differentiated (an SVD's vectors are
            unique only up to a sign).
        random: It draws random numbers.
        uninitialized: Its values mean nothing (``torch.empty``): shape and dtype are compared.
        text: The call, for messages.
        names: What the docs call each tensor.
    """

    fn: Callable[..., Any]
    tensors: list[Tensor]
    post: Callable[[Any], Any] = same
    random: bool = False
    uninitialized: bool = False
    text: str = ""
    names: tuple[str, ...] = ()


__all__ = ["Call", "Slot", "put", "results_of", "take"]
