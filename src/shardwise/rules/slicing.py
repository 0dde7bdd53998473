"""Parts of a tensor: slices, single rows, chunks, diagonals, windows.

Over a sharded dim, rows that every rank holds in place stay sharded; few rows become a pending sum of which
one addend is not zero; of many each rank fetches those of its piece that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.edges import end_to_end
from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.rowmap import RowMap, counted, fetched
from shardwise.rules.subscript import Item, New, Rows, as_slice, padded, parse, stays, taken
from shardwise.rules.view import one_dim, view_of

_T = torch.Tensor
# From the tensor and the entries of a local index expression to the arguments of the call.
Rewrite = Callable[[Any, list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


# -- rows of some dims -----------------------------------------------------------------------------
def few(rows: int, size: int) -> bool:
    """Whether a pending sum of these rows moves less than gathering the dim."""
    return 2 * rows <= size


def basic(x: Arg, items: Sequence[Item], rewrite: Rewrite) -> Rule:
    """Ints, slices and ``None``s.

    Args:
        x: The tensor.
        items: What is taken.
        rewrite: The call's arguments for a piece of which slices are given.
    """
    ins: list[str] = []
    out: list[str] = []
    shape: list[int] = []
    special: set[str] = set()
    moves: set[str] = set()
    for item in items:
        if isinstance(item, New):
            out.append(ONE)
            shape.append(1)
            continue
        assert isinstance(item, Rows), "tensors are not basic"
        name, through = f"d{item.dim}", WHOLE
        if item.full:
            through = name
        elif x.layout.dims[item.dim]:
            if not item.drop and stays(x.layout, item.dim, item.rows):
                through = name
            elif item.drop or few(len(item.rows), item.size):
                special.add(name)
            else:
                through = name
                moves.add(name)
        ins.append(name if through == name or name in special else WHOLE)
        if not item.drop:
            out.append(through)
            shape.append(len(item.rows))

    def localize(
        ctx: Any, x: Any, *_: Any, **__: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return rewrite(x, _entries(ctx, items))

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        entries = _entries(ctx, items)
        at = 0  # the dim of the result
        for k, item in enumerate(items):
            if isinstance(item, Rows) and f"d{item.dim}" in ctx.axes:
                if f"d{item.dim}" in special:
                    x = taken(x, item.dim, ctx.ins[0].offsets[item.dim], item.rows)
                    entries[k] = 0 if item.drop else slice(None)
                elif f"d{item.dim}" in moves:
                    x = fetched(ctx, x, item.dim, numbers(item.rows), out_dim=at)
                    entries[k] = slice(None)
            at += not (isinstance(item, Rows) and item.drop)
        return x[tuple(entries)]

    sharded = x.layout.is_sharded
    return view_of(
        x,
        tuple(ins),
        tuple(out),
        shape,
        special=frozenset(special | moves),
        local=local if special or moves else None,
        localize=localize if sharded else None,
    )


def numbers(rows: range) -> RowMap:
    """From the rows of a result to those that are taken."""
    return lambda i: rows.start + i * rows.step


def _entries(ctx: Any, items: Sequence[Item]) -> list[Any]:
    """The index expression for this rank's piece."""
    entries: list[Any] = []
    at = 0
    for item in items:
        if not isinstance(item, Rows):
            entries.append(None)
            at += 1
        elif item.drop:
            entries.append(item.rows.start)
        else:
            start, count = ctx.outs[0].offsets[at], ctx.outs[0].local_shape[at]
            mine = item.rows[start : start + count]
            entries.append(
                slice(None) if item.full else as_slice(mine, ctx.ins[0].offsets[item.dim])
            )
            at += 1
    return entries


