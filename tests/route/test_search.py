"""Routes: the moves that one would choose by hand, at the price of a search that is quick."""

import itertools
import time

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.route.cost import cost_of
from shardwise.route.search import Search, move_cost, route, route_cost, search
from shardwise.testing.strategies import mesh_of

R, P = Replicate(), Partial()


def plan(mesh_shape, src, dst, shape=(64, 64)):
    mesh = mesh_of(mesh_shape)
    a = Layout.of(mesh, src, shape, dtype=torch.float32)
    b = Layout.of(mesh, dst, shape, dtype=torch.float32)
    return [f"{m.kind}{''.join(mesh.axis_name(x) for x in m.axes)!r}" for m in route(a, b)]


@pytest.mark.parametrize(
    ("mesh", "src", "dst", "want"),
    [
        ((4,), [R], [R], []),
        ((4,), [Shard(0)], [R], ["all_gather'a'"]),
        ((4,), [P], [R], ["all_reduce'a'"]),
        ((4,), [P], [Shard(1)], ["reduce_scatter'a'"]),
        ((4,), [R], [Shard(1)], ["slice'a'"]),
        ((4,), [R], [P], ["keep'a'"]),
        ((4,), [Shard(0)], [P], ["pad'a'"]),
        ((4,), [Shard(0)], [Shard(1)], ["one_shot'a'"]),
        ((4,), [Partial("max")], [P], ["reduce_scatter'a'", "pad'a'"]),
        ((2, 2), [Shard(0), Shard(0)], [R, R], ["all_gather'ab'"]),
        ((2, 2), [P, P], [R, R], ["all_reduce'ab'"]),
        ((2, 2), [P, P], [Shard(0), Shard(0)], ["reduce_scatter'ab'"]),
        ((2, 2), [Shard(0), Shard(0)], (("b", "a"), None), ["one_shot'ab'"]),
        ((2, 2), [Shard(0), R], [Shard(0), Shard(1)], ["slice'b'"]),
        ((2, 2), [Shard(0), P], [Shard(0), Shard(1)], ["reduce_scatter'b'"]),
        ((2, 2), [R, R], [Shard(0), Shard(0)], ["slice'ab'"]),
    ],
)
def test_plans(mesh, src, dst, want):
    assert plan(mesh, src, dst) == want


def test_size_decides_between_calls_and_bytes():
    """A small tensor takes one collective and a slice; a large one takes what receives least."""
    assert plan((2, 2), [P, P], [Shard(0), R], (8, 8)) == ["all_reduce'ab'", "slice'a'"]
    assert plan((2, 2), [P, P], [Shard(0), R], (4096, 4096)) == [
        "reduce_scatter'a'",
        "all_reduce'b'",
    ]


def test_costs_add_up():
    mesh = mesh_of((2, 2))
    a = Layout.of(mesh, [P, Shard(0)], (8, 8), dtype=torch.float32)
    b = Layout.of(mesh, [Shard(1), R], (8, 8), dtype=torch.float32)
    assert route_cost(a, b) == sum(map(move_cost, route(a, b))) > 0
    assert route_cost(a, a) == 0


def test_other_tensors_are_refused():
    a = Layout.of(mesh_of((4,)), [R], (8,), dtype=torch.float32)
    with pytest.raises(LayoutError, match="not the same tensor on the same mesh"):
        route(a, Layout.of(mesh_of((4,)), [R], (9,), dtype=torch.float32))
    with pytest.raises(LayoutError, match="not the same tensor on the same mesh"):
        route(a, Layout.of(mesh_of((2, 2)), [R], (8,), dtype=torch.float32))


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "every", "states", "edges"),
    [
        ((2, 2), (8, 16), 1, 6, 40),
        ((2, 4), (7, 5), 1, 9, 56),
        ((2, 2, 2), (8, 16), 5, 25, 240),
        ((2, 2, 2), (7, 5), 5, 38, 320),
        ((2, 2, 2), (1024, 999), 5, 30, 260),
    ],
)
def test_a_search_stays_near_the_shortest_path(mesh_shape, shape, every, states, edges):
    """What planning takes, counted: states that are left by their edges, and edges that are priced."""
    mesh = mesh_of(mesh_shape)
    layouts = [
        Layout.of(mesh, p, shape, dtype=torch.float32)
        for p in itertools.product([R, P, Shard(0), Shard(1)], repeat=len(mesh_shape))
    ]
    for a, b in list(itertools.product(layouts, layouts))[::every]:
        for what in ("time", "bytes"):
            found = Search(a, b, cost_of(mesh, None, what))
            assert found.run()
            assert found.expanded <= states, f"{a} -> {b} by {what}"
            assert found.offered <= edges, f"{a} -> {b} by {what}"


def test_planning_is_quick(capsys):
    """Printed, and bounded loosely: a route is planned once for each pair of layouts."""
    lines = []
    for shape, ndim in (((4,), 2), ((2, 2), 2), ((2, 2, 2), 3)):
        mesh = mesh_of(shape)
        layouts = [
            Layout.of(mesh, ps, (8,) * ndim, dtype=torch.float32)
            for ps in itertools.product(
                [R, P, *(Shard(d) for d in range(ndim))], repeat=len(shape)
            )
        ]
        pairs = list(itertools.product(layouts, layouts))[:: max(1, len(layouts) ** 2 // 150)]
        times = []
        for a, b in pairs:
            start = time.perf_counter()
            search(a, b, cost_of(mesh))
            times.append(time.perf_counter() - start)
        times.sort()
        lines.append(
            f"mesh {shape}: median {times[len(times) // 2] * 1e6:.0f} us, worst {times[-1] * 1e3:.1f} ms"
        )
        assert times[len(times) // 2] < 0.05
    with capsys.disabled():
        print("", *lines, sep="\nroute planning, ")
