"""The state of models and optimizers by parameter name, whatever the parallelism.

```text
{"model":     {name: tensor}}
{"optimizer": {"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [{"lr": ..., "params": [name, ...]}]}}
```

An optimizer's state is keyed by parameter name, not by position, and its settings are found again by name:
they survive another parallelism, other parameter groups, and parameters that were frozen since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.checkpoint.fresh import initial_state, is_fresh
from shardwise.checkpoint.world import some, together
from shardwise.comm.transport import Transport, current
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import slices
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.spec import spec_of
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.dtensor import DTensor, wrap

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_EXTRA = "_extra_state"

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateDictOptions:
    """How a state dict is taken or set; torch's ``StateDictOptions`` is accepted in its place.

    Attributes:
        full_state_dict: Whole plain tensors instead of DTensors.
        cpu_offload: Tensors in host memory. With ``full_state_dict`` rank 0 alone has them, and the others
            get empty dicts.
        ignore_frozen_params: Leave out parameters that do not require grad.
        strict: Raise for keys that are missing or unexpected when a state is set.
        broadcast_from_rank0: When a state is set, only rank 0's counts; it is whole there. Each tensor is
            sent in pieces: no other rank ever has a whole one.
        flatten_optimizer_state_dict: ``state.<name>.exp_avg`` and ``param_groups.<name>.lr`` in one dict.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False


@dataclass(slots=True)
class SetReport:
    """Keys that were ``missing`` in a state that was set, and that were ``unexpected`` in it."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


_PLAIN = StateDictOptions()


# ---- names -------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by identity: tied ones have one."""
    names: dict[int, str] = {}
    for name, p in _unwrapped(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(p), plain_name(name))
    return names


