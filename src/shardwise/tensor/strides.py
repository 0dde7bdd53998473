"""A local piece in the stride order of its layout, which all ranks must have alike."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.boxes import restride


def agrees(local: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a local is dense in the stride order of a layout; an empty one always is."""
    want = restride(tuple(local.shape), stride)
    return 0 in local.shape or all(
        s == w or n == 1 for n, s, w in zip(local.shape, local.stride(), want)
    )


def in_order(local: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The local, or a copy of it, dense in the stride order of a layout."""
    if agrees(local, stride):
        return local
    order = sorted(range(local.ndim), key=lambda d: (-stride[d], d))
    inverse = sorted(range(local.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(inverse)


def alias(local: Tensor) -> Tensor:
    """Another tensor on the same memory; without history where no gradient is recorded.

    A view that is made under ``no_grad`` of what requires grad would require it too.
    """
    if local.requires_grad and not torch.is_grad_enabled():
        return local.detach()
    return local.view_as(local)
