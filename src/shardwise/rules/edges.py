"""Results of pieces that hold nothing: every rank's graph must keep its edges, or some ranks wait for ever."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tied(result: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    """An empty result with an edge to each of the tensors, along which zeros flow back."""
    if not torch.is_grad_enabled() or not (result.is_floating_point() or result.is_complex()):
        return result
    for t in tensors:
        if t is not None and t.requires_grad:
            edge = t.sum()
            if edge.is_complex() and not result.is_complex():
                edge = torch.view_as_real(edge).sum()
            result = result + edge.to(result.dtype)
    return result


def nothing(
    shape: Sequence[int], tensors: Sequence[Tensor | None], dtype: torch.dtype | None = None
) -> Tensor:
    """An empty result of this shape, tied to the tensors; the dtype is that of the first unless told."""
    first = next(t for t in tensors if t is not None)
    made = torch.empty(tuple(shape), dtype=dtype or first.dtype, device=first.device)
    return tied(made, tensors)
