"""Tensors joined: other dims stay sharded, pending sums stay pending."""

from collections.abc import Callable
from typing import Any

import torch

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Cold and warm."""
    return lambda *args: (fn(*args), fn(*args))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


def test_cat() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            torch.cat([x, y]),
            torch.cat((x, x, y), 0),
            torch.concat([y, x], dim=-3),
            torch.cat([x], 1),
        )

    assert not sweep(
        twice(joined), rand(5, 3, 4), rand(2, 3, 4), meshes=((4,), (2, 2)), extra=3
    )
    assert not sweep(
        twice(lambda x, y: torch.cat([x, y], -1)), rand(5, 4), rand(5, 1), meshes=((4,),)
    )
    assert not sweep(lambda x: torch.cat([x, torch.zeros(0, dtype=D)]), rand(5), meshes=((2,),))
    assert not sweep(
        lambda x, i: torch.cat([x, i]),
        rand(5, 2),
        torch.ones(3, 2, dtype=torch.int64),
        meshes=((2,),),
    )


def test_stack_and_relatives() -> None:
    def stacked(x: torch.Tensor, y: torch.Tensor) -> Any:
        both = [x, y]
        more = (
            torch.hstack(both),
            torch.vstack(both),
            torch.dstack(both),
            torch.column_stack(both),
        )
        return torch.stack(both), torch.stack((x, y), -1), torch.stack([y, x], dim=1), *more

    assert not sweep(twice(stacked), rand(5, 3, 4), rand(5, 3, 4), meshes=((4,),), extra=3)
    assert not sweep(stacked, rand(5), rand(5), meshes=((4,),), extra=3)
    assert not sweep(lambda x, y: torch.vstack([x, y]), rand(4), rand(3, 4), meshes=((2,),))
    assert not sweep(
        lambda x, y: torch.column_stack([x, y]), rand(4), rand(4, 3), meshes=((2,),)
    )
    assert not sweep(
        lambda x, y: (torch.hstack([x, y]), torch.stack([x, y])), rand(), rand(), meshes=((2,),)
    )


def test_aten_forms() -> None:
    aten = torch.ops.aten

    def forms(x: torch.Tensor, y: torch.Tensor) -> Any:
        return aten.cat.default([x, y], 1), aten.stack.default([x, y], 1)

    assert not sweep(twice(forms), rand(3, 4), rand(3, 4), meshes=((2,),))


def test_nothing_moves() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.cat([x, y], 1)
        torch.stack([x, y], 1)
        torch.stack([x, y])
        torch.hstack([x, y])
        torch.dstack([x, y])

    both = [rand(5, 3, 4), rand(5, 3, 4)]
    for combo in (((S(0),), (S(0),)), ((S(0),), (R,)), ((P,), (P,)), ((P,), (R,))):
        assert bytes_moved(joined, both, (2,), combo) == 0


def test_layouts() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(rand(4, 6), mesh, [S(0), S(1)])
        y = distribute_tensor(rand(4, 6), mesh, [S(0), S(1)])
        assert torch.stack([x, y]).placements == (S(1), S(2))
        assert torch.cat([x, y], 1).placements == (S(0), S(1))

    simulate(on_rank, 4)


def test_what_has_no_elements_and_no_dims_is_left_out() -> None:
    none, x = torch.zeros(0, dtype=D), rand(5, 6)

    def fn(none: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([none, x, none, x], 0)

    assert not sweep(fn, none, x, extra=4)
    assert not sweep(lambda n, x: torch.cat([n, x[0]]), none, x, extra=2)
    for d in (0, 1):
        moved = bytes_moved(
            lambda n, x, d=d: torch.cat([n, x], d), [none, x], (2,), ((R,), (S(d),))
        )
        assert not moved
