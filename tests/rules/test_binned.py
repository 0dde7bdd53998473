"""Histograms, bincount, searchsorted, isin: counts add up, values stay where they are."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64
MESHES = ((4,), (2, 2))
G = torch.Generator().manual_seed(0)
X = torch.randn(7, 3, dtype=D, generator=G)
EDGES = torch.linspace(-1.5, 1.5, 6, dtype=D)
IDS = torch.randint(0, 5, (11,), generator=G)
LONG = torch.randn(512, dtype=D, generator=G)
CUT = ((S(0),),)
ALL_REDUCE = 2 * 3  # bytes over four ranks of an all_reduce of one byte


def test_places() -> None:
    assert not sweep(
        lambda x, b: (
            torch.searchsorted(b, x),
            torch.bucketize(x, b, right=True),
            torch.searchsorted(b, x, side="right", out_int32=True),
            torch.searchsorted(b, 0.4),
        ),
        X,
        EDGES,
        meshes=MESHES,
        grad=False,
    )
    rows = X.sort(-1).values
    assert not sweep(torch.searchsorted, rows, X[:, :2] * 0.9, meshes=((4,),), grad=False)
    order = EDGES.flip(0).argsort()
    assert not sweep(
        lambda b, x, s: torch.searchsorted(b, x, sorter=s), EDGES.flip(0), X, order, grad=False
    )
    for combo in (((S(0),), (R,)), ((R,), (S(0),))):
        assert bytes_moved(torch.searchsorted, [LONG.sort().values, LONG], (4,), combo) == 0
        assert bytes_moved(torch.bucketize, [LONG, LONG.sort().values], (4,), combo) == 0


def test_membership() -> None:
    among = torch.arange(0, 40, 7).view(2, 3)
    ids = torch.arange(15).view(5, 3)
    assert not sweep(
        lambda a, b: (torch.isin(a, b), torch.isin(a, b, invert=True), torch.isin(a, 3)),
        ids,
        among,
        meshes=MESHES,
    )
    long = torch.arange(512)
    assert bytes_moved(torch.isin, [long, long[:8]], (4,), ((S(0),), (R,))) == 0
    assert bytes_moved(torch.isin, [long[:8], long], (4,), ((R,), (S(0),))) == ALL_REDUCE * 8


def test_histograms() -> None:
    assert not sweep(
        lambda x: (
            x.histc(4, -1, 1),
            x.histc(5),
            *torch.histogram(x, 3),
            *torch.histogram(x, 3, range=(-1.0, 1.0), density=True),
        ),
        X,
        meshes=MESHES,
        grad=False,
    )
    assert not sweep(
        lambda x, b, w: tuple(torch.histogram(x, b, weight=w)), X, EDGES, X.abs(), grad=False
    )
    assert not sweep(lambda x: x.histc(3), torch.full((5,), 2.0, dtype=D), grad=False)
    assert bytes_moved(lambda x: x.histc(10, -2, 2), [LONG], (4,), CUT) == 0
    # the range: the least and the greatest with their NaN flags
    assert bytes_moved(lambda x: x.histc(10), [LONG], (4,), CUT) == ALL_REDUCE * 2 * 2 * 8
    assert (
        bytes_moved(lambda x: torch.histogram(x, EDGES), [LONG], (4,), CUT)
        == ALL_REDUCE * 5 * 8
    )


def test_bincount() -> None:
    weights = torch.randn(11, dtype=D, generator=G)
    assert not sweep(
        lambda i, w: (i.bincount(), i.bincount(w), torch.bincount(i, minlength=9)),
        IDS,
        weights,
        meshes=MESHES,
        grad=False,
    )
    assert not sweep(lambda i: (i.bincount(), (i * 2).bincount()), IDS[:2], meshes=((4,),))
    ids = torch.arange(512) % 10
    assert bytes_moved(torch.bincount, [ids], (4,), CUT) == ALL_REDUCE * (2 + 10) * 8


def test_all_ranks_raise_what_torch_raises() -> None:
    bad = torch.tensor([1, 2, 3, -1, 4])
    wild = torch.tensor([1.0, 2.0, float("inf"), 3.0])

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        with pytest.raises(RuntimeError):
            distribute_tensor(bad, mesh, [S(0)]).bincount()
        with pytest.raises(RuntimeError):
            distribute_tensor(wild, mesh, [S(0)]).histc(3)

    simulate(on_rank, 4)
