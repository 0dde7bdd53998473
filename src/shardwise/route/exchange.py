"""The one-shot move on one rank: who sends what to whom when everything moves at once.

What a rank needs is cut by the boxes that others hold. Where a box is held by replicas, both sides must name
the same one without talking: the receiver itself if it is one, else the replica with the receiver's own
coordinates (it is near, and every rank serves its own neighbours), turned along the axes to *spread* over:

```text
    source of (receiver s, block, addend)      for each axis a of the source mesh
        a cuts a dim            the block's coordinate
        a is pending, settled   the addend's coordinate: each addend comes from one rank
        a is pending, stays     s[a]
        a holds replicas        s[a], or s[a] + turn where a is spread over; turn: a sum of coordinates
```

Without the turn, all receivers of a block may name one replica while another is idle: [R, S(0)] -> [S(0), S(1)].

Invariants:
    1. Sender and receiver work out the same pieces: the senders' lists are the transpose of the receivers'.
    2. Every element that a rank needs comes once for each addend, from one rank; what it holds stays.
    3. Nothing is listed for ranks that have nothing to say to each other; the cost of a plan is its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import itertools
import math

from shardwise.layout import boxes
from shardwise.layout.boxes import Box, Range
from shardwise.layout.layout import Layout

Coord = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank gets from another (or keeps).

    Attributes:
        rank: The other rank, by its global number; the own one for what stays.
        box: Global offsets and sizes.
        addend: Which addend of a pending reduction it is, in the order in which they are combined.
    """

    rank: int
    box: Box
    addend: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """From one layout to another in a single exchange, on the same mesh or on two.

    Attributes:
        src: What is held. On two meshes pending reductions are settled on the way.
        dst: What is needed.
        spread: Axes of the source mesh that hold replicas among which the load is shared out.
    """

    src: Layout
    dst: Layout
    spread: tuple[int, ...] = ()

    @property
    def settled(self) -> tuple[int, ...]:
        """Axes of the source mesh whose pending reduction this settles."""
        same = self.src.mesh is self.dst.mesh
        return tuple(
            a
            for a, op in enumerate(self.src.partial)
            if op is not None and not (same and self.dst.partial[a] == op)
        )

    @property
    def op(self) -> str | None:
        """The reduction that is settled."""
        return next((self.src.partial[a] for a in self.settled), None)

    def need(self, coord: Coord | None) -> Box | None:
        """What the rank at a coordinate of the target mesh must get; None if nothing.

        Where a pending sum is made, one rank holds the value and the others hold zeros.
        """
        if coord is None or any(coord[a] for a in self._made):
            return None
        box = self.dst.box(coord)
        return None if 0 in box[1] else box

    @property
    def _made(self) -> tuple[int, ...]:
        same = self.src.mesh is self.dst.mesh
        return tuple(
            a
            for a, op in enumerate(self.dst.partial)
            if op is not None and not (same and self.src.partial[a] == op)
        )

    def takes(self, rank: int) -> Iterator[Piece]:
        """What a rank gets, piece by piece, what it keeps included."""
        need = self.need(self.dst.mesh.coordinate_of(rank))
        if need is None:
            return
        mesh, near = self.src.mesh, self._near(rank)
        cutting = [a for axes in self.src.dims for a in axes]
        settled = self.settled
        addends = [range(mesh.shape[a]) for a in settled]
        for parts in _meeting(self.src, need):
            block = [i for at, _ in parts for i in at]
            box = tuple(r[0] for _, r in parts), tuple(r[1] for _, r in parts)
            for k, addend in enumerate(itertools.product(*addends)):
                fixed = dict(zip(cutting, block)) | dict(zip(settled, addend))
                yield Piece(mesh.rank_at(self._source(near, fixed)), box, k)

    def gives(self, rank: int) -> Iterator[Piece]:
        """What a rank sends, piece by piece, what it keeps included."""
        own = self.src.mesh.coordinate_of(rank)
        if own is None or 0 in (held := self.src.box(own))[1]:
            return
        mesh, settled = self.dst.mesh, self.settled
        fixed = {a: own[a] for axes in self.src.dims for a in axes} | {
            a: own[a] for a in settled
        }
        sizes = [self.src.mesh.shape[a] for a in settled]
        k = 0
        for n, a in zip(sizes, settled):
            k = k * n + own[a]
        cutting = [a for axes in self.dst.dims for a in axes]
        others = [a for a in range(mesh.ndim) if a not in cutting]
        made = self._made
        stays = self._stays(own)
        free = [
            (0,) if a in made else (stays[a],) if a in stays else range(mesh.shape[a])
            for a in others
        ]
        for parts in _meeting(self.dst, held):
            at = dict(zip(cutting, (i for where, _ in parts for i in where)))
            if any(at.get(a, i) != i for a, i in stays.items()):
                continue
            box = tuple(r[0] for _, r in parts), tuple(r[1] for _, r in parts)
            for rest in itertools.product(*free):
                full = at | dict(zip(others, rest))
                to = mesh.rank_at([full[a] for a in range(mesh.ndim)])
                if self._source(self._near(to), fixed) == own:
                    yield Piece(to, box, k)

    def _stays(self, own: Coord) -> dict[int, int]:
        """Axes, on one mesh, along which nothing is sent: the receivers have the sender's coordinate there."""
        if self.src.mesh is not self.dst.mesh:
            return {}
        cutting = {a for axes in self.src.dims for a in axes}
        settled = self.settled
        return {
            a: i
            for a, i in enumerate(own)
            if a not in cutting and a not in settled and a not in self.spread
        }

    def _near(self, rank: int) -> tuple[Coord, bool]:
        """The receiver's own coordinates on the source mesh, and whether it lies there.

        Outside of it, those of a rank to turn to.
        """
        mesh = self.src.mesh
        at = mesh.coordinate_of(rank)
        if at is not None:
            return at, True
        place = self.dst.mesh.ranks.index(rank)
        at = mesh.coordinate_of(mesh.ranks[place % len(mesh.ranks)])
        assert at is not None, "a rank of the mesh"
        return at, False

    def _source(self, receiver: tuple[Coord, bool], fixed: dict[int, int]) -> Coord:
        """The coordinates of the rank that a receiver gets a block's addend from."""
        near, inside = receiver
        if inside and all(near[a] == i for a, i in fixed.items()):
            return near
        out = list(near)
        for a, i in fixed.items():
            out[a] = i
        if self.spread:
            turn = sum(near[a] for a in fixed) + sum(fixed.values())
            for a in self.spread:
                n = self.src.mesh.shape[a]
                out[a] = (near[a] + turn) % n
                turn //= n
        return tuple(out)

    def received_numel(self, rank: int) -> int:
        """Elements that a rank receives from others."""
        return sum(math.prod(p.box[1]) for p in self.takes(rank) if p.rank != rank)

    def sent_numel(self, rank: int) -> int:
        """Elements that a rank sends to others."""
        return sum(math.prod(p.box[1]) for p in self.gives(rank) if p.rank != rank)


