"""Spread layouts over the calls of a function, in both directions, until nothing changes.

What a rule says of a call ties dims together: a *factor* is one dim of each tensor that it runs through. An axis
that shards one of them shards the others too, operands and results alike. Each spread dim knows the mark that it
comes from and the call that it came through. (The idea is that of GSPMD and of Shardy; the ties are our rules.)

Order, which decides who wins where two would contend: marks and layouts of arguments, then layouts that parameters
have already; among these the one that came through the fewest calls other than products, convolutions and
attention; then through the fewest calls; then the earliest.

References:
    Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021, section 3.5
    (priorities of ops, both directions); ours differs in that every tensor keeps its reason, and nothing is merged.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
import heapq
import math
from pathlib import PurePath

from shardwise.capture.annotate import Wish
from shardwise.capture.calls import Calls, Factors, Made
from shardwise.layout import boxes
from shardwise.layout.cut import Cut, cut, plain
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.rules.notation import ONE, WHOLE, Labels


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an axis shards a dim.

    Attributes:
        origin: The mark, or the tensor that had a layout.
        through: The call that it came through, with the user's line; empty at the origin itself.
        before: The reason on the other side of that call.
        call: The number of that call, or -1.
    """

    origin: str
    through: str = ""
    before: Reason | None = None
    call: int = field(default=-1, repr=False)

    def __str__(self) -> str:
        """The origin and the last call."""
        return f"{self.origin}, through {self.through}" if self.through else self.origin

    def steps(self) -> list[str]:
        """The origin, then every call on the way."""
        found: list[str] = []
        here: Reason | None = self
        while here is not None:
            found.append(here.through or here.origin)
            here = here.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A place where a layout could not go on.

    Attributes:
        tensor: Name of the tensor.
        dim: Its dim.
        axes: Names of the axes that were refused.
        why: What stood against it, in words.
        refused: Where they come from.
        kept: Why the tensor is as it is; None where nothing else wants it otherwise.
    """

    tensor: str
    dim: int
    axes: tuple[str, ...]
    why: str
    refused: Reason
    kept: Reason | None = None

    def __str__(self) -> str:
        """One line, with both reasons."""
        against = f" ({self.kept})" if self.kept is not None else ""
        axes = ", ".join(self.axes)
        return (
            f"{self.tensor}: {axes} on dim {self.dim} ({self.refused}), but {self.why}{against}"
        )


def place(site: str) -> str:
    """A user's line, short."""
    return PurePath(site).name if site else "?"


