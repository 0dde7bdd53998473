"""Elements moved, dropped or added by their place: triangles, flips, rolls, padding, diagonals, one-hot rows.

Over a sharded dim a rank fetches the rows that its piece of the result is made of; triangles know where a
piece begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.rules.found import repeated_each, repeated_numbers
from shardwise.rules.notation import WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.rowmap import RowMap, fetched, mapped, padding, reversed_, rolled
from shardwise.rules.view import ints, one_dim, some_dims, view_of

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
def _reversed(x: Arg, dims: Sequence[int]) -> Rule:
    return mapped(x, {d: reversed_(x.shape[d]) for d in dims})


@rule("flip", "aten.flip")
def flip(input: Arg, *dims: Any, **kwargs: Any) -> Rule | None:
    """Dims reversed."""
    given = dims or tuple(kwargs.values())
    whole = some_dims(given[0] if len(given) == 1 else given, input.ndim)
    if whole is None or len(set(whole)) != len(whole) or not input.ndim:
        return None
    return _reversed(input, whole)


@rule("fliplr")
def fliplr(input: Arg) -> Rule | None:
    """The second dim reversed."""
    return _reversed(input, (1,)) if input.ndim >= 2 else None


@rule("flipud")
def flipud(input: Arg) -> Rule | None:
    """The first dim reversed."""
    return _reversed(input, (0,)) if input.ndim else None


@rule("roll", "aten.roll")
def roll(input: Arg, shifts: Any = None, dims: Any = None) -> Rule | None:
    """Rows moved along, those that leave the end coming in at the front; without dims, over all elements."""
    if dims is None or dims == () or dims == []:
        return _rolled_flat(input, ints((shifts,)))
    along, by = some_dims(dims, input.ndim), ints((shifts,))
    if along is None or by is None or len(along) != len(by) or not input.ndim:
        return None
    total = dict.fromkeys(along, 0)
    for d, n in zip(along, by):
        total[d] += n
    return mapped(input, {d: rolled(n, input.shape[d]) for d, n in total.items()})


def _rolled_flat(x: Arg, shifts: tuple[int, ...] | None) -> Rule | None:
    """Over all elements: whole rows of the first dim move, and what is left over goes on to the next row."""
    if shifts is None or len(shifts) != 1:
        return None
    if x.ndim == 1:
        return mapped(x, {0: rolled(shifts[0], x.shape[0])})
    made = kept_whole(x, range(x.ndim))
    if not x.ndim or 0 in x.shape or any(x.layout.dims[1:]):
        return made
    rows, left = divmod(shifts[0], math.prod(x.shape[1:]))
    n = x.shape[0]

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        near = fetched(ctx, x, 0, rolled(rows, n), key="near")
        if not left:
            return near
        flat = near.flatten(1)
        far = fetched(ctx, x, 0, rolled(rows + 1, n), key="far").flatten(1)
        cut = flat.shape[1] - left
        return torch.cat((far[:, cut:], flat[:, :cut]), 1).view(near.shape)

    names = ("d0", *[WHOLE] * (x.ndim - 1))
    return replace(made, ins={x: names}, outs=(names,), special=frozenset(("d0",)), local=local)


@rule("rot90")
def rot90(input: Arg, k: Any = 1, dims: Any = (0, 1)) -> Rule | None:
    """A plane turned by quarters: reversed and transposed."""
    plane = some_dims(dims, input.ndim)
    if plane is None or len(plane) != 2 or plane[0] == plane[1] or type(k) is not int:
        return None
    a, b = plane
    k %= 4
    turned = ((), (b,), (a, b), (a,))[k]
    if k % 2 == 0:
        return _reversed(input, turned)
    names = numbered("d", input.ndim)

    def swap(given: Sequence[Any]) -> tuple[Any, ...]:
        out = list(given)
        out[a], out[b] = out[b], out[a]
        return tuple(out)

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        (d,) = turned
        x = fetched(ctx, x, d, reversed_(input.shape[d]), out_dim=a if d == b else b)
        return x.transpose(a, b)

    return Rule(
        {input: names},
        (swap(names),),
        special=frozenset(names[d] for d in turned),
        linear=(frozenset([input]),),
        local=local,
        out_shapes=(swap(input.shape),),
        out_strides=(swap(input.layout.stride),),
    )


@rule("repeat_interleave")
def repeat_interleave(
    input: Any = None, repeats: Any = None, dim: Any = None, *, output_size: Any = None
) -> Rule | None:
    """Each row several times."""
    if repeats is None or not isinstance(input, Arg):
        return repeated_numbers(repeats if input is None else input, output_size)
    if isinstance(repeats, Arg):
        return repeated_each(input, repeats, dim, output_size)
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
            scaled=frozenset(["d0"]),
            view=False,
        )
    at = one_dim(dim, input.ndim)
    if at is None or not input.ndim:
        return None
    shape = (*input.shape[:at], input.shape[at] * repeats, *input.shape[at + 1 :])
    names = numbered("d", input.ndim)
    if input.layout.is_even_dim(at):
        return view_of(input, names, names, shape, view=False)
    divides = {names[at]: input.shape[at]}
    scaled = frozenset([names[at]])  # each row is repeated where it is
    return view_of(input, names, names, shape, divides=divides, scaled=scaled, view=False)


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
    maps: dict[int, RowMap] = {}
    for k in range(dims):
        d, n = input.ndim - 1 - k, shape[input.ndim - 1 - k]
        before, after = pad[2 * k : 2 * k + 2]
        shape[d] += before + after
        if (
            mode != "constant"
            and max(before, after) > (n - (mode == "reflect"))
            and mode != "replicate"
        ):
            return None  # torch refuses
        if before or after:
            maps[d] = padding(before, n, mode)
    if any(n < 0 for n in shape) or mode not in (
        "constant",
        "reflect",
        "replicate",
        "circular",
    ):
        return None
    if mode == "constant":
        fill = 0 if value is None else value
        return mapped(input, maps, shape, fill=fill, linear=not fill)
    if 0 in shape or 0 in input.shape or not 1 <= dims <= 3 or input.ndim - dims not in (1, 2):
        return None  # torch says what it takes
    made = mapped(input, maps, shape)
    empty = input.layout.has_empty()  # some of these kernels refuse an empty piece
    return replace(made, always_local=empty)


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
    """A row with a single one for each class number; where their count is not given, the greatest is found."""
    if type(num_classes) is not int or not (num_classes >= 1 or num_classes == -1):
        return None
    names = numbered("d", tensor.ndim)
    if num_classes == -1:
        if tensor.dtype is not torch.int64 or not tensor.layout.numel:
            return None  # torch says what it takes
        return Rule(
            {tensor: names},
            ((*names, WHOLE),),
            local=partial(_as_many_classes, names),
            always_local=True,
            out_shapes=((*tensor.shape, None),),
        )
    return Rule({tensor: names}, ((*names, WHOLE),), out_shapes=((*tensor.shape, num_classes),))


def _as_many_classes(names: Labels, ctx: Any, tensor: Tensor, num_classes: Any = -1) -> Tensor:
    """One-hot rows as long as the greatest number of all ranks asks for."""
    ends = tensor.new_full((2,), -1)  # of the greatest, and of what is left of zero
    if tensor.numel():
        ends = torch.stack((tensor.max(), -tensor.min()))
    most, below = ctx.group(*names).reduce(ends, "max").tolist()
    if below > 0:  # torch says so, on all ranks
        F.one_hot(torch.tensor([-1]))
    return F.one_hot(tensor, most + 1)
