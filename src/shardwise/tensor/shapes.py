"""Calls about the shape alone: in-place ones (``t_``, ``squeeze_``, ...), and ``view_as`` and its kin."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import AliasError, UnsupportedError
from shardwise.tensor.overrides import override

_T = torch.Tensor


_NAMES = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_")
_OPS = [getattr(torch.ops.aten, name) for name in _NAMES]  # as they come through the dispatcher


@override(
    *(getattr(_T, name) for name in _NAMES),
    *(getattr(op, o) for op in _OPS for o in op.overloads()),
)
def _reshape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, name = args[0], func.__name__.partition(".")[0]
    local = x._local
    if local.requires_grad and local.is_leaf:
        raise UnsupportedError(
            f"{name} of a leaf that requires grad; use the form that returns a new tensor"
        )
    y = getattr(_T, name[:-1])(x, *args[1:], **kwargs)
    if "_view_of" in y.__dict__ and "_view_of" not in x.__dict__ and local._is_view():
        raise AliasError(
            f"{name} needs communication here, and would cut this view from its base; use x.{name[:-1]}()"
        )
    spec = y._spec if "_view_of" in x.__dict__ else y._spec.guards or y._spec
    x._become(y._local, spec)
    return x


@override(_T.view_as, _T.reshape_as, _T.expand_as)
def _like_another(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
    return getattr(x, func.__name__.removesuffix("_as"))(other.shape)
