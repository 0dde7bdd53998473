"""Laying out tensors and modules: ``distribute_tensor``, ``distribute_module``."""

from __future__ import annotations

from collections.abc import Callable
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.meshes import as_mesh
from shardwise.errors import LayoutError
from shardwise.layout import boxes
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.spec import Spec
from shardwise.tensor.casts import of_torch, refuse_kind, refuse_tangent
from shardwise.tensor.crossings import local_spec
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.explain import explained


@explained("distribute_tensor", "tensor", "device_mesh", "placements", "src_data_rank")
def distribute_tensor(
    tensor: Tensor,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay a tensor out on a mesh. The caller's tensor is never written to.

    Args:
        tensor: The whole tensor, on every rank; only its shape, stride and dtype matter on ranks that are
            not the source. A DTensor, torch's too, is redistributed.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements (one per mesh axis; missing ones replicate), a spec (one entry per dim), or a
            layout. None replicates.
        src_data_rank: Position on the mesh of the rank whose values count: its pieces are scattered. With
            None every rank cuts its own and nothing moves.

    Returns:
        The distributed tensor; ``requires_grad`` as that of ``tensor``.

    Raises:
        LayoutError: The placements do not fit the tensor or the mesh.
        UnsupportedError: The tensor carries a forward-mode derivative, is sparse or nested.
    """
    mesh = as_mesh(device_mesh)
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements)
    if of_torch(tensor):
        theirs: Any = tensor
        ours = DTensor.from_local(
            theirs.to_local(),
            theirs.device_mesh,
            theirs.placements,
            shape=tuple(theirs.shape),
            stride=theirs.stride(),
        )
        return ours.redistribute(mesh, placements)
    refuse_kind(tensor)
    refuse_tangent(tensor)
    requires_grad = tensor.requires_grad
    tensor = tensor.detach()
    stride = (
        boxes.restride(tuple(tensor.shape), tensor.stride())
        if 0 not in tensor.stride()
        else None
    )
    spec = local_spec(mesh, placements, tensor.shape, tensor.dtype, stride)
    local = _piece(tensor, spec, src_data_rank)
    out = wrap(local, spec)
    return out.requires_grad_() if requires_grad else out


def _piece(tensor: Tensor, spec: Spec, source: int | None) -> Tensor:
    layout, mesh, coord = spec.layout, spec.layout.mesh, spec.coord
    if tensor.device.type != "meta" and tensor.device.type != mesh.device_type:
        tensor = tensor.to(mesh.device_type)
    if coord is None:
        return tensor.new_empty((0,) * tensor.ndim)
    if tensor.device.type == "meta" or source is None or len(mesh.ranks) == 1:
        return _masked(
            _cut(tensor, layout, coord).clone(memory_format=torch.preserve_format),
            layout,
            coord,
        )
    if not 0 <= source < len(mesh.ranks):
        raise LayoutError(
            f"src_data_rank {source} is not on a mesh of {len(mesh.ranks)} ranks.",
            tries=[
                "src_data_rank=0, the mesh's first rank",
                "src_data_rank=None: every rank cuts its own",
            ],
        )
    src = mesh.ranks[source]
    shape = [spec.local_shape[d] for d in _memory_order(layout)]
    like = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(
        shape
    )  # a shape, no memory
    order = _memory_order(layout)
    if not layout.is_sharded:
        mine = tensor.permute(order)
        mine = mine if spec.transport.rank == src else like
        got = spec.transport.broadcast(mine, mesh.ranks, src, tag=_all_axes(mesh))
    else:
        pieces = None
        if spec.transport.rank == src:
            pieces = [_cut(tensor, layout, c).permute(order) for c in mesh.coordinates()]
        got = spec.transport.scatter(pieces, like, mesh.ranks, src, tag=_all_axes(mesh))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return _masked(got.permute(inverse), layout, coord)


def _all_axes(mesh: Mesh) -> str:
    return "*".join(map(mesh.axis_name, range(mesh.ndim)))


def _memory_order(layout: Layout) -> list[int]:
    return sorted(range(layout.ndim), key=lambda d: (-layout.stride[d], d))


def _cut(tensor: Tensor, layout: Layout, coord: Any) -> Tensor:
    offsets, sizes = layout.box(coord)
    return (
        tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]
        if tensor.ndim
        else tensor
    )


def _masked(local: Tensor, layout: Layout, coord: Any) -> Tensor:
    """A pending reduction made from a whole value: kept on one rank, nothing added on the others."""
    for a, op in enumerate(layout.partial):
        if op in ("sum", "product") and coord[a] != 0:
            return torch.zeros_like(local) if op == "sum" else torch.ones_like(local)
    return local


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, Mesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, in place.

    Args:
        module: The module.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        partition_fn: ``(name, submodule, mesh)``, called for every submodule; registers distributed
            parameters. What it leaves plain is replicated.
        input_fn: ``(module, inputs, mesh)``, called before forward; its result replaces the inputs. Without the module,
            as in older programs, it is taken, too.
        output_fn: ``(module, outputs, mesh)``, called after forward; its result replaces the outputs.

    Returns:
        The module. Its parameters keep their identity, so an optimizer made before still works.
    """
    mesh = as_mesh(device_mesh)
    swapped: dict[int, nn.Parameter] = {}
    for name, sub in module.named_modules():
        before = dict(sub.named_parameters(recurse=False))
        if partition_fn is not None:
            partition_fn(name, sub, mesh)
        _adopt(sub, before, mesh, swapped)
    if input_fn is not None:
        before_call = _of_module(input_fn)
        module.register_forward_pre_hook(lambda m, inputs: before_call(m, inputs, mesh))
    if output_fn is not None:
        after_call = _of_module(output_fn)
        module.register_forward_hook(lambda m, inputs, outputs: after_call(m, outputs, mesh))
    return module


def _of_module(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function ``(module, values, mesh)``; older programs have one without the module."""
    try:
        inspect.signature(fn).bind(None, None, None)
    except TypeError:
        return lambda m, values, mesh: fn(values, mesh)
    except ValueError:  # a builtin that does not say
        pass
    return fn


def _adopt(
    sub: nn.Module,
    before: dict[str, nn.Parameter],
    mesh: Mesh,
    swapped: dict[int, nn.Parameter],
) -> None:
    """Keep each parameter object, with the distributed one's contents; tied ones become one again."""
    recurrent = isinstance(sub, nn.RNNBase)
    if recurrent:
        sub._flat_weight_refs = []  # weak references forbid the swap; renewed below
    for name, old in before.items():
        new = sub._parameters.get(name)
        if new is None:
            continue
        if id(old) in swapped:
            sub._parameters[name] = swapped[id(old)]
            continue
        if not isinstance(new, DTensor):
            new = nn.Parameter(distribute_tensor(new, mesh), requires_grad=new.requires_grad)
        if new is not old and not isinstance(old, DTensor):
            torch.utils.swap_tensors(old, new)
            new = old
        sub._parameters[name] = new
        swapped[id(old)] = new
    for name, buffer in list(sub._buffers.items()):
        if buffer is not None and not isinstance(buffer, DTensor):
            sub._buffers[name] = distribute_tensor(buffer, mesh)
    if recurrent:
        sub._init_flat_weights()
