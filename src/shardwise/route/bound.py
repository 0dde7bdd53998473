"""What the rest of a way must cost at least: an A* search goes by it (Hart, Nilsson, Raphael 1968).

Ranks along the axes on which the target is pending are one *team*: they need the value between them. What a team
holds now are m different addends where such axes are pending already, else m = 1. Messages that each element takes,
over all ranks:

```text
    nothing is to be settled     Each team that needs it and does not hold it completes by a message of its own.
                                 Till the first has, each of the m addends has left its rank, one rank a message:
                                 teams + m - 1.
    n x m addends                Till the first team is complete, every addend that it lacks has left its rank, by
    are to be summed             a message each; the teams that follow complete by one each:
                                 (n - 1) m + teams - 1. Where nobody has the same addend, the m of the first team
                                 have to leave as well, and no team completes before the last: m - 1 more.
```

The last is reached by reduce-scatter and all-gather, so most of what is left by the search is on a shortest path.
A state that is not there yet needs one collective more, which has its latency, and a local move for each axis that
shall be pending and is not.
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
        self._mesh, self._ranks = dst.mesh.shape, len(dst.mesh.ranks)
        self._team = tuple(a for a, op in enumerate(dst.partial) if op is not None)
        self._wanted = counts.numel(dst.dims) / counts.size(self._team)
        self._each = dst.numel / self._ranks
        cutting = tuple(a for axes in dst.dims for a in axes)
        self._teams = self._ranks // counts.size(
            (*cutting, *self._team)
        )  # that need an element
        self._found: dict[tuple[Dims, Partials], float] = {}

    def rest(self, state: tuple[Dims, Partials]) -> float:
        """The least cost from (axes per dim, pending reductions): us, or bytes where those are minimized."""
        found = self._found.get(state)
        if found is None:
            prices = self._prices
            numel = self._numel(*state)
            local = len([a for a in self._team if state[1][a] != self._partial[a]])
            if numel * self._ranks > 0.5:  # of one element or more
                found = prices.least + numel * prices.least_per_numel + local * prices.local
            else:  # cuts are all that is missing, but for one exchange of nothing
                cuts = len([1 for now, to in zip(state[0], self._dims) if len(to) > len(now)])
                found = local * prices.local + min(cuts * prices.local, prices.least)
            self._found[state] = found
        return found

    def _numel(self, dims: Dims, partial: Partials) -> float:
        """Elements that a rank receives at least, in the mean."""
        size, then = self._counts.size, self._partial
        pending = [a for a, op in enumerate(partial) if op is not None]
        open_ = tuple([a for a in pending if then[a] is None])
        kept = tuple([a for a in pending if then[a] == partial[a]])
        n = size(open_) if open_ else 1
        m = size(kept) if kept and len(open_) + len(kept) == len(pending) else 1
        if n == 1:
            lacking = self._wanted - self._held(dims)
            return lacking * (1 + (m - 1) / self._teams)
        more = 0
        if m > 1 and self._teams > 1:
            used = {a for axes in dims for a in axes}.union(pending)
            if all(a in used or k == 1 for a, k in enumerate(self._mesh)):
                more = m - 1
        return self._wanted + ((n - 1) * m - 1 + more) * self._each

    def _held(self, dims: Dims) -> float:
        """Elements that teams hold of what they need, for each rank."""
        held = self._counts.most_held(dims, self._dims)
        if self._team:  # replicas within a team count once
            cutting = {a for axes in dims for a in axes}
            held /= self._counts.size(tuple(a for a in self._team if a not in cutting))
        return held
