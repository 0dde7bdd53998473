"""Lookups of rows: ids are cut anyhow, columns too.

Where the rows of the table are cut, each rank looks up what it holds, and the result is a pending sum of which
one addend is not zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.recording import at_each_run
from shardwise.rules.notation import WHOLE, Arg, LocalProgram, Rule, numbered
from shardwise.rules.registry import rule


def _check_ids(ids: Tensor, rows: int) -> None:
    """Raise as torch does: a wrong id must not become a row of zeros where the table is cut."""
    if (
        ids.device.type == "cpu"
        and ids.numel()
        and (int(ids.min()) < 0 or int(ids.max()) >= rows)
    ):
        raise IndexError("index out of range in self")


def _rows(ids: Tensor, table: Tensor, start: int, padding: int | None) -> Tensor:
    """Rows of this piece of the table; zeros for ids that other ranks hold."""
    count = table.shape[0]
    if count == 0:
        return table.sum(0).expand(*ids.shape, table.shape[1])  # zeros that keep the edge
    inside = (ids >= start) & (ids < start + count)
    near = (ids - start).clamp(0, count - 1)
    mine = None if padding is None or not start <= padding < start + count else padding - start
    found = F.embedding(near, table, mine)
    return torch.where(inside.unsqueeze(-1), found, found.new_zeros(()))


def _lookup(
    ids: Arg, table: Arg, local: LocalProgram, by_freq: bool, always: bool
) -> Rule | None:
    if table.ndim != 2:
        return None
    names = numbered("i", ids.ndim)
    whole = frozenset(("v", *names) if by_freq else ())  # counts of ids are over all of them
    return Rule(
        {ids: names, table: ("v", "d")},
        ((*names, "d"),),
        whole=whole,
        special=frozenset(("v",)),
        linear=(frozenset([table]),),
        local=local,
        always_local=always,
        out_shapes=((*ids.shape, table.shape[1]),),
    )


@rule(F.embedding)
def embedding(
    input: Arg,
    weight: Arg,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule | None:
    """``i..., [v] d -> i... d``, a pending sum where the rows are cut. A sparse gradient is made dense."""
    if max_norm is not None:  # writes into the table
        return None
    rows, at = weight.shape[0], weight.index
    padding = padding_idx + rows if padding_idx is not None and padding_idx < 0 else padding_idx

    def local(ctx: Any, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        if ctx.group("v").size == 1:
            return F.embedding(
                input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq
            )
        at_each_run("check ids", _check_ids, input, rows)
        return _rows(input, weight, ctx.start(at, 0), padding)

    return _lookup(input, weight, local, scale_grad_by_freq, sparse)


@rule(torch.embedding, "aten.embedding.default")
def embedding_of(
    weight: Arg,
    indices: Arg,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule | None:
    """The same with the table first, and -1 for no padding."""
    rows, at = weight.shape[0], weight.index
    padding = None if padding_idx < 0 else padding_idx

    def local(ctx: Any, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        if ctx.group("v").size == 1:
            return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)
        at_each_run("check ids", _check_ids, indices, rows)
        return _rows(indices, weight, ctx.start(at, 0), padding)

    return _lookup(indices, weight, local, scale_grad_by_freq, sparse)


@rule(F.embedding_bag)
def embedding_bag(  # noqa: PLR0913  torch's parameters
    input: Arg,
    weight: Arg,
    offsets: Arg | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Arg | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Rule | None:
    """``b l, v d -> b d``; over ids or rows that are cut the sums of the bags are pending sums.

    The greatest of a bag is sought among what each rank holds of the rows, unless the table is less than what
    they tell each other then. A sparse gradient is made dense.
    """
    if max_norm is not None or weight.ndim != 2 or input.ndim not in (1, 2):
        return None
    if (input.ndim == 1) != (offsets is not None) or 0 in (*weight.shape, *input.shape):
        return None
    if per_sample_weights is not None and (
        mode != "sum" or per_sample_weights.shape != input.shape
    ):
        return None
    bag = "b" if input.ndim == 2 else WHOLE
    bags = (bag, "l") if input.ndim == 2 else ("l",)
    ins = {input: bags, weight: ("v", "d")}
    count = input.shape[0]
    if offsets is not None:
        if offsets.ndim != 1 or not offsets.shape[0]:
            return None
        ins[offsets] = (WHOLE,)
        count = offsets.shape[0] - include_last_offset
    if per_sample_weights is not None:
        ins[per_sample_weights] = bags
    sums = mode in ("sum", "mean")
    whole = set() if sums else {"l"}  # ids are few bytes
    if not sums and weight.shape[0] <= _TOLD * count:
        whole.add("v")
    factors = [a for a in (weight, per_sample_weights) if sums and a is not None]
    if scale_grad_by_freq:  # counts of ids are over all of them
        whole |= {"v", "l", "b"}
    padding = padding_idx
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    at, table = input.index, weight.index

    def local(ctx: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given: dict[str, Any] = dict(zip(_BAG_NAMES, args)) | kwargs | {"sparse": False}
        if not ctx.axes.keys() & {"v", "l"}:
            return F.embedding_bag(input, weight, **given)
        if not sums:
            at_each_run("check ids", _check_ids, input, ctx.ins[table].shape[0])
            return _greatest(ctx, input, weight, given, ctx.start(table, 0), padding)
        at_each_run("check ids", _check_ids, input, ctx.ins[table].shape[0])
        ids, shares = input.reshape(-1), given.get("per_sample_weights")
        bounds = _bounds(input, given, ctx.start(at, 0) if input.ndim == 1 else 0)
        near = ids - ctx.start(table, 0)
        real = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
        mine = real & (near >= 0) & (near < weight.shape[0])
        out = F.embedding_bag(  # ids that other ranks hold are left out, not multiplied by zero
            near[mine],
            weight,
            _number_before(mine)[bounds],
            mode="sum",
            per_sample_weights=None if shares is None else shares.reshape(-1)[mine],
            include_last_offset=True,
        )
        if mode == "sum":
            return out
        number = _number_before(real)[bounds].diff().unsqueeze(1)
        if "l" in ctx.axes:
            number = ctx.group("l").reduce(number, "sum")
        return out / number.clamp(min=1)

    return Rule(
        ins,
        ((bag, "d"),),
        reduce={} if sums else {"v": "none"},
        whole=frozenset(whole),
        special=frozenset({"v", "l"}),
        linear=tuple(frozenset([a]) for a in factors),
        local=local,
        always_local=sparse,
        out_shapes=((count, weight.shape[1]),),
    )


_TOLD = 3  # numbers that the ranks tell each other for one of the result: the greatest, whether NaN, its place


def _greatest(
    ctx: Any, ids: Tensor, table: Tensor, given: dict[str, Any], start: int, padding: int | None
) -> Tensor:
    """The greatest of each bag, of rows that several ranks hold; its gradient goes to the first that attains it.

    A NaN counts only where it is the first of its bag, as in torch's kernel.
    """
    group, begins = ctx.group("v"), _bounds(ids, given, 0)[:-1]
    count, width, ids = len(begins), table.shape[1], ids.reshape(-1)
    place = torch.arange(len(ids), device=ids.device)
    # The last bag ends with the ids, whatever a last offset says: so does torch's kernel of maxima.
    bag = torch.searchsorted(begins, place, right=True) - 1
    real = bag >= 0
    if padding is not None:
        real = real & (ids != padding)
    never = len(ids)
    first = place.new_full((count,), never).scatter_reduce(0, bag[real], place[real], "amin")
    mine = real & (ids >= start) & (ids < start + table.shape[0])
    rows = table.index_select(0, ids[mine] - start)
    bag, place = bag[mine], place[mine].unsqueeze(1)
    to, values = bag.unsqueeze(1).expand(-1, width), rows.detach()
    nan = values.isnan()
    counts = nan & (place == first[bag].unsqueeze(1))
    lowest = values.new_full((count, width), -math.inf)
    own = lowest.scatter_reduce(0, to, values.masked_fill(nan, -math.inf), "amax")
    poisoned = torch.zeros_like(lowest).scatter_reduce(0, to, counts.to(values.dtype), "amax")
    best, poisoned = group.reduce(torch.stack((own, poisoned)), "max").unbind()
    hits = torch.where(poisoned[bag] > 0, counts, (values == best[bag]) & ~nan)
    at = place.new_full((count, width), never)
    at = at.scatter_reduce(0, to, place.where(hits, place.new_tensor(never)), "amin")
    picked = hits & (place == group.reduce(at, "min")[bag])
    value = torch.where(poisoned > 0, math.nan, best)
    value = torch.where(first.unsqueeze(1) == never, torch.zeros_like(value), value)
    part = torch.where(picked, rows, torch.zeros_like(rows))
    part = table.new_zeros(count, width).index_add(0, bag, part)
    return group.settle(part, value)


def _bounds(input: Tensor, given: dict[str, Any], start: int) -> Tensor:
    """Where bags begin in this rank's ids, laid end to end, and where the last one ends."""
    offsets, n = given.get("offsets"), input.numel()
    if offsets is None:
        return torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
    if not given.get("include_last_offset", False):
        offsets = torch.cat((offsets, offsets.new_full((1,), start + n)))
    return (offsets - start).clamp(0, n)


def _number_before(mask: Tensor) -> Tensor:
    """How many are hit before each place, and in all."""
    return torch.cat((mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)))


_BAG_NAMES = (
    "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
    "include_last_offset", "padding_idx",
)  # fmt: skip
