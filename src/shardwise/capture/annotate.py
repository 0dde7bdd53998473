"""``mark_sharding``: say where one tensor is; `propagate` infers the others from it.

A mark names mesh axes for some dims, and may leave others *open*. It is read in three ways:

```text
   on a DTensor               redistributed to what the mark says; what is open stays as it is
   while propagate records    a constraint on the value at that place
   on a plain tensor          remembered on the tensor, until propagate reads it (parameters, inputs)
```
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from shardwise.comm.meshes import as_mesh
from shardwise.errors import LayoutError, MeshError
from shardwise.events import user_site
from shardwise.layout.cut import plain, renumbered
from shardwise.layout.layout import Dims, Layout
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Placement, Replicate, Shard, as_placement
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.explain import explained

OPEN = "?"
_ABSENT: Any = object()
_KEPT = "_shardwise_mark"  # where a plain tensor remembers its mark


class Watcher(Protocol):
    """Who records marks while a function runs."""

    def marked(self, x: Tensor, mark: Mark) -> Tensor:
        """Note a mark on a value; returns what stands for the marked value."""
        ...


watcher: ContextVar[Watcher | None] = ContextVar("shardwise_propagation", default=None)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a user said about one tensor.

    Attributes:
        mesh: The mesh that was named, or None: that of the tensor, or of the propagation.
        spec: As given.
        site: The user's line.
    """

    mesh: Mesh | None
    spec: Any
    site: str

    def on(self, mesh: Mesh, shape: Sequence[int]) -> Wish:
        """What is wished on a mesh, for a tensor of this shape.

        Raises:
            LayoutError: The spec does not fit the tensor.
            MeshError: The mesh that was named is no slice of this one.
        """
        if self.mesh is None or self.mesh is mesh:
            return read_spec(mesh, self.spec, shape)
        axes = tuple(range(mesh.ndim)) if self.mesh == mesh else self.mesh.axes_in(mesh)
        if axes is None:
            raise MeshError(
                f"a mark is on {self.mesh}, which is no slice of {mesh}.",
                tries=["name one mesh for all marks, or slices of it"],
            )
        small = read_spec(self.mesh, self.spec, shape)
        free = {a for a in range(mesh.ndim) if a not in axes} | {axes[a] for a in small.free}
        dims = tuple(renumbered(on_dim, axes.__getitem__) for on_dim in small.dims)
        return Wish(dims, small.open, frozenset(free), small.sized)


@dataclass(frozen=True, slots=True)
class Wish:
    """A mark, read on a mesh.

    Attributes:
        dims: For each dim the axes that shard it, major to minor.
        open: For each dim whether axes that are not named may shard it too.
        free: Axes of which nothing is said: they may shard any dim.
        sized: It says where dims are cut: a partition spec does not.
    """

    dims: Dims
    open: tuple[bool, ...]
    free: frozenset[int]
    sized: bool = False

    @property
    def named(self) -> frozenset[int]:
        """The axes that are named."""
        return frozenset(a for axes in self.dims for a in axes)

    def allows(self, axis: int, dim: int) -> bool:
        """Whether an axis may shard a dim."""
        return axis in self.dims[dim] or (
            axis not in self.named and (axis in self.free or self.open[dim])
        )

    def leaves(self, axis: int) -> bool:
        """Whether an axis may do something that is not said here."""
        return axis not in self.named and (axis in self.free or any(self.open))

    def over(self, layout: Layout) -> Layout:
        """A layout changed where the mark says something."""
        dims = tuple(self._merged(d, now) for d, now in enumerate(layout.dims))
        partial = tuple(
            op if self.leaves(axis) else None for axis, op in enumerate(layout.partial)
        )
        return layout.with_placement(dims, partial)

    def _merged(self, dim: int, now: tuple[int, ...]) -> tuple[int, ...]:
        """The axes named for a dim with those that may stay, before or behind them as they are now."""
        wanted = self.dims[dim]
        kept = [a for a in now if self.allows(a, dim) and a not in wanted]
        if not wanted and len(kept) == len(now):
            return now
        if not kept:
            return now if plain(now) == wanted and not self.sized else wanted
        at = min((now.index(a) for a in wanted if a in now), default=len(now))
        before = [a for a in kept if now.index(a) < at] if at < len(now) else []
        found = (*before, *wanted, *(a for a in kept if a not in before))
        return now if plain(now) == found and not self.sized else found


