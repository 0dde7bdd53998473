"""What a rule's local program sees of the call: pieces, offsets, and groups to reduce over."""

from __future__ import annotations

from typing import Any

from shardwise.comm.groups import Group
from shardwise.comm.transport import Transport
from shardwise.layout.mesh import Mesh
from shardwise.program.spec import Spec


class LocalContext:
    """One compiled call on one rank.

    Attributes:
        func: The torch function that was called.
        ins: For each tensor argument, in order, its spec after the moves in.
        outs: For each result its spec; the dtype is that of the rule's first operand, not yet known.
        axes: The mesh axes that shard each factor.
    """

    __slots__ = ("_groups", "axes", "coord", "func", "ins", "mesh", "outs", "transport")

    def __init__(
        self,
        func: Any,
        ins: tuple[Spec, ...],
        outs: tuple[Spec, ...],
        axes: dict[str, tuple[int, ...]],
        mesh: Mesh,
        transport: Transport,
    ) -> None:
        self.func, self.ins, self.outs, self.axes, self.mesh = func, ins, outs, axes, mesh
        self.transport = transport
        self.coord = mesh.coordinate_of(transport.rank)
        self._groups: dict[tuple[str, ...], Group] = {}

    def group(self, *factors: str) -> Group:
        """The ranks that share this rank's part of everything but the given factors."""
        found = self._groups.get(factors)
        if found is None:
            axes = tuple(a for f in factors for a in self.axes.get(f, ()))
            found = self._groups[factors] = self.group_over(axes)
        return found

    def group_over(self, axes: tuple[int, ...]) -> Group:
        """The ranks that differ from this one on the given mesh axes."""
        if self.coord is None:
            return Group(self.transport, (self.transport.rank,))
        tag = "*".join(self.mesh.axis_name(a) for a in axes)
        return Group(self.transport, self.mesh.group_ranks(axes, self.coord), tag)

    def start(self, arg: int, dim: int) -> int:
        """Where this rank's piece of an argument starts on a dim."""
        return self.ins[arg].offsets[dim]
