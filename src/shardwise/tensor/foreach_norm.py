"""``torch._foreach_norm``: local norms, settled with one small all_reduce, also of tensors on several meshes.

A norm of order p is a sum of p-th powers, so the pieces' norms are raised to p, added over the ranks that
share the tensor, and rooted; those of order inf are maxima. The result is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Mover, mover
from shardwise.comm.transport import Transport
from shardwise.compat import FOREACH
from shardwise.errors import MeshError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh, join
from shardwise.program.modes import mode
from shardwise.program.spec import Spec, program_tables, spec_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.foreach import is_guarded, move_all, take, transport_of, wrap_all
from shardwise.tensor.overrides import override

NORM, POWSUM = FOREACH["norm"], FOREACH["powsum"]
_LOW = (torch.float16, torch.bfloat16)  # powers of these are taken in float32


@dataclass(slots=True)
class NormPlan:
    """How the norms of one list of layouts are computed.

    Attributes:
        moves: What settles pending reductions; None if there are none.
        parts: (entries, dtype to compute in): one local call each.
        groups: (ranks, entries) that reduce together, and which of the entries count here: of those that
            some of the ranks hold alike, one rank's do.
        layouts: Layouts of the results, None for a plain tensor.
        specs: The results, after the first run.
        fill: Entries with an empty piece here, which stands for the neutral element.
    """

    moves: list[Mover | None] | None = None
    parts: list[tuple[list[int], torch.dtype | None]] = field(default_factory=list)
    groups: list[tuple[tuple[int, ...], list[int], list[bool]]] = field(default_factory=list)
    layouts: list[Layout | None] = field(default_factory=list)
    specs: list[Spec | None] | None = None
    fill: list[int] = field(default_factory=list)


@override(NORM, POWSUM)
def foreach_norm(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Norms (or sums of powers) of the entries of a list, each over the whole of its tensor."""
    return _norms(func, *args, **kwargs)


def _norms(
    func: Any, self: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in self):
        return tuple([_one(func, t, ord, dtype) for t in self])
    list_key, locals_ = take(self)
    transport = transport_of((self,), {})
    table, key = program_tables(transport)[mode()], (func, list_key, float(ord), dtype)
    plan = table.get(key)
    if plan is None:
        if is_guarded(list(self)):
            return tuple([_one(func, t, ord, dtype) for t in self])
        plan = table[key] = _plan(self, float(ord), dtype, transport)
    powers = func is POWSUM
    results = _run(plan, func, locals_, float(ord), dtype, powers, transport)
    if plan.specs is None:
        plan.specs = [
            None if layout is None else spec_of(layout.with_dtype(t.dtype), transport)
            for t, layout in zip(results, plan.layouts)
        ]
    return wrap_all(results, plan.specs)


def _one(func: Any, x: Tensor, ord: float, dtype: torch.dtype | None) -> Tensor:
    if func is NORM:
        return torch.linalg.vector_norm(x, ord, dtype=dtype)
    return (x if dtype is None else x.to(dtype)).abs().pow(ord).sum()


def _plan(
    tensors: Sequence[Tensor], ord: float, dtype: torch.dtype | None, transport: Transport
) -> NormPlan:
    plan = NormPlan()
    moves: list[Mover | None] = [None] * len(tensors)
    parts: dict[Any, list[int]] = {}
    groups: dict[Any, list[tuple[int, Layout]]] = {}
    for i, t in enumerate(tensors):
        compute = dtype
        if not isinstance(t, DTensor):
            plan.layouts.append(None)
        else:
            layout = t._spec.layout
            mesh = layout.mesh
            if layout.is_partial:
                whole = layout.with_placement(layout.dims, (None,) * mesh.ndim)
                moves[i] = mover(layout, whole, transport)
            plan.layouts.append(Layout.of(mesh, None, ()))
            axes = tuple(sorted(a for on_dim in layout.dims for a in on_dim))
            if axes and t._spec.coord is not None:
                if (dtype or layout.dtype) in _LOW:
                    compute = torch.float32
                groups.setdefault(compute or layout.dtype, []).append((i, layout))
                if layout.numel and not t._spec.local_shape.numel():
                    plan.fill.append(i)
        parts.setdefault(compute, []).append(i)
    plan.moves = moves if any(m is not None for m in moves) else None
    plan.parts = [(entries, compute) for compute, entries in parts.items()]
    for entries in groups.values():
        plan.groups += _together(entries, transport)
    return plan


def _together(
    entries: list[tuple[int, Layout]], transport: Transport
) -> list[tuple[tuple[int, ...], list[int], list[bool]]]:
    """One group for all entries where their meshes are slices of one of them; else one per group of ranks."""
    try:
        mesh = join([layout.mesh for _, layout in entries])
    except MeshError:
        parts: dict[Mesh, list[tuple[int, Layout]]] = {}
        for i, layout in entries:
            parts.setdefault(layout.mesh, []).append((i, layout))
        return [group for part in parts.values() for group in _together(part, transport)]
    coord = mesh.coordinate_of(transport.rank)
    assert coord is not None, "a rank on a slice is on the mesh"
    cut = [{a for on_dim in layout.on(mesh).dims for a in on_dim} for _, layout in entries]
    axes = tuple(sorted(set().union(*cut)))
    counts = [all(coord[a] == 0 for a in axes if a not in own) for own in cut]
    return [(mesh.group_ranks(axes, coord), [i for i, _ in entries], counts)]


def _run(
    plan: NormPlan,
    func: Any,
    locals_: list[Tensor],
    ord: float,
    dtype: Any,
    powers: bool,
    transport: Transport,
) -> list[Tensor]:
    kinds = [t.dtype for t in locals_]
    if plan.moves is not None:
        locals_ = move_all(locals_, plan.moves)
    if plan.fill and (ord < 0 or math.isinf(ord)):
        neutral = 0.0 if ord > 0 else math.inf
        locals_ = list(locals_)
        for i in plan.fill:
            locals_[i] = locals_[i].new_full((1,), neutral)
    norms: list[Tensor] = list(locals_)
    for entries, compute in plan.parts:
        got = func([locals_[i] for i in entries], ord, dtype=compute)
        for i, t in zip(entries, got):
            norms[i] = t
    for ranks, entries, counts in plan.groups:
        if len(ranks) > 1:
            stacked = torch.stack([norms[i] for i in entries])
            if not all(counts) and not math.isinf(ord):
                counted = torch.tensor(counts, device=stacked.device)
                stacked = torch.where(counted, stacked, _nothing(ord, powers))
            for i, t in zip(entries, _over(stacked, ranks, ord, powers, transport).unbind(0)):
                norms[i] = t
        for i in entries:
            if (kind := dtype or kinds[i]) in _LOW:
                norms[i] = norms[i].to(kind)
    return norms


def _nothing(ord: float, powers: bool) -> float:
    """The norm that adds nothing to a sum of powers."""
    return 0.0 if powers or ord >= 0 else math.inf


def _over(
    x: Tensor, ranks: tuple[int, ...], ord: float, powers: bool, transport: Transport
) -> Tensor:
    """Norms of pieces to norms of the whole."""
    if powers or ord in (0, 1):
        return transport.all_reduce(x, ranks, "sum")
    if math.isinf(ord):
        return transport.all_reduce(x, ranks, "max" if ord > 0 else "min")
    if ord == 2:
        return transport.all_reduce(x * x, ranks, "sum").sqrt()
    return transport.all_reduce(x.pow(ord), ranks, "sum").pow(1 / ord)
