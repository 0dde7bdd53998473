"""``route(src, dst)``: the cheapest list of moves from one layout to another of the same tensor.

A shortest path (Dijkstra 1959) over states (axes per dim, pending reductions); the edges are the moves on
one axis or on several at once. One-shot moves lead from every state straight to the target, so every pair
that can be joined is joined within one collective, and the search only asks what is cheaper:

```text
    reductions  all_reduce or reduce_scatter over any pending axes, onto any dim, in the target's order if it fits
    slices      towards the target; while a sum is pending also anywhere else: replicas share the work of reducing
    gathers     down to what source and target have in common
    pads        what shall be pending and is sharded, or replicated: nothing moves
    one-shot    to the target; settles what is pending there too
```

States are plain tuples, and pieces are counted per dim and kept; ``Move`` objects are made for the result only.
"""

from __future__ import annotations

from collections.abc import Iterator
import heapq
import itertools
import math
from operator import mul
from typing import Any

from shardwise.errors import LayoutError
from shardwise.layout import boxes
from shardwise.layout.boxes import Range
from shardwise.layout.cut import Cut
from shardwise.layout.layout import Dims, Layout, Partials
from shardwise.route.cost import Cost, Profile, cost_of, itemsize, sample
from shardwise.route.moves import Move, received_numel

LATENCY_BYTES = 64 * 1024  # what one more collective is worth in `decide`
LOCAL_COST_BYTES = 64  # a local re-cut is not quite free
MOST_CACHED = 16384

State = tuple[Dims, Partials]
Edge = tuple[str, tuple[int, ...], int, str | None, Dims, Partials, float]

_ROUTES: dict[tuple[Layout, Layout, Cost], tuple[Move, ...]] = {}


def route(
    src: Layout, dst: Layout, profile: Profile | None = None, what: str | None = None
) -> tuple[Move, ...]:
    """The cheapest moves from ``src`` to ``dst``; empty if they place alike.

    Args:
        src: Layout of the operand.
        dst: Layout of the result: the same tensor on the same mesh.
        profile: Figures of the mesh; None takes the defaults of its device type.
        what: ``"time"`` or ``"bytes"``; None takes the one in force.

    Raises:
        LayoutError: The layouts are of different tensors or meshes, or the pending reduction that ``dst``
            asks for cannot be made.
    """
    cost = cost_of(src.mesh, profile, what)
    found = _ROUTES.get((src, dst, cost))
    if found is None:
        if len(_ROUTES) > MOST_CACHED:
            _ROUTES.clear()
        found = _ROUTES[src, dst, cost] = search(src, dst, cost)
    return found


def search(src: Layout, dst: Layout, cost: Cost) -> tuple[Move, ...]:
    """``route`` without its cache."""
    if src.mesh is not dst.mesh or src.shape != dst.shape:
        raise LayoutError(f"no route from {src} to {dst}: not the same tensor on the same mesh")
    graph = _Graph(src, dst, cost)
    start, goal = (src.dims, src.partial), (dst.dims, dst.partial)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Edge]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    ticket = itertools.count(1)
    limit = math.inf  # the cheapest way to the goal so far
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if state == goal:
            break
        if so_far > best[state]:
            continue
        for edge in graph.edges(state, limit - so_far):
            to = edge[4:6]
            total = so_far + edge[6]
            if total < limit and total < best.get(to, math.inf):
                best[to], came[to] = total, (state, edge)
                heapq.heappush(queue, (total, next(ticket), to))
                if to == goal:
                    limit = total
    if goal not in best:
        raise LayoutError(
            f"no route from {src} to {dst}: a pending reduction cannot be made or exchanged so"
        )
    moves: list[Move] = []
    state = goal
    while state != start:
        state, (kind, axes, dim, op, dims, partial, _) = came[state]
        before, after = src.with_placement(*state), src.with_placement(dims, partial)
        if kind == "one_shot":
            axes = tuple(sorted(axes + graph.crowded(state, (dims, partial))))
        moves.append(Move(kind, before, after, axes, dim, op))
    return tuple(reversed(moves))


def move_cost(move: Move, profile: Profile | None = None, what: str | None = None) -> float:
    """Cost of one move: us, or bytes where those are minimized."""
    mesh = move.src.mesh
    cost = cost_of(mesh, profile, what)
    return cost.of(
        move.kind, move.axes, received_numel(move, sample(mesh)) * itemsize(move.src)
    )


def route_cost(
    src: Layout, dst: Layout, profile: Profile | None = None, what: str | None = None
) -> float:
    """Cost of the route."""
    return sum(move_cost(m, profile, what) for m in route(src, dst, profile, what))


