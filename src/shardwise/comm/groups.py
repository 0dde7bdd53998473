"""Differentiable reductions over a group of ranks, for the local programs of rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Transport
from shardwise.compat import direct_apply


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that a local program reduces over, with the transport that reaches them.

    Attributes:
        transport: This rank's transport.
        ranks: The group, in order.
        tag: Names of the mesh axes, for the log.
    """

    transport: Transport
    ranks: tuple[int, ...]
    tag: str = ""

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.transport.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks. P -> R; the backward is P -> R again."""
        if self.size == 1:
            return x
        if x.requires_grad and torch.is_grad_enabled():
            return _sum(x, self)  # pyright: ignore[reportReturnType]
        return self.reduce(x, "sum")

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """A reduction without a gradient: all_reduce with ``op``."""
        return self.transport.all_reduce(x.detach().contiguous(), self.ranks, op, tag=self.tag)

    def total(self, x: Tensor) -> Tensor:
        """The sum of a fresh tensor without history, which may be overwritten."""
        if len(self.ranks) == 1:
            return x
        return self.transport.all_reduce_owned(x, self.ranks, "sum", tag=self.tag)

    def gather(self, x: Tensor) -> Tensor:
        """What every rank has, stacked on a new first dim; without a gradient."""
        return self.transport.all_gather(x.detach().contiguous(), self.ranks, tag=self.tag)

    def stack(self, x: Tensor) -> Tensor:
        """What every rank has, stacked on a new first dim; the backward sums, and takes this rank's part."""
        if self.size == 1:
            return x.unsqueeze(0)
        if x.requires_grad and torch.is_grad_enabled():
            return _stack(x, self)  # pyright: ignore[reportReturnType]
        return self.gather(x)

    def settle(self, x: Tensor, value: Tensor) -> Tensor:
        """``value``, known on all ranks, with the gradient of ``sum(x)``: nothing moves forward."""
        if x.requires_grad and torch.is_grad_enabled():
            return _settle(x, value.detach(), self)  # pyright: ignore[reportReturnType]
        return value

    def check(self, number: Tensor) -> int:
        """The least of the ranks' numbers, read at once: what they must agree on before they go on."""
        return int(
            self.transport.all_reduce(number, self.ranks, "min", tag=f"{self.tag} check")
        )

    def objects(self, value: Any) -> list[Any]:
        """What every rank has; for small picklable things that are needed once, such as the text of an error."""
        return self.transport.all_gather_object(value, self.ranks, tag=self.tag)

    def keep(self, x: Tensor) -> Tensor:
        """R -> P: the value on the group's first rank, zeros on the rest (which keep the edge)."""
        if self.size == 1:
            return x
        return _keep(x, self.index == 0)  # pyright: ignore[reportReturnType]

    def cast(self, x: Tensor) -> Tensor:
        """The same value; its gradient is summed over the ranks (R with a whole gradient, to R), and theirs pass."""
        if self.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return _cast(x, self)  # pyright: ignore[reportReturnType]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group.reduce(x, "sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.sum(grads[0]), None


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group.gather(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.sum(grads[0])[ctx.group.index], None


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, value: Tensor, group: Group) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.sum(grads[0]), None, None


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, first: bool) -> Tensor:
        return x.view_as(x) if first else torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.first = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _keep(grads[0], ctx.first), None


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g, group = grads[0], ctx.group
        if g.requires_grad and torch.is_grad_enabled():
            return _castback(g, group), None
        return group.sum(g), None


class _CastBack(torch.autograd.Function):
    """The sum of a gradient, which is plain from here on: a gradient of it enters again, and only passes.

    The transpose of the sum would be another thing: what is computed from a plain gradient is computed on every rank,
    and would be summed over them.
    """

    @staticmethod
    def forward(g: Tensor, group: Group) -> Tensor:
        return group.reduce(g, "sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.cast(grads[0]), None


_sum = direct_apply(_Sum)
_stack = direct_apply(_Stack)
_settle = direct_apply(_Settle)
_keep = direct_apply(_Keep)
_cast = direct_apply(_Cast)
_castback = direct_apply(_CastBack)
