"""The one-shot move's plan: both sides agree, nothing comes twice, and replicas share the load."""

from collections import Counter
import math

from hypothesis import given, strategies as st
import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.layout import boxes
from shardwise.layout.layout import Layout
from shardwise.route.exchange import Exchange, lower_bound_numel
from shardwise.route.search import route
from shardwise.testing.strategies import layouts, mesh_of, placed

R, P = Replicate(), Partial()


def of(mesh, *placements, shape=(16, 16)):
    return Layout.of(mesh, placements, shape, dtype=torch.float32)


def plan(exchange, mesh):
    """(sender, receiver, box, addend) as the receivers and as the senders list them."""
    takes = Counter((p.rank, r, p.box, p.addend) for r in mesh.ranks for p in exchange.takes(r))
    gives = Counter((r, p.rank, p.box, p.addend) for r in mesh.ranks for p in exchange.gives(r))
    return takes, gives


@given(layouts(ops=("sum",), permuted=False), st.data())
def test_both_sides_list_the_same_and_cover_what_is_needed(src, data):
    mesh = src.mesh
    dims, _ = data.draw(placed(mesh, src.ndim, ()))
    cutting = {a for axes in dims for a in axes}
    kept = data.draw(st.booleans())
    partial = tuple(
        op if kept and a not in cutting else None for a, op in enumerate(src.partial)
    )
    dst = src.with_placement(dims, partial)
    used = {a for axes in src.dims for a in axes}
    free = [a for a in range(mesh.ndim) if a not in used and not src.partial[a]]
    exchange = Exchange(src, dst, tuple(a for a in free if data.draw(st.booleans())))
    takes, gives = plan(exchange, mesh)
    assert takes == gives
    assert all(count == 1 for count in takes.values())
    addends = math.prod(mesh.shape[a] for a in exchange.settled)
    for r in mesh.ranks:
        need = dst.box(mesh.coordinate_of(r))
        for k in range(addends):
            mine = [box for _, to, box, j in takes if to == r and j == k]
            assert sum(math.prod(b[1]) for b in mine) == math.prod(need[1])
            for i, b in enumerate(mine):
                assert boxes.intersect(b, need) == b
                assert all(0 in boxes.intersect(b, c)[1] for c in mine[:i])
        for sender, to, box, _ in takes:
            if to == r:
                held = src.box(mesh.coordinate_of(sender))
                assert boxes.intersect(box, held) == box
        if addends == 1 and not dst.is_partial:
            assert exchange.received_numel(r) == lower_bound_numel(src, dst, r)
        else:
            assert exchange.received_numel(r) >= lower_bound_numel(src, dst, r)


@given(st.integers(0, 30), st.lists(st.integers(1, 4), max_size=3), st.data())
def test_touching_finds_the_pieces_that_meet_a_range(n, sizes, data):
    start = data.draw(st.integers(0, n))
    size = data.draw(st.integers(0, n - start))
    want = {}
    for flat in range(math.prod(sizes)):
        coord, rest = [], flat
        for k in reversed(sizes):
            coord.insert(0, rest % k)
            rest //= k
        (o,), (m,) = boxes.intersect(
            ((start,), (size,)), tuple((v,) for v in boxes.nested(n, sizes, coord))
        )
        if m:
            want[tuple(coord)] = (o, m)
    assert dict(boxes.touching(n, sizes, (start, size))) == want


CROWDED = [
    ((2, 4), [R, Shard(0)], [Shard(0), Shard(1)]),
    ((4, 4), [R, Shard(0)], [Shard(0), R]),
    ((4, 4), [Shard(1), R], [R, Shard(1)]),
    ((2, 2, 4), [R, R, Shard(1)], [Shard(1), Shard(1), R]),
]


@pytest.mark.parametrize(("mesh", "src", "dst"), CROWDED)
def test_replicas_share_the_load(mesh, src, dst):
    """Without spreading, one replica serves all who need its block while another is idle."""
    mesh = mesh_of(mesh)
    a, b = of(mesh, *src), of(mesh, *dst)
    (move,) = (m for m in route(a, b, what="bytes") if m.communicates)
    sent = [move.exchange.sent_numel(r) for r in mesh.ranks]
    got = [move.exchange.received_numel(r) for r in mesh.ranks]
    assert sum(sent) == sum(got)
    assert max(sent) <= max(max(got), 1.34 * sum(sent) / len(sent))
    near = Exchange(a, b)
    assert max(near.sent_numel(r) for r in mesh.ranks) > max(sent)


def test_near_replicas_are_preferred():
    """Every row of the mesh exchanges within itself: nothing crosses the outer axis."""
    mesh = mesh_of((2, 4))
    (move,) = route(of(mesh, R, Shard(0)), of(mesh, R, Shard(1)), what="bytes")
    assert move.axes == (1,)
    for r in mesh.ranks:
        assert all(p.rank // 4 == r // 4 for p in move.exchange.takes(r))


def test_small_moves_stay_small():
    """Sharing the load out needs a larger group: not worth it for a few bytes."""
    mesh = mesh_of((2, 4))
    src, dst = [R, Shard(0)], [Shard(0), Shard(1)]
    (small,) = (m for m in route(of(mesh, *src), of(mesh, *dst)) if m.communicates)
    assert small.axes == (1,)
    large = route(of(mesh, *src, shape=(4096, 4096)), of(mesh, *dst, shape=(4096, 4096)))
    assert [m.axes for m in large if m.communicates] == [(0, 1)]
