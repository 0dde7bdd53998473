"""``route(src, dst)``: the cheapest list of moves from one layout to another of the same tensor.

A shortest path over states (axes per dim, pending reductions), found by A*: what is left of a way costs at
least its ``Bound``. The edges are the moves on one axis or on several at once. One-shot moves lead from every
state straight to the target, so every pair that can be joined is joined within one collective, and the search
only asks what is cheaper:

```text
    reductions  all_reduce or reduce_scatter over any pending axes, onto any dim, in the target's order if it fits
    slices      towards the target; while a sum is pending also anywhere else: replicas share the work of reducing
    gathers     down to what source and target have in common
    pads        what shall be pending and is sharded, or replicated: nothing moves
    one-shot    to the target; settles what is pending there too
```

States are plain tuples, and elements are counted per dim (``Counts``); ``Move`` objects are made for the
result only.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

from shardwise.errors import LayoutError
from shardwise.layout.cut import Cut
from shardwise.layout.layout import Dims, Layout, Partials
from shardwise.route.bound import Bound
from shardwise.route.cost import Cost, Prices, Profile, cost_of, itemsize, sample
from shardwise.route.counts import Counts
from shardwise.route.moves import Move, received_numel

LATENCY_BYTES = 64 * 1024  # what one more collective is worth in `decide`
LOCAL_COST_BYTES = 64  # a local re-cut is not quite free
MOST_CACHED = 16384
ROUNDING = 1e-9  # less than any cost

State = tuple[Dims, Partials]
Step = tuple[State, str, tuple[int, ...], int, str | None]  # from where, and as in a ``Move``
Far = tuple[
    float, float, float, Dims
]  # cost of what follows and of all addends, at least; elements; dims

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
    found = Search(src, dst, cost)
    if not found.run():
        raise LayoutError(
            f"no route from {src} to {dst}: a pending reduction cannot be made or exchanged so"
        )
    return found.moves()


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


class Search:
    """A shortest path from one layout to another; ``run`` finds it.

    Attributes:
        expanded: How many states were left by their edges: the effort, where time depends on the machine.
        offered: How many edges were priced.
    """

    def __init__(self, src: Layout, dst: Layout, cost: Cost) -> None:
        self.src, self.dst = src, dst
        self.counts = Counts(src)
        self.prices = Prices(src, cost)
        self.bound = Bound(dst, self.counts, self.prices)
        self.expanded = self.offered = 0
        useful = [
            d for d in range(src.ndim) if (src.dims[d] or dst.dims[d]) and src.shape[d] > 1
        ]
        others = [d for d in range(src.ndim) if d not in useful and src.shape[d] > 1]
        others.sort(key=lambda d: -src.shape[d])
        # dims that it can pay to cut on the way
        self.useful = useful + others[: max(0, 2 - len(useful))]
        self.start, self.goal = (src.dims, src.partial), (dst.dims, dst.partial)
        self.best: dict[State, float] = {self.start: 0.0}
        self.came: dict[State, Step] = {}
        self.queue: list[tuple[int, int, float, State]] = []
        # what differs by less is as cheap: by bytes, latency only breaks ties
        self.grain = 0.5 if cost.bytes_only else ROUNDING
        self.limit = math.inf  # the cheapest way to the goal so far
        self.state, self.so_far = self.start, 0.0  # what is expanded, and the way there
        self.far: dict[tuple[Any, ...], list[Far]] = {}

    def run(self) -> bool:
        """Search; whether there is a way."""
        rest = self.bound.rest
        self.queue.append((0, 0, 0.0, self.start))
        while self.queue:
            _, _, self.so_far, self.state = heapq.heappop(self.queue)
            dear = self.so_far + rest(self.state) >= self.limit
            if not dear and self.so_far <= self.best[self.state]:
                self._expand()
        return self.goal in self.best

    def moves(self) -> tuple[Move, ...]:
        """The way that was found."""
        out: list[Move] = []
        after, state = self.src.with_placement(*self.goal), self.goal
        while state != self.start:
            before, kind, axes, dim, op = self.came[state]
            layout = self.src.with_placement(*before)
            if kind == "one_shot":
                axes = tuple(sorted(axes + self._crowded(before, state)))
            out.append(Move(kind, layout, after, axes, dim, op))
            state, after = before, layout
        return tuple(reversed(out))

    # -- edges -------------------------------------------------------------------------------
    def _offer(
        self,
        kind: str,
        axes: tuple[int, ...],
        dim: int,
        op: str | None,
        to: State,
        price: float,
    ) -> None:
        """Take an edge into account, unless the way by it is too dear."""
        self.offered += 1
        total = self.so_far + price
        if total >= self.limit or total >= self.best.get(to, math.inf):
            return
        least = total + self.bound.rest(to)
        if least >= self.limit:
            return
        self.best[to] = total
        self.came[to] = (self.state, kind, axes, dim, op)
        if to == self.goal:
            self.limit = total - ROUNDING
        else:  # of those as cheap the last, the deepest: a way is known soon, and leaves out the others
            place = round(least / self.grain), -self.offered, total, to
            heapq.heappush(self.queue, place)

    def _expand(self) -> None:
        """Offer the moves that can lie on a shortest path from the state."""
        self.expanded += 1
        dims, partial = self.state
        then = self.dst.partial
        open_ = [a for a, op in enumerate(partial) if op is not None and then[a] != op]
        made = [a for a, op in enumerate(then) if op is not None and partial[a] != op]
        used = {a for axes in dims for a in axes}
        kept = tuple(None if a in open_ else op for a, op in enumerate(partial))
        self._one_shot(dims, open_, kept, self.dst.dims)
        self._made(dims, partial, made, used)
        self._slices(dims, partial, used)
        if open_:
            self._spread(dims, partial, used)
        self._gathers(dims, partial)
        if any(partial):
            self._reductions(dims, partial, open_)
        least = self.prices.least
        if self.limit - self.so_far > (least if made else 2 * least) and (made or open_):
            self._far(dims, made, open_, used, kept)

    def _one_shot(self, dims: Dims, open_: list[int], kept: Partials, to: Dims) -> None:
        """Everything that is needed in one exchange, every addend for itself."""
        axes = _moving(dims, to, open_)
        if axes:
            counts = self.counts
            numel = counts.size(tuple(open_)) * counts.numel(to) - counts.held(dims, to)
            op = self.state[1][open_[0]] if open_ else None
            over = axes
            if not self.prices.uniform:
                over += self._crowded(self.state, (to, kept))
            price = self.prices.of("one_shot", over, max(0.0, numel))
            self._offer("one_shot", axes, -1, op, (to, kept), price)

    def _far(
        self, dims: Dims, made: list[int], open_: list[int], used: set[int], kept: Partials
    ) -> None:
        """One-shot moves to the target cut further, by minor axes.

        What shall be pending may be sharded till it is padded; while a sum is pending also what shall be
        replicated, till it is gathered: then each addend of an element goes to one rank, not to all.
        """
        final = {a for axes in self.dst.dims for a in axes}
        waiting = tuple(a for a in made if a in used or a not in open_)
        also = tuple(
            a for a in (*sorted(used), *open_) if open_ and a not in final and a not in made
        )
        key = (waiting, also, kept, *open_)
        found = self.far.get(key)
        if found is None:
            found = self.far[key] = self._far_targets(waiting, also, open_, kept)
        held = self.counts.numel(dims)
        per_numel, start = self.prices.least_per_numel, self.so_far + self.prices.least
        for rest, addends, numel, to in found:
            # too dear even if all that is held were needed; those that follow are dearer
            if start + rest + addends - held * per_numel >= self.limit:
                break
            least = start + addends - min(held, numel) * per_numel
            known = self.best.get((to, kept), math.inf)
            if least < known and least + rest < self.limit:
                self._one_shot(dims, open_, kept, to)

    def _far_targets(
        self,
        waiting: tuple[int, ...],
        also: tuple[int, ...],
        open_: list[int],
        kept: Partials,
    ) -> list[Far]:
        """Where ``_far`` can lead, the cheapest first."""
        goal = self.dst.dims
        where = [d for d in self.useful if not isinstance(goal[d], Cut)]
        out: dict[Dims, None] = {goal: None}
        new: list[tuple[Dims, tuple[int, ...]]] = [(goal, waiting)]
        while new:  # what waits, in any order
            to, rest = new.pop()
            for a in rest:
                for d in where:
                    after = (*to[:d], (*to[d], a), *to[d + 1 :])
                    if after not in out:
                        out[after] = None
                        new.append((after, tuple(b for b in rest if b != a)))
        every = list(out)
        for a in also:
            every += [(*to[:d], (*to[d], a), *to[d + 1 :]) for to in every for d in where]
        per_numel = self.counts.size(tuple(open_)) * self.prices.least_per_numel
        found: list[Far] = []
        for to in every[1:]:  # the first is the target
            numel = self.counts.numel(to)
            found.append((self.bound.rest((to, kept)), per_numel * numel, numel, to))
        return sorted(found, key=lambda far: far[0] + far[1])

    def _crowded(self, state: State, to: State) -> tuple[int, ...]:
        """Replicated axes to spread a one-shot move over, if its senders' load is uneven and large enough.

        That can be where such an axis will cut a dim that moving axes cut now: then all who need a block
        would turn to one of its replicas.
        """
        (dims, partial), (then, _) = state, to
        used = {a for axes in dims for a in axes}
        open_ = [a for a, op in enumerate(partial) if op is not None and to[1][a] is None]
        moving = set(_moving(dims, then, open_))
        out = tuple(
            a
            for have, want in zip(dims, then)
            if moving.intersection(have)
            for a in want
            if a not in used and partial[a] is None and self.src.mesh.shape[a] > 1
        )
        if not out or self.prices.bytes_only:
            return out
        counts, price = self.counts, self.prices.of
        numel = counts.size(tuple(open_)) * counts.numel(then) - counts.held(dims, then)
        axes = tuple(moving)
        small = price("one_shot", axes, numel) < 2 * price("one_shot", axes, 0)
        return () if small else out

    def _gathers(self, dims: Dims, partial: Partials) -> None:
        """Down to what source and target have in common."""
        for dim, axes in enumerate(dims):
            same = _same(axes, self.dst.dims[dim]) if axes else 0
            for m in range(1, len(axes) - same + 1):
                if isinstance(axes, Cut) and m < len(axes):
                    continue  # a chosen cut is undone whole
                minor = axes[len(axes) - m :]
                numel = (self.counts.size(minor) - 1) * self.counts.padded(dims, dim, m)
                after = (*dims[:dim], axes[: len(axes) - m], *dims[dim + 1 :])
                price = self.prices.of("all_gather", minor, numel)
                self._offer("all_gather", minor, dim, None, (after, partial), price)

    def _reductions(self, dims: Dims, partial: Partials, open_: list[int]) -> None:
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
                n = self.counts.size(axes)
                if all(a in open_ for a in axes):
                    numel = 2 * (n - 1) / n * self.counts.numel(dims)
                    price = self.prices.of("all_reduce", axes, numel)
                    self._offer("all_reduce", axes, -1, op, (dims, after), price)
                for dim in self.useful:
                    if not isinstance(dims[dim], Cut):
                        self._scatters(dims, dim, axes, op, after)

    def _scatters(
        self, dims: Dims, dim: int, axes: tuple[int, ...], op: str | None, after: Partials
    ) -> None:
        """Reductions onto pieces of a dim."""
        now, then = dims[dim], self.dst.dims[dim]
        m = len(axes)
        wanted = then[len(now) : len(now) + m]
        fits = then[: len(now)] == now and set(wanted) == set(axes)
        order = wanted if fits else axes
        all_of = isinstance(then, Cut) and fits and len(then) == m
        cut = (*dims[:dim], then if all_of else now + order, *dims[dim + 1 :])
        padded, exact = self.counts.padded(cut, dim, m), self.counts.numel(cut)
        n = self.counts.size(axes)
        price = self.prices.of("reduce_scatter", order, (n - 1) * padded)
        self._offer("reduce_scatter", order, dim, op, (cut, after), price)
        if exact < padded:
            price = self.prices.of("one_shot", axes, (n - 1) * exact)
            self._offer("one_shot", axes, -1, op, (cut, after), price)

    def _slices(self, dims: Dims, partial: Partials, used: set[int]) -> None:
        """Cuts towards the target."""
        for dim, (now, then) in enumerate(zip(dims, self.dst.dims)):
            if now == then or then[: len(now)] != now:
                continue
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
                self._offer("slice", axes, dim, None, (after, partial), self.prices.local)

    def _spread(self, dims: Dims, partial: Partials, used: set[int]) -> None:
        """Cuts of replicas, which then share the work of reducing."""
        for a, op in enumerate(partial):
            if op is None and a not in used and self.src.mesh.shape[a] > 1:
                for dim in self.useful:
                    if not isinstance(dims[dim], Cut):
                        after = (*dims[:dim], (*dims[dim], a), *dims[dim + 1 :])
                        self._offer(
                            "slice", (a,), dim, None, (after, partial), self.prices.local
                        )

    def _made(self, dims: Dims, partial: Partials, made: list[int], used: set[int]) -> None:
        """What shall be pending and is sharded, or replicated."""
        for dim, now in enumerate(dims):
            if not now or (isinstance(now, Cut) and len(now) > 1):
                continue
            a = now[-1]
            if a in made and self.dst.partial[a] == "sum":
                to = (
                    (*dims[:dim], now[:-1], *dims[dim + 1 :]),
                    (*partial[:a], "sum", *partial[a + 1 :]),
                )
                self._offer("pad", (a,), dim, "sum", to, self.prices.local)
        for a in made:
            if partial[a] is None and a not in used:
                op = self.dst.partial[a]
                to = (dims, (*partial[:a], op, *partial[a + 1 :]))
                self._offer("keep", (a,), -1, op, to, self.prices.local)


def _moving(dims: Dims, to: Dims, open_: list[int]) -> tuple[int, ...]:
    """Axes whose ranks must exchange data: those that shard now, less the leading ones that stay put."""
    out = list(open_)
    for axes, then in zip(dims, to):
        if axes:
            out += axes[_same(axes, then) :]
    return tuple(sorted(out))


def _same(axes: tuple[int, ...], then: tuple[int, ...]) -> int:
    """How many leading axes of a dim two entries have in common, which cut it alike."""
    if isinstance(axes, Cut) or isinstance(then, Cut):
        return len(axes) if axes == then else 0
    same = 0
    while same < min(len(axes), len(then)) and axes[same] == then[same]:
        same += 1
    return same
