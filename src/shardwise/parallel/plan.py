"""``parallelize_module``: match a plan, check all of it, then change the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any
from weakref import getweakrefcount

import torch
from torch import nn

from shardwise.comm.meshes import as_mesh
from shardwise.errors import LayoutError, MeshError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Placement
from shardwise.parallel.buckets import is_reduced
from shardwise.parallel.styles import ParallelStyle
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.dtensor import DTensor

_STYLES = "_shardwise_styles"  # what earlier calls have made of a module


@dataclass(frozen=True, slots=True)
class _Match:
    """One module that a line of the plan names."""

    name: str
    module: nn.Module
    style: ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make modules tensor parallel, in place. Parameters keep their identity, tied ones stay tied.

    Args:
        module: The model, or a part of it.
        device_mesh: A mesh with one axis: ``mesh["tp"]``. None is that of ``with mesh:``.
        parallelize_plan: One style for ``module`` itself, or names of submodules to styles. A name may have
            wildcards; each stands within one part of a dotted name: ``"blocks.*.mlp.up"``.
        src_data_rank: Position on the mesh of the rank whose parameters count; None: each cuts its own.

    Returns:
        The module.

    Raises:
        LayoutError: A name matches nothing, a style does not fit, two styles contradict each other, or a
            parameter is cut over the axis already. Nothing has been changed then.
        MeshError: The mesh has not exactly one axis.

    Example:
        >>> plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        >>> parallelize_module(model, mesh["tp"], plan)
    """
    mesh = as_mesh(device_mesh)
    if mesh.ndim != 1:
        raise MeshError(
            f"parallelize_module works over one axis, and this mesh has {mesh.ndim}: {mesh}.",
            tries=['mesh["tp"]: its slice along one axis'],
        )
    if parallelize_plan is None:
        return module
    if isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan = {"": parallelize_plan}
    matches = _match(module, parallelize_plan)
    for m in matches:
        m.style.check(m.module, m.name or type(m.module).__name__)
    work = _parameters(module, matches, mesh)
    for m in matches:
        _check_style(m, mesh)
    for owner, key, placement in work:
        _distribute(module, owner, key, mesh, placement, src_data_rank)
    for m in matches:
        m.style.attach(m.module, mesh)
        if _lays_out(m.style):
            vars(m.module).setdefault(_STYLES, []).append((mesh, type(m.style).__name__))
    return module


def _lays_out(style: ParallelStyle) -> bool:
    """Whether a style says how parameters are laid out, and so can be a module's only one."""
    return style.__class__.layouts is not ParallelStyle.layouts


def _check_style(m: _Match, mesh: Mesh) -> None:
    """An earlier call may have had a style for the module: its hooks are there already."""
    for over, style in vars(m.module).get(_STYLES, ()) if _lays_out(m.style) else ():
        if over == mesh:
            raise LayoutError(
                f'"{m.name}" is parallelized already, with {style} over the axis '
                f'"{mesh.axis_name(0)}".',
                tries=["call parallelize_module once for each module"],
            )


def _match(module: nn.Module, plan: Mapping[str, ParallelStyle]) -> list[_Match]:
    """The modules that the plan names, in the order of the plan."""
    names = dict(module.named_modules(remove_duplicate=False))
    matches: list[_Match] = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise LayoutError(
                f'the plan for "{pattern}" is no style: {style!r}.', tries=_meant(style)
            )
        parts = pattern.split(".")
        found = [name for name in names if _fits(name.split("."), parts)]
        if not found:
            near = get_close_matches(pattern, names, 3, 0.5)
            tries = [f'"{name}"' for name in near] or [f"the names are: {_some(names)}"]
            raise LayoutError(
                f'the plan names "{pattern}", which matches no module of '
                f"{type(module).__name__}.",
                tries=tries,
            )
        matches += [_Match(name, names[name], style) for name in found]
    return matches


def _meant(style: Any) -> list[str]:
    """What was meant by something that is no style: the class, or torch's."""
    if isinstance(style, type) and issubclass(style, ParallelStyle):
        return [f"{style.__name__}()"]
    if type(style).__module__.startswith("torch."):
        return [f"from shardwise.parallel import {type(style).__name__}"]
    return ["ColwiseParallel(), RowwiseParallel(), SequenceParallel(), PrepareModuleInput(...)"]


def _fits(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatch, name, pattern))


