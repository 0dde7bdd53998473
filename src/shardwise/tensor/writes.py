"""Writing through a view that needed communication, and so is a copy: ``w[7].fill_(0)`` on sharded rows.

The write is done on the copy and then brought to the base. Where the way there is not known it raises: it is
never lost.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import AliasError
from shardwise.tensor.dtensor import DTensor, place
from shardwise.tensor.views import Origin, version
from shardwise.tensor.whole import writes

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
    origin: Origin = view.__dict__["_view_of"]
    if origin.restore is None:
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
    origin.restore(value)
    view._local = place(value, layout.dims, layout.partial, layout.mesh)
    view.__dict__["_view_of"] = origin._replace(version=version(origin.root))
    return view
