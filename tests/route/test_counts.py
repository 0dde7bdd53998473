"""Counts against boxes counted one by one, and the bound against searches that do without it."""

import itertools
import math

from hypothesis import given, strategies as st
import pytest
import torch

from shardwise import Partial, Profile, Replicate, Shard
from shardwise.layout.cut import Cut
from shardwise.layout.layout import Layout
from shardwise.route.bound import Bound
from shardwise.route.cost import cost_of
from shardwise.route.counts import Counts
from shardwise.route.moves import Move, group_sizes
from shardwise.route.search import Search, move_cost
from shardwise.testing.strategies import layout_pairs, mesh_of

R, P = Replicate(), Partial()
KINDS = [R, P, Shard(0), Shard(1)]


def mean(layout, of):
    coords = layout.mesh.coordinates()
    return sum(map(of, coords)) / len(coords)


def overlap(a, b, coord):
    here, there = a.box(coord), b.box(coord)
    both = [max(0, min(o + n, p + m) - max(o, p)) for o, n, p, m in zip(*here, *there)]
    return math.prod(both)


@given(st.one_of(layout_pairs(), layout_pairs(chosen=True)))
def test_counts_are_means_over_boxes(pair):
    a, b = pair
    counts = Counts(a)
    assert counts.exact
    assert counts.numel(a.dims) == pytest.approx(mean(a, lambda c: math.prod(a.box(c)[1])))
    assert counts.held(a.dims, b.dims) == pytest.approx(mean(a, lambda c: overlap(a, b, c)))
    assert counts.most_held(a.dims, b.dims) == counts.held(a.dims, b.dims)
    for dim, axes in enumerate(a.dims):
        for m in range(1, len(axes) + 1):
            if isinstance(axes, Cut) and m < len(axes):
                continue  # it is gathered whole
            after = (*a.dims[:dim], axes[: len(axes) - m], *a.dims[dim + 1 :])
            move = Move("all_gather", a, a.with_placement(after, a.partial), axes[-m:], dim)

            def largest(c, move=move, dim=dim):
                sizes = [*a.box(c)[1]]
                sizes[dim] = max(group_sizes(move, a, c))
                return math.prod(sizes)

            assert counts.padded(a.dims, dim, m) == pytest.approx(mean(a, largest))


def test_a_sample_never_makes_the_bound_too_high():
    """On more ranks than are looked at, what overlaps is estimated; the bound does not build on it."""
    mesh = mesh_of((32, 32))
    a = Layout.of(mesh, [Shard(0), Shard(1)], (5001, 3007), dtype=torch.float32)
    b = Layout.of(mesh, [Shard(1), Shard(0)], (5001, 3007), dtype=torch.float32)
    counts = Counts(a)
    assert not counts.exact
    assert counts.numel(a.dims) == pytest.approx(mean(a, lambda c: math.prod(a.box(c)[1])))
    assert counts.most_held(a.dims, b.dims) >= mean(a, lambda c: overlap(a, b, c))


def slow(ndim):
    return Profile(
        tuple(10.0 + 20 * a for a in range(ndim)), tuple(500.0 + 1500 * a for a in range(ndim))
    )


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "every"),
    [
        ((4,), (7, 5), 1),
        ((2, 2), (8, 16), 1),
        ((2, 2), (700, 501), 1),
        ((2, 3), (7, 5), 1),
        ((2, 2, 2), (64, 64), 61),
        ((2, 2, 2), (7, 5), 67),
        ((2, 3, 2), (6, 8), 71),
    ],
)
def test_the_bound_leaves_out_no_cheaper_route(mesh_shape, shape, every, monkeypatch):
    """The cost that is found is that of a search without the bound, and that of the moves."""
    mesh = mesh_of(mesh_shape)
    layouts = [
        Layout.of(mesh, p, shape, dtype=torch.float32)
        for p in itertools.product(KINDS, repeat=len(mesh_shape))
    ]
    pairs = list(itertools.product(layouts, layouts))[::every]
    kinds = [(what, p) for what in ("time", "bytes") for p in (None, slow(mesh.ndim))]
    found = {}
    for (a, b), (what, profile) in itertools.product(pairs, kinds):
        search = Search(a, b, cost_of(mesh, profile, what))
        assert search.run()
        cost = search.best[search.goal]
        assert search.bound.rest(search.start) <= cost * (1 + 1e-12)
        moved = sum(move_cost(m, profile, what) for m in search.moves())
        assert moved == pytest.approx(cost, rel=0.01)  # whole bytes are moved
        found[a, b, what, profile] = cost
    monkeypatch.setattr(Bound, "rest", lambda self, state: 0.0)
    for (a, b, what, profile), cost in found.items():
        search = Search(a, b, cost_of(mesh, profile, what))
        assert search.run()
        assert cost == pytest.approx(search.best[search.goal], rel=1e-12), f"{a} -> {b} {what}"