def _list(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


# ---- taken -------------------------------------------------------------------------------------------


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    options: Any = None,
) -> tuple[State, State]:
    """The states of a model and its optimizers, by parameter name.

    Args:
        model: The model.
        optimizers: One or several optimizers of its parameters.
        options: See `StateDictOptions`.

    Returns:
        The model's and the optimizers' state. The tensors share memory with what they are the state of.

    Example:
        >>> model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    """
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def get_model_state_dict(model: nn.Module, *, options: Any = None) -> State:
    """The parameters and persistent buffers of a model, by name; see `get_state_dict`."""
    options = options or _PLAIN
    core = _unwrapped(model)
    state: Mapping[str, Any] = core.state_dict()
    frozen: set[str] = set()
    if options.ignore_frozen_params:
        frozen = {
            plain_name(n)
            for n, p in core.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
    kept = {plain_name(k): v for k, v in state.items() if plain_name(k) not in frozen}
    return _converted(kept, options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    options: Any = None,
) -> State:
    """The state and the settings of optimizers, by parameter name; see `get_state_dict`.

    An optimizer that has not stepped gives what it will keep, with its first values, so that
    ``torch.distributed.checkpoint.load`` has something to fill. It shares no memory with the optimizer, which
    stays as it is: give it to `set_optimizer_state_dict`. That costs the memory of the state, and of the
    parameters twice while it is made. (Momentum of SGD begins with zeros then: with ``dampening`` its first
    step is smaller.)

    Raises:
        CheckpointError: An optimizer has a parameter that is not the model's.
    """
    return optimizer_state(parameter_names(model), optimizers, options, fresh=True)


def optimizer_state(
    names: Mapping[int, str],
    optimizers: Optimizer | Iterable[Optimizer],
    options: Any = None,
    *,
    fresh: bool = False,
) -> State:
    """The state of optimizers of parameters with these names; ``fresh``: of those that have none yet, too."""
    options = options or _PLAIN
    state: State = {}
    groups: list[State] = []
    for optimizer in _list(optimizers):
        held: Any = optimizer.state
        if fresh and is_fresh(optimizer):
            held = initial_state(optimizer)
        for group in optimizer.param_groups:
            members = [_name_of(p, names) for p in group["params"]]
            groups.append(
                {k: v for k, v in group.items() if k != "params"} | {"params": members}
            )
            for name, p in zip(members, group["params"]):
                if p in held:
                    state[name] = {
                        k: v.detach() if isinstance(v, Tensor) else v
                        for k, v in held[p].items()
                    }
    state = _converted(state, options)
    keep_groups = not (options.full_state_dict and options.cpu_offload and current().rank)
    if options.flatten_optimizer_state_dict:
        flat = {f"state.{n}.{k}": v for n, values in state.items() for k, v in values.items()}
        for group in groups if keep_groups else ():
            for name in group["params"]:
                flat |= {
                    f"param_groups.{name}.{k}": v for k, v in group.items() if k != "params"
                }
        return flat
    return {"state": state, "param_groups": groups} if keep_groups else {}


def _name_of(p: Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(p))
    if name is None:
        raise CheckpointError(
            f"an optimizer has a parameter of shape {tuple(p.shape)} that is in no module given.",
            tries=["make the optimizer after the parameters were distributed or replaced"],
        )
    return name


def _converted(state: State, options: Any) -> State:
    """The state as the options want it; tensors are gathered one after the other."""
    if not (options.full_state_dict or options.cpu_offload):
        return state
    drop = options.full_state_dict and options.cpu_offload and current().rank != 0
    out: State = {}
    for key, value in state.items():
        made = _converted_value(value, options)
        if not drop:
            out[key] = made
    return out


def _converted_value(value: Any, options: Any) -> Any:
    if isinstance(value, dict):
        return _converted(value, options)
    if isinstance(value, list):  # LBFGS keeps its history so
        return [_converted_value(inner, options) for inner in value]
    return _converted_tensor(value.detach(), options) if isinstance(value, Tensor) else value


def _converted_tensor(value: Tensor, options: Any) -> Tensor:
    if isinstance(value, DTensor):
        if options.full_state_dict:
            value = value.full_tensor()
            return value.cpu() if options.cpu_offload else value
        if value.device.type == "cpu":
            return value
        src = value._spec.layout
        mesh = Mesh.of("cpu", src.mesh.shape, src.mesh.ranks, src.mesh.names)
        layout = Layout(mesh, src.dims, src.partial, src.shape, src.stride, src.dtype)
        return wrap(value._local.cpu(), spec_of(layout, value._spec.transport))
    return value.cpu() if options.cpu_offload else value


# ---- set ---------------------------------------------------------------------------------------------


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: State,
    optim_state_dict: State,
    options: Any = None,
) -> SetReport:
    """Set the states of a model and its optimizers, in place; all ranks call it.

    Values may be whole plain tensors, or DTensors in any layout of the same mesh.

    Args:
        model: The model. What it has on the meta device is made real, each rank its own piece.
        optimizers: One or several optimizers of its parameters.
        model_state_dict: As `get_state_dict` gives it.
        optim_state_dict: As `get_state_dict` gives it.
        options: See `StateDictOptions`.

    Returns:
        Keys that were missing or unexpected, when ``strict`` is off.

    Raises:
        CheckpointError: On all ranks, before anything was changed: keys are missing or unexpected, or a shape
            is wrong.
    """
    report = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return report


def set_model_state_dict(
    model: nn.Module, model_state_dict: State, *, options: Any = None
) -> SetReport:
    """Set the parameters and buffers of a model; see `set_state_dict`."""
    options = options or _PLAIN
    transport = current()
    core = _unwrapped(model)
    with torch.no_grad():
        own: dict[str, Any] = {
            plain_name(k): v for k, v in core.state_dict(keep_vars=True).items()
        }
    places = _places(core)
    given = {plain_name(k): v for k, v in model_state_dict.items()}
    outlines = _outlines(given)
    if options.broadcast_from_rank0:
        outlines = together(transport, "", outlines)[0]
    report = SetReport(
        missing=[k for k in own if k not in outlines and not _is_tied(k, own, outlines)],
        unexpected=[k for k in outlines if k not in own],
    )
    if options.ignore_frozen_params:
        report.missing = [k for k in report.missing if getattr(own[k], "requires_grad", True)]
    together(transport, _problems(own, outlines, report if options.strict else None))
    done: set[int] = set()
    for key, target in own.items():
        if key not in outlines:
            continue
        if not isinstance(target, Tensor):  # of modules that keep more than tensors
            module, _ = places[key]
            module.set_extra_state(_value(given, key, outlines, options, transport))
            continue
        if id(target) in done:
            continue
        done.add(id(target))
        if options.broadcast_from_rank0:
            _set_tensor(places[key], target, _from_rank0(given.get(key), target, outlines[key]))
        else:
            _set_tensor(places[key], target, given[key])
    return report


