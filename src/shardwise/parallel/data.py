"""``data_parallel``: replicas of the parameters, a batch per rank, gradients reduced during backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.meshes import as_mesh
from shardwise.comm.transport import Transport, current
from shardwise.compat import break_graph
from shardwise.errors import LayoutError, MeshError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.parallel.buckets import Reducer, Reducers, Slot, is_reduced
from shardwise.parallel.plan import become
from shardwise.program.spec import spec_of
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.gradients import leaf_of, no_sync

BUCKET_MB = 25.0


def data_parallel(
    module: nn.Module,
    device_mesh: Any = None,
    *,
    bucket_cap_mb: float = BUCKET_MB,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """Make a module data parallel, in place: each rank takes its part of the batch.

    Two ways to call it, told apart by what goes in:

    - *Plain tensors*: every rank runs its own program on its own batch, and gradients are averaged over the
      axis, as torch's ``DistributedDataParallel`` does.
    - *DTensors* cut over the axis: one program on the whole batch. The first such call lays the parameters
      out on the mesh of the inputs; means, losses and dropout are those of one device, and so are the
      gradients, also of uneven batches.

    Either way gradients are summed in buckets while backward still runs; under ``module.no_sync()`` (which is
    ``shardwise.no_sync``) they are left as they are, and the next backward outside reduces them once.
    A parameter that no rank used has no gradient; one that some rank used counts as zero on the others.

    Args:
        module: The model. Modules that `parallelize_module` has cut over another axis are welcome.
        device_mesh: A mesh with one axis: ``mesh["dp"]``. None is that of ``with mesh:``.
        bucket_cap_mb: About the size of a bucket; smaller ones start earlier, larger ones cost less.
        broadcast_buffers: Give all ranks the first one's buffers before each forward in training.

    Returns:
        The module, with the first rank's parameters and buffers on every rank.

    Raises:
        LayoutError: A parameter is cut over the axis, on the meta device, or in a data parallel module already.
            Nothing has been changed then.
        MeshError: The mesh has not exactly one axis.

    Example:
        >>> model = data_parallel(model, mesh["dp"])
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    mesh = as_mesh(device_mesh)
    if mesh.ndim != 1:
        raise MeshError(
            f"data_parallel works over one axis, and this mesh has {mesh.ndim}: {mesh}.",
            tries=['mesh["dp"]: its slice along one axis'],
        )
    transport = current()
    for name, p in module.named_parameters():
        _check(name, p, mesh)
    if mesh.coordinate_of(transport.rank) is None:
        return module
    _broadcast([*module.parameters(), *module.buffers()], mesh, transport)
    state = DataParallel(module, mesh, transport, int(bucket_cap_mb * 1024 * 1024))
    state.buffers = [b for b in module.buffers() if not isinstance(b, DTensor)]
    state.broadcast_buffers = broadcast_buffers and bool(state.buffers)
    vars(module)["no_sync"] = no_sync
    module.register_forward_pre_hook(state.before, with_kwargs=True)
    return module


def _check(name: str, p: Tensor, mesh: Mesh) -> None:
    if p.is_meta:
        raise LayoutError(
            f'"{name}" is on the meta device: what makes it real would part it from its bucket.',
            tries=["model.to_empty(device=...), initialize, then data_parallel"],
        )
    if is_reduced(p._local if isinstance(p, DTensor) else p):
        raise LayoutError(
            f'"{name}" is in a data parallel module already.',
            tries=["call data_parallel once, on the whole model"],
        )
    if not isinstance(p, DTensor):
        return
    axes = (0,) if p.layout.mesh == mesh else mesh.axes_in(p.layout.mesh)
    if axes is not None and (
        p.layout.axis_dim(axes[0]) is not None or p.layout.partial[axes[0]] is not None
    ):
        raise LayoutError(
            f'"{name}" is {p.layout}: it is not whole along the axis "{mesh.axis_name(0)}".',
            tries=["fully_shard, for parameters that are cut over the axis of the data"],
        )


def _broadcast(tensors: Iterable[Tensor], mesh: Mesh, transport: Transport) -> None:
    """Everybody has the first rank's values; one message per dtype."""
    parts: dict[Any, list[Tensor]] = {}
    for t in tensors:
        local = t._local if isinstance(t, DTensor) else t
        if local.device.type != "meta" and local.numel():
            parts.setdefault((local.dtype, local.device), []).append(local)
    with torch.no_grad():
        for part in parts.values():
            flat = torch.cat([t.detach().reshape(-1) for t in part])
            got = transport.broadcast(flat, mesh.ranks, mesh.ranks[0], tag=mesh.axis_name(0))
            if transport.rank != mesh.ranks[0]:
                for t, piece in zip(part, got.split([t.numel() for t in part])):
                    t.detach().copy_(piece.view(t.shape))


def meshes_in(tree: Any) -> Iterator[Mesh]:
    """The meshes of the DTensors among arguments, in tuples, lists and dicts, too."""
    if isinstance(tree, DTensor):
        yield tree.layout.mesh
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from meshes_in(x)
    elif isinstance(tree, dict):
        yield from meshes_in(list(tree.values()))


