"""Carry out routes on local tensors, and differentiate them.

A ``Mover`` is a route compiled for one rank: a chain of closures over the group's ranks and the pieces to
cut. Its backward is the mover between the dual layouts (design: gradients), which calls movers again, so
that double backward works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.one_shot import NEUTRAL, OneShot, neutral
from shardwise.comm.steps import Step, compile_move
from shardwise.comm.transport import Transport
from shardwise.compat import direct_apply
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.recording import recorder
from shardwise.route.cost import Profile, objective
from shardwise.route.exchange import Exchange
from shardwise.route.moves import Move, row_major
from shardwise.route.search import route


class Mover:
    """A route from ``src`` to ``dst``, ready to run on one rank.

    Attributes:
        src: Layout of the operand.
        dst: Layout of the result.
        moves: The route.
        what: What the route minimizes, ``"time"`` or ``"bytes"``.
        steps: The route as this rank carries it out.
        settles_extremum: A pending reduction that is no sum is settled, whose gradient needs the values.
    """

    __slots__ = (
        "_back",
        "_leanest",
        "dst",
        "moves",
        "settles_extremum",
        "src",
        "steps",
        "transport",
        "what",
    )

    def __init__(
        self, src: Layout, dst: Layout, transport: Transport, what: str = "time"
    ) -> None:
        self.src, self.dst, self.transport, self.what = src, dst, transport, what
        self._back: Mover | None = None
        self._leanest: Mover | None = None
        self.settles_extremum = any(op is not None and op != "sum" for op in src.partial)
        src, dst, order = row_major(src, dst)
        self.moves = self._plan(src, dst)
        coord = src.mesh.coordinate_of(transport.rank)
        steps = [] if coord is None else [self._step(m, coord) for m in self.moves]
        if order is not None and steps:
            inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
            steps = [lambda x: x.permute(order), *steps, lambda x: x.permute(inverse)]
        self.steps: tuple[Step, ...] = tuple(steps)

    def _plan(self, src: Layout, dst: Layout) -> tuple[Move, ...]:
        """The route, of layouts in memory order."""
        return route(src, dst, profile_of(src.mesh, self.transport), self.what)

    def _step(self, move: Move, coord: tuple[int, ...]) -> Step:
        """One move of it, as this rank carries it out."""
        return compile_move(move, coord, self.transport)

    @property
    def communicates(self) -> bool:
        """Whether anything is sent."""
        return any(m.communicates for m in self.moves)

    @property
    def back(self) -> Mover:
        """The transpose: moves a gradient from the dual of ``dst`` to the dual of ``src``."""
        if self._back is None:
            self._back = self.between(self.dst.dual(), self.src.dual())
        return self._back

    def between(self, src: Layout, dst: Layout) -> Mover:
        """A mover that keeps to what this one keeps to, between two other layouts on the same meshes."""
        return mover(src, dst, self.transport)

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
        if objective() != self.what and (how := self.now()) is not self:
            return how.run(x)
        if (tape := recorder()) is not None:
            return tape.move(self, x)
        for step in self.steps:
            x = step(x)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """Move; differentiable."""
        if not self.steps:
            return x
        if objective() != self.what and (how := self.now()) is not self:
            return how(x)
        if x.requires_grad and torch.is_grad_enabled():
            if self.settles_extremum:
                return _settle_then_move(self, x)
            return _moved(x, self)  # pyright: ignore[reportReturnType]
        if (tape := recorder()) is not None:
            return tape.move(self, x)
        for step in self.steps:
            x = step(x)
        return x


class Across(Mover):
    """A move between two meshes: one exchange over the ranks of both.

    A rank that lies on neither takes no part; one on the target only sends nothing, one on the source only
    gets an empty piece, and both keep the edge in the graph, so that backward meets on all.
    """

    __slots__ = ()

    def __init__(self, src: Layout, dst: Layout, transport: Transport) -> None:
        self.src, self.dst, self.transport, self.what = src, dst, transport, objective()
        self._back = self._leanest = None
        self.settles_extremum = any(op is not None and op != "sum" for op in src.partial)
        self.moves = ()
        for op in dst.partial:
            if op not in (None, *NEUTRAL):
                raise LayoutError(
                    f"a pending {op} cannot be made on another mesh: {src} -> {dst}"
                )
        src, dst, order = row_major(src, dst)
        here = src.mesh.coordinate_of(transport.rank), dst.mesh.coordinate_of(transport.rank)
        self.steps: tuple[Step, ...] = ()
        if here == (None, None):
            return
        ranks = (*src.mesh.ranks, *(r for r in dst.mesh.ranks if r not in set(src.mesh.ranks)))
        steps: list[Step] = [OneShot(Exchange(src, dst), ranks, transport, "across")]
        home, there = src.mesh.device_type, dst.mesh.device_type
        if here[0] is None and home != there:
            steps.insert(0, lambda x: x.to(home))
        elif order is not None and here[0] is not None:
            steps.insert(0, lambda x: x.permute(order))
        if home != there and here[1] is not None:
            steps.append(lambda x: x.to(there))
        made = [a for a, op in enumerate(dst.partial) if op is not None]
        op = next((op for op in dst.partial if op is not None), "sum")
        if op != "sum" and here[1] is not None and any(here[1][a] for a in made):
            steps.append(lambda x: neutral(x.shape, op, x))  # who gets nothing has zeros
        if order is not None and here[1] is not None:
            inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
            steps.append(lambda x: x.permute(inverse))
        self.steps = tuple(steps)

    @property
    def communicates(self) -> bool:
        """Whether anything is sent."""
        return True

    def now(self) -> Mover:
        """There is one way between two meshes."""
        return self


def mover(src: Layout, dst: Layout, transport: Transport) -> Mover:
    """The (cached) mover between two layouts on a rank, of one mesh or of two."""
    table: dict[tuple[Layout, Layout], Mover] = transport.state.setdefault("movers", {})
    found = table.get((src, dst))
    if found is None:
        if len(table) > 8192:
            table.clear()
        make = Mover if src.mesh is dst.mesh else Across
        found = table[src, dst] = make(src, dst, transport)
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


class _Standing(Mover):
    """For a rank that a slice leaves out: a move on the whole mesh, in its name.

    Args:
        how: The move on the whole mesh.
    """

    __slots__ = ("how",)

    def __init__(self, how: Mover) -> None:
        for name in ("src", "dst", "transport", "what", "moves", "settles_extremum"):
            setattr(self, name, getattr(how, name))
        self._back = self._leanest = None
        self.how = how
        self.steps = self._steps_of(how)

    def _steps_of(self, how: Mover) -> tuple[Step, ...]:
        raise NotImplementedError

    def now(self) -> Mover:
        """There is one way."""
        return self


class Dropped(_Standing):
    """The move to a slice that leaves this rank out: it ends with nothing."""

    __slots__ = ()

    def _steps_of(self, how: Mover) -> tuple[Step, ...]:
        return (*how.steps, lambda x: x.new_empty((0,) * x.ndim))

    def __call__(self, x: Tensor) -> Tensor:
        """Move; differentiable."""
        if self.settles_extremum and x.requires_grad and torch.is_grad_enabled():
            return _dropped(self.how(x))  # pyright: ignore[reportReturnType]
        return super().__call__(x)

    def between(self, src: Layout, dst: Layout) -> Mover:
        """The way back, of a gradient of nothing."""
        return Regained(self.how.between(src, dst))


class Regained(_Standing):
    """The way back of a `Dropped`: zeros, which travel like what the others have."""

    __slots__ = ()

    def _steps_of(self, how: Mover) -> tuple[Step, ...]:
        coord = how.src.mesh.coordinate_of(how.transport.rank)
        assert coord is not None, "only a rank of the mesh has something to drop"
        shape = how.src.box(coord)[1]
        return (lambda g: torch.zeros(shape, dtype=g.dtype, device=g.device), *how.steps)

    def between(self, src: Layout, dst: Layout) -> Mover:
        """The way there."""
        return Dropped(self.how.between(src, dst))


class _Drop(torch.autograd.Function):
    """Nothing is left of a tensor, but the edge in the graph."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.new_empty((0,) * x.ndim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].new_zeros(ctx.shape)


