"""Between plain local tensors and DTensors, and between layouts."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Dropped, Mover, fresh, mover
from shardwise.comm.meshes import as_mesh
from shardwise.comm.rounds import bounded
from shardwise.comm.transport import Transport, current
from shardwise.compat import direct_apply
from shardwise.errors import LayoutError, MeshError
from shardwise.events import user_site
from shardwise.layout import boxes
from shardwise.layout.cut import Cut, renumbered
from shardwise.layout.layout import Layout, parse
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Shard
from shardwise.program.spec import Spec, spec_of
from shardwise.tensor.casts import onto, refuse_kind, refuse_tangent
from shardwise.tensor.checks import checksum
from shardwise.tensor.dtensor import _CROSSINGS, DTensor, wrap
from shardwise.tensor.explain import explained
from shardwise.tensor.pending import start
from shardwise.tensor.strides import alias


def resolve(
    device_mesh: Any, placements: Any, shape: Sequence[int], *, sized: bool = True
) -> tuple[Mesh, Any, Any]:
    """Mesh, axes per dim and pending reductions from what a user gave."""
    mesh = as_mesh(device_mesh)
    if isinstance(placements, DTensor):
        raise LayoutError(
            "placements must be placements, a spec or a layout, not a DTensor.",
            tries=["x.placements", "x.layout"],
        )
    dims, partial = parse(mesh, placements, shape, sized=sized)
    return mesh, dims, partial


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
        return _to_local_gradient(grads[0], ctx.back), None


class _GradientLeaves(torch.autograd.Function):
    """The gradient's move across a border. A gradient of it crosses the other way, as a value: it only passes.

    The transpose of the move would be another thing: what is computed from a plain gradient is computed on every rank,
    and would be summed over them.
    """

    @staticmethod
    def forward(g: Tensor, back: Mover) -> Tensor:
        return fresh(back.run(g), g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.back = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _enter(grads[0], ctx.back), None


def _to_local_gradient(g: Tensor, back: Mover) -> Tensor:
    if g.requires_grad and back.moves:
        return _gradient_leaves(g, back)
    return back(g)


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
        return _to_local_gradient(grads[0], ctx.back), None, None


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
                "equal on all ranks, but it differs.",
                tries=[
                    "x.to_local(grad_placements=[Partial()]) if each rank contributes a part (a replicated weight used "
                    "on sharded rows)"
                ],
            )


@explained("DTensor.from_local", "local", "device_mesh", "placements", "shape", "stride")
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
        raise LayoutError(
            "from_local takes a local tensor, not a DTensor.",
            tries=["x.redistribute(mesh, placements)"],
        )
    if type(local) is not Tensor:
        refuse_kind(local)
    transport = current()
    known: dict[Any, tuple[Spec, Mover | None]] = transport.state.setdefault("from_local", {})
    key = None
    plain = (
        isinstance(device_mesh, Mesh)
        and type(placements) in (list, tuple)
        and grad_placements is None
    )
    if plain and stride is None and not (run_check and shape is None):
        asked = None if shape is None else tuple(shape)
        key = (id(device_mesh), *placements, asked, local.shape, local.stride(), local.dtype)
        try:
            found = known.get(key)
        except TypeError:  # a spec with lists in it
            key = found = None
        if found is not None:
            return _entered(local, *found)
    mesh, dims, partial = resolve(device_mesh, placements, local.shape, sized=False)
    coord = mesh.coordinate_of(transport.rank)
    if coord is None:
        whole = (
            tuple(shape) if shape is not None else _taken_shape(local, dims, mesh, placements)
        )
        dims = resolve(mesh, placements, whole)[1]
        layout = Layout(
            mesh, dims, _inside(partial), whole, boxes.contiguous_stride(whole), local.dtype
        )
        return wrap(local.new_empty((0,) * local.ndim), spec_of(layout, transport))
    if "avg" in partial and not (local.is_floating_point() or local.is_complex()):
        raise LayoutError(
            f"an average of whole numbers ({local.dtype}) is pending, and may be none."
        )
    if 0 in local.stride() and local.numel() > 1:
        local = local.contiguous()
    order = tuple(local.stride())
    if shape is not None:
        whole = tuple(shape)
    elif run_check and len(mesh.ranks) > 1:
        whole, order, dims = _agreed(local, mesh, placements, dims, partial, transport)
    else:
        whole = _taken_shape(local, dims, mesh, placements)
    dims = resolve(mesh, placements, whole)[1]
    dense = tuple(stride) if stride is not None else boxes.restride(whole, order)
    layout = Layout(mesh, dims, _inside(partial), whole, dense, local.dtype)
    spec = spec_of(layout, transport)
    if local.shape != spec.local_shape:
        raise LayoutError(
            f"a local of shape {tuple(local.shape)} is no piece of {layout}: "
            f"the piece of rank {transport.rank} has shape {tuple(spec.local_shape)}.",
            tries=[
                "neither shape nor run_check=False: the ranks tell each other what they hold",
                "Shard(dim, sizes=(...)): what each rank holds",
            ],
        )
    given, local = local, _in_memory_order(local, layout)
    if "avg" in partial:
        local = local / math.prod(n for n, op in zip(mesh.shape, partial) if op == "avg")
    back = _way_back(layout, grad_placements, transport)
    if key is not None and local is given:
        if len(known) > 16384:
            known.clear()
        known[key] = (spec, back)
    return _entered(local, spec, back)


def _way_back(layout: Layout, grad_placements: Any, transport: Transport) -> Mover | None:
    """From the gradient of the DTensor to that of the local: as the value, pending sums replicated."""
    want = layout
    if grad_placements is not None:
        want = layout.with_placement(*parse(layout.mesh, grad_placements, layout.shape))
    elif layout.is_partial:
        want = layout.with_placement(layout.dims, (None,) * layout.mesh.ndim)
    return mover(layout.dual(), want, transport) if want is not layout.dual() else None


def _entered(local: Tensor, spec: Spec, back: Mover | None) -> DTensor:
    """The piece as a DTensor; ``back`` moves its gradient to where the local program expects it."""
    refuse_tangent(local)
    if back is not None and local.requires_grad and torch.is_grad_enabled():
        local = _enter(local, back)  # pyright: ignore[reportAssignmentType]
    else:
        local = alias(local)
    return wrap(local, spec)


def _in_memory_order(local: Tensor, layout: Layout) -> Tensor:
    """The piece, dense, with its dims in the memory order of the layout (a copy where it was not)."""
    order = sorted(range(layout.ndim), key=lambda d: (-layout.stride[d], d))
    packed = local.permute(order)
    if packed.is_contiguous():
        return local
    return packed.contiguous().permute(sorted(range(layout.ndim), key=order.__getitem__))


def _inside(partial: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """A pending average is scaled on entry and is a pending sum inside."""
    return tuple("sum" if op == "avg" else op for op in partial)


def _taken_shape(local: Tensor, dims: Any, mesh: Mesh, placements: Any) -> tuple[int, ...]:
    """The global shape that one piece tells: of even pieces, or of chosen sizes."""
    out = list(local.shape)
    for d, axes in enumerate(dims):
        for a in axes:
            out[d] *= mesh.shape[a]
        if isinstance(placements, Layout) and isinstance(placements.dims[d], Cut):
            out[d] = placements.shape[d]
    if isinstance(placements, Shard):
        placements = (placements,)
    if isinstance(placements, (list, tuple)):
        for p in placements:
            if isinstance(p, Shard) and p.is_sized:
                if p.sizes is None or len(dims[p.dim]) > 1:
                    raise LayoutError(
                        f"one piece does not tell how long a dim is that is cut as {p}.",
                        tries=["shape=...", "run_check=True: the ranks tell each other"],
                    )
                out[p.dim] = sum(p.sizes)
    return tuple(out)


def _agreed(
    local: Tensor,
    mesh: Mesh,
    placements: Any,
    dims: Any,
    partial: Any,
    transport: Transport,
) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """The global shape that the pieces of all ranks make, the strides of the first rank's, and how dims are cut.

    All ranks raise if they make none.
    """
    sharded = {a for axes in dims for a in axes}
    replica = all(a in sharded or partial[a] is not None for a in range(mesh.ndim))
    everyone = transport.all_gather_object(
        (
            (tuple(local.shape), tuple(local.stride())),
            str(local.dtype),
            None if replica else checksum(local),
        ),
        mesh.ranks,
    )
    strides, everyone = everyone[0][0][1], [(s[0], d, c) for s, d, c in everyone]
    by_coord = dict(zip(mesh.coordinates(), everyone))
    dtypes = {d for _, d, _ in everyone}
    if len(dtypes) > 1:
        raise LayoutError(f"the pieces have different dtypes: {', '.join(sorted(dtypes))}.")
    if len({len(s) for s, _, _ in everyone}) > 1:
        raise LayoutError("the pieces have different numbers of dims.")
    whole = list(local.shape)
    origin = (0,) * mesh.ndim
    for d, axes in enumerate(dims):
        if axes:
            base = {
                c: s[0][d]
                for c, s in by_coord.items()
                if all(c[a] == 0 for a in range(mesh.ndim) if a not in axes)
            }
            whole[d] = sum(base.values())
        else:
            whole[d] = by_coord[origin][0][d]
    dims = resolve(mesh, placements, whole)[1]
    for c, (held, _, _) in by_coord.items():
        want = boxes.box(whole, dims, mesh.shape, c)[1]
        if want != held:
            raise LayoutError(
                f"the pieces contradict each other: rank {mesh.rank_at(c)} gave shape {held}; of a tensor of "
                f"shape {tuple(whole)} its piece would be {want} (pieces are cut as torch.chunk cuts).",
                tries=["Shard(dim, sizes=...): what each rank holds"],
            )
    if not replica:
        for c, (_, _, total) in by_coord.items():
            first = tuple(
                i if a in sharded or partial[a] is not None else 0 for a, i in enumerate(c)
            )
            if by_coord[first][2] != total:
                raise LayoutError(
                    f"rank {mesh.rank_at(c)} holds other values than rank {mesh.rank_at(first)}, but the "
                    "placements say that they are replicas.",
                    tries=[
                        "Shard(dim) if the ranks hold different pieces, Partial() if they hold addends",
                        "run_check=False, if the difference is meant",
                    ],
                )
    return tuple(whole), strides, dims


@explained("DTensor.to_local", "x", "grad_placements")
def to_local(x: DTensor, grad_placements: Any) -> Tensor:
    """The differentiable part of ``DTensor.to_local``."""
    layout, transport = x._spec.layout, x._spec.transport
    known: dict[Spec, tuple[Mover, tuple[int, ...]]] = transport.state.setdefault(
        "to_local", {}
    )
    if grad_placements is None and (found := known.get(x._spec)) is not None:
        back, axes = found
        guess = _Guess(layout, axes, transport) if axes else None
        return _leave(x._local, back, guess)  # pyright: ignore[reportReturnType]
    guess, axes = None, ()
    if grad_placements is not None:
        gd, gp = parse(layout.mesh, grad_placements, layout.shape)
        want = layout.with_placement(gd, gp)
    else:
        want = layout.with_placement(layout.dims, (None,) * layout.mesh.ndim)
        sharded = {a for axes in layout.dims for a in axes}
        axes = tuple(
            a for a in range(layout.mesh.ndim) if a not in sharded and layout.mesh.shape[a] > 1
        )
        if axes:
            guess = _Guess(layout, axes, transport)
    back = mover(want, layout.dual(), transport)
    if grad_placements is None:
        if len(known) > 16384:
            known.clear()
        known[x._spec] = (back, axes)
    return _leave(x._local, back, guess)  # pyright: ignore[reportReturnType]


def planned(x: DTensor, device_mesh: Any, placements: Any) -> tuple[Tensor, Mover, Spec, bool]:
    """How to redistribute: the local operand, its move, the spec of the result; whether it is so on all ranks."""
    src, transport = x._spec.layout, x._spec.transport
    mesh, dims, partial = resolve(
        src.mesh if device_mesh is None else device_mesh, placements, src.shape
    )
    local = x._local
    wider = None
    if mesh is not src.mesh:
        how = related(src.mesh, mesh, transport)
        if how == "contains":
            src = src.on(mesh)
            local = onto(x, mesh)
        elif how == "slice":
            wider = mesh
            mesh, dims, partial = lifted(mesh, src.mesh, dims, partial)
    dst = dense(src)
    dst = Layout(mesh, dims, _inside(partial), dst.shape, dst.stride, dst.dtype)
    move: Any = mover(src, dst, transport)
    out = spec_of(dst if wider is None else _on_slice(dst, wider), transport)
    if wider is not None and out.coord is None:
        move = Dropped(move)
    return local, move, out, local is x._local


@explained("DTensor.redistribute", "x", "device_mesh", "placements")
def redistribute(
    x: DTensor,
    key: Any,
    device_mesh: Any,
    placements: Any,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    async_op: bool = False,
    max_extra_bytes: int | None = None,
) -> DTensor:
    """The first call of ``DTensor.redistribute`` for a layout pair."""
    if forward_dtype is not None and forward_dtype != x._spec.layout.dtype:
        x = x.to(forward_dtype)  # pyright: ignore[reportAssignmentType]
        key = None
    own, move, out, plain = planned(x, device_mesh, placements)
    if max_extra_bytes is not None:
        move = bounded(move, max_extra_bytes)
    if async_op:
        return start(move, own, out)
    if key is not None and plain and backward_dtype is None:
        x._spec.programs[0][key] = (move, out)
    if (
        backward_dtype not in (None, x._spec.layout.dtype)
        and own.requires_grad
        and torch.is_grad_enabled()
    ):
        local: Tensor = _castback(own, move, backward_dtype)  # pyright: ignore[reportAssignmentType]
    else:
        local = move(own)
    if local is x._local:
        local = alias(local)
    return wrap(local, out)


def related(src: Mesh, dst: Mesh, transport: Transport) -> str:
    """How two meshes stand to each other: ``"contains"``, ``"slice"`` or ``"other"``.

    A slice is each caller's own: ``mesh["tp"]`` is another mesh on other rows. But the same ranks may be meant
    as one mesh for all; which it is shows in who holds something, so the ranks of the larger mesh tell each
    other, once for each pair.
    """
    if src == dst:
        return "contains"
    known: dict[Any, str] = transport.state.setdefault("related", {})
    found = known.get((src, dst))
    if found is not None:
        return found
    if src.axes_in(dst) is not None:
        everyone = dst.ranks
    elif dst.axes_in(src) is not None:
        known[src, dst] = "slice"
        return "slice"
    else:
        everyone = (*src.ranks, *(r for r in dst.ranks if r not in src.ranks))
    kind = "other"
    if transport.rank in everyone:
        mine = (src.ranks, src.shape, dst.ranks, dst.shape, transport.rank in src.ranks)
        said = transport.all_gather_object(mine, everyone)
        if src.axes_in(dst) is not None and all(s[4] for s in said):
            kind = "contains"
        elif len({s[:4] for s in said}) > 1:
            raise MeshError(
                f"the ranks do not agree on the meshes of a move: from {src} to {dst} says rank {transport.rank}.",
                tries=[
                    "the same two meshes on every rank; a slice like mesh['tp'] differs from row to row"
                ],
            )
    known[src, dst] = kind
    return kind


def lifted(slice_: Mesh, mesh: Mesh, dims: Any, partial: Any) -> tuple[Mesh, Any, Any]:
    """A placement on a slice, on the mesh it is a slice of: replicated over the missing axes."""
    axes = slice_.axes_in(mesh)
    assert axes is not None, "a slice"
    out: list[Any] = [None] * mesh.ndim
    for a, op in zip(axes, partial):
        out[a] = op
    return mesh, tuple(renumbered(d, axes.__getitem__) for d in dims), tuple(out)


def _on_slice(layout: Layout, slice_: Mesh) -> Layout:
    """A layout that replicates over the axes that a slice lacks, on the slice."""
    axes = slice_.axes_in(layout.mesh)
    assert axes is not None, "a slice"
    dims = tuple(renumbered(d, axes.index) for d in layout.dims)
    partial = tuple(layout.partial[a] for a in axes)
    return Layout(slice_, dims, partial, layout.shape, layout.stride, layout.dtype)


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
        back = how.between(src, how.src.dual().with_dtype(ctx.dtype))
        return back(grads[0].to(ctx.dtype)).to(ctx.own), None, None


def dense(layout: Layout) -> Layout:
    """The layout with strides that tile memory: what a move makes of an expanded tensor."""
    stride = boxes.restride(layout.shape, layout.stride)
    if 0 in layout.stride:
        stride = boxes.contiguous_stride(layout.shape)
    return (
        layout
        if stride == layout.stride
        else layout.with_tensor(layout.shape, stride, layout.dtype)
    )


def local_spec(mesh: Mesh, placements: Any, shape: Any, dtype: Any, stride: Any = None) -> Spec:
    """The current rank's spec of a new tensor."""
    shape = tuple(int(n) for n in shape)
    layout = Layout.of(mesh, placements, shape, stride, dtype)
    return spec_of(layout.with_placement(layout.dims, _inside(layout.partial)), current())


_CROSSINGS.update(from_local=from_local, to_local=to_local, redistribute=redistribute)


_enter = direct_apply(_Enter)
_gradient_leaves = direct_apply(_GradientLeaves)
_leave = direct_apply(_Leave)
_castback = direct_apply(_CastBack)
