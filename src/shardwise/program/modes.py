"""Scopes that change which program a call compiles to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardwise.compat import is_autocast_enabled

_STRICT: ContextVar[bool] = ContextVar("shardwise_strict", default=False)

strict_mode = _STRICT.get


@contextmanager
def strict() -> Iterator[None]:
    """Forbid fallbacks that communicate, and plain tensors other than scalars next to a DTensor."""
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def mode() -> int:
    """Which program table: autocast and strict calls have their own."""
    return (2 if is_autocast_enabled() else 0) | (1 if strict_mode() else 0)
