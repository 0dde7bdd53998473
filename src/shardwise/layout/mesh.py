"""The mesh: ranks laid out on named axes. Pure data; who talks over it is the business of ``comm``.

Invariants:
    1. A mesh is device type, shape, ranks (row-major) and names. Nothing else.
    2. Meshes are interned: the same four values give the same object.
    3. Meshes over the same ranks in the same shape and order are equal, whatever their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
import itertools
import math
from typing import Any, ClassVar, Protocol

from shardwise.errors import MeshError


class MeshRuntime(Protocol):
    """What a mesh needs to know about the running program; installed by ``comm``."""

    def rank(self) -> int:
        """Global rank of the caller."""
        ...

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The communication group over ``ranks``."""
        ...

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        """Global ranks of a communication group, in its own order."""
        ...

    def tensor(self, values: Sequence[int], shape: tuple[int, ...]) -> Any:
        """An integer tensor (so that this floor needs no torch)."""
        ...

    def profile(self, mesh: Mesh, given: Any) -> Any:
        """The figures of a mesh, measured or given."""
        ...


_ENTERED: ContextVar[tuple[Mesh, ...]] = ContextVar("shardwise_meshes", default=())


def entered_mesh() -> Mesh | None:
    """The mesh of the innermost ``with mesh:`` block, if any."""
    stack = _ENTERED.get()
    return stack[-1] if stack else None


