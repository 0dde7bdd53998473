"""Ways to transform a function that do not reach into DTensors: they raise instead of being silently wrong."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.compat import FORWARD_MODE, on_jit_trace
from shardwise.errors import UnsupportedError
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.overrides import override


@override(*FORWARD_MODE)
def _forward_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        "forward-mode derivatives do not reach into DTensors.",
        tries=["torch.autograd.functional.jvp, which uses reverse mode twice", "local_map: use it on local tensors there"],
    )


def refuse_tracing() -> None:
    """``torch.jit.trace`` would keep the local operations of one rank, as constants."""
    raise UnsupportedError(
        "torch.jit.trace cannot record calls on DTensors.",
        tries=["shardwise.capture records a step", "torch.compile runs the calls as they are"],
    )


def _check_trace(func: Any, inputs: list[Any]) -> None:
    found = any(isinstance(x, DTensor) for x in inputs)
    if isinstance(func, nn.Module):
        found = found or any(isinstance(p, DTensor) for p in (*func.parameters(), *func.buffers()))
    if found:
        refuse_tracing()


on_jit_trace(_check_trace)
