"""``explain_redistribute`` and ``mesh.profile``."""

import itertools

import pytest
import torch

from shardwise import (
    CommLog,
    DeviceMesh,
    Partial,
    Profile,
    Replicate,
    Shard,
    distribute_tensor,
    explain_redistribute,
    init_device_mesh,
    simulate,
)
from shardwise.errors import LayoutError, MeshError
from shardwise.layout.layout import Layout
from shardwise.route.search import route
from shardwise.testing.strategies import mesh_of
from shardwise.testing.sweep import lay_out

R, P = Replicate(), Partial()


def test_predicted_bytes_are_counted_bytes():
    """On one mesh and between two, on each rank; never less than the lower bound."""
    x = torch.randn(5, 6)
    kinds = list(itertools.product([R, P, Shard(0), Shard(1)], repeat=2))

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        others = [mesh, DeviceMesh("cpu", [0, 1, 3])]
        for src, dst, other in itertools.product(kinds, kinds[::3], others):
            if other.ndim == 1:
                dst = dst[:1]
            d = lay_out(x, mesh, src)
            told = explain_redistribute(d, dst, other)
            d.redistribute(other, dst)  # meshes agree once
            with CommLog() as log:
                d.redistribute(other, dst)
            at = told.ranks.index(rank)
            assert told.bytes[at] == log.on(rank).bytes, str(told)
            assert told.bytes[at] >= told.least[at]
            assert "lower bound" in str(told)

    simulate(on_rank, 4)


def test_the_table():
    mesh = mesh_of((2, 2))
    src = Layout.of(mesh, [P, Shard(0)], (64, 64), dtype=torch.float32)
    assert str(explain_redistribute(src, [Shard(1), R])).splitlines() == [
        "f32[64, 64] {a: P, b: S(0)} -> f32[64, 64] {a: S(1), b: R}, 4 ranks",
        "  move                     layout after     mean bytes   most  us",
        "  one_shot over a*b (sum)  {a: S(1), b: R}       12288  12288  79",
        "  total                                          12288  12288  79",
        "  lower bound                                     8192   8192",
    ]
    with pytest.raises(LayoutError, match="a DTensor or a layout"):
        explain_redistribute(3, [R])


def test_a_profile_changes_routes():
    """Slow between nodes: gather within the node first, and send less across."""
    mesh = mesh_of((2, 4))
    src = Layout.of(mesh, [Shard(0), Shard(0)], (4096, 4096), dtype=torch.float32)
    dst = src.replicated()
    assert [m.axes for m in route(src, dst)] == [(0, 1)]
    slow = Profile.nodes((2, 4), within=(10.0, 100_000.0), between=(20.0, 1_000.0))
    assert [m.axes for m in route(src, dst, slow)] == [(1,), (0,)]


def test_profiles_are_measured_and_agreed():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Shard(0)])
        x.full_tensor()
        measured = mesh.profile()
        assert len(measured.latency_us) == 2
        assert min(measured.bytes_per_us) > 0
        given = Profile.nodes((2, 2))
        assert mesh.profile(given) is given
        assert torch.equal(x.full_tensor(), x.redistribute(mesh, [R, R]).to_local())
        with pytest.raises(MeshError, match="one latency and one bandwidth"):
            mesh.profile(Profile.uniform(1))
        with pytest.raises(MeshError, match="different profiles"):
            mesh.profile(Profile.uniform(2, 1.0 + rank))
        return measured

    assert len(set(simulate(on_rank, 4))) == 1
