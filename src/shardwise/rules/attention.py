"""Scaled dot product attention: batch, heads and queries are cut without communication.

Keys and values are whole for every query. Where queries are cut and the mask is causal, the piece knows where
it starts; where query heads are cut finer than key heads, each rank picks the key heads it needs. Dropout is
taken out of the kernel, so that its mask comes from the random stream in force.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.layout import boxes
from shardwise.layout.boxes import restride
from shardwise.layout.cut import plain
from shardwise.random import dropout_mask
from shardwise.rules.notation import (
    ONE,
    WHOLE,
    Arg,
    Labels,
    Rule,
    aligned,
    numbered,
    some_empty,
)
from shardwise.rules.registry import rule


@rule("scaled_dot_product_attention", "aten.scaled_dot_product_attention.default")
def scaled_dot_product_attention(
    query: Arg,
    key: Arg,
    value: Arg,
    attn_mask: Arg | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule | None:
    """``b h l [e], b h [s] [e], b h [s] f -> b h l f``."""
    if not query.ndim == key.ndim == value.ndim >= 2 or (is_causal and attn_mask is not None):
        return None
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        return None
    lead = (*numbered("b", query.ndim - 3), "h")[: query.ndim - 2]
    grouped = enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3]
    if grouped and (key.shape[-3] != value.shape[-3] or key.shape[-3] < 2):
        grouped = False  # one key head serves any heads; other cases are torch's to refuse
        if not key.shape[-3] == value.shape[-3] == 1:
            return None
    even = grouped and key.shape[-3] % _head_shards(query, key, value) == 0
    alike = grouped and not even and _groups_whole(query, key, value)
    picks = grouped and not even and not alike
    ins = {
        query: (*aligned_lead(query, lead), "l", WHOLE),
        key: (*_key_lead(key, lead, picks), WHOLE, WHOLE),
        value: (*_key_lead(value, lead, picks), WHOLE, "f"),
    }
    shape = _result_shape(query, key, value, grouped)
    if shape is None:
        return None
    if attn_mask is not None:
        if attn_mask.ndim > query.ndim or any(
            n not in (1, want)
            for n, want in zip(attn_mask.shape[::-1], (key.shape[-2], *shape[-2::-1]))
        ):
            return None
        ins[attn_mask] = aligned(attn_mask, (*lead, "l", WHOLE))  # pyright: ignore[reportArgumentType]
    special = {"l"} if is_causal else set()
    local = _Local(
        query.index, query.ndim, picks, query.shape[-3] // key.shape[-3] if grouped else 1
    )
    return Rule(
        ins,
        ((*lead, "l", "f"),),
        special=frozenset(special | ({"h"} if picks else set())),
        divides={"h": key.shape[-3]} if grouped and not picks else {},
        scaled=frozenset("h") if alike else frozenset(),
        linear=(frozenset([value]),) if value not in (query, key, attn_mask) else (),
        local=local,
        always_local=dropout_p > 0 or some_empty(ins),
        out_shapes=(shape,),
        out_strides=(_strides(query, key, value, attn_mask, dropout_p, shape, grouped),),
    )


def aligned_lead(arg: Arg, lead: Labels) -> Labels:
    """Labels of the batch and head dims; those of size one broadcast."""
    return tuple(ONE if n == 1 else name for n, name in zip(arg.shape, lead))


def _key_lead(arg: Arg, lead: Labels, picks: bool) -> Labels:
    names = aligned_lead(arg, lead)
    return (*names[:-1], WHOLE) if picks else names


def _head_shards(*args: Arg) -> int:
    """Into how many pieces the heads may be cut: over all axes that cut them somewhere."""
    axes = {a for arg in args for a in arg.layout.dims[arg.ndim - 3]}
    return math.prod(args[0].layout.mesh.shape[a] for a in axes)


def _groups_whole(query: Arg, *others: Arg) -> bool:
    """Whether query heads are cut between groups, just as the heads of keys and values are, in any sizes."""
    ranks, d = query.layout.mesh.shape, query.ndim - 3
    mine = boxes.pieces(query.shape[d], query.layout.dims[d], ranks)
    for other in others:
        group = query.shape[d] // max(1, other.shape[d])
        theirs = boxes.pieces(other.shape[d], other.layout.dims[d], ranks)
        if plain(query.layout.dims[d]) != plain(other.layout.dims[d]):
            return False
        if [n for _, n in mine] != [group * n for _, n in theirs]:
            return False
    return True


def _result_shape(query: Arg, key: Arg, value: Arg, grouped: bool) -> tuple[int, ...] | None:
    leads = [a.shape[:-2] for a in (query, key, value)]
    if grouped:
        leads = [leads[0], *((*lead[:-1], 1) for lead in leads[1:])]
    wide = [max(sizes) if 0 not in sizes else 0 for sizes in zip(*leads)]
    if any(n not in (1, w) for lead in leads for n, w in zip(lead, wide)):
        return None
    return (*wide, query.shape[-2], value.shape[-1])


def _strides(
    query: Arg,
    key: Arg,
    value: Arg,
    mask: Arg | None,
    dropout_p: float,
    shape: tuple[int, ...],
    grouped: bool,
) -> tuple[int, ...] | None:
    """The fused kernels return the stride order of the query; the plain one is row-major."""
    fused = (
        query.ndim == 4
        and dropout_p == 0
        and key.shape == value.shape
        and shape == query.shape
        and (grouped or key.shape[:2] == query.shape[:2])
        and all(a.layout.stride[-1] == 1 for a in (query, key, value))
        and (mask is None or (mask.ndim in (2, 4) and not mask.requires_grad))
    )
    return (
        restride(shape, query.layout.stride)
        if fused and not query.layout.is_contiguous
        else None
    )


class _Local:
    """The local program of one call.

    Attributes:
        query: Position of the query among the tensor arguments.
        ndim: Its number of dims.
        picks: Whether key heads are whole, and each rank picks those of its query heads.
        group: Query heads for each key head.
    """

    __slots__ = ("group", "ndim", "picks", "query")

    def __init__(self, query: int, ndim: int, picks: bool, group: int) -> None:
        self.query, self.ndim, self.picks, self.group = query, ndim, picks, group

    def __call__(
        self,
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of the queries and heads that are here."""
        if self.picks and "h" in ctx.axes:
            heads = torch.arange(query.shape[-3], device=query.device) + ctx.start(
                self.query, self.ndim - 3
            )
            heads = heads // self.group
            key, value, enable_gqa = (
                key.index_select(-3, heads),
                value.index_select(-3, heads),
                False,
            )
        start = ctx.start(self.query, self.ndim - 2)
        if is_causal and start > 0:
            seen = min(key.shape[-2], start + query.shape[-2])  # no query here sees more
            key, value = key[..., :seen, :], value[..., :seen, :]
            attn_mask, is_causal = _causal(query, key, start), False
        if dropout_p == 0 and 0 in (query.numel(), key.numel(), value.numel()):
            return _empty(query, key, value, attn_mask)
        if dropout_p == 0:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if is_causal:
            attn_mask = _causal(query, key, start)
        if enable_gqa:
            group = query.shape[-3] // max(key.shape[-3], 1)
            key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
        shape = (*ctx.outs[0].shape[:-1], ctx.ins[self.query + 1].shape[-2])
        offsets, sizes = (
            (*ctx.outs[0].offsets[:-1], 0),
            (*ctx.outs[0].local_shape[:-1], key.shape[-2]),
        )
        dtype = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
        mask = dropout_mask(shape, offsets, sizes, dtype, query.device, dropout_p)
        return _plain(query, key, value, attn_mask, scale, mask)


def _empty(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention where a piece is empty: torch's kernels would give the mask no gradient, and its ranks wait."""
    if key.ndim > 2 and key.shape[-3] != query.shape[-3] and key.shape[-3] > 1:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = query @ key.transpose(-2, -1)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    return (scores.softmax(-1) @ value).to(query.dtype)


def _causal(query: Tensor, key: Tensor, start: int) -> Tensor:
    rows = torch.arange(query.shape[-2], device=query.device) + start
    return rows.unsqueeze(1) >= torch.arange(key.shape[-2], device=query.device)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropped: Tensor,
) -> Tensor:
    """The textbook form, rounded as torch's; halves are computed as floats."""
    dtype = query.dtype
    query, key, value = (x.to(dropped.dtype) for x in (query, key, value))
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    sign = -1.0 if scale is not None and scale < 0 else 1.0
    scores = (query * (root * sign)) @ (key.transpose(-2, -1) * root)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    return ((weights * dropped) @ value).to(dtype)
