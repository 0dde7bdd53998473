"""The mesh: torch's API, equality by ranks, slices, ranks outside."""

import copy
import pickle

import numpy as np
import pytest
import torch

from shardwise import (
    CommLog,
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.comm.meshes import as_mesh
from shardwise.errors import LayoutError, MeshError
from shardwise.layout.mesh import Mesh


def test_coordinates_sizes_and_names():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert (mesh.ndim, mesh.shape, mesh.size()) == (2, (2, 3), 6)
        assert (mesh.size(0), mesh.size(-1), mesh.size("tp")) == (2, 3, 3)
        assert mesh.device_type == "cpu"
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh.get_rank() == rank
        assert mesh.get_coordinate() == [rank // 3, rank % 3]
        assert (mesh.get_local_rank("dp"), mesh.get_local_rank(1)) == (rank // 3, rank % 3)
        assert torch.equal(mesh.mesh, torch.arange(6).reshape(2, 3))
        assert mesh.get_group("tp").size() == 3
        assert mesh.get_group(0).size() == 2
        assert [g.size() for g in mesh.get_all_groups()] == [2, 3]
        with pytest.raises(MeshError, match="needs mesh_dim"):
            mesh.get_group()
        with pytest.raises(MeshError, match="needs mesh_dim"):
            mesh.get_local_rank()

    simulate(on_rank, 6)


def test_ways_to_write_the_ranks():
    want = DeviceMesh("cpu", [[0, 1], [2, 3]])
    assert DeviceMesh("cpu", torch.arange(4).reshape(2, 2)) is want
    assert DeviceMesh("cpu", np.arange(4).reshape(2, 2)) is want
    assert DeviceMesh("cpu", ((0, 1), (2, 3))) is want
    assert DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b")) == want
    assert pickle.loads(pickle.dumps(want)) is copy.deepcopy(want) is want


def test_equality_is_that_of_ranks():
    a = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    assert a == DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("c", "d"))
    assert hash(a) == hash(DeviceMesh("cpu", [[0, 1], [2, 3]]))
    assert a != DeviceMesh("cpu", [[0, 2], [1, 3]])
    assert a != DeviceMesh("cpu", [0, 1, 2, 3])
    assert a != DeviceMesh("cuda", [[0, 1], [2, 3]])


def test_slices():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        tp = mesh["tp"]
        assert tp.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
        assert tp.mesh_dim_names == ("tp",)
        assert tp.get_coordinate() == [rank % 2]
        two = mesh["pp", "tp"]
        assert two.ranks == tuple(r for r in range(8) if r // 2 % 2 == rank // 2 % 2)
        assert mesh[("pp", "tp")] is two
        assert mesh["pp", "dp", "tp"] is mesh
        swapped = mesh["tp", "pp"]
        assert swapped.shape == (2, 2)
        assert swapped.get_coordinate() == [rank % 2, rank // 4]
        assert two["tp"] == tp
        assert two.axes_in(mesh) == (0, 2)
        assert swapped.axes_in(mesh) == (2, 0)
        with pytest.raises(MeshError, match='no axis "xp"'):
            mesh["xp"]
        with pytest.raises(MeshError, match="must not repeat"):
            mesh["tp", "tp"]

    simulate(on_rank, 8)


def test_flatten():
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    flat = mesh.flatten("all")
    assert (flat.shape, flat.ranks, flat.names) == ((4,), (0, 2, 1, 3), ("all",))
    assert mesh._flatten().names == ("a_b",)
    assert DeviceMesh("cpu", [[0, 1]]).flatten().names is None


def test_a_flattened_slice_goes_by_its_name_in_meshes_with_these_axes():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "shard", "cp"))
        flat = mesh["shard", "cp"]._flatten("shard_cp")
        assert mesh["shard_cp"] is flat
        assert flat.ranks == tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
        hybrid = mesh["rep", "shard_cp"]
        assert (hybrid.shape, hybrid.names) == ((2, 4), ("rep", "shard_cp"))
        assert hybrid.ranks == tuple(range(8))
        assert mesh["rep", "cp"].flatten().names == ("rep_cp",)
        assert mesh["rep_cp", "shard"].get_coordinate() == [
            rank // 4 * 2 + rank % 2,
            rank // 2 % 2,
        ]
        with pytest.raises(MeshError, match="must not repeat"):
            mesh["shard", "shard_cp"]
        with pytest.raises(MeshError, match='no axis "shard_cp"'):
            mesh["rep", "shard"]["shard_cp"]

    simulate(on_rank, 8)


def test_one_name_for_two_slices_says_nothing():
    mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]]], mesh_dim_names=("fa", "fb", "fc"))
    mesh["fa", "fb"].flatten("both")
    mesh["fb", "fc"].flatten("both")
    with pytest.raises(MeshError, match="several flattened slices"):
        mesh["both"]


