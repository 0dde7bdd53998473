"""``fully_shard``: parameters, gradients and optimizer state in pieces; whole only while a module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.meshes import as_mesh
from shardwise.comm.transport import Transport, current
from shardwise.compat import break_graph
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import boxes
from shardwise.layout.cut import renumbered, within
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Shard
from shardwise.parallel.flat import Dtypes, Flat, Piece
from shardwise.parallel.module import (
    GROUP as _GROUP,
    OffloadPolicy,
    become_fsdp,
    check_offload,
)
from shardwise.parallel.plan import become, check_not_reduced
from shardwise.parallel.schedule import Group, Schedule, leave_alone
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.gradients import no_sync


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes that a fully sharded module works in; torch's names. Parameters are kept as they are.

    Attributes:
        param_dtype: Parameters are gathered, and computed with, in this.
        reduce_dtype: Gradients are reduced in this; default: ``param_dtype``.
        output_dtype: Floating-point results of the module are cast to this.
        cast_forward_inputs: Cast floating-point inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


_AS_IT_IS = MixedPrecisionPolicy()
_ON_DEVICE = OffloadPolicy()


def fully_shard(
    module: Any,
    mesh: Any = None,
    *,
    zero: int = 3,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_IT_IS,
    offload_policy: OffloadPolicy = _ON_DEVICE,
    ignored_params: Iterable[nn.Parameter] | None = None,
    src_data_rank: int | None = 0,
) -> Any:
    """Keep a module's parameters in pieces, in place; gather them for its forward and its backward.

    Call it on the blocks first, then on the model: each call makes one group of the parameters that no inner
    group has. A group is gathered by one message while the one before it runs, and its gradients are reduced
    while backward goes on. The parameters become DTensors, cut along dim 0 or where ``shard_placement_fn``
    says; any optimizer of ``torch.optim``, clipping and loss scaling work on them as they are. They keep
    their identity.

    What goes into the outermost module decides how it runs, as for `data_parallel`: plain tensors, each rank
    its own program, gradients averaged; DTensors cut over the axis, one program on the whole batch.

    Args:
        module: The module. Tensor-parallel ones (`parallelize_module`, over another axis) are welcome; a dim
            that both cut is cut by the tensor-parallel axis first, and the layout says so. Of a list, each gets
            a group of its own.
        mesh: A mesh with one axis, ``mesh["dp"]``; or with two: replicate over the first, shard over the
            second (hybrid). None is that of ``with mesh:``.
        zero: 3: as described. 2: parameters stay whole from forward to the end of backward. 1: gradients
            stay whole until the end of backward, too.
        reshard_after_forward: Free the parameters after forward and gather them again for backward. Default:
            all groups but the outermost, with ``zero=3``. A number, which torch takes, counts as True.
        shard_placement_fn: Says for a parameter which dim to cut, ``Shard(1)``; None is dim 0, which costs
            the least: other dims are copied together piece by piece. Sizes need not divide.
        mp_policy: Dtypes.
        offload_policy: For torch's sake: `CPUOffloadPolicy` is refused, unless the mesh is one of CPUs.
        ignored_params: Parameters to leave alone.
        src_data_rank: Position, along the axis, of the rank whose values count; None: each rank cuts its own.

    Returns:
        The module, or the list: the same objects, with the methods of `FSDPModule`, and with ``no_sync`` (which
        is ``shardwise.no_sync``) as an attribute. Its parameters may be on the meta device: they are cut there,
        and ``to_empty`` makes the pieces.

    Raises:
        LayoutError: A parameter has no (such) dim to cut, is cut over the axis already, or the module is in
            a group.
            Nothing has been changed then.
        MeshError: The mesh has not one axis, or two.
        UnsupportedError: Parameters were to be offloaded from another device.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh["dp"])
        >>> fully_shard(model, mesh["dp"])
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    mesh = as_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"fully_shard works over one axis or two, and this mesh has {mesh.ndim}: {mesh}.",
            tries=['mesh["dp"]', 'mesh["replicate", "shard"] for hybrid sharding'],
        )
    if zero not in (1, 2, 3):
        raise LayoutError(f"there is ZeRO-1, -2 and -3, not zero={zero!r}.")
    check_offload(offload_policy, mesh)
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    left_alone = list(ignored_params or ())
    ignored = {id(p) for p in left_alone}
    found = []
    for m in modules:
        if _GROUP in vars(m):
            raise LayoutError(f"fully_shard was called on this {type(m).__name__} already.")
        named = _own_parameters(m, ignored)
        ignored.update(id(p) for _, p, _ in named)  # of a list, the first that has it
        dims = [_dim_of(name, p, shard_placement_fn) for name, p, _ in named]
        for name, p, _ in named:
            _check(name, p, mesh)
        found.append((m, named, dims))
    transport = current()
    for p in left_alone:
        leave_alone(p)
    reshard = reshard_after_forward if zero == 3 else False
    for m, named, dims in found:
        become_fsdp(m)
        vars(m)["no_sync"] = no_sync
        if mesh.coordinate_of(transport.rank) is None:
            continue
        pieces = [
            _cut(m, n, p, owners, dim, mesh, transport, src_data_rank)
            for (n, p, owners), dim in zip(named, dims)
        ]
        flats = _flats(pieces, mesh, transport, mp_policy)
        again = None if reshard is None else bool(reshard)
        group = Group(m, mesh, flats, transport, again, early=zero > 1)
        vars(m)[_GROUP] = group
        _hook(group, mp_policy)
    return module


