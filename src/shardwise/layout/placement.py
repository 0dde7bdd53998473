"""Placements: what one mesh axis does to a tensor. torch's names; one per mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import LayoutError

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
    """The tensor dim ``dim`` is cut over the axis, as ``torch.chunk`` cuts.

    Args:
        dim: Tensor dim; negative counts from the end.
        order: Position among the axes that cut the same dim (0 is the outermost); None means mesh
            order.
    """

    dim: int
    order: int | None = None

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards (the given dim of) the tensor."""
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        """As one would write it."""
        return (
            f"Shard(dim={self.dim})"
            if self.order is None
            else f"Shard(dim={self.dim}, order={self.order})"
        )

    def __str__(self) -> str:
        """Short form for messages."""
        return f"S({self.dim})" if self.order is None else f"S({self.dim})@{self.order}"


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