def test_what_a_mesh_is_not_asked():
    with pytest.raises(TypeError, match="mesh_dim_name"):
        DeviceMesh("cpu", [0, 1], mesh_dim_name=("a",))  # pyright: ignore
    with pytest.raises(TypeError, match="mesh_dim_name"):
        init_device_mesh("cpu", (1,), mesh_dim_name=("a",))  # pyright: ignore
    with pytest.raises(MeshError, match="backend of the process group"):
        DeviceMesh("cpu", [0, 1], backend_override="gloo")  # pyright: ignore


def test_with_mesh_names_the_default():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        x = torch.arange(8.0)
        with mesh as entered:
            assert entered is mesh
            d = distribute_tensor(x, placements=[Shard(0), Shard(0)])
            with DeviceMesh("cpu", [3, 2, 1, 0]) as inner:
                assert DTensor.from_local(torch.zeros(2)).device_mesh is inner
        assert d.device_mesh is mesh
        assert distribute_tensor(x).device_mesh == init_device_mesh("cpu", (4,))

    simulate(on_rank, 4)


def test_a_mesh_made_twice_is_the_same_mesh():
    def on_rank():
        x = torch.arange(6.0)
        a = distribute_tensor(
            x, init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), [Shard(0)]
        )
        b = distribute_tensor(
            x, DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("b",)), [Replicate()]
        )
        with CommLog() as log:
            y = a + b
        assert not log.events
        assert torch.equal(y.full_tensor(), 2 * x)

    simulate(on_rank, 2)


def test_a_tensor_on_a_slice_meets_one_on_the_mesh():
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    px, pw = x.clone().requires_grad_(), w.clone().requires_grad_()
    (px @ pw).square().sum().backward()

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dx = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        dw = distribute_tensor(w, mesh["tp"], [Shard(1)]).requires_grad_()
        y = dx @ dw
        assert y.device_mesh is mesh
        assert y.placements == (Shard(0), Shard(1))
        y.square().sum().backward()
        torch.testing.assert_close(dx.grad.full_tensor(), px.grad)
        torch.testing.assert_close(dw.grad.full_tensor(), pw.grad)

    simulate(on_rank, 4)


