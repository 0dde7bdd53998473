"""The layout: what is where.

Invariants:
    1. A layout speaks about the whole mesh; what *this* rank holds follows from layout + coordinate.
    2. Layouts are interned: equal values are the same object, so they are compared by identity.
    3. An axis does one thing to a tensor: it shards one dim, or it has a pending reduction, or neither.
    4. The axes that shard a dim are ordered, major to minor; placements and specs are notations for it.
    5. The sizes of a dim's pieces, where they are not torch.chunk's, are part of its entry in ``dims`` (a ``Cut``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from shardwise.errors import LayoutError, MeshError
from shardwise.layout import boxes
from shardwise.layout.cut import Cut, chunks, cut, plain, renumbered
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Partial, Placement, Replicate, Shard, as_placement

Dims = tuple[tuple[int, ...], ...]
Partials = tuple[str | None, ...]

_INTERNED: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()


class Layout:
    """A tensor's global shape, stride and dtype, and how a mesh holds it.

    Attributes:
        mesh: The mesh.
        dims: For each tensor dim the mesh axes that shard it, major to minor; a ``Cut`` where at chosen sizes.
        partial: For each mesh axis the pending reduction, or None.
        shape: Global shape.
        stride: Global stride, in elements.
        dtype: The dtype.
        is_sized: Whether a dim is cut otherwise than ``torch.chunk`` cuts.
    """

    __slots__ = (
        "__weakref__",
        "_placements",
        "_relatives",
        "dims",
        "dtype",
        "is_sized",
        "mesh",
        "partial",
        "shape",
        "stride",
    )

    mesh: Mesh
    dims: Dims
    partial: Partials
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    is_sized: bool

    def __new__(
        cls,
        mesh: Mesh,
        dims: Dims,
        partial: Partials,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: Any,
    ) -> Layout:
        """Return the one layout with these values."""
        key = (
            id(mesh),
            dims,
            partial,
            shape,
            stride,
            dtype,
        )  # meshes are never freed: ids are safe
        found = _INTERNED.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.mesh, self.dims, self.partial = mesh, dims, partial
        self.shape, self.stride, self.dtype = shape, stride, dtype
        self._placements = None
        self._relatives = {}
        assert len(dims) == len(shape) == len(stride), "one entry per tensor dim"
        assert len(partial) == mesh.ndim, "one entry per mesh axis"
        self.is_sized = False
        for n, axes in zip(shape, dims):
            if isinstance(axes, Cut):
                if axes.total != n:
                    raise LayoutError(f"pieces of {axes.sizes} are not those of a dim of {n}.")
                self.is_sized = True
        _INTERNED[key] = self
        return self

    def __eq__(self, other: object) -> bool:
        """Identity; and a layout is torch's ``strided``, which code of torch's asks of ``x.layout``."""
        return self is other or other is torch.strided

    __hash__ = object.__hash__

    # -- notations ---------------------------------------------------------------------------
    @classmethod
    def of(
        cls,
        mesh: Mesh,
        placements: Any,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        dtype: Any = None,
    ) -> Layout:
        """A layout from placements (one per mesh axis), a spec (one entry per tensor dim) or a layout.

        Raises:
            LayoutError: Too many entries, a dim or an axis that does not exist, an axis used twice.
        """
        shape = tuple(shape)
        stride = boxes.contiguous_stride(shape) if stride is None else tuple(stride)
        dims, partial = parse(mesh, placements, shape)
        return cls(mesh, dims, partial, shape, stride, dtype)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis, torch's notation; ``order`` is set only where it is not mesh order."""
        if self._placements is None:
            out: list[Placement] = [
                Replicate() if op is None else Partial(op) for op in self.partial
            ]
            for dim, axes in enumerate(self.dims):
                in_order = list(axes) == sorted(axes)
                sizes = _levels(axes, self.mesh.shape)
                for k, axis in enumerate(axes):
                    order = None if in_order else k
                    out[axis] = (
                        Shard(dim, order, sizes=sizes[k]) if sizes else Shard(dim, order)
                    )
            self._placements = tuple(out)
        return self._placements

    @property
    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """One entry per tensor dim: None, an axis name, or several, major to minor."""
        name = self.mesh.axis_name
        return tuple(
            None if not axes else name(axes[0]) if len(axes) == 1 else tuple(map(name, axes))
            for axes in self.dims
        )

    # -- questions ---------------------------------------------------------------------------
    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def is_partial(self) -> bool:
        """Whether any reduction is pending."""
        return any(op is not None for op in self.partial)

    @property
    def is_sharded(self) -> bool:
        """Whether any dim is cut."""
        return any(self.dims)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.is_partial and not self.is_sharded

    @property
    def is_contiguous(self) -> bool:
        """Whether the global stride is row-major."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride)):
            if n != 1 and s != expected:
                return 0 in self.shape
            expected *= n
        return True

    def axis_dim(self, axis: int) -> int | None:
        """The tensor dim that an axis shards, or None."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return dim
        return None

    def box(self, coord: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of the piece at a coordinate."""
        return boxes.box(self.shape, self.dims, self.mesh.shape, coord)

    def is_even_dim(self, dim: int) -> bool:
        """Whether all ranks hold equally much of a dim."""
        axes = self.dims[dim]
        if isinstance(axes, Cut):
            return len(set(axes.sizes)) == 1
        return boxes.is_even(self.shape[dim], [self.mesh.shape[a] for a in axes])

    def has_empty(self) -> bool:
        """Whether some rank holds nothing of a cut dim, or would if it were cut as ``torch.chunk`` cuts."""
        return any(self.may_be_empty(dim) for dim, axes in enumerate(self.dims) if axes)

    def may_be_empty(self, dim: int) -> bool:
        """Whether some rank holds nothing of a dim, or would if it were cut as ``torch.chunk`` cuts."""
        axes = self.dims[dim]
        if isinstance(axes, Cut) and 0 in axes.sizes:
            return True
        sizes = [self.mesh.shape[a] for a in axes]
        return boxes.nested(self.shape[dim], sizes, [k - 1 for k in sizes])[1] == 0

    # -- relatives ---------------------------------------------------------------------------
    def with_placement(self, dims: Dims, partial: Partials) -> Layout:
        """The same tensor, placed otherwise."""
        if partial == self.partial and dims == self.dims:
            return self
        return Layout(self.mesh, dims, partial, self.shape, self.stride, self.dtype)

    def chunked(self) -> Layout:
        """The same axes on the same dims, cut as ``torch.chunk`` cuts."""
        if not self.is_sized:
            return self
        return self.with_placement(tuple(plain(axes) for axes in self.dims), self.partial)

    def with_tensor(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any
    ) -> Layout:
        """Another tensor, placed alike."""
        return Layout(self.mesh, self.dims, self.partial, shape, stride, dtype)

    def with_dtype(self, dtype: Any) -> Layout:
        """The same layout at another dtype."""
        if dtype == self.dtype:
            return self
        return Layout(self.mesh, self.dims, self.partial, self.shape, self.stride, dtype)

    def replicated(self) -> Layout:
        """The same tensor, whole on every rank."""
        return self.with_placement(((),) * self.ndim, (None,) * self.mesh.ndim)

    def dual(self) -> Layout:
        """The layout of the gradient: R and P(sum) swap, S stays (design: gradients).

        Other pending reductions are scaled or masked into a sum when they are entered, so their gradient
        is that of a sum.
        """
        found = self._relatives.get("dual")
        if found is None:
            sharded = {a for axes in self.dims for a in axes}
            partial = tuple(
                None if op is not None or a in sharded else "sum"
                for a, op in enumerate(self.partial)
            )
            found = self._relatives["dual"] = self.with_placement(self.dims, partial)
        return found

    def on(self, mesh: Mesh) -> Layout:
        """This layout on a larger mesh that its mesh is a slice of: replicated over the missing axes.

        Raises:
            MeshError: The mesh is neither equal nor a slice.
        """
        if mesh is self.mesh:
            return self
        axes = tuple(range(mesh.ndim)) if mesh == self.mesh else self.mesh.axes_in(mesh)
        if axes is None:
            from_, to = self.mesh, mesh
            raise MeshError(
                f"a layout on {from_} cannot be read on {to}: it is no slice of it."
            )
        partial: list[str | None] = [None] * mesh.ndim
        for a, op in zip(axes, self.partial):
            partial[a] = op
        dims = tuple(renumbered(dim, axes.__getitem__) for dim in self.dims)
        return Layout(mesh, dims, tuple(partial), self.shape, self.stride, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the values."""
        return Layout, (self.mesh, self.dims, self.partial, self.shape, self.stride, self.dtype)

    def __copy__(self) -> Layout:
        """Interned: a copy is itself."""
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        """Interned: a copy is itself."""
        return self

    def __str__(self) -> str:
        """Short typed form for messages: ``f32[8, 6] {dp: S(0), tp: R}``."""
        dtype = str(self.dtype).removeprefix("torch.")
        for long, short in (
            ("bfloat", "bf"),
            ("float", "f"),
            ("uint", "u"),
            ("int", "i"),
            ("complex", "c"),
        ):
            if dtype.startswith(long):
                dtype = short + dtype.removeprefix(long)
                break
        where = ", ".join(
            f"{self.mesh.axis_name(a)}: {p}" for a, p in enumerate(self.placements)
        )
        return f"{dtype}{list(self.shape)} {{{where}}}"

    __repr__ = __str__


def parse(
    mesh: Mesh, placements: Any, shape: Sequence[int], *, sized: bool = True
) -> tuple[Dims, Partials]:
    """Read placements, a per-dim spec or a layout into (axes per dim, pending reduction per axis).

    Args:
        mesh: The mesh.
        placements: What a user gave.
        shape: Global shape of the tensor.
        sized: Read the sizes that placements choose; without, only the number of dims matters.

    Raises:
        LayoutError: See ``Layout.of``; sizes that are not those of the dim.
    """
    ndim = len(shape)
    if placements is None:
        return ((),) * ndim, (None,) * mesh.ndim
    if isinstance(placements, Layout):
        if placements.mesh is not mesh:
            placements = placements.on(mesh)
        if len(placements.dims) != ndim:
            raise LayoutError(
                f"the layout {placements} is of {placements.ndim} dims, the tensor has {ndim}."
            )
        for n, axes in zip(shape, placements.dims):
            if sized and isinstance(axes, Cut) and axes.total != n:
                raise LayoutError(
                    f"the layout {placements} has sizes for a dim of {axes.total}, not {n}."
                )
        return placements.dims, placements.partial
    if isinstance(placements, (Placement, str)):
        placements = (placements,)
    if not isinstance(placements, Sequence):
        kind = type(placements).__name__
        raise LayoutError(
            f"placements must be placements, a spec or a layout, not a {kind}.",
            tries=["x.placements", "x.layout"],
        )
    entries = tuple(placements)
    if entries and all(e is None or isinstance(e, (str, tuple, list)) for e in entries):
        return _parse_spec(mesh, entries, ndim)
    given = tuple(as_placement(p) for p in entries)
    return _parse_placements(mesh, given, tuple(shape), sized)


def _parse_placements(
    mesh: Mesh, entries: tuple[Placement, ...], shape: tuple[int, ...], sized: bool
) -> tuple[Dims, Partials]:
    ndim = len(shape)
    if len(entries) > mesh.ndim:
        said = ", ".join(map(str, entries))
        raise LayoutError(
            f"{len(entries)} placements ({said}) for a mesh with {mesh.ndim} axes: {mesh}."
        )
    on_dim: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    partial: list[str | None] = [None] * mesh.ndim
    chosen: set[int] = set()
    for axis, p in enumerate(entries):
        if isinstance(p, Shard):
            if not -ndim <= p.dim < ndim:
                raise LayoutError(
                    f"{p!r} on a tensor with {ndim} dims (mesh axis {mesh.axis_name(axis)})."
                )
            dim = p.dim % ndim
            on_dim[dim].append((axis if p.order is None else p.order, axis))
            if sized and p.is_sized:
                chosen.add(dim)
        elif isinstance(p, Partial):
            partial[axis] = p.reduce_op
    kinds = {"sum" if op == "avg" else op for op in partial if op is not None}
    if len(kinds) > 1:
        said = ", ".join(map(str, entries))
        raise LayoutError(
            f"pending reductions of different kinds do not commute: [{said}] has no one value."
        )
    dims = [tuple(axis for _, axis in sorted(found)) for found in on_dim]
    for dim in chosen:
        dims[dim] = _sized(mesh, dims[dim], entries, shape[dim])
    return tuple(dims), tuple(partial)


def _sized(
    mesh: Mesh, axes: tuple[int, ...], entries: tuple[Placement, ...], n: int
) -> tuple[int, ...]:
    """The cut of a dim over some axes, each of which cuts the pieces of the one before."""
    sizes = [n]
    for axis in axes:
        p, k = entries[axis], mesh.shape[axis]
        assert isinstance(p, Shard), "the axis cuts the dim"
        where = f"{p!r} on mesh axis {mesh.axis_name(axis)}"
        if p.owner is not None:
            if p.owner >= k:
                raise LayoutError(f"{where}: it has {k} ranks.")
            sizes = [m if i == p.owner else 0 for m in sizes for i in range(k)]
        elif p.sizes is None:
            sizes = [m for n in sizes for m in chunks(n, k, p.unit or 1)]
        else:
            given = p.sizes * len(sizes) if len(p.sizes) == k else p.sizes
            made = [sum(given[i : i + k]) for i in range(0, len(given), k)]
            if made != sizes or len(given) != k * len(sizes):
                said = str(sizes[0]) if len(sizes) == 1 else f"pieces of {sizes}"
                raise LayoutError(
                    f"{where}: the sizes must be {k * len(sizes)}, one for each rank, and make {said}.",
                    tries=[f"Shard({p.dim}, unit=n), which cuts in multiples of n elements"],
                )
            sizes = list(given)
    return cut(axes, sizes, [mesh.shape[a] for a in axes])


def _levels(axes: tuple[int, ...], ranks: Sequence[int]) -> list[tuple[int, ...] | None]:
    """For each axis of a chosen cut what a placement says: sizes, or None where it cuts as ``torch.chunk``."""
    if not isinstance(axes, Cut):
        return []
    out: list[tuple[int, ...] | None] = []
    sizes = axes.sizes
    for a in reversed(axes):
        k = ranks[a]
        before = tuple(sum(sizes[i : i + k]) for i in range(0, len(sizes), k))
        as_torch = tuple(m for n in before for m in chunks(n, k)) == sizes
        out.append(None if as_torch else sizes)
        sizes = before
    return out[::-1]


def _parse_spec(mesh: Mesh, entries: tuple[Any, ...], ndim: int) -> tuple[Dims, Partials]:
    if len(entries) > ndim:
        raise LayoutError(
            f"a spec of {len(entries)} entries {entries} for a tensor with {ndim} dims."
        )
    dims: list[tuple[int, ...]] = []
    for entry in entries:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        dims.append(tuple(mesh.axis(n) for n in names))
    used = [a for axes in dims for a in axes]
    if len(set(used)) != len(used):
        raise LayoutError(f"the spec {entries} uses a mesh axis twice.")
    dims += [()] * (ndim - len(dims))
    return tuple(dims), (None,) * mesh.ndim
