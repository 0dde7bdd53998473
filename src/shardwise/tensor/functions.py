"""Custom ``torch.autograd.Function``s on DTensors, in full.

Torch runs such a Function outside ``__torch_function__``: its forward would see grad mode off and the
gradient would be lost without a word. Here ``apply`` on a DTensor goes over a bridge: a Function of the same
name on the *local* tensors, whose forward and backward call the user's with DTensors. Gradients enter the
user's backward in the dual layouts of the results; those that it returns are moved to the duals of the
arguments, whatever layout they have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from shardwise.compat import FUNCTION_KIND, native_apply, on_apply, sets_up_context
from shardwise.errors import GradientError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh, join
from shardwise.layout.placement import Replicate
from shardwise.program.spec import Spec, spec_of
from shardwise.tensor.backward import given
from shardwise.tensor.casts import onto, refuse_tangent
from shardwise.tensor.dtensor import DTensor, wrap, wrap_like
from shardwise.tensor.gradients import unwatched

# The code of every function that @once_differentiable returns.
_ONCE = once_differentiable(lambda ctx, *grads: grads).__code__


class Context:
    """The ``ctx`` that the user's forward and backward see: torch's, with DTensors in and out.

    Holds torch's node only while the user's code runs (a cycle would keep tensors until a collection).
    """

    def __init__(self) -> None:
        self._node: Any = None
        self._saved: list[Spec | None] = []

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """See ``torch.autograd.function.FunctionCtx.save_for_backward``."""
        self._saved = [_spec(t) for t in tensors]
        self._node.save_for_backward(*map(_local, tensors))

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Forward-mode derivatives do not reach into DTensors: nothing to do."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """See ``torch.autograd.function.FunctionCtx.mark_dirty``."""
        self._node.mark_dirty(*map(_local, tensors))

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """See ``torch.autograd.function.FunctionCtx.mark_non_differentiable``."""
        self._node.mark_non_differentiable(*map(_local, tensors))

    def set_materialize_grads(self, value: bool) -> None:
        """See ``torch.autograd.function.FunctionCtx.set_materialize_grads``."""
        self._node.set_materialize_grads(value)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What ``save_for_backward`` was given."""
        kept = self._node.saved_tensors
        return tuple(t if spec is None else wrap(t, spec) for t, spec in zip(kept, self._saved))

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each argument of ``apply`` whether its gradient is wanted."""
        return self._node.needs_input_grad[1:]

    def __getattr__(self, name: str) -> Any:
        node = self.__dict__.get("_node")
        if node is None:
            raise AttributeError(name)
        return getattr(node, name)


class _Call:
    """One application: what went in and came out, as layouts."""

    __slots__ = ("args", "ins", "outs", "user")

    def __init__(self, user: Any, args: tuple[Any, ...]) -> None:
        self.user, self.args = user, args
        self.ins = [_spec(a) for a in args]
        self.outs: list[Spec | None] = []


class _Bridge(torch.autograd.Function):
    """Base of the bridges: on locals, calls the user's forward and backward on DTensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        user, context = call.user, Context()
        ctx.call, ctx.context = call, context
        args = tuple(a if isinstance(a, DTensor) else t for a, t in zip(call.args, tensors))
        call.args = ()
        context._node = ctx
        try:
            if sets_up_context(user):
                out = user.forward(*args)
                user.setup_context(context, args, out)
            else:
                out = user.forward(context, *args)
        finally:
            context._node = None
        outs = out if isinstance(out, tuple) else (out,)
        call.outs = [_spec(t) for t in outs]
        locals_ = tuple(_local(t) for t in outs)
        return locals_ if isinstance(out, tuple) else locals_[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        function = _backward_of(call.user)
        if getattr(function, "__code__", None) is _ONCE:
            inner = function.__wrapped__
            return once_differentiable(lambda ctx, *grads: _run_backward(ctx, inner, grads))(
                ctx, *grads
            )
        return _run_backward(ctx, function, grads)


def _run_backward(ctx: Any, function: Any, grads: tuple[Any, ...]) -> Any:
    call: _Call = ctx.call
    seen = [
        g if spec is None or g is None else wrap_like(g, spec.layout.dual(), spec.transport)
        for g, spec in zip(grads, call.outs)
    ]
    context = ctx.context
    context._node = ctx
    try:
        if getattr(call.user, "boxed_grads_call", False):
            got = function(context, seen)
        elif call.user is CheckpointFunction:
            with unwatched():
                got = function(context, *seen)
        else:
            got = function(context, *seen)
    finally:
        context._node = None
    got = got if isinstance(got, tuple) else (got,)
    needed = ctx.needs_input_grad[1:]
    return (None, *(_give(call, i, g, needed) for i, g in enumerate(got)))


def _give(call: _Call, i: int, g: Any, needed: tuple[bool, ...]) -> Any:
    """What the user's backward returned for an argument, as a local gradient in the argument's dual layout."""
    if not isinstance(g, Tensor) or i >= len(needed) or not needed[i]:
        return g if i >= len(needed) or not isinstance(g, Tensor) else None
    spec = call.ins[i]
    if spec is not None:
        if g.shape != spec.shape:
            g = _fit(g, spec.layout, call.user)
        return given(spec, g)
    if isinstance(g, DTensor):  # of a plain argument, which was not cast: the whole of it
        return g.full_tensor(grad_placements=[Replicate()])
    return g


def _fit(g: Tensor, layout: Layout, user: Any) -> Tensor:
    """A gradient of a shape that the argument's broadcasts to, summed to it; as torch does."""
    try:
        fits = torch.broadcast_shapes(layout.shape, g.shape) == g.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise GradientError(
            f"{user.__name__}.backward returned a gradient of shape {tuple(g.shape)} for an argument of shape "
            f"{layout.shape}"
        )
    lead = g.ndim - layout.ndim
    spread = [lead + d for d, n in enumerate(layout.shape) if n == 1 and g.shape[lead + d] != 1]
    if spread:
        g = g.sum(spread, keepdim=True)
    return g.sum(tuple(range(lead))) if lead else g


def _backward_of(user: Any) -> Any:
    base = torch.autograd.Function
    if user.backward is not base.backward and user.vjp is not base.vjp:
        raise GradientError(
            f"{user.__name__} defines both backward and vjp; define one of them"
        )
    return user.vjp if user.vjp is not base.vjp else user.backward


def _bridge_of(user: Any) -> Any:
    """The bridge of a Function: one class each, so that nodes have the user's name."""
    found = user.__dict__.get("_shardwise_bridge")
    if found is None:
        kept = {
            "clear_saved_tensors_on_access": getattr(
                user, "clear_saved_tensors_on_access", False
            )
        }
        found = user._shardwise_bridge = FUNCTION_KIND(user.__name__, (_Bridge,), kept)
    return found


def _bridged(user: Any, args: tuple[Any, ...]) -> Any:
    mesh = join([a._spec.layout.mesh for a in args if isinstance(a, DTensor)])
    args = tuple(_on(a, mesh) if isinstance(a, Tensor) else a for a in args)
    call = _Call(user, args)
    tensors = [_local(a) for a in args]
    out = _bridge_of(user).apply(call, *tensors)
    if not isinstance(out, tuple):
        return _wrapped(out, call.outs[0], args)
    return tuple(_wrapped(t, spec, args) for t, spec in zip(out, call.outs))


def _on(a: Tensor, mesh: Mesh) -> Tensor:
    """An argument on the mesh of the call; see ``casts``. A plain one stays plain, and enters where it is used."""
    if not isinstance(a, DTensor):
        refuse_tangent(a)
        return a
    if a._spec.layout.mesh is mesh or a._spec.layout.mesh == mesh:
        return a
    return wrap(onto(a, mesh), spec_of(a._spec.layout.on(mesh), a._spec.transport))


def _wrapped(t: Any, spec: Spec | None, args: tuple[Any, ...]) -> Any:
    if spec is None:
        return t
    for a in args:  # written in place: it is the argument itself
        if isinstance(a, DTensor) and a._local is t:
            return a
    return wrap(t, spec)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply``: over the bridge if a DTensor is among the arguments."""
    for a in args:
        if type(a) is DTensor:
            return _bridged(cls, args)
    out = native_apply(cls, *args, **kwargs)
    if type(out) is DTensor or (type(out) is tuple and any(type(t) is DTensor for t in out)):
        _refuse_loss(cls, args)
    return out


def _refuse_loss(cls: Any, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        raise GradientError(
            f"{cls.__name__} made a DTensor from plain tensors that require grad; their gradient would be lost. "
            "Make the arguments DTensors before apply (DTensor.from_local, distribute_tensor)"
        )


def _local(t: Any) -> Any:
    return t._local if isinstance(t, DTensor) else t


def _spec(t: Any) -> Spec | None:
    if not isinstance(t, DTensor):
        return None
    return t._spec.guards or t._spec


on_apply(_apply)