class _Moved(torch.autograd.Function):
    """A move on the local tensor; the backward of a move is a move.

    Of no gradient none is made, as by kernels, and by ranks off the mesh, where nothing is moved. But what would be sent
    is sent: whether there is a gradient may differ between ranks, whether backward comes by here does not.
    """

    @staticmethod
    def forward(x: Tensor, how: Mover) -> Tensor:
        return fresh(how.run(x), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[1]
        ctx.like = output.shape, output.dtype, output.device
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return moved_back(ctx, grads[0]), None


def moved_back(ctx: Any, g: Tensor | None) -> Tensor | None:
    """The gradient of a move's operand, from that of its result; None of None."""
    if g is not None:
        return ctx.how.back(g)
    shape, dtype, device = ctx.like
    ctx.how.back(torch.zeros(shape, dtype=dtype, device=device))
    return None


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
    for op in dict.fromkeys(src.partial):  # in the same order on all ranks
        if op in (None, "sum"):
            continue
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
        if src.mesh.coordinate_of(transport.rank) is None:
            src = settled
            continue
        x = _extremum(  # pyright: ignore[reportAssignmentType]
            x,
            how.between(src, settled),
            how.between(_only(ones, src, op), _only(settled, src, op)),
            how.between(whole, grads),
        )
        src = settled
    return how.between(src, dst)(x)


def _only(layout: Layout, src: Layout, op: str) -> Layout:
    """The layout with pending reductions kept only where ``src`` has ``op``."""
    return layout.with_placement(
        layout.dims, tuple(p if o == op else None for o, p in zip(src.partial, layout.partial))
    )


_moved = direct_apply(_Moved)
_dropped = direct_apply(_Drop)
_extremum = direct_apply(_Extremum)
