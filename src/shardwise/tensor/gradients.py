"""Gradients of leaves: pending sums are reduced once per backward, in buckets.

A leaf's gradient arrives in the dual of the leaf's layout: where the leaf is replicated it is a pending
sum. A hook on the *local* leaf collects it; the final callback of that backward reduces all of them, in the
order in which the leaves were made (never in order of completion, which could differ between ranks).

Works on local tensors and specs; the ``DTensor`` class reads and wraps what is kept here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
import itertools
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import mover
from shardwise.compat import current_graph_task, queue_callback
from shardwise.layout.layout import Layout
from shardwise.program.spec import Spec

BUCKET_BYTES = 25 * 1024 * 1024

_NO_SYNC: ContextVar[bool] = ContextVar("shardwise_no_sync", default=False)
_UNWATCHED: ContextVar[bool] = ContextVar("shardwise_unwatched", default=False)
_SERIAL = itertools.count()


@contextmanager
def no_sync() -> Iterator[None]:
    """Leave gradients of replicated leaves as pending sums: nothing is reduced in backward.

    A later backward outside reduces what has gathered, once. Meanwhile ``.grad`` reads as ``Partial``.
    """
    token = _NO_SYNC.set(True)
    try:
        yield
    finally:
        _NO_SYNC.reset(token)


@contextmanager
def unwatched() -> Iterator[None]:
    """New leaves keep their gradient in its dual layout, so that nothing is reduced for it."""
    token = _UNWATCHED.set(True)
    try:
        yield
    finally:
        _UNWATCHED.reset(token)


class Leaf:
    """The gradient of one local leaf whose layout differs from its dual.

    Attributes:
        spec: The leaf's spec.
        serial: Its place in the order of reduction.
        grad: The reduced gradient (a local tensor in the leaf's layout), or None.
        pending: What was not reduced yet (in the dual layout), or None.
        hooks: Run after the reduction, with the parameter.
        shown: The wrapper last handed out for ``grad``, so that it keeps its identity.
    """

    __slots__ = ("grad", "hooks", "pending", "serial", "shown", "spec")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.serial = next(_SERIAL)
        self.grad: Tensor | None = None
        self.pending: Tensor | None = None
        self.hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()  # weakly referenced by handles
        self.shown: Any = None

    @property
    def dual(self) -> Layout:
        """Layout in which gradients arrive."""
        return self.spec.layout.dual()

    def reduce(self, g: Tensor) -> Tensor:
        """From the dual layout to the leaf's; differentiable."""
        src = self.dual.with_dtype(g.dtype)
        return mover(src, self.spec.layout.with_dtype(g.dtype), self.spec.transport)(g)

    def add(self, g: Tensor) -> None:
        """Accumulate a reduced gradient."""
        if self.grad is None:
            self.grad = g
        elif torch.is_grad_enabled() and (g.requires_grad or self.grad.requires_grad):
            self.grad = self.grad + g
        else:
            self.grad.add_(g)

    def clear(self) -> None:
        """Forget the gradient."""
        self.grad = self.pending = self.shown = None


def watch(local: Tensor, spec: Spec) -> None:
    """Make a local leaf's gradient be reduced. Once per local leaf, however often it is called."""
    if spec.coord is None or leaf_of(local) is not None or spec.layout.dual() is spec.layout:
        return
    if not local.is_leaf or not local.requires_grad or _UNWATCHED.get():
        return
    local._shardwise_leaf = Leaf(spec)  # pyright: ignore[reportAttributeAccessIssue]
    local.register_post_accumulate_grad_hook(_arrived)


def leaf_of(local: Tensor) -> Leaf | None:
    """The record of a local leaf, if its gradient needs a reduction."""
    return getattr(local, "_shardwise_leaf", None)


def _arrived(local: Tensor) -> None:
    """A gradient has been accumulated into the local leaf: take it over."""
    leaf = leaf_of(local)
    assert leaf is not None, "the hook is only on leaves with a record"
    g, local.grad = local.grad, None
    if g is None:
        return
    if leaf.pending is not None:
        g = leaf.pending + g
    leaf.pending, leaf.shown = g, None
    if _NO_SYNC.get():
        return
    task = current_graph_task()
    waiting: dict[int, list[Leaf]] = leaf.spec.transport.state.setdefault("pending_leaves", {})
    if task not in waiting:
        waiting[task] = []
        queue_callback(lambda: _finish(waiting, task))
    waiting[task].append(leaf)


def _finish(waiting: dict[int, list[Leaf]], task: int) -> None:
    leaves = sorted(waiting.pop(task), key=lambda leaf: leaf.serial)
    buckets: dict[Any, list[Leaf]] = {}
    alone: list[Leaf] = []
    for leaf in leaves:
        assert leaf.pending is not None, "a waiting leaf has a gradient"
        axes = tuple(a for a, op in enumerate(leaf.dual.partial) if op and leaf.spec.layout.partial[a] is None)
        if leaf.pending.requires_grad or leaf.spec.layout.is_partial:
            alone.append(leaf)
            continue
        key = (leaf.spec.layout.mesh, axes, leaf.pending.dtype, leaf.pending.device)
        buckets.setdefault(key, []).append(leaf)
    for leaf in alone:
        g, leaf.pending = leaf.pending, None
        assert g is not None, "checked above"
        leaf.add(leaf.reduce(g))
    with torch.no_grad():
        handles = [_start(key, part) for key, group in buckets.items() for part in _cut(group)]
        for part, handle in handles:
            _land(part, handle.wait())
    for leaf in leaves:
        leaf.shown = None
        for hook in list(leaf.hooks.values()):
            hook()


def _cut(group: list[Leaf]) -> Iterator[list[Leaf]]:
    part: list[Leaf] = []
    size = 0
    for leaf in group:
        assert leaf.pending is not None, "a waiting leaf has a gradient"
        part.append(leaf)
        size += leaf.pending.numel() * leaf.pending.element_size()
        if size >= BUCKET_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _start(key: Any, part: list[Leaf]) -> tuple[list[Leaf], Any]:
    mesh, axes, _, _ = key
    spec = part[0].spec
    assert spec.coord is not None, "ranks outside the mesh have no leaves"
    ranks = mesh.group_ranks(axes, spec.coord)
    tag = "*".join(mesh.axis_name(a) for a in axes)
    flat = [leaf.pending.reshape(-1) for leaf in part if leaf.pending is not None]
    buffer = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
    return part, spec.transport.all_reduce_async(buffer, ranks, "sum", tag=tag)


def _land(part: list[Leaf], reduced: Tensor) -> None:
    start = 0
    for leaf in part:
        g = leaf.pending
        assert g is not None, "a waiting leaf has a gradient"
        piece = reduced[start : start + g.numel()]
        start += g.numel()
        leaf.pending = None
        if g.is_contiguous():
            out = piece.view(g.shape)
        else:
            out = torch.empty_like(g).copy_(piece.view(g.shape))
        leaf.add(out)


def seed(spec: Spec, local: Tensor) -> Tensor:
    """The implicit gradient of a scalar, in its dual layout: one, on one rank where that is a sum."""
    dual = spec.layout.dual()
    first = spec.coord is not None and all(
        spec.coord[a] == 0 for a, op in enumerate(dual.partial) if op is not None
    )
    return torch.ones_like(local) if first else torch.zeros_like(local)
