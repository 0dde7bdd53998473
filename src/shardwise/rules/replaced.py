"""A copy of which a part is replaced: ``slice_scatter``, ``select_scatter``, ``diagonal_scatter``, ``as_strided_scatter``.

Linear in the tensor and the part together: a pending sum of both stays one, and of one of them the other is an
addend, kept on one rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.scatter import write_rows, written_rows
from shardwise.rules.subscript import Item, parse
from shardwise.rules.view import one_dim


def _replaced(x: Any, src: Any, items: list[Item] | None) -> Rule | None:
    if not isinstance(x, Arg) or not isinstance(src, Arg) or items is None:
        return None
    made = written_rows(x, items, src)
    if made is None:
        return None

    def local(ctx: Any, x: Tensor, src: Tensor, *_: Any, **__: Any) -> Tensor:
        out = x.clone()
        write_rows(ctx, out, items, src)
        return out

    addends = frozenset([x, src]) if made.linear else frozenset()
    return Rule(
        made.ins,
        made.outs,
        special=made.special,
        local=local,
        linear=made.linear,
        addends=addends,
    )


@rule("slice_scatter", "aten.slice_scatter")
def slice_scatter(
    input: Any, src: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Rule | None:
    """A copy with a slice replaced."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim:
        return None
    return _replaced(
        input, src, parse(input.shape, (*[slice(None)] * at, slice(start, end, step)))
    )


@rule("select_scatter", "aten.select_scatter")
def select_scatter(input: Any, src: Any, dim: Any, index: Any) -> Rule | None:
    """A copy with a row replaced."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or type(index) is not int:
        return None
    return _replaced(input, src, parse(input.shape, (*[slice(None)] * at, index)))


def _together(x: Any, src: Any, names: Labels, part: Labels) -> Rule | None:
    if not isinstance(x, Arg) or not isinstance(src, Arg) or src.dtype != x.dtype:
        return None
    both = frozenset([x, src])
    return Rule(
        {x: names, src: part}, (names,), linear=(both,), addends=both, out_shapes=(x.shape,)
    )


@rule("diagonal_scatter", "aten.diagonal_scatter")
def diagonal_scatter(
    input: Any, src: Any, offset: Any = 0, dim1: Any = 0, dim2: Any = 1
) -> Rule | None:
    """A copy with a diagonal replaced; the dims that it runs through are whole."""
    a, b = one_dim(dim1, input.ndim), one_dim(dim2, input.ndim)
    if a is None or b is None or a == b or not isinstance(src, Arg):
        return None
    names = tuple(
        WHOLE if d in (a, b) else name for d, name in enumerate(numbered("d", input.ndim))
    )
    part = (*(n for d, n in enumerate(names) if d not in (a, b)), WHOLE)
    return _together(input, src, names, part) if src.ndim == len(part) else None


@rule("as_strided_scatter", "aten.as_strided_scatter")
def as_strided_scatter(
    input: Any, src: Any, size: Any, stride: Any, storage_offset: Any = None
) -> Rule | None:
    """A copy with elements of its memory replaced; it must be whole."""
    if not isinstance(src, Arg) or not input.layout.is_contiguous:
        return None
    return _together(input, src, (WHOLE,) * input.ndim, (WHOLE,) * src.ndim)