def _own_parameters(
    module: nn.Module, ignored: set[int]
) -> list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """The parameters that no inner group has: name, parameter, the modules that hold it."""
    for inner in module.modules():
        if _GROUP in vars(inner):
            ignored.update(
                id(p.param) for flat in vars(inner)[_GROUP].flats for p in flat.pieces
            )
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, sub in module.named_modules():
        for key, p in sub._parameters.items():
            if p is None or id(p) in ignored:
                continue
            name = f"{prefix}.{key}" if prefix else key
            found.setdefault(id(p), (name, p, []))[2].append((sub, key))
    return list(found.values())


def _dim_of(
    name: str, p: nn.Parameter, choose: Callable[[nn.Parameter], Shard | None] | None
) -> int:
    """The dim to cut."""
    if p.ndim == 0:
        raise LayoutError(
            f'"{name}" has no dim to cut.',
            tries=["a parameter of shape (1,)", f"ignored_params=[model.{name}]"],
        )
    chosen = None if choose is None else choose(p)
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard) or not -p.ndim <= chosen.dim < p.ndim:
        raise LayoutError(
            f'shard_placement_fn says {chosen!r} for "{name}", which has {p.ndim} dims.',
            tries=["Shard(dim)", "None: dim 0"],
        )
    return chosen.dim % p.ndim


def _check(name: str, p: Tensor, mesh: Mesh) -> None:
    check_not_reduced(name, p, "fully_shard")
    if not isinstance(p, DTensor):
        return
    own = p.layout.mesh
    if own == mesh or (
        not set(own.ranks).isdisjoint(mesh.ranks) and len(set(own.ranks) & set(mesh.ranks)) > 1
    ):
        raise LayoutError(
            f'"{name}" is {p.layout}: it is distributed over the axis of {mesh} already.',
            tries=[
                'parallelize_module(model, mesh["tp"], ...), then fully_shard(model, mesh["dp"])'
            ],
        )


def _cut(
    root: nn.Module,
    name: str,
    p: nn.Parameter,
    owners: list[tuple[nn.Module, str]],
    dim: int,
    mesh: Mesh,
    transport: Transport,
    source: int | None,
) -> Piece:
    """Make a parameter a sharded one; what another axis holds of it is cut once more."""
    axis = mesh.ndim - 1
    coord = mesh.coordinate_of(transport.rank)
    assert coord is not None, "ranks outside the mesh take no part"
    n, i = mesh.shape[axis], coord[axis]
    local = (p._local if isinstance(p, DTensor) else p).detach().contiguous()
    rows = local.shape[dim]
    inner = torch.Size([*local.shape[:dim], *local.shape[dim + 1 :]]).numel()
    length = -(-rows // n) * inner
    start, size = boxes.chunk(rows, n, i)
    ranks = mesh.group_ranks((axis,), coord)
    if source is None or local.is_meta or len(mesh.ranks) == 1:
        mine = local.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)
    else:
        pieces = None
        if transport.rank == ranks[source]:
            cuts = [boxes.chunk(rows, n, k) for k in range(n)]
            pieces = [local.narrow(dim, at, count) for at, count in cuts]
        shape = [*local.shape[:dim], size, *local.shape[dim + 1 :]]
        like = local.new_empty(()).expand(shape)
        mine = transport.scatter(pieces, like, ranks, ranks[source], tag=mesh.axis_name(axis))
        if mesh.ndim == 2:
            over = mesh.group_ranks((0,), coord)
            mine = transport.broadcast(mine, over, over[0], tag=mesh.axis_name(0))
    layout = _layout(p, dim, mesh, axis, transport)
    new = nn.Parameter(wrap(mine, spec_of(layout, transport)), requires_grad=p.requires_grad)
    kept: Any = become(root, p, new)
    return Piece(name, kept, owners, local.shape, dim, length, size * inner)