class _Graph:
    """Edges between states on the way from one layout to another, with their costs."""

    def __init__(self, src: Layout, dst: Layout, cost: Cost) -> None:
        self.src, self.dst, self.cost = src, dst, cost
        self.mesh = src.mesh
        self.shape = src.shape
        self.itemsize = itemsize(src)
        self.coords = sample(src.mesh)
        self.ranges: dict[tuple[int, tuple[int, ...]], list[Range]] = {}
        self.overlaps: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        self.numels: dict[Dims, float] = {}
        self.least = 0.0 if cost.bytes_only else min(cost.profile.latency_us, default=0.0)
        fastest = 1.0 if cost.bytes_only else max(cost.profile.bytes_per_us, default=1.0)
        self.least_per_numel = self.itemsize / fastest
        self.targets: dict[tuple[Any, ...], tuple[Dims, ...]] = {}
        useful = [
            d for d in range(src.ndim) if (src.dims[d] or dst.dims[d]) and src.shape[d] > 1
        ]
        others = [d for d in range(src.ndim) if d not in useful and src.shape[d] > 1]
        others.sort(key=lambda d: -src.shape[d])
        # dims that it can pay to cut on the way
        self.useful = useful + others[: max(0, 2 - len(useful))]

    # -- counting ----------------------------------------------------------------------------
    def pieces(self, dim: int, axes: tuple[int, ...]) -> list[Range]:
        """The pieces of a dim that the sampled ranks hold."""
        found = self.ranges.get((dim, axes))
        if found is None:
            n, shape = self.shape[dim], self.mesh.shape
            known: dict[tuple[int, ...], Range] = {}
            found = []
            for coord in self.coords:
                at = tuple([coord[a] for a in axes])
                piece = known.get(at)
                if piece is None:
                    piece = known[at] = boxes.piece(n, axes, shape, coord)
                found.append(piece)
            self.ranges[dim, axes] = found
        return found

    def numel(self, dims: Dims) -> float:
        """Elements that a rank holds: the mean."""
        found = self.numels.get(dims)
        if found is None:
            even = 1
            for d, axes in enumerate(dims):
                k = math.prod([self.mesh.shape[a] for a in axes])
                if self.shape[d] % k or isinstance(axes, Cut):
                    break
                even *= self.shape[d] // k
            else:
                self.numels[dims] = even
                return even
            total: list[int] = [1] * len(self.coords)
            for d, axes in enumerate(dims):
                total = list(map(mul, total, [r[1] for r in self.pieces(d, axes)]))
            found = self.numels[dims] = sum(total) / len(self.coords)
        return found

    def overlap(self, dim: int, a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
        """How much of its piece under ``b`` a rank holds under ``a``."""
        found = self.overlaps.get((dim, a, b))
        if found is None:
            here, there = self.pieces(dim, a), self.pieces(dim, b)
            found = [
                max(0, min(o + n, p + m) - max(o, p)) for (o, n), (p, m) in zip(here, there)
            ]
            self.overlaps[dim, a, b] = found
        return found

    def held(self, have: Dims, want: Dims) -> float:
        """Elements of what it needs that a rank holds: the mean."""
        whole, cut = 1, None
        for d, (a, b) in enumerate(zip(have, want)):
            if not a and not b:
                whole *= self.shape[d]
            elif cut is None:
                cut = self.overlap(d, a, b)
            else:
                cut = list(map(mul, cut, self.overlap(d, a, b)))
        return float(whole) if cut is None else whole * sum(cut) / len(self.coords)

    def padded(self, dims: Dims, dim: int, axes: tuple[int, ...]) -> float:
        """Elements of the largest piece of the group: what a collective of equal pieces sends; the mean."""
        k = math.prod([self.mesh.shape[a] for a in dims[dim]])
        if self.shape[dim] % k == 0 and not isinstance(dims[dim], Cut):
            return self.numel(dims)
        shape = self.mesh.shape
        sizes = [shape[a] for a in dims[dim]]
        total = [1] * len(self.coords)
        for d, by in enumerate(dims):
            if d != dim:
                total = list(map(mul, total, [r[1] for r in self.pieces(d, by)]))
        if isinstance(by := dims[dim], Cut):  # it is gathered, or scattered, as a whole
            return sum(total) * max(by.sizes) / len(self.coords)
        most = [
            boxes.nested(self.shape[dim], sizes, [0 if a in axes else c[a] for a in dims[dim]])[
                1
            ]
            for c in self.coords
        ]
        return sum(map(mul, total, most)) / len(self.coords)

    def size(self, axes: tuple[int, ...]) -> int:
        """Ranks of a group."""
        return math.prod([self.mesh.shape[a] for a in axes])

    def price(self, kind: str, axes: tuple[int, ...], numel: float) -> float:
        """Cost of receiving so many elements."""
        return self.cost.of(kind, axes, numel * self.itemsize)

    # -- edges -------------------------------------------------------------------------------
    def edges(self, state: State, budget: float) -> Iterator[Edge]:
        """Moves that can lie on a shortest path from a state, if the rest of it may cost ``budget``."""
        dims, partial = state
        then = self.dst.partial
        open_ = [a for a, op in enumerate(partial) if op is not None and then[a] != op]
        made = [a for a, op in enumerate(then) if op is not None and partial[a] != op]
        yield from self._one_shot(dims, partial, open_, made, bool(made), budget)
        yield from self._local(dims, partial, open_, made)
        yield from self._gathers(dims, partial)
        if any(partial):
            yield from self._reductions(dims, partial, open_)
        if open_ and budget > 2 * self.least:
            yield from self._one_shot(dims, partial, open_, made, True, budget)

    def _one_shot(
        self,
        dims: Dims,
        partial: Partials,
        open_: list[int],
        made: list[int],
        far: bool,
        budget: float,
    ) -> Iterator[Edge]:
        kept = tuple(None if a in open_ else op for a, op in enumerate(partial))
        op = partial[open_[0]] if open_ else None
        addends = self.size(tuple(open_))
        now = self.numel(dims)
        for to in self._targets(dims, made, open_, far):
            if to == dims and not open_:
                continue
            then = self.numel(to)
            if self.least + (addends * then - min(now, then)) * self.least_per_numel > budget:
                continue  # it would be too dear even if all that is held were needed
            axes = self._moving(dims, to, open_)
            if axes:
                numel = addends * then - self.held(dims, to)
                yield "one_shot", axes, -1, op, to, kept, self.price("one_shot", axes, numel)

    def _targets(
        self, dims: Dims, made: list[int], open_: list[int], far: bool
    ) -> tuple[Dims, ...]:
        if not far:
            return (self.dst.dims,)
        used = frozenset([a for axes in dims for a in axes])
        key = (used, tuple(made), tuple(open_))
        found = self.targets.get(key)
        if found is None:
            found = self.targets[key] = self._far_targets(used, made, open_)
        return found

    def _far_targets(
        self, used: frozenset[int], made: list[int], open_: list[int]
    ) -> tuple[Dims, ...]:
        """Where a one-shot move can lead: the target, or the target cut further, by minor axes.

        What shall be pending may be sharded till it is padded; while a sum is pending also what shall be
        replicated, till it is gathered: then each addend of an element goes to one rank, not to all.
        """
        goal = self.dst.dims
        final = {a for axes in goal for a in axes}
        waiting = [a for a in made if a in used or a not in open_]
        also = [
            a for a in (*sorted(used), *open_) if open_ and a not in final and a not in made
        ]
        if not waiting and not also:
            return (goal,)
        out: dict[Dims, None] = {}
        for first in itertools.permutations(waiting):
            axes = (*first, *also)
            for where in itertools.product((None, *self.useful), repeat=len(axes)):
                to = list(goal)
                for a, d in zip(axes, where):
                    if d is not None:
                        to[d] = (*to[d], a)
                if not any(d is not None and isinstance(goal[d], Cut) for d in where):
                    out[tuple(to)] = None
        return tuple(out)

    @staticmethod
    def _moving(dims: Dims, to: Dims, open_: list[int]) -> tuple[int, ...]:
        """Axes whose ranks must exchange data: those that shard now, less the leading ones that stay put."""
        out = list(open_)
        for axes, then in zip(dims, to):
            if axes:
                out += axes[_same(axes, then) :]
        return tuple(sorted(out))

    def crowded(self, state: State, to: State) -> tuple[int, ...]:
        """Replicated axes to spread a one-shot move over, if its senders' load is uneven and large enough.

        That can be where such an axis will cut a dim that moving axes cut now: then all who need a block
        would turn to one of its replicas.
        """
        (dims, partial), (then, _) = state, to
        used = {a for axes in dims for a in axes}
        open_ = [a for a, op in enumerate(partial) if op is not None and to[1][a] is None]
        moving = set(self._moving(dims, then, open_))
        out = tuple(
            a
            for have, want in zip(dims, then)
            if moving.intersection(have)
            for a in want
            if a not in used and partial[a] is None and self.mesh.shape[a] > 1
        )
        if not out or self.cost.bytes_only:
            return out
        numel = self.size(tuple(open_)) * self.numel(then) - self.held(dims, then)
        axes = tuple(moving)
        small = self.price("one_shot", axes, numel) < 2 * self.price("one_shot", axes, 0)
        return () if small else out

    def _gathers(self, dims: Dims, partial: Partials) -> Iterator[Edge]:
        for dim, axes in enumerate(dims):
            same = _same(axes, self.dst.dims[dim])
            for m in range(1, len(axes) - same + 1):
                if isinstance(axes, Cut) and m < len(axes):
                    continue  # a chosen cut is undone whole
                minor = axes[len(axes) - m :]
                numel = (self.size(minor) - 1) * self.padded(dims, dim, minor)
                after = (*dims[:dim], axes[: len(axes) - m], *dims[dim + 1 :])
                yield (
                    "all_gather",
                    minor,
                    dim,
                    None,
                    after,
                    partial,
                    self.price("all_gather", minor, numel),
                )

    def _reductions(self, dims: Dims, partial: Partials, open_: list[int]) -> Iterator[Edge]:
        """Reductions of what is pending; of what shall stay pending, too, where the pieces have to move.

        To reduce onto pieces, move those and pad them moves less than to move every addend.
        """
        pending = open_
        if dims != self.dst.dims:
            pending = [a for a, op in enumerate(partial) if op is not None]
        for m in range(len(pending), 0, -1):
            for axes in itertools.combinations(pending, m):
                op = partial[axes[0]]
                after = tuple(None if a in axes else o for a, o in enumerate(partial))
                n = self.size(axes)
                if all(a in open_ for a in axes):
                    numel = 2 * (n - 1) / n * self.numel(dims)
                    price = self.price("all_reduce", axes, numel)
                    yield "all_reduce", axes, -1, op, dims, after, price
                for dim in self.useful:
                    now, then = dims[dim], self.dst.dims[dim]
                    if isinstance(now, Cut):
                        continue
                    wanted = then[len(now) : len(now) + m]
                    fits = then[: len(now)] == now and set(wanted) == set(axes)
                    order = wanted if fits else axes
                    all_of = isinstance(then, Cut) and fits and len(then) == m
                    cut = (*dims[:dim], then if all_of else now + order, *dims[dim + 1 :])
                    padded, exact = self.padded(cut, dim, order), self.numel(cut)
                    price = self.price("reduce_scatter", order, (n - 1) * padded)
                    yield "reduce_scatter", order, dim, op, cut, after, price
                    if exact < padded:
                        price = self.price("one_shot", axes, (n - 1) * exact)
                        yield "one_shot", axes, -1, op, cut, after, price

    def _slices(self, dims: Dims, partial: Partials, used: set[int]) -> Iterator[Edge]:
        """Cuts towards the target."""
        price = self.price("slice", (), 0)
        for dim, (now, then) in enumerate(zip(dims, self.dst.dims)):
            if then[: len(now)] == now:
                for m in range(1, len(then) - len(now) + 1):
                    axes = then[len(now) : len(now) + m]
                    if any(partial[a] is not None or a in used for a in axes):
                        break
                    to = now + axes
                    if isinstance(then, Cut):
                        if m < len(then):
                            continue  # a chosen cut is made whole
                        to = then
                    after = (*dims[:dim], to, *dims[dim + 1 :])
                    yield "slice", axes, dim, None, after, partial, price

    def _local(
        self, dims: Dims, partial: Partials, open_: list[int], made: list[int]
    ) -> Iterator[Edge]:
        used = {a for axes in dims for a in axes}
        price = self.price("slice", (), 0)
        yield from self._slices(dims, partial, used)
        for dim, now in enumerate(dims):
            if isinstance(now, Cut) and len(now) > 1:
                continue
            if now and now[-1] in made and self.dst.partial[now[-1]] == "sum":
                a = now[-1]
                pending = (*partial[:a], "sum", *partial[a + 1 :])
                yield (
                    "pad",
                    (a,),
                    dim,
                    "sum",
                    (*dims[:dim], now[:-1], *dims[dim + 1 :]),
                    pending,
                    price,
                )
        if open_:
            for a, op in enumerate(partial):
                if op is None and a not in used and self.mesh.shape[a] > 1:
                    for dim in self.useful:
                        if isinstance(dims[dim], Cut):
                            continue
                        after = (*dims[:dim], (*dims[dim], a), *dims[dim + 1 :])
                        yield "slice", (a,), dim, None, after, partial, price
        for a in made:
            if partial[a] is None and a not in used:
                op = self.dst.partial[a]
                pending = (*partial[:a], op, *partial[a + 1 :])
                yield "keep", (a,), -1, op, dims, pending, price


def _same(axes: tuple[int, ...], then: tuple[int, ...]) -> int:
    """How many leading axes of a dim two entries have in common, which cut it alike."""
    if isinstance(axes, Cut) or isinstance(then, Cut):
        return len(axes) if axes == then else 0
    same = 0
    while same < min(len(axes), len(then)) and axes[same] == then[same]:
        same += 1
    return same
