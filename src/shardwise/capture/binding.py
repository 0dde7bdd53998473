"""The cheapest Python function for a call: torch's own binding where it is the same call, else the overload itself.

``torch.mul(x, y)`` parses its arguments in half the time of ``aten.mul.Tensor(x, y)``. Whether it is the same call is
not believed but tried: the binding runs once on the node's fakes, and what reaches the dispatcher must be this
overload, once, with these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.ir import Node, Value, substitute, values_in
from shardwise.capture.number import HINT
from shardwise.compat import NN_BUILTINS, TorchDispatchMode, direct_op, quiet_fakes

_BEST: dict[Any, Callable[..., Any]] = {}  # by overload and kinds of arguments
# Below autograd these are the same call as what has a binding.
_AS: dict[Any, Callable[..., Any]] = {torch.ops.aten._unsafe_view.default: Tensor.view}


def binding(n: Node) -> Callable[..., Any]:
    """What to call for a node that is a call."""
    if n.target in _AS:
        return _AS[n.target]
    key = n.target, _kinds(n.args), tuple((k, _kinds(a)) for k, a in n.kwargs.items())
    found = _BEST.get(key)
    if found is None:
        found = next((c for c in _candidates(n.target) if _is_same(c, n)), None)
        found = _BEST[key] = direct_op(n.target) if found is None else found
    return found


def _kinds(x: Any) -> Any:
    if isinstance(x, Value):
        return x.kind, None if x.fake is None else (x.fake.ndim, x.fake.dtype, x.fake.device)
    if isinstance(x, (tuple, list)):
        inner = tuple(dict.fromkeys(map(_kinds, x)))  # lists of the like count once
        return type(x), min(len(x), 2), inner
    return type(x)


def _candidates(overload: Any) -> Iterator[Callable[..., Any]]:
    name = overload._schema.name.removeprefix("aten::")
    if not overload._schema.name.startswith("aten::"):
        return
    places = (Tensor, torch, NN_BUILTINS)
    for place in places:
        call = getattr(place, name, None)
        if callable(call) and type(call).__name__ in _NATIVE:
            yield call


# Functions of torch's C++ bindings; what is written in Python may do more than it says.
_NATIVE = ("method_descriptor", "builtin_function_or_method", "wrapper_descriptor")


class _Seen(TorchDispatchMode):
    """Notes the calls that reach the dispatcher."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode, self.calls = mode, []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note it, and answer it."""
        self.calls.append((func, args, kwargs or {}))
        with self.mode:
            return func(*args, **(kwargs or {}))


def _is_same(call: Callable[..., Any], n: Node) -> bool:
    """Whether a binding, called as the node is, is the node's call."""
    fakes: dict[Value, Any] = {
        v: HINT if v.fake is None else v.fake.detach().clone()
        for v in values_in((n.args, n.kwargs))
    }
    args, kwargs = substitute(n.args, fakes), substitute(n.kwargs, fakes)
    mode: Any = next(
        (getattr(f, "fake_mode", None) for f in fakes.values() if isinstance(f, Tensor)), None
    )
    if mode is None:
        return False
    seen = _Seen(mode)
    try:
        with torch.no_grad(), seen, quiet_fakes():
            call(*args, **kwargs)
    except Exception:
        return False
    calls = [c for c in seen.calls if c[0].namespace not in ("prim", "profiler")]
    return (
        len(calls) == 1
        and calls[0][0] is n.target
        and _equal(_named(n.target, *calls[0][1:]), _named(n.target, args, kwargs))
    )


def _named(overload: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, those left out at their defaults."""
    out = {a.name: a.default_value for a in overload._schema.arguments}
    out.update(zip(out, args))
    return out | kwargs


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(x, b[k]) for k, x in a.items())
    return a == b and isinstance(a, float) == isinstance(b, float)
