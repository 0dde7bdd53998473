"""Several moves together, and moves under way.

``move_many`` takes all operands one collective at a time: what they send in that round over the same ranks, in
the same way and dtype, travels in one collective. Large operands keep collectives of their own, which run at
the same time. ``start`` begins a move whose result is waited for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Mover, fresh, moved_back
from shardwise.comm.one_shot import OneShot
from shardwise.comm.steps import Collective, Step, Swap, begin
from shardwise.comm.transport import Handle
from shardwise.compat import direct_apply
from shardwise.errors import CommError
from shardwise.recording import recorder

TOGETHER_BYTES = (
    4 * 2**20
)  # whole tensors up to this size share collectives: to pack costs a copy


class _Lane:
    """One operand on its way: its steps, and what it holds now."""

    __slots__ = ("at", "small", "steps", "x")

    def __init__(self, how: Mover, x: Tensor) -> None:
        self.steps, self.at, self.x = how.steps, 0, x
        src = how.src
        size = src.numel * getattr(
            src.dtype, "itemsize", 4
        )  # a global fact: all ranks decide alike
        self.small = size <= TOGETHER_BYTES

    def local(self) -> bool:
        """Take the local steps that come next; tell whether a collective follows."""
        while self.at < len(self.steps):
            if isinstance(self.steps[self.at], (Collective, OneShot, Swap)):
                return True
            self.x = self.steps[self.at](self.x)
            self.at += 1
        return False


def run_many(movers: Sequence[Mover], xs: Sequence[Tensor]) -> list[Tensor]:
    """Move, without recording for autograd."""
    if (
        recorder() is not None
    ):  # each for itself: what travels together is decided over the whole step
        return [m.run(x) for m, x in zip(movers, xs)]
    lanes = [_Lane(m.now(), x) for m, x in zip(movers, xs)]
    waiting = [lane for lane in lanes if lane.local()]
    while waiting:
        groups: dict[Any, list[_Lane]] = {}
        for i, lane in enumerate(waiting):
            step: Any = lane.steps[lane.at]
            kind = (step.kind, step.op) if isinstance(step, Collective) else ("exchange", "")
            alone = -1 if lane.small else i
            groups.setdefault((kind, step.ranks, lane.x.dtype, alone), []).append(lane)
        ends = [_begin_together(group) for group in groups.values()]
        for end in ends:
            end()
        waiting = [lane for lane in waiting if lane.local()]
    return [lane.x for lane in lanes]


def _begin_together(lanes: list[_Lane]) -> Any:
    """Start the collective of a group; what is returned waits and hands out the results."""
    steps: list[Any] = [lane.steps[lane.at] for lane in lanes]
    if len(lanes) == 1:
        handle, finish = begin(steps[0], lanes[0].x)

        def end() -> None:
            assert handle is not None, "a collective"
            lanes[0].x = finish(handle.wait())
            lanes[0].at += 1

        return end
    if not isinstance(steps[0], Collective):
        return _exchange_together(lanes, steps)
    packed = [
        lane.x.contiguous() if s.pack is None else s.pack(lane.x)
        for s, lane in zip(steps, lanes)
    ]
    shapes = [p.shape for p in packed]
    if steps[0].kind == "reduce_scatter":
        n = len(steps[0].ranks)
        handle = steps[0].send(torch.cat([p.reshape(n, -1) for p in packed], 1))
        shapes = [s[1:] for s in shapes]
    else:
        handle = steps[0].send(torch.cat([p.reshape(-1) for p in packed]))
    gathers = steps[0].kind == "all_gather"

    def end_all() -> None:
        got = handle.wait()
        sizes = [s.numel() for s in shapes]
        for lane, step, part, shape in zip(lanes, steps, got.split(sizes, -1), shapes):
            whole = part.reshape((got.shape[0], *shape) if gathers else shape)
            lane.x = step.finish(whole).clone(memory_format=torch.contiguous_format)
            lane.at += 1

    return end_all


def _exchange_together(lanes: list[_Lane], steps: list[Any]) -> Any:
    packs = [s.pack(lane.x) for s, lane in zip(steps, lanes)]
    n = len(steps[0].ranks)
    pieces = [flat.split(list(ins)) for flat, ins, _, _ in packs]
    buffer = torch.cat([p[i] for i in range(n) for p in pieces])
    in_splits = [sum(ins[i] for _, ins, _, _ in packs) for i in range(n)]
    out_splits = [sum(outs[i] for _, _, outs, _ in packs) for i in range(n)]
    handle = steps[0].transport.all_to_all_async(
        buffer, steps[0].ranks, in_splits, out_splits, tag=steps[0].tag
    )

    def end() -> None:
        got = handle.wait().split([outs[i] for i in range(n) for _, _, outs, _ in packs])
        for k, (lane, (_, _, _, finish)) in enumerate(zip(lanes, packs)):
            lane.x = finish(torch.cat(got[k :: len(lanes)]))
            lane.at += 1

    return end


def move_many(movers: Sequence[Mover], xs: Sequence[Tensor]) -> list[Tensor]:
    """Move several tensors together; differentiable, and the gradients travel together, too."""
    movers = [m.now() for m in movers]
    out = list(xs)
    together: list[int] = []
    for i, (how, x) in enumerate(zip(movers, xs)):
        tracked = x.requires_grad and torch.is_grad_enabled()
        # those off the mesh have no steps, but go along as on all ranks
        if not (how.moves or how.communicates) or (tracked and how.settles_extremum):
            out[i] = how(x)
        else:
            together.append(i)
    with torch.no_grad():
        own = [xs[i].detach() if xs[i].requires_grad else xs[i] for i in together]
        for i, y in zip(together, run_many([movers[i] for i in together], own)):
            out[i] = y
    recorded = [i for i in together if xs[i].requires_grad and torch.is_grad_enabled()]
    if recorded:
        how = [movers[i] for i in recorded]
        moved = _many(how, *(xs[i] for i in recorded), *(out[i] for i in recorded))
        for i, y in zip(recorded, moved):
            out[i] = _reached(y)  # pyright: ignore[reportCallIssue]
    return out


class _Many(torch.autograd.Function):
    """Several moves that have been carried out; their backward is several moves."""

    @staticmethod
    def forward(how: list[Mover], *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, ys = tensors[: len(how)], tensors[len(how) :]
        return tuple(fresh(y, x).data for x, y in zip(xs, ys))  # no views of what only we hold

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        asked = [i for i, g in enumerate(grads) if g is not None]
        moved = move_many([ctx.how[i].back for i in asked], [grads[i] for i in asked])
        out: list[Any] = [None] * len(grads)
        for i, g in zip(asked, moved):
            out[i] = g
        return None, *out, *[None] * len(grads)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


class _Reached(torch.autograd.Function):
    """The same tensor; its gradient is zeros, not nothing, if backward comes by here at all.

    Whether a gradient is nothing depends on the nodes after this one, which differ between ranks on a mesh and off it;
    whether backward comes by is the same on all ranks. So they agree on what a joint backward moves.
    """

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return y.data  # no view of what only we hold

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Pending:
    """A move under way: the result is made when it is asked for.

    The first collective has been started; what follows it runs in ``wait``, in the order of use, which must be
    the same on all ranks (as that of any collectives).

    Raises:
        CommError: When it is waited for: the operand has been written to since.
    """

    __slots__ = ("_finish", "_handle", "_how", "_recorded", "_rest", "_version", "_x")

    def __init__(self, how: Mover, x: Tensor) -> None:
        how = how.now()
        self._how, self._x = how, x
        self._version = _version(x)
        self._recorded = x.requires_grad and torch.is_grad_enabled()
        with torch.no_grad():
            y, at = x.detach(), 0
            if recorder() is not None:
                y, at = how.run(y), len(how.steps)
            self._handle: Handle | None = None
            self._finish: Step | None = None
            while at < len(how.steps) and self._handle is None:
                self._handle, self._finish = begin(how.steps[at], y)
                if self._handle is None:
                    y = self._finish(y)
                at += 1
            self._rest = how.steps[at:]
            if self._handle is None:
                self._finish = lambda _: y

    def wait(self) -> Tensor:
        """The moved tensor, joined to the graph as it was when the move was started."""
        finish, handle = self._finish, self._handle
        assert finish is not None, "waited for once"
        self._finish = self._handle = None  # what they hold goes as soon as it has been used
        with torch.no_grad():
            got = self._x if handle is None else handle.wait()
            del handle
            if _version(self._x) != self._version:
                raise CommError(
                    f"a tensor was written to while its move {self._how.src} -> {self._how.dst} was under way.",
                    tries=[
                        "use the result first",
                        "x.clone().redistribute(..., async_op=True)",
                    ],
                )
            held = [got]
            del got
            y = finish(held.pop())
            del finish
            for step in self._rest:
                y = step(y)
            y = fresh(y, self._x)
        if not self._recorded:
            return y
        with torch.enable_grad():
            return _arrived(self._x, y, self._how)  # pyright: ignore[reportReturnType]


class _Arrived(torch.autograd.Function):
    """A move that has been carried out already."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, how: Mover) -> Tensor:
        return y.data  # no view of what only we hold

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[2]
        ctx.like = output.shape, output.dtype, output.device
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return moved_back(ctx, grads[0]), None, None


def move_each(movers: Sequence[Mover], xs: Sequence[Tensor]) -> list[Tensor]:
    """Move the operands of one call: together forward, each for itself backward.

    So a gradient that is not asked for moves nothing, and each goes as soon as it is there.
    """
    movers = [m.now() for m in movers]
    grad = torch.is_grad_enabled()
    recorded = [grad and x.requires_grad for x in xs]
    if any(m.settles_extremum and r for m, r in zip(movers, recorded)):
        return [m(x) for m, x in zip(movers, xs)]
    with torch.no_grad():
        moved = run_many(movers, [x.detach() if r else x for x, r in zip(xs, recorded)])
    return [
        _arrived(x, fresh(y, x), m) if r and m.steps else (x if r else y)  # pyright: ignore[reportReturnType]
        for x, y, m, r in zip(xs, moved, movers, recorded)
    ]


_many = direct_apply(_Many)
_reached = direct_apply(_Reached)
_arrived = direct_apply(_Arrived)