def _meeting(
    layout: Layout, box: Box, dim: int = 0
) -> Iterator[tuple[tuple[Coord, Range], ...]]:
    """The pieces of a layout that meet a box: for each dim the coordinates and the overlap."""
    if dim == layout.ndim:
        yield ()
        return
    wanted, ranks = (box[0][dim], box[1][dim]), layout.mesh.shape
    for here in boxes.meeting(layout.shape[dim], layout.dims[dim], ranks, wanted):
        for rest in _meeting(layout, box, dim + 1):
            yield (here, *rest)


def lower_bound_numel(src: Layout, dst: Layout, rank: int) -> int:
    """The least elements that a rank must receive by any way: what it needs and does not hold.

    Of a value with a pending reduction it needs at least one other addend of all that it needs. Where a sum is
    pending in the target, each rank may hold any part of it: of a single rank nothing can be said.
    """
    if dst.is_partial:
        return 0
    exchange = Exchange(src, dst)
    need = exchange.need(dst.mesh.coordinate_of(rank))
    if need is None:
        return 0
    at = src.mesh.coordinate_of(rank)
    held = 0 if at is None else math.prod(boxes.intersect(src.box(at), need)[1])
    several = math.prod(src.mesh.shape[a] for a in exchange.settled) > 1
    return math.prod(need[1]) - (0 if several else held)