def take_model_state(model: nn.Module, state: State) -> None:
    """Set what a model has from a state of the same keys, shapes and layouts; this rank alone."""
    core = _unwrapped(model)
    places = _places(core)
    with torch.no_grad():
        own = {plain_name(k): v for k, v in core.state_dict(keep_vars=True).items()}
    made: dict[int, Tensor] = {}  # of tied tensors on the meta device one was made real
    for key, target in own.items():
        if isinstance(target, Tensor) and not state[key].is_meta:
            made.setdefault(id(target), state[key])
    for key, target in own.items():
        if not isinstance(target, Tensor):
            places[key][0].set_extra_state(state[key])
        elif id(target) in made:
            _set_tensor(places[key], target, made.pop(id(target)))


def _outlines(given: State) -> dict[str, Any]:
    """What there is under each key: shape and dtype, or None of what is no tensor."""
    return {
        k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None
        for k, v in given.items()
    }


def _is_tied(key: str, own: dict[str, Any], outlines: Mapping[str, Any]) -> bool:
    """Whether the same tensor is there under another name."""
    return any(own[k] is own[key] for k in outlines if k in own)


def _problems(
    own: Mapping[str, Any], outlines: Mapping[str, Any], report: SetReport | None
) -> str:
    lines = []
    if report is not None and report.missing:
        lines.append(f"missing in the state: {some(report.missing)}.")
    if report is not None and report.unexpected:
        lines.append(f"in the state only: {some(report.unexpected)}.")
    for key, target in own.items():
        outline = outlines.get(key)
        if (
            isinstance(target, Tensor)
            and outline is not None
            and outline[0] != tuple(target.shape)
        ):
            lines.append(
                f"{key} has shape {outline[0]} in the state, {tuple(target.shape)} in the model."
            )
    return " ".join(lines)


def _places(core: nn.Module) -> dict[str, tuple[Any, str]]:
    """The module of each key, and the name there."""
    out: dict[str, tuple[Any, str]] = {}
    for prefix, module in core.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers, _EXTRA):
            out[plain_name(f"{prefix}.{name}" if prefix else name)] = (module, name)
    return out


def _value(given: State, key: str, outlines: Any, options: Any, transport: Transport) -> Any:
    value = given.get(key)
    return together(transport, "", value)[0] if options.broadcast_from_rank0 else value


def _set_tensor(place: tuple[Any, str], target: Tensor, value: Tensor) -> None:
    if target.is_meta:
        made = laid_out(value, target)
        if made.dtype != target.dtype:
            made = made.to(target.dtype)
        module, name = place
        if name in module._parameters:
            new = nn.Parameter(made.detach(), requires_grad=target.requires_grad)
            torch.utils.swap_tensors(target, new)  # optimizers and tied names keep the object
        else:
            module._buffers[name] = made
        return
    fill(target, value)


