"""``torch.autograd.backward`` and ``torch.autograd.grad`` on DTensors: run on the locals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import mover
from shardwise.errors import GradientError, LayoutError
from shardwise.program.spec import Spec
from shardwise.tensor.dtensor import DTensor, wrap_like
from shardwise.tensor.gradients import seed
from shardwise.tensor.overrides import override


def _as_list(x: Any) -> list[Any]:
    if x is None:
        return []
    return list(x) if isinstance(x, (tuple, list)) else [x]


def _local(t: Any) -> Any:
    return t._local if isinstance(t, DTensor) else t


def _seeds(tensors: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """For each output its gradient as a local tensor in the output's dual layout."""
    out: list[Any] = []
    for t, g in zip(tensors, grads):
        if not isinstance(t, DTensor):
            out.append(_local(g))
        elif g is None:
            if t._spec.shape.numel() != 1 and t._local.requires_grad:
                raise GradientError(
                    f"grad can be implicitly created only for scalar outputs, not for shape {tuple(t.shape)}.",
                    tries=["reduce it first: x.sum().backward()", "pass a gradient of the same shape"],
                )
            out.append(seed(t._spec, t._local))
        else:
            out.append(given(t._spec, g))
    return out


def given(spec: Spec, g: Tensor) -> Tensor:
    """A gradient in any layout (a plain one counts as replicated) as a local in the dual of ``spec``."""
    dual = spec.layout.dual().with_dtype(g.dtype)
    if tuple(g.shape) != tuple(spec.shape):
        raise LayoutError(f"a gradient of shape {tuple(g.shape)} for a tensor of shape {tuple(spec.shape)}")
    if isinstance(g, DTensor):
        src = g._spec.layout if g._spec.layout.mesh is dual.mesh else g._spec.layout.on(dual.mesh)
        local = g._local
    else:
        src, local = dual.replicated(), g
    return mover(src, src.with_placement(dual.dims, dual.partial), spec.transport)(local)


@override(torch.autograd.backward)
def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Seed the outputs in their dual layouts and run on the locals."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args)) | kwargs
    tensors = _as_list(given.pop("tensors"))
    grads = given.pop("grad_tensors", None)
    grads = _as_list(grads) if grads is not None else [None] * len(tensors)
    inputs = given.pop("inputs", None)
    if inputs is not None:
        given["inputs"] = [_local(t) for t in _as_list(inputs)]
    torch.autograd.backward([_local(t) for t in tensors], _seeds(tensors, grads), **given)


@override(torch.autograd.grad)
def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients in the dual layouts of the inputs; nothing is communicated for them."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = dict(zip(names, args)) | kwargs
    outputs, inputs = _as_list(given.pop("outputs")), _as_list(given.pop("inputs"))
    grads = given.pop("grad_outputs", None)
    grads = _as_list(grads) if grads is not None else [None] * len(outputs)
    if given.pop("is_grads_batched", False):
        return _row_by_row(outputs, inputs, grads, given)
    got = torch.autograd.grad(
        [_local(t) for t in outputs], [_local(t) for t in inputs], _seeds(outputs, grads), **given
    )
    return tuple(
        wrap_like(g, t._spec.layout.dual(), t._spec.transport) if isinstance(t, DTensor) and g is not None else g
        for t, g in zip(inputs, got)
    )


def _row_by_row(outputs: list[Any], inputs: list[Any], grads: list[Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """A batch of gradients, one backward after the other: moves are not vectorized."""
    count = next((g.shape[0] for g in grads if g is not None), None)
    if count is None:
        raise GradientError("is_grads_batched needs grad_outputs with a batch dim")
    last = given.pop("retain_graph", None) or given.get("create_graph")
    rows = [
        torch.autograd.grad(
            outputs,
            inputs,
            [None if g is None else g[i] for g in grads],
            retain_graph=bool(last) or i < count - 1,
            **given,
        )
        for i in range(count)
    ]
    return tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows))
