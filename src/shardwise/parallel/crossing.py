"""What crosses the border of a parallelized module: plain pieces in, plain pieces out, or DTensors.

A plain tensor at the border follows torch's convention: the gradient of a replicated one is whole on every
rank. Entering and leaving are each one step with the move that comes with it, so that a sum which is settled
forward costs nothing backward, and what several modules take in the same way is moved once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Mover, fresh, mover
from shardwise.comm.transport import Transport, current
from shardwise.compat import direct_apply
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import boxes
from shardwise.layout.cut import renumbered
from shardwise.layout.layout import Layout, parse
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Partial, Placement, Shard
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap


class _Crossed(torch.autograd.Function):
    """A move of the value, with another than its transpose for the gradient; and the first again for the gradient's."""

    @staticmethod
    def forward(x: Tensor, there: Mover, back: Mover) -> Tensor:
        return fresh(there.run(x), x) if there.moves else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.there, ctx.back = inputs[1], inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _cross(grads[0], ctx.back, ctx.there), None, None


_crossed = direct_apply(_Crossed)


def _cross(x: Tensor, there: Mover, back: Mover) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _crossed(x, there, back) if there.moves or back.moves else x
    return there.run(x)


# ---- layouts ------------------------------------------------------------------------------------


def placed(layout: Layout, mesh: Mesh, placement: Placement) -> Layout:
    """The layout with another placement on the one axis of ``mesh``, which may be a slice of its own mesh.

    Raises:
        LayoutError: The dim does not exist.
        MeshError: The meshes have nothing to do with each other.
    """
    axis = axis_of(mesh, layout.mesh)
    dims = [tuple(a for a in axes if a != axis) for axes in layout.dims]
    partial = list(layout.partial)
    partial[axis] = None
    if isinstance(placement, Shard):
        dim = _dim(placement, layout.ndim)
        dims[dim] = (*dims[dim], axis)
        if placement.is_sized:
            if len(dims[dim]) > 1:
                raise LayoutError(
                    f"{placement} on a dim of {layout} that other axes cut, too.",
                    tries=["redistribute(), which takes all axes at once"],
                )
            (chosen,) = parse(
                mesh, (Shard(0, **placement.chosen),), layout.shape[dim : dim + 1]
            )[0]
            dims[dim] = renumbered(chosen, lambda _: axis)
    elif isinstance(placement, Partial):
        partial[axis] = placement.reduce_op
    return layout.with_placement(tuple(dims), tuple(partial))


def axis_of(mesh: Mesh, larger: Mesh) -> int:
    """The axis of ``larger`` that the 1-D ``mesh`` is a slice along."""
    axes = (0,) if mesh is larger else mesh.axes_in(larger)
    if axes is None:
        raise MeshError(f"a tensor on {larger} comes to a module that is parallel over {mesh}.")
    return axes[0]


