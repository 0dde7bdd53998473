"""Watching a program: collectives counted under torch's names, and who holds what, drawn."""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

import torch

from shardwise.comm.transport import current
from shardwise.errors import LayoutError
from shardwise.events import CommLog
from shardwise.layout import boxes
from shardwise.tensor.dtensor import DTensor

__all__ = ["CommDebugMode", "CommLog", "visualize_sharding"]

_FUNCTIONAL = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast",
}


class CommDebugMode(CommLog):
    """This rank's collectives inside a ``with`` block: ``CommLog`` with the questions of torch's class.

    Counts are by ``torch.ops.c10d_functional`` ops, as torch's; kinds that have no such op count under their own
    names (``"scatter"``, ``"all_gather_object"``). Entering again starts from zero.

    Example:
        >>> with CommDebugMode() as comm_mode:
        ...     pass
        >>> comm_mode.get_total_counts(), comm_mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
        (0, 0)
    """

    def __enter__(self) -> Self:
        self.clear()
        return super().__enter__()

    def _mine(self) -> CommLog:
        return self.on(current().rank)

    def get_total_counts(self) -> int:
        """Number of collectives."""
        return self._mine().count()

    def get_comm_counts(self) -> Counter[Any]:
        """Number of collectives of each kind; kinds that did not occur count 0."""
        counts: Counter[Any] = Counter()
        for event in self._mine().events:
            name = _FUNCTIONAL.get(event.kind)
            op = event.kind if name is None else getattr(torch.ops.c10d_functional, name)
            counts[op] += 1
        return counts

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of kinds, groups, mesh axes, bytes received and lines of the program."""
        return str(self._mine())

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file."""
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(self.generate_comm_debug_tracing_table(noise_level) + "\n")


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which rows and columns of a tensor of one or two dims; on the mesh's first rank.

    Args:
        dtensor: The tensor.
        header: Printed above.
        use_rich: Accepted as torch does; the drawing is plain text.

    Raises:
        LayoutError: The tensor has no dims, or more than two.
    """
    text = sharding_text(dtensor)
    coord = dtensor.device_mesh.get_coordinate()
    if coord is not None and not any(coord):
        print(f"{header}\n{text}" if header else text)  # noqa: T201  printing is what it is for


def sharding_text(x: DTensor) -> str:
    """The drawing of ``visualize_sharding``: a row per range of rows, the ranks that hold each range of columns."""
    layout = x.layout
    if layout.ndim not in (1, 2):
        raise LayoutError(
            f"a tensor of {layout.ndim} dims cannot be drawn as rows and columns.",
            tries=["print(x.layout)"],
        )
    mesh = layout.mesh
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for coord in mesh.coordinates():
        start, size = boxes.box(layout.shape, layout.dims, mesh.shape, coord)
        if 0 not in size:
            spans = tuple((a, a + n - 1) for a, n in zip(start, size))
            holders.setdefault(spans if layout.ndim == 2 else ((0, 0), *spans), []).append(
                mesh.rank_at(coord)
            )
    rows = sorted({rows for rows, _ in holders})
    columns = sorted({columns for _, columns in holders})
    cells = [["", *(f"Col {a}-{b}" for a, b in columns)]]
    for a, b in rows:
        held = [holders.get(((a, b), column), []) for column in columns]
        shown = [f"{mesh.device_type}:{', '.join(map(str, r))}" if r else "" for r in held]
        cells.append([f"Row {a}-{b}", *shown])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(text.ljust(n) for text, n in zip(row, widths)).rstrip() for row in cells]
    return "\n".join(lines)
