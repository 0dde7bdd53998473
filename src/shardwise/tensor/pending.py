"""A DTensor whose move is under way: ``redistribute(..., async_op=True)``.

It knows its layout at once. The first thing that touches its values waits for them; from then on it is a plain
``DTensor``. So the hot path, which looks at the exact class, knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Mover
from shardwise.comm.many import Pending
from shardwise.compat import make_wrapper
from shardwise.program.spec import Spec
from shardwise.tensor.dtensor import DTensor, wrap


class PendingDTensor(DTensor):
    """See the module."""

    @property
    def _local(self) -> Tensor:
        local = vars(self)["_pending"].wait()
        del vars(self)["_pending"]
        self.__class__ = DTensor  # pyright: ignore[reportAttributeAccessIssue]
        self._local = local  # pyright: ignore[reportAttributeAccessIssue]
        return local

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Wait for what the call touches, then answer it as for any DTensor."""
        for x in _tensors((args, kwargs or {})):
            if isinstance(x, PendingDTensor):
                x._local  # noqa: B018  asked for, so it is waited for
        kinds = tuple(DTensor if t is PendingDTensor else t for t in types)
        return DTensor.__torch_function__(func, kinds, args, kwargs)


def _tensors(x: Any) -> Iterator[Any]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _tensors(y)


def start(how: Mover, local: Tensor, out: Spec) -> DTensor:
    """Begin a move; the DTensor that waits for it at its first use."""
    now = how.now()
    if not now.steps or not now.communicates or now.settles_extremum:
        y = now(local)
        return wrap(y.view_as(y) if y is local else y, out)
    device = torch.device(out.device_type) if out.device_type != "cpu" else local.device
    r = make_wrapper(
        PendingDTensor, out.shape, strides=out.stride, dtype=out.dtype, device=device
    )
    vars(r)["_pending"] = Pending(now, local)
    r._spec = out
    return r
