"""Tensor arguments of which only a number or a dtype is read: nothing of their layout matters.

An index expression reads numbers: ``x[i]`` with a 0-d ``i``, ``x[:n]`` with a tensor ``n``. So does a cut at given
places: ``narrow`` from a tensor on, ``tensor_split`` at a tensor of indices. A cast to the like of
another tensor reads its dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.tensor.dtensor import DTensor

_T = torch.Tensor
_INDEXING = frozenset((_T.__getitem__, _T.__setitem__))
_CASTS = frozenset((_T.to, _T.type_as))
_CUTS = frozenset((_T.narrow, torch.narrow, _T.tensor_split, torch.tensor_split))
READING = _INDEXING | _CASTS | _CUTS
_MASKS = (torch.bool, torch.uint8)


def plain_form(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """The same call with what is read in the place of the tensor; None when there is nothing to read.

    Args:
        func: One of ``READING``.
        args: Its positional arguments.
    """
    if len(args) < 2:
        return None
    if func in _INDEXING:
        read = _with_numbers(args)
        return None if read is args else (func, read)
    if func in _CUTS:
        cuts = tuple(
            a.tolist() if i and isinstance(a, Tensor) else a for i, a in enumerate(args)
        )
        return None if all(c is a for c, a in zip(cuts, args)) else (func, cuts)
    x, other, *more = args
    if isinstance(x, Tensor) and isinstance(other, Tensor) and x.device == other.device:
        return _T.to, (x, other.dtype, *more)
    return None


def _with_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
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
