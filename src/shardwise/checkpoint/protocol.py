"""How a ``DTensor`` plugs into ``torch.distributed.checkpoint``.

Torch asks a tensor class three questions: which chunks this rank writes, which chunks it wants to read, and
where to put a chunk that was read. A chunk is the box that the layout gives this rank, so files know nothing
of layouts, and torch's own DTensor and plain tensors read and write the same ones.

Replicas all offer the same chunk, and torch's planner keeps one. A rank outside the mesh, or whose piece is
empty, offers none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.compat import checkpoint_types
from shardwise.errors import AliasError, CheckpointError
from shardwise.tensor.dtensor import DTensor


def create_write_items(self: DTensor, fqn: str, obj: Any) -> list[Any]:
    """The chunks that this rank offers to write.

    Raises:
        CheckpointError: A reduction is pending: the pieces are no part of the value yet.
    """
    box = _box(self)
    if box is None:
        return []
    types = checkpoint_types()
    offsets, _ = box
    local = self._local.detach()
    data = types.TensorWriteData(
        chunk=_chunk(*box),
        properties=types.TensorProperties.create_from_tensor(local),
        size=self.shape,
    )
    index = types.MetadataIndex(fqn, offsets)
    return [
        types.WriteItem(index=index, type=types.WriteItemType.SHARD, tensor_data=data),
    ]


def create_chunk_list(self: DTensor) -> list[Any]:
    """The chunks that this rank wants to read into.

    Raises:
        CheckpointError: A reduction is pending.
        AliasError: The tensor is a copy that stands for a view: what is read into it would be lost.
    """
    box = _box(self)
    if self._spec.guards is not None:
        raise AliasError(
            "a checkpoint cannot be read into a view that needed communication.",
            tries=["load into the tensor itself", "load into x.clone()"],
        )
    return [] if box is None else [_chunk(*box)]


def get_tensor_shard(self: DTensor, index: Any) -> Tensor:
    """This rank's piece, sharing its memory.

    Raises:
        CheckpointError: The chunk asked for is not this rank's piece.
    """
    box = _box(self)
    if box is None or (index.offset is not None and tuple(index.offset) != box[0]):
        raise CheckpointError(
            f"{index.fqn}: rank {self._spec.transport.rank} has no chunk at {tuple(index.offset)} "
            f"of {self._spec.layout}."
        )
    return self._local.detach()


def _box(x: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of this rank's piece; None if there is nothing of the tensor here."""
    spec = x._spec
    if spec.layout.is_partial:
        raise CheckpointError(
            f"a tensor with a pending reduction has no pieces to save or to load into: {spec.layout}.",
            tries=["x.redistribute(placements=...) to replicas or shards first"],
        )
    if spec.coord is None or (0 in spec.local_shape and 0 not in spec.shape):
        return None
    return tuple(spec.offsets), tuple(spec.local_shape)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    types = checkpoint_types()
    return types.ChunkStorageMetadata(offsets=types.Size(offsets), sizes=types.Size(sizes))


_CLASS: Any = DTensor
_CLASS.__create_write_items__ = create_write_items
_CLASS.__create_chunk_list__ = create_chunk_list
_CLASS.__get_tensor_shard__ = get_tensor_shard
