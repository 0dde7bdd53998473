"""Elements moved, dropped or added by their place: triangles, flips, rolls, padding, diagonals, one-hot rows.

A dim whose order changes must be whole; triangles know where a piece begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.rules.notation import WHOLE, Arg, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.view import one_dim, some_dims, view_of

_T = torch.Tensor


def kept_whole(
    x: Arg, dims: Sequence[int], shape: Sequence[int] | None = None, *, linear: bool = True
) -> Rule:
    """The rule of an op that works on ``dims``, which must be whole, and leaves the others as they are."""
    names = tuple(WHOLE if d in dims else f"d{d}" for d in range(x.ndim))
    out = tuple(x.shape if shape is None else shape)
    return Rule(
        {x: names}, (names,), linear=(frozenset([x]),) if linear else (), out_shapes=(out,)
    )


# -- triangles -------------------------------------------------------------------------------------
def triangle(input: Any, diagonal: Any = 0) -> Rule | None:
    """A triangle of matrices, zeros in the other: by global rows and columns."""
    if input.ndim < 2 or type(diagonal) is not int:
        return None
    names = numbered("d", input.ndim)

    def localize(
        ctx: Any, x: Any, *_: Any, **__: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        row, column = ctx.ins[0].offsets[-2:]
        return (x, diagonal + row - column), {}

    cut = any(input.layout.dims[-2:])
    return Rule(
        {input: names},
        (names,),
        linear=(frozenset([input]),),
        localize=localize if cut else None,
    )


for _name in ("tril", "triu"):
    rule(_name, f"aten.{_name}")(triangle)
    rule(getattr(_T, f"{_name}_"), f"aten.{_name}_", inplace=True)(triangle)


# -- other orders of rows --------------------------------------------------------------------------
@rule("flip", "aten.flip")
def flip(input: Arg, *dims: Any, **kwargs: Any) -> Rule | None:
    """Dims reversed."""
    given = dims or tuple(kwargs.values())
    whole = some_dims(given[0] if len(given) == 1 else given, input.ndim)
    return None if whole is None else kept_whole(input, whole)


@rule("fliplr")
def fliplr(input: Arg) -> Rule | None:
    """The second dim reversed."""
    return kept_whole(input, (1,)) if input.ndim >= 2 else None


@rule("flipud")
def flipud(input: Arg) -> Rule | None:
    """The first dim reversed."""
    return kept_whole(input, (0,)) if input.ndim else None


@rule("roll", "aten.roll")
def roll(input: Arg, shifts: Any = None, dims: Any = None) -> Rule | None:
    """Rows moved along, those that leave the end coming in at the front; without dims, over all elements."""
    if dims is None or dims == () or dims == []:
        return kept_whole(input, range(input.ndim))
    whole = some_dims(dims, input.ndim)
    return None if whole is None else kept_whole(input, whole)


@rule("rot90")
def rot90(input: Arg, k: Any = 1, dims: Any = (0, 1)) -> Rule | None:
    """A plane turned by quarters."""
    plane = some_dims(dims, input.ndim)
    if plane is None or len(plane) != 2 or type(k) is not int:
        return None
    shape, strides = list(input.shape), None
    if k % 2:
        a, b = plane
        shape[a], shape[b] = shape[b], shape[a]
        strides = list(input.layout.stride)  # flipped, then transposed
        strides[a], strides[b] = strides[b], strides[a]
    made = kept_whole(input, plane, shape)
    return made if strides is None else replace(made, out_strides=(tuple(strides),))


@rule("repeat_interleave")
def repeat_interleave(
    input: Arg, repeats: Any, dim: Any = None, *, output_size: Any = None
) -> Rule | None:
    """Each row several times. A sharded dim stays so where its pieces are equally long."""
    if type(repeats) is not int or repeats < 1 or output_size is not None:
        return None
    if dim is None:
        numel = input.layout.numel
        ins = ("d0", *[WHOLE] * (input.ndim - 1)) if input.ndim else ()
        first = input.shape[0] if input.ndim else 1
        return view_of(
            input,
            ins,
            ins[:1] or (WHOLE,),
            (numel * repeats,),
            divides={"d0": first},
            view=False,
        )
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim:
        return None
    names = numbered("d", input.ndim)
    shape = (*input.shape[:at], input.shape[at] * repeats, *input.shape[at + 1 :])
    return view_of(input, names, names, shape, divides={names[at]: input.shape[at]}, view=False)


# -- more elements ---------------------------------------------------------------------------------
@rule("pad", "aten.pad")
def pad(input: Arg, pad: Any, mode: str = "constant", value: Any = None) -> Rule | None:
    """More elements at the ends of some dims, which must be whole."""
    if (
        not isinstance(pad, (tuple, list))
        or len(pad) % 2
        or not all(type(n) is int for n in pad)
    ):
        return None
    dims = len(pad) // 2
    if dims > input.ndim:
        return None
    shape = list(input.shape)
    whole: list[int] = []
    for k in range(dims):
        d = input.ndim - 1 - k
        before, after = pad[2 * k : 2 * k + 2]
        shape[d] += before + after
        if before or after or mode != "constant":
            whole.append(d)
    if any(n < 0 for n in shape):
        return None
    if mode != "constant" and (input.layout.has_empty() or 0 in shape):
        return None  # some of these kernels refuse an empty piece
    return kept_whole(input, whole, shape, linear=mode != "constant" or not value)


@rule("aten.constant_pad_nd")
def constant_pad_nd(input: Arg, pad_: Any, value: Any = 0) -> Rule | None:
    """Constants at the ends of some dims."""
    return pad(input, pad_, "constant", value)


@rule("diag_embed", "aten.diag_embed")
def diag_embed(input: Arg, offset: Any = 0, dim1: Any = -2, dim2: Any = -1) -> Rule | None:
    """Vectors, which must be whole, as diagonals of matrices."""
    a, b = one_dim(dim1, input.ndim + 1), one_dim(dim2, input.ndim + 1)
    if a is None or b is None or a == b or not input.ndim or type(offset) is not int:
        return None
    n = input.shape[-1] + abs(offset)
    batch = iter(range(input.ndim - 1))
    out = [WHOLE if d in (a, b) else f"d{next(batch)}" for d in range(input.ndim + 1)]
    shape = [n if name == WHOLE else input.shape[int(name[1:])] for name in out]
    return view_of(
        input, (*numbered("d", input.ndim - 1), WHOLE), tuple(out), shape, view=False
    )


@rule("diag", "aten.diag")
def diag(input: Arg, diagonal: Any = 0) -> Rule | None:
    """A vector as a diagonal, or the diagonal of a matrix; whole."""
    if input.ndim not in (1, 2) or type(diagonal) is not int:
        return None
    if input.ndim == 1:
        n = input.shape[0] + abs(diagonal)
        return view_of(input, (WHOLE,), (WHOLE, WHOLE), (n, n), view=False)
    rows, columns = input.shape
    n = max(
        0, min(rows, columns - diagonal) if diagonal >= 0 else min(rows + diagonal, columns)
    )
    return view_of(input, (WHOLE, WHOLE), (WHOLE,), (n,), view=False)


@rule("one_hot")
def one_hot(tensor: Arg, num_classes: Any = -1) -> Rule | None:
    """A row with a single one for each class number; their count must be given."""
    if type(num_classes) is not int or num_classes < 1:
        return None
    names = numbered("d", tensor.ndim)
    return Rule({tensor: names}, ((*names, WHOLE),), out_shapes=((*tensor.shape, num_classes),))
