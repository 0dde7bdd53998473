"""Sharded parameters of one group and dtype, end to end in one buffer, so that one message carries them all.

```text
   shard   [ a b c ]              this rank's pieces, back to back; each parameter's local tensor is a view of it
     | all_gather
   rows    [ a0 b0 c0 ]           one row per rank
           [ a1 b1 c1 ]
     | copied apart
   full    [ a0 a1 | b0 b1 | c0 c1 ]     whole parameters: leaves of autograd, views of one memory
     : backward
   rows    [ da0 db0 dc0 ]        gradients, scaled and cast, the same way back
           [ da1 db1 dc1 ]
     | reduce_scatter
   shard   [ da db dc ]           their sums: `.grad` of the parameters
```

Pieces are cut from dim 0 as torch.chunk cuts; shorter ones are padded, so that a whole parameter is the beginning
of its place in ``full``. Those that are cut from another dim are copied together and apart rank by rank. The memory of ``full`` is given back between uses, while the leaves live on: what autograd
has saved of them is whole again before backward comes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.transport import Handle, Transport
from shardwise.errors import GradientError, LayoutError
from shardwise.layout import boxes
from shardwise.recording import recorder
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradients import leaf_of


@dataclass(slots=True)
class Piece:
    """One parameter of a group.

    Attributes:
        name: The parameter's, for messages.
        param: The sharded parameter.
        owners: The modules that hold it, and under which names.
        shape: Shape of the whole, or of its part where another axis cuts it, too.
        dim: The dim that the ranks share.
        length: Elements that each rank has of it, padding included.
        here: Elements that this rank really has.
    """

    name: str
    param: DTensor
    owners: list[tuple[nn.Module, str]]
    shape: torch.Size
    dim: int
    length: int
    here: int

    @property
    def local(self) -> Tensor:
        """This rank's piece."""
        return self.param._local

    def parts(self, whole: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each rank its piece within the whole parameter, and the same within its row."""
        out = []
        n = rows.shape[0]
        for i in range(n):
            at, size = boxes.chunk(self.shape[self.dim], n, i)
            piece = whole.narrow(self.dim, at, size)
            out.append((piece, rows[i, : piece.numel()].view(piece.shape)))
        return out


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a group's parameters: as kept, as computed with, as reduced in."""

    kept: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


class Flat:
    """The parameters of a group that have one dtype.

    Args:
        pieces: The parameters.
        transport: The rank's transport.
        ranks: The ranks that share them.
        replicas: The ranks that hold the same pieces (hybrid sharding); this rank alone elsewhere.
        tags: Names of the axes of the two, for the log.
        dtypes: What is kept, computed with and reduced in.
    """

    def __init__(
        self,
        pieces: list[Piece],
        transport: Transport,
        ranks: tuple[int, ...],
        replicas: tuple[int, ...],
        tags: tuple[str, str],
        dtypes: Dtypes,
    ) -> None:
        self.pieces, self.transport, self.ranks, self.replicas = (
            pieces,
            transport,
            ranks,
            replicas,
        )
        self.tags, self.dtypes, self.n = tags, dtypes, len(ranks)
        self.lengths = [p.length for p in pieces]
        self.size = sum(self.lengths)
        self._shard: Tensor | None = None
        self._handle: Handle | None = None
        self._source: Tensor | None = None
        device = pieces[0].local.device
        self.full = torch.empty(0, dtype=dtypes.compute, device=device)
        self.leaves: list[Tensor] = []
        self._places: list[Tensor] = []
        self.is_whole = False
        self.version = 0  # of the pieces, when they were gathered

    # ---- the shards -----------------------------------------------------------------------------

    def shard(self) -> Tensor:
        """The buffer of this rank's pieces; pieces that have left it (``to_empty``, ``p.data = ``) come back."""
        for p in self.pieces:
            module, name = p.owners[0]
            now: Any = module._parameters[name]
            if now is not p.param:
                _replaced(p, now)
            if p.local._backward_hooks:
                raise LayoutError(
                    f'"{p.name}".register_hook(...) was called: such hooks see no gradient of a fully sharded '
                    "parameter.",
                    tries=["register_post_accumulate_grad_hook: it runs after the reduction"],
                )
        shard = self._shard
        if shard is not None:
            where = shard.data_ptr()
            size = shard.itemsize
            for p in self.pieces:
                if p.here and p.local.data_ptr() != where:
                    break
                where += p.length * size
            else:
                return shard
        first = self.pieces[0].local
        for p in self.pieces:
            moved = self.leaves and p.local.device != self.full.device
            if moved or p.local.dtype != self.dtypes.kept:
                raise LayoutError(
                    f'"{p.name}" is of {p.local.dtype} on {p.local.device} now.',
                    tries=[
                        "convert the module before fully_shard",
                        "mp_policy, to compute otherwise",
                    ],
                )
        with torch.inference_mode(False), torch.no_grad():
            shard = torch.zeros(self.size, dtype=self.dtypes.kept, device=first.device)
            for p, place in zip(self.pieces, shard.split(self.lengths)):
                place = place[: p.here].view(p.local.shape)
                place.copy_(p.local)
                p.local.data = place
        self._shard = shard
        return shard

    def _make_leaves(self, device: torch.device) -> None:
        """Leaves of autograd over memory that comes and goes. To be made outside of inference mode."""
        self.full = torch.empty(self.n * self.size, dtype=self.dtypes.compute, device=device)
        start = 0
        for p in self.pieces:
            place = self.full[start : start + self.n * p.length]
            start += self.n * p.length
            self._places.append(place.view(self.n, p.length))
            # .data: with a version of its own, so that filling the memory anew is no write to what is saved
            self.leaves.append(place[: p.shape.numel()].view(p.shape).data)
        self._bytes = self.full.untyped_storage().nbytes()

    # ---- gather, free -----------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to make the parameters whole, unless they are, or it has begun."""
        if self.is_whole or self._handle is not None:
            return
        source = self.shard()
        self.version = sum([p.local._version for p in self.pieces])
        if self.dtypes.compute != self.dtypes.kept:
            source = source.to(self.dtypes.compute)
        self._handle = self.transport.all_gather_async(source, self.ranks, tag=self.tags[0])

    @property
    def is_current(self) -> bool:
        """Whether what is gathered, or on its way, is what the pieces are now."""
        begun = self.is_whole or self._handle is not None
        return begun and self.version == sum([p.local._version for p in self.pieces])

    def finish_gather(self) -> None:
        """Wait until the parameters are whole."""
        if self.is_whole:
            return
        self.start_gather()
        assert self._handle is not None, "it has just begun"
        rows, self._handle = self._handle.wait(), None
        if not self.leaves:
            with torch.inference_mode(False):
                self._make_leaves(rows.device)
        else:
            self._allocate(self._bytes)
        with torch.no_grad():
            self._copy_apart(rows)
        for leaf, p in zip(self.leaves, self.pieces):
            if leaf.requires_grad != p.local.requires_grad:
                leaf.requires_grad_(p.local.requires_grad)
        self.is_whole = True

    def _copy_apart(self, rows: Tensor) -> None:
        if not any(p.dim for p in self.pieces):
            torch.split_with_sizes_copy(rows, self.lengths, dim=1, out=self._places)
            return
        for p, leaf, place, part in zip(
            self.pieces, self.leaves, self._places, rows.split(self.lengths, dim=1)
        ):
            if p.dim == 0:
                place.copy_(part)
                continue
            for piece, row in p.parts(leaf.data, part):
                piece.copy_(row)

    def free(self) -> None:
        """Give the memory of the whole parameters back."""
        if self._handle is not None:  # it was begun for nothing
            self._handle.wait()
            self._handle = None
        if self.is_whole:
            self._allocate(0)
            self.is_whole = False

    def check_unwritten(self) -> None:
        """Raise if somebody has written to a gathered parameter: that would be lost.

        Raises:
            LayoutError: Somebody has.
        """
        for p, leaf in zip(self.pieces, self.leaves):
            if leaf._version:
                raise LayoutError(
                    f'"{p.name}" was written to while its module ran. It was gathered for that, and what was '
                    "written is lost.",
                    tries=[
                        "write to the parameter outside of forward",
                        "Embedding: no max_norm",
                    ],
                )

    def _allocate(self, size: int) -> None:
        """Give the whole parameters memory, or take it."""
        if (tape := recorder()) is not None:
            tape.effect("allocate" if size else "free", set_memory, self.full, size)
        elif self.full.untyped_storage().nbytes() != size:
            set_memory(self.full, size)

    def set_aside(self) -> Callable[[], None]:
        """Begin with new leaves, for a step that is recorded; what is returned brings the old ones back."""
        names = ("full", "leaves", "_places", "is_whole", "_handle")
        kept = [getattr(self, name) for name in names]
        self.leaves, self._places, self.is_whole, self._handle = [], [], False, None

        def bring_back() -> None:
            for name, x in zip(names, kept):
                setattr(self, name, x)

        return bring_back

    # ---- gradients ----------------------------------------------------------------------------------

    def start_reduce(self, scale: float) -> Reduction:
        """Begin to sum the gradients of the leaves, scaled; they are dropped one by one.

        In a step that is recorded only those that are there are sent; which these are, all ranks must have alike.
        """
        taken = [(p, leaf) for p, leaf in zip(self.pieces, self.leaves) if leaf.requires_grad]
        if (tape := recorder()) is not None:
            for p, leaf in taken:
                if leaf.grad is None:
                    tape.fact(f'"{p.name}" has no gradient')
            taken = [(p, leaf) for p, leaf in taken if leaf.grad is not None]
        total = sum(p.length for p, _ in taken)
        rows = torch.empty(
            (self.n, total + len(taken)), dtype=self.dtypes.reduce, device=self.full.device
        )
        start, has = 0, []
        with torch.no_grad():
            for p, leaf in taken:
                place = rows[:, start : start + p.length]
                start += p.length
                g, leaf.grad = leaf.grad, None
                has.append(g is not None)
                if g is None:
                    place.zero_()
                else:
                    _pack(p, g, place, scale)
            if all(has):
                rows[:, total:].fill_(1)
            else:
                rows[:, total:].copy_(torch.tensor([float(h) for h in has]).expand(self.n, -1))
        handle = self.transport.reduce_scatter_async(rows, self.ranks, "sum", tag=self.tags[0])
        return Reduction(self, [p for p, _ in taken], has, handle)


def set_memory(x: Tensor, size: int) -> None:
    """Make the memory of a tensor so many bytes large."""
    x.untyped_storage().resize_(size)


def _replaced(p: Piece, now: Any) -> None:
    """Another object has taken the parameter's place (``to_empty``, ``load_state_dict(assign=True)``)."""
    old = p.param._spec.layout
    if not isinstance(now, DTensor) or now._spec.layout.with_dtype(old.dtype) is not old:
        kind = now.layout if isinstance(now, DTensor) else type(now).__name__
        raise LayoutError(
            f'"{p.name}" was replaced by another parameter: it was {old}, and is {kind} now.',
            tries=["copy_ the values into the parameter", "a DTensor in the same layout"],
        )
    p.param = now


def _pack(p: Piece, g: Tensor, place: Tensor, scale: float) -> None:
    """Copy a gradient, scaled, to one row per rank."""
    if g.requires_grad:
        raise GradientError(
            f'the gradient of "{p.name}" has a history (create_graph=True), which fully_shard does not keep.',
            tries=["distribute_module: its gradients can be differentiated again"],
        )
    g = g.to_dense() if g.layout is not torch.strided else g
    n = place.shape[0]
    if p.dim:
        for piece, row in p.parts(g, place):
            row.copy_(piece)
        if scale != 1:
            place.mul_(scale)
        return
    if g.numel() != n * p.length:
        whole = torch.zeros(n * p.length, dtype=g.dtype, device=g.device)
        whole[: g.numel()].copy_(g.reshape(-1))
        g = whole
    g = g.reshape(n, p.length)
    if scale == 1:
        place.copy_(g)
    elif g.dtype == place.dtype:
        torch.mul(g, scale, out=place)
    else:
        place.copy_(g).mul_(scale)


class Reduction:
    """Gradients of a group on their way."""

    __slots__ = ("_flat", "_handle", "_has", "_pieces", "_replicas")

    def __init__(
        self, flat: Flat, pieces: list[Piece], has: list[bool], handle: Handle
    ) -> None:
        self._flat, self._pieces, self._has, self._handle = flat, pieces, has, handle
        self._replicas: Handle | None = None

    def over_replicas(self) -> None:
        """Hybrid sharding: go on with the sum over the replicas of this piece."""
        flat = self._flat
        if self._replicas is None and len(flat.replicas) > 1:
            self._replicas = flat.transport.all_reduce_owned_async(
                self._handle.wait(), flat.replicas, "sum", tag=flat.tags[1]
            )

    def finish(self) -> list[tuple[Piece, Tensor]]:
        """Wait; the parameters that some rank has used, with their gradients here."""
        flat = self._flat
        self.over_replicas()
        reduced = (self._replicas or self._handle).wait()
        pieces, has = self._pieces, self._has
        if not all(has):
            has = (reduced[len(reduced) - len(has) :] != 0).tolist()
        if flat.dtypes.kept != reduced.dtype:
            reduced = reduced.to(flat.dtypes.kept)
        out, start = [], 0
        for p, used in zip(pieces, has):
            if used:
                out.append((p, reduced[start : start + p.here].view(p.local.shape)))
            start += p.length
        return out


def add_grad(param: DTensor, g: Tensor) -> None:
    """Add a reduced gradient to ``.grad``, and run the user's hooks that wait for it."""
    local = param._local
    leaf = leaf_of(local)
    if leaf is not None:
        leaf.shown = None
        leaf.add(g)
        for hook in list(leaf.hooks.values()):
            hook()
        return
    if local.grad is None:
        local.grad = g
    else:
        local.grad.add_(g)
    hooks: Any = local._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(local)