def _layout(p: Tensor, dim: int, mesh: Mesh, axis: int, transport: Transport) -> Layout:
    """The layout of the pieces, on the axes of ``mesh`` followed by those that cut the parameter already."""
    if not isinstance(p, DTensor):
        dims: list[tuple[int, ...]] = [()] * p.ndim
        dims[dim] = (axis,)
        stride = boxes.contiguous_stride(tuple(p.shape))
        return Layout(mesh, tuple(dims), (None,) * mesh.ndim, tuple(p.shape), stride, p.dtype)
    old: Layout = p.layout
    both = joint_mesh(mesh, old.mesh, transport)
    shifted = [renumbered(on_dim, lambda a: a + mesh.ndim) for on_dim in old.dims]
    shifted[dim] = within(shifted[dim], axis, mesh.shape[axis])
    stride = boxes.contiguous_stride(old.shape)
    return Layout(both, tuple(shifted), (None,) * both.ndim, old.shape, stride, old.dtype)


def joint_mesh(outer: Mesh, inner: Mesh, transport: Transport) -> Mesh:
    """The mesh with the axes of both, which cross at this rank: ``mesh["dp"]`` and ``mesh["tp"]`` -> ``mesh``."""
    known: dict[Any, Mesh] = transport.state.setdefault("joint_meshes", {})
    key = (outer, inner)
    if key not in known:
        rows = transport.all_gather_object(inner.ranks, outer.ranks)
        ranks = tuple(rank for row in rows for rank in row)
        names = None
        if outer.names and inner.names and not set(outer.names) & set(inner.names):
            names = outer.names + inner.names
        known[key] = Mesh.of(outer.device_type, outer.shape + inner.shape, ranks, names)
    return known[key]


def _flats(
    pieces: list[Piece], mesh: Mesh, transport: Transport, policy: MixedPrecisionPolicy
) -> list[Flat]:
    coord = mesh.coordinate_of(transport.rank)
    assert coord is not None, "ranks outside the mesh take no part"
    axis = mesh.ndim - 1
    ranks = mesh.group_ranks((axis,), coord)
    replicas = mesh.group_ranks((0,), coord) if mesh.ndim == 2 else (transport.rank,)
    tags = (mesh.axis_name(axis), mesh.axis_name(0))
    parts: dict[torch.dtype, list[Piece]] = {}
    for p in pieces:
        parts.setdefault(p.local.dtype, []).append(p)
    out = []
    for kept, part in parts.items():
        compute = policy.param_dtype if kept.is_floating_point and policy.param_dtype else kept
        reduce = policy.reduce_dtype if kept.is_floating_point else kept
        dtypes = Dtypes(kept, compute, reduce or compute)
        out.append(Flat(part, transport, ranks, replicas, tags, dtypes))
    return out


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in tuples, lists and dicts, in another dtype."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, (tuple, list)):
        done = [_cast(x, dtype) for x in tree]
        return type(tree)(*done) if hasattr(tree, "_fields") else type(tree)(done)
    if type(tree) is dict:
        return {key: _cast(x, dtype) for key, x in tree.items()}
    return tree


def _hook(group: Group, policy: MixedPrecisionPolicy) -> None:
    cast_in = policy.param_dtype if policy.cast_forward_inputs else None

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if group.inside:
            return None
        schedule = group.schedule
        if schedule is None:
            schedule = _begin(group)
        schedule.enter(group, (args, kwargs))
        if cast_in is None:
            return None
        return _cast(args, cast_in), _cast(kwargs, cast_in)

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        if group.schedule is None or group.inside:
            return None
        cast = None
        if policy.output_dtype is not None and out is not None:
            out = cast = _cast(out, policy.output_dtype)
        group.schedule.exit(group, out)
        return cast

    group.around = break_graph(before), break_graph(after)
    group.module.register_forward_pre_hook(before, with_kwargs=True)
    group.module.register_forward_hook(after, always_call=True)


def _begin(root: Group) -> Schedule:
    """The first forward of an outermost module: its groups work together from now on."""
    groups = [vars(m)[_GROUP] for m in root.module.modules() if _GROUP in vars(m)]
    return Schedule(root, groups, root.transport)
