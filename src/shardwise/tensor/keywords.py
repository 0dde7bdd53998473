"""Tensors that are passed by name: put in the order of the parameters, which rules count on.

``torch.gather(index=i, input=x, dim=0)`` is answered as ``torch.gather(x, 0, i)``.
"""

from __future__ import annotations

from functools import lru_cache
import inspect
from typing import Any

from torch import Tensor
from torch.overrides import get_testing_overrides


def positional(func: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call by keywords alone with its required arguments, up to the last tensor, by position."""
    leading: list[str] = []
    for name, required in parameters(func):
        if not required or name not in kwargs:
            break
        leading.append(name)
    while leading and not isinstance(
        kwargs[leading[-1]], Tensor
    ):  # what follows may be for keywords only
        leading.pop()
    rest = {name: value for name, value in kwargs.items() if name not in leading}
    return tuple([kwargs[name] for name in leading]), rest


def ordered(func: Any, fallback: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the parameters, if there are several tensors among them.

    Args:
        func: What is called.
        fallback: A function with the same parameters, asked for those that ``func`` does not tell.
        kwargs: The arguments.
    """
    if sum(isinstance(value, Tensor) for value in kwargs.values()) < 2:
        return kwargs
    return {name: kwargs[name] for name in _order(func, fallback, tuple(kwargs))}


@lru_cache(4096)
def _order(func: Any, fallback: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    names = [name for fn in (func, fallback) if fn is not None for name, _ in parameters(fn)]
    last = len(names)
    return tuple(sorted(given, key=lambda name: names.index(name) if name in names else last))


@lru_cache(4096)
def parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    """Names of a torch function's parameters, and which are required and may be positional.

    Empty where nothing is known of them.
    """
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return tuple(
            [(a.name, not a.kwarg_only and not a.has_default_value()) for a in schema.arguments]
        )
    for fn in (
        func,
        get_testing_overrides().get(func),
    ):  # a builtin does not say, its stand-in does
        try:
            found = inspect.signature(fn).parameters.values()  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError):
            continue
        return tuple(
            [
                (p.name, p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty)
                for p in found
            ]
        )
    return ()


__all__ = ["ordered", "parameters", "positional"]
