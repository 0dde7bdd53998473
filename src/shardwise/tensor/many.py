"""Several tensors redistributed together: ``redistribute_many`` and ``redistribute_state``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.comm.execute import Mover, profile_of
from shardwise.comm.many import move_many
from shardwise.comm.rounds import move_bounded
from shardwise.comm.transport import current
from shardwise.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.spec import Spec
from shardwise.route.ledger import Ledger, ledger
from shardwise.tensor.crossings import dense, lifted, planned, resolve
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.strides import alias


def redistribute_many(
    tensors: Sequence[DTensor],
    placements: Any = None,
    device_mesh: Any = None,
    *,
    max_extra_bytes: int | None = None,
) -> list[DTensor]:
    """The same values in other layouts, moved together: few collectives for many tensors. Differentiable.

    What several of them send over the same ranks, in the same way and dtype, travels in one collective; tensors
    of more than 4 MiB keep their own, all under way at once. The gradients travel together, too.

    Args:
        tensors: DTensors.
        placements: A list with one entry for each tensor (placements, spec, layout or None), or one layout or
            spec for all of them.
        device_mesh: The mesh of all results; None keeps each tensor's own, or that of its layout.
        max_extra_bytes: Move one tensor after the other, in rounds, there and back: next to operands and results it
            takes at most so many bytes on each rank, and those by which an operand exceeds its result. Tensors that
            fit into it together still share collectives.

    Returns:
        One DTensor for each.

    Raises:
        LayoutError: The placements do not fit, or something is no DTensor.

    Example:
        >>> whole = redistribute_many(list(model.parameters()))      # doctest: +SKIP
    """
    each = _one_for_each(tensors, placements)
    movers: list[Mover] = []
    outs: list[Spec] = []
    locals_: list[Tensor] = []
    for x, to in zip(tensors, each):
        if not isinstance(x, DTensor):
            raise LayoutError(f"redistribute_many takes DTensors, not a {type(x).__name__}.")
        mesh = device_mesh
        if mesh is None and isinstance(to, Layout):
            mesh = to.mesh
        local, move, out, _ = planned(x, mesh, to)
        locals_.append(local)
        movers.append(move)
        outs.append(out)
    if max_extra_bytes is None:
        moved = move_many(movers, locals_)
    else:
        moved = move_bounded(movers, locals_, max_extra_bytes)
    return [
        wrap(alias(y) if y is x._local else y, out) for x, y, out in zip(tensors, moved, outs)
    ]


def _one_for_each(tensors: Sequence[Any], placements: Any) -> list[Any]:
    several = (
        isinstance(placements, (list, tuple))
        and bool(placements)
        and all(p is None or isinstance(p, (list, tuple, Layout)) for p in placements)
    )
    if not several:
        return [placements] * len(tensors)
    if len(placements) != len(tensors):
        raise LayoutError(f"{len(placements)} placements for {len(tensors)} tensors.")
    return list(placements)


def redistribute_state(
    state: Mapping[str, Any],
    layouts: Any,
    device_mesh: Any = None,
    *,
    max_extra_bytes: int | None = None,
) -> dict[str, Any]:
    """A state dict in other layouts, on the same mesh or another, in one go.

    To hand weights from a trainer to an inference layout: every rank of both meshes calls it with the whole
    state, and gets the pieces of the layouts that it holds.

    Args:
        state: Names to DTensors; dicts in it are taken apart. Anything else is passed on as it is.
        layouts: Names (``"a.b"`` inside dicts) to placements, specs, layouts or DTensors laid out as wanted, or
            a function from name and tensor to one; names that it lacks keep their placements.
        device_mesh: The mesh of the results; None keeps each tensor's own, or that of its layout.
        max_extra_bytes: What a rank may take next to operands and results; see ``redistribute_many``.

    Returns:
        The same structure, with DTensors in their new layouts.

    Raises:
        LayoutError: A layout names nothing in the state, or does not fit.

    Example:
        >>> serving = redistribute_state(model.state_dict(), {"head.weight": [Shard(0)]}, serve_mesh)  # doctest: +SKIP
    """
    flat: dict[str, DTensor] = {}
    _collect(state, "", flat)
    if not callable(layouts):
        unknown = sorted(set(layouts) - set(flat))
        if unknown:
            raise LayoutError(f"the state has no tensors {', '.join(unknown)}.")
    targets: list[Any] = []
    for name, x in flat.items():
        to = layouts(name, x) if callable(layouts) else layouts.get(name, x.placements)
        targets.append(to._spec.layout if isinstance(to, DTensor) else to)
    moved: dict[str, DTensor] = {}
    by_mesh: dict[Mesh | None, list[int]] = {}
    names = list(flat)
    for i, to in enumerate(targets):
        mesh = to.mesh if device_mesh is None and isinstance(to, Layout) else device_mesh
        _check_fits(names[i], flat[names[i]], to, mesh)
        by_mesh.setdefault(mesh, []).append(i)
    for mesh, places in by_mesh.items():
        got = redistribute_many(
            [flat[names[i]] for i in places],
            [_listed(targets[i]) for i in places],
            mesh,
            max_extra_bytes=max_extra_bytes,
        )
        moved.update(zip((names[i] for i in places), got))
    return _rebuild(state, "", moved)


def explain_redistribute(
    src: Any, dst: Any = None, device_mesh: Any = None, *, max_extra_bytes: int | None = None
) -> Ledger:
    """What ``src.redistribute(device_mesh, dst)`` would do, without doing it; ``print`` it.

    The route, the bytes that each rank receives (to the byte what ``CommLog`` will count), the predicted time,
    and the lower bound: what a rank needs and does not hold. Within ``max_extra_bytes`` also how many rounds a move
    takes, and what the whole would take without that limit.

    Args:
        src: A DTensor or a layout.
        dst: Placements, spec or layout; None replicates.
        device_mesh: Another mesh; None keeps that of ``src``, or takes that of the layout ``dst``.
        max_extra_bytes: As for ``redistribute``. (Over more than 64 ranks the first such move of a layout pair
            also agrees on the number of rounds, by an all_reduce of one number, which is not listed.)

    Raises:
        LayoutError: The placements do not fit, or the limit is too small for a round.

    Example:
        >>> print(explain_redistribute(x, [Shard(1)]))      # doctest: +SKIP
        f32[64, 64] {0: S(0)} -> f32[64, 64] {0: S(1)}, 4 ranks
          move             layout after  mean bytes  most  us
          one_shot over 0  {0: S(1)}           3072  3072  70
          total                                3072  3072  70
          lower bound                          3072  3072
    """
    layout = src._spec.layout if isinstance(src, DTensor) else src
    if not isinstance(layout, Layout):
        raise LayoutError(f"explain_redistribute takes a DTensor or a layout, not {src!r}.")
    if device_mesh is None:
        device_mesh = dst.mesh if isinstance(dst, Layout) else layout.mesh
    mesh, dims, partial = resolve(device_mesh, dst, layout.shape)
    layout = dense(layout)
    partial = tuple("sum" if op == "avg" else op for op in partial)
    if (
        mesh is not layout.mesh and mesh.axes_in(layout.mesh) is not None
    ):  # each caller's own slice
        mesh, dims, partial = lifted(mesh, layout.mesh, dims, partial)
    to = Layout(mesh, dims, partial, layout.shape, layout.stride, layout.dtype)
    return ledger(layout, to, profile_of(layout.mesh, current()), max_extra_bytes)


def _check_fits(name: str, x: DTensor, to: Any, mesh: Any) -> None:
    """Raise, with the name, if a layout does not fit."""
    try:
        resolve(x.device_mesh if mesh is None else mesh, _listed(to), x.shape)
    except LayoutError as error:
        error.args = (f'"{name}": {error.args[0]}',)
        raise


def _listed(to: Any) -> Any:
    return to if to is None or isinstance(to, (list, tuple, Layout)) else [to]


def _collect(state: Any, prefix: str, out: dict[str, DTensor]) -> None:
    for name, x in state.items():
        if isinstance(x, DTensor):
            out[f"{prefix}{name}"] = x
        elif isinstance(x, Mapping):
            _collect(x, f"{prefix}{name}.", out)


def _rebuild(state: Any, prefix: str, moved: dict[str, DTensor]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, x in state.items():
        if isinstance(x, DTensor):
            out[name] = moved[f"{prefix}{name}"]
        else:
            out[name] = _rebuild(x, f"{prefix}{name}.", moved) if isinstance(x, Mapping) else x
    return out
