"""Meshes that talk: making them from the running program, and what a mesh asks the transport."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.profile import profile
from shardwise.comm.transport import current
from shardwise.errors import MeshError
from shardwise.layout.mesh import Mesh, entered_mesh, refuse_backend


class _Runtime:
    """Answers a mesh's questions from the current transport."""

    def rank(self) -> int:
        return current().rank

    def group(self, ranks: tuple[int, ...]) -> Any:
        return current().group(ranks)

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        known = getattr(group, "ranks", None)  # of virtual ranks
        return tuple(dist.get_process_group_ranks(group) if known is None else known)

    def tensor(self, values: Sequence[int], shape: tuple[int, ...]) -> Any:
        return torch.tensor(values, dtype=torch.int64, device="cpu").reshape(shape)

    def profile(self, mesh: Mesh, given: Any) -> Any:
        return profile(mesh, given)


Mesh.runtime = _Runtime()


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: None = None,
) -> Mesh:
    """A mesh over ranks 0, 1, ... of the world, starting the process group if needed.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        mesh_shape: Size of each axis.
        mesh_dim_names: Name of each axis; optional.
        backend_override: For torch's sake; anything but None is refused.

    Raises:
        MeshError: The mesh is larger than the world, or the names do not fit.
    """
    refuse_backend(backend_override)
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(int(n) for n in mesh_shape)
    size, world = math.prod(shape), current().world_size
    if size > world:
        raise MeshError(
            f"a mesh of shape {shape} needs {size} ranks; the world has {world}.",
            tries=[f"torchrun --nproc-per-node={size} ...", f"shardwise.simulate(fn, {size})"],
        )
    if min(shape, default=1) < 1:
        raise MeshError(f"a mesh of shape {shape} has an axis without ranks.")
    names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
    return Mesh.of(device_type, shape, tuple(range(size)), names)


def default_device_type() -> str:
    """Where tensors go when no mesh says so."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def as_mesh(mesh: Any) -> Mesh:
    """Our mesh for what the caller gave: ours, torch's DeviceMesh, or None.

    None is the mesh of the enclosing ``with mesh:``, else one over the world.

    Raises:
        MeshError: It is none of these.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        return entered_mesh() or init_device_mesh(
            default_device_type(), (current().world_size,)
        )
    if hasattr(mesh, "device_type") and hasattr(mesh, "mesh"):  # torch's DeviceMesh
        names = getattr(mesh, "mesh_dim_names", None)
        return Mesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)
    raise MeshError(
        f"not a device mesh: {mesh!r}.", tries=["init_device_mesh(device_type, shape)"]
    )
