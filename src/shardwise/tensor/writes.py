"""Writing through a view that needed communication, and so is a copy: ``w[7].fill_(0)`` on sharded rows.

Where the view is an index or a reshape of its base, the write is done on the copy and then brought to the
base by ``base[index] = copy``. Elsewhere it raises: it is never lost.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import torch

from shardwise.errors import AliasError
from shardwise.tensor.dtensor import DTensor, place
from shardwise.tensor.whole import version, writes

_T = torch.Tensor
Restore = Callable[[DTensor], None]

# They change the object, not the values.
_NO_WRITES = frozenset(
    (
        "requires_grad_",
        "detach_",
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "squeeze_",
        "unsqueeze_",
        "share_memory_",
    )
)
_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "ravel"))


def restorer(
    func: Any, base: DTensor, args: tuple[Any, ...], shape: tuple[int, ...]
) -> Restore | None:
    """How the value of a moved view gets back into its base; None where that is not known.

    Args:
        func: The call that made the view.
        base: What it was called on.
        args: Its further arguments, without tensors.
        shape: Shape of the view.
    """
    if func is _T.__getitem__:
        return lambda value: base.__setitem__(args[0], value)
    name, ndim = getattr(func, "__name__", ""), base.ndim
    if name == "select" and len(args) == 2:
        at = (*(slice(None),) * (args[0] % ndim), args[1])
        return lambda value: base.__setitem__(at, value)
    if name == "narrow" and len(args) == 3 and type(args[1]) is int:
        first = args[1] % max(base.shape[args[0]], 1)
        span = (*(slice(None),) * (args[0] % ndim), slice(first, first + args[2]))
        return lambda value: base.__setitem__(span, value)
    if name == "diagonal":

        def scatter(value: DTensor) -> None:
            base.copy_(torch.diagonal_scatter(base, value, *args))

        return scatter
    same_elements = math.prod(shape) == base.numel() and base._spec.layout.is_contiguous
    if name in _RESHAPES and same_elements:

        def restore(value: DTensor) -> None:
            base.copy_(value.reshape(base.shape))

        return restore
    return None


def writes_to_copy(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call writes into a first argument that is a view that needed communication."""
    if not args or type(args[0]) is not DTensor or "_view_of" not in args[0].__dict__:
        return False
    name = getattr(func, "__name__", "").partition(".")[0]
    return name not in _NO_WRITES and writes(name)


def write_to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Carry such a call out, on the copy and on the base.

    Raises:
        AliasError: It is not known how the value gets back into the base.
    """
    view: Any = args[0]
    base_local, _, restore = view.__dict__["_view_of"]
    if restore is None:
        raise AliasError(
            f"{func.__name__} would write into a view that needed communication: it is a copy, and the write "
            "would not reach its base.",
            tries=[
                "write into the base: x[index] = value",
                "clone() the view, if the base is to stay",
            ],
        )
    layout = view._spec.layout
    value: Any = view.clone()
    func(value, *args[1:], **kwargs)
    restore(value)
    view._local = place(value, layout.dims, layout.partial, layout.mesh)
    view.__dict__["_view_of"] = (base_local, version(base_local), restore)
    return view
