"""A thousand ranks on one machine: planning costs neither much time nor much memory."""

import itertools
import time
import tracemalloc

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.comm import DryTransport
from shardwise.comm.execute import Mover
from shardwise.layout.layout import Layout
from shardwise.testing.strategies import mesh_of

KINDS = [Replicate(), Partial(), Shard(0), Shard(1)]


def plan(shape, what):
    """(median seconds, peak bytes) of planning some routes anew, uneven pieces."""
    mesh = mesh_of(shape)
    transport = DryTransport(len(mesh.ranks) - 1, len(mesh.ranks))
    kinds = list(itertools.product(KINDS, repeat=len(shape)))
    pairs = list(itertools.product(kinds, kinds))
    times, peak = [], 0
    for src, dst in pairs[:: max(1, len(pairs) // 16)]:
        a, b = (Layout.of(mesh, p, (5000, 3001), dtype=torch.float32) for p in (src, dst))
        tracemalloc.start()
        Mover(a, b, transport, what)
        peak = max(peak, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        a, b = (Layout.of(mesh, p, (5001, 3000), dtype=torch.float32) for p in (src, dst))
        start = time.perf_counter()
        Mover(a, b, transport, what)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], peak


@pytest.mark.parametrize("what", ["time", "bytes"])
@pytest.mark.parametrize(("small", "large"), [((64,), (1024,)), ((8, 8), (32, 32))])
def test_a_thousand_ranks(what, small, large):
    _, few = plan(small, what)
    took, many = plan(large, what)
    assert many <= 4 * few
    assert took < 0.1
