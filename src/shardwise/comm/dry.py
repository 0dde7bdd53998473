"""The transport that moves nothing: right shapes, zeros for values, every event."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Handle, Ready, Transport
from shardwise.errors import CommError


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Stands for a group where there is no process group."""

    ranks: tuple[int, ...]
    own_rank: int

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's place in the group."""
        return self.ranks.index(self.own_rank)


class DryTransport(Transport):
    """One rank of a world that is not there.

    With meta tensors it plans a step of thousands of ranks on a laptop. Results have the right
    shape, dtype and device and are zero; a broadcast from this rank and the objects of
    `all_gather_object` are this rank's own.

    Args:
        rank: The rank to play.
        world_size: Size of the world.
    """

    __slots__ = ()

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__("dry", rank, world_size)

    def group(self, ranks: tuple[int, ...]) -> RankGroup:
        """Return a stand-in with size() and rank()."""
        if self.rank not in ranks:
            raise CommError(f"rank {self.rank} is not in the group {ranks}.")
        return RankGroup(ranks, self.rank)

    def _all_gather(self, x: Tensor, ranks: tuple[int, ...], blocking: bool) -> Handle:
        return Ready(x.new_zeros((len(ranks), *x.shape)))

    def _reduce_scatter(
        self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool
    ) -> Handle:
        return Ready(x.new_zeros(x.shape[1:]))

    def _all_reduce(self, x: Tensor, ranks: tuple[int, ...], op: str, blocking: bool) -> Handle:
        return Ready(x.new_zeros(x.shape))

    def _all_to_all(
        self,
        x: Tensor,
        ranks: tuple[int, ...],
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        blocking: bool,
    ) -> Handle:
        return Ready(x.new_zeros(sum(out_splits)))

    def _broadcast(self, x: Tensor, ranks: tuple[int, ...], src: int) -> Tensor:
        return x.clone() if src == self.rank else x.new_zeros(x.shape)

    def _scatter(
        self, x: list[Tensor] | None, out_like: Tensor, ranks: tuple[int, ...], src: int
    ) -> Tensor:
        if x is not None:
            return x[ranks.index(src)].clone(memory_format=torch.contiguous_format)
        return out_like.new_zeros(out_like.shape)

    def _all_gather_object(self, obj: Any, ranks: tuple[int, ...]) -> list[Any]:
        return [obj] * len(ranks)

    def _barrier(self, ranks: tuple[int, ...]) -> None:
        return None