def fill(target: Tensor, value: Tensor) -> None:
    """Copy a whole plain value, or a DTensor in any layout of the same mesh, into a tensor."""
    with torch.no_grad():
        local = target._local.detach() if isinstance(target, DTensor) else target.detach()
        made = laid_out(value, target)
        source = made._local.detach() if isinstance(made, DTensor) else made.detach()
        if source.data_ptr() != local.data_ptr() or source.stride() != local.stride():
            local.copy_(source)


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A value in the layout of another tensor; of a whole plain value each rank takes its own piece."""
    if not isinstance(like, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    layout = like._spec.layout
    if isinstance(value, DTensor):
        same = value._spec.layout
        if same.mesh is layout.mesh and (same.dims, same.partial) == (
            layout.dims,
            layout.partial,
        ):
            return value
        moved: Any = value.detach()
        return moved.redistribute(layout.mesh, layout)
    spec = like._spec
    if spec.coord is None:
        return like
    whole = (0,) * value.ndim, tuple(value.shape)
    piece = value.detach()[slices((spec.offsets, tuple(spec.local_shape)), whole)]
    local = torch.empty_strided(
        piece.shape, like._local.stride(), dtype=value.dtype, device=layout.mesh.device_type
    )
    with torch.no_grad():
        local.copy_(piece)
    return wrap(local, spec_of(layout.with_dtype(value.dtype), spec.transport))


def _from_rank0(value: Any, like: Tensor, outline: Any) -> Tensor:
    """Rank 0's whole value: in pieces to the ranks of a DTensor, whole to those of a plain tensor."""
    transport = current()
    shape, dtype = outline
    device = like._spec.layout.mesh.device_type if isinstance(like, DTensor) else _real(like)
    if transport.rank == 0:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        whole = value.detach().to(device)
    else:
        whole = torch.empty((), dtype=dtype, device=device).expand(shape)
    if not isinstance(like, DTensor):
        return transport.broadcast(whole, tuple(range(transport.world_size)), 0)
    layout = like._spec.layout
    if layout.mesh.ranks[0] != 0:
        raise CheckpointError(
            f"broadcast_from_rank0: rank 0 is not the first of {layout.mesh}."
        )
    if transport.rank not in layout.mesh.ranks:
        return like
    return distribute_tensor(whole, layout.mesh, layout)


def _real(like: Tensor) -> torch.device:
    if not like.is_meta:
        return like.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- optimizers ----------------------------------------------------------------------------------------


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: State,
    *,
    options: Any = None,
) -> None:
    """Set the state and the settings of optimizers; see `set_state_dict`.

    State of parameters that the optimizers do not have is left aside.

    Raises:
        CheckpointError: On all ranks: parameters that are in one group now had different settings.
    """
    set_optimizers(parameter_names(model), optimizers, optim_state_dict, options)


def set_optimizers(
    names: Mapping[int, str],
    optimizers: Optimizer | Iterable[Optimizer],
    state: State,
    options: Any = None,
) -> None:
    """Set the state of optimizers of parameters with these names."""
    options = options or _PLAIN
    transport = current()
    per_name, settings = _by_name(state)
    outlines: dict[str, Any] = {}
    if options.broadcast_from_rank0:
        mine = {n: (_outlines(v), _objects(v)) for n, v in per_name.items()}
        outlines, settings = together(transport, "", (mine, settings))[0]
    chosen, problems = _regrouped(names, optimizers, settings)
    together(transport, " ".join(problems) if options.strict else "")

    def values(name: str, p: Tensor) -> State | None:
        if not options.broadcast_from_rank0:
            return per_name.get(name)
        return _sent(per_name.get(name, {}), p, *outlines[name]) if name in outlines else None

    _give(names, optimizers, chosen, values)


def _give(
    names: Mapping[int, str],
    optimizers: Optimizer | Iterable[Optimizer],
    chosen: list[tuple[State, State]],
    values: Callable[[str, Tensor], State | None],
) -> None:
    """Set the settings of groups, and the state of each parameter that there is one for."""
    for group, kept in chosen:
        for k, value in kept.items():
            have = group.get(k)
            if isinstance(value, Tensor):  # each group has its own, where it had one
                value = value.detach().to(
                    have.device if isinstance(have, Tensor) else value.device, copy=True
                )
            group[k] = value
    for optimizer in _list(optimizers):
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                given = values(_name_of(p, names), p)
                if given is not None:
                    _set_state(optimizer, p, given, on_device)


def _regrouped(
    names: Mapping[int, str],
    optimizers: Optimizer | Iterable[Optimizer],
    settings: dict[str, State],
) -> tuple[list[tuple[State, State]], list[str]]:
    """Each group of parameters with the settings for it, and what cannot be reconciled."""
    chosen: list[tuple[State, State]] = []
    problems: list[str] = []
    for optimizer in _list(optimizers):
        for group in optimizer.param_groups:
            members = [_name_of(p, names) for p in group["params"]]
            kept, problem = _common([settings[n] for n in members if n in settings], members)
            chosen.append((group, kept))
            problems += problem
    return chosen, problems


