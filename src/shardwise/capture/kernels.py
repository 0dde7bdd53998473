"""The strides that a kernel really gives: fake ones say something else for some calls on transposed tensors.

``batch_norm`` gives a contiguous result for any input, its fake one like the input; the same with the backwards of
``smooth_l1_loss`` and ``log_softmax``, and with products of tensors in different orders. What is recorded after such a
call (a ``view``, or a copy in its place) would not fit what is there at a run. So where an input is not contiguous the
kernel itself is asked, once for each geometry, on zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.compat import (
    direct_op,
    is_fake,
    storage_id,
    tree_flatten,
    tree_unflatten,
    without_modes,
)
from shardwise.recording import record_with

MAX_KNOWN = 8192
_ATEN = torch.ops.aten
_TRUSTED = {  # their fake kernels are right, and they are frequent or dear
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.clone.default,
    _ATEN.cat.default,
    _ATEN.sum.default,
    _ATEN.sum.dim_IntList,
    _ATEN.mean.dim,
    _ATEN.embedding.default,
}
_known: dict[Any, list[tuple[int, ...] | None] | None] = {}


def as_run(func: Any, args: Any, kwargs: Any, result: Any, mode: Any) -> Any:
    """The result of a call on fakes, with the strides that the kernel gives.

    Args:
        func: The ATen overload.
        args: Its arguments, with fakes in them.
        kwargs: Those by name.
        result: What the fake kernel gave.
        mode: The mode of the fakes.
    """
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if not _doubtful(func, given):
        return result
    key = _key(func, args, kwargs)
    if key not in _known:
        if len(_known) > MAX_KNOWN:
            _known.clear()
        _known[key] = _asked(func, args, kwargs)
    real = _known[key]
    outs, tree = tree_flatten(result)
    if real is None or len(real) != len(outs):
        return result
    inside = {storage_id(x) for x in given}
    for i, (x, stride) in enumerate(zip(outs, real)):
        if stride is not None and isinstance(x, Tensor) and storage_id(x) not in inside:
            outs[i] = _strided(x, stride, mode)
    return tree_unflatten(outs, tree)


def _doubtful(func: Any, given: list[Tensor]) -> bool:
    """Whether the fake kernel of a call may be wrong."""
    if func in _TRUSTED or func.namespace != "aten" or func.is_view or func._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags or not func._schema.returns:
        return False
    if all(x.is_contiguous() for x in given):
        return False
    if any(x.layout is not torch.strided or x.device.type == "meta" for x in given):
        return False
    if torch.Tag.pointwise not in func.tags:
        return True
    first = given[0]
    return not _dense(first) or any(
        x.shape != first.shape or x.stride() != first.stride() for x in given
    )


def _dense(x: Tensor) -> bool:
    """Whether the elements fill their memory, each once."""
    size = 1
    for stride, n in sorted(zip(x.stride(), x.shape)):
        if n != 1 and stride != size:
            return False
        size *= n
    return True


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    return (
        func,
        str(tree),
        *[
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else repr(x)
            for x in leaves
        ],
    )


def _asked(func: Any, args: Any, kwargs: Any) -> list[tuple[int, ...] | None] | None:
    """The strides of what the kernel gives for zeros; None if it takes none."""
    leaves, tree = tree_flatten((args, kwargs))
    try:
        with without_modes(), record_with(None), torch.no_grad():
            own_args, own_kwargs = tree_unflatten([_zeros(x) for x in leaves], tree)
            outs = tree_flatten(direct_op(func)(*own_args, **own_kwargs))[0]
    except (RuntimeError, ValueError, IndexError, NotImplementedError):
        return None
    return [x.stride() if isinstance(x, Tensor) else None for x in outs]


def _zeros(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    zeros = torch.zeros(size, dtype=x.dtype, device=x.device)
    return zeros.as_strided(x.shape, x.stride())


def _strided(x: Tensor, stride: tuple[int, ...], mode: Any) -> Tensor:
    """A fake like another, in other strides."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), stride)) or not x.numel():
        return x
    assert is_fake(x), "fake kernels give fakes"
    with without_modes(), mode:
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)
