"""``load_state_dict(assign=True)`` with plain values: they get the layout of the parameter they replace.

Torch would put the plain tensor in the place of the DTensor, and the module would no longer be distributed
without a word. What is a DTensor already is assigned as it is, in its own layout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.compat import on_load
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.metadata import like


def _load(
    original: Any, module: nn.Module, state: Any, prefix: str, metadata: Any, *rest: Any
) -> Any:
    if metadata.get("assign_to_params_buffers", False):
        state = _laid_out(module, state, prefix)
    return original(module, state, prefix, metadata, *rest)


def _laid_out(module: nn.Module, state: Any, prefix: str) -> Any:
    """The state dict with the module's own plain values laid out like what they replace."""
    changed: dict[str, Any] = {}
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        if (
            not isinstance(own, DTensor)
            or not isinstance(value, Tensor)
            or isinstance(value, DTensor)
        ):
            continue
        if value.shape == own.shape and not value.is_meta:
            changed[prefix + name] = like(own, value)
    return {**state, **changed} if changed else state


on_load(_load)