class Spread:
    """See the module.

    Attributes:
        dims: For each value the axes of each of its dims.
        reasons: For each value the reason of each axis.
        conflicts: Where a layout could not go on; where two disagree at a call, once.
    """

    def __init__(self, calls: Calls, mesh: Mesh) -> None:
        self.calls, self.mesh = calls, mesh
        self.dims: list[list[tuple[int, ...]]] = [[()] * len(v.shape) for v in calls.values]
        self.reasons: list[dict[int, Reason]] = [{} for _ in calls.values]
        self._conflicts: dict[tuple[object, ...], Conflict] = {}
        self._wishes: dict[int, tuple[Wish, Reason]] = {}
        self._users: dict[int, list[Made]] = defaultdict(list)
        self._numbers = {id(made): i for i, made in enumerate(calls.made)}
        for made in calls.made:
            for v in dict.fromkeys((*made.ins, *made.outs)):
                self._users[v].append(made)
        self._factors: dict[tuple[object, ...], Factors | None] = {}
        self._waiting: list[
            tuple[tuple[int, int, int], int, int, int, tuple[int, ...], Reason]
        ] = []
        self._pushed = 0

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Where a layout could not go on."""
        return tuple(self._conflicts.values())

    def layout(self, value: int) -> Layout:
        """The layout that was found."""
        v = self.calls.values[value]
        return Layout(
            self.mesh,
            tuple(self.dims[value]),
            (None,) * self.mesh.ndim,
            v.shape,
            v.stride,
            v.dtype,
        )

    def run(self) -> None:
        """Spread all there is."""
        for v in self.calls.values:
            self._seed(v.index)
        while self._waiting:
            key, _, value, dim, axes, reason = heapq.heappop(self._waiting)
            if self._take(value, dim, axes, reason):
                self._pass_on(key, value, dim, reason)

    # ---- where it begins -----------------------------------------------------------------------

    def _seed(self, value: int) -> None:
        v = self.calls.values[value]
        if v.mark is not None:
            wish = v.mark.on(self.mesh, v.shape)
            reason = Reason(f"mark {place(v.mark.site)}")
            rank = 0
        elif v.given is not None:
            wish = Wish(v.given.dims, (False,) * len(v.shape), frozenset(), True)
            reason = Reason(f"layout of {v.name}")
            rank = 0 if v.role == "input" else 1
        else:
            return
        self._wishes[value] = (wish, reason)
        for dim, axes in enumerate(wish.dims):
            if not axes:
                continue
            self.dims[value][dim] = axes
            self.reasons[value].update(dict.fromkeys(axes, reason))
            if self._leaves_empty(v.shape[dim], axes):
                self._refuse(
                    value, dim, axes, self._too_small(v.shape[dim], axes), reason, None
                )
            self._pass_on((rank, 0, 0), value, dim, reason)

    # ---- one tensor ----------------------------------------------------------------------------

    def _take(self, value: int, dim: int, axes: tuple[int, ...], reason: Reason) -> bool:
        """Let axes shard a dim, as far as may be; whether anything changed."""
        v, here = self.calls.values[value], self.dims[value]
        if v.role == "constant" and value not in self._wishes:
            return False
        now = here[dim]
        alike = next(
            (i for i, (a, b) in enumerate(zip(now, axes)) if a != b), min(len(now), len(axes))
        )
        names = ", ".join(map(self.mesh.axis_name, now))
        if alike == len(axes):
            if alike == len(now) and now != axes and value not in self._wishes:
                kept = self.reasons[value][now[0]]
                self._refuse(value, dim, axes, f"{names} cuts it at other sizes", reason, kept)
            return False
        if alike < len(now) or isinstance(now, Cut):
            kept = self.reasons[value][now[alike] if alike < len(now) else now[0]]
            self._refuse(value, dim, axes[alike:], f"{names} is there", reason, kept)
            return False
        grown = 0
        for axis in axes[alike:]:
            if not self._may(value, dim, axis, reason, isinstance(axes, Cut)):
                break
            here[dim] = (*here[dim], axis)
            self.reasons[value][axis] = reason
            grown += 1
        if grown == len(axes) and isinstance(axes, Cut):  # all of it, and where it is cut
            here[dim] = axes
        return grown > 0

    def _may(self, value: int, dim: int, axis: int, reason: Reason, sized: bool) -> bool:
        """Whether an axis may shard a dim further (``sized``: at chosen sizes); notes why not."""
        v, here = self.calls.values[value], self.dims[value]
        why, kept = None, None
        other = next((d for d, on_dim in enumerate(here) if axis in on_dim), None)
        if other is not None:
            why, kept = f"it shards dim {other}", self.reasons[value][axis]
        elif value in self._wishes and not self._wishes[value][0].allows(axis, dim):
            why, kept = "the dim is not to be sharded by it", self._wishes[value][1]
        elif not sized and self._leaves_empty(v.shape[dim], (*here[dim], axis)):
            why = self._too_small(v.shape[dim], (*here[dim], axis))
        if why is not None:
            self._refuse(value, dim, (axis,), why, reason, kept)
        return why is None

    def _leaves_empty(self, size: int, axes: tuple[int, ...]) -> bool:
        if isinstance(axes, Cut):
            return False  # as it was chosen
        sizes = [self.mesh.shape[a] for a in axes]
        return boxes.nested(size, sizes, [k - 1 for k in sizes])[1] == 0

    def _too_small(self, size: int, axes: tuple[int, ...]) -> str:
        sizes = " x ".join(str(self.mesh.shape[a]) for a in axes)
        return f"{size} rows over {sizes} ranks leave some rank without any"

    def _refuse(
        self,
        value: int,
        dim: int,
        axes: tuple[int, ...],
        why: str,
        refused: Reason,
        kept: Reason | None,
    ) -> None:
        key: tuple[object, ...] = (value, dim, axes, refused.origin)
        if kept is not None:  # both sides of a call would say so
            key = (refused.call, frozenset((refused.origin, kept.origin)))
        if key not in self._conflicts:
            name, axis_name = self.calls.values[value].name, self.mesh.axis_name
            self._conflicts[key] = Conflict(
                name, dim, tuple(map(axis_name, axes)), why, refused, kept
            )

    # ---- through the calls ---------------------------------------------------------------------

    def _pass_on(self, key: tuple[int, int, int], value: int, dim: int, reason: Reason) -> None:
        for made in self._users[value]:
            factors = self._asked(made, [self.layout(v) for v in made.ins])
            if factors is None:
                continue
            if value in made.outs and value not in made.ins:
                factors = self._as_if(made, factors, value, dim)
            rank, light, hops = key
            onward = (rank, light + (not made.heavy), hops + 1)
            places = [*zip(made.ins, factors.ins), *zip(made.outs, factors.outs)]
            names = dict.fromkeys(
                labels[dim] for v, labels in places if v == value and dim < len(labels)
            )
            for name in names:
                self._follow(onward, made, factors, places, (value, dim), name, reason)

    def _follow(
        self,
        key: tuple[int, int, int],
        made: Made,
        factors: Factors,
        places: list[tuple[int, Labels]],
        source: tuple[int, int],
        name: str,
        reason: Reason,
    ) -> None:
        """Bring the axes of a dim to all other dims of its factor."""
        if name in (ONE, WHOLE) or name in factors.whole or name.startswith("["):
            return
        targets = [
            (v, dim)
            for v, labels in places
            if len(labels) == len(self.dims[v])
            for dim, label in enumerate(labels)
            if label == name and (v, dim) != source
        ]
        value, dim = source
        entry, n = self.dims[value][dim], self.calls.values[value].shape[dim]
        sizes = [self.calls.values[v].shape[d] for v, d in targets]
        most = factors.divides.get(name, 0)
        found = self._regrouped(entry, n, sizes, most, name in factors.scaled)
        for size, new, (v, d) in zip(sizes, found, targets):
            through = f"{made.name} {place(made.site)}"
            if new:
                self._pushed += 1
                call = self._numbers[id(made)]
                on = Reason(reason.origin, through, reason, call)
                if made.entry is None:  # a mark is no step of its own
                    on = replace(reason, call=call)
                heapq.heappush(self._waiting, (key, self._pushed, v, d, new, on))
            if len(new) < len(entry):
                why = f"{through} ties it to a dim of {size}, where the cut is not between whole rows"
                self._refuse(value, dim, entry[len(new) :], why, reason, None)

    def _regrouped(
        self, entry: tuple[int, ...], n: int, sizes: list[int], most: int, scaled: bool
    ) -> list[tuple[int, ...]]:
        """How a dim of ``n`` that is cut so is cut in dims of other sizes: over as many of its axes as may be."""
        ranks = self.mesh.shape
        for count in range(len(entry), 0, -1):
            axes = entry if count == len(entry) else plain(entry)[:count]
            if not scaled or not n:
                if most % math.prod(ranks[a] for a in axes) == 0:
                    return [axes if m == n else plain(axes) for m in sizes]
                continue
            pieces = [size for _, size in boxes.pieces(n, axes, ranks)]
            if all(p * m % n == 0 for m in sizes for p in pieces):
                within = [ranks[a] for a in axes]
                return [
                    axes if m == n else cut(axes, [p * m // n for p in pieces], within)
                    for m in sizes
                ]
        return [()] * len(sizes)

    def _as_if(self, made: Made, factors: Factors, result: int, dim: int) -> Factors:
        """What the rule says were the operands laid out as a result is: some rules look at what is cut already."""
        labels = factors.outs[made.outs.index(result)]
        axes = self.dims[result][dim]
        if dim >= len(labels) or not (
            labels[dim] in factors.whole or labels[dim] in factors.divides
        ):
            return factors
        layouts: list[Layout] = []
        for v, names in zip(made.ins, factors.ins):
            now = self.layout(v)
            dims = [
                plain(axes)
                if name == labels[dim]
                else on_dim
                if not set(axes) & set(on_dim)
                else tuple(a for a in on_dim if a not in axes)
                for name, on_dim in zip(names, now.dims)
            ]
            layouts.append(now.with_placement(tuple(dims), now.partial) if names else now)
        return self._asked(made, layouts) or factors

    def _asked(self, made: Made, layouts: list[Layout]) -> Factors | None:
        """The factors of a call for operands of these layouts."""
        key = (id(made), *layouts)
        if key not in self._factors:
            self._factors[key] = made.factors(layouts)
        return self._factors[key]
