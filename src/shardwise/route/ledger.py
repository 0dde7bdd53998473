"""The ledger of a redistribution: what each move receives on each rank, what it should take, and the least."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.layout import Layout
from shardwise.route.cost import Profile, cost_of, default_profile, itemsize, time_us
from shardwise.route.exchange import Exchange, lower_bound_numel
from shardwise.route.moves import Move, received
from shardwise.route.search import route


@dataclass(frozen=True, slots=True)
class Entry:
    """One move.

    Attributes:
        what: Kind, mesh axes and tensor dim.
        dst: Layout after it.
        bytes: For each rank what it receives, in the order of ``Ledger.ranks``.
        time_us: Predicted time.
    """

    what: str
    dst: Layout
    bytes: tuple[int, ...]
    time_us: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """A redistribution laid open; ``print`` it.

    Attributes:
        src: From.
        dst: To.
        ranks: The ranks that take part.
        entries: The moves.
        least: For each rank the bytes that no way can do without: what it needs and does not hold.
    """

    src: Layout
    dst: Layout
    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    least: tuple[int, ...]

    @property
    def bytes(self) -> tuple[int, ...]:
        """For each rank what it receives in all."""
        return tuple(sum(e.bytes[i] for e in self.entries) for i in range(len(self.ranks)))

    @property
    def time_us(self) -> float:
        """Predicted time."""
        return sum(e.time_us for e in self.entries)

    def __str__(self) -> str:
        """One row a move; bytes as their mean over the ranks and the most that one receives."""
        rows = [("move", "layout after", "mean bytes", "most", "us")]
        for e in self.entries:
            where = str(e.dst).partition(" {")[2]
            rows.append((e.what, "{" + where, *_bytes(e.bytes), f"{e.time_us:.0f}"))
        rows.append(("total", "", *_bytes(self.bytes), f"{self.time_us:.0f}"))
        rows.append(("lower bound", "", *_bytes(self.least), ""))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [f"{self.src} -> {self.dst}, {len(self.ranks)} ranks"]
        for row in rows:
            cells = [
                text.ljust(w) if i < 2 else text.rjust(w)
                for i, (text, w) in enumerate(zip(row, widths))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(lines)


def _bytes(each: tuple[int, ...]) -> tuple[str, str]:
    return f"{sum(each) / max(1, len(each)):.0f}", str(max(each, default=0))


def ledger(src: Layout, dst: Layout, profile: Profile | None = None) -> Ledger:
    """What redistributing from ``src`` to ``dst`` costs, without doing it.

    Args:
        src: Layout of the operand.
        dst: Layout of the result, on the same mesh or another.
        profile: Figures of the source's mesh; None takes the defaults.
    """
    size = itemsize(src)
    if src.mesh is dst.mesh:
        ranks = src.mesh.ranks
        coords = src.mesh.coordinates()
        entries = tuple(
            Entry(_what(m), m.dst, tuple(received(m, c) for c in coords), time_us(m, profile))
            for m in route(src, dst, profile)
        )
    else:
        ranks = (*src.mesh.ranks, *(r for r in dst.mesh.ranks if r not in src.mesh.ranks))
        exchange = Exchange(src, dst)
        each = tuple(exchange.received_numel(r) * size for r in ranks)
        cost = cost_of(src.mesh, profile or default_profile(src.mesh), "time")
        took = cost.of("one_shot", tuple(range(src.mesh.ndim)), max(each))
        entries = (Entry("one_shot across meshes", dst, each, took),)
    least = tuple(lower_bound_numel(src, dst, r) * size for r in ranks)
    return Ledger(src, dst, ranks, entries, least)


def _what(move: Move) -> str:
    axes = "*".join(map(move.src.mesh.axis_name, move.axes))
    out = f"{move.kind} over {axes}"
    if move.op is not None:
        out += f" ({move.op})"
    return out if move.dim < 0 else f"{out}, dim {move.dim}"