def test_ranks_outside_hold_nothing_and_take_part_in_nothing():
    x = torch.arange(12.0).reshape(6, 2)

    def on_rank(rank):
        mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
        with CommLog() as log:
            d = distribute_tensor(x, mesh, [Shard(0)])
            y = (d * 2).relu().redistribute(mesh, [Replicate()])
            e = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
            full = y.full_tensor()
        assert d.shape == y.shape == e.shape == (6, 2)
        if rank in (1, 3):
            assert mesh.get_coordinate() == [rank // 2]
            assert torch.equal(full, x * 2)
            return
        assert mesh.get_coordinate() is None
        assert d.to_local().numel() == full.numel() == e.to_local().numel() == 0
        assert not log.on(rank).events
        with pytest.raises(MeshError, match=f"rank {rank} is not on"):
            mesh.get_group()
        with pytest.raises(MeshError, match=f"rank {rank} is not on"):
            mesh.get_local_rank()

    simulate(on_rank, 4)


def test_a_training_step_on_some_of_the_ranks():
    """Every rank runs the same program; those outside the mesh pass through it."""
    x, w = torch.randn(5, 3), torch.randn(4, 3)

    def on_rank(rank):
        mesh = DeviceMesh("cpu", [0, 2])
        dw = torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))
        opt = torch.optim.SGD([dw], lr=0.1)
        dx = distribute_tensor(x, mesh, [Replicate()])
        with CommLog() as log:
            h = torch.nn.functional.linear(dx, dw)
            loss = h.softmax(-1)[:, 1:3].amax(1).view(1, 5).sum()
            loss.backward()
            opt.step()
        if rank not in (0, 2):
            assert not log.on(rank).events
        return dw.detach().full_tensor()

    pw = w.clone().requires_grad_()
    torch.nn.functional.linear(x, pw).softmax(-1)[:, 1:3].amax(1).sum().backward()
    want = w - 0.1 * pw.grad
    got = simulate(on_rank, 3)
    torch.testing.assert_close(got[0], want)
    torch.testing.assert_close(got[2], want)
    assert got[1].numel() == 0


class FakeTorchMesh:
    """Looks like torch's DeviceMesh, which cannot be made without a process group."""

    def __init__(self, ranks, names):
        self.device_type, self.mesh, self.mesh_dim_names = "cpu", torch.tensor(ranks), names


def test_a_mesh_of_torch_is_accepted():
    def on_rank():
        theirs = FakeTorchMesh([[0, 1], [2, 3]], ("dp", "tp"))
        ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert as_mesh(theirs) is ours
        d = distribute_tensor(torch.arange(4.0), theirs, [Shard(0)])
        assert d.device_mesh is ours
        assert d.redistribute(theirs, ("tp",)).device_mesh is ours
        assert d.redistribute(theirs, ("tp",)).full_tensor().tolist() == [0, 1, 2, 3]
        assert DTensor.from_local(torch.zeros(2), theirs, [Shard(0)]).shape == (4,)

    simulate(on_rank, 4)


def test_text():
    assert repr(DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))) == (
        "DeviceMesh(cpu: (dp=2, tp=2) over ranks 0-3)"
    )
    assert repr(DeviceMesh("cpu", [3, 1])) == "DeviceMesh(cpu: (0=2) over ranks (3, 1))"
    assert repr(Mesh.of("cpu", (1,), (2,))) == "DeviceMesh(cpu: (0=1) over rank 2)"


def test_what_cannot_be_is_refused():
    with pytest.raises(MeshError, match="must not repeat a rank"):
        DeviceMesh("cpu", [0, 0])
    with pytest.raises(MeshError, match="2 distinct axis names"):
        DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "a"))
    with pytest.raises(MeshError, match="2 distinct axis names"):
        DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a",))
    with pytest.raises(MeshError, match="full array"):
        DeviceMesh("cpu", [[0, 1], [2]])
    with pytest.raises(MeshError, match="needs 4 ranks, got 3"):
        Mesh.of("cpu", (2, 2), (0, 1, 2))
    with pytest.raises(MeshError, match="axis 2 is out of range"):
        DeviceMesh("cpu", [[0, 1]]).size(2)
    with pytest.raises(
        MeshError, match="a mesh of shape \\(2, 2\\) needs 4 ranks; the world has 2"
    ):
        simulate(lambda: init_device_mesh("cpu", (2, 2)), 2)
    with pytest.raises(MeshError, match="axis without ranks"):
        init_device_mesh("cpu", (0,))
    with pytest.raises(LayoutError, match="2 placements"):
        distribute_tensor(torch.zeros(2), DeviceMesh("cpu", [0]), [Replicate(), Replicate()])