def read_spec(mesh: Mesh, given: Any, shape: Sequence[int]) -> Wish:
    """Read placements (one per axis), a partition spec (one entry per dim) or a layout.

    Raises:
        LayoutError: It fits neither the tensor nor the mesh, or has a pending reduction.
    """
    ndim = len(shape)
    if isinstance(given, Layout):
        if given.shape != tuple(shape) or given.is_partial:
            raise LayoutError(
                f"a tensor of shape {tuple(shape)} cannot be marked with {given}."
            )
        return Wish(given.on(mesh).dims, (False,) * ndim, frozenset(), True)
    if isinstance(given, (Placement, str)):
        given = (given,)
    if not isinstance(given, Sequence):
        raise LayoutError(
            f"not a spec: {given!r}.",
            tries=[
                '("dp", None): for each dim an axis, a tuple of axes, None (whole) or "?" (open)',
                "[Shard(0), Replicate()]: for each axis a placement",
                "(): whole on every rank",
            ],
        )
    entries = tuple(given)
    if any(_is_placement(e) for e in entries):
        return _read_placements(mesh, entries, shape)
    return _read_partition(mesh, entries, ndim)


def _is_placement(entry: Any) -> bool:
    return isinstance(entry, Placement) or type(entry).__name__ in (
        "Shard",
        "Replicate",
        "Partial",
    )


def _read_placements(mesh: Mesh, entries: tuple[Any, ...], shape: Sequence[int]) -> Wish:
    free = frozenset(a for a, e in enumerate(entries) if e is None)
    closed = [Replicate() if e is None else as_placement(e) for e in entries]
    if not all(isinstance(p, (Shard, Replicate)) for p in closed):
        raise LayoutError(
            f"a pending sum is no place to be: {list(entries)}.",
            tries=["Replicate() or Shard(dim), to have it settled there"],
        )
    layout = Layout.of(mesh, closed, shape)
    return Wish(layout.dims, (False,) * len(shape), free, True)


def _read_partition(mesh: Mesh, entries: tuple[Any, ...], ndim: int) -> Wish:
    if entries.count(...) == 1:
        at = entries.index(...)
        missing = max(ndim - len(entries) + 1, 0)
        entries = (*entries[:at], *[OPEN] * missing, *entries[at + 1 :])
    if len(entries) > ndim:
        raise LayoutError(
            f"a spec of {len(entries)} entries {entries} for a tensor with {ndim} dims."
        )
    dims: list[tuple[int, ...]] = []
    for entry in entries:
        names = () if entry is None or entry == OPEN else entry
        names = (names,) if isinstance(names, (str, int)) else names
        if not isinstance(names, (tuple, list)) or not all(
            isinstance(n, (str, int)) for n in names
        ):
            raise LayoutError(
                f"the entry {entry!r} of the spec {entries} is none.",
                tries=[
                    'an axis, a tuple of axes, None (whole), "?" (open) or one ... for the rest'
                ],
            )
        dims.append(tuple(mesh.axis(n) for n in names))
    used = [a for axes in dims for a in axes]
    if len(set(used)) != len(used):
        raise LayoutError(f"the spec {entries} uses a mesh axis twice.")
    rest = ndim - len(entries)
    opened = (*[entry == OPEN for entry in entries], *[False] * rest)
    return Wish((*dims, *[()] * rest), opened, frozenset())


