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
from shardwise.compat import (
    current_graph_task,
    flatten_dense,
    queue_callback,
    set_grad_enabled,
    unflatten_dense,
)
from shardwise.layout.layout import Layout
from shardwise.program.spec import Spec
from shardwise.recording import recorder

BUCKET_BYTES = 25 * 1024 * 1024
MAX_TASKS = 64  # more than torch nests backwards on one thread

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


def syncing() -> bool:
    """Whether gradients are reduced: not within ``no_sync``."""
    return not _NO_SYNC.get()


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
        owner: Told of a pending gradient, which it reduces in its own time; None: the end of backward does.
        shown: The wrapper last handed out for ``grad``, so that it keeps its identity.
        dual: Layout in which gradients arrive.
        bucket: Whom to reduce with; None if nothing is to be sent.
        nbytes: Size of the gradient.
        waiting: The rank's leaves that wait for the end of a backward, by graph task.
    """

    __slots__ = (
        "bucket",
        "dual",
        "grad",
        "hooks",
        "nbytes",
        "owner",
        "pending",
        "serial",
        "shown",
        "spec",
        "waiting",
    )

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.dual: Layout = spec.layout.dual()
        self.bucket = None if spec.layout.is_partial else _bucket(spec)
        self.nbytes = spec.local_shape.numel() * spec.dtype.itemsize
        self.waiting: dict[int, list[Leaf]] = spec.transport.state.setdefault(
            "pending_leaves", {}
        )
        self.serial = next(_SERIAL)
        self.grad: Tensor | None = None
        self.pending: Tensor | None = None
        self.hooks: OrderedDict[int, Callable[[], None]] = (
            OrderedDict()
        )  # weakly referenced by handles
        self.shown: Any = None
        self.owner: Callable[[], None] | None = None

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
    if leaf.owner is not None:
        leaf.owner()
        return
    if _NO_SYNC.get():
        return
    task, waiting = current_graph_task(), leaf.waiting
    found = waiting.get(task)
    if found is None:
        if len(waiting) > MAX_TASKS:  # of backwards that raised: they do not come to their end
            del waiting[min(waiting)]
        waiting[task] = [leaf]
        queue_callback(lambda: _finish(waiting, task))
    else:
        found.append(leaf)


class Bucket:
    """Whom leaves are reduced with; one object per group of ranks, so that it is a cheap key.

    Attributes:
        ranks: The group.
        tag: Names of its axes, for the log.
    """

    __slots__ = ("ranks", "tag")

    def __init__(self, ranks: tuple[int, ...], tag: str) -> None:
        self.ranks, self.tag = ranks, tag


def _bucket(spec: Spec) -> Bucket:
    """The bucket of a leaf: the ranks over which its gradient is a pending sum."""
    assert spec.coord is not None, "ranks outside the mesh have no leaves"
    mesh = spec.layout.mesh
    axes = tuple(
        a
        for a, op in enumerate(spec.layout.dual().partial)
        if op is not None and mesh.shape[a] > 1
    )
    key = (mesh.group_ranks(axes, spec.coord), "*".join(mesh.axis_name(a) for a in axes))
    known: dict[Any, Bucket] = spec.transport.state.setdefault("buckets", {})
    return known.setdefault(key, Bucket(*key))


def _serial(leaf: Leaf) -> int:
    return leaf.serial


def _finish(waiting: dict[int, list[Leaf]], task: int) -> None:
    leaves = waiting.pop(task)
    leaves.sort(key=_serial)
    if recorder() is not None:
        _note_reductions(leaves)
    buckets: dict[tuple[Bucket, torch.dtype], list[Leaf]] = {}
    for leaf in leaves:
        g = leaf.pending
        if g is None:  # a hook has cleared it meanwhile, on every rank
            continue
        if leaf.bucket is None or g.requires_grad:
            leaf.pending = None
            leaf.add(leaf.reduce(g))
            continue
        key = (leaf.bucket, g.dtype)
        found = buckets.get(key)
        if found is None:
            buckets[key] = [leaf]
        else:
            found.append(leaf)
    if buckets:
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            parts = [part for group in buckets.values() for part in _cut(group)]
            started = [_start(part, len(parts) == 1) for part in parts]
            for part, grads, reduced in started:
                _land(part, grads, reduced if len(parts) == 1 else reduced.wait())
        finally:
            set_grad_enabled(before)
    for leaf in leaves:
        leaf.shown = None
        if leaf.hooks:
            for hook in list(leaf.hooks.values()):
                hook()


def _note_reductions(leaves: list[Leaf]) -> None:
    """In a step that is recorded each gradient is reduced for itself: buckets are cut over the whole step.

    Nothing uses one before all are there, so that they may travel together.
    """
    found = [(leaf, leaf.pending) for leaf in leaves if leaf.pending is not None]
    reduced = [leaf.reduce(g) for leaf, g in found]
    for (leaf, _), g in zip(found, reduced):
        leaf.pending = None
        leaf.add(g)


def _cut(group: list[Leaf]) -> list[list[Leaf]]:
    """Parts of at most a bucket's size (one leaf at least)."""
    if sum([leaf.nbytes for leaf in group]) <= BUCKET_BYTES:
        return [group]
    parts: list[list[Leaf]] = []
    size = BUCKET_BYTES
    for leaf in group:
        if size >= BUCKET_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(leaf)
        size += leaf.nbytes
    return parts


def _start(part: list[Leaf], only: bool) -> tuple[list[Leaf], list[Tensor], Any]:
    """Begin to reduce the gradients of some leaves with the same bucket.

    Args:
        part: The leaves.
        only: Nothing else is to be sent meanwhile, so it is done at once.

    Returns:
        The leaves, their gradients, and a handle for the reduced ones: or the reduced ones, where they are the only.
    """
    bucket, transport = part[0].bucket, part[0].spec.transport
    assert bucket is not None, "only such leaves are reduced together"
    grads = [leaf.pending for leaf in part if leaf.pending is not None]
    if len(grads) == 1:  # the engine may still hold it: the transport must not write to it
        buffer = grads[0]
        reduce = transport.all_reduce if only else transport.all_reduce_async
    else:
        buffer = flatten_dense(grads)
        reduce = transport.all_reduce_owned if only else transport.all_reduce_owned_async
    return part, grads, reduce(buffer, bucket.ranks, "sum", tag=bucket.tag)


def _land(part: list[Leaf], grads: list[Tensor], reduced: Tensor) -> None:
    """Hand the reduced gradients to their leaves."""
    pieces = [reduced] if len(grads) == 1 else unflatten_dense(reduced, grads)
    for leaf, g, piece in zip(part, grads, pieces):
        leaf.pending = None
        if not g.is_contiguous():  # keep the leaf's memory order
            piece = torch.empty_like(g).copy_(piece)
        if leaf.grad is None:
            leaf.grad = piece
        else:
            leaf.add(piece)


def seed(spec: Spec, local: Tensor) -> Tensor:
    """The implicit gradient of a scalar, in its dual layout: one, on one rank where that is a sum."""
    return torch.ones_like(local) if spec.is_first else torch.zeros_like(local)
