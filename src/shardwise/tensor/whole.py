"""The bottom of the ladder: gather the operands, run the call whole, keep the results replicated.

Right for every deterministic call. What the call writes into is written back to where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import mover
from shardwise.errors import AliasError, StrictError, UnsupportedError
from shardwise.events import FallbackEvent, emit, observing, user_site
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import join
from shardwise.program.compile import fill, flat_results
from shardwise.program.modes import strict_mode
from shardwise.program.spec import spec_of
from shardwise.rules.norm import HIDDEN_WRITES
from shardwise.tensor.casts import onto
from shardwise.tensor.dtensor import DTensor, place, wrap
from shardwise.tensor.views import mark_copy, version


def run_whole(
    func: Any, tensors: Sequence[Tensor], tree: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call on whole operands."""
    mesh = join([t._spec.layout.mesh for t in tensors if isinstance(t, DTensor)])
    transport = next(t._spec.transport for t in tensors if isinstance(t, DTensor))
    name = getattr(func, "__name__", str(func))
    locals_: list[Tensor] = []
    moved: list[bool] = []
    for t in tensors:
        local = onto(t, mesh)
        if isinstance(t, DTensor):
            layout = t._spec.layout if t._spec.layout.mesh is mesh else t._spec.layout.on(mesh)
            move = mover(layout, layout.replicated(), transport)
            if move.communicates and strict_mode():
                raise StrictError(
                    f"{name} has no rule for {layout}, and strict() forbids to gather it and run whole.",
                    tries=[
                        "redistribute the operand to Replicate() first, if the gather is meant"
                    ],
                )
            if move.communicates and observing():
                emit(FallbackEvent(name, f"no rule for {layout}", user_site()))
            moved.append(bool(move.moves))
            local = move(local)
        else:
            moved.append(False)
        locals_.append(local)
    versions = [version(t) for t in locals_]
    result = func(*fill(tree, locals_), **fill(kwargs, locals_))
    for i, (t, local, fresh, before) in enumerate(zip(tensors, locals_, moved, versions)):
        written = version(local) != before if before is not None else i == 0 and writes(name)
        hidden = func in HIDDEN_WRITES and not t.requires_grad and t.ndim == 1
        if fresh and (written or hidden) and isinstance(t, DTensor):
            _write_back(name, t, local)

    wrapped = _rewrap(
        result, lambda x: _wrap_whole(x, tensors, locals_, moved, mesh, transport)
    )
    for i, (x, t) in enumerate(zip(flat_results(result), flat_results(wrapped))):
        base = _copied_base(x, tensors, locals_, moved)
        if base is not None and base is not t:
            mark_copy(t, i, base, func, fill(tree, tensors), fill(kwargs, tensors))  # pyright: ignore[reportArgumentType]
    return wrapped


def _rewrap(x: Any, wrapped: Callable[[Tensor], Tensor]) -> Any:
    """Wrap the tensors in a tree of results (not by a closure that calls itself: it would keep them alive)."""
    if isinstance(x, Tensor):
        return wrapped(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[_rewrap(y, wrapped) for y in x])
    if isinstance(x, (tuple, list)) and type(x) is not torch.Size:  # torch.return_types too
        return type(x)([_rewrap(y, wrapped) for y in x])
    return x


def _wrap_whole(
    x: Tensor, tensors: Any, locals_: Any, moved: Any, mesh: Any, transport: Any
) -> Tensor:
    for t, local in zip(tensors, locals_):
        if x is local:
            return t
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else x.layout
        raise UnsupportedError(
            f"a result that is {kind} cannot be a DTensor.",
            tries=["x.full_tensor(), and go on there"],
        )
    layout = Layout.of(mesh, None, x.shape, x.stride(), x.dtype)
    return wrap(x, spec_of(layout, transport))


def _copied_base(x: Tensor, tensors: Any, locals_: Any, moved: Any) -> DTensor | None:
    """The argument whose gathered copy a result is a view of, or None."""
    if x._base is None:
        return None
    for t, local, fresh in zip(tensors, locals_, moved):
        if (
            fresh
            and isinstance(t, DTensor)
            and x.untyped_storage()._cdata == local.untyped_storage()._cdata
        ):
            return t
    return None


