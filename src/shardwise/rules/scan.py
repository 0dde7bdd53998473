"""Scans: over a sharded dim each rank scans its piece and goes on from what the ranks before it end with.

What is sent is one row per rank: the piece's total.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rules.edges import end_to_end, marked, nothing
from shardwise.rules.notation import WHOLE, Arg, LocalProgram, Rule, numbered
from shardwise.rules.reduce import dims_of, is_inexact, wide
from shardwise.rules.registry import rule
from shardwise.rules.rowmap import counted


def _scan(
    input: Arg,
    dim: Any,
    local: LocalProgram,
    *,
    linear: bool = False,
    results: int = 1,
    **more: Any,
) -> Rule | None:
    dims = dims_of(input, dim)
    if type(dim) is not int or dims is None:
        return None
    names = numbered("d", input.ndim)
    return Rule(
        {input: names},
        (names,) * results,
        special=frozenset(names[d] for d in dims),
        linear=(frozenset([input]),) if linear else (),
        local=local,
        **more,
    )


@rule("cumsum", "aten.cumsum")
def cumsum(input: Arg, dim: Any, *, dtype: Any = None, **more: Any) -> Rule | None:
    """Plus the sums of the pieces before."""

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        d = dim % input.ndim
        own = torch.cumsum(input, d, dtype=dtype)
        group = ctx.group(f"d{d}")
        totals = group.stack(torch.sum(input, d, keepdim=True, dtype=own.dtype))
        return own + totals[: group.index].sum(0, dtype=own.dtype)

    linear = is_inexact(input.dtype) and (dtype is None or is_inexact(dtype))
    return None if more.keys() - {"out"} else _scan(input, dim, local, linear=linear)


@rule("cumprod", "aten.cumprod")
def cumprod(input: Arg, dim: Any, *, dtype: Any = None, **more: Any) -> Rule | None:
    """Times the products of the pieces before."""

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        d = dim % input.ndim
        group = ctx.group(f"d{d}")
        own = torch.cumprod(input, d, dtype=dtype)
        if group.size > 1:
            totals = group.stack(torch.prod(input, d, keepdim=True, dtype=own.dtype))
            own = own * totals[: group.index].prod(0, dtype=own.dtype)
        return marked(own, [input])  # torch's gradient of one element, or none, has no graph

    if more.keys() - {"out"}:
        return None
    return _scan(input, dim, local, always_local=input.layout.is_sharded)


@rule("logcumsumexp", "aten.logcumsumexp")
def logcumsumexp(input: Arg, dim: Any, **more: Any) -> Rule | None:
    """Plus, inside the logarithm, what the pieces before end with."""
    if not input.dtype.is_floating_point or more.keys() - {"out"}:
        return None

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        d = dim % input.ndim
        x = wide(input)
        group = ctx.group(f"d{d}")
        totals = group.stack(_log_total(x, d, keepdim=True))
        before = _log_total(totals[: group.index], 0)
        if not x.numel() and not before.numel():
            return nothing(x.shape, [x, before], input.dtype, saved=True)
        # A first row, and not a logaddexp of two scans: the second derivative of either is NaN where a
        # gradient that depends on the operand vanishes.
        scan = torch.logcumsumexp(end_to_end((before, x), d), d)
        return scan.narrow(d, 1, x.shape[d]).to(input.dtype)

    return _scan(input, dim, local, always_local=input.layout.has_empty())


def _log_total(x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """``logsumexp``, without a gradient where it is infinite: there it would be NaN, of all elements."""
    value = torch.logsumexp(x.detach(), dim, keepdim=True)
    infinite = value.isinf()
    safe = torch.where(infinite, torch.zeros_like(x), x)
    total = torch.where(infinite, value, torch.logsumexp(safe, dim, keepdim=True))
    return total if keepdim else total.squeeze(dim)


def _running(op: str) -> Any:
    scan = getattr(torch, f"cum{op}")
    named = getattr(torch.return_types, f"cum{op}")

    def answer(input: Arg, dim: Any, **more: Any) -> Rule | None:
        if input.dtype.is_complex or more.keys() - {"out"}:
            return None

        def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Any:
            d = dim % input.ndim
            value, index = scan(input, d)
            index = index + ctx.ins[0].offsets[d]
            group = ctx.group(f"d{d}")
            if input.shape[d]:
                ends = value.narrow(d, -1, 1), index.narrow(d, -1, 1)
            else:  # offers nothing, but takes part
                row = [1 if i == d else n for i, n in enumerate(input.shape)]
                ends = value.sum(d, keepdim=True).to(value.dtype), index.new_zeros(row)
            values, indices = group.stack(ends[0]), group.gather(ends[1])
            layout = ctx.ins[0].layout
            sizes = [layout.box(layout.mesh.coordinate_of(r))[1][d] for r in group.ranks]
            before = [i for i in range(group.index) if sizes[i]]
            best, which = scan(values[before or [0]], 0)  # later wins a tie, as in one piece
            best, at = best[-1], indices[before or [0]].gather(0, which[-1:])[0]
            if not before:
                own = torch.ones_like(value, dtype=torch.bool)
            elif op == "max":
                own = value >= best
            else:
                own = value <= best
            if before and value.dtype.is_floating_point:
                own = value.isnan() | (own & ~best.isnan())
            return named((torch.where(own, value, best), torch.where(own, index, at)))

        return _scan(input, dim, local, results=2)

    return answer


for _op in ("max", "min"):
    rule(f"cum{_op}", f"aten.cum{_op}")(_running(_op))


@rule("diff", "aten.diff")
def diff(
    input: Arg, n: Any = 1, dim: Any = -1, prepend: Any = None, append: Any = None, **more: Any
) -> Rule | None:
    """Over a sharded dim each rank fetches the rows that follow its own; next to others it must be whole."""
    dims = dims_of(input, dim)
    operands = [t for t in (prepend, input, append) if t is not None]
    if not dims or type(dim) is not int or type(n) is not int or more.keys() - {"out"}:
        return None
    if n < 0 or any(t.ndim != input.ndim or t.dtype != input.dtype for t in operands):
        return None
    (d,) = dims
    rest = [t.shape[:d] + t.shape[d + 1 :] for t in operands]
    if any(r != rest[0] for r in rest):
        return None
    if n == 0:
        return _as_it_is(input, [t for t in operands if t is not input], d)
    names = numbered("d", input.ndim)
    length = max(sum(t.shape[d] for t in operands) - n, 0)
    shape = tuple(length if i == d else s for i, s in enumerate(input.shape))
    linear = (frozenset(operands),) if is_inexact(input.dtype) else ()

    def local(ctx: Any, input: Tensor, *_: Any, **__: Any) -> Tensor:
        def wanted(rank: int) -> Tensor:
            mine = ctx.piece(0, d, rank)
            return counted(range(mine.start, mine.stop + n if mine else mine.start))

        return torch.diff(ctx.rows(d, wanted)(input), n, d)

    alone = len(operands) == 1
    if not alone:
        names = tuple(WHOLE if i == d else name for i, name in enumerate(names))
    return Rule(
        dict.fromkeys(operands, names),
        (names,),
        special=frozenset([names[d]] if alone else ()),
        linear=linear,
        local=local if alone else None,
        out_shapes=(shape,),
    )


def _as_it_is(x: Arg, ignored: list[Arg], dim: int) -> Rule | None:
    """No difference at all: torch copies the operand, and only looks at the sizes of what goes before and after."""
    names = numbered("d", x.ndim)
    ins = {x: names}
    unseen = [f"p{i}" for i in range(len(ignored))]
    for t, name in zip(ignored, unseen):
        ins[t] = tuple(name if d == dim else n for d, n in enumerate(names))
    return Rule(
        ins,
        (names,),
        reduce=dict.fromkeys(unseen, "none"),
        linear=(frozenset([x]),),
        local=lambda ctx, input, *_, **__: torch.diff(input, 0, dim),
        always_local=bool(ignored),
    )
