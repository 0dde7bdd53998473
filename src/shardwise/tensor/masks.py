"""``torch.masked`` on DTensors: its functions are Python above the calls that arrive here."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compat import on_input_mask
from shardwise.tensor.dtensor import DTensor


def _input_mask(original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """The mask in the shape of the input, as bools."""
    mask = kwargs.get("mask")
    if mask is None or not (isinstance(input, DTensor) or isinstance(mask, DTensor)):
        return original(input, *args, **kwargs)
    if mask.shape != input.shape:
        if mask.ndim > input.ndim:
            raise IndexError(
                f"a mask of {mask.ndim} dims does not broadcast to an input of {input.ndim}"
            )
        mask = torch.broadcast_to(mask.clone(), input.shape)
    return mask.to(dtype=torch.bool)


on_input_mask(_input_mask)
