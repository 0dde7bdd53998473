"""``local_map``: a function on local pieces as a function on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import LayoutError
from shardwise.layout.layout import parse
from shardwise.layout.mesh import Mesh
from shardwise.tensor.crossings import from_local, resolve
from shardwise.tensor.dtensor import DTensor, wrap


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Make a function on local tensors take and return DTensors.

    Args:
        func: Gets each DTensor argument's local piece; other arguments pass.
        out_placements: Placements of the one result, or a tuple with those of each (None: not a tensor).
        in_placements: For each argument its required placements, or None for any; not given, all pass.
        in_grad_placements: For each argument the layout in which ``func``'s backward produces its gradient.
            Not given, the gradient is exact without a word: the local functions of all ranks are taken as
            one, so a replicated argument's gradient is the sum of what the ranks contribute.
        device_mesh: The mesh; by default that of the first DTensor.
        redistribute_inputs: Move arguments that are placed otherwise, instead of raising.

    Returns:
        The function on DTensors. Without DTensor arguments it calls ``func`` itself.

    Raises:
        LayoutError: An argument is placed otherwise than ``in_placements`` says, or results contradict
            ``out_placements``.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    shapes: dict[Any, tuple[tuple[int, ...], ...]] = {}

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        first = next((a for a in args if isinstance(a, DTensor)), None)
        if first is None:
            return func(*args, **kwargs)
        mesh = (
            resolve(device_mesh, None, ())[0] if device_mesh is not None else first.device_mesh
        )
        placed = [
            _placed(i, a, _entry(in_placements, i), mesh, redistribute_inputs)
            if isinstance(a, DTensor)
            else a
            for i, a in enumerate(args)
        ]
        locals_ = [
            _enter(a, _entry(in_grad_placements, i), in_grad_placements is not None)
            if isinstance(a, DTensor)
            else a
            for i, a in enumerate(placed)
        ]
        result = func(*locals_, **kwargs)
        key = (mesh, tuple(a._spec.layout for a in placed if isinstance(a, DTensor)))
        return _leave(result, out_placements, mesh, shapes, key, in_grad_placements is not None)

    return mapped


def _entry(per_argument: Any, i: int) -> Any:
    if per_argument is None or i >= len(per_argument):
        return None
    return per_argument[i]


def _placed(i: int, x: DTensor, wanted: Any, mesh: Mesh, move: bool) -> DTensor:
    if wanted is None:
        return x
    dims, partial = parse(mesh, wanted, x.shape)
    layout = x._spec.layout
    if (layout.dims, layout.partial) == (dims, partial):
        return x
    if not move:
        want = layout.with_placement(dims, partial)
        raise LayoutError(
            f"local_map: argument {i} is {layout}, in_placements asks for {want}; redistribute it first, or pass "
            "redistribute_inputs=True"
        )
    return x.redistribute(mesh, layout.with_placement(dims, partial))


def _enter(x: DTensor, grad_placements: Any, contract: bool) -> Tensor:
    if contract and torch.is_grad_enabled():
        return x.to_local(grad_placements=grad_placements or x.placements)
    return x._local.view_as(x._local)


def _leave(
    result: Any,
    out_placements: Any,
    mesh: Mesh,
    shapes: dict[Any, Any],
    key: Any,
    contract: bool,
) -> Any:
    many = isinstance(result, (tuple, list))
    results: Sequence[Any] = result if many else (result,)
    placements = (
        out_placements
        if many and _is_per_result(out_placements, len(results))
        else (out_placements,) * len(results)
    )
    if len(placements) != len(results):
        raise LayoutError(
            f"local_map: {len(results)} results, out_placements has {len(placements)} entries"
        )
    known = shapes.get(key)
    wrapped: list[Any] = []
    for i, (local, where) in enumerate(zip(results, placements)):
        if not isinstance(local, Tensor) or where is None:
            wrapped.append(local)
            continue
        local = local if local.is_contiguous() else local.contiguous()
        whole = (
            None if known is None else known[i]
        )  # not known: one small exchange of the pieces' shapes
        if contract:
            wrapped.append(from_local(local, mesh, where, whole is None, whole, None, None))
            continue
        shell = from_local(local.detach(), mesh, where, whole is None, whole, None, None)
        wrapped.append(wrap(local, shell._spec))
    if known is None:
        shapes[key] = tuple(tuple(w.shape) if isinstance(w, DTensor) else () for w in wrapped)
    return type(result)(wrapped) if many else wrapped[0]


def _is_per_result(out_placements: Any, count: int) -> bool:
    return (
        isinstance(out_placements, tuple)
        and len(out_placements) == count
        and all(p is None or isinstance(p, (list, tuple)) for p in out_placements)
    )
