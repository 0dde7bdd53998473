"""Modules, optimizers and other keepers of state, where a state is asked for.

```text
nn.Module            its parameters and buffers, by name
Optimizer            its state and settings by parameter name; the modules of the same state name them
has state_dict()     what that gives; load_state_dict() takes it back
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.nested import is_entered, put
from shardwise.checkpoint.records import Index, KeyPath, TensorEntry
from shardwise.checkpoint.state_dict import (
    get_model_state_dict,
    group_problems,
    optimizer_state,
    parameter_names,
    take_model_state,
    take_optimizer_state,
)
from shardwise.errors import CheckpointError
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.dtensor import DTensor


def unfold(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with every keeper of state replaced by its state."""
    names = _names(state)
    return _copied(state, lambda path, keeper: _state_of(keeper, names))


def unfold_for(state: Mapping[str, Any], index: Index) -> tuple[dict[str, Any], list[str]]:
    """The state to load into: what an optimizer does not have yet is made from what is stored.

    Returns:
        The state, and prefixes of keys that nobody misses if they are not loaded.
    """
    names = _names(state)
    quiet: list[str] = []

    def made(path: KeyPath, keeper: Any) -> Any:
        if not isinstance(keeper, Optimizer):
            return _state_of(keeper, names)
        quiet.append(".".join(map(str, path)) + ".")
        return _optimizer_template(keeper, names, index, path)

    return _copied(state, made), quiet


def fold(state: Any, loaded: Any) -> None:
    """Give what was loaded back to the containers and keepers of a state."""
    names = _names(state)
    _fold(state, loaded, names)


def refuse(state: Any, loaded: Any) -> None:
    """Raise for what `fold` could not take, as far as the values that are no tensors tell.

    Raises:
        CheckpointError: Parameters that are in one group now had different settings.
    """
    names = _names(state)
    problems = [
        problem
        for value, new in _pairs(state, loaded)
        if isinstance(value, Optimizer)
        for problem in group_problems(names, value, new)
    ]
    if problems:
        raise CheckpointError(" ".join(problems))


def _pairs(state: Any, loaded: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a state that is no container, and what was loaded for it."""
    items: Any = state.items() if isinstance(state, Mapping) else enumerate(state)
    for k, value in items:
        if _is_container(value):
            yield from _pairs(value, loaded[k])
        else:
            yield value, loaded[k]


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and is_entered(value))


def is_keeper(value: Any) -> bool:
    """Whether a value keeps a state of its own."""
    if isinstance(value, (Tensor, Mapping, type)):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _copied(value: Any, make: Any, path: KeyPath = ()) -> Any:
    """Containers copied, keepers replaced."""
    if isinstance(value, Mapping):
        return {k: _copied(v, make, (*path, str(k))) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v, make, (*path, i)) for i, v in enumerate(value)]
    return make(path, value) if is_keeper(value) else value


def _state_of(keeper: Any, names: Mapping[int, str]) -> Any:
    if isinstance(keeper, nn.Module):
        return get_model_state_dict(keeper)
    if isinstance(keeper, Optimizer):
        return optimizer_state(names, keeper)
    return keeper.state_dict()


def _modules(value: Any, path: KeyPath = ()) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield ".".join(map(str, path)), value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _modules(v, (*path, str(k)))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _modules(v, (*path, i))


def _names(state: Any) -> dict[int, str]:
    """The names of all parameters of a state's modules; of several modules with the module's key before."""
    modules = list(_modules(state))
    out: dict[int, str] = {}
    for key, module in modules:
        for p, name in parameter_names(module).items():
            out.setdefault(p, name if len(modules) == 1 else f"{key}.{name}")
    return out


def _optimizer_template(
    optimizer: Optimizer, names: Mapping[int, str], index: Index, path: KeyPath
) -> dict[str, Any]:
    template = optimizer_state(names, optimizer)
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    state = {name: values for name, values in template["state"].items() if name in parameters}
    out: dict[str, Any] = {"state": {}, "param_groups": None}
    depth = len(path)
    for key, entry in index.entries.items():
        at = index.paths.get(key, (key,))
        if at[:depth] != path or len(at) < depth + 2:
            continue
        inner = at[depth:]
        if inner[0] == "param_groups":
            out["param_groups"] = out["param_groups"] or []
            tensor = isinstance(entry, TensorEntry)  # of a learning rate, say
            put(out, inner, torch.empty(entry.shape, dtype=entry.dtype) if tensor else None)
        elif inner[0] == "state" and inner[1] in parameters:
            name, what = str(inner[1]), str(inner[2])
            have = state.get(name, {}).get(what) if len(inner) == 3 else None
            if isinstance(entry, TensorEntry) and not _fits(have, entry):
                have = _blank(entry, parameters[name])
            put(out["state"].setdefault(name, {}), inner[2:], have)  # lists of tensors, too
    return out


def _fits(have: Any, entry: TensorEntry) -> bool:
    return isinstance(have, Tensor) and (tuple(have.shape), have.dtype) == (
        entry.shape,
        entry.dtype,
    )


def _blank(entry: TensorEntry, p: Tensor) -> Tensor:
    """Memory for a tensor of an optimizer's state: like its parameter, if it is as large."""
    device = p._spec.layout.mesh.device_type if isinstance(p, DTensor) else p.device
    if not entry.shape:
        return torch.empty((), dtype=entry.dtype)
    if not isinstance(p, DTensor):
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    layout = p._spec.layout if entry.shape == tuple(p.shape) else None
    outline = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    return distribute_tensor(outline, p.device_mesh, layout)  # made real when it is loaded


def _fold(state: Any, loaded: Any, names: Mapping[int, str]) -> None:
    target: Any = state
    items: list[tuple[Any, Any]] = list(
        state.items() if isinstance(state, Mapping) else enumerate(state)
    )
    for k, value in items:
        new = loaded[k]
        keeper: Any = value
        if isinstance(value, nn.Module):
            take_model_state(value, new)
        elif isinstance(value, Optimizer):
            take_optimizer_state(names, value, new)
        elif is_keeper(value):
            keeper.load_state_dict(new)
        elif _is_container(value):
            _fold(value, new, names)
        elif value is not new:
            target[k] = new
