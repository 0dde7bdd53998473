"""Every ``torch.nn`` module of torch's own database, on sharded inputs and parameters, against one device.

The first sample of each module meets batch-sharded inputs, and two samples a layout drawn by a seed;
``SHARDWISE_LAYOUTS=25`` tries all samples, each on so many drawn layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import copy
from itertools import islice
import math
import os
import random
from typing import Any
import warnings
import zlib

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    rng,
    simulate,
)
from shardwise.layout.placement import Placement
from shardwise.testing.sweep import lay_out

R = Replicate()
MESHES = ((2,), (4,), (2, 2))
LAYOUTS = int(os.environ.get("SHARDWISE_LAYOUTS", "0"))
SAMPLES = None if LAYOUTS else 2
TOL = 1e-9


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for x in tree for t in tensors(x)]
    if isinstance(tree, dict):
        return [t for x in tree.values() for t in tensors(x)]
    return []


def replaced(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The tree with ``fn`` of each tensor."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([replaced(x, fn) for x in tree])
    if isinstance(tree, dict):
        return {k: replaced(x, fn) for k, x in tree.items()}
    return tree


def fits(t: Tensor, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements, with a cut of a dim that the tensor lacks left out."""
    number = t.is_floating_point() or t.is_complex()
    return tuple(
        R
        if (isinstance(p, Shard) and p.dim >= t.ndim) or (p.is_partial() and not number)
        else p
        for p in placements
    )


class Layouts:
    """For each input and each parameter its placements; for parameters also "last" for their last dim."""

    def __init__(
        self,
        mesh: tuple[int, ...],
        inputs: list[tuple[Placement, ...]],
        parameters: tuple[Placement | str, ...],
    ) -> None:
        self.mesh, self.inputs, self.parameters = mesh, inputs, parameters

    def of_parameter(self, p: Tensor) -> tuple[Placement, ...]:
        chosen = tuple(Shard(p.ndim - 1) if q == "last" else q for q in self.parameters)
        return fits(p, chosen) if p.ndim else (R,) * len(self.mesh)

    def __str__(self) -> str:
        placed = "; ".join(",".join(map(str, ps)) for ps in self.inputs)
        return f"mesh {self.mesh}, inputs [{placed}], parameters {self.parameters}"


def layouts(inputs: list[Tensor], seed: int, batch: bool) -> Iterator[Layouts]:
    """Batch-sharded inputs and whole parameters; then random ones: at most one input not like the others."""
    rng_ = random.Random(seed)
    mesh = rng_.choice(MESHES)
    rest = (R,) * (len(mesh) - 1)
    if batch:
        yield Layouts(mesh, [fits(t, (Shard(0), *rest)) for t in inputs], (R,) * len(mesh))
    deepest = max((t.ndim for t in inputs), default=0)
    for _ in range(LAYOUTS or 1):
        mesh = rng_.choice(MESHES)
        axes = range(len(mesh))
        anything = [R, Partial(), *(Shard(d) for d in range(deepest))]
        same = tuple(rng_.choice([R, *(Shard(d) for d in range(deepest))]) for _ in axes)
        placed = [fits(t, same) for t in inputs]
        if inputs:
            i = rng_.randrange(len(inputs))
            placed[i] = fits(inputs[i], tuple(rng_.choice(anything) for _ in axes))
        parameters = tuple(rng_.choice([R, Shard(0), "last"]) for _ in axes)
        yield Layouts(mesh, placed, parameters)


def spread(net: nn.Module, mesh: Any, chosen: Layouts) -> nn.Module:
    """The module with its parameters laid out."""

    def cut(name: str, sub: nn.Module, mesh: Any) -> None:
        for key, p in list(sub.named_parameters(recurse=False)):
            laid = distribute_tensor(p.detach(), mesh, chosen.of_parameter(p))
            sub.register_parameter(key, nn.Parameter(laid, p.requires_grad))

    return distribute_module(net, mesh, cut)


