"""Entering a call: a plain tensor, or one on a slice of the mesh, becomes replicated over missing axes.

The value does not change. Its gradient would be this rank's contribution only, so it is summed over the
axes that were missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.groups import Group
from shardwise.comm.transport import current
from shardwise.compat import has_tangent
from shardwise.errors import UnsupportedError
from shardwise.layout.mesh import Mesh
from shardwise.tensor.dtensor import DTensor


def refuse_tangent(t: Tensor) -> None:
    """A forward-mode derivative would be lost where data moves.

    Raises:
        UnsupportedError: The plain tensor carries one.
    """
    if has_tangent(t):
        raise UnsupportedError(
            "forward-mode derivatives do not reach into DTensors.",
            tries=[
                "torch.autograd.functional.jvp, which uses reverse mode twice",
                "local_map: use it on local tensors there",
            ],
        )


def of_torch(t: Any) -> bool:
    """Whether this is a DTensor of torch's, which holds what ours holds."""
    return not isinstance(t, DTensor) and hasattr(t, "device_mesh") and hasattr(t, "placements")


def refuse_kind(t: Tensor) -> None:
    """What has no pieces that are strided tensors.

    Raises:
        UnsupportedError: The tensor is sparse or nested, or torch's DTensor.
    """
    if of_torch(t):
        raise UnsupportedError(
            "torch's DTensor and this one do not go together.",
            tries=[
                "distribute_tensor(x, mesh, placements): makes one of torch's to one of these"
            ],
        )
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else f"of layout {t.layout}"
        raise UnsupportedError(
            f"a tensor that is {kind} cannot be distributed, nor stand next to a DTensor.",
            tries=["x.to_dense()", "x.full_tensor() of the DTensor, and go on there"],
        )


def onto(t: Tensor, mesh: Mesh) -> Tensor:
    """The local tensor of ``t`` as an operand on ``mesh``."""
    if isinstance(t, DTensor):
        local = t._local
    else:
        refuse_tangent(t)
        local = t
    axes = _missing(t, mesh)
    return _cast(local, mesh, axes) if axes else local


def _missing(t: Tensor, mesh: Mesh) -> tuple[int, ...]:
    """The axes of ``mesh`` over which ``t`` is a replica that its gradient does not know of."""
    if not isinstance(t, DTensor):
        return tuple(range(mesh.ndim))
    own = t._spec.layout.mesh
    if own is mesh or own == mesh:
        return ()
    axes = own.axes_in(mesh) or ()
    return tuple(a for a in range(mesh.ndim) if a not in axes)


def _cast(x: Tensor, mesh: Mesh, axes: tuple[int, ...]) -> Tensor:
    transport = current()
    coord = mesh.coordinate_of(transport.rank)
    if coord is None or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    tag = "*".join(mesh.axis_name(a) for a in axes)
    return Group(transport, mesh.group_ranks(axes, coord), tag).cast(x)
