"""Reading by positions: ``x[...]``, index_select, gather, take_along_dim.

Positions on a whole dim are looked up by every rank; the positions may be sharded. On a sharded dim each
rank looks up those it holds, and the result is a pending sum of which one addend is not zero, unless
gathering the tensor moves less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.found import taken_by_mask
from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, aligned, numbered
from shardwise.rules.registry import rule
from shardwise.rules.rowmap import fetched
from shardwise.rules.slicing import basic, by_index, few, numbers
from shardwise.rules.subscript import (
    Item,
    New,
    Picked,
    Rows,
    bounds,
    padded,
    parse,
    shifted,
    taken,
)
from shardwise.rules.view import one_dim

_T = torch.Tensor


# -- index expressions -----------------------------------------------------------------------------
@rule(_T.__getitem__)
def getitem(x: Any, index: Any) -> Rule | None:
    """``x[index]``: ints, slices, ``None``, ``...``, positions in integer tensors or lists."""
    items = parse(x.shape, index) if isinstance(x, Arg) else None
    if items is None:
        return None
    picked = [item for item in items if isinstance(item, Picked)]
    if not picked:
        return basic(x, items, by_index)
    return lookup_rule(x, items, picked)


@rule("aten.index.Tensor")
def index_tensor(x: Arg, indices: Any) -> Rule | None:
    """``x[indices]`` with None for a whole dim."""
    if any(isinstance(i, Arg) and i.ndim == 0 for i in indices):
        return None
    items = parse(x.shape, tuple(slice(None) if i is None else i for i in indices))
    picked = [] if items is None else [item for item in items if isinstance(item, Picked)]
    return lookup_rule(x, items or [], picked) if picked else None


def found_dims(items: Sequence[Item]) -> tuple[list[Rows | New], int]:
    """Items of the result's dims other than those of the positions, and where the latter stand.

    They stand where the tensors stood if those were next to each other (ints are taken first and do not
    separate), else in front.
    """
    left = [item for item in items if not (isinstance(item, Rows) and item.drop)]
    places = [k for k, item in enumerate(left) if isinstance(item, Picked)]
    together = places[-1] - places[0] + 1 == len(places)
    rest = [item for item in left if not isinstance(item, Picked)]
    return rest, places[0] if together else 0


def lookup_rule(x: Arg, items: list[Item], picked: list[Picked]) -> Rule | None:
    """Positions in tensors, or a mask over the first dims."""
    if any(p.mask for p in picked):
        first, *rest = items
        alone = all(isinstance(i, Rows) and i.full for i in rest)
        return taken_by_mask(x, first.index) if isinstance(first, Picked) and alone else None
    block = tuple(torch.broadcast_shapes(*(p.shape for p in picked)))
    positions = numbered("i", len(block))
    rest, at = found_dims(items)
    ins = {item.dim: WHOLE for item in items if not isinstance(item, New)}
    out: list[str] = []
    shape: list[int] = []
    cut = [i for i in items if isinstance(i, Rows) and not i.full and x.layout.dims[i.dim]]
    for item in rest:
        name = ONE
        if isinstance(item, Rows):
            name = f"d{item.dim}" if item.full or item in cut else WHOLE
            ins[item.dim] = name
        out.append(name)
        shape.append(len(item.rows) if isinstance(item, Rows) else 1)
    out[at:at] = positions
    shape[at:at] = block
    special = _looked_up_in_part(x, [p.dim for p in picked], math.prod(shape))
    for d in (*special, *(i.dim for i in cut)):
        ins[d] = f"d{d}"
    places = {i.dim: k for k, i in enumerate([*rest[:at], *block, *rest[at:]]) if i in cut}
    labels = {x: tuple(ins[d] for d in range(x.ndim))}
    labels |= {p.index: aligned(p.index, positions) for p in picked if isinstance(p.index, Arg)}
    after = len(rest) - at

    def local(ctx: Any, x: Tensor, index: Any, *_: Any, **__: Any) -> Tensor:
        listed = ctx.func is torch.ops.aten.index.Tensor
        index = tuple(slice(None) if i is None else i for i in index) if listed else index
        for i in cut:  # rows that are taken of sharded dims, first
            if f"d{i.dim}" in ctx.axes and i.drop:
                x = taken(x, i.dim, ctx.ins[0].offsets[i.dim], i.rows)
            elif f"d{i.dim}" in ctx.axes:
                x = fetched(ctx, x, i.dim, numbers(i.rows), out_dim=places[i.dim])
        return _masked_lookup(ctx, x, index, special, after, frozenset(i.dim for i in cut))

    listed = any(isinstance(p.index, list) and len(p.index) > 1 for p in picked)
    return Rule(
        labels,
        (tuple(out),),
        whole=frozenset(positions[-1:]) if listed else frozenset(),  # a list cannot be cut
        special=frozenset(f"d{d}" for d in (*special, *(i.dim for i in cut))),
        linear=(frozenset([x]),),
        local=local if special or cut else None,
        out_shapes=(tuple(shape),),
    )


def _looked_up_in_part(x: Arg, dims: Sequence[int], results: int) -> list[int]:
    """Sharded dims on which each rank looks up what it holds."""
    return [d for d in dims if x.layout.dims[d]] if few(results, x.layout.numel) else []


def _masked_lookup(
    ctx: Any, x: Tensor, index: Any, special: list[int], after: int, taken: frozenset[int]
) -> Tensor:
    """Look up, with zeros for what other ranks hold; the dims of ``taken`` hold just the rows asked for."""
    spec = ctx.ins[0]
    items = parse(spec.shape, index)
    assert items is not None, "the rule has read the same expression"
    entries: list[Any] = []
    keep: Tensor | None = None
    for item in items:
        if isinstance(item, Picked) and item.dim in special and f"d{item.dim}" in ctx.axes:
            at = (
                item.index
                if isinstance(item.index, Tensor)
                else torch.tensor(item.index, device=x.device)
            )
            start, count = spec.offsets[item.dim], spec.local_shape[item.dim]
            if count == 0:
                x = padded(x, item.dim)
            at, inside = shifted(at, start, count, spec.shape[item.dim], wrap=True)
            keep = inside if keep is None else keep & inside
            entries.append(at)
        elif isinstance(item, New):
            entries.append(None)
        elif isinstance(item, Rows) and item.dim in taken and f"d{item.dim}" in ctx.axes:
            entries.append(0 if item.drop else slice(None))
        elif isinstance(item, Rows):
            entries.append(bounds(item))
        else:
            entries.append(item.index)
    out = x[tuple(entries)]
    if keep is None:
        return out
    return only(keep.reshape(*keep.shape, *[1] * after), out)


# -- along one dim ---------------------------------------------------------------------------------
def only(keep: Tensor, out: Tensor) -> Tensor:
    """``out`` where this rank holds the rows, zeros elsewhere."""
    return torch.where(keep, out, out.new_zeros(()))


@rule("index_select", "aten.index_select")
def index_select(input: Arg, dim: Any, index: Any) -> Rule | None:
    """Rows of one dim, by a vector of positions."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or not isinstance(index, Arg) or index.ndim > 1:
        return None
    count = index.layout.numel
    names = numbered("d", input.ndim)
    position = "i" if index.ndim else WHOLE
    out = (*names[:at], position, *names[at + 1 :])
    shape = (*input.shape[:at], count, *input.shape[at + 1 :])
    part = bool(_looked_up_in_part(input, [at], math.prod(shape)))
    ins = names if part else (*names[:at], WHOLE, *names[at + 1 :])

    def local(ctx: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        spec = ctx.ins[0]
        x = padded(x, at) if spec.local_shape[at] == 0 else x
        where, keep = shifted(index, spec.offsets[at], spec.local_shape[at], spec.shape[at])
        return only(
            keep.reshape(-1, *[1] * (x.ndim - at - 1)), torch.index_select(x, at, where)
        )

    return Rule(
        {input: ins, index: (position,) * index.ndim},
        (out,),
        special=frozenset([names[at]]) if part else frozenset(),
        linear=(frozenset([input]),),
        local=local if part else None,
        out_shapes=(shape,),
    )


def _along(
    x: Arg,
    index: Arg,
    at: int,
    ins: Labels,
    positions: Labels,
    shape: tuple[int, ...],
    *,
    wraps: bool = False,
) -> Rule:
    """Element-wise lookup along a dim: ``gather``, and ``take_along_dim``, whose positions wrap around."""
    part = bool(_looked_up_in_part(x, [at], math.prod(shape)))
    names = (*ins[:at], f"d{at}" if part else WHOLE, *ins[at + 1 :])

    def local(ctx: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        index = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        spec = ctx.ins[0]
        x = padded(x, at) if spec.local_shape[at] == 0 else x
        if wraps and spec.shape[at]:
            index = index.remainder(spec.shape[at])
        where, keep = shifted(index, spec.offsets[at], spec.local_shape[at], spec.shape[at])
        found = torch.take_along_dim(x, where, at) if wraps else torch.gather(x, at, where)
        return only(keep, found)

    return Rule(
        {x: names, index: positions},
        (positions,),
        special=frozenset([f"d{at}"]) if part else frozenset(),
        linear=(frozenset([x]),),
        local=local if part else None,
        out_shapes=(shape,),
    )


@rule("gather", "aten.gather")
def gather(input: Arg, dim: Any, index: Any, *, sparse_grad: bool = False) -> Rule | None:
    """``out[i][j] = input[index[i][j]][j]``; other dims are sharded alike where both are equally long."""
    at = one_dim(dim, input.ndim)
    if (
        at is None
        or not isinstance(index, Arg)
        or not input.ndim
        or index.ndim != input.ndim
        or sparse_grad
    ):
        return None
    if any(m > n and d != at for d, (n, m) in enumerate(zip(input.shape, index.shape))):
        return None  # torch refuses: all ranks must, also one with an empty piece
    names = numbered("d", input.ndim)
    ins = tuple(n if a == b else WHOLE for n, a, b in zip(names, input.shape, index.shape))
    positions = tuple("i" if d == at else n for d, n in enumerate(ins))
    return _along(input, index, at, ins, positions, index.shape)


@rule("take_along_dim")
def take_along_dim(input: Arg, indices: Any, dim: Any = None) -> Rule | None:
    """Like ``gather``, and the other dims broadcast."""
    at = one_dim(dim, input.ndim)
    if (
        at is None
        or not isinstance(indices, Arg)
        or not input.ndim
        or indices.ndim != input.ndim
    ):
        return None
    if any(
        a != b and 1 not in (a, b)
        for d, (a, b) in enumerate(zip(input.shape, indices.shape))
        if d != at
    ):
        return None
    if any(a != b for d, (a, b) in enumerate(zip(input.shape, indices.shape)) if d != at):
        return _broadcast_along(input, indices, at)
    names = numbered("d", input.ndim)
    positions = tuple("i" if d == at else n for d, n in enumerate(names))
    return _along(input, indices, at, names, positions, indices.shape, wraps=True)


def _broadcast_along(x: Arg, index: Arg, at: int) -> Rule:
    names = numbered("d", x.ndim)
    shape = tuple(
        index.shape[d] if d == at else max(a, b) if 0 not in (a, b) else 0
        for d, (a, b) in enumerate(zip(x.shape, index.shape))
    )
    ins = tuple(ONE if n == 1 and d != at else names[d] for d, n in enumerate(x.shape))
    positions = tuple(
        "i" if d == at else ONE if n == 1 else names[d] for d, n in enumerate(index.shape)
    )
    out = tuple("i" if d == at else names[d] for d in range(x.ndim))
    return replace(_along(x, index, at, ins, positions, shape, wraps=True), outs=(out,))


# -- over all elements -----------------------------------------------------------------------------
def in_piece(ctx: Any, index: Tensor, elsewhere: int) -> tuple[Tensor, Tensor]:
    """Positions among all elements as positions in this rank's piece of the first argument, and which are in it."""
    spec = ctx.ins[0]
    total = math.prod(spec.shape)
    bad = (index < -total) | (index >= total)
    rest = torch.where(index < 0, index + total, index)
    inside, place, step = ~bad, torch.zeros_like(index), 1
    sizes = zip(reversed(spec.shape), reversed(spec.offsets), reversed(spec.local_shape))
    for n, start, count in sizes:
        at = rest % max(n, 1) - start
        rest = rest // max(n, 1)
        inside = inside & (at >= 0) & (at < count)
        place = place + at * step
        step *= count
    place = torch.where(inside, place, elsewhere)
    return torch.where(bad, math.prod(spec.local_shape) + 2, place), inside


@rule("take", "aten.take")
def take(input: Arg, index: Any) -> Rule | None:
    """Elements by their places among all, of which each rank looks up those that it holds."""
    if not isinstance(index, Arg) or index is input or index.dtype is not torch.int64:
        return None
    if 0 in input.shape:
        return None
    positions = numbered("i", index.ndim)
    part = few(index.layout.numel, input.layout.numel)
    names = numbered("d", input.ndim) if part else (WHOLE,) * input.ndim

    def local(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        place, inside = in_piece(ctx, index, 0)
        return only(inside, torch.take(padded(x.reshape(-1), 0), place))

    return Rule(
        {input: names, index: positions},
        (positions,),
        special=frozenset(names) - {WHOLE},
        linear=(frozenset([input]),),
        local=local if part else None,
        out_shapes=(index.shape,),
    )