@explained("mark_sharding", "x", "mesh", "partition_spec")
def mark_sharding(x: Tensor, mesh: Any = None, partition_spec: Any = _ABSENT) -> Tensor:
    """Say how one tensor is laid out: a parameter, an input, or an activation inside a forward.

    ```text
    tiled              mark_sharding(x, mesh, ("dp", None, "tp"))     dim 0 over dp, dim 2 over tp
    several axes       mark_sharding(x, mesh, (("dp", "tp"), None))   dim 0 over both, dp outermost
    partially tiled    mark_sharding(x, mesh, (None, "tp"))           whole over the axes that are not named
    replicated         mark_sharding(x, mesh, ())
    partly open        mark_sharding(x, mesh, (..., "tp"))            the other dims as propagation finds them
                       mark_sharding(x, mesh, ("?", "tp", None))      dim 0 open, dim 2 whole
    by placements      mark_sharding(x, [None, Shard(-1)])            one per axis; None: that axis is open
    at chosen sizes    mark_sharding(x, [None, Shard(1, unit=64)])    as Shard says
    ```

    On a DTensor it redistributes at once, and what is open stays. On a plain tensor it computes nothing: the mark
    is remembered, and `propagate` reads it (a copy of the tensor has no mark). While `propagate` runs it is a
    constraint on the value here.

    Args:
        x: The tensor.
        mesh: The mesh, or a slice of it (``mesh["tp"]``), which says nothing about the other axes. Left out:
            ``mark_sharding(x, spec)``, on the mesh of ``x`` or of the propagation.
        partition_spec: One entry per dim: an axis (name or index), a tuple of axes, None, ``"?"``; one ``...``
            stands for all dims that are not given. Dims missing at the end are whole. Or placements, or a layout.

    Returns:
        The marked tensor; use it in place of ``x``.

    Raises:
        LayoutError: The spec does not fit the tensor or the mesh, or asks for a pending sum.
        MeshError: An axis that the mesh has not; a mesh that is no slice of the tensor's.

    Example:
        >>> x = mark_sharding(x, mesh, ("dp", ...))
        >>> q = mark_sharding(q.view(b, t, heads, -1), mesh, ("?", "?", "tp", None))
    """
    spec = partition_spec
    if spec is _ABSENT:
        mesh, spec = None, mesh
    if not isinstance(x, Tensor):
        raise LayoutError(f"mark_sharding marks a tensor, not {x!r}.")
    if spec is None:
        raise LayoutError(
            "mark_sharding needs a spec.", tries=["(): whole on every rank", '("dp", ...)']
        )
    named = None if mesh is None else as_mesh(mesh)
    spec = tuple(spec) if type(spec) is list else spec
    watching = watcher.get()
    if watching is None and isinstance(x, DTensor):
        wanted = _placed(x._spec.layout, named, named and named.names, spec)
        return x if wanted is x._spec.layout else x.redistribute(wanted.mesh, wanted)
    mark = Mark(named, spec, user_site())
    if named is not None:
        read_spec(named, spec, tuple(x.shape))  # what is wrong raises here
    if watching is not None:
        return watching.marked(x, mark)
    if x.is_leaf:
        setattr(x, _KEPT, mark)
    return x


def _placed(layout: Layout, mesh: Mesh | None, names: Any, spec: Any) -> Layout:
    """Where a mark puts a DTensor, remembered; meshes that differ in names are equal, so names are in the key."""
    try:
        return _placed_once(layout, mesh, names, spec)
    except TypeError:  # what has no hash
        return _placed_once.__wrapped__(layout, mesh, names, spec)


@lru_cache(4096)
def _placed_once(layout: Layout, mesh: Mesh | None, names: Any, spec: Any) -> Layout:
    if mesh is not None and mesh is not layout.mesh and layout.mesh.axes_in(mesh):
        layout = layout.on(mesh)  # from a slice to the larger mesh
    return Mark(mesh, spec, "").on(layout.mesh, layout.shape).over(layout)


def mark_of(x: Tensor) -> Mark | None:
    """The mark that a plain tensor remembers."""
    return getattr(x, _KEPT, None)


def forget(x: Tensor) -> None:
    """Let a tensor forget its mark."""
    if hasattr(x, _KEPT):
        delattr(x, _KEPT)
