"""Writing by positions: ``x[...] = v``, scatter, index_add, index_copy, index_fill, index_put.

What is written into stays where it is. Each rank writes what falls into its piece; positions that other
ranks hold go to a row of their own, which is cut off again. Sums of sharded contributions stay pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.edges import marked
from shardwise.rules.index import found_dims
from shardwise.rules.masked import filled_by_mask
from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.slicing import few
from shardwise.rules.subscript import (
    Item,
    New,
    Picked,
    Rows,
    as_slice,
    bounds,
    held,
    padded,
    parse,
    shifted,
)
from shardwise.rules.view import one_dim

_T = torch.Tensor


# -- x[index] = value ------------------------------------------------------------------------------
@rule(_T.__setitem__, inplace=True)
def setitem(x: Any, index: Any, value: Any) -> Rule | None:
    """``x[index] = value`` for everything but masks with one value per element."""
    items = parse(x.shape, index) if isinstance(x, Arg) else None
    if items is None or (isinstance(value, Arg) and value is x):
        return None
    picked = [item for item in items if isinstance(item, Picked)]
    if any(p.mask for p in picked):
        return _masked_write(x, items, value, True)
    if picked:
        return _written_at(x, items, picked, value, _set_at)
    return written_rows(x, items, value)


def _set_at(ctx: Any, x: Tensor, index: Any, value: Any) -> None:
    x.copy_(_write_at(ctx, x, index, value))


def _written(
    x: Arg, value: Any, ins: dict[Arg, Labels], out: Labels, **more: Any
) -> Rule | None:
    """The rule of a write into ``x``; linear in it and the value together. None if torch refuses the shapes."""
    names = ins[x]
    pending: tuple[frozenset[Arg], ...] = ()
    addends: frozenset[Arg] = frozenset()
    if isinstance(value, Arg):
        labels = _value_labels(value, out)
        if labels is None:
            return None
        ins[value] = labels
        if value.dtype == x.dtype:
            pending, addends = (frozenset([x, value]),), frozenset([value])
    return Rule(ins, (names,), linear=pending, addends=addends, **more)


def _value_labels(value: Arg, out: Labels) -> Labels | None:
    """Labels of a value that broadcasts to what it is written into; leading dims of one are dropped."""
    more = value.ndim - len(out)
    if more > 0:
        if any(n != 1 for n in value.shape[:more]):
            return None
        return (
            *[ONE] * more,
            *(ONE if n == 1 else name for n, name in zip(value.shape[more:], out)),
        )
    return tuple(
        ONE if n == 1 else name for n, name in zip(value.shape, out[-more:] if more else out)
    )


def written_rows(x: Arg, items: list[Item], value: Any) -> Rule | None:
    """Ints, slices and ``None``s."""
    names = numbered("d", x.ndim)
    out: list[str] = []
    cut: set[str] = set()
    for item in items:
        if isinstance(item, New):
            out.append(ONE)
            continue
        assert isinstance(item, Rows), "tensors are not basic"
        if not item.full:
            cut.add(names[item.dim])
        if not item.drop:
            out.append(names[item.dim] if item.full else WHOLE)

    def local(ctx: Any, x: Tensor, index: Any, value: Any) -> None:
        write_rows(ctx, x, items, value)

    return _written(x, value, {x: names}, tuple(out), special=frozenset(cut), local=local)


def write_rows(ctx: Any, x: Tensor, items: Sequence[Item], value: Any) -> None:
    """Write into this rank's piece what falls into it.

    A rank that nothing falls to writes no rows, but it does write: its graph has the same nodes.
    """
    entries: list[Any] = []
    cuts: list[tuple[int, int, int]] = []  # dim of the value, from, to
    drops: list[int] = []
    at = 0
    for item in items:
        if isinstance(item, New):
            entries.append(None)
        elif isinstance(item, Rows) and not item.full and f"d{item.dim}" in ctx.axes:
            start = ctx.ins[0].offsets[item.dim]
            i, j = held(item.rows, start, ctx.ins[0].local_shape[item.dim])
            entries.append(as_slice(item.rows[i:j], start))
            (drops.append(at) if item.drop else cuts.append((at, i, j)))
        elif isinstance(item, Rows):
            entries.append(bounds(item))
            if item.drop:
                continue
        at += 1
    if isinstance(value, Tensor) and value.ndim:
        value = _cut_value(value, at, drops, cuts)
    x[tuple(entries)] = value


def _cut_value(
    value: Tensor, ndim: int, drops: list[int], cuts: list[tuple[int, int, int]]
) -> Tensor:
    """The part of a value for the rows that a piece has; ints that became slices get a dim of one."""
    wide = ndim - len(drops)
    value = value.reshape(
        value.shape[value.ndim - wide :]
        if value.ndim > wide
        else (*[1] * (wide - value.ndim), *value.shape)
    )
    for d in drops:
        value = value.unsqueeze(d)
    for d, i, j in cuts:
        if value.shape[d] != 1:
            value = value.narrow(d, i, j - i)
    return value


def _masked_write(x: Arg, items: list[Item], value: Any, in_place: bool) -> Rule | None:
    """A mask over the first dims, and one value for all that it hits (or one for each later dim), or for each."""
    first = items[0]
    if (
        not isinstance(first, Picked)
        or not first.mask
        or any(not isinstance(i, Rows) or not i.full for i in items[1:])
    ):
        return None
    names = numbered("d", x.ndim)
    count = len(first.shape)
    more = max(value.ndim - (x.ndim - count), 0) if isinstance(value, Arg) else 0
    if more == 1 and value.shape[0] != 1 and value.shape[1:] == x.shape[count:]:
        return filled_by_mask(x, first.index, value, in_place)
    if more and any(n != 1 for n in value.shape[:more]):
        return None  # torch refuses
    ins = {x: names, first.index: names[:count]}
    return _written(x, value, ins, names[count:])


def _written_at(
    x: Arg, items: list[Item], picked: list[Picked], value: Any, local: Any
) -> Rule | None:
    """Positions in tensors, which must be whole: all ranks write the same.

    Ints and slices of sharded dims beside them are cut to the piece.
    """
    block = len(torch.broadcast_shapes(*(p.shape for p in picked)))
    names = numbered("d", x.ndim)
    rest, at = found_dims(items)
    out = [
        names[i.dim]
        if isinstance(i, Rows) and i.full
        else WHOLE
        if isinstance(i, Rows)
        else ONE
        for i in rest
    ]
    out[at:at] = [WHOLE] * block
    cut = frozenset(
        names[i.dim]
        for i in items
        if isinstance(i, Picked) or (isinstance(i, Rows) and not i.full)
    )
    return _written(x, value, {x: names}, tuple(out), special=cut, local=local)


def _write_at(ctx: Any, x: Tensor, index: Any, value: Any, accumulate: bool = False) -> Tensor:
    """Write by positions into this rank's piece, with one more row for what other ranks hold."""
    spec = ctx.ins[0]
    items = parse(spec.shape, index)
    assert items is not None, "the rule has read the same expression"
    wide = x
    entries: list[Any] = []
    cuts: dict[int, tuple[int, int]] = {}  # dims of which the piece has some of the rows
    for item in items:
        if isinstance(item, New):
            entries.append(None)
            continue
        start, count = spec.offsets[item.dim], spec.local_shape[item.dim]
        cut = f"d{item.dim}" in ctx.axes
        if isinstance(item, Picked):
            at = (
                item.index
                if isinstance(item.index, Tensor)
                else torch.tensor(item.index, device=x.device)
            )
            if cut:
                at, _ = shifted(at, start, count, spec.shape[item.dim], count, wrap=True)
                wide = padded(wide, item.dim)
            entries.append(at)
        elif item.full or not cut:
            entries.append(bounds(item))
        elif item.drop:
            row = item.rows.start - start
            entries.append(row if 0 <= row < count else count)
            wide = padded(wide, item.dim)
        else:
            i, j = held(item.rows, start, count)
            entries.append(as_slice(item.rows[i:j], start))
            cuts[item.dim] = i, j
    if cuts and isinstance(value, Tensor) and value.ndim:
        value = _rows_beside(value, items, cuts)
    if accumulate:
        indices = [None if isinstance(e, slice) else e for e in entries]
        torch.ops.aten.index_put_.default(wide, indices, value, True)
    else:
        wide[tuple(entries)] = value
    return wide[tuple(slice(0, n) for n in x.shape)]


