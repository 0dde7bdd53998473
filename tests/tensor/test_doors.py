"""Programs written for torch's DTensor run when the import is changed: the names are there, or say what to use."""

import contextlib
import importlib
import io
import warnings

import pytest
import torch
from torch import nn

from shardwise import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.comm import current
from shardwise.debug import CommDebugMode, visualize_sharding
from shardwise.device_mesh import init_device_mesh
from shardwise.errors import LayoutError, MeshError, UnsupportedError
from shardwise.experimental import context_parallel, implicit_replication, register_sharding
from shardwise.placement_types import Partial, Placement

DOORS = {
    "torch.distributed.tensor": "shardwise",
    "torch.distributed.tensor.parallel": "shardwise.parallel",
    "torch.distributed.tensor.experimental": "shardwise.experimental",
    "torch.distributed.tensor.debug": "shardwise.debug",
    "torch.distributed.device_mesh": "shardwise.device_mesh",
}


@pytest.mark.parametrize(("theirs", "ours"), DOORS.items())
def test_every_public_name_of_torch_is_a_name_here(theirs, ours):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = importlib.import_module(theirs).__all__
    here = importlib.import_module(ours)
    assert names
    assert [n for n in names if not hasattr(here, n)] == []


def test_every_method_of_torch_is_a_method_here():
    theirs = importlib.import_module("torch.distributed.tensor")
    for name in ("DTensor", "DeviceMesh", "Shard", "Replicate"):
        here = getattr(importlib.import_module("shardwise"), name)
        public = [n for n in dir(getattr(theirs, name)) if not n.startswith("_")]
        assert [n for n in public if not hasattr(here, n)] == [], name


def test_placements_have_their_base():
    assert isinstance(Shard(0), Placement)
    assert isinstance(Partial(), Placement)
    assert Shard.local_shard_size_and_offset(7, 4, 2) == (2, 4)
    assert Shard.local_shard_size_and_offset(2, 4, 3) == (0, 2)


def test_comm_debug_mode_counts_this_rank_by_the_ops_of_torch():
    def fn():
        mesh = init_device_mesh("cpu", (2,))
        lin = nn.Linear(4, 4, bias=False)
        lin.weight = nn.Parameter(distribute_tensor(lin.weight.detach(), mesh, [Shard(1)]))
        x = distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
        with CommDebugMode() as mode:
            lin(x).full_tensor()
        ops = torch.ops.c10d_functional
        assert mode.get_comm_counts()[ops.all_reduce] == 1
        assert mode.get_comm_counts()[ops.all_gather_into_tensor] == 0
        assert mode.get_total_counts() == 1
        assert "all_reduce sum" in mode.generate_comm_debug_tracing_table(noise_level=1)
        with mode:
            pass
        assert mode.get_total_counts() == 0

    simulate(fn, 2)


def test_a_sharding_is_drawn_once():
    def fn():
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)])
        visualize_sharding(x, header="x")
        visualize_sharding(distribute_tensor(torch.ones(3), mesh, [Replicate(), Shard(0)]))
        with pytest.raises(LayoutError, match="cannot be drawn"):
            visualize_sharding(distribute_tensor(torch.ones(1, 1, 1), mesh))

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        simulate(fn, 4)
    assert out.getvalue().splitlines() == [
        "x",
        "         Col 0-1  Col 2-3",
        "Row 0-2  cpu:0    cpu:1",
        "Row 3-4  cpu:2    cpu:3",
        "         Col 0-1   Col 2-2",
        "Row 0-0  cpu:0, 2  cpu:1, 3",
    ]


def test_plain_tensors_are_replicated_with_and_without_the_block():
    def fn():
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with implicit_replication():
            y = x + torch.arange(4.0)
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), 1 + torch.arange(4.0))

    simulate(fn, 2)


def test_what_is_not_here_says_what_to_use():
    with pytest.raises(UnsupportedError, match="register_rule"):
        register_sharding(torch.ops.aten.mm.default)
    with pytest.raises(UnsupportedError, match="cut along the sequence"):
        context_parallel(None, buffers=[])


def test_a_mesh_from_groups():
    def fn():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        groups = mesh.get_all_groups()
        again = DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
        assert again is mesh
        assert DeviceMesh.from_group(groups[1], "cpu") == mesh["tp"]
        x = distribute_tensor(torch.arange(4.0), DeviceMesh.from_group(groups[1], "cpu"))
        torch.testing.assert_close(x.full_tensor(), torch.arange(4.0))
        with pytest.raises(MeshError, match="do not tell a mesh"):
            DeviceMesh.from_group(groups, "cpu")
        with pytest.raises(MeshError, match="is not one of"):
            DeviceMesh.from_group(current().group((0, 1, 2, 3)), "cpu", [0, 1])

    simulate(fn, 4)
