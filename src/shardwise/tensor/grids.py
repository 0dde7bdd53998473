"""Tensors brought to a common shape by views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.compat import MESHGRID_OF_LIST
from shardwise.errors import LayoutError
from shardwise.tensor.overrides import OVERRIDES, override

_T = torch.Tensor


@override(torch.functional.broadcast_tensors)
def _broadcast_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(shape) for t in tensors)


@override(torch.functional.meshgrid, MESHGRID_OF_LIST)
def _meshgrid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    indexing = kwargs.get("indexing") or "ij"
    if indexing not in ("ij", "xy"):
        raise LayoutError(f"meshgrid: indexing must be 'ij' or 'xy', got {indexing!r}")
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = 1, 0
    shape = [tensors[k].numel() for k in order]
    grids: list[Any] = []
    for k, t in enumerate(tensors):
        lone = [1] * len(tensors)
        lone[order.index(k)] = t.numel()
        grids.append(t.reshape(lone).expand(shape))
    return tuple(grids)


def _atleast(ndim: int) -> Callable[[Tensor], Tensor]:
    def one(t: Tensor) -> Tensor:
        if t.ndim >= ndim:
            return t
        if t.ndim == 0:
            return t.reshape((1,) * ndim)
        if t.ndim == 1:
            return t.unsqueeze(0) if ndim == 2 else t.unsqueeze(0).unsqueeze(-1)
        return t.unsqueeze(-1)

    return one


def _for_each(one: Callable[[Tensor], Tensor]) -> Any:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor):
            return one(args[0])
        tensors = args[0] if len(args) == 1 else args
        return tuple(one(t) for t in tensors)

    return handler


OVERRIDES[torch.functional.atleast_1d] = _for_each(_atleast(1))
OVERRIDES[torch.functional.atleast_2d] = _for_each(_atleast(2))
OVERRIDES[torch.functional.atleast_3d] = _for_each(_atleast(3))
