"""``route(src, dst)``: the cheapest list of moves from one layout to another of the same tensor.

A shortest path (Dijkstra 1959) over states (axes per dim, pending reductions); the edges are the moves on
one axis or on several at once. A one-shot move joins any two states without a pending reduction between
them, so every pair has a route.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
import heapq
import itertools

from shardwise.errors import LayoutError
from shardwise.layout.layout import Dims, Layout, Partials
from shardwise.route.moves import Move, received_numel

LATENCY_BYTES = 64 * 1024  # what one more collective is worth, until a mesh is profiled
ONE_SHOT_LATENCY_BYTES = 65 * 1024  # its packing costs a little more
LOCAL_COST_BYTES = 64  # a local re-cut is not quite free

State = tuple[Dims, Partials]


@lru_cache(maxsize=16384)
def route(src: Layout, dst: Layout) -> tuple[Move, ...]:
    """The cheapest moves from ``src`` to ``dst``; empty if they place alike.

    Raises:
        LayoutError: The layouts are of different tensors or meshes, or the pending reduction that ``dst``
            asks for cannot be made.
    """
    if src.mesh is not dst.mesh or src.shape != dst.shape:
        raise LayoutError(f"no route from {src} to {dst}: not the same tensor on the same mesh")
    start, goal = (src.dims, src.partial), (dst.dims, dst.partial)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    ticket = itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state == goal:
            break
        if cost > best[state]:
            continue
        for move in _edges(src.with_placement(*state), dst):
            nxt = (move.dst.dims, move.dst.partial)
            total = cost + move_cost(move)
            if total < best.get(nxt, float("inf")):
                best[nxt], came[nxt] = total, (state, move)
                heapq.heappush(queue, (total, next(ticket), nxt))
    if goal not in best:
        raise LayoutError(
            f"no route from {src} to {dst}: a pending reduction cannot be made or exchanged so"
        )
    moves: list[Move] = []
    state = goal
    while state != start:
        state, move = came[state]
        moves.append(move)
    return tuple(reversed(moves))


def move_cost(move: Move) -> float:
    """Cost in bytes: what a rank receives, plus the latency of a collective in the same unit."""
    if not move.communicates:
        return LOCAL_COST_BYTES
    latency = ONE_SHOT_LATENCY_BYTES if move.kind == "one_shot" else LATENCY_BYTES
    return latency + received_numel(move) * _itemsize(move.src)


def route_cost(src: Layout, dst: Layout) -> float:
    """Cost of the route, in bytes."""
    return sum(move_cost(m) for m in route(src, dst))


def _itemsize(layout: Layout) -> int:
    return getattr(layout.dtype, "itemsize", 4)


def _edges(cur: Layout, dst: Layout) -> Iterator[Move]:
    """Moves that can lie on a shortest path to ``dst``."""
    yield from _gathers(cur, dst)
    yield from _reductions(cur, dst)
    yield from _local(cur, dst)
    if cur.partial == dst.partial and cur.dims != dst.dims:
        axes = _moving_axes(cur, dst)
        if axes:
            yield Move("one_shot", cur, dst, axes)


def _moving_axes(cur: Layout, dst: Layout) -> tuple[int, ...]:
    """Axes whose ranks must exchange data: those that shard now, less the leading ones that stay put."""
    out: list[int] = []
    for axes, then in zip(cur.dims, dst.dims):
        same = 0
        while same < min(len(axes), len(then)) and axes[same] == then[same]:
            same += 1
        out += axes[same:]
    return tuple(sorted(out))


def _to(cur: Layout, dim: int, axes: tuple[int, ...], partial: Partials) -> Layout:
    dims = tuple(axes if d == dim else old for d, old in enumerate(cur.dims))
    return cur.with_placement(dims, partial)


def _gathers(cur: Layout, dst: Layout) -> Iterator[Move]:
    for dim, axes in enumerate(cur.dims):
        if axes == dst.dims[dim]:
            continue
        for m in range(1, len(axes) + 1):
            kept = axes[: len(axes) - m]
            yield Move(
                "all_gather", cur, _to(cur, dim, kept, cur.partial), axes[len(axes) - m :], dim
            )


def _reductions(cur: Layout, dst: Layout) -> Iterator[Move]:
    for op in {op for op in cur.partial if op is not None}:
        open_ = [a for a, o in enumerate(cur.partial) if o == op and dst.partial[a] != op]
        for m in range(1, len(open_) + 1):
            for axes in itertools.combinations(open_, m):
                partial = tuple(None if a in axes else o for a, o in enumerate(cur.partial))
                yield Move(
                    "all_reduce", cur, cur.with_placement(cur.dims, partial), axes, -1, op
                )
        for dim, (now, then) in enumerate(zip(cur.dims, dst.dims)):
            if then[: len(now)] != now:
                continue
            for m in range(1, len(then) - len(now) + 1):
                axes = then[len(now) : len(now) + m]
                if any(cur.partial[a] != op for a in axes):
                    break
                partial = tuple(None if a in axes else o for a, o in enumerate(cur.partial))
                yield Move(
                    "reduce_scatter", cur, _to(cur, dim, now + axes, partial), axes, dim, op
                )


def _local(cur: Layout, dst: Layout) -> Iterator[Move]:
    sharding = {a for axes in cur.dims for a in axes}
    for dim, (now, then) in enumerate(zip(cur.dims, dst.dims)):
        if then[: len(now)] == now:
            for m in range(1, len(then) - len(now) + 1):
                axes = then[len(now) : len(now) + m]
                if any(cur.partial[a] is not None or a in sharding for a in axes):
                    break
                yield Move("slice", cur, _to(cur, dim, now + axes, cur.partial), axes, dim)
        if now and dst.partial[now[-1]] == "sum":
            partial = tuple("sum" if a == now[-1] else o for a, o in enumerate(cur.partial))
            yield Move("pad", cur, _to(cur, dim, now[:-1], partial), now[-1:], dim, "sum")
    for axis, op in enumerate(dst.partial):
        if op is not None and cur.partial[axis] is None and axis not in sharding:
            partial = tuple(op if a == axis else o for a, o in enumerate(cur.partial))
            yield Move("keep", cur, cur.with_placement(cur.dims, partial), (axis,), -1, op)
