"""Calls on memory, which a DTensor has in pieces: ``as_strided``, ``resize_`` and their kin.

Strides that name dims of the tensor are slices and a new order of dims, so nothing moves. Others are read off the
gathered whole. What would change the size of memory that others may share raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import GradientError, UnsupportedError
from shardwise.layout.boxes import contiguous_stride, restride
from shardwise.layout.layout import Layout
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.overrides import override
from shardwise.tensor.views import fresh, mark_copy

_T: Any = torch.Tensor


@override(torch.as_strided, _T.as_strided)
def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Slices where the strides name dims; else a view of the gathered whole, which follows its base."""
    names = ("input", "size", "stride", "storage_offset")
    given = dict(zip(names, args)) | kwargs
    x, size, stride = given["input"], tuple(given["size"]), tuple(given["stride"])
    offset = given.get("storage_offset")
    if not isinstance(x, DTensor):
        raise UnsupportedError("as_strided of a plain tensor takes plain numbers.")
    fresh(x)
    layout = x._spec.layout
    whole = x
    if any(layout.dims):
        seen = _as_slices(x, size, stride, offset or 0)
        if seen is not None:
            return seen
        if tuple(restride(layout.shape, layout.stride)) != tuple(layout.stride):
            raise UnsupportedError(
                "as_strided of a view that is in pieces would read the memory between them.",
                tries=["x.contiguous() first", "reshape, unfold or slices"],
            )
        whole = x.redistribute(placements=layout.replicated())
    seen = torch.as_strided(whole._local, size, stride, offset)
    shown = Layout(  # of a pending sum the addends, without a move
        layout.mesh,
        ((),) * seen.ndim,
        whole._spec.layout.partial,
        tuple(seen.shape),
        tuple(seen.stride()),
        seen.dtype,
    )
    out = wrap(seen, spec_of(shown, x._spec.transport))
    if whole is not x or "_view_of" in x.__dict__:
        mark_copy(out, 0, x, func, args, kwargs)
    return out


def _as_slices(
    x: DTensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> DTensor | None:
    """The same elements as slices of ``x`` in another order of dims; None if they are none."""
    layout = x._spec.layout
    own = {s: d for d, (n, s) in enumerate(zip(layout.shape, layout.stride)) if n > 1}
    if len(own) != sum(n > 1 for n in layout.shape) or 0 in own or 0 in size:
        return None
    start: dict[int, int] = {}
    for s in sorted(own, reverse=True):
        start[own[s]], offset = divmod(offset, s)
    if offset or any(n > 1 and s not in own for n, s in zip(size, stride)):
        return None
    order = [own[s] for n, s in zip(size, stride) if n > 1]
    if len(set(order)) != len(order):
        return None
    index: list[Any] = [start.get(d, 0) for d in range(layout.ndim)]
    for d, n in zip(order, (n for n in size if n > 1)):
        index[d] = slice(index[d], index[d] + n)
    stops = [i.stop if isinstance(i, slice) else i + 1 for i in index]
    if any(stop > n for stop, n in zip(stops, layout.shape)):
        return None
    seen: Any = x[tuple(index)].permute(tuple([sorted(order).index(d) for d in order]))
    for at, n in enumerate(size):
        if n == 1:
            seen = seen.unsqueeze(at)
    return seen


@override(_T.as_strided_, torch.as_strided_)
def _as_strided_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x: Any = args[0]
    seen = x.as_strided(*args[1:], **kwargs)
    if "_view_of" in seen.__dict__:
        raise UnsupportedError(
            "as_strided_ works on memory, which a DTensor has in pieces.",
            tries=["x.as_strided(size, stride)", "reshape, unfold or slices"],
        )
    x._become(seen._local, seen._spec)
    return x


@override(_T.resize_, _T.resize_as_, torch.resize_as_)
def _resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape over the same memory, where that is whole; a tensor without elements gets new memory."""
    x: Any = args[0]
    sizes = args[1:] or tuple(kwargs.values())
    first = sizes[0] if sizes else ()
    shape = torch.Size(
        first.shape
        if isinstance(first, torch.Tensor)
        else first
        if isinstance(first, (tuple, list))
        else [n for n in sizes if type(n) is int]
    )
    if x.requires_grad:
        raise GradientError("cannot resize variables that require grad")
    if shape == x.shape:
        return x
    layout = x._spec.layout
    if "_view_of" in x.__dict__ or not (layout.is_replicated or x.numel() == 0):
        raise UnsupportedError(
            f"{func.__name__} to {tuple(shape)} works on memory, which a DTensor has in pieces.",
            tries=["reshape, expand or slices, which return a new tensor"],
        )
    dims = layout.chunked().dims if len(shape) == layout.ndim else ((),) * len(shape)
    partial = (None,) * layout.mesh.ndim
    spec = spec_of(
        Layout(
            layout.mesh, dims, partial, tuple(shape), contiguous_stride(shape), layout.dtype
        ),
        x._spec.transport,
    )
    if layout.is_replicated and spec.coord is not None:
        x._local.resize_(spec.local_shape)
        x._become(x._local, spec)
    else:
        x._become(x._local.new_empty(spec.local_shape), spec)
    return x
