"""Fractional pooling: the random places of its windows are drawn as one device would, each rank its own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from shardwise.compat import NN_BUILTINS
from shardwise.layout import boxes
from shardwise.layout.layout import Layout
from shardwise.program.spec import spec_of
from shardwise.random import Draw
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.overrides import override
from shardwise.tensor.random import drawn, run_in_step
from shardwise.tensor.views import fresh

_NAMES = (
    "input",
    "kernel_size",
    "output_size",
    "output_ratio",
    "return_indices",
    "_random_samples",
)
_POOLS = {
    getattr(F, f"fractional_max_pool{d}d{form}"): d
    for d in (2, 3)
    for form in ("", "_with_indices")
}


def _samples(x: DTensor, dims: int) -> DTensor:
    """A random number for each sample, channel and dim of space, cut like the samples and channels."""
    fresh(x)
    old = x._spec.layout
    batch = old.ndim - dims - 1
    shape = (*(old.shape[:batch] or (1,)), old.shape[batch], dims)
    cut = (*(old.dims[:batch] or ((),)), old.dims[batch], ())
    none = (None,) * old.mesh.ndim
    stride = boxes.contiguous_stride(shape)
    spec = spec_of(Layout(old.mesh, cut, none, shape, stride, old.dtype), x._spec.transport)
    return wrap(drawn(Draw("uniform", (0.0, 1.0)), spec, x.device), spec)


@override(*_POOLS)
def _fractional_max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(_NAMES, args)) | kwargs
    x, dims, size = given["input"], _POOLS[func], given.get("output_size")
    ratio, samples = given.get("output_ratio"), given.get("_random_samples")
    if isinstance(ratio, (int, float)) and dims == 3:  # in two dims torch refuses one number
        ratio = (ratio,) * dims
    known = isinstance(x, DTensor) and x.ndim in (dims + 1, dims + 2) and x.numel()
    if known and size is None and isinstance(ratio, (tuple, list)) and len(ratio) == dims:
        size = [int(n * r) for n, r in zip(x.shape[-dims:], ratio)]
    if not known or size is None:
        return run_in_step(func, args, kwargs)  # torch says what is wrong
    if samples is None:
        samples = _samples(x, dims)
    pool = getattr(NN_BUILTINS, f"fractional_max_pool{dims}d")
    value, places = pool(x, given["kernel_size"], size, samples)
    wants = given.get("return_indices", False) or func.__name__.endswith("_with_indices")
    return (value, places) if wants else value
