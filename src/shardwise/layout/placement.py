"""Placements: what one mesh axis does to a tensor. torch's names; one per mesh axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import LayoutError
from shardwise.layout.boxes import chunk

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """Base of the three placements."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards (the given dim of) the tensor."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank on the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction (of the given kind) is pending on the axis."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The tensor dim ``dim`` is cut over the axis: as ``torch.chunk`` cuts, or at chosen sizes.

    Args:
        dim: Tensor dim; negative counts from the end.
        order: Position among the axes that cut the same dim (0 is the outermost); None means mesh
            order.
        sizes: How much each rank on the axis holds, in elements; 0 is allowed. Where other axes cut the dim
            before this one, the sizes may be given for each of their pieces in turn.
        unit: The dim is cut in multiples of so many elements (the last piece takes what is left): heads
            of an attention that do not divide.
        owner: The coordinate on the axis of the one rank that holds all of it.

    Raises:
        LayoutError: ``dim`` is no number, more than one of ``sizes``, ``unit`` and ``owner``, a negative size, a unit below one.

    Example:
        >>> Shard(0, sizes=(6, 2)), Shard(1, unit=64), Shard(0, owner=3)
        (Shard(dim=0, sizes=(6, 2)), Shard(dim=1, unit=64), Shard(dim=0, owner=3))
    """

    dim: int
    order: int | None = None
    sizes: tuple[int, ...] | None = field(default=None, kw_only=True)
    unit: int | None = field(default=None, kw_only=True)
    owner: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not hasattr(self.dim, "__index__"):
            raise LayoutError(f"Shard takes the number of a dim, not {self.dim!r}.")
        if self.sizes is None and self.unit is None and self.owner is None:
            return
        if sum(x is not None for x in (self.sizes, self.unit, self.owner)) > 1:
            raise LayoutError(
                f"a dim is cut by sizes, by a unit or given to an owner: {self!r}."
            )
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(int(n) for n in self.sizes))
        if min(self.sizes or (0,)) < 0 or (self.owner or 0) < 0:
            raise LayoutError(f"sizes and owners are not negative: {self!r}.")
        if self.unit is not None and self.unit < 1:
            raise LayoutError(f"a unit is of one element at least: {self!r}.")

    @property
    def chosen(self) -> dict[str, Any]:
        """What is chosen of sizes, unit and owner, by name."""
        return {"sizes": self.sizes, "unit": self.unit, "owner": self.owner}

    @property
    def is_sized(self) -> bool:
        """Whether the dim is cut otherwise than ``torch.chunk`` cuts."""
        return self.sizes is not None or self.unit is not None or self.owner is not None

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards (the given dim of) the tensor."""
        return dim is None or dim == self.dim

    @staticmethod
    def local_shard_size_and_offset(
        curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """Size and start of the piece of coordinate ``rank`` of a dim cut in ``num_chunks``; torch's helper.

        An empty piece starts at the end of the dim.
        """
        start, size = chunk(curr_local_size, num_chunks, rank)
        return size, start

    def __repr__(self) -> str:
        """As one would write it."""
        said = [f"dim={self.dim}"]
        said += [
            f"{name}={value}"
            for name in ("order", "sizes", "unit", "owner")
            if (value := getattr(self, name)) is not None
        ]
        return f"Shard({', '.join(said)})"

    def __str__(self) -> str:
        """Short form for messages."""
        how = ""
        if self.sizes is not None:
            shown = "|".join(map(str, self.sizes[:8]))
            how = f": {shown}" + ("|..." if len(self.sizes) > 8 else "")
        elif self.unit is not None:
            how = f": unit {self.unit}"
        elif self.owner is not None:
            how = f": owner {self.owner}"
        return f"S({self.dim}{how})" + ("" if self.order is None else f"@{self.order}")


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank on the axis holds the same values."""

    def is_replicate(self) -> bool:
        """True."""
        return True

    def __repr__(self) -> str:
        """As one would write it."""
        return "Replicate()"

    def __str__(self) -> str:
        """Short form for messages."""
        return "R"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """The value is the reduction, over the axis, of what the ranks hold.

    Args:
        reduce_op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial does not know {self.reduce_op!r}; it knows {', '.join(REDUCE_OPS)}."
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the pending reduction is of the given kind."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        """As one would write it."""
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        """Short form for messages."""
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


def as_placement(p: object) -> Placement:
    """Accept our placements and torch's, by the names that both use.

    Raises:
        LayoutError: It is neither.
    """
    if isinstance(p, Placement):
        return p
    kind = type(p).__name__
    if kind == "Shard":
        return Shard(int(p.dim))  # pyright: ignore[reportAttributeAccessIssue]
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial":
        return Partial(str(p.reduce_op))  # pyright: ignore[reportAttributeAccessIssue]
    raise LayoutError(
        f"not a placement: {p!r}.", tries=["Shard(dim), Replicate() or Partial(op)"]
    )