def forward(net: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """The floating results."""
    torch.manual_seed(7)
    return tensors(net(*args, **kwargs))


def backward(outs: list[Any], seeds: list[Tensor | None], mesh: Any = None) -> None:
    """From every result that requires grad, with the given seeds."""
    pairs = [(o, s) for o, s in zip(outs, seeds) if s is not None]
    if pairs:
        torch.autograd.backward(
            [o for o, _ in pairs],
            [s if mesh is None else distribute_tensor(s, mesh) for _, s in pairs],
        )


def compare(what: str, got: Any, want: Tensor | None) -> None:
    """One value with its reference."""
    if want is None:
        assert got is None or got.full_tensor().abs().sum() == 0, f"{what}: want none"
        return
    assert got is not None, f"{what}: there is none"
    whole = got.detach().full_tensor() if isinstance(got, DTensor) else got.detach()
    assert tuple(got.shape) == tuple(want.shape), what
    assert got.dtype == want.dtype, what
    torch.testing.assert_close(
        whole, want.detach(), rtol=TOL, atol=TOL, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def check(net: nn.Module, sample: Any, training: bool, chosen: Layouts) -> None:
    """One sample on one layout."""
    plain = copy.deepcopy(net).train(training)
    args = replaced(sample.args, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
    kwargs = replaced(
        sample.kwargs, lambda t: t.detach().clone().requires_grad_(t.requires_grad)
    )
    want = forward(plain, args, kwargs)
    seeds = [torch.randn_like(w) if w.requires_grad else None for w in want]
    backward(want, seeds)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", chosen.mesh)
        module = spread(copy.deepcopy(net), mesh, chosen).train(training)
        places = iter(chosen.inputs)
        given = replaced(
            (sample.args, sample.kwargs),
            lambda t: lay_out(t.detach(), mesh, next(places)).requires_grad_(t.requires_grad),
        )
        got = forward(module, *given)
        assert len(got) == len(want), "number of results"
        for i, (g, w) in enumerate(zip(got, want)):
            compare(f"result {i}", g, w)
            assert g.requires_grad == w.requires_grad, f"result {i}: requires_grad"
        backward(got, seeds, mesh)
        for i, (a, p) in enumerate(zip(tensors(given), tensors((args, kwargs)))):
            compare(f"gradient of input {i}", a.grad, p.grad)
        of_plain = dict(plain.named_parameters())
        for name, p in module.named_parameters():
            compare(f"gradient of {name}", p.grad, of_plain[name].grad)
        of_plain = dict(plain.named_buffers())
        for name, b in module.named_buffers():
            compare(f"buffer {name}", b, of_plain[name])

    with rng(like="torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulate(on_rank, math.prod(chosen.mesh))


def samples(info: ModuleInfo, training: bool) -> Iterator[tuple[str, ModuleInput]]:
    """The module's samples."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from (
            (f"{i} {s.desc}", s)
            for i, s in enumerate(
                info.module_inputs_func(
                    info,
                    device="cpu",
                    dtype=torch.float64,
                    requires_grad=True,
                    training=training,
                )
            )
        )


def failures(info: ModuleInfo) -> list[str]:
    """Every sample in training and in eval mode, on the chosen layouts."""
    bad: list[str] = []
    for training in (True, False) if info.train_and_eval_differ or LAYOUTS else (True,):
        for desc, sample in islice(samples(info, training), SAMPLES):
            torch.manual_seed(3)
            made = sample.constructor_input
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                net = info.module_cls(*made.args, **made.kwargs)
                net = net.to(torch.float64)
                if any(map(nn.parameter.is_lazy, net.parameters())):  # made by the first call
                    net(*sample.forward_input.args, **sample.forward_input.kwargs)
                where = f"{info.name} {desc} {'train' if training else 'eval'}"
                inputs = tensors((sample.forward_input.args, sample.forward_input.kwargs))
                for chosen in layouts(inputs, zlib.crc32(where.encode()), desc[0] == "0"):
                    try:
                        check(net, sample.forward_input, training, chosen)
                    except Exception as error:
                        text = " ".join(str(error).split())[:300]
                        bad.append(f"{where}: {chosen}: {type(error).__name__}: {text}")
    return bad


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name.replace("nn.", ""))
def test_module_equals_one_device(info: ModuleInfo) -> None:
    bad = failures(info)
    assert not bad, "\n".join(bad)
