"""Carry out routes on local tensors, and differentiate them.

A ``Mover`` is a route compiled for one rank: a chain of closures over the group's ranks and the pieces to
cut. Its backward is the mover between the dual layouts (design: gradients), which calls movers again, so
that double backward works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.one_shot import NEUTRAL, OneShot, neutral
from shardwise.comm.transport import Transport
from shardwise.compat import direct_apply
from shardwise.errors import UnsupportedError
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.route.cost import Profile, objective
from shardwise.route.moves import Move
from shardwise.route.search import route

Step = Callable[[Tensor], Tensor]


class Mover:
    """A route from ``src`` to ``dst``, ready to run on one rank.

    Attributes:
        src: Layout of the operand.
        dst: Layout of the result.
        moves: The route.
        what: What the route minimizes, ``"time"`` or ``"bytes"``.
    """

    __slots__ = (
        "_back",
        "_extremum",
        "_leanest",
        "_steps",
        "dst",
        "moves",
        "src",
        "transport",
        "what",
    )

    def __init__(
        self, src: Layout, dst: Layout, transport: Transport, what: str = "time"
    ) -> None:
        self.src, self.dst, self.transport, self.what = src, dst, transport, what
        self._back: Mover | None = None
        self._leanest: Mover | None = None
        self._extremum = any(op is not None and op != "sum" for op in src.partial)
        src, dst, order = _row_major(src, dst)
        self.moves = route(src, dst, profile_of(src.mesh, transport), what)
        coord = src.mesh.coordinate_of(transport.rank)
        steps = [] if coord is None else [_compile(m, coord, transport) for m in self.moves]
        if order is not None and steps:
            inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
            steps = [lambda x: x.permute(order), *steps, lambda x: x.permute(inverse)]
        self._steps: tuple[Step, ...] = tuple(steps)

    @property
    def communicates(self) -> bool:
        """Whether anything is sent."""
        return any(m.communicates for m in self.moves)

    @property
    def back(self) -> Mover:
        """The transpose: moves a gradient from the dual of ``dst`` to the dual of ``src``."""
        if self._back is None:
            self._back = mover(self.dst.dual(), self.src.dual(), self.transport)
        return self._back

    def now(self) -> Mover:
        """This mover, or the one of the same pair that minimizes what is asked for where this is called.

        Programs keep movers, so it is asked at each use.
        """
        what = objective()
        if what == self.what:
            return self
        if self._leanest is None:
            self._leanest = Mover(self.src, self.dst, self.transport, what)
        return self._leanest

    def run(self, x: Tensor) -> Tensor:
        """Move, without recording for autograd."""
        if objective() != self.what:
            return self.now().run(x)
        for step in self._steps:
            x = step(x)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """Move; differentiable."""
        if not self._steps:
            return x
        if objective() != self.what:
            return self.now()(x)
        if x.requires_grad and torch.is_grad_enabled():
            if self._extremum:
                return _settle_then_move(self, x)
            return _moved(x, self)  # pyright: ignore[reportReturnType]
        for step in self._steps:
            x = step(x)
        return x


def mover(src: Layout, dst: Layout, transport: Transport) -> Mover:
    """The (cached) mover between two layouts on a rank."""
    table: dict[tuple[Layout, Layout], Mover] = transport.state.setdefault("movers", {})
    found = table.get((src, dst))
    if found is None:
        if len(table) > 8192:
            table.clear()
        found = table[src, dst] = Mover(src, dst, transport)
    return found


def profile_of(mesh: Mesh, transport: Transport) -> Profile | None:
    """The figures that this rank has for a mesh; None takes the defaults."""
    profiles = transport.state.get("profiles")
    return None if profiles is None else profiles.get(mesh)


def fresh(y: Tensor, x: Tensor) -> Tensor:
    """``y`` as a tensor that autograd lets be written to: a copy if it aliases ``x``, never a view."""
    if y.untyped_storage()._cdata == x.untyped_storage()._cdata:
        return y.clone()
    return y.data if y._is_view() else y  # a view of what only we hold: drop the relation


class _Moved(torch.autograd.Function):
    """A move on the local tensor; the backward of a move is a move."""

    @staticmethod
    def forward(x: Tensor, how: Mover) -> Tensor:
        return fresh(how.run(x), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.how.back(grads[0]), None


class _Extremum(torch.autograd.Function):
    """Settle a pending max or min; the gradient goes to the ranks that attained it, in equal parts."""

    @staticmethod
    def forward(x: Tensor, how: Mover, count: Mover, grad: Mover) -> Tensor:
        return how.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, _, ctx.count, ctx.grad = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        hit = (x == y).to(grads[0].dtype)
        share = hit / ctx.count.run(hit)
        return ctx.grad(grads[0]) * share, None, None, None


def _settle_then_move(how: Mover, x: Tensor) -> Tensor:
    """Settle pending reductions that are no sums, differentiably, then take the rest of the way."""
    src, dst, transport = how.src, how.dst, how.transport
    for op in {op for op in src.partial if op not in (None, "sum")}:
        if op not in ("max", "min"):
            raise UnsupportedError(
                f"the gradient of a pending {op} is not defined here: reduce it under no_grad"
            )
        settled = src.with_placement(
            src.dims, tuple(None if o == op else o for o in src.partial)
        )
        ones = src.with_placement(src.dims, tuple("sum" if o == op else o for o in src.partial))
        whole = settled.dual()
        grads = whole.with_placement(
            whole.dims,
            tuple(None if o == op else p for o, p in zip(src.partial, whole.partial)),
        )
        x = _extremum(  # pyright: ignore[reportAssignmentType]
            x,
            mover(src, settled, transport),
            mover(_only(ones, src, op), _only(settled, src, op), transport),
            mover(whole, grads, transport),
        )
        src = settled
    return mover(src, dst, transport)(x)


def _only(layout: Layout, src: Layout, op: str) -> Layout:
    """The layout with pending reductions kept only where ``src`` has ``op``."""
    return layout.with_placement(
        layout.dims, tuple(p if o == op else None for o, p in zip(src.partial, layout.partial))
    )


def _row_major(src: Layout, dst: Layout) -> tuple[Layout, Layout, tuple[int, ...] | None]:
    """The layouts with tensor dims in memory order, and that order (None if it is row-major already)."""
    order = tuple(sorted(range(src.ndim), key=lambda d: (-src.stride[d], d)))
    if order == tuple(range(src.ndim)) or 0 in src.stride or src.is_contiguous:
        return src, dst, None
    shape = tuple(src.shape[d] for d in order)

    def permuted(layout: Layout) -> Layout:
        dims = tuple(layout.dims[d] for d in order)
        return Layout(
            layout.mesh, dims, layout.partial, shape, contiguous_stride(shape), layout.dtype
        )

    return permuted(src), permuted(dst), order


# ---- one closure per move -------------------------------------------------------------------


def _compile(move: Move, coord: tuple[int, ...], transport: Transport) -> Step:
    mesh = move.src.mesh
    ranks = mesh.group_ranks(move.axes, coord)
    tag = "*".join(mesh.axis_name(a) for a in move.axes)
    peers = [mesh.coordinate_of(r) for r in ranks]
    match move.kind:
        case "all_gather":
            return _all_gather(move, coord, transport, ranks, peers, tag)
        case "reduce_scatter":
            return _reduce_scatter(move, coord, transport, ranks, peers, tag)
        case "all_reduce":
            op = move.op or "sum"
            return lambda x: transport.all_reduce(x.contiguous(), ranks, op, tag=tag)
        case "slice":
            (mine, _), (whole, _) = move.dst.box(coord), move.src.box(coord)
            dim, size = move.dim, move.dst.box(coord)[1][move.dim]
            start = mine[dim] - whole[dim] if size else 0
            return lambda x: x.narrow(dim, start, size).clone(
                memory_format=torch.contiguous_format
            )
        case "pad":
            return _pad(move, coord)
        case "keep":
            op = move.op or "sum"
            if op not in NEUTRAL or all(coord[a] == 0 for a in move.axes):
                return lambda x: x.clone()
            return lambda x: neutral(x.shape, op, x)
        case _:
            return _one_shot(move, coord, transport, ranks, peers, tag)


def _pieces(
    whole: Layout, cut: Layout, dim: int, coord: Any, peers: Any
) -> list[tuple[int, int]]:
    """Start (within this rank's piece of ``whole``) and size, along ``dim``, of every peer's piece of ``cut``."""
    base = whole.box(coord)[0][dim]
    out = []
    for peer in peers:
        offsets, sizes = cut.box(peer)
        out.append((offsets[dim] - base if sizes[dim] else 0, sizes[dim]))
    return out


def _all_gather(
    move: Move, coord: Any, transport: Transport, ranks: Any, peers: Any, tag: str
) -> Step:
    dim, n = move.dim, len(ranks)
    sizes = [size for _, size in _pieces(move.dst, move.src, dim, coord, peers)]
    if len(set(sizes)) == 1:
        if dim == 0:
            return lambda x: transport.all_gather(x.contiguous(), ranks, tag=tag).flatten(0, 1)

        def even(x: Tensor) -> Tensor:
            got = transport.all_gather(x.contiguous(), ranks, tag=tag)
            return (
                got.movedim(0, dim).flatten(dim, dim + 1).contiguous()
            )  # flatten may be a view

        return even
    largest = max(sizes)

    def uneven(x: Tensor) -> Tensor:
        if x.shape[dim] != largest:
            shape = (*x.shape[:dim], largest, *x.shape[dim + 1 :])
            padded = torch.zeros(shape, dtype=x.dtype, device=x.device)
            padded.narrow(dim, 0, x.shape[dim]).copy_(x)
            x = padded
        got = transport.all_gather(x.contiguous(), ranks, tag=tag)
        return torch.cat(
            [got[i].narrow(dim, 0, sizes[i]) for i in range(n) if sizes[i]] or [got[0]], dim
        )

    return uneven


def _reduce_scatter(
    move: Move, coord: Any, transport: Transport, ranks: Any, peers: Any, tag: str
) -> Step:
    dim, n, op = move.dim, len(ranks), move.op or "sum"
    pieces = _pieces(move.src, move.dst, dim, coord, peers)
    sizes = [size for _, size in pieces]
    mine = sizes[ranks.index(transport.rank)]
    if len(set(sizes)) == 1:
        if dim == 0:
            return lambda x: transport.reduce_scatter(
                x.contiguous().unflatten(0, (n, mine)), ranks, op, tag=tag
            )

        def even(x: Tensor) -> Tensor:
            parts = x.unflatten(dim, (n, mine)).movedim(dim, 0).contiguous()
            return transport.reduce_scatter(parts, ranks, op, tag=tag)

        return even
    largest = max(sizes)

    def uneven(x: Tensor) -> Tensor:
        shape = (n, *x.shape[:dim], largest, *x.shape[dim + 1 :])
        parts = torch.zeros(shape, dtype=x.dtype, device=x.device)
        for i, (start, size) in enumerate(pieces):
            if size:
                parts[i].narrow(dim, 0, size).copy_(x.narrow(dim, start, size))
        return (
            transport.reduce_scatter(parts, ranks, op, tag=tag)
            .narrow(dim, 0, mine)
            .contiguous()
        )

    return uneven


def _pad(move: Move, coord: Any) -> Step:
    (mine, sizes), (whole, shape) = move.src.box(coord), move.dst.box(coord)
    dim = move.dim
    start = mine[dim] - whole[dim] if sizes[dim] else 0

    def pad(x: Tensor) -> Tensor:
        out = torch.zeros(shape, dtype=x.dtype, device=x.device)
        out.narrow(dim, start, sizes[dim]).copy_(x)
        return out

    return pad


def _swapped_dims(move: Move) -> tuple[int, int] | None:
    """The dims (i, j) of a move that only takes the minor axes of i to the end of j, all pieces even."""
    src, dst = move.src, move.dst
    changed = [d for d in range(src.ndim) if src.dims[d] != dst.dims[d]]
    if len(changed) != 2:
        return None
    i, j = changed if len(src.dims[changed[0]]) > len(dst.dims[changed[0]]) else changed[::-1]
    taken = src.dims[i][len(dst.dims[i]) :]
    moved = src.dims[i] == (*dst.dims[i], *taken) and dst.dims[j] == (*src.dims[j], *taken)
    if src.partial != dst.partial:
        return None
    even = all(layout.is_even_dim(d) for layout in (src, dst) for d in (i, j))
    return (i, j) if moved and taken == move.axes and even else None


def _all_to_all(dims: tuple[int, int], transport: Transport, ranks: Any, tag: str) -> Step:
    """S(i) -> S(j) with even pieces: two reshuffles around one exchange."""
    i, j = dims
    n = len(ranks)

    def all_to_all(x: Tensor) -> Tensor:
        parts = x.unflatten(j, (n, x.shape[j] // n)).movedim(j, 0)
        count = x.numel() // n
        got = transport.all_to_all(parts.reshape(-1), ranks, [count] * n, [count] * n, tag=tag)
        return got.view(parts.shape).movedim(0, i).flatten(i, i + 1)

    return all_to_all


def _one_shot(
    move: Move, coord: Any, transport: Transport, ranks: Any, peers: Any, tag: str
) -> Step:
    swapped = _swapped_dims(move)
    if swapped is not None:
        return _all_to_all(swapped, transport, ranks, tag)
    return OneShot(move.exchange, ranks, transport, tag)


_moved = direct_apply(_Moved)
_extremum = direct_apply(_Extremum)
