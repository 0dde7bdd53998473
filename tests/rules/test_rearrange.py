"""Triangles, flips, padding and the like."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64
SMALL = ((4,),)


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Cold and warm."""
    return lambda *args: (fn(*args), fn(*args))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


X = rand(5, 3, 7)


def test_rearranged() -> None:
    def triangles(x: torch.Tensor) -> Any:
        return x.tril(), torch.triu(x, diagonal=2), (x * 1).tril_(-1), x.triu(-1)

    assert not sweep(twice(triangles), X, meshes=((4,), (2, 2)), extra=2)
    for placement in (S(0), S(1), P):
        assert bytes_moved(lambda x: x.tril(), [rand(5, 6)], (2,), ((placement,),)) == 0

    def moved(x: torch.Tensor) -> Any:
        turned = (
            x.flip(0, 2),
            torch.fliplr(x),
            x.roll(2, 1),
            torch.roll(x, 3),
            torch.rot90(x, 1, (0, 2)),
        )
        longer = (
            x.repeat_interleave(2, 1),
            torch.repeat_interleave(x, 3),
            torch.repeat_interleave(x, 2, dim=0),
        )
        return *turned, *longer

    assert not sweep(moved, X, meshes=SMALL, extra=1)
    for rows in (4, 5):
        operands = [rand(rows, 2)]
        assert bytes_moved(lambda x: x.repeat_interleave(3, 0), operands, (2,), ((S(0),),)) == 0
        assert bytes_moved(lambda x: x.repeat_interleave(3), operands, (2,), ((S(0),),)) == 0


def test_padded_and_one_hot() -> None:
    def padded(x: torch.Tensor) -> Any:
        more = F.pad(x, (1, 1), mode="reflect"), F.pad(x, (0, 0, 0, 0, 2, 0))
        return (
            F.pad(x, (1, 2)),
            F.pad(x, (0, 0, 1, -1), value=2.0),
            torch.constant_pad_nd(x, (0, 1)),
            *more,
        )

    assert not sweep(padded, X, meshes=SMALL, extra=1)
    ids = torch.arange(15).view(5, 3) % 4
    assert not sweep(lambda i: (F.one_hot(i, 6), F.one_hot(i)), ids, meshes=SMALL, extra=1)


def test_as_many_classes_as_there_are() -> None:
    ids = torch.tensor([[0, 3], [1, 1], [0, 2]])
    assert not sweep(F.one_hot, ids, grad=False)
    assert bytes_moved(F.one_hot, [ids], (2,), ((S(0),),)) == 2 * 2 * 8  # two numbers go round
    with pytest.raises(RuntimeError, match="non-negative"):
        bytes_moved(F.one_hot, [torch.tensor([1, -1, 2])], (2,), ((S(0),),))