def _write_back(name: str, target: DTensor, whole: Tensor) -> None:
    """Bring what was written into the gathered copy back to the pieces."""
    if "_view_of" in target.__dict__:
        raise AliasError(
            f"{name} would write into a view that needed communication: it is a copy, and the write "
            "would not reach its base.",
            tries=[
                "write into the base: x[index] = value",
                "clone() the view, if the base is to stay",
            ],
        )
    layout = target._spec.layout
    if tuple(whole.shape) != layout.shape:
        raise UnsupportedError(
            f"{name} would change the shape of a DTensor in place.",
            tries=["the form that returns a new tensor"],
        )
    back = mover(layout.replicated(), layout, target._spec.transport)
    target._local.copy_(back(whole))


def write_into(target: DTensor, value: DTensor) -> DTensor:
    """``target.copy_(value)`` for a value of the same shape: the target keeps its layout."""
    if "_view_of" in target.__dict__:
        raise AliasError(
            "this would write into a view that needed communication: it is a copy, and the write would not "
            "reach its base.",
            tries=[
                "write into the base: x[index] = value",
                "clone() the view, if the base is to stay",
            ],
        )
    layout = target._spec.layout
    if value.shape != target.shape:
        value = value.expand(target.shape)  # pyright: ignore[reportAssignmentType]
    target._local.copy_(place(value, layout.dims, layout.partial, layout.mesh))
    return target


def writes_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into a plain tensor where autograd looks on."""
    return (
        bool(args)
        and isinstance(args[0], Tensor)
        and not isinstance(args[0], DTensor)
        and torch.is_grad_enabled()
        and writes(getattr(func, "__name__", ""))
        and any(isinstance(x, Tensor) and x.requires_grad for x in _leaves((args, kwargs)))
    )


def write_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write DTensors into a plain tensor that is, or will be, part of each rank's own program.

    They leave as ``full_tensor()`` lets them: the gradient of the plain tensor is whole on every rank, and must not be
    summed over the ranks.
    """
    leaving: list[DTensor] = [x for x in _leaves((args, kwargs)) if isinstance(x, DTensor)]
    if any(x._spec.coord is None for x in leaving):
        return args[0]  # a rank outside the mesh has nothing to write
    whole = {id(x): x.full_tensor() for x in leaving}
    return func(*_replaced(args, whole), **_replaced(kwargs, whole))


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for x in tree for leaf in _leaves(x)]
    if isinstance(tree, dict):
        return [leaf for x in tree.values() for leaf in _leaves(x)]
    if isinstance(tree, slice):
        return [tree.start, tree.stop, tree.step]
    return [tree]


def _replaced(tree: Any, whole: dict[int, Tensor]) -> Any:
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_replaced(x, whole) for x in tree])
    if kind is dict:
        return {name: _replaced(x, whole) for name, x in tree.items()}
    if kind is slice:
        return slice(*(_replaced(x, whole) for x in (tree.start, tree.stop, tree.step)))
    return whole.get(id(tree), tree) if kind is DTensor else tree


def check_writable(
    func: Any, tensors: Sequence[Tensor], tree: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse, before anything is sent, an in-place call whose result its target cannot hold.

    Raises:
        RuntimeError: The result has another shape, or a dtype that cannot be cast; torch's words.
    """
    pure = functional_form(func)
    if pure is None or func.__name__ in _ANY_RESULT:
        return
    meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    try:
        with torch.no_grad():
            value = pure(*fill(tree, meta), **fill(kwargs, meta))
    except Exception:  # no meta form, or a call that torch refuses: the call itself will tell
        return
    target = tensors[0]
    if not isinstance(value, Tensor):
        return
    if value.shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(value.shape)}"
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )


_ANY_RESULT = frozenset(
    ("copy_", "resize_", "resize_as_", "set_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_",
     "unsqueeze_")
)  # fmt: skip


def writes(name: str) -> bool:
    """Whether a call of this name writes into its first argument (asked where versions are not counted)."""
    return name in ("__setitem__", *_IN_PLACE_OPERATORS) or (
        name.endswith("_") and not name.endswith("__")
    )


_IN_PLACE_OPERATORS = {
    "__iadd__": "add",
    "__isub__": "sub",
    "__imul__": "mul",
    "__itruediv__": "div",
}


def functional_form(func: Any) -> Any:
    """The method that computes what an in-place method writes, or None."""
    name = getattr(func, "__name__", "")
    if name in _IN_PLACE_OPERATORS:
        return getattr(torch.Tensor, _IN_PLACE_OPERATORS[name])
    if (name.startswith("__") and name.endswith("__")) or not name.endswith("_"):
        return None
    return getattr(torch.Tensor, name[:-1], None) or getattr(torch, name[:-1], None)
