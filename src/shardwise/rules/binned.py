"""Counts and places: histograms, bincount, searchsorted, bucketize, isin.

What is counted may be sharded: the counts of the pieces add up. So may sorted boundaries: a value's place is
the sum of its places in the pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rules.edges import underivable
from shardwise.rules.extremum import group_extremum, piece_extremum
from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule


# -- places among boundaries -------------------------------------------------------------------------
def _placed(queries: Any, boundaries: Any, sorter: Any = None) -> Rule | None:
    """Boundaries of one dim, or rows of them for rows of queries."""
    if not isinstance(boundaries, Arg) or not boundaries.ndim:
        return None
    ins: dict[Arg, Labels] = {}
    names = numbered("d", queries.ndim) if isinstance(queries, Arg) else ()
    rows: Labels = ()
    if boundaries.ndim > 1:
        if len(names) != boundaries.ndim or queries.shape[:-1] != boundaries.shape[:-1]:
            return None
        rows = names[:-1]
    if isinstance(queries, Arg):
        ins[queries] = names
    last = "b"
    if sorter is not None:
        if not isinstance(sorter, Arg) or sorter.shape != boundaries.shape:
            return None
        last = WHOLE
        ins[sorter] = (*rows, last)
    ins[boundaries] = (*rows, last)
    if boundaries in (queries, sorter) or queries is sorter:
        return None
    shape = queries.shape if isinstance(queries, Arg) else ()
    return Rule(ins, (names,), out_shapes=(shape,))


@rule("searchsorted", "aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    sorted_sequence: Any,
    input: Any = None,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Any = None,
    **more: Any,
) -> Rule | None:
    """Where values belong; over sharded boundaries a pending sum of places."""
    values = more.get("self", input)
    if more.keys() - {"self"} or values is None:
        return None
    return _placed(values, sorted_sequence, sorter)


@rule("bucketize", "aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(
    input: Any = None,
    boundaries: Any = None,
    *,
    out_int32: bool = False,
    right: bool = False,
    **more: Any,
) -> Rule | None:
    """Where values belong; over sharded boundaries a pending sum of places."""
    values = more.get("self", input)
    if more.keys() - {"self"} or not isinstance(boundaries, Arg) or boundaries.ndim != 1:
        return None
    return _placed(values, boundaries)


@rule("isin", "aten.isin")
def isin(
    elements: Any = None,
    test_elements: Any = None,
    *,
    assume_unique: bool = False,
    invert: bool = False,
    **more: Any,
) -> Rule | None:
    """Whether elements are among others; those may be sharded: found on any rank is found."""
    elements = more.pop("element", elements)
    test_elements = more.pop("test_element", test_elements)
    if more or elements is test_elements or assume_unique:
        return None
    ins: dict[Arg, Labels] = {}
    names = numbered("d", elements.ndim) if isinstance(elements, Arg) else ()
    among = numbered("t", test_elements.ndim) if isinstance(test_elements, Arg) else ()
    if isinstance(elements, Arg):
        ins[elements] = names
    if isinstance(test_elements, Arg):
        ins[test_elements] = among

    def local(ctx: Any, elements: Any, test_elements: Any, **_: Any) -> Tensor:
        found = ctx.group(*among).reduce(torch.isin(elements, test_elements), "max")
        return ~found if invert else found

    shape = elements.shape if isinstance(elements, Arg) else ()
    return Rule(
        ins,
        (names,),
        reduce=dict.fromkeys(among, "none"),
        special=frozenset(among),
        local=local,
        out_shapes=(shape,),
    )


# -- histograms --------------------------------------------------------------------------------------
@rule("histc", "aten.histc")
def histc(input: Arg, bins: Any = 100, min: Any = 0, max: Any = 0) -> Rule | None:
    """Counts of the pieces add up; the range, where it is that of the data, is found first."""
    if type(bins) is not int or bins < 1 or not input.dtype.is_floating_point:
        return None
    numbers = all(isinstance(edge, (int, float)) for edge in (min, max))
    if not numbers or min > max or 0 in input.shape:
        return None
    names = numbered("d", input.ndim)

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        low, high = _range(ctx.group(*names), x.detach())
        return torch.histc(x, bins, low, high)

    return Rule(
        {input: names},
        ((WHOLE,),),
        special=frozenset(names) if min == max else frozenset(),
        local=local if min == max else None,
        out_shapes=((bins,),),
    )


def _range(group: Any, x: Tensor) -> tuple[float, float]:
    """The least and the greatest element over all ranks, apart from each other: NaNs and infinities raise."""
    dims = tuple(range(x.ndim))
    low, high = (
        float(group_extremum(group, piece_extremum(x, dims, op), op)) for op in ("min", "max")
    )
    if low == high:
        return low - 1, high + 1
    return low, high


@rule("bincount", "aten.bincount")
def bincount(input: Arg, weights: Any = None, minlength: Any = 0) -> Rule | None:
    """Counts of the pieces add up; how many there are depends on the greatest."""
    if input.ndim != 1 or input.dtype.is_floating_point or type(minlength) is not int:
        return None
    if minlength < 0 or input.dtype is torch.bool or not input.shape[0]:
        return None
    ins: dict[Arg, Labels] = {input: ("d0",)}
    if weights is not None:
        if not isinstance(weights, Arg) or weights.shape != input.shape or weights is input:
            return None
        ins[weights] = ("d0",)

    def local(ctx: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        group = ctx.group("d0")
        low, high = (
            int(group_extremum(group, piece_extremum(x, (0,), op), op)) for op in ("min", "max")
        )
        if low < 0:
            return torch.bincount(
                x.new_full((1,), low)
            )  # raises what torch raises, on all ranks
        counts = torch.bincount(x, weights, max(minlength, high + 1))
        if (
            weights is not None
        ):  # torch forgets them, and their dtype, where there is nothing to count
            kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
            counts = counts.to(kind)
        return group.reduce(counts, "sum")

    return Rule(
        ins,
        ((WHOLE,),),
        reduce={"d0": "none"},
        special=frozenset(["d0"]),
        local=local,
        out_shapes=((None,),),
    )


@rule("histogram", "aten.histogram")
def histogram(
    input: Arg, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Rule | None:
    """Counts of the pieces add up to a pending sum; a density is worked out from all of them."""
    if not input.dtype.is_floating_point or 0 in input.shape:
        return None
    names = numbered("d", input.ndim)
    ins: dict[Arg, Labels] = {input: names}
    edges = isinstance(bins, Arg)
    if edges:
        if bins.ndim != 1 or bins.shape[0] < 2 or range is not None:
            return None
        ins[bins] = (WHOLE,)
        count = bins.shape[0] - 1
    else:
        count = bins
        if type(bins) is not int or bins < 1:
            return None
    if weight is not None:
        if not isinstance(weight, Arg) or weight.shape != input.shape:
            return None
        ins[weight] = names
    if len(ins) != 1 + edges + (weight is not None):
        return None

    def local(
        ctx: Any, x: Tensor, bins: Any, *, range: Any = None, weight: Any = None, **_: Any
    ) -> Any:
        group = ctx.group(*names)
        more: dict[str, Any] = {}
        if not edges:
            more["range"] = _range(group, x.detach()) if range is None else range
        made = torch.histogram(x, bins, weight=weight, **more)
        hist = group.reduce(made.hist, "sum")
        if density:
            hist = hist / (made.bin_edges.detach().diff() * hist.sum())
        hist = underivable(hist, "histogram", *([x] if weight is None else [x, weight]))
        return torch.return_types.histogram((hist, made.bin_edges))

    return Rule(
        ins,
        ((WHOLE,), (WHOLE,)),
        reduce=dict.fromkeys(names, "none"),
        special=frozenset(names),
        local=local,
        out_shapes=((count,), (count + 1,)),
    )
