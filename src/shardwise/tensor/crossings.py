"""Between plain local tensors and DTensors, and between layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Mover, fresh, mover
from shardwise.comm.transport import Transport, current
from shardwise.errors import LayoutError
from shardwise.events import user_site
from shardwise.layout import boxes
from shardwise.layout.layout import Layout, parse
from shardwise.layout.mesh import Mesh
from shardwise.program.spec import Spec, spec_of
from shardwise.tensor.checks import checksum
from shardwise.tensor.dtensor import _CROSSINGS, DTensor, resolve, wrap


class _Enter(torch.autograd.Function):
    """Local -> DTensor: the value passes; the gradient moves to where the local program expects it."""

    @staticmethod
    def forward(x: Tensor, back: Mover) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.back = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None


class _Leave(torch.autograd.Function):
    """DTensor -> local: the gradient, in the layout the local program produced, moves to the dual."""

    @staticmethod
    def forward(x: Tensor, back: Mover, guess: _Guess | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.back, ctx.guess = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.guess is not None:
            ctx.guess.check(grads[0])
        return ctx.back(grads[0]), None, None


class _Guess:
    """A bare ``to_local()`` of a replicated piece: are the gradients really equal on all ranks?"""

    __slots__ = ("axes", "layout", "site", "transport")

    def __init__(self, layout: Layout, axes: tuple[int, ...], transport: Transport) -> None:
        self.layout, self.axes, self.transport = layout, axes, transport
        self.site = user_site()

    def check(self, g: Tensor) -> None:
        """Compare once per line of user code and layout; all ranks raise together if the gradients differ."""
        seen: set[Any] = self.transport.state.setdefault("to_local_checked", set())
        key = (self.layout, self.axes, self.site)
        if key in seen:
            return
        seen.add(key)
        coord = self.layout.mesh.coordinate_of(self.transport.rank)
        if coord is None:
            return
        ranks = self.layout.mesh.group_ranks(self.axes, coord)
        local = g.detach()
        low = self.transport.all_reduce(local.contiguous(), ranks, "min")
        high = self.transport.all_reduce(local.contiguous(), ranks, "max")
        differs = ~((high - low).abs() <= 1e-3 * torch.maximum(high.abs(), low.abs()) + 1e-30)
        same_inf = (high == low) | (high.isnan() & low.isnan())
        worst = (differs & ~same_inf).any().to(torch.int32)
        if int(self.transport.all_reduce(worst, self.layout.mesh.ranks, "max")):
            seen.discard(key)
            raise LayoutError(
                f"to_local() of {self.layout} without grad_placements takes the gradient of a replicated piece to be "
                "equal on all ranks, but it differs; write x.to_local(grad_placements=[Partial()]) if each rank "
                "contributes a part (a replicated weight used on sharded rows)"
            )


def from_local(
    local: Tensor,
    device_mesh: Any,
    placements: Any,
    run_check: bool,
    shape: Any,
    stride: Any,
    grad_placements: Any,
) -> DTensor:
    """See ``DTensor.from_local``."""
    if isinstance(local, DTensor):
        raise LayoutError("from_local takes a local tensor, not a DTensor; use redistribute")
    mesh, dims, partial = resolve(device_mesh, placements, local.ndim)
    transport = current()
    coord = mesh.coordinate_of(transport.rank)
    if coord is None:
        whole = tuple(shape) if shape is not None else _taken_shape(local, dims, mesh)
        layout = Layout(mesh, dims, _inside(partial), whole, boxes.contiguous_stride(whole), local.dtype)
        return wrap(local.new_empty((0,) * local.ndim), spec_of(layout, transport))
    if shape is not None:
        whole = tuple(shape)
    elif run_check and len(mesh.ranks) > 1:
        whole = _agreed_shape(local, mesh, dims, partial, coord, transport)
    else:
        whole = _taken_shape(local, dims, mesh)
    dense = tuple(stride) if stride is not None else boxes.restride(whole, local.stride())
    if 0 in local.stride() and local.numel() > 1:
        local, dense = local.contiguous(), boxes.contiguous_stride(whole)
    layout = Layout(mesh, dims, _inside(partial), whole, dense, local.dtype)
    spec = spec_of(layout, transport)
    if shape is not None and local.shape != spec.local_shape:
        raise LayoutError(
            f"a local of shape {tuple(local.shape)} is no piece of a tensor of shape {whole} as {layout}: "
            f"this rank's piece has shape {tuple(spec.local_shape)}"
        )
    if not local.is_contiguous() and layout.is_contiguous:
        local = local.contiguous()
    if "avg" in partial:
        n = 1
        for a, op in enumerate(partial):
            n *= mesh.shape[a] if op == "avg" else 1
        local = local / n
    if local.requires_grad and torch.is_grad_enabled():
        want = layout
        if grad_placements is not None:
            gd, gp = parse(mesh, grad_placements, local.ndim)
            want = layout.with_placement(gd, gp)
        elif layout.is_partial:
            want = layout.with_placement(dims, (None,) * mesh.ndim)
        local = _Enter.apply(local, mover(layout.dual(), want, transport))
    else:
        local = local.view_as(local)
    return wrap(local, spec)


def _inside(partial: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """A pending average is scaled on entry and is a pending sum inside."""
    return tuple("sum" if op == "avg" else op for op in partial)


def _taken_shape(local: Tensor, dims: Any, mesh: Mesh) -> tuple[int, ...]:
    out = list(local.shape)
    for d, axes in enumerate(dims):
        for a in axes:
            out[d] *= mesh.shape[a]
    return tuple(out)


def _agreed_shape(local: Tensor, mesh: Mesh, dims: Any, partial: Any, coord: Any, transport: Transport) -> tuple[int, ...]:
    """The global shape that the pieces of all ranks make; all ranks raise if they make none."""
    sharded = {a for axes in dims for a in axes}
    replica = all(a in sharded or partial[a] is not None for a in range(mesh.ndim))
    everyone = transport.all_gather_object(
        (tuple(local.shape), str(local.dtype), None if replica else checksum(local)), mesh.ranks
    )
    by_coord = dict(zip(mesh.coordinates(), everyone))
    dtypes = {d for _, d, _ in everyone}
    if len(dtypes) > 1:
        raise LayoutError(f"from_local: ranks gave different dtypes: {', '.join(sorted(dtypes))}")
    if len({len(s) for s, _, _ in everyone}) > 1:
        raise LayoutError("from_local: ranks gave tensors with different numbers of dims")
    whole = list(local.shape)
    origin = (0,) * mesh.ndim
    for d, axes in enumerate(dims):
        if axes:
            base = {c: s[0][d] for c, s in by_coord.items() if all(c[a] == 0 for a in range(mesh.ndim) if a not in axes)}
            whole[d] = sum(base.values())
        else:
            whole[d] = by_coord[origin][0][d]
    for c, (held, _, _) in by_coord.items():
        want = boxes.box(whole, dims, mesh.shape, c)[1]
        if want != held:
            raise LayoutError(
                f"from_local: the pieces contradict each other. Rank {mesh.rank_at(c)} gave shape {held}; of a tensor of "
                f"shape {tuple(whole)} its piece would be {want} (pieces are cut as torch.chunk cuts)"
            )
    if not replica:
        for c, (_, _, total) in by_coord.items():
            first = tuple(i if a in sharded or partial[a] is not None else 0 for a, i in enumerate(c))
            if by_coord[first][2] != total:
                raise LayoutError(
                    f"from_local: rank {mesh.rank_at(c)} holds other values than rank {mesh.rank_at(first)}, but the "
                    "placements say that they are replicas; use Shard or Partial, or run_check=False"
                )
    return tuple(whole)


def to_local(x: DTensor, grad_placements: Any) -> Tensor:
    """The differentiable part of ``DTensor.to_local``."""
    layout, transport = x._spec.layout, x._spec.transport
    guess = None
    if grad_placements is not None:
        gd, gp = parse(layout.mesh, grad_placements, layout.ndim)
        want = layout.with_placement(gd, gp)
    else:
        want = layout.with_placement(layout.dims, (None,) * layout.mesh.ndim)
        sharded = {a for axes in layout.dims for a in axes}
        axes = tuple(a for a in range(layout.mesh.ndim) if a not in sharded and layout.mesh.shape[a] > 1)
        if axes:
            guess = _Guess(layout, axes, transport)
    return _Leave.apply(x._local, mover(want, layout.dual(), transport), guess)  # pyright: ignore[reportReturnType]


def redistribute(
    x: DTensor,
    key: Any,
    device_mesh: Any,
    placements: Any,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    """The first call of ``DTensor.redistribute`` for a layout pair."""
    src = x._spec.layout
    mesh, dims, partial = resolve(src.mesh if device_mesh is None else device_mesh, placements, src.ndim)
    if mesh is not src.mesh:
        if mesh != src.mesh:
            raise LayoutError(f"redistribute from {src.mesh} to {mesh}: moving between meshes is not here yet")
        src = src.on(mesh)
    if forward_dtype is not None and forward_dtype != src.dtype:
        x = x.to(forward_dtype)
        src = x._spec.layout
    dst = dense(src).with_placement(dims, _inside(partial))
    move = mover(src, dst, x._spec.transport)
    out = spec_of(dst, x._spec.transport)
    if key is not None and forward_dtype is None and backward_dtype is None:
        x._spec.programs[0][key] = (move, out)
    local = move(x._local)
    if backward_dtype is not None and local.requires_grad and backward_dtype != local.dtype:
        local = _CastBack.apply(x._local, move, backward_dtype)
    if local is x._local:
        local = local.view_as(local)
    return wrap(local, out)


class _CastBack(torch.autograd.Function):
    """A move whose gradient travels in another dtype."""

    @staticmethod
    def forward(x: Tensor, how: Mover, dtype: torch.dtype) -> Tensor:
        return fresh(how.run(x), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.how, ctx.dtype = inputs
        ctx.own = x.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        how: Mover = ctx.how
        src = how.dst.dual().with_dtype(ctx.dtype)
        back = mover(src, how.src.dual().with_dtype(ctx.dtype), how.transport)
        return back(grads[0].to(ctx.dtype)).to(ctx.own), None, None


def dense(layout: Layout) -> Layout:
    """The layout with strides that tile memory: what a move makes of an expanded tensor."""
    stride = boxes.restride(layout.shape, layout.stride)
    if 0 in layout.stride:
        stride = boxes.contiguous_stride(layout.shape)
    return layout if stride == layout.stride else layout.with_tensor(layout.shape, stride, layout.dtype)


def local_spec(mesh: Mesh, placements: Any, shape: Any, dtype: Any, stride: Any = None) -> Spec:
    """The current rank's spec of a new tensor."""
    shape = tuple(int(n) for n in shape)
    layout = Layout.of(mesh, placements, shape, stride, dtype)
    return spec_of(layout.with_placement(layout.dims, _inside(layout.partial)), current())


_CROSSINGS.update(from_local=from_local, to_local=to_local, redistribute=redistribute)
