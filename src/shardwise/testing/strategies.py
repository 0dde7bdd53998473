"""Hypothesis strategies for meshes, shapes and layouts, for laws of your own (needs ``hypothesis``).

```python
@given(layouts())
def test_boxes_tile(layout): ...
```
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
import math
from typing import Any

from hypothesis import strategies as st
import torch

from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.cut import cut
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh

MESH_SHAPES: tuple[tuple[int, ...], ...] = (
    (4,),
    (2, 2),
    (2, 3),
    (2, 2, 2),
    (3,),
    (1, 4),
    (2, 1, 3),
    (1,),
)


def mesh_of(shape: Sequence[int]) -> Mesh:
    """A CPU mesh over ranks 0, 1, ... with axes ``a``, ``b``, ..."""
    return Mesh.of(
        "cpu", tuple(shape), tuple(range(math.prod(shape))), tuple("abcdef"[: len(shape)])
    )


def meshes(shapes: Sequence[tuple[int, ...]] = MESH_SHAPES) -> st.SearchStrategy[Mesh]:
    """Small meshes; axes of size one included."""
    return st.sampled_from([mesh_of(s) for s in shapes])


def shapes(max_ndim: int = 3, max_size: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Tensor shapes: no dims, empty dims, dims that do not divide, dims smaller than an axis."""
    return st.lists(st.integers(0, max_size), max_size=max_ndim).map(tuple)


@st.composite
def strides(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides, of the dims in any memory order."""
    order = draw(st.permutations(range(len(shape))))
    packed = contiguous_stride([shape[d] for d in order])
    out = [0] * len(shape)
    for d, s in zip(order, packed):
        out[d] = s
    return tuple(out)


@st.composite
def placed(
    draw: st.DrawFn, mesh: Mesh, ndim: int, ops: Sequence[str] = ("sum",)
) -> tuple[Any, Any]:
    """Axes per dim, in any order, and pending reductions (of one kind) per axis."""
    dims: list[list[int]] = [[] for _ in range(ndim)]
    partial: list[str | None] = [None] * mesh.ndim
    op = draw(st.sampled_from(ops)) if ops else None
    for axis in draw(st.permutations(range(mesh.ndim))):
        to = draw(st.integers(-2 if op else -1, ndim - 1))
        if to >= 0:
            dims[to].append(axis)
        elif to == -2:
            partial[axis] = op
    return tuple(map(tuple, dims)), tuple(partial)


@st.composite
def sized(draw: st.DrawFn, mesh: Mesh, dims: Any, shape: tuple[int, ...]) -> Any:
    """The same axes, some dims cut at chosen sizes: any that make the dim, empty ones among them."""
    out: list[tuple[int, ...]] = []
    for n, axes in zip(shape, dims):
        ranks = [mesh.shape[a] for a in axes]
        if not axes or not draw(st.booleans()):
            out.append(axes)
            continue
        ends = draw(st.lists(st.integers(0, n), min_size=math.prod(ranks) - 1).map(sorted))
        ends = [0, *ends[: math.prod(ranks) - 1], n]
        out.append(cut(axes, [b - a for a, b in pairwise(ends)], ranks))
    return tuple(out)


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: st.SearchStrategy[Mesh] | None = None,
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    ops: Sequence[str] = ("sum",),
    dtype: torch.dtype = torch.float64,
    permuted: bool = True,
    chosen: bool = False,
) -> Layout:
    """Any layout: uneven, empty, several axes on one dim in any order, pending reductions, permuted strides.

    With ``chosen`` also dims cut at chosen sizes.
    """
    m = draw(meshes() if mesh is None else mesh)
    s = draw(shapes() if shape is None else shape)
    dims, partial = draw(placed(m, len(s), ops))
    if chosen:
        dims = draw(sized(m, dims, s))
    return Layout(
        m, dims, partial, s, draw(strides(s)) if permuted else contiguous_stride(s), dtype
    )


@st.composite
def layout_pairs(
    draw: st.DrawFn,
    ops: Sequence[str] = ("sum",),
    mesh: st.SearchStrategy[Mesh] | None = None,
    chosen: bool = False,
) -> tuple[Layout, Layout]:
    """Two layouts of one tensor between which there is a route.

    A pending sum can be made of anything; another reduction only settled, kept, or made of a replica.
    """
    src = draw(layouts(mesh=mesh, ops=ops, chosen=chosen))
    dims, partial = draw(placed(src.mesh, src.ndim, ("sum",) if not src.is_partial else ops))
    if chosen:
        dims = draw(sized(src.mesh, dims, src.shape))
    pending = {op for op in (*src.partial, *partial) if op}
    if len(pending) > 1:
        partial = tuple(None if op else op for op in partial)
    return src, src.with_placement(dims, partial)


__all__ = [
    "layout_pairs",
    "layouts",
    "mesh_of",
    "meshes",
    "placed",
    "shapes",
    "sized",
    "strides",
]
