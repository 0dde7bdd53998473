"""Results whose size depends on data: nonzero, masks, unique, rows repeated each by its own count.

What is sent is what decides: masks (a byte for each element), and of values those that are in the result.
The dims that are found are whole in it; the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.rules.edges import end_to_end, underivable
from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.pointwise import choice
from shardwise.rules.registry import rule
from shardwise.rules.view import one_dim

_T = torch.Tensor


# -- what the rules of this family share -------------------------------------------------------------
def assembled(ctx: Any, x: Tensor, arg: int, factors: Sequence[str]) -> Tensor:
    """The whole of an argument, of which ``x`` has this rank's shape, from all ranks; without a gradient."""
    group, layout = ctx.group(*factors), ctx.ins[arg].layout
    if group.size == 1:
        return x
    boxes = [layout.box(ctx.mesh.coordinate_of(r)) for r in group.ranks]
    room = max(torch.Size(sizes).numel() for _, sizes in boxes)
    flat = x.new_zeros(room)
    flat[: x.numel()] = x.detach().reshape(-1)
    whole = x.new_empty(layout.shape)
    for got, (offsets, sizes) in zip(group.gather(flat), boxes):
        at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
        whole[at] = got[: torch.Size(sizes).numel()].view(sizes)
    return whole


def gathered(group: Any, x: Tensor, counts: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Everybody's tensor, of ``counts`` rows on a dim; differentiable."""
    room = max(counts)
    if x.shape[dim] < room:
        lack = [room - x.shape[dim] if d == dim else n for d, n in enumerate(x.shape)]
        x = end_to_end((x, x.detach().new_zeros(lack)), dim)
    return [t.narrow(dim, 0, n) for t, n in zip(group.stack(x).unbind(), counts)]


def counts_of(group: Any, n: int, device: Any) -> list[int]:
    """Everybody's number."""
    if group.size == 1:
        return [n]
    return group.gather(torch.tensor(n, device=device)).tolist()


# -- where something is ------------------------------------------------------------------------------
def _places(
    x: Arg, results: int, columns: Labels, finish: Any, rows: int | None = None
) -> Rule:
    names = numbered("d", x.ndim)
    shape = (rows, *[x.ndim] * len(columns))

    def local(ctx: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return finish(assembled(ctx, x != 0, 0, names))

    return Rule(
        {x: names},
        ((WHOLE, *columns),) * results,
        reduce=dict.fromkeys(names, "none"),
        special=frozenset(names),
        local=local,
        out_shapes=(shape,) * results,
    )


@rule("nonzero", "aten.nonzero")
def nonzero(input: Arg, *, as_tuple: bool = False) -> Rule | None:
    """The places of what is not zero: every rank tells a byte for each element."""
    if not as_tuple:
        return _places(input, 1, (WHOLE,), torch.nonzero)
    if not input.ndim:
        return None
    return _places(input, input.ndim, (), lambda x: x.nonzero(as_tuple=True))


@rule("argwhere", "aten.argwhere")
def argwhere(input: Arg) -> Rule | None:
    """The places of what is not zero."""
    return _places(input, 1, (WHOLE,), torch.argwhere)


@rule("nonzero_static", "aten.nonzero_static")
def nonzero_static(input: Arg, *, size: Any, fill_value: Any = -1) -> Rule | None:
    """The first places of what is not zero, as many as are asked for."""
    if type(size) is not int or size < 0 or type(fill_value) is not int:
        return None

    def finish(x: Tensor) -> Tensor:
        return torch.nonzero_static(x, size=size, fill_value=fill_value)

    return _places(input, 1, (WHOLE,), finish, size)


@rule("where", "aten.where", lifts=True)
def where(condition: Any, *choices: Any, **named: Any) -> Rule | None:
    """Elementwise; of a condition alone, the places where it holds."""
    if choices or named:
        return choice(condition, *choices, **named)
    return nonzero(condition, as_tuple=True)


# -- what a mask hits --------------------------------------------------------------------------------
def taken_by_mask(x: Arg, mask: Arg) -> Rule | None:
    """``x[mask]``: the mask is over the first dims of ``x``, and whole; values are sent that it hits."""
    k = mask.ndim
    if not k or mask is x or mask.shape != x.shape[:k] or mask.dtype is not torch.bool:
        return None
    names = numbered("d", x.ndim)

    def local(ctx: Any, x: Tensor, mask: Any, *_: Any, **__: Any) -> Tensor:
        if isinstance(mask, (tuple, list)):  # an index expression
            mask = next(i for i in mask if isinstance(i, Tensor))
        return _hits(ctx, ctx.ins[0].layout, names[:k], x, mask)

    return Rule(
        {x: names, mask: (WHOLE,) * k},
        ((WHOLE, *names[k:]),),
        reduce=dict.fromkeys(names[:k], "none"),
        special=frozenset(names[:k]),
        linear=(frozenset([x]),),
        local=local,
        out_shapes=((None, *x.shape[k:]),),
    )


def _hits(ctx: Any, layout: Layout, factors: Labels, x: Tensor, mask: Tensor) -> Tensor:
    """What a whole mask over the first dims hits, in order, of a tensor that has this layout."""
    group, k = ctx.group(*factors), mask.ndim
    order = (mask.flatten().cumsum(0) - 1).view(mask.shape)
    mine, places = None, []
    for r in group.ranks:
        offsets, sizes = layout.box(ctx.mesh.coordinate_of(r))
        at = tuple(slice(o, o + n) for o, n in zip(offsets[:k], sizes[:k]))
        places.append(order[at][mask[at]])
        mine = mask[at] if r == group.transport.rank else mine
    parts = gathered(group, x[mine], [len(p) for p in places])
    back = torch.cat(places).argsort()
    return end_to_end(parts).index_select(0, back)


@rule("masked_select", "aten.masked_select")
def masked_select(input: Arg, mask: Any) -> Rule | None:
    """``x[mask]`` of one shape, to which both are brought; an operand that grows is sent before it does."""
    if not isinstance(mask, Arg) or mask is input or mask.dtype is not torch.bool:
        return None
    shape = tuple(torch.broadcast_shapes(input.shape, mask.shape))
    if mask.shape == input.shape or not shape:
        return taken_by_mask(input, mask)
    names = numbered("d", len(shape))
    grows = input.shape != shape

    def local(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        return _hits(ctx, ctx.ins[0].layout, names, x, mask.expand(shape))

    return Rule(
        {input: (WHOLE,) * input.ndim if grows else names, mask: (WHOLE,) * mask.ndim},
        ((WHOLE,),),
        reduce=dict.fromkeys(names, "none"),
        special=frozenset(names),
        linear=(frozenset([input]),),
        local=local,
        out_shapes=((None,),),
    )


# -- rows repeated -----------------------------------------------------------------------------------
def repeated_each(x: Arg, repeats: Arg, dim: Any, output_size: Any) -> Rule | None:
    """``repeat_interleave`` with a count for each row: rows are sent as often as they are in the result."""
    if output_size is not None and type(output_size) is not int:
        return None
    flat = dim is None
    at = 0 if flat else one_dim(dim, x.ndim)
    if at is None or not x.ndim or repeats.ndim > 1 or repeats is x:
        return None
    rows = x.layout.numel if flat else x.shape[at]
    if repeats.shape not in ((), (1,), (rows,)) or repeats.dtype not in (
        torch.int64,
        torch.int32,
    ):
        return None
    names = [f"d{d}" for d in range(x.ndim)]
    if flat:
        names[1:] = [WHOLE] * (x.ndim - 1)
    out = (WHOLE,) if flat else tuple(WHOLE if d == at else n for d, n in enumerate(names))
    shape = (output_size,) if flat else (*x.shape[:at], output_size, *x.shape[at + 1 :])
    step = x.layout.numel // x.shape[0] if flat and x.shape[0] else 1

    def local(ctx: Any, x: Tensor, repeats: Tensor, *_: Any, **__: Any) -> Tensor:
        group, layout = ctx.group(f"d{at}"), ctx.ins[0].layout
        repeats = repeats.expand(rows)
        if (
            rows and int(repeats.min()) < 0
        ):  # every rank has all counts: all raise, before anything is sent
            raise RuntimeError("repeats can not be negative")
        counts, mine = [], repeats
        for r in group.ranks:
            offsets, sizes = layout.box(ctx.mesh.coordinate_of(r))
            part = repeats.narrow(0, offsets[at] * step, sizes[at] * step)
            counts.append(int(part.sum()))
            mine = part if r == group.transport.rank else mine
        made = (x.flatten() if flat else x).repeat_interleave(mine, at)
        return end_to_end(gathered(group, made, counts, at), at)

    return Rule(
        {x: tuple(names), repeats: (WHOLE,) * repeats.ndim},
        (out,),
        reduce={f"d{at}": "none"},
        special=frozenset([f"d{at}"]),
        linear=(frozenset([x]),),
        local=local,
        out_shapes=(shape,),
    )


def repeated_numbers(repeats: Any, output_size: Any) -> Rule | None:
    """``repeat_interleave`` of counts alone: each row's number as often as it says."""
    if (
        not isinstance(repeats, Arg)
        or repeats.ndim != 1
        or (output_size is not None and type(output_size) is not int)
    ):
        return None
    return Rule({repeats: (WHOLE,)}, ((WHOLE,),), out_shapes=((output_size,),))


# -- different elements ------------------------------------------------------------------------------
def _different(
    input: Arg, inverse: bool, counts: bool, func: Any, *, in_order: bool, **given: Any
) -> Rule | None:
    """Each rank offers what is different in its piece; among those of all ranks it is found out again."""
    names = [f"d{d}" for d in range(input.ndim)]
    if in_order:  # pieces must follow each other
        names[1:] = [WHOLE] * (input.ndim - 1)
    factors = [n for n in names if n != WHOLE]

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
        group = ctx.group(*factors)
        value, where, count = func(
            input.detach(), return_inverse=True, return_counts=True, **given
        )
        sizes = counts_of(group, len(value), value.device)
        merged = torch.cat(gathered(group, value, sizes))
        value, again, _ = func(merged, return_inverse=True, return_counts=True, **given)
        out = [underivable(value, func.__name__, input)]
        if inverse:
            first = sum(sizes[: group.index])
            mine = again[first : first + sizes[group.index]]
            out.append(mine[where] if len(mine) else where)
        if counts:
            total = torch.cat(gathered(group, count, sizes))
            out.append(total.new_zeros(len(value)).index_add_(0, again, total))
        return tuple(out) if len(out) > 1 else out[0]

    outs: list[Labels] = [(WHOLE,)]
    shapes: list[Any] = [(None,)]
    if inverse:
        outs.append(tuple(names))
        shapes.append(input.shape)
    if counts:
        outs.append((WHOLE,))
        shapes.append((None,))
    return Rule(
        {input: tuple(names)},
        tuple(outs),
        reduce=dict.fromkeys(factors, "none"),
        special=frozenset(factors),
        local=local,
        out_shapes=tuple(shapes),
    )


@rule("unique")
def unique(
    input: Arg,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: Any = None,
) -> Rule | None:
    """Different elements, in order."""
    if dim is not None or not input.ndim or 0 in input.shape:
        return None
    return _different(input, return_inverse, return_counts, torch.unique, in_order=False)


@rule("unique_consecutive")
def unique_consecutive(
    input: Arg, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> Rule | None:
    """The first of equal neighbours."""
    if dim is not None or not input.ndim or 0 in input.shape:
        return None
    return _different(
        input, return_inverse, return_counts, torch.unique_consecutive, in_order=True
    )
