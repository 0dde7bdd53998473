"""What a rule's local program sees of the call: pieces, offsets, and groups to reduce over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.groups import Group
from shardwise.comm.rows import Rows
from shardwise.comm.transport import Transport
from shardwise.layout.layout import Layout
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

    __slots__ = (
        "_groups",
        "_rows",
        "axes",
        "coord",
        "func",
        "ins",
        "mesh",
        "outs",
        "transport",
    )

    def __init__(
        self,
        func: Any,
        ins: tuple[Spec, ...],
        outs: tuple[Any, ...],
        axes: dict[str, tuple[int, ...]],
        mesh: Mesh,
        transport: Transport,
    ) -> None:
        self.func, self.ins, self.outs, self.axes, self.mesh = func, ins, outs, axes, mesh
        self.transport = transport
        self.coord = mesh.coordinate_of(transport.rank)
        self._groups: dict[tuple[str, ...], Group] = {}
        self._rows: dict[Any, Rows] = {}

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

    def piece(self, out: int, dim: int, rank: int) -> range:
        """The rows of a result's dim that a rank of the mesh holds."""
        return self._held(self.outs[out].layout, dim, rank)

    def _held(self, layout: Layout, dim: int, rank: int) -> range:
        coord = self.mesh.coordinate_of(rank)
        assert coord is not None, "groups are of ranks of the mesh"
        offsets, sizes = layout.box(coord)
        return range(offsets[dim], offsets[dim] + sizes[dim])

    def rows(
        self,
        dim: int,
        wanted: Callable[[int], Tensor],
        *,
        arg: int = 0,
        fill: float = 0.0,
        factor: str | None = None,
        key: Any = None,
    ) -> Rows:
        """A plan to fetch rows of an argument's dim from the ranks that share it.

        Args:
            dim: The dim.
            wanted: For a rank of the group the rows it asks for, on the CPU; -1 for a row of ``fill``.
            arg: The argument's number.
            fill: What a row is filled with that comes from nowhere.
            factor: The dim's factor, ``d{dim}`` if not given.
            key: Tells plans for the same dim of the same argument apart; each is made once.
        """
        found = self._rows.get((arg, dim, key))
        if found is None:
            group, layout = self.group(factor or f"d{dim}"), self.ins[arg].layout
            held = [self._held(layout, dim, r) for r in group.ranks]
            have = [torch.arange(p.start, p.stop, device="cpu") for p in held]
            wants = [wanted(r) for r in group.ranks]
            found = self._rows[arg, dim, key] = Rows(group, dim, have, wants, fill)
        return found

    def near(
        self, x: Tensor, dim: int, factor: str, need: Callable[[int, int], Sequence[int]]
    ) -> Tensor:
        """Rows of the first argument, some of which other ranks hold; differentiable.

        Args:
            x: This rank's piece; other dims may have been changed.
            dim: The dim, of argument and result.
            factor: Its factor.
            need: From where a piece of the result starts, and its size, to the rows that go into it.
        """
        if self.coord is None:
            return x

        def wanted(rank: int) -> Tensor:
            mine = self.piece(0, dim, rank)
            rows = list(need(mine.start, len(mine)))
            return torch.tensor(rows, dtype=torch.int64, device="cpu")

        return self.rows(dim, wanted, factor=factor)(x)

    def joined(self, args: Sequence[int], dim: int, factor: str) -> Rows:
        """A plan for arguments laid end to end along a dim: from everybody's pieces to pieces of the result.

        It takes this rank's pieces of the arguments, in order, as one tensor.
        """
        found = self._rows.get(("joined", dim))
        if found is None:
            group = self.group(factor)
            layouts = [self.ins[a].layout for a in args]
            starts = [0, *itertools.accumulate(layout.shape[dim] for layout in layouts)]
            have = [
                torch.cat(
                    [
                        torch.arange(p.start + start, p.stop + start, device="cpu")
                        for layout, start in zip(layouts, starts)
                        for p in [self._held(layout, dim, r)]
                    ]
                )
                for r in group.ranks
            ]
            mine = [self.piece(0, dim, r) for r in group.ranks]
            wants = [torch.arange(p.start, p.stop, device="cpu") for p in mine]
            found = self._rows["joined", dim] = Rows(group, dim, have, wants)
        return found
