"""The division by the number of labels comes last where that is known to be the same, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    capture,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.capture.passes import COMPILED, late_mean

S0 = [Shard(0)]
IGNORED = -100


class Net(nn.Module):
    """All kinds of calls between the loss and the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.mix = nn.Linear(4, 12)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids).unflatten(0, (-1, 2))
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = x + self.down(F.gelu(self.up(x)) * torch.tanh(self.up(x)).relu())
        return self.head(x).flatten(0, 1)


Program = Callable[[Net, Any, Any, Any], Any]
PROGRAMS: dict[str, tuple[Program, bool]] = {}  # by name, and whether the division comes last


def program(late: bool) -> Callable[[Program], Program]:
    def note(fn: Program) -> Program:
        PROGRAMS[fn.__name__] = fn, late
        return fn

    return note


def loss(late: bool) -> Callable[[Callable[[Net, Any, Any], Any]], None]:
    """Note the ordinary step of a loss."""

    def note(fn: Callable[[Net, Any, Any], Any]) -> None:
        def step(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
            opt.zero_grad()
            found = fn(model, ids, labels)
            found.backward()
            opt.step()
            return found

        step.__name__ = fn.__name__
        PROGRAMS[fn.__name__] = step, late

    return note


@program(late=True)
def plain(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
    opt.zero_grad()
    loss = F.cross_entropy(model(ids), labels)
    loss.backward()
    opt.step()
    return loss.detach()


@program(late=True)
def shown(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
    opt.zero_grad()
    loss = F.cross_entropy(model(ids), labels)
    loss.backward()
    opt.step()
    return loss.full_tensor(), loss.exp()


@program(late=True)
def clipped(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
    opt.zero_grad()
    (-F.cross_entropy(model(ids), labels) * 3 / 7).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    return norm


@program(late=True)
def accumulated(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
    loss = F.cross_entropy(model(ids), labels)
    loss.backward()  # onto the gradients of the call before
    opt.step()
    return loss


@loss(late=True)
def frozen(model: Net, ids: Any, labels: Any) -> Any:
    model.embed.weight.requires_grad_(False)
    return F.cross_entropy(model(ids), labels)


@program(late=True)
def by_hand(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
    loss = F.cross_entropy(model(ids), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            p -= 0.1 * g
    return grads[0].full_tensor(), loss


@program(late=False)
def second_order(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
    opt.zero_grad()
    loss = F.cross_entropy(model(ids), labels)
    (g,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    (loss + g.square().sum()).backward()
    opt.step()
    return loss


@loss(late=False)
def two_losses(model: Net, ids: Any, labels: Any) -> Any:
    logits = model(ids)
    some = torch.where(labels < 3, labels, IGNORED)
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits, some)


@loss(late=False)
def penalty(model: Net, ids: Any, labels: Any) -> Any:
    logits = model(ids)
    return F.cross_entropy(logits, labels) + logits.square().sum() / 100


@loss(late=False)
def weighted(model: Net, ids: Any, labels: Any) -> Any:
    weight = torch.arange(1.0, 8.0, dtype=torch.float64)
    return F.cross_entropy(model(ids), labels, weight=weight)


@loss(late=False)
def squared(model: Net, ids: Any, labels: Any) -> Any:
    return F.cross_entropy(model(ids), labels).square()


def megatron(name: str, module: nn.Module, mesh: Any) -> None:
    dim = {"up": 0, "down": 1}.get(name)
    if dim is not None:
        for key, p in module.named_parameters():
            split = distribute_tensor(p.detach(), mesh, [Replicate(), Shard(dim)])
            setattr(module, key, nn.Parameter(split))


def trained(
    fn: Program, labels: torch.Tensor, mesh: Any, how: Any, plan: bool = False, calls: int = 4
) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Net().double()
    kinds = S0
    if plan:
        kinds = [Shard(0), Replicate()]
    model = distribute_module(model, mesh, megatron if plan else None)
    opt = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    step = how(lambda ids, labels: fn(model, opt, ids, labels))
    seen: list[Any] = []
    for at in range(calls):
        torch.manual_seed(at)
        ids = torch.randint(7, labels.shape)
        given = distribute_tensor(ids, mesh, kinds), distribute_tensor(labels, mesh, kinds)
        out = step(*given)
        seen += [x.full_tensor() if isinstance(x, DTensor) else x for x in _listed(out)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    seen += [x.full_tensor() for x in (*model.parameters(), *grads)]
    return step, [x.detach().clone() for x in seen]


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple) else [x]


def is_late(step: Any) -> bool:
    return str(step.last.step).count("all_reduce sum over dp(") == 1


LABELS = {
    "all": torch.tensor([0, 1, 2, 3, 4, 5, 6, 0]),
    "uneven": torch.tensor([IGNORED, 1, IGNORED, IGNORED, 4, 5, 6, 0]),
    "none": torch.full((8,), IGNORED),
    "empty piece": torch.tensor([3, 5]),
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_eager_mode(name: str, labels: str) -> None:
    fn, late = PROGRAMS[name]

    def both() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        _, eager = trained(fn, LABELS[labels], mesh, lambda f: f)
        step, ours = trained(fn, LABELS[labels], mesh, lambda f: capture(f, passes=COMPILED))
        if labels != "empty piece":
            passes = dict(step.last.log)
            assert (str(passes["late_mean"]) != str(passes["redundant_moves"])) is late
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)

    simulate(both, world_size=2)


def test_beside_tensor_parallelism() -> None:
    def both() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        outs = []
        for how in (lambda f: f, lambda f: capture(f, passes=COMPILED)):
            step, seen = trained(plain, LABELS["uneven"], mesh, how, plan=True)
            outs.append(seen)
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert is_late(step), step.last.step

    simulate(both, world_size=4)


def test_the_number_travels_with_the_gradients() -> None:
    def count() -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step, _ = trained(plain, LABELS["all"], mesh, lambda f: capture(f, passes=COMPILED))
        return step.last.step.collectives()

    (collective,) = simulate(count, world_size=2)[0]
    parameters = len(list(Net().parameters()))
    assert collective.info["members"] == parameters + 1


def test_gradients_are_divided_by_one_call() -> None:
    def names() -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step, _ = trained(plain, LABELS["all"], mesh, lambda f: capture(f, passes=COMPILED))
        text = str(step.last.step)
        return text[text.index("reciprocal") :]

    after = simulate(names, world_size=2)[0]
    assert after.count("aten.mul_.Tensor(") == 1
    assert "aten.mul.Tensor(" not in after


def test_what_is_not_compiled_keeps_its_bits() -> None:
    def last() -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step, _ = trained(plain, LABELS["all"], mesh, capture)
        return [name for name, _ in step.last.log]

    assert late_mean.__name__ not in simulate(last, world_size=2)[0]


def test_ranks_that_see_other_graphs_do_without() -> None:
    """On one rank the gradient is zeros that come from nowhere; it would not be divided there."""

    def both() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        class Odd(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                (g,) = grads
                local = g.to_local()
                if mesh.get_rank() == 1:
                    local = torch.zeros(local.shape, dtype=local.dtype)
                return DTensor.from_local(
                    local, mesh, g.placements, run_check=False, shape=g.shape, stride=g.stride()
                )

        def odd(model: Net, opt: Any, ids: Any, labels: Any) -> Any:
            opt.zero_grad()
            loss = F.cross_entropy(Odd.apply(model(ids)), labels)
            loss.backward()
            opt.step()
            return loss.detach()

        outs = []
        for how in (lambda f: f, lambda f: capture(f, passes=COMPILED)):
            step, seen = trained(odd, LABELS["uneven"], mesh, how)
            outs.append(seen)
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert late_mean not in step.last.passes

    simulate(both, world_size=2)
