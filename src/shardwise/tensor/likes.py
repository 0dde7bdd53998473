"""``zeros_like`` and its kin, and ``x.new_zeros`` and its kin: only the local piece is made.

``*_like`` keeps the layout; where ``x`` has a pending reduction the result is replicated. ``x.new_*`` of
``x``'s own shape is sharded like ``x``; of any other it is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UnsupportedError
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.layout import Layout
from shardwise.program.spec import Spec, spec_of
from shardwise.random import Draw
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.overrides import override
from shardwise.tensor.random import drawn, memory_order, overloads, random_override, settled

_T = torch.Tensor
Make = Callable[..., Tensor]  # (sizes, dtype=, device=) -> a contiguous tensor


def make_local(make: Make, spec: Spec, device: torch.device | str) -> Tensor:
    """The local piece of a new tensor, in memory order."""
    order = memory_order(spec.layout)
    if order is None:
        return make(spec.local_shape, dtype=spec.dtype, device=device)
    local = make([spec.local_shape[d] for d in order], dtype=spec.dtype, device=device)
    return local.permute(sorted(range(len(order)), key=order.__getitem__))


def filled(value: Any) -> Make:
    """Makes tensors full of a number."""
    return lambda sizes, dtype, device: torch.full(sizes, value, dtype=dtype, device=device)


def target_device(x: DTensor, device: Any) -> torch.device:
    """Where a new tensor lives: the mesh's kind of device, or meta.

    Raises:
        UnsupportedError: Any other device.
    """
    if device is None:
        return x.device
    device, kind = torch.device(device), x._spec.layout.mesh.device_type
    if device.type not in (kind, "meta"):
        raise UnsupportedError(
            f"a DTensor on a {kind} mesh has its pieces there, not on {device}; make it with shardwise's factories on a "
            f"{device.type} mesh"
        )
    return device


def _like_spec(x: DTensor, kwargs: dict[str, Any]) -> Spec:
    """The spec of a new tensor like ``x``."""
    if kwargs.get("layout") not in (None, torch.strided):
        raise UnsupportedError(
            f"a DTensor is strided; layout={kwargs['layout']} is not supported"
        )
    memory_format = kwargs.get("memory_format")
    spec, layout = x._spec, settled(x._spec.layout)
    if memory_format not in (None, torch.preserve_format) or not layout.is_contiguous:
        table: dict[Any, Layout] = spec.transport.state.setdefault("likes", {})
        key = (layout, memory_format)
        if key not in table:
            meta = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device="meta"
            )
            got = torch.empty_like(meta, memory_format=memory_format or torch.preserve_format)
            table[key] = layout.with_tensor(layout.shape, got.stride(), layout.dtype)
        layout = table[key]
    return spec_of(layout.with_dtype(kwargs.get("dtype") or layout.dtype), spec.transport)


def _finished(local: Tensor, spec: Spec, kwargs: dict[str, Any]) -> DTensor:
    out = wrap(local, spec)
    return out.requires_grad_() if kwargs.get("requires_grad") else out


def _like(args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> DTensor:
    x: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
    spec = _like_spec(x, kwargs)
    return _finished(
        make_local(make, spec, target_device(x, kwargs.get("device"))), spec, kwargs
    )


@override(torch.empty_like, *overloads("empty_like"))
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args, kwargs, torch.empty)


@override(torch.zeros_like, *overloads("zeros_like"))
def _zeros_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args, kwargs, torch.zeros)


@override(torch.ones_like, *overloads("ones_like"))
def _ones_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args, kwargs, torch.ones)


@override(torch.full_like, *overloads("full_like"))
def _full_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[1] if len(args) > 1 else kwargs["fill_value"]
    value = value.item() if isinstance(value, Tensor) else value
    x: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "self", "fill_value")}
    if not isinstance(x, DTensor):  # the value was one
        return func(x, value, **rest)
    return _like((x,), rest, filled(value))


def _drawn_like(x: DTensor, what: Draw, kwargs: dict[str, Any]) -> DTensor:
    spec, device = _like_spec(x, kwargs), target_device(x, kwargs.get("device"))
    return _finished(drawn(what, spec, device, kwargs.get("generator")), spec, kwargs)


@random_override(torch.rand_like, *overloads("rand_like"))
def _rand_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _drawn_like(args[0] if args else kwargs["input"], Draw("uniform"), kwargs)


@random_override(torch.randn_like, *overloads("randn_like"))
def _randn_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _drawn_like(args[0] if args else kwargs["input"], Draw("normal"), kwargs)


@random_override(torch.randint_like, *overloads("randint_like"))
def _randint_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *bounds = args if args else (kwargs["input"],)
    low, high = (
        (0, *bounds) if len(bounds) == 1 else bounds if bounds else (kwargs.get("low", 0), None)
    )
    high = kwargs["high"] if high is None else high
    if "high" in kwargs and len(bounds) == 1:
        low = bounds[0]
    return _drawn_like(x, Draw("randint", (int(low), int(high))), kwargs)


# ---- new_* ----------------------------------------------------------------------------------------------


def _new_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if not args:
        return tuple(map(int, kwargs["size"]))
    return tuple(map(int, args[0] if isinstance(args[0], (tuple, list)) else args))


def _new(
    x: DTensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: Any,
    make: Make,
    kwargs: dict[str, Any],
) -> DTensor:
    if kwargs.get("layout") not in (None, torch.strided):
        raise UnsupportedError(
            f"a DTensor is strided; layout={kwargs['layout']} is not supported"
        )
    layout = settled(x._spec.layout)
    dims = layout.dims if size == layout.shape else ((),) * len(size)
    spec = spec_of(
        Layout(layout.mesh, dims, layout.partial, size, stride, dtype), x._spec.transport
    )
    return _finished(
        make_local(make, spec, target_device(x, kwargs.get("device"))), spec, kwargs
    )


def _new_plain(make: Make) -> Callable[..., DTensor]:
    def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        size = _new_size(args[1:], kwargs)
        return _new(
            args[0],
            size,
            contiguous_stride(size),
            kwargs.get("dtype") or args[0].dtype,
            make,
            kwargs,
        )

    return new


for _name, _make in (
    ("new_empty", torch.empty),
    ("new_zeros", torch.zeros),
    ("new_ones", torch.ones),
):
    override(getattr(_T, _name), *overloads(_name))(_new_plain(_make))


@override(_T.new_full, *overloads("new_full"))
def _new_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    given = dict(zip(("size", "fill_value"), args[1:])) | kwargs
    value = given["fill_value"]
    value = value.item() if isinstance(value, Tensor) else value
    size = _new_size((given["size"],), kwargs)
    return _new(
        x, size, contiguous_stride(size), kwargs.get("dtype") or x.dtype, filled(value), kwargs
    )


@override(_T.new_empty_strided, *overloads("new_empty_strided"))
def _new_empty_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    given = dict(zip(("size", "stride"), args[1:])) | kwargs
    size, stride = tuple(map(int, given["size"])), tuple(map(int, given["stride"]))
    return _new(x, size, stride, kwargs.get("dtype") or x.dtype, torch.empty, kwargs)
