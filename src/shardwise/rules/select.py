"""The element of a given rank along a sharded dim, found by counting: no rank gathers the rest.

Numbers are compared as integers in the same order. Digit by digit, from the highest, every rank counts how many
of its elements lie below each candidate, and the counts are added up; so after as many small all_reduces as
the number has digits all ranks know it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.route.search import LATENCY_BYTES
from shardwise.rules.notation import Arg

_BITS = {
    torch.float64: 64,
    torch.int64: 64,
    torch.float32: 32,
    torch.int32: 32,
    torch.int16: 16,
    torch.int8: 8,
    torch.uint8: 8,
}
_INTS = {torch.float64: torch.int64, torch.float32: torch.int32}


def digit_bits(x: Arg, rows: int) -> int | None:
    """How many bits a digit shall have to move least for so many rows; None if a gather moves less."""
    if x.dtype not in _BITS or not 0 < x.layout.numel < 2**31:
        return None
    bits = _BITS[x.dtype]
    costs = {b: bits // b * (LATENCY_BYTES + 8 * rows * (2**b - 1)) for b in (4, 8)}
    best = min(costs, key=costs.__getitem__)
    gather = LATENCY_BYTES + x.layout.numel * x.dtype.itemsize
    return best if costs[best] < gather else None


def _keys(x: Tensor) -> Tensor:
    """Integers in the order of the elements; NaN comes last, zeros of both signs are one."""
    if x.dtype not in _INTS:
        return x.to(torch.int64)
    x = torch.where(x.isnan(), math.nan, x) + 0.0
    bits = x.contiguous().view(_INTS[x.dtype]).to(torch.int64)
    return torch.where(bits < 0, bits ^ _most(x.dtype), bits)


def _values(keys: Tensor, dtype: Any) -> Tensor:
    if dtype not in _INTS:
        return keys.to(dtype)
    bits = torch.where(keys < 0, keys ^ _most(dtype), keys)
    return bits.to(_INTS[dtype]).view(dtype)


def _most(dtype: Any) -> int:
    return 2 ** (_BITS[dtype] - 1) - 1


def of_rank(group: Any, x: Tensor, ranks: Tensor, bits: int) -> Tensor:
    """For rows of pieces ``x [..., n]`` and ranks ``[..., m]`` (from 0) the elements, without a gradient.

    Args:
        group: The ranks that hold pieces of a row.
        x: This rank's piece, the sharded dim last.
        ranks: Which elements, counted in ascending order over all pieces; NaNs are greatest.
        bits: Of a digit.
    """
    keys = _keys(x.detach()).sort(-1).values
    most = 2 ** (_BITS[x.dtype] - 1)
    low = torch.full_like(ranks, 0 if x.dtype is torch.uint8 else -most)
    steps = torch.arange(1, 2**bits, device=x.device)
    for shift in range(_BITS[x.dtype] - bits, -1, -bits):
        edges = low.unsqueeze(-1) + (steps << shift)
        below = torch.searchsorted(keys, edges.flatten(-2), out_int32=True).view(edges.shape)
        below = group.reduce(below, "sum")
        low = low + ((below <= ranks.unsqueeze(-1)).sum(-1) << shift)
    return _values(low, x.dtype)
