"""Moves: what each does to a layout, and what it costs."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.layout.layout import Layout
from shardwise.route.moves import Move, fold, group_size, intersect, received_numel
from shardwise.testing.strategies import mesh_of

MESH = mesh_of((2, 3))
R, P = Replicate(), Partial()


def of(*placements, shape=(12, 6)):
    return Layout.of(MESH, placements, shape, dtype=torch.float32)


CASES = [
    ("all_gather", [Shard(0), Shard(0)], [Shard(0), R], (1,), 0, None, (3 - 1) * 12),
    ("all_gather", [Shard(0), Shard(0)], [R, R], (0, 1), 0, None, (6 - 1) * 12),
    ("reduce_scatter", [P, R], [Shard(0), R], (0,), 0, "sum", 36),
    ("reduce_scatter", [P, P], [Shard(1), Shard(1)], (0, 1), 1, "sum", 5 * 12),
    ("all_reduce", [R, P], [R, R], (1,), -1, "sum", 2 * 2 / 3 * 72),
    ("slice", [R, R], [R, Shard(1)], (1,), 1, None, 0),
    ("pad", [Shard(0), R], [P, R], (0,), 0, "sum", 0),
    ("keep", [R, R], [P, R], (0,), -1, "sum", 0),
    ("one_shot", [Shard(0), R], [Shard(1), R], (0,), -1, None, 18),
    ("one_shot", [P, Shard(0)], [Shard(1), R], (0, 1), -1, "sum", 2 * 36 - 12),
]


@pytest.mark.parametrize(("kind", "src", "dst", "axes", "dim", "op", "received"), CASES)
def test_types_and_costs(kind, src, dst, axes, dim, op, received):
    move = Move(kind, of(*src), of(*dst), axes, dim, op)
    assert fold(move) == (move.dst.dims, move.dst.partial)
    assert received_numel(move) == pytest.approx(received)
    assert move.communicates == (received > 0)
    assert group_size(move) == (2 if axes == (0,) else 3 if axes == (1,) else 6)


def test_an_ill_typed_move_is_seen():
    with pytest.raises(AssertionError, match="minor axes"):
        fold(Move("all_gather", of(Shard(0), Shard(0)), of(R, Shard(0)), (0,), 0))
    with pytest.raises(AssertionError, match="what is pending"):
        fold(Move("all_reduce", of(R, R), of(R, R), (0,), -1, "sum"))
    with pytest.raises(AssertionError, match="settles one reduction"):
        fold(Move("one_shot", of(P, Shard(0)), of(R, Shard(1)), (0, 1)))
    with pytest.raises(AssertionError, match="what is settled is exchanged"):
        fold(Move("one_shot", of(P, Shard(0)), of(R, Shard(1)), (1,), -1, "sum"))
    with pytest.raises(AssertionError, match="makes no reduction"):
        fold(Move("one_shot", of(R, Shard(0)), of(P, Shard(1)), (0, 1)))


def test_intersect():
    assert intersect(((0, 2), (4, 4)), ((2, 0), (4, 3))) == ((2, 2), (2, 1))
    assert 0 in intersect(((0,), (2,)), ((2,), (2,)))[1]
    assert intersect(((), ()), ((), ())) == ((), ())
