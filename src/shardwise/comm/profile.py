"""How fast a mesh talks: measured with a few small collectives, or given; the same on all ranks."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from shardwise.comm.transport import Transport, current
from shardwise.errors import MeshError
from shardwise.layout.mesh import Mesh
from shardwise.route.cost import Profile, default_profile

SMALL, LARGE = 8, 2**20  # bytes
TURNS = 5


def profile(mesh: Mesh, given: Any = None) -> Profile:
    """See ``Mesh.profile``."""
    transport = current()
    if mesh.coordinate_of(transport.rank) is None:
        return given if isinstance(given, Profile) else default_profile(mesh)
    if given is None:
        found = _agreed(_measured(mesh, transport), mesh, transport)
    else:
        if not isinstance(given, Profile) or len(given.latency_us) != mesh.ndim:
            raise MeshError(
                f"a profile of {mesh} needs one latency and one bandwidth for each axis, not {given!r}.",
                tries=["Profile.nodes(mesh.shape)", "Profile((65.0,), (1000.0,))"],
            )
        found = given
        said = transport.all_gather_object(given, mesh.ranks)
        if any(p != given for p in said):
            raise MeshError(f"the ranks were given different profiles for {mesh}.")
    transport.state.setdefault("profiles", {})[mesh] = found
    transport.state.get("movers", {}).clear()  # their routes may have been chosen otherwise
    for table in transport.state.get("programs", ()):
        table.clear()
    return found


def _measured(mesh: Mesh, transport: Transport) -> list[tuple[float, float]]:
    """This rank's latency (us) and bandwidth (bytes per us) along each axis."""
    coord = mesh.coordinate_of(transport.rank)
    assert coord is not None, "checked by the caller"
    out: list[tuple[float, float]] = []
    for axis, n in enumerate(mesh.shape):
        if n == 1:
            out.append((0.0, 1e6))
            continue
        ranks = mesh.group_ranks((axis,), coord)
        times: list[float] = []
        for size in (SMALL, LARGE):
            x = torch.zeros(size, dtype=torch.uint8, device=mesh.device_type)
            took: list[float] = []
            for _ in range(TURNS + 1):  # the first makes the group
                transport.barrier(ranks)
                start = time.perf_counter()
                got = transport.all_gather(x, ranks, tag="profile")
                got[-1, -1].item()  # it has arrived
                took.append((time.perf_counter() - start) * 1e6)
            times.append(min(took[1:]))
        latency = max(times[0], 0.1)
        moved = (LARGE - SMALL) * (n - 1)
        out.append((latency, moved / max(times[1] - times[0], moved * 1e-6, 1e-3)))
    return out


def _agreed(mine: list[tuple[float, float]], mesh: Mesh, transport: Transport) -> Profile:
    """The medians of what all ranks measured."""
    everyone = transport.all_gather_object(mine, mesh.ranks)
    axes = range(mesh.ndim)
    return Profile(
        tuple(statistics.median(m[a][0] for m in everyone) for a in axes),
        tuple(statistics.median(m[a][1] for m in everyone) for a in axes),
    )
