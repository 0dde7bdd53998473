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


def end_to_end(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``; its backward gives a vector without elements zeros that have no graph, and the ranks part there."""
    if parts[0].ndim == 1 and any(t.requires_grad and not t.numel() for t in parts):
        return torch.cat([t.unsqueeze(1) for t in parts]).squeeze(1)
    return torch.cat(parts, dim)  # pyright: ignore[reportArgumentType]


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
    return marked(made, tensors) if saved else tied(made, tensors)


def marked(
    result: Tensor, tensors: Sequence[Tensor | None], linear: Sequence[Tensor] = ()
) -> Tensor:
    """A result whose gradients have graphs of their own, as they do where the op's backward reads the tensors again.

    Some kernels leave that out where there is little or nothing to do, and ranks that differ in it wait for ever.

    Args:
        result: Floating or complex; it keeps its values.
        tensors: What the op reads.
        linear: Those of them in which the op is linear: no gradient has a graph for their sake alone.
    """
    if not torch.is_grad_enabled() or not (result.is_floating_point() or result.is_complex()):
        return result
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    sums = [
        t.reshape(-1)[:0].sum() for t in wanted
    ]  # not times zero: that would make NaN of inf
    straight = [any(t is other for other in linear) for t in wanted]
    for i, a in enumerate(sums):
        for j in range(i, len(sums)):
            if straight[i] and straight[j]:
                continue
            term = a * sums[j]
            if term.is_complex() and not result.is_complex():
                term = torch.view_as_real(term).sum()
            result = result + term.to(result.dtype)
    return result


class _NoDerivative(torch.autograd.Function):
    """A result of which torch knows no derivative: one that were not asked for would be lost without a word."""

    @staticmethod
    def forward(result: Tensor, name: str, *tensors: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"the derivative for '{ctx.name}' is not implemented.")


def underivable(result: Tensor, name: str, *tensors: Tensor) -> Tensor:
    """A result made without autograd, of an op (called ``name``) whose derivative torch does not know: backward raises."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _NoDerivative.apply(result, name, *tensors)  # pyright: ignore[reportReturnType]
    return result


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
