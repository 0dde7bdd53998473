"""A layout as one rank sees it: what the hot path needs, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.transport import Transport
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.layout import Dims, Layout, Partials
from shardwise.layout.mesh import Mesh

MODES = 5  # a program table for each of autocast x strict, and the one of simple programs


class Spec:
    """A layout with this rank's piece of it; interned per rank, so that it is a free cache key.

    Attributes:
        layout: The layout.
        transport: The rank's transport.
        coord: The rank's mesh coordinates, or None outside the mesh.
        offsets: Where this rank's piece starts.
        local_shape: Its shape.
        shape: Global shape.
        stride: Global stride, or None when row-major.
        dtype: The dtype.
        device_type: The mesh's device type.
        programs: The rank's program tables, one per mode.
        fast: The rank's table of simple programs, which hold in every mode.
        guards: The spec that this one stands for, of a tensor that must be checked at each use (a view
            that is a copy); such a spec is in no table, so the hot path never hits. Else None.
        plain: A wrapper needs no stride and no device: row-major on CPU.
    """

    __slots__ = (
        "_dual",
        "_is_first",
        "coord",
        "device_type",
        "dtype",
        "fast",
        "guards",
        "layout",
        "local_shape",
        "offsets",
        "plain",
        "programs",
        "shape",
        "stride",
        "transport",
    )

    def __init__(self, layout: Layout, transport: Transport) -> None:
        self.layout, self.transport = layout, transport
        self.coord = layout.mesh.coordinate_of(transport.rank)
        self.shape = torch.Size(layout.shape)
        self.stride = None if layout.is_contiguous else layout.stride
        self.dtype: Any = layout.dtype
        self.device_type = layout.mesh.device_type
        if self.coord is None:
            self.offsets, self.local_shape = (0,) * layout.ndim, torch.Size((0,) * layout.ndim)
        else:
            self.offsets, sizes = layout.box(self.coord)
            self.local_shape = torch.Size(sizes)
        self.programs: tuple[dict[Any, Any], ...] = program_tables(transport)
        self.fast: dict[Any, Any] = self.programs[-1]
        self._dual: Spec | None = None
        self._is_first: bool | None = None
        self.guards: Spec | None = None
        self.plain = self.stride is None and self.device_type == "cpu"

    @property
    def dual(self) -> Spec:
        """The spec of the gradient."""
        if self._dual is None:
            self._dual = spec_of(self.layout.dual(), self.transport)
        return self._dual

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one of those that would add their gradients up that starts backward with one."""
        if self._is_first is None:
            pending = self.layout.dual().partial
            self._is_first = self.coord is not None and not any(
                i for i, op in zip(self.coord, pending) if op is not None
            )
        return self._is_first

    def __copy__(self) -> Spec:
        """Interned: a copy is itself."""
        return self

    def __deepcopy__(self, memo: object) -> Spec:
        """Interned: a copy is itself."""
        return self

    def __repr__(self) -> str:
        """Layout and coordinate."""
        return f"Spec({self.layout} at {self.coord})"


def program_tables(transport: Transport) -> tuple[dict[Any, Any], ...]:
    """The rank's program tables, one per mode."""
    tables = transport.state.get("programs")
    if tables is None:
        tables = transport.state["programs"] = tuple({} for _ in range(MODES))
    return tables


def spec_of(layout: Layout, transport: Transport) -> Spec:
    """The rank's one spec for a layout."""
    table: dict[Layout, Spec] = transport.state.setdefault("specs", {})
    found = table.get(layout)
    if found is None:
        if len(table) > 65536:
            table.clear()
        found = table[layout] = Spec(layout, transport)
    return found


def guarded(spec: Spec) -> Spec:
    """A spec of its own for a tensor that the slow path must check at each use."""
    out = Spec(spec.layout, spec.transport)
    out.guards, out.fast = spec.guards or spec, {}
    return out


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """A result of which some sizes are known only when the call has run; those dims are whole.

    Attributes:
        mesh: The mesh.
        dims: For each dim the axes that shard it.
        partial: For each axis the pending reduction.
        shape: Global sizes, None where they depend on data.
        transport: The rank's transport.
    """

    mesh: Mesh
    dims: Dims
    partial: Partials
    shape: tuple[int | None, ...]
    transport: Transport

    def of(self, local: torch.Tensor) -> Spec:
        """The spec of a result, from this rank's piece."""
        shape = tuple(m if n is None else n for n, m in zip(self.shape, local.shape))
        layout = Layout(
            self.mesh, self.dims, self.partial, shape, contiguous_stride(shape), local.dtype
        )
        return spec_of(layout, self.transport)
