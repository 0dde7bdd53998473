"""The state of an optimizer that has not stepped yet: what there is to load into."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether an optimizer has neither state nor gradients to make it from."""
    return not optimizer.state and not any(
        p.grad is not None for group in optimizer.param_groups for p in group["params"]
    )


def initial_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """What an optimizer will keep for each parameter, with the values of before its first step.

    A twin of the optimizer steps once on zeros that are laid out like the parameters. The optimizer, its
    parameters and its hooks see nothing of it.

    Args:
        optimizer: A fresh one; see `is_fresh`.

    Returns:
        State by parameter. Empty where a step needs more than gradients (a closure, sparse gradients).
    """
    if isinstance(optimizer, SparseAdam) or _needs_more(optimizer):
        return {}
    stand_ins: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            with torch.no_grad():
                stand_ins[p] = twin_p = torch.zeros_like(p)
                if p.requires_grad:
                    twin_p.requires_grad_()
                    twin_p.grad = torch.zeros_like(twin_p)
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler's, bound to the optimizer itself
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        | {"params": [stand_ins[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.step()
    made: dict[Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if stand_ins[p] in twin.state:
                made[p] = _rewound(twin.state[stand_ins[p]], group)
    return made


def _needs_more(optimizer: Optimizer) -> bool:
    parameters = list(signature(type(optimizer).step).parameters.values())[1:]
    return any(
        p.default is Parameter.empty
        and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        for p in parameters
    )


def _rewound(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The state with what even a step on zeros has changed as it was before."""
    before = {"step": 0, "mu_product": 1, "exp_inf": 0, "eta": group.get("lr", 0)}
    for key in before.keys() & state.keys():
        value, was = state[key], before[key]
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.fill_(was)
        else:
            state[key] = was
    return dict(state)
