"""Estimated times: of a call from its flops and bytes, of a collective from the profile of its mesh.

```text
   call         call_us + max(flops / flops_per_us, bytes / bytes_per_us)    a view: view_us
   collective   latency + received bytes / bandwidth, of the slowest axis that it spans
```

They steer when things run, never what runs, nor the order of collectives: a rank whose pieces are smaller has other
estimates than its peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import functools
import itertools
from typing import Any

import torch

from shardwise.capture.ir import Node, Step, Value, flatten, sent_bytes, substitute
from shardwise.comm.execute import profile_of
from shardwise.layout.mesh import Mesh
from shardwise.route.cost import Profile, default_profile

_ATEN = torch.ops.aten
_LIKE = {  # what torch counts under another name
    "_scaled_dot_product_flash_attention_for_cpu": _ATEN._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
OVERLAP = 16  # a bucket's transfer takes so many latencies


@dataclass(frozen=True, slots=True)
class Device:
    """How fast one rank computes.

    Attributes:
        flops_per_us: Floating point operations of a matrix product in a microsecond (1 TFLOP/s is 1e6).
        bytes_per_us: Bytes that other calls read and write in a microsecond (1 GB/s is 1000).
        call_us: What a call costs however small.
        view_us: What a view costs.
    """

    flops_per_us: float
    bytes_per_us: float
    call_us: float = 3.0
    view_us: float = 1.0


CPU = Device(5e4, 1e4)  # one thread
GPU = Device(4e8, 2.5e6, 4.0, 0.0)


def device_of(step: Step) -> Device:
    """The default figures for where a step's tensors are."""
    for v, _ in step.inputs:
        if v.fake is not None and v.fake.ndim:
            return CPU if v.fake.device.type == "cpu" else GPU
    return CPU


def is_view(n: Node) -> bool:
    """Whether a node only shows memory that was there before."""
    return n.kind == "call" and not n.writes


@functools.cache
def _counter(packet: Any) -> Any:
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415  half of torch's compiler comes with it

    like = _LIKE.get(getattr(packet, "__name__", ""), packet)
    return flop_registry.get(like)


def is_heavy(n: Node) -> bool:
    """Whether a node is a matrix product, a convolution or an attention: by its name, a global fact."""
    return n.kind == "call" and _counter(getattr(n.target, "overloadpacket", None)) is not None


def flops(n: Node) -> int:
    """Floating point operations of a heavy node on this rank; 0 of any other."""
    count = _counter(getattr(n.target, "overloadpacket", None)) if n.kind == "call" else None
    if count is None:
        return 0
    fakes = {v: v.fake for v in (*n.inputs, *n.outs)}
    args, kwargs = _faked(n.args, fakes), _faked(n.kwargs, fakes)
    return int(count(*args, **kwargs, out_val=_faked(n.result, fakes)))


def _faked(tree: Any, fakes: dict[Value, Any]) -> Any:
    return substitute(tree, fakes)


def call_us(n: Node, device: Device) -> float:
    """Estimated time of a node that is no collective, on this rank."""
    if n.kind in ("number", "effect") or is_view(n):
        return device.view_us
    moved = sum(v.nbytes for v in dict.fromkeys((*n.inputs, *n.outs)))
    return device.call_us + max(flops(n) / device.flops_per_us, moved / device.bytes_per_us)


# ---- collectives -------------------------------------------------------------------------------------


class Network:
    """What collectives cost for a rank, by the group of ranks.

    Args:
        profiles: The figures of each mesh.
        rank: This rank.
        other: For groups of no known mesh; the slowest of its axes.
        known: Whether the figures were given or measured, not defaults.
    """

    def __init__(
        self, profiles: Mapping[Mesh, Profile], rank: int, other: Profile, *, known: bool
    ) -> None:
        self.known = known
        self._known: dict[frozenset[int], tuple[float, float]] = {}
        self._other = _slowest(other, tuple(range(len(other.latency_us))))
        for mesh, profile in profiles.items():
            coord = mesh.coordinate_of(rank)
            if coord is None:
                continue
            for axes in _subsets(mesh.ndim):
                figures = _slowest(profile, axes)
                self._known.setdefault(frozenset(mesh.group_ranks(axes, coord)), figures)

    def figures(self, ranks: tuple[int, ...]) -> tuple[float, float]:
        """Latency in us and bandwidth in bytes per us of a group."""
        return self._known.get(frozenset(ranks), self._other)

    def collective_us(self, start: Node) -> float:
        """Predicted time of a collective, from its start."""
        latency, bandwidth = self.figures(start.info["ranks"])
        return latency + sent_bytes(start) / bandwidth

    def bucket_bytes(self, ranks: tuple[int, ...]) -> int:
        """A size of buckets for which latency hardly counts and that leaves something to overlap; 0 if nothing is known."""
        if not self.known:
            return 0
        latency, bandwidth = self.figures(ranks)
        return max(1, int(OVERLAP * latency * bandwidth))


def network(step: Step, profile: Profile | None = None) -> Network:
    """What the collectives of a step cost: by a given profile, else by what ``mesh.profile()`` found, else by defaults.

    Args:
        step: A step.
        profile: For the meshes with as many axes as it has, and for groups of no mesh that the step shows.
    """
    meshes = dict.fromkeys(_meshes(step))
    transport = next((n.info["transport"] for n in step.collectives()), None)
    if transport is not None:
        meshes |= dict.fromkeys(transport.state.get("profiles", ()))
    found: dict[Mesh, Profile] = {}
    known = profile is not None
    for mesh in meshes:
        measured = None if transport is None else profile_of(mesh, transport)
        given = profile if profile and len(profile.latency_us) == mesh.ndim else None
        found[mesh] = given or measured or default_profile(mesh)
        known |= measured is not None
    kind = next((v.fake.device.type for v, _ in step.inputs if v.fake is not None), "cpu")
    other = profile or default_profile(Mesh.of(kind, (1,), (0,)))
    return Network(found, step.rank, other, known=known)


def _slowest(profile: Profile, axes: tuple[int, ...]) -> tuple[float, float]:
    return (
        max(profile.latency_us[a] for a in axes),
        min(profile.bytes_per_us[a] for a in axes),
    )


def _meshes(step: Step) -> Iterator[Mesh]:
    for _, slot in step.inputs:
        if slot.layout is not None:
            yield slot.layout.mesh
    for n in step.nodes:
        if n.kind == "move" and "mover" in n.info:
            yield n.info["mover"].src.mesh


def _subsets(ndim: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, ndim + 1):
        yield from itertools.combinations(range(ndim), count)


def durations(
    step: Step, profile: Profile | None = None, device: Device | None = None
) -> dict[int, float]:
    """Estimated microseconds of each node of a lowered step, by the node's id; waits take none of their own."""
    device, net = device or device_of(step), network(step, profile)
    return {
        id(n): 0.0
        if n.kind == "wait"
        else net.collective_us(n)
        if n.kind == "start"
        else call_us(n, device)
        for n in flatten(step.nodes)
    }
