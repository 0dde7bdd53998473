"""Tensors joined to one: cat, stack, and their relatives.

Joined on a sharded dim, the result is sharded on it too: each rank fetches the rows of its piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.rules.edges import end_to_end, tied
from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.view import one_dim


def _given(tensors: Any) -> list[Arg] | None:
    if (
        not isinstance(tensors, (tuple, list))
        or not tensors
        or not all(isinstance(t, Arg) for t in tensors)
    ):
        return None
    return list(tensors)


def _joined(ins: dict[Arg, Labels], out: Labels, shape: tuple[int, ...]) -> Rule:
    """Linear in all tensors together; one without a pending sum is added once."""
    together = frozenset(ins)
    same = len({a.dtype for a in ins}) == 1
    linear, addends = ((together,), together) if same else ((), frozenset())
    return Rule(ins, (out,), linear=linear, addends=addends, out_shapes=(shape,))


def _cat(
    tensors: list[Arg], shapes: list[tuple[int, ...]], labels: list[Labels], dim: Any
) -> Rule | None:
    """Join along a dim tensors that are seen under these shapes, whose dims ``labels`` name by number.

    A tensor that is passed twice has one set of labels.
    """
    real = [
        k for k, a in enumerate(tensors) if a.shape != (0,)
    ]  # torch skips those of shape (0,)
    ndim = len(shapes[real[0]]) if real else 1
    at = one_dim(dim, ndim)
    if at is None or any(len(shapes[k]) != ndim for k in real):
        return None
    ins: dict[Arg, Labels] = {}
    total = 0
    cut = bool(real) and all(  # as they are: no dims are added
        shapes[k] == tensors[k].shape and labels[k] == numbered("d", ndim) for k in real
    )
    for k, a in enumerate(tensors):
        if k not in real:
            ins[a] = (WHOLE,)
            continue
        total += shapes[k][at]
        ins[a] = labels[k] if cut else tuple(WHOLE if n == f"d{at}" else n for n in labels[k])
    first = shapes[real[0]] if real else (0,)
    if any(n != m for k in real for d, (n, m) in enumerate(zip(shapes[k], first)) if d != at):
        return None
    out = tuple(WHOLE if d == at and not cut else f"d{d}" for d in range(ndim))
    lone = {f"d{d}" for d in range(ndim) if any(f"d{d}" not in labels[k] for k in real)}
    joined = _joined(ins, out, (*first[:at], total, *first[at + 1 :]))
    if not cut:
        return replace(joined, whole=frozenset(lone)) if lone else joined
    indices, name = [tensors[k].index for k in real], f"d{at}"

    def local(ctx: Any, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        made = ctx.joined(indices, at, name)(end_to_end([tensors[k] for k in real], at))
        return tied(made, [t for k, t in enumerate(tensors) if k not in real])

    # The operands' pieces are of different sizes, and any number of ranks may cut them.
    return replace(joined, special=frozenset([name]), divides={name: 0}, local=local)


@rule(
    "cat",
    "concat",
    "concatenate",
    "aten.cat.default",
    "aten.concat.default",
    "aten.concatenate.default",
)
def cat(tensors: Any, dim: Any = 0, *, axis: Any = None, **_: Any) -> Rule | None:
    """Side by side along a dim."""
    given = _given(tensors)
    if given is None:
        return None
    shapes = [a.shape for a in given]
    return _cat(
        given, shapes, [numbered("d", a.ndim) for a in given], dim if axis is None else axis
    )


@rule("stack", "aten.stack")
def stack(tensors: Any, dim: Any = 0, *, axis: Any = None, **_: Any) -> Rule | None:
    """One on top of the other along a new dim."""
    given = _given(tensors)
    if given is None or any(a.shape != given[0].shape for a in given):
        return None
    at = one_dim(dim if axis is None else axis, given[0].ndim + 1)
    if at is None:
        return None
    names, shape = numbered("d", given[0].ndim), given[0].shape
    out, size = (*names[:at], WHOLE, *names[at:]), (*shape[:at], len(given), *shape[at:])
    return _joined(dict.fromkeys(given, names), out, size)


def _at_least(a: Arg, ndim: int) -> tuple[tuple[int, ...], Labels]:
    """Shape and labels of a tensor seen with at least so many dims, as atleast_1d, _2d and _3d place them.

    Only dims of the tensor itself are labelled; their number is that of the dim they become.
    """
    shape = a.shape
    if len(shape) >= ndim:
        return shape, numbered("d", len(shape))
    if not shape:
        return (1,) * ndim, ()
    if len(shape) == 1:
        return ((1, *shape), ("d1",)) if ndim == 2 else ((1, *shape, 1), ("d1",))
    return (*shape, 1), ("d0", "d1")


def _stacked(tensors: Any, ndim: int, dim: int) -> Rule | None:
    given = _given(tensors)
    if given is None or any(a.shape == (0,) for a in given):
        return None
    seen = [_at_least(a, ndim) for a in given]
    return _cat(given, [s for s, _ in seen], [n for _, n in seen], dim)


@rule("hstack")
def hstack(tensors: Any, **_: Any) -> Rule | None:
    """Side by side: along the second dim, or the only one."""
    given = _given(tensors)
    flat = given is not None and all(a.ndim <= 1 for a in given)
    return _stacked(tensors, 1, 0 if flat else 1)


@rule("vstack", "row_stack")
def vstack(tensors: Any, **_: Any) -> Rule | None:
    """One above the other."""
    return _stacked(tensors, 2, 0)


@rule("dstack")
def dstack(tensors: Any, **_: Any) -> Rule | None:
    """One behind the other."""
    return _stacked(tensors, 3, 2)


@rule("column_stack")
def column_stack(tensors: Any, **_: Any) -> Rule | None:
    """Vectors as columns, side by side."""
    given = _given(tensors)
    if given is None or any(a.shape == (0,) for a in given):
        return None
    shapes = [a.shape if a.ndim > 1 else (a.layout.numel, 1) for a in given]
    labels = [numbered("d", a.ndim) for a in given]
    return _cat(given, shapes, labels, 1)