def _rows_beside(value: Tensor, items: list[Item], cuts: dict[int, tuple[int, int]]) -> Tensor:
    """The part of a value for the rows that a piece has of dims that stand beside positions."""
    picked = [item.shape for item in items if isinstance(item, Picked)]
    rest, at = found_dims(items)
    places: list[Any] = [*rest[:at], *torch.broadcast_shapes(*picked), *rest[at:]]
    for k, item in enumerate(reversed(places)):
        d = value.ndim - 1 - k
        if d >= 0 and isinstance(item, Rows) and item.dim in cuts and value.shape[d] != 1:
            i, j = cuts[item.dim]
            value = value.narrow(d, i, j - i)
    return value


# -- index_put -------------------------------------------------------------------------------------
def _whole_dims(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


def index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Rule | None:
    """``x[indices] = values`` with None for a whole dim, or a sum into it."""

    def local(
        ctx: Any, x: Tensor, indices: Any, values: Any, accumulate: bool = False
    ) -> Tensor:
        return _write_at(ctx, x, _whole_dims(indices), values, accumulate).clone()

    return _index_put(input, indices, values, accumulate, local, False)


def index_put_(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Rule | None:
    """``index_put`` in place."""

    def local(
        ctx: Any, x: Tensor, indices: Any, values: Any, accumulate: bool = False
    ) -> Tensor:
        return x.copy_(_write_at(ctx, x, _whole_dims(indices), values, accumulate))

    return _index_put(input, indices, values, accumulate, local, True)


def _index_put(
    x: Any, indices: Any, values: Any, accumulate: bool, local: Any, in_place: bool
) -> Rule | None:
    if not isinstance(x, Arg) or any(isinstance(i, Arg) and i.ndim == 0 for i in indices):
        return None
    items = parse(x.shape, _whole_dims(indices))
    picked = [] if items is None else [i for i in items if isinstance(i, Picked)]
    if not items or not picked:
        return None
    if any(p.mask for p in picked):
        return None if accumulate else _masked_write(x, items, values, in_place)
    return _written_at(x, items, picked, values, local)


for _name in ("index_put", "aten.index_put.default", "aten._unsafe_index_put.default"):
    rule(_name)(index_put)
for _f in (torch.index_put_, _T.index_put_, torch.ops.aten.index_put_.default):
    rule(_f, inplace=True)(index_put_)


@rule("put", "aten.put")
def put(input: Any, index: Any, source: Any, accumulate: bool = False) -> Rule | None:
    """Elements of the flat tensor, which is whole, replaced or added to; then what is added may be cut."""
    if not isinstance(index, Arg) or not isinstance(source, Arg) or input.dtype != source.dtype:
        return None
    if index.shape != source.shape:
        return None
    names = (WHOLE,) * input.ndim
    positions = numbered("i", index.ndim) if accumulate else (WHOLE,) * index.ndim
    both = frozenset([input, source])
    return Rule(
        {input: names, index: positions, source: positions},
        (names,),
        linear=(both,),
        addends=both,
        out_shapes=(input.shape,),
    )


# -- along one dim ---------------------------------------------------------------------------------
Write = Callable[[Tensor, Tensor], Tensor]  # (wide piece, positions in it) -> written


def _into_piece(at: int, where: int) -> Callable[..., Any]:
    """A local program: run the op on a piece with one more row, to which goes what other ranks hold.

    Args:
        at: The dim.
        where: Place of the positions among the op's positional arguments.
    """

    def local(ctx: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        spec = ctx.ins[0]
        name = getattr(ctx.func, "__name__", "").partition(".")[0]
        into = (
            torch.zeros_like(x) if name.endswith("_") and "i" in ctx.axes else x
        )  # "i": contributions are cut
        if f"d{at}" in ctx.axes:
            count = spec.local_shape[at]
            given, index = list(args), kwargs["index"] if "index" in kwargs else args[where]
            wrap = name.startswith("index_fill")  # alone among them it counts from the end, too
            index, _ = shifted(index, spec.offsets[at], count, spec.shape[at], count, wrap=wrap)
            if "index" in kwargs:
                kwargs["index"] = index
            else:
                given[where] = index
            args, into = tuple(given), padded(into, at)
        written = getattr(torch.Tensor, name.removesuffix("_"))(into, *args, **kwargs)
        written = written.narrow(at, 0, spec.local_shape[at])
        if not name.endswith("_"):
            return written.clone(memory_format=torch.contiguous_format)
        if "i" in ctx.axes:
            return x.add_(ctx.group("i").sum(written))
        return x.copy_(written)

    return local


def _both(name: str) -> tuple[list[Any], list[Any]]:
    """The functions of a name, and its in-place forms."""
    spaces = (torch, _T)
    pure = [getattr(s, name) for s in spaces if hasattr(s, name)]
    written = [getattr(s, name + "_") for s in spaces if hasattr(s, name + "_")]
    for packet, out in ((name, pure), (name + "_", written)):
        op = getattr(torch.ops.aten, packet)
        out += [
            getattr(op, o)
            for o in op.overloads()
            if not o.endswith("out") and "dimname" not in o
        ]
    return pure, written


def _register(
    name: str, fn: Callable[..., Rule | None], into: Callable[..., Rule | None] | None = None
) -> None:
    pure, written = _both(name)
    for f in pure:
        rule(f)(fn)
    for f in written:
        rule(f, inplace=True)(into or fn)


def _added_in_place(fn: Callable[..., Rule | None]) -> Callable[..., Rule | None]:
    """The rule of the in-place form of a sum: contributions that are cut are summed up at once.

    That is an all_reduce of what is written into; where the contributions are smaller, they are gathered.
    """

    def into(input: Any, *args: Any, **kwargs: Any) -> Rule | None:
        made = fn(input, *args, **kwargs)
        if made is None:
            return None
        added = max((a.layout.numel for a in made.ins if a is not input), default=0)
        if not few(input.layout.numel, added):
            whole = made.whole | {"i"}
            return Rule(
                made.ins,
                made.outs,
                whole=whole,
                special=made.special,
                local=made.local,
                linear=made.linear,
                addends=made.addends - {input},
            )
        return Rule(
            made.ins,
            made.outs,
            reduce={"i": "none"},
            special=made.special | {"i"},
            local=made.local,
            linear=made.linear,
            addends=made.addends - {input},
        )

    return into


def _by_vector(x: Any, dim: Any, index: Any, source: Any, adds: bool) -> Rule | None:
    """``index_add``, ``index_copy``, ``index_fill``: rows of one dim by a vector of positions."""
    at = one_dim(dim, x.ndim) if isinstance(x, Arg) else None
    if at is None or not x.ndim or not isinstance(index, Arg) or index.ndim != 1:
        return None
    names = numbered("d", x.ndim)
    position = "i" if adds else WHOLE
    ins: dict[Arg, Labels] = {x: names, index: (position,)}
    linear: tuple[frozenset[Arg], ...] = ()
    addends: frozenset[Arg] = frozenset()
    if isinstance(source, Arg):
        ins[source] = (
            (*names[:at], position, *names[at + 1 :])
            if source.ndim == x.ndim
            else (WHOLE,) * source.ndim
        )
        if source.ndim and source.dtype == x.dtype:
            linear, addends = (frozenset([x, source]),), frozenset([x, source])
    special = frozenset([names[at]])
    return Rule(
        ins, (names,), special=special, local=_into_piece(at, 1), linear=linear, addends=addends
    )


def index_add(
    input: Any, dim: Any, index: Any, source: Any = None, *, alpha: Any = 1, **kwargs: Any
) -> Rule | None:
    """Rows added; a pending sum where the rows that are added are sharded."""
    return _by_vector(input, dim, index, kwargs.get("tensor", source), True)


def index_copy(
    input: Any, dim: Any, index: Any, source: Any = None, **kwargs: Any
) -> Rule | None:
    """Rows replaced."""
    return _by_vector(input, dim, index, kwargs.get("tensor", source), False)


def index_fill(input: Any, dim: Any, index: Any, value: Any) -> Rule | None:
    """Rows set to a number."""
    return _by_vector(input, dim, index, value, False)


def _elementwise_along(
    x: Any, dim: Any, index: Any, src: Any, adds: bool, cut: bool = True
) -> Rule | None:
    at = one_dim(dim, x.ndim) if isinstance(x, Arg) else None
    if at is None or not x.ndim or not isinstance(index, Arg) or index.ndim != x.ndim:
        return None
    if any(m > n and d != at for d, (n, m) in enumerate(zip(x.shape, index.shape))):
        return None  # torch refuses: all ranks must, also one with an empty piece
    names = [f"d{d}" for d in range(x.ndim)]
    positions: list[str] = []
    tensor = src if isinstance(src, Arg) and src.ndim == x.ndim else None
    for d, (n, m) in enumerate(zip(x.shape, index.shape)):
        alike = tensor is None or tensor.shape[d] == m
        if d == at:
            positions.append("i" if adds and alike else WHOLE)
            continue
        if n != m or not alike:
            names[d] = WHOLE
        positions.append(names[d])
    if not cut:
        names[at] = WHOLE
    ins: dict[Arg, Labels] = {x: tuple(names), index: tuple(positions)}
    linear: tuple[frozenset[Arg], ...] = ()
    addends: frozenset[Arg] = frozenset()
    if tensor is not None:
        ins[tensor] = tuple(positions)
        if tensor.dtype == x.dtype:
            linear, addends = (frozenset([x, tensor]),), frozenset([x, tensor])
    special = frozenset([f"d{at}"])
    return Rule(
        ins,
        (tuple(names),),
        special=special,
        local=_into_piece(at, 1),
        linear=linear,
        addends=addends,
        out_shapes=(x.shape,),
    )


def scatter(
    input: Any, dim: Any, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Rule | None:
    """Elements replaced by positions along a dim."""
    made = _elementwise_along(input, dim, index, value if src is None else src, False)
    if made is None or reduce is None:
        return made
    return replace(made, linear=(), addends=frozenset())


def scatter_add(input: Any, dim: Any, index: Any, src: Any) -> Rule | None:
    """Elements added by positions along a dim; a pending sum where what is added is sharded along it."""
    return _elementwise_along(input, dim, index, src, True)


def scatter_reduce(
    input: Any, dim: Any, index: Any, src: Any, reduce: Any = None, *, include_self: bool = True
) -> Rule | None:
    """Elements reduced by positions along a dim; a sum like ``scatter_add``."""
    if reduce == "sum" and include_self:
        return _elementwise_along(input, dim, index, src, True)
    made = _elementwise_along(input, dim, index, src, False)
    return _reduced(made, input, dim, reduce, include_self)


def _reduced(
    made: Rule | None, x: Arg, dim: int, reduce: Any, include_self: bool
) -> Rule | None:
    """A product is linear in what it is multiplied into; what else is reduced is not."""
    if made is None:
        return None
    linear = (frozenset([x]),) if reduce == "prod" and include_self else ()
    made = replace(made, linear=linear, addends=frozenset())
    inner, at = made.local, dim % x.ndim
    if reduce != "prod" or inner is None:
        return made

    def local(ctx: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if f"d{at}" in ctx.axes and len(args) > 2 and isinstance(args[2], Tensor):
            args = (*args[:2], _ours_or_one(ctx, at, *args[1:3]), *args[3:])
        out = inner(ctx, input, *args, **kwargs)
        if out is input:  # in place
            return out
        return marked(out, [t for t in (input, *args) if isinstance(t, Tensor)])

    return replace(made, local=local, always_local=x.layout.has_empty())


def _ours_or_one(ctx: Any, at: int, index: Tensor, src: Tensor) -> Tensor:
    """Factors for this rank's piece; ones for others: torch does not differentiate several zeros at a place twice."""
    start, count = ctx.ins[0].offsets[at], ctx.ins[0].local_shape[at]
    ours = (index >= start) & (index < start + count)
    if index.ndim == src.ndim:
        src = src[tuple(slice(n) for n in index.shape)]
    else:
        ours = ours.view(-1, *(1,) * (src.ndim - 1 - at))
    return torch.where(ours, src, torch.ones_like(src))


def index_reduce(
    input: Any,
    dim: Any,
    index: Any,
    source: Any,
    reduce: Any = None,
    *,
    include_self: bool = True,
) -> Rule | None:
    """Rows reduced by positions."""
    made = _by_vector(input, dim, index, source, False)
    return _reduced(made, input, dim, reduce, include_self)


_register("index_add", index_add, _added_in_place(index_add))
_register("index_copy", index_copy)
_register("index_fill", index_fill)
_register("scatter", scatter)
_register("scatter_add", scatter_add, _added_in_place(scatter_add))
_register("scatter_reduce", scatter_reduce, _added_in_place(scatter_reduce))
_register("index_reduce", index_reduce)
