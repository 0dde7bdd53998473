"""Whole training programs, captured and eager: what a random search over such programs has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    capture,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.capture.ir import alike, flatten
from shardwise.errors import CaptureError
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)


def local(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x.to_local().detach().clone()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def kept(model: nn.Module) -> list[Any]:
    """What a program leaves in a model, here."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    return [local(x) for x in tensors]


def as_eager(make: Callable[[int], Any], world: int = 2) -> list[Any]:
    """Four calls of a captured step against four of the eager one, bit for bit; the captured steps.

    Args:
        make: Gives a step and its model, for a rank.
        world: How many ranks.
    """

    def run(rank: int) -> Any:
        found, last = [], None
        for wrapped in (lambda f: f, capture):
            torch.manual_seed(0)
            step, model = make(rank)
            step = last = wrapped(step)
            outs = [[local(x) for x in step()] for _ in range(4)]
            found.append([x for out in outs for x in out] + kept(model))
        for wanted, got in zip(*found, strict=True):
            assert wanted is got or torch.equal(wanted, got)
        return last

    return simulate(run, world)


def test_a_view_of_a_parameter_has_no_history_and_can_be_read_later() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        q = nn.Parameter(torch.ones(4, 3))

        def step() -> Any:
            with torch.no_grad():
                p.add_(1)
                q.add_(1)
            return [y for x in (p.detach(), q.detach()) for y in (x, x.t(), x[:, :1])]

        captured = capture(step)
        for i in range(4):
            got = captured()
            with torch.no_grad():
                p.mul_(2)
                q.mul_(2)
            for x in got:
                assert not x.requires_grad
                shown = x.to_local() if isinstance(x, DTensor) else x.view_as(x)
                assert shown.eq(6 * 2**i - 2).all()  # it shows the parameter as it is now

    simulate(run, 2)


def test_plain_gradients_are_clipped_next_to_sharded_ones() -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(3, 4)

        def step() -> Any:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return (norm,)

        return step, model

    as_eager(make)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0],
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
        lambda x, y: F.logsigmoid(x),
    ],
)
def test_each_value_of_a_run_has_the_strides_of_the_recorded_one(call: Any) -> None:
    x = torch.randn(4, 5, 3).transpose(1, 2).requires_grad_()
    y = torch.randn(4, 5, 3).transpose(1, 2)
    step = capture(lambda: torch.autograd.grad(call(x, y).square().sum(), x))
    step()
    step()
    one = step.last
    values: dict[Any, Any] = {
        v: slot.get([]) for v, slot in one.step.inputs if v.kind == "tensor"
    }
    checked = 0
    with torch.no_grad():
        for n in flatten(one.step.nodes):
            assert n.kind == "call", "a step on plain tensors"

            def filled(tree: Any) -> Any:
                if isinstance(tree, (list, tuple)):
                    return type(tree)([filled(a) for a in tree])
                return (
                    values.get(tree, tree) if getattr(tree, "fake", None) is not None else tree
                )

            assert n.target is not None
            got = n.target(*filled(n.args), **{k: filled(a) for k, a in n.kwargs.items()})
            for v, real in zip(n.outs, got if isinstance(got, (list, tuple)) else [got]):
                values[v] = real
                assert alike(v.fake, real), n
                checked += 1
    assert checked


def test_buffers_that_the_first_rank_sends_are_sent_by_it() -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        model = data_parallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), mesh)
        x = torch.randn(5, 4) + rank

        def step() -> Any:
            model.zero_grad()
            model(x).square().mean().backward()
            return ()

        return step, model

    for step in as_eager(make):
        assert step.last.log, "the passes have been done"


def test_ranks_agree_that_meet_in_no_mesh_of_a_tensor() -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        parallelize_module(model, mesh["tp"], {"2": ColwiseParallel()})
        data_parallel(model, mesh["dp"])
        x = torch.randn(5 + 30 * (rank // 2), 4)  # 1 of 2 knows more of its memory

        def step() -> Any:
            model.zero_grad()
            model(x).square().mean().backward()
            return ()

        return step, model

    steps = as_eager(make, 4)
    assert all(s.last.log for s in steps), "the passes have been done"
    assert (
        len({tuple(n.info["carries"] for n in s.last.step.collectives()) for s in steps}) == 1
    )


def test_a_fully_sharded_parameter_without_a_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(Partly(), nn.Linear(4, 3))
        fully_shard(model[0], mesh)
        fully_shard(model, mesh)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(5, 4) + rank

        def step() -> Any:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return ()

        return step, model

    as_eager(make)


def test_ranks_that_use_other_parameters_of_a_group_are_told() -> None:
    class Either(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.a, self.b = first, nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return (self.a if self.first else self.b)(x)

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = fully_shard(Either(rank == 0), mesh)
        step = capture(lambda: model(torch.ones(2, 4)).sum().backward())
        step()
        model.zero_grad()
        with pytest.raises(CaptureError, match="has no gradient"):
            step()

    simulate(run, 2)


def test_what_was_a_view_of_a_tensor_before_it_was_transposed_in_place() -> None:
    def step(x: Any) -> Any:
        y = x * 2
        z = y.t()
        before = z @ x
        y.t_()
        shown, y = y[0] + 1, y.unsqueeze_(0)
        return before, shown, y.sum(1), z, y.squeeze_(0) @ x

    captured = capture(step)
    for _ in range(4):
        x = torch.randn(3, 3)
        for wanted, got in zip(step(x), captured(x), strict=True):
            assert torch.equal(wanted, got)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.block, x.tanh(), use_reentrant=True)
        return x


@pytest.mark.parametrize("plain", [True, False])
def test_a_gradient_that_comes_in_parts_is_whole(plain: bool) -> None:
    """Reentrant checkpoints run a backward each; a module that is called again has a part in each of them."""

    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        model = data_parallel(Twice(), mesh)
        x: Any = torch.randn(5, 4)
        x = x + rank if plain else distribute_tensor(x, mesh, [Shard(0)])

        def step() -> Any:
            model.zero_grad()
            model(x).square().mean().backward()
            return ()

        return step, model

    as_eager(make)


def test_gathers_whose_results_are_viewed_before_they_are_copied_travel_together() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for shape, there, back in (
            ((8,), [Shard(0), Replicate()], [Replicate(), Shard(0)]),
            ((8,), [Shard(0), Shard(0)], [Replicate(), Shard(0)]),
            ((4, 8), [Shard(1), Shard(0)], [Shard(1), Shard(1)]),
        ):
            x, y = (distribute_tensor(torch.randn(shape), mesh, there) for _ in range(2))

            def step(x: Any = x, y: Any = y, back: Any = back) -> Any:
                return x.redistribute(placements=back) * 2, y.redistribute(placements=back) * 3

            captured = capture(step)
            for _ in range(3):
                for wanted, got in zip(step(), captured(), strict=True):
                    assert torch.equal(wanted.to_local(), got.to_local())

    simulate(run, 4)


def test_a_rank_that_holds_nothing_of_a_parameter_need_not_read_it() -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 1, 1))
        for module in model:
            for name, p in list(module.named_parameters()):
                setattr(
                    module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
                )
        x = distribute_tensor(torch.randn(4, 1, 4, 4), mesh, [Shard(0)])

        def step() -> Any:
            model.zero_grad()
            model(x).square().mean().backward()
            return ()

        return step, model

    as_eager(make, 4)