def by_index(x: Any, entries: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``x[entries]``."""
    return (x, tuple(entries)), {}


def _rows_of(x: Arg, dim: int, rows: range, drop: bool, rewrite: Rewrite) -> Rule:
    items = [
        Rows(d, rows if d == dim else range(n), drop and d == dim, n)
        for d, n in enumerate(x.shape)
    ]
    return basic(x, items, rewrite)


@rule("select", "aten.select.int")
def select(input: Arg, dim: Any, index: Any) -> Rule | None:
    """One row; of a sharded dim, from the rank that holds it."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or type(index) is not int:
        return None
    n = input.shape[at]
    if not -n <= index < n:
        return None
    row = index % n
    return _rows_of(input, at, range(row, row + 1), True, lambda x, _: ((x, at, row), {}))


@rule("narrow", "aten.narrow.default")
def narrow(input: Arg, dim: Any, start: Any, length: Any) -> Rule | None:
    """Some rows that follow each other."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or type(start) is not int or type(length) is not int:
        return None
    n = input.shape[at]
    start += n if start < 0 else 0
    if start < 0 or length < 0 or start + length > n:
        return None

    def rewrite(x: Any, entries: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, at, entries[at].start, entries[at].stop - entries[at].start), {}

    if length == n:  # all rows: which are however many the piece has
        names = numbered("d", input.ndim)
        return view_of(
            input, names, names, localize=_narrow_all(at) if input.layout.dims[at] else None
        )
    return _rows_of(input, at, range(start, start + length), False, rewrite)


def _narrow_all(at: int) -> Any:
    def localize(
        ctx: Any, x: Any, *_: Any, **__: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, at, 0, ctx.ins[0].local_shape[at]), {}

    return localize


@rule("aten.slice.Tensor")
def slice_(
    input: Arg, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Rule | None:
    """A slice of one dim."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim:
        return None
    items = parse(input.shape, (*[slice(None)] * at, slice(start, end, step)))
    if items is None:
        return None

    def rewrite(x: Any, entries: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, at, entries[at].start, entries[at].stop, entries[at].step or 1), {}

    return basic(input, items, rewrite)


# -- several pieces --------------------------------------------------------------------------------
def pieces(x: Arg, dim: int, sizes: Sequence[int]) -> Rule:
    """Pieces of a dim; where it is sharded they are too, and one exchange fetches what each rank lacks."""
    names = numbered("d", x.ndim)
    shapes = tuple((*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in sizes)
    starts = [0, *itertools.accumulate(sizes)]

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        def wanted(rank: int) -> Tensor:
            parts = [counted(ctx.piece(k, dim, rank)) + starts[k] for k in range(len(sizes))]
            return torch.cat(parts)

        mine = [out.local_shape[dim] for out in ctx.outs]
        return tuple(t.contiguous() for t in ctx.rows(dim, wanted)(x).split(mine, dim))

    return Rule(
        {x: names},
        (names,) * len(shapes),
        linear=(frozenset([x]),),
        special=frozenset([names[dim]]),
        local=local,
        out_shapes=shapes,
        view=True,
    )


def _equal(n: int, size: int) -> list[int] | None:
    """Sizes of pieces of ``size``, the last one shorter."""
    if size == 0:
        return [0] if n == 0 else None
    return [size] * (n // size) + ([n % size] if n % size or n == 0 else [])


@rule(
    "split",
    "aten.split",
    "aten.split_with_sizes",
    "split_with_sizes",
    "unsafe_split",
    "unsafe_split_with_sizes",
)
def split(
    tensor: Arg, split_size_or_sections: Any = None, dim: Any = 0, **kwargs: Any
) -> Rule | None:
    """Pieces of one size, or of given sizes."""
    given = (
        next(iter(kwargs.values()), None)
        if split_size_or_sections is None
        else split_size_or_sections
    )
    at = one_dim(dim, tensor.ndim)
    if at is None or not tensor.ndim:
        return None
    n = tensor.shape[at]
    if type(given) is int and given >= 0:
        sizes = _equal(n, given)
    elif isinstance(given, (tuple, list)) and all(type(k) is int and k >= 0 for k in given):
        sizes = list(given) if sum(given) == n else None
    else:
        sizes = None
    return None if not sizes else pieces(tensor, at, sizes)


@rule("chunk", "unsafe_chunk", "aten.chunk", "aten.unsafe_chunk")
def chunk(input: Arg, chunks: Any, dim: Any = 0) -> Rule | None:
    """At most ``chunks`` pieces of one size."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or type(chunks) is not int or chunks < 1:
        return None
    n = input.shape[at]
    sizes = [0] * chunks if n == 0 else _equal(n, -(-n // chunks))
    return pieces(input, at, sizes or [])


def _tensor_split(x: Arg, given: Any, at: int | None) -> Rule | None:
    if at is None or not x.ndim:
        return None
    n = x.shape[at]
    if type(given) is int and given > 0:
        return pieces(x, at, [n // given + (i < n % given) for i in range(given)])
    if isinstance(given, (tuple, list)) and all(type(k) is int for k in given):
        cuts = [0, *given, n]
        return pieces(x, at, [len(range(n)[a:b]) for a, b in itertools.pairwise(cuts)])
    return None


@rule("tensor_split", "aten.tensor_split.sections", "aten.tensor_split.indices")
def tensor_split(
    input: Arg, indices_or_sections: Any = None, dim: Any = 0, **kwargs: Any
) -> Rule | None:
    """Pieces that differ by one at most, or pieces cut at given places."""
    given = (
        next(iter(kwargs.values()), None)
        if indices_or_sections is None
        else indices_or_sections
    )
    return _tensor_split(input, given, one_dim(dim, input.ndim))


@rule("hsplit")
def hsplit(input: Arg, indices_or_sections: Any, **_: Any) -> Rule | None:
    """Pieces side by side."""
    return _tensor_split(input, indices_or_sections, min(input.ndim - 1, 1))


@rule("vsplit")
def vsplit(input: Arg, indices_or_sections: Any, **_: Any) -> Rule | None:
    """Pieces one above the other."""
    return _tensor_split(input, indices_or_sections, 0) if input.ndim >= 2 else None


@rule("dsplit")
def dsplit(input: Arg, indices_or_sections: Any, **_: Any) -> Rule | None:
    """Pieces one behind the other."""
    return _tensor_split(input, indices_or_sections, 2) if input.ndim >= 3 else None


@rule("unbind", "aten.unbind.int")
def unbind(input: Arg, dim: Any = 0) -> Rule | None:
    """All rows of a dim, which is gathered: every rank gets all of them."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or not input.shape[at]:
        return None
    count = input.shape[at]
    names = tuple(WHOLE if d == at else f"d{d}" for d in range(input.ndim))
    shape = tuple(n for d, n in enumerate(input.shape) if d != at)
    return Rule(
        {input: names},
        (tuple(n for n in names if n != WHOLE),) * count,
        linear=(frozenset([input]),),
        out_shapes=(shape,) * count,
        view=True,
    )


# -- diagonals and windows -------------------------------------------------------------------------
@rule("diagonal", "aten.diagonal")
def diagonal(input: Arg, offset: Any = 0, dim1: Any = 0, dim2: Any = 1) -> Rule | None:
    """A diagonal of matrices. It stays sharded as the rows are where there is one element in each."""
    a, b = one_dim(dim1, input.ndim), one_dim(dim2, input.ndim)
    if a is None or b is None or a == b or type(offset) is not int:
        return None
    return _diagonal(input, offset, a, b, True)


@rule(torch.linalg.diagonal)
def linalg_diagonal(A: Arg, *, offset: Any = 0, dim1: Any = -2, dim2: Any = -1) -> Rule | None:  # noqa: N803  torch's name
    """``diagonal`` of the last two dims."""
    made = diagonal(A, offset, dim1, dim2)
    if made is None or made.localize is None:
        return made
    a, b = one_dim(dim1, A.ndim), one_dim(dim2, A.ndim)
    return None if a is None or b is None else _diagonal(A, offset, a, b, False)


def _diagonal(x: Arg, offset: int, a: int, b: int, positional: bool) -> Rule:
    rows, columns = x.shape[a], x.shape[b]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    names = [f"d{d}" for d in range(x.ndim)]
    last, in_part = WHOLE, False
    if x.layout.dims[a] and offset >= 0 and length == rows:
        last, names[b] = names[a], WHOLE
    elif x.layout.dims[b] and offset <= 0 and length == columns:
        last, names[a] = names[b], WHOLE
    else:
        in_part = few(length, x.layout.numel)

    def localize(
        ctx: Any, x: Any, *_: Any, **__: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mine = offset + ctx.ins[0].offsets[a] - ctx.ins[0].offsets[b]
        if positional:
            return (x, mine, a, b), {}
        return (x,), {"offset": mine, "dim1": a, "dim2": b}

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        row, column = ctx.ins[0].offsets[a], ctx.ins[0].offsets[b]
        mine = x.diagonal(offset + row - column, a, b)
        first = max(row, column - offset) - max(
            0, -offset
        )  # which element of the diagonal it is
        first = min(first, length - mine.shape[-1])
        more = [mine.detach().new_zeros(*mine.shape[:-1], n) for n in (first, length - first)]
        return end_to_end((more[0], mine, more[1]), -1).narrow(-1, 0, length)

    ends = (a, b) if last == WHOLE else ()
    if last == WHOLE and not in_part:
        names[a] = names[b] = WHOLE
    kept: Labels = tuple(names[d] for d in range(x.ndim) if d not in (a, b))
    shape = (*(n for d, n in enumerate(x.shape) if d not in (a, b)), length)
    return view_of(
        x,
        tuple(names),
        (*kept, last),
        shape,
        special=frozenset(f"d{d}" for d in ends if in_part),
        local=local if in_part else None,
        localize=localize if last != WHOLE else None,
    )


@rule(_T.unfold, "aten.unfold")
def unfold(input: Arg, dimension: Any, size: Any, step: Any) -> Rule | None:
    """Windows over a dim; where it is sharded each rank fetches the rows that its windows reach over."""
    at = one_dim(dimension, input.ndim)
    if (
        at is None
        or not input.ndim
        or type(size) is not int
        or type(step) is not int
        or step < 1
    ):
        return None
    n = input.shape[at]
    if not 0 <= size <= n:
        return None
    names = numbered("d", input.ndim)
    shape = (*input.shape[:at], (n - size) // step + 1, *input.shape[at + 1 :], size)

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        def wanted(rank: int) -> Tensor:
            mine = ctx.piece(0, at, rank)
            last = (mine.stop - 1) * step + size if mine else mine.start * step
            return counted(range(mine.start * step, last))

        rows = ctx.rows(at, wanted)(x)
        if not ctx.outs[0].local_shape[at]:  # no window: one of nothing, cut off
            return padded(rows, at, size).unfold(at, size, step).narrow(at, 0, 0)
        return rows.unfold(at, size, step)

    return view_of(
        input, names, (*names, WHOLE), shape, special=frozenset([names[at]]), local=local
    )
