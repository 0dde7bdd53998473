"""Every ``torch.optim`` optimizer of torch's own database, with every set of its options, against one device.

Parameters are cut evenly, unevenly, finer than they have rows, or whole, in two groups; after two steps the
state is loaded into a fresh optimizer, which goes on. Default options meet the loop, foreach, fused and the
loop that autograd records; the others meet one of these in turn, or each with ``SHARDWISE_LAYOUTS`` set.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate

R, S = Replicate(), Shard
# Shape, placement on the mesh (2,): even, uneven, with an empty piece, whole.
PARAMETERS: tuple[tuple[tuple[int, ...], Any], ...] = (
    ((4, 6), S(0)),
    ((5, 3), S(1)),
    ((1, 5), S(0)),
    ((5, 2), S(0)),
    ((), R),
)
MATRICES = tuple(p for p in PARAMETERS if len(p[0]) == 2)
ALL = "SHARDWISE_LAYOUTS" in os.environ
# Their iteration runs in bfloat16, whose roundings depend on the order of a sum.
ROUGH = {"Muon": 1e-2}
BY_NAME = {info.optim_cls.__name__: info for info in optim_db}
SPARSE = [name for name, info in BY_NAME.items() if info.only_supports_sparse_grads]
DENSE = [name for name in BY_NAME if name not in SPARSE]


def table(info: OptimizerInfo) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return MATRICES if info.optim_cls is torch.optim.Muon else PARAMETERS


def numbers(info: OptimizerInfo, dtype: torch.dtype, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=dtype) for shape, _ in table(info)]


def forms(info: OptimizerInfo, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The plain loop, foreach, fused, and the loop that autograd may record."""
    out: list[dict[str, Any]] = [
        {"foreach": False} if "foreach" in info.supported_impls else {}
    ]
    if "foreach" in info.supported_impls and not isinstance(options.get("lr"), Tensor):
        out.append({"foreach": True})
    if "fused" in info.supported_impls:
        out.append({"fused": True})
    if "differentiable" in info.supported_impls:
        out.append({"differentiable": True})
    return out


def optimizer(info: OptimizerInfo, params: list[Any], options: dict[str, Any]) -> Any:
    """One group, or two whose learning rates differ."""
    options = copy.deepcopy(
        options
    )  # a learning rate that is a tensor is written to by schedules
    if not info.supports_param_groups:
        return info.optim_cls(params, **options)
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.02}]
    return info.optim_cls(groups, **options)


def steps(
    info: OptimizerInfo, opt: Any, params: list[Any], goals: list[Any], which: tuple[int, ...]
) -> None:
    """Steps on a loss with another curvature at each, the learning rate falling in between."""
    for step in (
        which[:1] if info.step_requires_closure else which
    ):  # such a step has many inside

        def gradients(step: int = step) -> Any:
            opt.zero_grad()
            if not params[0].requires_grad:
                for k, (p, t) in enumerate(zip(params, goals)):
                    p.grad = (p.detach() - t) * (1.0 + 0.2 * step + 0.06 * k)
                return None
            loss = 0.0
            for k, (p, t) in enumerate(zip(params, goals)):
                d = p - t
                loss = loss + (d * d.conj()).real.sum() * (0.5 + 0.1 * step + 0.03 * k)
            loss.backward()
            return loss

        if info.step_requires_closure:
            opt.step(gradients)
        else:
            gradients()
            with torch.no_grad():
                opt.step()
        for group in opt.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] *= 0.9


def leaves(ts: list[Any], options: dict[str, Any]) -> list[Any]:
    """Parameters; a step that autograd records must not write into leaves that require grad."""
    return [nn.Parameter(t, requires_grad=not options.get("differentiable")) for t in ts]


def run(
    info: OptimizerInfo, params: list[Any], goals: list[Any], options: dict[str, Any]
) -> list[Any]:
    """Two steps, then one of a fresh optimizer with the state of the first."""
    opt = optimizer(info, params, options)
    steps(info, opt, params, goals, (0, 1))
    again = leaves([p.detach().clone() for p in params], options)
    fresh = optimizer(info, again, options)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(info, fresh, again, goals, (2,))
    return again


def failures(
    info: OptimizerInfo, dtype: torch.dtype, choices: list[dict[str, Any]]
) -> set[str]:
    """What differs after all steps; one world of ranks for all choices, so that few programs are compiled."""
    tol = ROUGH.get(info.optim_cls.__name__, 1e-9)
    goals = numbers(info, dtype, 2)
    wanted = [run(info, leaves(numbers(info, dtype, 1), o), goals, o) for o in choices]

    def on_rank() -> list[str]:
        mesh = init_device_mesh("cpu", (2,))

        def placed(ts: list[Tensor]) -> list[DTensor]:
            return [
                distribute_tensor(t, mesh, [p], src_data_rank=None)
                for t, (_, p) in zip(ts, table(info))
            ]

        bad: list[str] = []
        for options, want in zip(choices, wanted):
            start = leaves(placed(numbers(info, dtype, 1)), options)
            got = run(info, start, placed(goals), options)
            for k, (g, w, (_, placed_as)) in enumerate(zip(got, want, table(info))):
                assert g.placements == (placed_as,)
                if not torch.allclose(g.detach().full_tensor(), w.detach(), rtol=tol, atol=tol):
                    bad.append(f"{options}: parameter {k}")
        return bad

    return {line for lines in simulate(on_rank, 2) for line in lines}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DENSE)
def test_optimizer_equals_one_device(name: str) -> None:
    info = BY_NAME[name]
    choices: list[dict[str, Any]] = []
    for i, given in enumerate(info.optim_inputs_func("cpu")):
        ways = forms(info, given.kwargs)
        some = ways if i == 0 or ALL else [ways[i % len(ways)]]
        choices += [{**given.kwargs, **form} for form in some]
    assert not failures(info, torch.float64, choices)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in DENSE if BY_NAME[n].supports_complex])
def test_complex_parameters(name: str) -> None:
    info = BY_NAME[name]
    choices = [form for form in forms(info, {}) if not form.get("fused")]  # torch has none
    assert not failures(info, torch.complex128, choices)


@pytest.mark.parametrize("name", [n for n in DENSE if BY_NAME[n].has_capturable_arg])
def test_capturable_is_refused_on_a_cpu_as_torch_refuses_it(name: str) -> None:
    info = BY_NAME[name]
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises((AssertionError, RuntimeError)) as plain:
        info.optim_cls([p], capturable=True, foreach=False).step()

    def on_rank() -> str:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [S(0)]))
        p.grad = distribute_tensor(torch.ones(3), mesh, [S(0)])
        with pytest.raises(plain.type) as raised:
            info.optim_cls([p], capturable=True, foreach=False).step()
        return str(raised.value)

    assert simulate(on_rank, 2) == [str(plain.value)] * 2


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_refused(name: str) -> None:
    """A table's gradient is dense here, and these optimizers want sparse ones: torch says so on every rank."""
    info = BY_NAME[name]

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        w = nn.Parameter(distribute_tensor(torch.ones(6, 2), mesh, [S(0)]))
        ids = distribute_tensor(torch.tensor([0, 3]), mesh, [R])
        nn.functional.embedding(ids, w, sparse=True).sum().backward()
        with pytest.raises(RuntimeError, match="dense gradients"):
            info.optim_cls([w]).step()

    simulate(on_rank, 2)
