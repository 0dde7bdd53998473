"""Full backward hooks of modules: they see DTensors, in the dual layouts of inputs and outputs.

Torch sets these hooks up through a custom Function of its own and then looks for its node among the grad_fns
of what comes back. Here it gets the local tensors; the hooks on the node are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from shardwise.compat import backward_hook_core
from shardwise.program.spec import Spec
from shardwise.tensor.backward import given
from shardwise.tensor.dtensor import DTensor, wrap, wrap_like

_on_plain = backward_hook_core(BackwardHook)


class _Node:
    """A graph node whose hooks are given DTensors."""

    __slots__ = ("node", "specs")

    def __init__(self, node: Any, specs: list[Spec | None]) -> None:
        self.node, self.specs = node, specs

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        """Hook the node; gradients of what was a DTensor are DTensors."""
        specs = self.specs

        def on_locals(into: tuple[Any, ...], out: tuple[Any, ...]) -> Any:
            got = hook(_seen(into, specs), _seen(out, specs))
            if got is None:
                return None
            return tuple(
                g if spec is None or g is None else given(spec, g)
                for g, spec in zip(got, specs)
            )

        return self.node.register_hook(on_locals)


def _seen(grads: tuple[Any, ...], specs: list[Spec | None]) -> tuple[Any, ...]:
    return tuple(
        g if spec is None or g is None else wrap_like(g, spec.layout.dual(), spec.transport)
        for g, spec in zip(grads, specs)
    )


def _apply_on_tensors(self: Any, fn: Callable[[Any], None], args: Any) -> Any:
    """Set the hooks up on the locals of ``args``."""
    if not any(isinstance(a, DTensor) for a in args):
        return _on_plain(self, fn, args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
    locals_ = tuple(a._local if isinstance(a, DTensor) else a for a in args)
    out, at = _on_plain(self, lambda node: fn(_Node(node, specs)), locals_)
    if at is None:
        return args, None
    wrapped = [wrap(t, a._spec) if isinstance(a, DTensor) else t for t, a in zip(out, args)]
    return (tuple(wrapped) if type(args) is tuple else type(args)(*wrapped)), at


backward_hook_core(BackwardHook, _apply_on_tensors)