def group_problems(names: Mapping[int, str], optimizer: Optimizer, state: State) -> list[str]:
    """Why a state cannot be set: parameters that are in one group now had different settings."""
    _, settings = _by_name(state)
    plain = {n: _objects(values) for n, values in settings.items()}
    return _regrouped(names, optimizer, plain)[1]


def take_optimizer_state(names: Mapping[int, str], optimizer: Optimizer, state: State) -> None:
    """Set an optimizer from a state laid out like its own; this rank alone.

    Raises:
        CheckpointError: See `group_problems`; nothing has changed.
    """
    per_name, settings = _by_name(state)
    chosen, problems = _regrouped(names, optimizer, settings)
    if problems:
        raise CheckpointError(" ".join(problems))
    _give(names, optimizer, chosen, lambda name, p: per_name.get(name))


def _by_name(state: State) -> tuple[dict[str, State], dict[str, State]]:
    """State and settings of each parameter, from either form of an optimizer's state dict."""
    per_name: dict[str, State] = {}
    settings: dict[str, State] = {}
    if not state or "state" in state or "param_groups" in state:
        for name, values in state.get("state", {}).items():
            per_name[plain_name(name)] = values
        for group in state.get("param_groups") or ():
            for name in group["params"]:
                settings[plain_name(name)] = {k: v for k, v in group.items() if k != "params"}
        return per_name, settings
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        table = per_name if kind == "state" else settings
        table.setdefault(plain_name(name), {})[what] = value
    return per_name, settings


def _common(found: list[State], members: list[str]) -> tuple[State, list[str]]:
    """The settings of a group, from those of its members."""
    if not found:
        return {}, []
    differing = sorted(
        {
            k
            for other in found[1:]
            for k in other
            if k not in found[0] or other[k] != found[0][k]
        }
    )
    problems = [
        f"parameters that are in one group now ({some(members)}) had different {k} when they were saved."
        for k in differing
    ]
    return found[0], problems


def _set_state(optimizer: Optimizer, p: Tensor, values: State, on_device: Any) -> None:
    own = optimizer.state[p]
    for key, value in values.items():
        if not isinstance(value, Tensor):
            own[key] = _list_like(value, p) if isinstance(value, list) else value
            continue
        have = own.get(key)
        fits = isinstance(have, Tensor) and (have.shape, have.dtype) == (
            value.shape,
            value.dtype,
        )
        if fits and not have.is_meta:
            fill(have, value)
        else:
            own[key] = state_like(value, p, on_device and key == "step")


def _list_like(values: list[Any], p: Tensor) -> list[Any]:
    return [state_like(v, p) if isinstance(v, Tensor) else v for v in values]


def state_like(value: Tensor, p: Tensor, on_device: Any = False) -> Tensor:
    """A tensor of an optimizer's state, laid out as the optimizer would: like its parameter, if it is as large."""
    if isinstance(p, DTensor) and value.shape == p.shape and value.ndim:
        made = laid_out(value, p)
        return made.clone() if made is value else made
    if isinstance(p, DTensor) and value.ndim and not isinstance(value, DTensor):
        return distribute_tensor(value.detach(), p.device_mesh, None, src_data_rank=None)
    if not isinstance(value, DTensor):
        on = p.device if (value.ndim or on_device) else value.device
        return value.detach().to(on, copy=True)
    return value.detach().clone() if isinstance(p, DTensor) else value.full_tensor()


def _objects(values: State) -> State:
    return {k: v for k, v in values.items() if not isinstance(v, Tensor)}


def _sent(values: State, p: Tensor, outline: Mapping[str, Any], objects: State) -> State:
    out: State = {}
    for key, known in outline.items():
        if known is None:
            out[key] = objects[key]
            continue
        laid = isinstance(p, DTensor) and known[0] == tuple(p.shape) and known[0]
        like = p if laid else torch.empty((), device="cpu" if not known[0] else p.device)
        out[key] = _from_rank0(values.get(key), like, known)
    return out
