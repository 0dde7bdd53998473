"""Function transforms over DTensors: those that reach into them, and those that raise instead of being wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any

from torch import Tensor, nn

from shardwise.compat import (
    FORWARD_MODE,
    DisableTorchFunction,
    Door,
    functorch_active,
    is_functorch_wrapped,
    on_jit_trace,
    on_make_fx,
    on_transform,
)
from shardwise.errors import UnsupportedError
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.overrides import override


@override(*FORWARD_MODE)
def _forward_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        "forward-mode derivatives do not reach into DTensors.",
        tries=[
            "torch.autograd.functional.jvp, which uses reverse mode twice",
            "local_map: use it on local tensors there",
        ],
    )


def under_transform(
    func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call inside a ``torch.func`` transform, by its ATen calls if it has to do with the transform.

    The transform works on the wrapper as on any tensor; what it leaves to do comes through the dispatcher.
    """
    if _transformed((args, kwargs)):
        with DisableTorchFunction():
            return func(*args, **kwargs)
    with Door():
        return _Guard.hot.__func__(DTensor, func, types, args, kwargs)


class _Guard:
    """Turns the hot path off while a transform runs in some thread: it would run its local calls inside it."""

    depth = 0
    lock = Lock()
    hot: Any = DTensor.__dict__["__torch_function__"]
    methods = {
        name: DTensor.__dict__[name] for name in ("redistribute", "to_local", "full_tensor")
    }

    @classmethod
    def begin(cls) -> None:
        with cls.lock:
            cls.depth += 1
            if cls.depth == 1:
                DTensor.__torch_function__ = classmethod(_slow)  # pyright: ignore[reportAttributeAccessIssue]
                for name, method in cls.methods.items():
                    setattr(DTensor, name, _aside(method))

    @classmethod
    def end(cls) -> None:
        with cls.lock:
            cls.depth -= 1
            if cls.depth == 0:
                DTensor.__torch_function__ = cls.hot
                for name, method in cls.methods.items():
                    setattr(DTensor, name, method)


def _aside(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if functorch_active() is None:
            return method(*args, **kwargs)
        with Door():
            return method(*args, **kwargs)

    return call


def _slow(
    cls: Any,
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if functorch_active() is None:
        return _Guard.hot.__func__(cls, func, types, args, kwargs)
    return under_transform(func, types, args, kwargs or {})


on_transform(_Guard.begin, _Guard.end)


def _transformed(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return is_functorch_wrapped(tree)
    if isinstance(tree, (tuple, list)):
        return any(map(_transformed, tree))
    return isinstance(tree, dict) and any(map(_transformed, tree.values()))


def refuse_tracing() -> None:
    """A trace would keep the local operations of one rank, and the pieces as constants."""
    raise UnsupportedError(
        "torch.jit.trace and make_fx cannot record calls on DTensors.",
        tries=["shardwise.capture records a step", "torch.compile runs the calls as they are"],
    )


def _check_trace(func: Any, inputs: list[Any]) -> None:
    found = any(isinstance(x, DTensor) for x in inputs)
    if isinstance(func, nn.Module):
        found = found or any(
            isinstance(p, DTensor) for p in (*func.parameters(), *func.buffers())
        )
    if found:
        refuse_tracing()


on_jit_trace(_check_trace)
on_make_fx(_check_trace)
