"""``grouped_mm``: rows in groups, each group times a matrix of its own (the experts of a mixture).

```text
   rows m   0 ...... offs[0] ...... offs[1] ...... offs[2]
            | times w[0]  | times w[1]  | times w[2]  |        m k, g k n -> m n
```

Rows may be cut (each rank shifts the offsets), the matrices' columns, what is summed over, and the groups: a
rank then computes the rows of its groups, and the result is a pending sum. torch wants strides of 16 bytes, so
a cut must leave them.

The op's meta kernel knows bfloat16 only; what the real one refuses is left to the ladder, which asks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import Arg, Rule
from shardwise.rules.registry import rule

_STRIDE_BYTES = 16


@rule("grouped_mm", "_grouped_mm", "aten._grouped_mm")
def grouped_mm(
    mat_a: Arg,
    mat_b: Arg,
    offs: Arg | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Rule | None:
    """``m k, g k n -> m n`` with offsets, or ``g m k, g k n -> g m n``."""
    if bias is not None or not _accepted(mat_a, mat_b, offs):
        return None
    parts = {
        "k": mat_a.shape[-1] * mat_a.dtype.itemsize // _STRIDE_BYTES,
        "n": mat_b.shape[-1] * mat_b.dtype.itemsize // _STRIDE_BYTES,
    }
    linear = (frozenset([mat_a]), frozenset([mat_b]))
    if offs is None:
        if mat_a.ndim != 3 or mat_b.ndim != 3:
            return None
        ins = {mat_a: ("g", "m", "k"), mat_b: ("g", "k", "n")}
        return Rule(
            ins,
            (("g", "m", "n"),),
            linear=linear,
            divides=parts,
            out_strides=(None,),
            checked=True,
        )
    if mat_a.ndim != 2 or mat_b.ndim != 3:
        return None
    return Rule(
        {mat_a: ("m", "k"), mat_b: ("g", "k", "n"), offs: (".",)},
        (("m", "n"),),
        linear=linear,
        divides=parts,
        special=frozenset(["m", "g"]),
        local=_pieces,
        out_shapes=((mat_a.shape[0], mat_b.shape[2]),),
        out_strides=(None,),
        checked=True,
    )


def _accepted(mat_a: Arg, mat_b: Arg, offs: Arg | None) -> bool:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if mat_a.dtype not in dtypes or mat_b.dtype is not mat_a.dtype:
        return False
    if min(mat_a.ndim, mat_b.ndim) < 2 or mat_a.shape[-1] != mat_b.shape[-2]:
        return False
    if offs is None:
        return mat_a.shape[0] == mat_b.shape[0] and all(map(_aligned, (mat_a, mat_b)))
    groups = mat_b.shape[0]
    fits = offs.dtype is torch.int32 and offs.shape == (groups,)
    return fits and all(map(_aligned, (mat_a, mat_b)))


def _aligned(mat: Arg) -> bool:
    """One of the last two strides is one, the other a multiple of 16 bytes."""
    size = mat.dtype.itemsize
    last, other = sorted(mat.layout.stride[-2:])
    return last == 1 and other * size % _STRIDE_BYTES == 0


def _pieces(
    ctx: Any, mat_a: Tensor, mat_b: Tensor, offs: Tensor, *_: Any, **more: Any
) -> Tensor:
    rows = mat_a.shape[0]
    ends = (offs - ctx.start(0, 0)).clamp(0, rows).to(offs.dtype)
    if "g" not in ctx.axes:
        return torch.nn.functional.grouped_mm(mat_a, mat_b, offs=ends, **more)
    first, count = ctx.start(1, 0), ctx.ins[1].local_shape[0]
    if count == 0:  # this rank has no group: one of zeros, and no rows
        mat_b = torch.cat([mat_b, mat_b.detach().new_zeros(1, *mat_b.shape[1:])])
    begin = ends[first - 1] if first else ends.new_zeros(())
    mine = ends[first : first + count] - begin if count else ends.new_zeros(1)
    # The rows of this rank's groups come first; torch leaves those after the last group undefined.
    at = torch.arange(rows, device=mat_a.device)
    inside = (at < mine[-1]).unsqueeze(1)
    turned = (at + begin) % max(rows, 1)
    a = mat_a[turned]
    a = torch.where(inside, a, a.new_zeros(()))
    out = torch.nn.functional.grouped_mm(a, mat_b, offs=mine, **more)
    out = torch.where(inside, out, out.new_zeros(()))
    return out[(at - begin) % max(rows, 1)]
