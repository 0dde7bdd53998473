"""``torch.autograd.backward`` and ``torch.autograd.grad`` on DTensors: run on the locals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from shardwise.comm.execute import mover
from shardwise.compat import on_undefined_grad, run_backward
from shardwise.errors import GradientError, LayoutError
from shardwise.program.spec import Spec
from shardwise.tensor.casts import onto
from shardwise.tensor.dtensor import DTensor, wrap, wrap_like
from shardwise.tensor.gradient_edges import plain_edge, spec_of_edge
from shardwise.tensor.gradients import seed
from shardwise.tensor.overrides import override


def _as_list(x: Any) -> list[Any]:
    if x is None:
        return []
    return list(x) if isinstance(x, (tuple, list)) and not isinstance(x, GradientEdge) else [x]


def _local(t: Any) -> Any:
    return t._local if isinstance(t, DTensor) else plain_edge(t)


def _spec(t: Any) -> Spec | None:
    """Of a DTensor, or of the one whose edge this is."""
    return t._spec if isinstance(t, DTensor) else spec_of_edge(t)


def _seeds(tensors: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """For each output its gradient as a local tensor in the output's dual layout."""
    out: list[Any] = []
    for t, g in zip(tensors, grads):
        if not isinstance(t, DTensor):
            spec = spec_of_edge(t)
            out.append(_local(g) if spec is None or g is None else given(spec, g))
        elif g is None:
            if t._spec.shape.numel() != 1 and t._local.requires_grad:
                raise GradientError(
                    f"grad can be implicitly created only for scalar outputs, not for shape {tuple(t.shape)}.",
                    tries=[
                        "reduce it first: x.sum().backward()",
                        "pass a gradient of the same shape",
                    ],
                )
            out.append(seed(real_only(t._spec), t._local))
        else:
            out.append(given(t._spec, g))
    return out


def real_only(spec: Spec) -> Spec:
    """The spec of an output whose gradient is not given; of a complex one it must be."""
    if spec.dtype.is_complex:
        raise GradientError(
            f"grad can be implicitly created only for real scalar outputs but got {spec.dtype}",
            tries=["pass a gradient", "backward() of a real loss: x.abs().sum()"],
        )
    return spec


def given(spec: Spec, g: Tensor) -> Tensor:
    """A gradient in any layout (a plain one counts as replicated) as a local in the dual of ``spec``."""
    if isinstance(g, DTensor):
        known: dict[Any, Any] = spec.transport.state.setdefault("seeds", {})
        how = known.get((spec, g._spec))
        if how is not None:
            return how(g._local)
    dual = spec.layout.dual().with_dtype(g.dtype)
    if tuple(g.shape) != tuple(spec.shape):
        raise LayoutError(
            f"a gradient of shape {tuple(g.shape)} for a tensor of shape {tuple(spec.shape)}"
        )
    if isinstance(g, DTensor):
        src = (
            g._spec.layout if g._spec.layout.mesh is dual.mesh else g._spec.layout.on(dual.mesh)
        )
        local = g._local
    else:
        src, local = dual.replicated(), onto(g, dual.mesh)
    how = mover(src, src.with_placement(dual.dims, dual.partial), spec.transport)
    if isinstance(g, DTensor):
        if len(known) > 4096:
            known.clear()
        known[spec, g._spec] = how
    return how(local)


@override(torch.autograd.backward)
def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Seed the outputs in their dual layouts and run on the locals."""
    names = (
        "tensors",
        "grad_tensors",
        "retain_graph",
        "create_graph",
        "grad_variables",
        "inputs",
    )
    given = dict(zip(names, args)) | kwargs
    tensors = _as_list(given.pop("tensors"))
    grads = given.pop("grad_tensors", None)
    grads = _as_list(grads) if grads is not None else [None] * len(tensors)
    inputs = given.pop("inputs", None)
    if inputs is not None:
        given["inputs"] = [_local(t) for t in _as_list(inputs)]
        for t in _as_list(inputs):
            if isinstance(t, DTensor) and not t.is_leaf:
                vars(t)["_asked_for"] = True
    torch.autograd.backward([_local(t) for t in tensors], _seeds(tensors, grads), **given)


@override(torch.autograd.grad)
def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients in the dual layouts of the inputs; nothing is communicated for them."""
    return _grad(*args, **kwargs)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    outputs, inputs = _as_list(outputs), _as_list(inputs)
    grads = _as_list(grad_outputs) if grad_outputs is not None else [None] * len(outputs)
    how = {"allow_unused": allow_unused, "materialize_grads": materialize_grads}
    if is_grads_batched:
        return _row_by_row(outputs, inputs, grads, retain_graph, create_graph, how)
    retain = create_graph if retain_graph is None else retain_graph
    of, to = [_local(t) for t in outputs], [_local(t) for t in inputs]
    seeds = _seeds(outputs, grads)
    if materialize_grads or any(g is None for g in seeds):
        got = torch.autograd.grad(of, to, seeds, retain, create_graph, **how)
    else:  # the engine itself: what torch.autograd.grad checks has been checked
        got = run_backward(
            tuple(of),
            tuple(seeds),
            retain,
            create_graph,
            tuple(to),
            bool(allow_unused),
            accumulate_grad=False,
        )
    return tuple(
        [
            g if g is None or (spec := _spec(t)) is None else wrap_grad(g, spec)
            for t, g in zip(inputs, got)
        ]
    )


def wrap_grad(g: Tensor, spec: Spec) -> DTensor:
    """A gradient of a tensor with this spec, in the dual layout."""
    dual = spec.dual
    if dual.stride is None and g.dtype is dual.dtype:
        return wrap(g if g.is_contiguous() else g.contiguous(), dual)
    return wrap_like(g, dual.layout, spec.transport)


def _row_by_row(
    outputs: list[Any],
    inputs: list[Any],
    grads: list[Any],
    retain_graph: bool | None,
    create_graph: bool,
    how: dict[str, Any],
) -> tuple[Any, ...]:
    """A batch of gradients, one backward after the other: moves are not vectorized."""
    count = next((g.shape[0] for g in grads if g is not None), None)
    if count is None:
        raise GradientError("is_grads_batched needs grad_outputs with a batch dim")
    last = bool(retain_graph or create_graph)
    rows = [
        torch.autograd.grad(
            outputs,
            inputs,
            [None if g is None else g[i] for g in grads],
            retain_graph=last or i < count - 1,
            create_graph=create_graph,
            **how,
        )
        for i in range(count)
    ]
    return tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows))


on_undefined_grad(
    lambda x: x._local if isinstance(x, DTensor) else None,
    lambda x, local: wrap(local, x._spec),
)
