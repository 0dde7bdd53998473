"""Routes within a slab of memory: which moves, and in how many rounds.

Next to operand and result a bounded move holds at most one slab of buffers. Each piece that one rank sends to
another is cut into runs of at most ``limit`` elements; round i carries the i-th run of every piece. Everything
here follows from layouts alone, so all ranks, and ``explain_redistribute``, find the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
import math

from shardwise.errors import LayoutError
from shardwise.events import received_bytes
from shardwise.layout import boxes
from shardwise.layout.layout import Layout
from shardwise.route.cost import Profile, itemsize
from shardwise.route.exchange import Exchange
from shardwise.route.moves import Move, group_size, piece_numel
from shardwise.route.search import route

SHARES = {True: 10, False: 6}
"""Parts of a slab that one round may fill with what it sends, and with what it gets: with a reduction, which takes
more besides, and without. A backend's threads may hold on to the two rounds before."""


def bounded_route(
    src: Layout, dst: Layout, profile: Profile | None, what: str | None
) -> tuple[Move, ...]:
    """The cheapest route of which no layout between is too large; else straight there.

    Args:
        src: Layout of the operand, in memory order.
        dst: Layout of the result, on the same mesh.
        profile: Figures of the mesh; None takes the defaults.
        what: What to minimize; None takes what is in force.
    """
    size = itemsize(src)
    most = max(piece_numel(src), piece_numel(dst)) * size
    for objective in (what, "bytes"):
        moves = route(src, dst, profile, objective)
        held = [0, *(piece_numel(m.dst) * size for m in moves)]
        if len(moves) == 1 or all(a + b <= most for a, b in pairwise(held)):
            return moves
    return _straight(src, dst)


def _straight(src: Layout, dst: Layout) -> tuple[Move, ...]:
    """One exchange; what is made pending is exchanged as a replica first, and kept in place."""
    made = [a for a, op in enumerate(dst.partial) if op is not None and src.partial[a] != op]
    there = dst.with_placement(
        dst.dims, tuple(None if a in made else op for a, op in enumerate(dst.partial))
    )
    settled = [
        a for a, op in enumerate(src.partial) if op is not None and there.partial[a] is None
    ]
    op = next((src.partial[a] for a in settled), None)  # one kind is pending at a time
    axes = {a for layout in (src, dst) for on_dim in layout.dims for a in on_dim}
    moves: list[Move] = []
    if there is not src:
        moves.append(Move("one_shot", src, there, tuple(sorted(axes | set(settled))), -1, op))
    if made:
        kind, on = dst.partial[made[0]], tuple(made)
        after = there.with_placement(
            there.dims, tuple(kind if a in on else p for a, p in enumerate(there.partial))
        )
        moves.append(Move("keep", there, after, on, -1, kind))
    return tuple(moves)


def check_slab(layouts: Sequence[Layout], slab: int) -> None:
    """Raise if a round of one element for each rank is more than the slab.

    Raises:
        LayoutError: It is.
    """
    ranks = {rank for layout in layouts for rank in layout.mesh.ranks}
    least = SHARES[True] * len(ranks) * itemsize(layouts[0])
    if slab < least:
        raise LayoutError(
            f"max_extra_bytes is {slab}; a round over {len(ranks)} ranks takes {least} bytes at least.",
            tries=[f"max_extra_bytes={least}, or rather some megabytes"],
        )


def limit_of(slab: int, size: int, num_ranks: int, reduces: bool) -> int:
    """Elements of ``size`` bytes that one piece may have in one round of an exchange."""
    return max(1, slab // SHARES[reduces] // size // max(1, num_ranks - 1))


def reduced_limit(slab: int, size: int, num_ranks: int) -> int:
    """Elements of ``size`` bytes in one round of an all_reduce: some backends gather all addends."""
    return max(1, slab // SHARES[True] // size // num_ranks)


def rounds_of(exchange: Exchange, ranks: Sequence[int], limit: int) -> int:
    """Rounds that an exchange takes: as many as its longest piece that is sent needs."""
    reduces = exchange.op is not None  # then what stays is combined with what comes
    sizes = {p.box[1] for r in ranks for p in exchange.takes(r) if reduces or p.rank != r}
    return max((boxes.num_runs(s, limit) for s in sizes), default=0)


def num_rounds(move: Move, slab: int) -> int:
    """Rounds of one move of a bounded route: the most that a group of ranks needs; 0 for a local one."""
    if not move.communicates:
        return 0
    return max(_rounds_in_group(move, ranks, slab) for ranks in _groups(move))


def _rounds_in_group(move: Move, ranks: tuple[int, ...], slab: int) -> int:
    size, n = itemsize(move.src), len(ranks)
    if move.kind == "all_reduce":
        coord = move.src.mesh.coordinate_of(ranks[0])
        assert coord is not None, "a rank of the mesh"
        numel = math.prod(move.src.box(coord)[1])
        return -(-numel // reduced_limit(slab, size, n))
    exchange = move.exchange
    return rounds_of(exchange, ranks, limit_of(slab, size, n, exchange.op is not None))


def _groups(move: Move) -> Iterator[tuple[int, ...]]:
    mesh = move.src.mesh
    for coord in mesh.coordinates():
        if all(coord[a] == 0 for a in move.axes):
            yield mesh.group_ranks(move.axes, coord)


def received_in_rounds(move: Move, coord: tuple[int, ...], slab: int) -> int:
    """Bytes that the rank at a coordinate receives in one move of a bounded route."""
    n, size = group_size(move), itemsize(move.src)
    if n == 1 or not move.communicates:
        return 0
    if move.kind != "all_reduce":
        return move.exchange.received_numel(move.src.mesh.rank_at(coord)) * size
    numel, limit = math.prod(move.src.box(coord)[1]), reduced_limit(slab, size, n)
    whole, rest = divmod(numel, limit)
    return whole * received_bytes("all_reduce", limit * size, n) + received_bytes(
        "all_reduce", rest * size, n
    )


def together_bytes(moves: Sequence[Move], src: Layout, dst: Layout) -> int:
    """What an operand takes at most, next to itself, when it moves at once, packed with others.

    Args:
        moves: Its route; none between two meshes.
        src: Layout of the operand.
        dst: Layout of the result.
    """
    return max((_at_once(m) for m in moves), default=_exchanged(src, dst)) * itemsize(src)


def _at_once(move: Move) -> int:
    n = group_size(move)
    held = piece_numel(move.src) + piece_numel(move.dst)
    if move.kind == "one_shot":
        return _exchanged(move.src, move.dst)
    return 3 * (held * (n if move.kind in ("all_gather", "reduce_scatter") else 1) + held)


def _exchanged(src: Layout, dst: Layout) -> int:
    """Operand, result, what may be sent to each rank, and each addend that may come; packed twice."""
    addends = math.prod(src.mesh.shape[a] for a, op in enumerate(src.partial) if op is not None)
    sent, got = piece_numel(src) * len(dst.mesh.ranks), piece_numel(dst) * addends
    return 3 * (sent + got + piece_numel(src) + piece_numel(dst))
