"""What a call does on a rank outside the mesh of its operands: nothing, with results of the right kind.

The rank holds empty locals. It runs the same program as the others, so a call must give it tensors of the
right shape, dtype and layout, joined to the autograd graph; it must not run a kernel on an empty piece that
is no piece of anything, and must send nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.compat import fake_mode, untraceable, without_modes
from shardwise.errors import MeshError
from shardwise.layout.layout import Layout
from shardwise.program.compile import fill
from shardwise.program.spec import spec_of
from shardwise.rules.notation import Arg
from shardwise.tensor.dtensor import DTensor, wrap


class Absent:
    """A call as a rank outside the mesh runs it.

    Attributes:
        func: The torch function.
        operands: The arguments as rules see them.
        layouts: Of the results, as a rule says; None where no rule answered: replicated.
    """

    __slots__ = ("func", "layouts", "operands")

    def __init__(self, func: Any, operands: Any, layouts: list[Layout] | None) -> None:
        self.func, self.operands, self.layouts = func, operands, layouts

    def __call__(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Run on fake tensors of the global shapes, and wrap empties."""
        with without_modes(), fake_mode():
            fakes = [_fake(a, t) for a, t in zip(self.operands, call.tensors)]
            try:
                result = self.func(*fill(call.tree, fakes), **fill(call.kwargs, fakes))
            except untraceable() as error:
                mesh = self.operands[0].layout.mesh
                raise MeshError(
                    f"rank {call.transport.rank} is not on {mesh}, so it has no data that this call asks for."
                ) from error
        return _empties(result, fakes, call, self)


def _fake(a: Arg, t: Tensor) -> Tensor:
    """Stands for an operand; requires grad as it does now, so that the results tell what does."""
    needs = t.requires_grad
    fake = torch.empty_strided(
        a.shape, a.layout.stride, dtype=a.dtype, device=a.device or "cpu", requires_grad=needs
    )
    return fake.clone() if needs and torch.is_grad_enabled() and not t.is_leaf else fake


def _empties(result: Any, fakes: list[Tensor], call: Any, program: Absent) -> Any:
    mesh = program.operands[0].layout.mesh
    layouts = iter(program.layouts or ())
    needs = [t._local if isinstance(t, DTensor) else t for t in call.tensors]
    needs = [t for t in needs if t.requires_grad] if torch.is_grad_enabled() else []

    def empty(fake: Tensor) -> Tensor:
        for t, own in zip(call.tensors, fakes):
            if fake is own:
                return t
        shape, stride = tuple(fake.shape), tuple(fake.stride())
        layout = next(layouts, None)
        if layout is None or layout.shape != shape:
            layout = Layout.of(mesh, None, shape, stride, fake.dtype)
        local = torch.empty((0,) * fake.ndim, dtype=fake.dtype, device=fake.device)
        if needs and fake.requires_grad:
            local: Tensor = _Joined.apply(local, *needs)  # pyright: ignore[reportAssignmentType]
        return wrap(local, spec_of(layout.with_dtype(fake.dtype), call.transport))

    def convert(x: Any) -> Any:
        if isinstance(x, Tensor):
            return empty(x)
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(convert, x))
        if isinstance(x, (tuple, list)) and type(x) is not torch.Size:
            return type(x)([convert(y) for y in x])
        return x

    return convert(result)


class _Joined(torch.autograd.Function):
    """An empty result that depends on its operands, with gradients of nothing."""

    @staticmethod
    def forward(local: Tensor, *operands: Tensor) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *(torch.zeros_like(t) for t in ctx.saved_tensors)
