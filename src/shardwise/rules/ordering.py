"""Sorting and order statistics: along a whole dim, each rank sorts the rows it has."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.notation import WHOLE, Arg, Rule, aligned, numbered
from shardwise.rules.reduce import dims_of, kept
from shardwise.rules.registry import rule


def _sorted(input: Arg, dim: Any, results: int) -> Rule | None:
    dims = dims_of(input, dim)
    if dim is None or dims is None:
        return None
    names = tuple(WHOLE if d in dims else n for d, n in enumerate(numbered("d", input.ndim)))
    return Rule({input: names}, (names,) * results)


def _one_of(input: Arg, dim: Any, keepdim: bool) -> Rule | None:
    dims = dims_of(input, dim)
    if dim is None or dims is None:
        return None
    names = tuple(WHOLE if d in dims else n for d, n in enumerate(numbered("d", input.ndim)))
    return Rule({input: names}, (kept(names, dims, keepdim),) * 2)


@rule("sort")
def sort(
    input: Arg, dim: Any = -1, descending: bool = False, *, stable: Any = None, **more: Any
) -> Rule | None:
    """Values and indices."""
    return None if more.keys() - {"out"} else _sorted(input, dim, 2)


@rule("aten.sort.default", "aten.sort.stable")
def aten_sort(
    self: Arg, dim: Any = -1, descending: bool = False, *, stable: Any = None
) -> Rule | None:
    """Values and indices."""
    return _sorted(self, dim, 2)


@rule("argsort", "aten.argsort.default", "aten.argsort.stable")
def argsort(
    input: Arg, dim: Any = -1, descending: bool = False, stable: Any = None
) -> Rule | None:
    """Indices."""
    return _sorted(input, dim, 1)


@rule("msort", "aten.msort")
def msort(input: Arg) -> Rule | None:
    """Along the first dim."""
    return _sorted(input, 0, 1) if input.ndim else None


@rule("median", "nanmedian", "aten.median", "aten.nanmedian")
def median(input: Arg, dim: Any = None, keepdim: bool = False, **more: Any) -> Rule | None:
    """Along one dim."""
    return None if more else _one_of(input, dim, keepdim)


@rule("mode", "aten.mode")
def mode(input: Arg, dim: Any = -1, keepdim: bool = False, **more: Any) -> Rule | None:
    """Along one dim."""
    return None if more or 0 in input.shape else _one_of(input, dim, keepdim)


@rule("kthvalue", "aten.kthvalue")
def kthvalue(
    input: Arg, k: int, dim: Any = -1, keepdim: bool = False, **more: Any
) -> Rule | None:
    """Along one dim."""
    return None if more else _one_of(input, dim, keepdim)


@rule("cdist", "aten.cdist", lifts=False)
def cdist(x1: Arg, x2: Arg, p: Any = 2.0, *_: Any, **__: Any) -> Rule | None:
    """``... p m, ... r m -> ... p r``: rows of both may be sharded."""
    if x1.ndim < 2 or x2.ndim < 2 or 0 in x1.shape or 0 in x2.shape:
        return None
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    names = numbered("b", len(batch))
    ins = {
        x1: (*_batch(x1, names), "p", WHOLE),
        x2: (*_batch(x2, names), "r", WHOLE),
    }
    return Rule(ins, ((*names, "p", "r"),), out_shapes=((*batch, x1.shape[-2], x2.shape[-2]),))


def _batch(arg: Arg, names: tuple[str, ...]) -> tuple[str, ...]:
    padded = aligned(arg, (*names, "", ""))
    return padded[: arg.ndim - 2]
