"""Trace: one call as a small graph of ATen calls on global shapes.

The call runs on fake tensors of the global shapes, with the arguments' real ``requires_grad``, under a mode
that records every ATen call below autograd. What cannot be a graph (data-dependent results, writes, random
draws, constants made inside) gives None, and the call takes the ladder's next rung.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
import logging
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from shardwise.compat import TorchDispatchMode, fake_mode, is_fake, untraceable, without_modes
from shardwise.program.compile import Slot, fill, judge, slot
from shardwise.rules.notation import Arg


@dataclass(slots=True)
class Node:
    """One ATen call.

    Attributes:
        op: The overload.
        args: Arguments, with slots that number the graph's values.
        kwargs: The same by name.
        outs: The values it makes.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[int]


@dataclass(slots=True)
class Graph:
    """A traced call. Values 0..n-1 are the call's tensor arguments.

    Attributes:
        nodes: The ATen calls, in order.
        values: For each value its (shape, stride, dtype).
        result: The call's result, with slots.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = field(default_factory=list)
    result: Any = None


class _UntraceableError(Exception):
    """This call is no graph."""


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph, known: dict[int, int]) -> None:
        super().__init__()
        self.graph, self.known = graph, known
        self.alive: list[Tensor] = []

    def value(self, t: Tensor) -> int:
        """The number of a new value."""
        self.alive.append(t)  # keeps the id its own
        self.graph.values.append((tuple(t.shape), tuple(t.stride()), t.dtype))
        self.known[id(t)] = len(self.graph.values) - 1
        return self.known[id(t)]

    def slots(self, tree: Any) -> Any:
        """A tree with slots for tensors."""
        if isinstance(tree, Tensor):
            if id(tree) not in self.known:
                raise _UntraceableError("a tensor from outside")
            return slot(self.known[id(tree)])
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*map(self.slots, tree))
        if isinstance(tree, (tuple, list)) and type(tree) is not torch.Size:
            return (
                type(tree)(map(self.slots, tree))
                if type(tree) in (tuple, list)
                else tuple(map(self.slots, tree))
            )
        if isinstance(tree, dict):
            return {k: self.slots(v) for k, v in tree.items()}
        return tree

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise _UntraceableError(f"{func} writes or draws")
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        # A piece may have other strides than the whole where a dim has one element: reshape always works.
        op = torch.ops.aten.reshape.default if func in _VIEWS else func
        node = Node(op, self.slots(args), self.slots(kwargs), [])
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                if not is_fake(t):
                    raise _UntraceableError("a constant")
                node.outs.append(self.value(t))
            elif t is not None:
                raise _UntraceableError("a number read from a tensor")
        self.graph.nodes.append(node)
        return out


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_MODES: list[Any] = []
_ONE = RLock()  # a fake mode is for one thread at a time
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def trace(
    func: Any, operands: Sequence[Arg], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Graph | None:
    """Trace a call; ``args`` and ``kwargs`` hold slots for the operands. None if it is no graph."""
    graph = Graph()
    with _ONE, without_modes(), _quiet():
        if not _MODES:
            _MODES.append(fake_mode())
        mode = _MODES[0]
        recorder = _Recorder(graph, {})
        try:
            with mode:
                fakes = [_fake(a) for a in operands]
                for t in fakes:
                    recorder.value(t)
                with recorder:
                    result = func(*fill(args, fakes), **fill(kwargs, fakes))
            _refuse_aliases(result, fakes)
            graph.result = recorder.slots(result)
        except (*untraceable(), _UntraceableError):
            return None
        except Exception as error:  # fake kernels refuse the call: does torch?
            if "data is not allocated" not in str(
                error
            ):  # it reads values: zeros would mislead
                judge(func, operands, args, kwargs)
            return None
    _drop_dead(graph)
    return graph


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch refuses is raised; it need not be logged as well."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


def _fake(a: Arg) -> Tensor:
    device = a.device if a.device is not None else "cpu"
    t = torch.empty_strided(a.shape, a.layout.stride, dtype=a.dtype, device=device)
    if a.requires_grad:
        t.requires_grad_()
        if not a.is_leaf:
            t = t * 1
    return t


def _refuse_aliases(result: Any, fakes: Sequence[Tensor]) -> None:
    """Results that alias an argument are left to the next rung, which knows about aliases."""
    storages = {t.untyped_storage()._cdata for t in fakes}
    for t in _tensors(result):
        if t.untyped_storage()._cdata in storages:
            raise _UntraceableError("a view of an argument")


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for x in tree for t in _tensors(x)]
    return []


def used(tree: Any) -> dict[int, None]:
    """The values that a tree of slots refers to, each once, in the order in which they appear."""
    if isinstance(tree, Slot):
        return {tree.index: None}
    if isinstance(tree, (tuple, list)):
        return {i: None for x in tree for i in used(x)}
    if isinstance(tree, dict):
        return {i: None for x in tree.values() for i in used(x)}
    return {}


def _drop_dead(graph: Graph) -> None:
    """Remove calls whose values nobody uses (autograd leaves detached ones behind); checks have none, and stay."""
    live = used(graph.result)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not node.outs or any(v in live for v in node.outs):
            live |= used(node.args) | used(node.kwargs)
            kept.append(node)
    graph.nodes = kept[::-1]
