"""Writing into a view that needed communication reaches its base, or raises; it is never lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import sweep

WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[1].fill_(3.0),
    "rows": lambda x: x[1:4].add_(5),
    "column": lambda x: x[:, 1].zero_(),
    "steps": lambda x: x[3:, ::2].copy_(torch.ones(2, 2)),
    "item": lambda x: x[1].__setitem__(slice(0, 2), 9.0),
    "operator": lambda x: x[4].__iadd__(2.0),
    "view": lambda x: x.view(4, 5).mul_(2),
    "view of a view": lambda x: x.view(20)[3:9].sub_(1),
    "view_as": lambda x: x.view_as(torch.empty(2, 10)).copy_(torch.ones(2, 10)),
    "twice": lambda x: x[2].mul_(2).add_(1),
    "where": lambda x: x[1].masked_fill_(x[1] > 5, 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_and_gradient(name: str) -> None:
    def fn(x: Any) -> Any:
        y = x * x
        WRITES[name](y)
        return y

    assert not sweep(
        fn, torch.arange(20.0, dtype=torch.float64).view(5, 4), meshes=((2,), (2, 2)), extra=2
    )


def test_a_cached_program_does_not_hide_the_view() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.zeros(5, 4, device_mesh=mesh, placements=[Shard(0)])
        view = x.view(4, 5)
        other = sw.zeros(4, 5, device_mesh=mesh, placements=view.placements)
        other.add_(1.0)  # the same call on the same layout, compiled for a tensor of its own
        other.add_(1.0)
        view.add_(1.0)
        assert torch.equal(x.full_tensor(), torch.ones(5, 4))
        assert torch.equal(view.full_tensor(), torch.ones(4, 5))

    sw.simulate(on_rank, 2)


def test_a_leaf_is_refused_as_in_torch() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.zeros(5, 4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):
            x[1].fill_(2.0)
        with torch.no_grad():
            x[1].fill_(2.0)
        assert float(x.detach().sum()) == 8.0

    sw.simulate(on_rank, 2)


def test_views_of_one_base_see_each_others_writes() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        x = sw.zeros(5, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
        first, second = x.view(4, 5), x.view(20)
        first.add_(1)
        first.add_(1)
        second.add_(1)
        for view in (x, first, second):
            assert torch.equal(view.full_tensor().reshape(-1), torch.full((20,), 3.0))

    sw.simulate(on_rank, 4)


def test_plain_tensors_are_written_whole() -> None:
    """Into what every rank has whole, a pending sum goes as its sum."""

    def fn(x: Any) -> Any:
        a, b, c = (torch.ones(5, 4, dtype=torch.float64) for _ in range(3))
        a.mul_(x)
        b += x
        c.div_(x).addcmul_(x, x)
        return x * a, x * b, x * c

    x = torch.arange(1.0, 21.0, dtype=torch.float64).view(5, 4)
    with torch.no_grad():
        assert not sweep(fn, x, meshes=((2,), (2, 2)), extra=2, grad=False)
