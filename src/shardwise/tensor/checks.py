"""What all ranks must agree on, compared once where it would otherwise be silently wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Transport
from shardwise.errors import LayoutError
from shardwise.layout.mesh import Mesh


def checksum(t: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and a position-dependent sum of the bits: equal tensors give equal checksums."""
    head = (tuple(t.shape), str(t.dtype))
    if t.device.type == "meta" or t.numel() == 0:
        return head
    with torch.no_grad():
        flat = t.detach().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        size = flat.element_size()
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        bits = flat.view(kind).to(torch.int64)
        weight = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
        return (*head, int((bits * (weight * 2654435761 % 1000003)).sum().item()))


def check_equal_on_all_ranks(
    named: Sequence[tuple[str, Tensor]], mesh: Mesh, transport: Transport
) -> None:
    """Compare plain tensors over a mesh; all ranks raise together if some differ.

    Raises:
        LayoutError: Naming the tensors that differ.
    """
    if len(mesh.ranks) == 1:
        return
    mine = [checksum(t) for _, t in named]
    everyone = transport.all_gather_object(mine, mesh.ranks)
    bad = [
        name
        for i, (name, _) in enumerate(named)
        if any(len(other) != len(mine) or other[i] != everyone[0][i] for other in everyone)
    ]
    if bad:
        raise LayoutError(
            f"{'; '.join(bad)}: a plain tensor next to a DTensor counts as replicated, but its values differ "
            "between ranks.",
            tries=[
                "DTensor.from_local(x, mesh, placements) if every rank has its own piece",
                "distribute_tensor(x, mesh) to take the first rank's values everywhere",
            ],
        )
