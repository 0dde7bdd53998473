"""Ops that have one rule and no relatives: gated units, grids, coordinates."""

from __future__ import annotations

import math
from typing import Any

from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.pointwise import tensor_operands
from shardwise.rules.registry import rule
from shardwise.rules.view import one_dim


def _but(ndim: int, *whole: int) -> Labels:
    """A label per dim, the given dims whole."""
    return tuple(WHOLE if d in whole else f"d{d}" for d in range(ndim))


@rule("glu", "aten.glu.default")
def glu(input: Arg, dim: Any = -1) -> Rule | None:
    """One half of a dim gated by the other: the dim is whole."""
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim or input.shape[at] % 2:
        return None
    names = _but(input.ndim, at)
    shape = (*input.shape[:at], input.shape[at] // 2, *input.shape[at + 1 :])
    return Rule({input: names}, (names,), out_shapes=(shape,))


@rule("unravel_index")
def unravel_index(indices: Arg, shape: Any) -> Rule | None:
    """Coordinates of flat indices, each on its own."""
    sizes = (shape,) if type(shape) is int else shape
    if not isinstance(sizes, (tuple, list)) or not all(type(n) is int for n in sizes):
        return None
    names = numbered("d", indices.ndim)
    return Rule(
        {indices: names}, (names,) * len(sizes), out_shapes=(indices.shape,) * len(sizes)
    )


@rule("meshgrid")
def meshgrid(*tensors: Any, indexing: Any = None) -> Rule | None:
    """Each vector spread over the dims of all others; cut as the vectors are."""
    vectors = tensor_operands(tensors)
    if indexing not in (None, "ij", "xy") or any(v.ndim > 1 for v in vectors):
        return None
    if len(vectors) != len({id(v) for v in vectors}):
        return None
    order = list(range(len(vectors)))
    if indexing == "xy" and len(vectors) > 1:
        order[0], order[1] = 1, 0
    shape = tuple(vectors[i].layout.numel for i in order)
    names = tuple(f"d{i}" if vectors[i].ndim else ONE for i in order)
    ins = {v: (f"d{i}",) if v.ndim else () for i, v in enumerate(vectors)}
    return Rule(ins, (names,) * len(vectors), out_shapes=(shape,) * len(vectors))


@rule("_softmax_backward_data", "aten._softmax_backward_data.default")
def softmax_backward(
    grad_output: Arg, output: Arg, dim: Any, input_dtype: Any = None
) -> Rule | None:
    """The derivative of a softmax along a whole dim; linear in the gradient that arrives."""
    at = one_dim(dim, output.ndim)
    if at is None or grad_output.shape != output.shape:
        return None
    names = _but(output.ndim, at) if output.ndim else ()
    return Rule(
        {grad_output: names, output: names}, (names,), linear=(frozenset([grad_output]),)
    )


@rule("combinations", "aten.combinations")
def combinations(input: Arg, r: Any = 2, with_replacement: bool = False) -> Rule | None:
    """Every choice of ``r`` elements of a vector, which is whole unless they are taken one by one."""
    if input.ndim != 1 or type(r) is not int or r < 1:
        return None
    n = input.shape[0]
    rows = math.comb(n + r - 1, r) if with_replacement and n else math.comb(n, r)
    name = "d0" if r == 1 else WHOLE
    return Rule(
        {input: (name,)},
        ((name, WHOLE),),
        linear=(frozenset([input]),),
        out_shapes=((rows, r),),
    )


@rule("prelu", "aten.prelu")
def prelu(input: Arg, weight: Arg) -> Rule | None:
    """A slope below zero, for all or for each channel, which is dim 1."""
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.layout.numel not in (1, channels):
        return None
    names = numbered("d", input.ndim)
    alone = weight.layout.numel == 1
    slope = (ONE,) * weight.ndim if alone else names[1:2]
    return Rule({input: names, weight: slope}, (names,))
