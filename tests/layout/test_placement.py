"""Placements: torch's names, values, and what cannot be one."""

import copy
import pickle

import pytest
from torch.distributed import tensor as torch_dtensor

from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.layout.placement import as_placement


def test_they_are_values():
    assert Shard(0) == Shard(0) != Shard(1)
    assert Shard(0) != Shard(0, order=0)
    assert Replicate() == Replicate() != Partial()
    assert Partial() == Partial("sum") != Partial("max")
    assert (
        len({Shard(0), Shard(dim=0), Replicate(), Replicate(), Partial(), Partial("sum")}) == 3
    )
    for p in (Shard(1), Shard(1, order=2), Replicate(), Partial("min")):
        assert copy.deepcopy(p) == pickle.loads(pickle.dumps(p)) == p


def test_questions():
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Shard(1).is_shard(dim=1)
    assert Replicate().is_replicate()
    assert Partial("max").is_partial()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert not Shard(0).is_partial()
    assert not Partial().is_replicate()


def test_texts():
    assert [repr(p) for p in (Shard(1), Shard(1, order=0), Replicate(), Partial("max"))] == [
        "Shard(dim=1)",
        "Shard(dim=1, order=0)",
        "Replicate()",
        "Partial(max)",
    ]
    assert [
        str(p) for p in (Shard(1), Shard(1, order=0), Replicate(), Partial(), Partial("max"))
    ] == [
        "S(1)",
        "S(1)@0",
        "R",
        "P",
        "P(max)",
    ]


def test_placements_of_torch_are_accepted():
    assert as_placement(torch_dtensor.Shard(1)) == Shard(1)
    assert as_placement(torch_dtensor.Replicate()) == Replicate()
    assert as_placement(torch_dtensor.Partial("max")) == Partial("max")


def test_what_is_none_is_refused():
    with pytest.raises(
        LayoutError, match="Partial does not know 'mean'; it knows sum, avg, max, min, product"
    ):
        Partial("mean")
    with pytest.raises(LayoutError, match="not a placement: 3"):
        as_placement(3)


def test_a_dim_is_a_number():
    with pytest.raises(LayoutError, match="number of a dim, not '0'"):
        Shard("0")  # pyright: ignore
