"""Fused optimizer steps, and the non-finite check of loss scaling.

A fused step is elementwise over each entry: the parameter's layout decides. Gradients and state in
another layout are moved to it, and state that was moved is written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.comm.execute import Mover, mover
from shardwise.comm.transport import Transport
from shardwise.compat import FUSED_STEPS, unscale_and_check
from shardwise.errors import AliasError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.modes import mode
from shardwise.program.spec import program_tables
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.foreach import is_guarded, move_all, take, transport_of
from shardwise.tensor.overrides import override

GRADS = 1  # the list of gradients; a fused step writes to it only where it unscales it


@dataclass(slots=True)
class FusedPlan:
    """How one fused call runs.

    Attributes:
        moves: For each moved list what moves its entries.
        back: For the same lists what moves them back.
        lone: Names of single tensors that are not whole, with the move that makes them so.
        reduce: Groups of ranks, one after the other, that must agree on a flag.
    """

    moves: dict[int, list[Mover | None]] = field(default_factory=dict)
    back: dict[int, list[Mover | None]] = field(default_factory=dict)
    lone: dict[str, Mover] = field(default_factory=dict)
    reduce: list[tuple[int, ...]] = field(default_factory=list)


def _numbers_by_type(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([(name, take(a)[0]) for name, a in kwargs.items()])


def _plan(
    lists: Sequence[Sequence[Any]], kwargs: dict[str, Any], transport: Transport
) -> FusedPlan:
    """Move every list to the settled layout of the first one's entries."""
    plan = FusedPlan()
    if any(is_guarded(entries) for entries in lists):
        raise AliasError(
            "a fused step writes to its tensors, and one of them is a view that needed communication: a copy, "
            "whose base would not be written.",
            tries=["pass the base", "clone() the view"],
        )
    for i, first in enumerate(lists[0]):
        target = _target(first, [entries[i] for entries in lists[1:] if entries])
        if target is None:
            continue
        for at, entries in enumerate(lists):
            t = entries[i] if entries else None
            if not isinstance(t, DTensor):
                continue
            own = t._spec.layout
            if tuple(t.shape) != target.shape:  # a step count
                want = own.replicated()
            else:
                on = own if own.mesh is target.mesh else own.on(target.mesh)
                want = on.with_placement(target.dims, target.partial)
                own = on
            if want is not own:
                plan.moves.setdefault(at, [None] * len(entries))[i] = mover(
                    own, want, transport
                )
                plan.back.setdefault(at, [None] * len(entries))[i] = mover(want, own, transport)
    for name, a in kwargs.items():
        if isinstance(a, DTensor) and not a._spec.layout.is_replicated:
            plan.lone[name] = mover(a._spec.layout, a._spec.layout.replicated(), transport)
    return plan


def _target(first: Any, others: Sequence[Any]) -> Layout | None:
    if isinstance(first, DTensor):
        layout = first._spec.layout
        return layout.with_placement(layout.dims, (None,) * layout.mesh.ndim)
    found = next((t for t in others if isinstance(t, DTensor)), None)
    return None if found is None else found._spec.layout.replicated()


def _run(
    func: Any, plan: FusedPlan, locals_: list[Any], kwargs: dict[str, Any], unwritten: int = -1
) -> None:
    """Run a plan that moves something, then bring back what was moved, but for one list."""
    moved = list(locals_)
    for at, movers in plan.moves.items():
        moved[at] = move_all(locals_[at], movers)
    func(
        *moved,
        **{name: plan.lone[name](a) if name in plan.lone else a for name, a in kwargs.items()},
    )
    for at, movers in plan.back.items():
        for t, fresh, m in zip(locals_[at], moved[at], movers):
            if m is not None and at != unwritten:
                t.copy_(m(fresh))


@override(*FUSED_STEPS)
def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One fused step."""
    taken = [take(a) for a in args]
    locals_ = [local for _, local in taken]
    named = {name: take(a)[1] for name, a in kwargs.items()}
    transport = transport_of(args, kwargs)
    key = (func, *[k for k, _ in taken], _numbers_by_type(kwargs))
    table = program_tables(transport)[mode()]
    plan = table.get(key)
    if plan is None:
        plan = table[key] = _plan(args, kwargs, transport)
    if plan.moves or plan.lone:
        _run(func, plan, locals_, named, GRADS if kwargs.get("grad_scale") is None else -1)
    else:
        func(*locals_, **named)


@override(unscale_and_check)
def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients and say whether one is not finite; all ranks that share one agree."""
    given = dict(zip(("self", "found_inf", "inv_scale"), args)) | kwargs
    grads, found_inf, inv_scale = given["self"], given["found_inf"], given["inv_scale"]
    list_key, locals_ = take(grads)
    transport = transport_of((grads, found_inf, inv_scale), {})
    flag = found_inf._local if isinstance(found_inf, DTensor) else found_inf
    scale = inv_scale._local if isinstance(inv_scale, DTensor) else inv_scale
    key = (func, list_key)
    table = program_tables(transport)[mode()]
    plan = table.get(key)
    if plan is None:
        plan = _plan([grads], {}, transport)
        plan.reduce = _groups(grads, transport.rank)
        table[key] = plan
    if plan.moves:
        _run(lambda xs: func(xs, flag, scale), plan, [locals_], {})
    else:
        func(locals_, flag, scale)
    for ranks in plan.reduce:
        flag.copy_(transport.all_reduce(flag, ranks, "max"))


def _groups(tensors: Sequence[Tensor], rank: int) -> list[tuple[int, ...]]:
    """Groups whose maxima, taken one after the other, reach all ranks that hold a part of some tensor."""
    axes: dict[Mesh, set[int]] = {}
    for t in tensors:
        if isinstance(t, DTensor):
            layout = t._spec.layout
            axes.setdefault(layout.mesh, set()).update(
                a for on_dim in layout.dims for a in on_dim
            )
    groups: dict[tuple[int, ...], None] = {}
    for mesh, sharded in sorted(axes.items(), key=lambda item: -len(item[0].ranks)):
        coord = mesh.coordinate_of(rank)
        if coord is not None and sharded:
            groups[mesh.group_ranks(tuple(sorted(sharded)), coord)] = None
    return [ranks for ranks in groups if len(ranks) > 1]
