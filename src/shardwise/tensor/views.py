"""Views that needed communication, and so are copies: ``w[7]`` or ``w.view(-1)`` on sharded rows.

They follow their base as a view would: one that is used after its base was written to is taken again first.
How what is written into one gets into its base is worked out here, and done in ``writes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import AliasError
from shardwise.program.compile import flat_results
from shardwise.program.spec import guarded
from shardwise.tensor.dtensor import _CROSSINGS, DTensor

_T = torch.Tensor
Restore = Callable[[DTensor], None]


class Origin(NamedTuple):
    """Where a view that is a copy comes from.

    Attributes:
        root: The local tensor of the base of all views in a chain.
        version: How often the root had been written to when the copy was made.
        restore: How a new value gets back into the base; None where that is not known.
        again: Takes the view again.
    """

    root: Tensor
    version: int | None
    restore: Restore | None
    again: Callable[[], DTensor]


_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "ravel"))


def version(t: Tensor) -> int | None:
    """How often a tensor was written to; inference tensors do not count."""
    return None if t.is_inference() else t._version


def mark_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Note of all results of a call on a DTensor that they are copies instead of views of it."""
    copies: list[Any] = flat_results(result)
    for i, t in enumerate(copies):
        mark_copy(t, i, args[0], func, args, kwargs)


def mark_copy(
    t: DTensor,
    i: int,
    base: DTensor,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Note where a copy that a call made instead of a view comes from.

    Args:
        t: The copy.
        i: Which result of the call it is.
        base: The argument that it would be a view of.
        func: The call.
        args: Its arguments.
        kwargs: And those by keyword.
    """
    if _copied_anyway(func, base, args[1:], kwargs):
        return
    grad = torch.is_grad_enabled()
    earlier = base.__dict__.get("_view_of")
    root, written = base._local, version(base._local)
    if earlier is not None:
        root, written = earlier.root, earlier.version

    def again() -> DTensor:
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return flat_results(func(*args, **kwargs))[i]  # pyright: ignore[reportReturnType]

    restore = None
    if args and args[0] is base:
        if not kwargs:
            restore = _restorer(func, base, args[1:], tuple(t.shape), t.dtype)
        if restore is None and t.dtype == base.dtype:
            restore = _by_position(func, base, args[1:], kwargs, i)
    t._view_of, t._spec = Origin(root, written, restore, again), guarded(t._spec)


def _copied_anyway(
    func: Any, base: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the call copies on one device too: a reshape that the strides do not allow as a view."""
    if getattr(func, "__name__", "") not in _RESHAPES:
        return False
    x = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    y = func(x, *args, **kwargs)
    return y.untyped_storage()._cdata != x.untyped_storage()._cdata


def fresh(t: DTensor) -> None:
    """Take a view that is a copy again, if its base has been written to since."""
    origin: Origin | None = t.__dict__.get("_view_of")
    if origin is None or version(origin.root) == origin.version:
        return
    now = origin.again()
    t._local, t._view_of = now._local, now._view_of


_CROSSINGS["fresh"] = fresh


def _restorer(
    func: Any, base: DTensor, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Restore | None:
    """How the value of a view gets back into its base, for the views that are made most."""
    if func is _T.__getitem__:
        return lambda value: base.__setitem__(args[0], value)
    name, ndim = getattr(func, "__name__", ""), base.ndim
    if name == "select" and len(args) == 2:
        at = (*(slice(None),) * (args[0] % ndim), args[1])
        return lambda value: base.__setitem__(at, value)
    if name == "narrow" and len(args) == 3 and type(args[1]) is int:
        first = args[1] % max(base.shape[args[0]], 1)
        span = (*(slice(None),) * (args[0] % ndim), slice(first, first + args[2]))
        return lambda value: base.__setitem__(span, value)
    if name == "diagonal":

        def scatter(value: DTensor) -> None:
            base.copy_(torch.diagonal_scatter(base, value, *args))

        return scatter
    if name == "view_as_complex":
        return lambda value: _copy(base, torch.view_as_real(value))
    same_elements = math.prod(shape) == base.numel() and base._spec.layout.is_contiguous
    if dtype == base.dtype:
        if name in _RESHAPES and same_elements:
            return lambda value: _copy(base, value.reshape(base.shape))
    elif name == "view" and len(args) == 1 and isinstance(args[0], torch.dtype):
        return lambda value: _copy_bits(base, value)
    return None


def _copy(base: DTensor, value: Tensor) -> None:
    base.copy_(value)


def _copy_bits(base: DTensor, value: Tensor) -> None:
    with torch.no_grad():  # as in torch: of bits there is no gradient
        base.copy_(value.view(base.dtype))


def _by_position(
    func: Any, base: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any], i: int
) -> Restore | None:
    """For any other view: the same view of the elements' numbers says where each element goes."""
    if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        return None

    def restore(value: DTensor) -> None:
        numbers = torch.empty_strided(base.shape, base.stride(), dtype=torch.long)
        numbers.copy_(torch.arange(base.numel()).view(base.shape))
        places: Any = flat_results(func(numbers, *args, **kwargs))[i]
        if places.unique().numel() != places.numel():
            raise AliasError(
                f"{func.__name__} needed communication here, so its result is a copy, and as its elements overlap "
                "the write cannot be brought to the base.",
                tries=[
                    "write into the base: x[index] = value",
                    "clone() the view, if the base is to stay",
                ],
            )
        flat = base.reshape(-1).index_put((places.reshape(-1),), value.reshape(-1))
        base.copy_(flat.view(base.shape))

    return restore
