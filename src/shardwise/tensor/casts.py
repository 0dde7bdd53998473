"""Entering a call: a plain tensor, or one on a slice of the mesh, becomes replicated over missing axes.

The value does not change. Its gradient would be this rank's contribution only, so it is summed over the
axes that were missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.groups import Group
from shardwise.comm.transport import current
from shardwise.layout.mesh import Mesh
from shardwise.tensor.dtensor import DTensor


def onto(t: Tensor, mesh: Mesh) -> Tensor:
    """The local tensor of ``t`` as an operand on ``mesh``."""
    if isinstance(t, DTensor):
        own = t._spec.layout.mesh
        if own is mesh or own == mesh or not t._local.requires_grad:
            return t._local
        axes = own.axes_in(mesh) or ()
        missing = tuple(a for a in range(mesh.ndim) if a not in axes)
        return _cast(t._local, mesh, missing, t._spec.transport)
    if not t.requires_grad or not torch.is_grad_enabled():
        return t
    return _cast(t, mesh, tuple(range(mesh.ndim)), current())


def _cast(x: Tensor, mesh: Mesh, axes: tuple[int, ...], transport: object) -> Tensor:
    rank_view = current()
    coord = mesh.coordinate_of(rank_view.rank)
    if coord is None or not axes:
        return x
    tag = "*".join(mesh.axis_name(a) for a in axes)
    return Group(rank_view, mesh.group_ranks(axes, coord), tag).cast(x)
