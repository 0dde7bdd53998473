"""What a call does on a rank outside the mesh of its operands: nothing, with results of the right kind.

The rank holds empty locals. It runs the same program as the others, so a call must give it tensors of the
right shape, dtype and layout, joined to the autograd graph; it must not run a kernel on an empty piece that
is no piece of anything, and must send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
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
            leaves = [_fake(a, t) for a, t in zip(self.operands, call.tensors)]
            fakes = [_operand(fake, t) for fake, t in zip(leaves, call.tensors)]
            try:
                result = self.func(*fill(call.tree, fakes), **fill(call.kwargs, fakes))
            except untraceable() as error:
                mesh = self.operands[0].layout.mesh
                raise MeshError(
                    f"rank {call.transport.rank} is not on {mesh}, so it has no data that this call asks for."
                ) from error
        return _empties(result, fakes, leaves, call, self)


def _fake(a: Arg, t: Tensor) -> Tensor:
    """Stands for an operand; requires grad as it does now, so that the results tell what does."""
    device, stride = a.device or "cpu", a.layout.stride
    return torch.empty_strided(
        a.shape, stride, dtype=a.dtype, device=device, requires_grad=t.requires_grad
    )


def _operand(fake: Tensor, t: Tensor) -> Tensor:
    """What the call gets: a leaf only for a leaf."""
    joined = t.requires_grad and torch.is_grad_enabled() and not t.is_leaf
    return fake.clone() if joined else fake


def _empties(
    result: Any, fakes: list[Tensor], leaves: list[Tensor], call: Any, program: Absent
) -> Any:
    mesh = program.operands[0].layout.mesh
    layouts = iter(program.layouts or ())
    locals_ = [t._local if isinstance(t, DTensor) else t for t in call.tensors]
    stands_for = [(fake, t) for fake, t in zip(leaves, locals_) if t.requires_grad]

    def empty(fake: Tensor) -> Tensor:
        for t, own in zip(call.tensors, fakes):
            if fake is own:
                return t
        shape, stride = tuple(fake.shape), tuple(fake.stride())
        layout = next(layouts, None)
        if layout is None or layout.shape != shape:
            layout = Layout.of(mesh, None, shape, stride, fake.dtype)
        local = torch.empty((0,) * fake.ndim, dtype=fake.dtype, device=fake.device)
        if fake.requires_grad and torch.is_grad_enabled():
            local = _join(local, fake, stands_for)
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


def _join(local: Tensor, fake: Tensor, stands_for: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The empty result, joined to just those tensors that its fake depends on: so it is on the mesh, too.

    An edge more or less would send a gradient on this rank alone.

    Args:
        local: The empty.
        fake: The result of the global call.
        stands_for: Fake leaves, and the tensors that they stand for.
    """
    reached = _leaves_of(fake)
    on = [(leaf, t) for leaf, t in stands_for if any(leaf is x for x in reached)]
    if not on:
        return local
    leaves, tensors = [leaf for leaf, _ in on], [t for _, t in on]
    return _Joined.apply(local, fake, leaves, *tensors)  # pyright: ignore[reportReturnType]


def _leaves_of(fake: Tensor) -> list[Tensor]:
    """The leaves that a tensor depends on."""
    if fake.grad_fn is None:
        return [fake]
    found: list[Tensor] = []
    stack: list[Any] = [fake.grad_fn]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):  # the node of a leaf
            found.append(node.variable)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                stack.append(other)
    return found


class _Joined(torch.autograd.Function):
    """An empty result that depends on its operands, with gradients of nothing, which depend on what they would."""

    @staticmethod
    def forward(local: Tensor, fake: Tensor, leaves: list[Tensor], *operands: Tensor) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.fake, ctx.leaves, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)  # as nodes of kernels: of nothing comes nothing

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        operands, g = ctx.saved_tensors, grads[0]
        if g is None:
            return None, None, None, *[None] * len(operands)
        empties = [torch.zeros_like(t) for t in operands]
        if not torch.is_grad_enabled():
            return None, None, None, *empties
        with without_modes():
            fake = torch.empty_like(ctx.fake, requires_grad=g.requires_grad)
            back = torch.autograd.grad(
                ctx.fake, ctx.leaves, fake, create_graph=True, allow_unused=True
            )
        stands_for = [(fake, g), *zip(ctx.leaves, operands)]
        stands_for = [(leaf, t) for leaf, t in stands_for if t.requires_grad]
        out = (
            _join(e, b, stands_for) if b is not None and b.requires_grad else e
            for e, b in zip(empties, back)
        )
        return None, None, None, *out
