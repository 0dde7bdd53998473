"""Rolled, reversed, padded, sliced, joined over a sharded dim: only the rows that a rank lacks move."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.events import CommLog
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64
MESHES = ((4,), (2, 2))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


X = rand(7, 3, 5)
ROW = 3 * 5 * 8  # bytes of a row of dim 0
EVEN = rand(16, 3, 5)

CALLS: dict[str, Callable[..., Any]] = {
    "roll": lambda x: (x.roll(1, 0), x.roll((2, -1), (0, 2)), x.roll((3, 1), (1, 1))),
    "roll_flat": lambda x: (x.roll(1), x.roll(-17), x.roll(15), x[:, 0, 0].roll(3)),
    "flip": lambda x: (x.flip(0), x.flip(0, 2), torch.fliplr(x), torch.flipud(x)),
    "rot90": lambda x: tuple(torch.rot90(x, k, (0, 2)) for k in range(4)),
    "pad": lambda x: (
        F.pad(x, (1, 2)),
        F.pad(x, (-1, 1, 0, 0, 2, -3)),
        F.pad(x, (0, 0, 0, 0, 0, 3), value=2.0),
    ),
    "pad_otherwise": lambda x: tuple(
        F.pad(x, (2, 1), mode=m) for m in ("reflect", "replicate", "circular")
    ),
    "slice": lambda x: (
        x[1:],
        x[:-1],
        x[:, :, 1:-1],
        x[1:6, 1:],
        x.narrow(2, 1, 4),
        x[::2],
        x[None, 1:],
    ),
    "split": lambda x: (
        *x.split(3),
        *x.chunk(2, 2),
        *x.tensor_split((1, 5)),
        *x.split((4, 0, 3)),
    ),
    "unfold": lambda x: (
        x.unfold(0, 3, 1),
        x.unfold(0, 2, 3),
        x.unfold(2, 5, 1),
        x.unfold(0, 7, 2),
    ),
    "repeat": lambda x: (
        x.repeat(2, 1, 1),
        x.repeat(2, 3, 1, 2),
        x.tile(2),
        x.repeat_interleave(3, 0),
    ),
    "diff": lambda x: (
        x.diff(dim=0),
        x.diff(n=3, dim=0),
        x.diff(n=6, dim=2),
        x.diff(n=9, dim=0),
    ),
    "diagonal": lambda x: (x.diagonal(0, 0, 2), x.diagonal(2, 0, 2), x.diagonal(-4, 0, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_layout(name: str) -> None:
    assert not sweep(CALLS[name], X, meshes=MESHES, extra=2)


@pytest.mark.parametrize("name", ["roll", "flip", "pad", "slice", "split", "repeat", "diff"])
def test_fewer_rows_than_ranks(name: str) -> None:
    assert not sweep(CALLS[name], rand(7, 3, 5).flip(0), meshes=((8,),), extra=0)


def test_joined() -> None:
    y = rand(4, 3, 5)
    assert not sweep(lambda x, y: torch.cat([x, y, x]), X, y, meshes=MESHES, extra=3)
    assert not sweep(
        lambda x, y: torch.cat([x, y[:, :0], y], -1), rand(3, 2), rand(3, 5), meshes=((4,),)
    )
    cut = ((S(0),), (S(0),))
    # 16 + 16 rows on 4 ranks: the pieces of 4 become pieces of 8, of which 4 are rows of another rank's
    assert bytes_moved(lambda x, y: torch.cat([x, y]), [EVEN, EVEN], (4,), cut) == 6 * 4 * ROW


def test_second_derivatives() -> None:
    def slope(x: torch.Tensor) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = (F.pad(x, (0, 0, 0, 0, 1, 2), value=3.0).roll(2, 0) * x.repeat(2, 1, 1)[:10]) ** 3
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    assert not sweep(slope, X, meshes=((4,),), extra=1)


def test_integers_and_bools() -> None:
    ids = torch.arange(14).view(7, 2)
    assert not sweep(
        lambda i: (
            i.roll(1, 0),
            (i > 3).flip(0),
            F.pad(i, (0, 0, 1, 1), value=-1),
            i.diff(dim=0),
        ),
        ids,
        meshes=((4,),),
    )


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (lambda x: x.roll(1, 0), 4),  # one from each neighbour, around the end
        (lambda x: x.roll(1), 4),
        (lambda x: x.flip(0), 16),  # all rows change their rank
        (lambda x: F.pad(x, (0, 0, 0, 0, 1, 3)), 3),
        (lambda x: x[1:], 3),
        (lambda x: x[:-1], 0),
        (lambda x: x.narrow(0, 1, 15), 3),
        (lambda x: x.diff(dim=0), 3),
        (lambda x: x.unfold(0, 3, 1), 6),
        (lambda x: x.unfold(0, 4, 4), 0),
        (lambda x: x.repeat_interleave(2, 0), 0),
        (lambda x: x.chunk(4), 12),
        (lambda x: torch.trapezoid(x, dim=0), 0),
    ],
)
def test_only_neighbours_move(call: Callable[..., Any], rows: int) -> None:
    assert bytes_moved(call, [EVEN], (4,), ((S(0),),)) == rows * ROW
    assert bytes_moved(call, [EVEN], (2,), ((P,),)) == 0


def test_gradients_move_as_little() -> None:
    def on_rank() -> int:
        x = distribute_tensor(EVEN, init_device_mesh("cpu", (4,)), [S(0)]).requires_grad_()
        y = x.roll(1, 0) * 2
        with CommLog() as log:
            y.backward(y.detach())
        return log.bytes

    assert sum(simulate(on_rank, 4)) == 4 * ROW