class Mesh:
    """An n-dimensional array of ranks with named axes (public name ``DeviceMesh``).

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        mesh: Ranks as nested lists, an array or a tensor.
        mesh_dim_names: One name per axis; optional.

    Raises:
        MeshError: Ranks repeat, or names do not fit the axes.
    """

    runtime: ClassVar[MeshRuntime | None] = None
    _interned: ClassVar[dict[tuple[Any, ...], Mesh]] = {}
    _flattened: ClassVar[
        dict[str, list[tuple[str, ...]]]
    ] = {}  # what `flatten` named, and of which axes

    __slots__ = ("_group_cache", "_index", "device_type", "names", "ranks", "shape", "strides")

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None
    strides: tuple[int, ...]

    def __new__(
        cls,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: None = None,
        _init_backend: bool = True,  # torch's: groups are made here when they are first used
    ) -> Mesh:
        """Return the one mesh with these values."""
        refuse_backend(backend_override)
        shape, ranks = _flatten_ranks(mesh)
        names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
        return cls.of(device_type, shape, ranks, names)

    @classmethod
    def of(
        cls,
        device_type: str,
        shape: tuple[int, ...],
        ranks: tuple[int, ...],
        names: tuple[str, ...] | None = None,
    ) -> Mesh:
        """Return the one mesh with these values, checked."""
        key = (device_type, shape, ranks, names)
        found = cls._interned.get(key)
        if found is not None:
            return found
        if math.prod(shape) != len(ranks):
            raise MeshError(
                f"a mesh of shape {shape} needs {math.prod(shape)} ranks, got {len(ranks)}"
            )
        if len(set(ranks)) != len(ranks):
            raise MeshError(f"a mesh must not repeat a rank: {ranks}")
        if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
            raise MeshError(
                f"a mesh of shape {shape} needs {len(shape)} distinct axis names, got {names}"
            )
        self = object.__new__(cls)
        self.device_type, self.shape, self.ranks, self.names = device_type, shape, ranks, names
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        self.strides = tuple(strides)
        self._index = {rank: i for i, rank in enumerate(ranks)}
        self._group_cache = {}
        return cls._interned.setdefault(key, self)

    @classmethod
    def from_group(
        cls,
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> Mesh:
        """The mesh over the ranks of groups that exist. The groups themselves are not used: a mesh has its own.

        Args:
            group: One group, or a list with the caller's group along each axis.
            device_type: ``"cpu"``, ``"cuda"``, ...
            mesh: The ranks, as for the constructor; needed for several groups, checked against them.
            mesh_dim_names: One name per axis; optional.

        Raises:
            MeshError: Several groups without ``mesh``, or ranks that are not those of the groups.
        """
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None and len(groups) != 1:
            raise MeshError(
                f"{len(groups)} groups do not tell a mesh.",
                tries=["mesh=the ranks, as nested lists"],
            )
        held = [_runtime().ranks_of(g) for g in groups]
        made = cls(
            device_type, list(held[0]) if mesh is None else mesh, mesh_dim_names=mesh_dim_names
        )
        if len(groups) not in (1, made.ndim):
            raise MeshError(f"{len(groups)} groups for the {made.ndim} axes of {made}.")
        coord = made.coordinate_of(made.get_rank())
        want = [made.ranks]
        if len(groups) > 1:
            want = (
                []
                if coord is None
                else [made.group_ranks((a,), coord) for a in range(made.ndim)]
            )
        for ranks, own in zip(held, want):
            if sorted(ranks) != sorted(own):
                raise MeshError(f"the group of ranks {ranks} is not one of {made}.")
        return made

    # -- shape -------------------------------------------------------------------------------
    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Axis names, torch's spelling."""
        return self.names

    @property
    def mesh(self) -> Any:
        """The ranks as an integer tensor of the mesh's shape."""
        return _runtime().tensor(self.ranks, self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, of the whole mesh or along one axis."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def axis(self, axis: int | str) -> int:
        """Index of an axis given by name or (possibly negative) index.

        Raises:
            MeshError: There is no such axis.
        """
        if isinstance(axis, str):
            if self.names is None or axis not in self.names:
                raise MeshError(
                    f'the mesh has no axis "{axis}": {self}.',
                    tries=() if self.names else ["init_device_mesh(..., mesh_dim_names=(...))"],
                )
            return self.names.index(axis)
        if not -self.ndim <= axis < self.ndim:
            raise MeshError(
                f"axis {axis} is out of range for a mesh with {self.ndim} axes: {self}."
            )
        return axis % self.ndim if self.ndim else 0

    def axis_name(self, axis: int) -> str:
        """Name of an axis; its index as text when the mesh has no names."""
        return self.names[axis] if self.names is not None else str(axis)

    # -- ranks -------------------------------------------------------------------------------
    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Coordinates of a global rank, or None if it is not on the mesh."""
        i = self._index.get(rank)
        if i is None:
            return None
        return tuple(i // stride % n for stride, n in zip(self.strides, self.shape))

    def rank_at(self, coord: Sequence[int]) -> int:
        """Global rank at the coordinates."""
        return self.ranks[sum(c * s for c, s in zip(coord, self.strides))]

    def group_ranks(self, axes: tuple[int, ...], coord: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that differ from ``coord`` only on ``axes``, row-major in the given axis order."""
        key = (axes, tuple(0 if i in axes else c for i, c in enumerate(coord)))
        found = self._group_cache.get(key)
        if found is None:
            base = sum(c * s for c, s in zip(key[1], self.strides))
            places = itertools.product(*(range(self.shape[a]) for a in axes))
            steps = [self.strides[a] for a in axes]
            found = tuple(
                self.ranks[base + sum(p * s for p, s in zip(at, steps))] for at in places
            )
            self._group_cache[key] = found
        return found

    def coordinates(self) -> list[tuple[int, ...]]:
        """Coordinates of all ranks, in the order of ``ranks``."""
        return list(itertools.product(*map(range, self.shape)))

    def get_rank(self) -> int:
        """Global rank of the caller."""
        return _runtime().rank()

    def get_coordinate(self) -> list[int] | None:
        """Coordinates of the caller, or None if it is not on the mesh."""
        coord = self.coordinate_of(self.get_rank())
        return None if coord is None else list(coord)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Coordinate of the caller on one axis (the only one when not given)."""
        coord = self.coordinate_of(self.get_rank())
        if coord is None:
            raise MeshError(f"rank {self.get_rank()} is not on {self}")
        return coord[self._one_axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Communication group of the caller along one axis."""
        coord = self.coordinate_of(self.get_rank())
        if coord is None:
            raise MeshError(f"rank {self.get_rank()} is not on {self}")
        axis = self._one_axis(mesh_dim, "get_group")
        return _runtime().group(self.group_ranks((axis,), coord))

    def profile(self, given: Any = None) -> Any:
        """How fast this mesh talks: what routes are chosen by from now on. All ranks call it.

        Args:
            given: A ``shardwise.Profile``, equal on all ranks; ``Profile.nodes(mesh.shape)`` is nodes × GPUs. None
                measures a few small collectives along each axis, and takes the medians of all ranks.

        Returns:
            The profile, the same on all ranks.

        Raises:
            MeshError: The figures do not fit the mesh, or differ between ranks.
        """
        return _runtime().profile(self, given)

    def get_all_groups(self) -> list[Any]:
        """Communication groups of the caller, one per axis."""
        return [self.get_group(i) for i in range(self.ndim)]

    def _one_axis(self, axis: int | str | None, what: str) -> int:
        if axis is None:
            if self.ndim != 1:
                names = self.names or range(self.ndim)
                raise MeshError(
                    f"{what} on a mesh with {self.ndim} axes needs mesh_dim",
                    tries=[f"mesh.{what}({axis!r})" for axis in names],
                )
            return 0
        return self.axis(axis)

    # -- other meshes ------------------------------------------------------------------------
    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """The slice of the mesh along the named axes that the caller lies on.

        A name that `flatten` gave to several of the axes stands for these, as one axis.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        groups = [self._axes_of(n) for n in names]
        axes = tuple(a for group in groups for a in group)
        if len(set(axes)) != len(axes):
            raise MeshError(f"a slice must not repeat an axis: {names}")
        shape = tuple(math.prod(self.shape[a] for a in group) for group in groups)
        if axes == tuple(range(self.ndim)) and shape == self.shape and names == self.names:
            return self
        coord = self.coordinate_of(self.get_rank()) or (0,) * self.ndim
        return Mesh.of(self.device_type, shape, self.group_ranks(axes, coord), names)

    def _axes_of(self, name: str) -> tuple[int, ...]:
        """The axes that a name stands for: one of the mesh's, or several that were flattened under it."""
        if self.names is None or name in self.names:
            return (self.axis(name),)
        own = self.names
        fitting = [axes for axes in Mesh._flattened.get(name, ()) if set(axes) <= set(own)]
        if len(fitting) > 1:
            raise MeshError(
                f'"{name}" was given to several flattened slices: {", ".join(map(str, fitting))}.',
                tries=["another name for each", "keep what flatten returns, and use it"],
            )
        return tuple(own.index(n) for n in fitting[0]) if fitting else (self.axis(name),)

    def flatten(self, mesh_dim_name: str | None = None) -> Mesh:
        """The same ranks on one axis, row-major.

        Args:
            mesh_dim_name: Name of the axis; default: the names of the axes, joined by ``_``. A mesh that has these
                axes gives the flattened one under this name, too: ``mesh["dp", "cp"].flatten("dp_cp")``, then
                ``mesh["dp_cp"]`` or ``mesh["dp_cp", "tp"]``.
        """
        name = mesh_dim_name
        if self.names is not None:
            name = "_".join(self.names) if name is None else name
            known = Mesh._flattened.setdefault(name, [])
            if self.names not in known and self.names != (name,):
                known.append(self.names)
        return Mesh.of(
            self.device_type, (len(self.ranks),), self.ranks, None if name is None else (name,)
        )

    _flatten = flatten  # torch's spelling

    def axes_in(self, larger: Mesh) -> tuple[int, ...] | None:
        """The axes of ``larger`` that this mesh is a slice along, or None if it is no slice of it."""
        if not self.ranks or self.ranks[0] not in larger._index or self.ndim > larger.ndim:
            return None
        coord = larger.coordinate_of(self.ranks[0])
        assert coord is not None, "checked above"
        fits = [
            axes
            for axes in itertools.permutations(range(larger.ndim), self.ndim)
            if all(larger.shape[a] == n for a, n in zip(axes, self.shape))
            and larger.group_ranks(axes, coord) == self.ranks
        ]
        if not fits:
            return None
        named = [f for f in fits if self.names == tuple(larger.axis_name(a) for a in f)]
        return (named or fits)[0]  # axes of size one fit anywhere: names decide

    # -- protocol ----------------------------------------------------------------------------
    def __enter__(self) -> Mesh:
        """Make this the mesh of calls that name none."""
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the innermost mesh."""
        _ENTERED.set(_ENTERED.get()[:-1])

    def __eq__(self, other: object) -> bool:
        """Same ranks in the same shape and order on the same kind of device."""
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.device_type, self.shape, self.ranks) == (
            other.device_type,
            other.shape,
            other.ranks,
        )

    def __hash__(self) -> int:
        """Hash that ignores names, as equality does."""
        return hash((self.device_type, self.shape, self.ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the four values."""
        return Mesh.of, (self.device_type, self.shape, self.ranks, self.names)

    def __copy__(self) -> Mesh:
        """Interned: a copy is itself."""
        return self

    def __deepcopy__(self, memo: object) -> Mesh:
        """Interned: a copy is itself."""
        return self

    def __repr__(self) -> str:
        """Axes with their sizes, then the ranks."""
        axes = ", ".join(f"{self.axis_name(i)}={n}" for i, n in enumerate(self.shape))
        first, last = (self.ranks[0], self.ranks[-1]) if self.ranks else (0, -1)
        plain = self.ranks == tuple(range(first, last + 1))
        ranks = (
            (f"ranks {first}-{last}" if last > first else f"rank {first}")
            if plain
            else f"ranks {self.ranks}"
        )
        return f"DeviceMesh({self.device_type}: ({axes}) over {ranks})"


def join(meshes: Sequence[Mesh]) -> Mesh:
    """The mesh that operands on these meshes are combined on: the largest, if the rest are its slices.

    Raises:
        MeshError: Some mesh is neither equal to the largest nor a slice of it.
    """
    largest = max(meshes, key=lambda m: (len(m.ranks), m.ndim))
    for m in meshes:
        if m is not largest and m != largest and m.axes_in(largest) is None:
            raise MeshError(
                f"the operands live on meshes that cannot be combined: {m} is no slice of {largest}."
            )
    return largest


def refuse_backend(backend_override: Any) -> None:
    """Raise if a mesh is to use another backend than the process group's."""
    if backend_override is not None:
        raise MeshError(
            f"backend_override={backend_override!r}: a mesh talks over the backend of the process group.",
            tries=['torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'],
        )


def _runtime() -> MeshRuntime:
    assert Mesh.runtime is not None, "shardwise.comm installs the runtime when it is imported"
    return Mesh.runtime


def _flatten_ranks(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if hasattr(mesh, "tolist"):
        mesh = mesh.tolist()
    if isinstance(mesh, int):
        return (), (mesh,)
    shape: list[int] = []
    level: list[Any] = [mesh]
    while level and isinstance(level[0], (list, tuple)):
        sizes = {len(x) for x in level}
        if len(sizes) != 1:
            raise MeshError(f"the ranks of a mesh must form a full array, got {mesh}")
        shape.append(sizes.pop())
        level = [y for x in level for y in x]
    return tuple(shape), tuple(int(r) for r in level)