class DataParallel:
    """What `data_parallel` keeps about a module.

    Attributes:
        module: The module.
        mesh: The 1-D mesh.
        reducers: The buckets, for each group of ranks over which gradients are sums.
        buffers: What is broadcast before forward.
        broadcast_buffers: Whether it is.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, transport: Transport, cap: int) -> None:
        self.module, self.mesh, self.transport, self.cap = module, mesh, transport, cap
        self.buffers: list[Tensor] = []
        self.broadcast_buffers = False
        self.reducers = Reducers([])
        self._known: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._build()

    def __deepcopy__(self, memo: Any) -> DataParallel:
        """The hooks of a copied module belong to the copy."""
        raise LayoutError("a data parallel module cannot be copied: its hooks are its own.")

    def _build(self) -> None:
        self.reducers.remove()
        groups: dict[tuple[tuple[int, ...], str], list[Slot]] = {}
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self._known = {id(p): (p, p.dtype) for _, p in named}
        for name, p in reversed(named):
            ranks, tag, slot = self._slot(name, p)
            if len(ranks) > 1:
                groups.setdefault((ranks, tag), []).append(slot)
        self.reducers = Reducers(
            [
                Reducer(slots, self.transport, ranks, tag, self.cap)
                for (ranks, tag), slots in groups.items()
            ]
        )

    def _slot(self, name: str, p: Tensor) -> tuple[tuple[int, ...], str, Slot]:
        """A parameter's place, and over whom its gradient is reduced."""
        mesh, axis = self.mesh, self.mesh.axis_name(0)
        scale = 1 / len(mesh.ranks)
        if not isinstance(p, DTensor):
            return mesh.ranks, axis, Slot(name, p, None, scale)
        leaf, own = leaf_of(p._local), p.layout.mesh
        if own == mesh or mesh.axes_in(own) is not None:  # of the whole batch: sums
            assert leaf is not None, "it is replicated over the axis"
            assert leaf.bucket is not None, "and no sum is pending"
            return leaf.bucket.ranks, leaf.bucket.tag, Slot(name, p._local, leaf, 1.0)
        if leaf is None or leaf.bucket is None or len(leaf.bucket.ranks) == 1:
            return mesh.ranks, axis, Slot(name, p._local, leaf, scale)
        ranks, tag = self._both(leaf.bucket.ranks), f"{axis}*{leaf.bucket.tag}"
        return ranks, tag, Slot(name, p._local, leaf, scale)

    def _both(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The groups that the ranks of the axis have, together."""
        known: dict[Any, tuple[int, ...]] = self.transport.state.setdefault("joint_groups", {})
        key = (self.mesh.ranks, ranks)
        if key not in known:
            rows = self.transport.all_gather_object(ranks, self.mesh.ranks)
            known[key] = tuple(rank for row in rows for rank in row)
        return known[key]

    @break_graph
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before forward: clear up after a backward that raised, lay out for DTensors, send buffers."""
        self.reducers.forget()
        self._look_again()
        for mesh in meshes_in((args, kwargs)):
            self._adopt(mesh)
        if self.broadcast_buffers and module.training:
            _broadcast(self.buffers, self.mesh, self.transport)

    def _look_again(self) -> None:
        """Parameters that were thawed, converted or put in since the buckets were made need places."""
        known = self._known
        changed = [
            p
            for p in self.module.parameters()
            if p.requires_grad and known.get(id(p), (None, None))[1] != p.dtype
        ]
        if not changed:
            return
        for name, p in self.module.named_parameters():
            if id(p) not in known and p.requires_grad:
                _check(name, p, self.mesh)
        _broadcast(changed, self.mesh, self.transport)
        self._build()

    def _adopt(self, mesh: Mesh) -> None:
        """Lay plain parameters, and those on other axes, out on the mesh of the inputs: replicated there."""
        if mesh != self.mesh and self.mesh.axes_in(mesh) is None:
            return  # inputs that know nothing of this axis
        strays = [
            p
            for p in self.module.parameters()
            if not isinstance(p, DTensor)
            or (p.layout.mesh != mesh and p.layout.mesh.axes_in(mesh) is not None)
        ]
        if not strays:
            return
        self.reducers.remove()
        for p in strays:
            if isinstance(p, DTensor):
                local, layout = p._local, p.layout.on(mesh)
            else:
                local = p.detach()
                layout = Layout.of(mesh, None, p.shape, None, p.dtype)
                local = local.contiguous()
            new = nn.Parameter(
                wrap(local.detach(), spec_of(layout, self.transport)),
                requires_grad=p.requires_grad,
            )
            if become(self.module, p, new) is not p:
                raise LayoutError(
                    f"a parameter {tuple(p.shape)} cannot become a DTensor and stay the same object, because "
                    "somebody holds a weak reference to it: an optimizer would go on with the old one.",
                    tries=[
                        "distribute_module(model, mesh), then data_parallel, then the optimizer"
                    ],
                )
        for sub in self.module.modules():
            for key, b in sub._buffers.items():
                if b is not None and not isinstance(b, DTensor):
                    sub._buffers[key] = distribute_tensor(b, mesh, src_data_rank=None)
        self.broadcast_buffers = False  # statistics are those of the whole batch
        self._build()
