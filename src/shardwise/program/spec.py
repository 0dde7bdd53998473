"""A layout as one rank sees it: what the hot path needs, worked out once."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.transport import Transport
from shardwise.layout.layout import Layout

MODES = 16  # one program table for each combination of grad mode, autocast, strict, functional rng


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
    """

    __slots__ = (
        "coord",
        "device_type",
        "dtype",
        "layout",
        "local_shape",
        "offsets",
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