def _dim(placement: Shard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        raise LayoutError(f"{placement} of a tensor with {ndim} dims.")
    return placement.dim % ndim


# ---- in -----------------------------------------------------------------------------------------


def entered(
    x: Tensor, mesh: Mesh, given: Placement, wanted: Placement, sizes: dict[int, int]
) -> DTensor:
    """What a module gets: a DTensor placed as ``wanted`` along the mesh.

    Args:
        x: A DTensor, or this rank's plain piece.
        mesh: The 1-D mesh that the module is parallel over.
        given: How a plain ``x`` is placed.
        wanted: How the module wants it.
        sizes: Global sizes of dims, as far as the module knows them; those of other sharded dims are
            exchanged.
    """
    track = x.requires_grad and torch.is_grad_enabled()
    if (
        track
    ):  # modules that take the same tensor in the same way share the move, and its backward
        key = (mesh, given, wanted, x._version, current())
        shared = vars(x).get("_shardwise_entered")
        if shared is not None and shared[0] == key:
            return shared[1]
    if isinstance(x, DTensor):
        out = moved(x, mesh, wanted)
        if out is x:
            return x
    else:
        out = _entered_plain(x, mesh, given, wanted, sizes)
    if track and not x.is_leaf:  # a leaf is held by its node: it would never be freed
        vars(x)["_shardwise_entered"] = (key, out)
    return out


def _entered_plain(
    x: Tensor, mesh: Mesh, given: Placement, wanted: Placement, sizes: dict[int, int]
) -> DTensor:
    transport = current()
    if not x.is_contiguous():
        x = x.contiguous()
    src = plain_layout(x, mesh, given, sizes, transport)
    known: dict[Any, Any] = transport.state.setdefault("entered", {})
    how = known.get((src, wanted))
    if how is None:
        dst = placed(src, mesh, wanted)
        how = known[src, wanted] = (
            mover(src, dst, transport),
            mover(dst.dual(), _whole(src), transport),
            spec_of(dst, transport),
        )
    there, back, spec = how
    return wrap(_cross(x, there, back), spec)


def _whole(layout: Layout) -> Layout:
    """The layout of a plain piece's gradient: pending sums are settled, replicas have it whole."""
    return layout.with_placement(layout.dims, (None,) * layout.mesh.ndim)


def plain_layout(
    x: Tensor, mesh: Mesh, given: Placement, sizes: dict[int, int], transport: Transport
) -> Layout:
    """The layout of a plain piece on a 1-D mesh.

    Raises:
        LayoutError: The pieces of the ranks make no whole.
    """
    shape = list(x.shape)
    if isinstance(given, Shard) and mesh.shape[0] > 1:
        dim = _dim(given, x.ndim)
        shape[dim] = sizes.get(dim - x.ndim, -1)
        if shape[dim] < 0:
            shape[dim] = _total(x.shape[dim], mesh, given, transport)
        at = mesh.coordinate_of(transport.rank)
        held = _pieces(shape[dim], mesh, given)
        want = held[at[0]] if at else x.shape[dim]
        if want != x.shape[dim]:
            raise LayoutError(
                f"a plain piece of shape {tuple(x.shape)} is taken as {given} of a whole of "
                f"{shape[dim]}; this rank's piece would have {want} there, not {x.shape[dim]}.",
                tries=["let the module before hand it on as a DTensor: use_local_output=False"],
            )
    return Layout.of(mesh, (given,), shape, None, x.dtype)


def _pieces(n: int, mesh: Mesh, given: Shard) -> list[int]:
    """What the ranks of a 1-D mesh hold of a dim."""
    (axes,) = parse(mesh, (Shard(0, **given.chosen),), (n,))[0]
    return [m for _, m in boxes.pieces(n, axes, mesh.shape)]


def _total(size: int, mesh: Mesh, given: Shard, transport: Transport) -> int:
    """The global size of a dim of which every rank has a piece; all ranks raise if they make no whole."""
    everyone = transport.all_gather(torch.tensor(size), mesh.ranks, tag=mesh.axis_name(0))
    pieces: list[int] = everyone.tolist()
    total = sum(pieces)
    if pieces != _pieces(total, mesh, given):
        raise LayoutError(
            f"the ranks hold {pieces} of a dim; pieces are cut as torch.chunk cuts.",
            tries=["DTensor.redistribute, or distribute_tensor, cuts that way"],
        )
    return total


# ---- out ----------------------------------------------------------------------------------------


def moved(x: DTensor, mesh: Mesh, wanted: Placement) -> DTensor:
    """``x`` with another placement along the mesh; differentiable."""
    spec = x._spec
    known: dict[Any, Any] = spec.transport.state.setdefault("moved_along", {})
    how = known.get((spec, mesh, wanted))
    if how is None:
        dst = placed(spec.layout, mesh, wanted)
        how = known[spec, mesh, wanted] = (
            mover(spec.layout, dst, spec.transport),
            spec_of(dst, spec.transport),
        )
    there, out = how
    return x if out is spec else wrap(there(x._local), out)


def left(x: DTensor, mesh: Mesh, wanted: Placement) -> Tensor:
    """This rank's plain piece of ``x``, placed as ``wanted``; a DTensor where ``x`` is on a larger mesh.

    On a larger mesh a plain piece would forget that its gradient is due to the other axes, too.
    """
    spec = x._spec
    if spec.layout.mesh != mesh:
        return moved(x, mesh, wanted)
    known: dict[Any, tuple[Mover, Mover]] = spec.transport.state.setdefault("left", {})
    how = known.get((spec, wanted))
    if how is None:
        dst = placed(spec.layout, mesh, wanted)
        how = known[spec, wanted] = (
            mover(spec.layout, dst, spec.transport),
            mover(_whole(dst), spec.layout.dual(), spec.transport),
        )
    return _cross(x._local, *how)


def passed(x: Tensor, mesh: Mesh, given: Placement, wanted: Placement) -> Tensor:
    """A plain piece placed otherwise, plain again."""
    transport = current()
    x = x.contiguous()
    src = plain_layout(x, mesh, given, {}, transport)
    dst = placed(src, mesh, wanted)
    return _cross(x, mover(src, dst, transport), mover(_whole(dst), _whole(src), transport))