def _some(names: Mapping[str, Any]) -> str:
    given = [name for name in names if name]
    return ", ".join(given[:12]) + (", ..." if len(given) > 12 else "")


def _parameters(
    root: nn.Module, matches: list[_Match], mesh: Mesh
) -> list[tuple[nn.Module, str, Placement]]:
    """What is to be distributed and how; raises where two lines, or a line and the past, contradict."""
    wanted: dict[int, tuple[str, Layout]] = {}
    styled: dict[int, str] = {}
    work: list[tuple[nn.Module, str, Placement]] = []
    for m in matches:
        placements = m.style.layouts(m.module)
        if placements or _lays_out(m.style):
            if id(m.module) in styled:
                raise LayoutError(
                    f'"{m.name}" is parallelized twice: by "{styled[id(m.module)]}" and once more.',
                    tries=["let the names of the plan not overlap"],
                )
            styled[id(m.module)] = m.name
        for key, placement in placements.items():
            p = m.module._parameters.get(key)
            if p is None:
                continue
            name = f"{m.name}.{key}" if m.name else key
            check_not_reduced(name, p, "parallelize_module")
            layout = Layout.of(mesh, (placement,), p.shape, None, p.dtype)
            m.style.check_layout(name, layout)
            before = wanted.setdefault(id(p), (name, layout))
            if before[1] is not layout:
                raise LayoutError(
                    f'"{before[0]}" and "{name}" are one parameter (tied), and the plan wants it as '
                    f"{before[1]} and as {layout}.",
                    tries=[
                        "RowwiseParallel for the embedding, ColwiseParallel for the head: both cut rows"
                    ],
                )
            if isinstance(p, DTensor):
                _check_again(name, p, mesh, layout)
            elif before[0] == name:
                work.append((m.module, key, placement))
    return work


def _check_again(name: str, p: DTensor, mesh: Mesh, wanted: Layout) -> None:
    """A parameter that is distributed already: as wanted, or the axis would be used twice."""
    own = p.layout
    if own.mesh == mesh and own.dims == wanted.dims and own.partial == wanted.partial:
        return
    if own.mesh == mesh or mesh.axes_in(own.mesh) is not None:
        what = f'the axis "{mesh.axis_name(0)}" is used already'
    else:
        what = "it is distributed over another mesh already"
    raise LayoutError(
        f'"{name}" is {own}: {what}, and the plan wants {wanted}.',
        tries=["parallelize_module comes first, fully_shard or data_parallel after it"],
    )


def _distribute(
    root: nn.Module, owner: nn.Module, key: str, mesh: Mesh, placement: Placement, source: Any
) -> None:
    old = owner._parameters[key]
    assert old is not None, "parameters that are None are not in the work"
    new = nn.Parameter(
        distribute_tensor(old.detach(), mesh, (placement,), src_data_rank=source),
        requires_grad=old.requires_grad,
    )
    become(root, old, new)


def become(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Let a parameter be another one, wherever it is used: the same object, where torch allows it."""
    recurrent: list[nn.RNNBase] = []
    if getweakrefcount(
        old
    ):  # which forbids the swap: recurrent modules have some, and renew them
        recurrent = [
            m
            for m in root.modules()
            if isinstance(m, nn.RNNBase) and any(p is old for p in m._parameters.values())
        ]
    for m in recurrent:
        m._flat_weight_refs = []
    kept = old
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # somebody holds a weak reference or a node of its graph
        kept = new
        for module in root.modules():
            for key, p in module._parameters.items():
                if p is old:
                    module._parameters[key] = new
    for m in recurrent:
        m._init_flat_weights()
    return kept


def check_not_reduced(name: str, p: torch.Tensor, what: str) -> None:
    """What lays a parameter out anew must come before its gradients are in buckets.

    Raises:
        LayoutError: They are.
    """
    if is_reduced(p._local if isinstance(p, DTensor) else p):
        raise LayoutError(
            f'"{name}" is in a data parallel module already, and {what} would part it from its bucket.',
            tries=[f"{what} first, then data_parallel"],
        )


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute cross entropy on logits whose classes are cut, without gathering them; torch's name.

    Here the cross entropy of such logits never gathers them, inside this block or outside. It is here so
    that programs written for torch run.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(logits, targets)  # logits: DTensor, Shard(-1)
        ...     loss.backward()
    """
    yield
