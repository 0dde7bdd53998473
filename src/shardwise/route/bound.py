"""What the rest of a way must cost at least: an A* search goes by it (Hart, Nilsson, Raphael 1968).

Ranks along the axes on which the target is pending are one *team*: they need the value between them. Of each
element, counted over all teams,

```text
    nothing is to be settled     a team that needs it and does not hold it receives it once
    n addends are to be summed   the first team to know the sum stands at the end of n - 1 receipts at least,
                                 for each of n teams with different addends has to be heard; every other team
                                 that needs it hears once more: n - 1 + teams - 1
```

Both are reached, the second by reduce-scatter and all-gather, so most of what is left by the search is on a
shortest path. A state that is not there yet needs one collective more, which has its latency, and a local move
for each axis that shall be pending and is not.
"""

from __future__ import annotations

from shardwise.layout.layout import Dims, Layout, Partials
from shardwise.route.cost import Prices
from shardwise.route.counts import Counts


class Bound:
    """The least cost from any state to one target."""

    def __init__(self, dst: Layout, counts: Counts, prices: Prices) -> None:
        self._dims, self._partial = dst.dims, dst.partial
        self._counts, self._prices = counts, prices
        self._ranks = len(dst.mesh.ranks)
        self._team = tuple(a for a, op in enumerate(dst.partial) if op is not None)
        self._wanted = counts.numel(dst.dims) / counts.size(self._team)
        self._each = dst.numel / self._ranks
        self._found: dict[tuple[Dims, Partials], float] = {}

    def rest(self, state: tuple[Dims, Partials]) -> float:
        """The least cost from (axes per dim, pending reductions): us, or bytes where those are minimized."""
        found = self._found.get(state)
        if found is None:
            dims, partial = state
            open_ = [
                a for a, op in enumerate(partial) if op is not None and self._partial[a] is None
            ]
            addends = self._counts.size(tuple(open_)) if open_ else 1
            if addends > 1:
                numel = self._wanted + (addends - 2) * self._each
            else:
                numel = self._wanted - self._held(dims)
            prices = self._prices
            local = len([a for a in self._team if partial[a] != self._partial[a]])
            if addends > 1 or numel * self._ranks > 0.5:  # of one element or more
                found = prices.least + numel * prices.least_per_numel + local * prices.local
            else:  # cuts are all that is missing, but for one exchange of nothing
                cuts = len([1 for now, then in zip(dims, self._dims) if len(then) > len(now)])
                found = local * prices.local + min(cuts * prices.local, prices.least)
            self._found[state] = found
        return found

    def _held(self, dims: Dims) -> float:
        """Elements that teams hold of what they need, for each rank."""
        held = self._counts.most_held(dims, self._dims)
        if self._team:  # replicas within a team count once
            cutting = {a for axes in dims for a in axes}
            held /= self._counts.size(tuple(a for a in self._team if a not in cutting))
        return held
