"""The ledger of a redistribution: what each move receives on each rank, what it should take, and the least."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.layout import Layout
from shardwise.route.bounded import (
    bounded_route,
    check_slab,
    limit_of,
    num_rounds,
    received_in_rounds,
    rounds_of,
)
from shardwise.route.cost import Profile, cost_of, default_profile, itemsize, time_us
from shardwise.route.exchange import Exchange, lower_bound_numel
from shardwise.route.moves import LOCAL, Move, received, row_major
from shardwise.route.search import route


@dataclass(frozen=True, slots=True)
class Entry:
    """One move.

    Attributes:
        what: Kind, mesh axes and tensor dim.
        dst: Layout after it.
        bytes: For each rank what it receives, in the order of ``Ledger.ranks``.
        time_us: Predicted time.
        rounds: How many collectives it takes; 0 for a local move.
    """

    what: str
    dst: Layout
    bytes: tuple[int, ...]
    time_us: float
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Ledger:
    """A redistribution laid open; ``print`` it.

    Attributes:
        src: From.
        dst: To.
        ranks: The ranks that take part.
        entries: The moves.
        least: For each rank the bytes that no way can do without: what it needs and does not hold.
        slab: The bytes within which the moves go in rounds; None: at once.
        unbounded: The same redistribution at once; None where this is it.
    """

    src: Layout
    dst: Layout
    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    least: tuple[int, ...]
    slab: int | None = None
    unbounded: Ledger | None = None

    @property
    def bytes(self) -> tuple[int, ...]:
        """For each rank what it receives in all."""
        return tuple(sum(e.bytes[i] for e in self.entries) for i in range(len(self.ranks)))

    @property
    def time_us(self) -> float:
        """Predicted time."""
        return sum(e.time_us for e in self.entries)

    @property
    def rounds(self) -> int:
        """How many collectives it takes."""
        return sum(e.rounds for e in self.entries)

    def __str__(self) -> str:
        """One row a move; bytes as their mean over the ranks and the most that one receives."""
        rows = [("move", "layout after", "mean bytes", "most", "us", "rounds")]
        for e in self.entries:
            where = "{" + str(e.dst).partition(" {")[2]
            rows.append((e.what, where, *_bytes(e.bytes), f"{e.time_us:.0f}", str(e.rounds)))
        rows.append(("total", "", *_bytes(self.bytes), f"{self.time_us:.0f}", str(self.rounds)))
        rows.append(("lower bound", "", *_bytes(self.least), "", ""))
        line = f"{self.src} -> {self.dst}, {len(self.ranks)} ranks"
        if self.unbounded is None or self.slab is None:
            rows = [row[:-1] for row in rows]
        else:
            line += f", within {self.slab} bytes"
            free = self.unbounded
            rows.append(
                ("at once", "", *_bytes(free.bytes), f"{free.time_us:.0f}", str(free.rounds))
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [line]
        for row in rows:
            cells = [
                text.ljust(w) if i < 2 else text.rjust(w)
                for i, (text, w) in enumerate(zip(row, widths))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(lines)


def _bytes(each: tuple[int, ...]) -> tuple[str, str]:
    return f"{sum(each) / max(1, len(each)):.0f}", str(max(each, default=0))


def ledger(
    src: Layout, dst: Layout, profile: Profile | None = None, slab: int | None = None
) -> Ledger:
    """What redistributing from ``src`` to ``dst`` costs, without doing it.

    Args:
        src: Layout of the operand.
        dst: Layout of the result, on the same mesh or another.
        profile: Figures of the source's mesh; None takes the defaults.
        slab: Move in rounds, within so many bytes; None: at once.

    Raises:
        LayoutError: The slab is too small for a round.
    """
    ranks = src.mesh.ranks
    if src.mesh is not dst.mesh:
        ranks = (*ranks, *(r for r in dst.mesh.ranks if r not in ranks))
    least = tuple(lower_bound_numel(src, dst, r) * itemsize(src) for r in ranks)
    free = Ledger(src, dst, ranks, _entries(src, dst, profile, ranks), least)
    if slab is None:
        return free
    if free.rounds:
        check_slab((src, dst), slab)
    entries = _bounded_entries(src, dst, profile, ranks, slab)
    return Ledger(src, dst, ranks, entries, least, slab, free)


def _entries(
    src: Layout, dst: Layout, profile: Profile | None, ranks: tuple[int, ...]
) -> tuple[Entry, ...]:
    if src.mesh is not dst.mesh:
        return (_across(src, dst, profile, ranks, 1),)
    coords = src.mesh.coordinates()
    return tuple(
        Entry(
            _what(m),
            m.dst,
            tuple(received(m, c) for c in coords),
            time_us(m, profile),
            int(m.communicates),
        )
        for m in route(src, dst, profile)
    )


def _bounded_entries(
    src: Layout, dst: Layout, profile: Profile | None, ranks: tuple[int, ...], slab: int
) -> tuple[Entry, ...]:
    a, b, order = row_major(src, dst)
    if src.mesh is not dst.mesh:
        exchange = Exchange(a, b)
        limit = limit_of(slab, itemsize(src), len(ranks), exchange.op is not None)
        return (_across(src, dst, profile, ranks, rounds_of(exchange, ranks, limit)),)
    coords, entries = src.mesh.coordinates(), []
    price = cost_of(src.mesh, profile, "time")
    for m in bounded_route(a, b, profile, None) if src is not dst else ():
        each = tuple(received_in_rounds(m, c, slab) for c in coords)
        count = num_rounds(m, slab)
        kind = m.kind if m.kind in ("all_reduce", *LOCAL) else "one_shot"
        took = price.of(kind, m.axes, sum(each) / len(each))
        took += max(0, count - 1) * price.of(kind, m.axes, 0)
        after = m.dst if order is None else _reordered(m.dst, src, order)
        entries.append(Entry(_what(m, order), after, each, took, count))
    return tuple(entries)


def _reordered(layout: Layout, like: Layout, order: tuple[int, ...]) -> Layout:
    """A layout in memory order, with the dims of ``like`` again."""
    dims = tuple(layout.dims[order.index(d)] for d in range(like.ndim))
    return like.with_placement(dims, layout.partial)


def _across(
    src: Layout, dst: Layout, profile: Profile | None, ranks: tuple[int, ...], rounds: int
) -> Entry:
    exchange = Exchange(src, dst)
    each = tuple(exchange.received_numel(r) * itemsize(src) for r in ranks)
    cost = cost_of(src.mesh, profile or default_profile(src.mesh), "time")
    axes = tuple(range(src.mesh.ndim))
    took = cost.of("one_shot", axes, max(each))
    took += max(0, rounds - 1) * cost.of("one_shot", axes, 0)
    return Entry("one_shot across meshes", dst, each, took, rounds)


def _what(move: Move, order: tuple[int, ...] | None = None) -> str:
    axes = "*".join(map(move.src.mesh.axis_name, move.axes))
    out = f"{move.kind} over {axes}"
    if move.op is not None:
        out += f" ({move.op})"
    dim = move.dim if order is None or move.dim < 0 else order[move.dim]
    return out if dim < 0 else f"{out}, dim {dim}"
