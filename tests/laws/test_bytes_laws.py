"""Under ``minimize("bytes")`` no route receives more than it must.

The other side of the comparison is worked out here without the library: every state that a tensor of two dims
can be in, as a set of cells for each rank; every exchange, reduction and re-cut between any two of them; the
cheapest ways by Floyd and Warshall. For pairs without a pending sum that must be what a rank needs and does not
hold. All routes are also run: right values, and the bytes counted.
"""

import itertools
import math

import pytest
import torch

from shardwise import CommLog, simulate
from shardwise.comm.execute import mover
from shardwise.comm.transport import current
from shardwise.layout.layout import Layout
from shardwise.route.cost import minimize
from shardwise.route.moves import received
from shardwise.route.search import route
from shardwise.testing.strategies import mesh_of


def states(naxes):
    """(axes per dim, pending axes): R, S(0), S(1), P per axis, axes on one dim in every order."""
    for what in itertools.product((None, 0, 1, "P"), repeat=naxes):
        on = [[a for a in range(naxes) if what[a] == d] for d in (0, 1)]
        for dims in itertools.product(*(itertools.permutations(axes) for axes in on)):
            yield dims, tuple(a for a in range(naxes) if what[a] == "P")


def cells_of(mesh_shape, shape, dims):
    """For each rank the cells it holds, as bits: cut with torch.chunk, axis after axis."""
    grid = torch.arange(math.prod(shape)).reshape(shape)
    out = []
    for coord in itertools.product(*map(range, mesh_shape)):
        piece = grid
        for d, axes in enumerate(dims):
            for a in axes:
                step = -(-piece.shape[d] // mesh_shape[a])
                parts = [*piece.split(max(step, 1), d)]
                parts += [piece.narrow(d, 0, 0)] * (mesh_shape[a] - len(parts))
                piece = parts[coord[a]]
        out.append(sum(1 << int(i) for i in piece.flatten()))
    return out


def cheapest(mesh_shape, shape):
    """{(state, state): cells received by all ranks together, at least}, by exhaustive search."""
    coords = list(itertools.product(*map(range, mesh_shape)))
    nodes = list(states(len(mesh_shape)))
    held = {n: cells_of(mesh_shape, shape, n[0]) for n in nodes}
    count = int.bit_count

    def edge(a, b):
        have, want, pa, pb = held[a], held[b], set(a[1]), set(b[1])
        if pb - pa:  # a sum is made, of replicas or of pieces cut by minor axes; nothing moves
            minor = all(
                axes[: len(axes) - sum(x in pb - pa for x in axes)] == then
                for axes, then in zip(a[0], b[0])
            )
            return 0 if minor and not pa - pb else math.inf
        settled = pa - pb
        n = math.prod(mesh_shape[x] for x in settled)
        direct = sum(n * count(w) - count(w & h) for h, w in zip(have, want))
        if not settled:
            return direct
        options = [direct]  # every addend of what is needed, but for the own one
        if have == want:
            options.append(sum(2 * (n - 1) / n * count(h) for h in have))
        elif all(not w & ~h for h, w in zip(have, want)):
            teams = {}
            for r, c in enumerate(coords):
                teams.setdefault(
                    tuple(0 if x in settled else i for x, i in enumerate(c)), []
                ).append(r)
            if all(
                sum(count(want[r]) for r in team) == count(have[team[0]])
                for team in teams.values()
            ):
                options.append(
                    sum(
                        (n - 1) * max(count(want[r]) for r in team) * len(team)
                        for team in teams.values()
                    )
                )
        return min(options)

    dist = torch.tensor([[edge(a, b) for b in nodes] for a in nodes], dtype=torch.float64)
    for k in range(len(nodes)):
        dist = torch.minimum(dist, dist[:, k, None] + dist[None, k, :])
    return (
        nodes,
        held,
        {(a, b): float(dist[i, j]) for i, a in enumerate(nodes) for j, b in enumerate(nodes)},
    )


def layout_of(mesh, state, shape):
    partial = tuple("sum" if a in state[1] else None for a in range(mesh.ndim))
    return Layout(mesh, state[0], partial, shape, (shape[1], 1), torch.float64)


def piece(x, layout, coord):
    """Unequal addends: the last rank of a pending axis has what makes the sum right."""
    offsets, sizes = layout.box(coord)
    local = x[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].clone()
    for a, op in enumerate(layout.partial):
        n, i = layout.mesh.shape[a], coord[a]
        if op:
            local = local * (i + 1 if i < n - 1 else 1 - n * (n - 1) // 2)
    return local


CASES = [
    ((4,), (8, 8), 1),
    ((4,), (5, 3), 1),
    ((2, 2), (4, 8), 1),
    ((2, 2), (5, 3), 1),
    ((2, 4), (8, 8), 1),
    ((2, 4), (9, 5), 1),
    ((4, 2), (8, 8), 1),
    ((4, 2), (3, 7), 3),
    ((2, 2, 2), (8, 8), 37),
    ((2, 2, 2), (5, 9), 61),
]


@pytest.mark.parametrize(("mesh_shape", "shape", "every"), CASES)
def test_bytes_are_the_least(mesh_shape, shape, every):
    mesh = mesh_of(mesh_shape)
    nodes, held, least = cheapest(mesh_shape, shape)
    pairs = list(itertools.product(nodes, nodes))[::every]
    layouts = {n: layout_of(mesh, n, shape) for n in nodes}
    x = torch.randint(-9, 9, shape).double()

    def on_rank(rank):
        coord = mesh.coordinate_of(rank)
        out = []
        with minimize("bytes"):
            for a, b in pairs:
                src, dst = layouts[a], layouts[b]
                with CommLog() as log:
                    y = mover(src, dst, current())(piece(x, src, coord))
                assert log.bytes == sum(received(m, coord) for m in route(src, dst))
                out.append((log.bytes / 8, y))
        return out

    per_rank = simulate(on_rank, math.prod(mesh_shape))
    for i, (a, b) in enumerate(pairs):
        dst = layouts[b]
        counted = sum(r[i][0] for r in per_rank)
        said = f"{layouts[a]} -> {dst}: {route(layouts[a], dst, what='bytes')}"
        assert counted <= least[a, b] + 1e-6, said
        if not a[1] and not b[1]:
            need = sum((w & ~h).bit_count() for h, w in zip(held[a], held[b]))
            assert counted == need == least[a, b], said
        total = {}
        for rank, coord in enumerate(mesh.coordinates()):
            key = tuple(i for k, i in enumerate(coord) if not dst.partial[k])
            total[key] = total.get(key, 0) + per_rank[rank][i][1]
        for coord in mesh.coordinates():
            offsets, sizes = dst.box(coord)
            want = x[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]
            key = tuple(i for k, i in enumerate(coord) if not dst.partial[k])
            assert torch.equal(total[key], want), said
