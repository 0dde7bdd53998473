"""Tensors that an index expression reads as numbers: ``x[i]`` with a 0-d ``i``, ``x[:n]`` with a tensor ``n``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.tensor.dtensor import DTensor

INDEXING = frozenset((torch.Tensor.__getitem__, torch.Tensor.__setitem__))

_MASKS = (torch.bool, torch.uint8)


def with_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an index expression with such tensors read, as torch reads them: ``x[i]`` is a view.

    A plain ``x`` with a distributed ``i`` is left: the result is distributed.

    Returns:
        ``args`` itself when there is nothing to read.
    """
    if len(args) < 2:
        return args
    x, index, *value = args
    entries = index if type(index) is tuple else (index,)
    scalars = isinstance(x, DTensor)
    read = tuple([_read(i, scalars) for i in entries])
    if all(new is old for new, old in zip(read, entries)):
        return args
    return (x, read if type(index) is tuple else read[0], *value)


def _read(entry: Any, scalars: bool) -> Any:
    if type(entry) is slice:
        bounds = (entry.start, entry.stop, entry.step)
        if any(isinstance(b, Tensor) for b in bounds):
            return slice(*[b.__index__() if isinstance(b, Tensor) else b for b in bounds])
    elif (
        scalars and isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype not in _MASKS
    ):
        return entry.__index__()
    return entry
