"""Results of pieces that hold nothing: every rank's graph must keep its edges, or some ranks wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    shape: Sequence[int],
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
    *,
    saved: bool = False,
) -> Tensor:
    """An empty result of this shape, tied to the tensors.

    Args:
        shape: Of the result.
        tensors: Those that the op would have read.
        dtype: Default: that of the first tensor.
        saved: The op's backward reads the (floating, real) tensors again, so that where there is something its
            gradients have a graph of their own, and so must these.
    """
    first = next(t for t in tensors if t is not None)
    made = torch.empty(tuple(shape), dtype=dtype or first.dtype, device=first.device)
    if saved and torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                none = t.reshape(-1)[:0]  # squared, not times zero: that would make NaN of inf
                made = made + (none * none).sum().to(made.dtype)
        return made
    return tied(made, tensors)


class Unempty:
    """The call where the piece of the result holds anything; the kernels refuse pieces that do not.

    Attributes:
        dtype: The dtype of the result; default: that of the first tensor.
        saved: The op's backward reads its tensors again.
    """

    __slots__ = ("dtype", "saved")

    def __init__(self, dtype: torch.dtype | None = None, *, saved: bool = False) -> None:
        self.dtype, self.saved = dtype, saved

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run."""
        shape = ctx.outs[0].local_shape
        if 0 not in shape:
            return ctx.func(*args, **kwargs)
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        return nothing(shape, tensors, self.dtype, saved=self.saved)
