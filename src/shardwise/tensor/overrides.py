"""Calls that a ``DTensor`` answers itself, because they are not (only) about values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (func, args, kwargs)

OVERRIDES: dict[Any, Handler] = {}


def override(*functions: Any) -> Callable[[Handler], Handler]:
    """Answer for these torch functions."""

    def register(handler: Handler) -> Handler:
        for f in functions:
            OVERRIDES[f] = handler
        return handler

    return register
