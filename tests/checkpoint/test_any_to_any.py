"""Saved under one layout, loaded under another: bit for bit, every stored byte requested once."""

import io
import itertools
import math
from pathlib import Path
import shutil
import tempfile

from hypothesis import given, strategies as st
import pytest
import torch

import shardwise
from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    checkpoint,
    distribute_tensor,
    simulate,
)
from shardwise.checkpoint import archive, loading, reading
from shardwise.checkpoint.storage import ReadEvent
from shardwise.comm.transport import current
from shardwise.errors import CheckpointError
from shardwise.events import CommLog, observe
from shardwise.layout.layout import Layout
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import wrap
from shardwise.testing.strategies import mesh_of, placed, shapes, strides

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8,
    torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
MESHES = ((4,), (2, 2), (2, 3), (3,), (1,), (2, 1, 2))


def bits(shape, dtype, seed):
    """Any bit patterns, NaNs and negative zeros included; of a bool zeros and ones."""
    n = math.prod(shape)
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (n * dtype.itemsize,), generator=g
    )
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def same_bits(a, b):
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def cut(full, layout, rank):
    """The piece of a layout, cut here; of a pending sum the first rank holds it all."""
    coord = layout.mesh.coordinate_of(rank)
    offsets, sizes = layout.box(coord)
    local = full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].clone()
    if any(c and op for c, op in zip(coord, layout.partial)):
        local.zero_()
    order = sorted(range(full.ndim), key=lambda d: (-layout.stride[d], d))
    back = sorted(range(full.ndim), key=order.__getitem__)
    local = local.permute(order).contiguous().permute(back)
    return wrap(local, spec_of(layout, current()))


@st.composite
def cases(draw):
    shape, dtype = draw(shapes()), draw(st.sampled_from(DTYPES))
    ops = ("sum",) if dtype in (torch.float32, torch.float64, torch.int64) else ()
    out = []
    for _ in range(2):
        mesh = mesh_of(draw(st.sampled_from(MESHES)))
        dims, partial = draw(placed(mesh, len(shape), ops))
        out.append(Layout(mesh, dims, partial, shape, draw(strides(shape)), dtype))
    return out


@given(cases(), st.integers(0, 99), st.sampled_from([1, 1 << 18]))
def test_save_under_one_layout_and_load_under_another(pair, seed, least_part):
    src, dst = pair
    full = bits(src.shape, src.dtype, seed)
    if (
        src.is_partial or dst.is_partial
    ):  # adding zeros keeps all but negative zeros and NaNs' bits
        full = torch.arange(full.numel()).reshape(full.shape).to(full.dtype) + 1
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        target = Path(folder, "c")
        patch.setattr(reading, "_LEAST_PART", least_part)

        def write(rank):
            checkpoint.save({"a": {"x": cut(full, src, rank)}}, target)

        def read(rank):
            x = cut(torch.zeros_like(full), dst, rank)
            state = {"a": {"x": x}}
            report = checkpoint.load(state, target)
            assert report.loaded == ["a.x"]
            assert state["a"]["x"] is x
            want = cut(full, dst, rank)._local
            assert same_bits(x._local, want)
            assert x._local.stride() == want.stride()

        simulate(write, len(src.mesh.ranks))
        simulate(read, len(dst.mesh.ranks))


def big(dtype=torch.float32):
    return torch.arange(6 * 1024 * 1024, dtype=dtype).reshape(3072, 2048)  # 24 MiB: six blocks


PLACES = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas": ((4,), [Replicate()]),
    "grid": ((2, 2), [Shard(1), Shard(0)]),
    "mixed": ((2, 2), [Replicate(), Shard(0)]),
    "pair": ((2,), [Shard(1)]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big") / "rows"

    def write(rank):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = distribute_tensor(big(), mesh, [Shard(0)], src_data_rank=None)
        checkpoint.save({"x": x, "y": torch.ones(3), "z": [1, "two"]}, folder)

    simulate(write, 4)
    return folder


@pytest.fixture
def apart(monkeypatch):
    """Each virtual rank counts as one on a machine of its own."""
    monkeypatch.setattr(loading, "machine", lambda: f"host{current().rank}")


@pytest.mark.parametrize("where", ["one machine", "a machine each"])
@pytest.mark.parametrize("place", list(PLACES))
def test_each_stored_byte_is_requested_once(saved, place, where, request):
    if where == "a machine each":
        request.getfixturevalue("apart")
    shape, placements = PLACES[place]
    size = math.prod(shape)
    events = []

    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", shape)
        x = shardwise.zeros(3072, 2048, device_mesh=mesh, placements=placements)
        state = {"x": x, "y": torch.zeros(3), "z": None}
        checkpoint.load(state, saved)
        want = distribute_tensor(big(), mesh, placements, src_data_rank=None)
        assert torch.equal(x.to_local(), want.to_local())
        assert torch.equal(state["y"], torch.ones(3))
        assert state["z"] == [1, "two"]

    with observe(lambda e: events.append(e) if isinstance(e, ReadEvent) else None):
        simulate(read, size)
    taken = sorted(
        (e.file, e.offset + i * e.every, e.offset + i * e.every + e.bytes // e.stretches)
        for e in events
        for i in range(e.stretches)
    )
    for (f1, _, end), (f2, start, _) in itertools.pairwise(taken):
        assert f1 != f2 or end <= start, "no byte twice"
    elements = [e for e in events if e.what == "elements"]
    assert sum(e.bytes for e in elements) == 24 * 2**20 + 12
    share = [sum(e.bytes for e in elements if e.rank == r) for r in range(size)]
    assert max(share) <= 24 * 2**20 / size + 4 * 2**20 + 12, "the ranks share the reading"


@pytest.mark.parametrize("place", ["columns", "replicas", "grid", "pair"])
def test_the_rounds_are_smaller_than_the_largest_shard(saved, place, apart):
    """Two rounds are under way at most, each with what is sent and what has come."""
    shape, placements = PLACES[place]

    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", shape)
        x = shardwise.zeros(3072, 2048, device_mesh=mesh, placements=placements)
        with CommLog() as log:
            checkpoint.load({"x": x}, saved, keys=["x"])
        return x.to_local().nbytes, [e.bytes for e in log.events if e.kind == "all_to_all"]

    for shard, received in simulate(read, math.prod(shape)):
        assert len(received) > 1
        assert 4 * max(received) <= shard


@pytest.mark.parametrize("place", ["columns", "grid", "pair"])
def test_on_one_machine_each_rank_reads_what_it_needs(saved, place):
    """What crosses is the sums of blocks that several ranks have read together."""
    shape, placements = PLACES[place]

    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", shape)
        x = shardwise.zeros(3072, 2048, device_mesh=mesh, placements=placements)
        with CommLog() as log:
            checkpoint.load({"x": x}, saved, keys=["x"])
        return x.to_local().nbytes, sum(e.bytes for e in log.events if e.kind == "all_to_all")

    for shard, received in simulate(read, math.prod(shape)):
        assert received <= shard / 60


def test_damage_in_a_block_that_ranks_read_together(saved, tmp_path):
    """Every byte counts, whichever rank reads it; nothing changes, and all ranks are told."""
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    name = "__1_0.distcp"
    good = (folder / name).read_bytes()

    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = shardwise.zeros(3072, 2048, device_mesh=mesh, placements=[Shard(1)])
        with pytest.raises(CheckpointError) as told:
            checkpoint.load({"x": x}, folder, keys="x")
        assert not x.to_local().any()
        return str(told.value)

    for at in (2**20, 2**20 + 4096, 5 * 2**20 + 3):
        bad = bytearray(good)
        bad[at] ^= 4
        (folder / name).write_bytes(bad)
        for text in simulate(read, 2):
            assert name in text
            assert "x: damaged at byte" in text
    (folder / name).write_bytes(good[: 5 * 2**20])
    for text in simulate(read, 2):
        assert f"{name} is truncated" in text
        assert "damaged" not in text


def test_the_same_layout_needs_no_exchange_of_elements(saved):
    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = shardwise.zeros(3072, 2048, device_mesh=mesh, placements=[Shard(0)])
        with CommLog() as log:
            checkpoint.load({"x": x}, saved, keys=["x"])
        return {e.kind for e in log.events if e.bytes}

    assert simulate(read, 4) == [set()] * 4


def test_tied_tensors_are_stored_once(tmp_path):
    def write(rank):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = distribute_tensor(big(), mesh, [Shard(0)])
        checkpoint.save({"a": x, "b": x, "c": x.detach()}, tmp_path / "c")
        a = shardwise.zeros(3072, 2048, device_mesh=mesh)
        b = shardwise.zeros(3072, 2048, device_mesh=mesh, placements=[Shard(1)])
        report = checkpoint.load({"a": a, "b": b, "c": b}, tmp_path / "c")
        assert report.loaded == ["a", "b", "c"]
        assert torch.equal(a.to_local(), big())
        assert torch.equal(b.full_tensor(), big())

    simulate(write, 2)
    stored = sum(f.stat().st_size for f in (tmp_path / "c").glob("*.distcp"))
    assert stored < 24 * 2**20 + 4096


def test_tied_tensors_load_from_either_name(tmp_path):
    x = torch.arange(4.0)
    checkpoint.save({"a": x}, tmp_path / "c")
    y = torch.zeros(4)
    report = checkpoint.load({"a": y, "b": y}, tmp_path / "c")
    assert (report.loaded, report.missing) == (["a"], [])
    assert torch.equal(y, x)


def test_ranks_may_hold_different_keys(tmp_path):
    def write(rank):
        mine = shardwise.DeviceMesh("cpu", [2 * (rank // 2), 2 * (rank // 2) + 1])
        x = distribute_tensor(
            torch.arange(6.0) + rank // 2, mine, [Shard(0)], src_data_rank=None
        )
        checkpoint.save({f"stage{rank // 2}": x, "all": torch.ones(2)}, tmp_path / "c")
        whole = shardwise.init_device_mesh("cpu", (4,))
        state = {
            f"stage{k}": shardwise.zeros(6, device_mesh=whole, placements=[Shard(0)])
            for k in (1, 0)
        }
        if rank == 3:
            state["all"] = torch.zeros(2)
        checkpoint.load(state, tmp_path / "c", keys=["stage*", "all"])
        for k in (0, 1):
            assert torch.equal(state[f"stage{k}"].full_tensor(), torch.arange(6.0) + k)
        assert rank != 3 or torch.equal(state["all"], torch.ones(2))

    simulate(write, 4)


def test_meta_tensors_become_real_pieces(tmp_path):
    checkpoint.save({"x": torch.arange(10.0), "y": torch.ones(2)}, tmp_path / "c")

    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.empty(10, device="meta"), mesh, [Shard(0)])
        state = {"x": x, "y": torch.empty(2, device="meta")}
        checkpoint.load(state, tmp_path / "c")
        assert isinstance(state["x"], DTensor)
        assert torch.equal(state["x"].to_local(), torch.arange(10.0)[rank * 3 : rank * 3 + 3])
        assert torch.equal(state["y"], torch.ones(2))

    simulate(read, 4)


def test_pending_sums_are_saved_as_their_value(tmp_path):
    def write(rank):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.full((3, 2), float(rank)), mesh, [Partial()])
        s = DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial()])
        m = DTensor.from_local(torch.tensor([float(rank)]), mesh, [Partial("max")])
        checkpoint.save({"x": x, "s": s, "m": m}, tmp_path / "c")
        assert x._local.eq(rank).all()

    simulate(write, 4)
    state = {"x": torch.zeros(3, 2), "s": torch.zeros(()), "m": torch.zeros(1)}
    checkpoint.load(state, tmp_path / "c")
    assert state["x"].eq(6).all()
    assert (state["s"].item(), state["m"].item()) == (6, 3)


def test_leaves_stay_leaves(tmp_path):
    w = torch.nn.Parameter(torch.arange(3.0))
    checkpoint.save({"w": w}, tmp_path / "c")
    with torch.no_grad():
        w.zero_()
    checkpoint.load({"w": w}, tmp_path / "c")
    assert w.is_leaf
    assert w.requires_grad
    assert torch.equal(w.detach(), torch.arange(3.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (5, 7)])
def test_torch_reads_our_containers_and_we_find_what_torch_wrote(dtype, shape):
    x = bits(shape, dtype, 1)
    head, tail = archive.frame(shape, dtype)
    raw = x.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(head) % 64 == 0
    again = torch.load(io.BytesIO(head + raw + tail), weights_only=True)
    assert again.dtype == dtype
    assert again.shape == x.shape
    assert same_bits(again, x)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    at = archive.elements_at(buffer.getbuffer(), shape, dtype)
    assert at is not None
    assert buffer.getvalue()[at : at + x.nbytes] == raw


def test_containers_that_hold_something_else_are_not_taken_for_a_tensor():
    for value in (
        torch.ones(4, 5).t(),
        torch.ones(21)[1:].view(5, 4),
        [torch.ones(5, 4)],
        torch.ones(5, 4).double(),
    ):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        assert archive.elements_at(buffer.getbuffer(), (5, 4), torch.float32) is None
    assert (
        archive.elements_at(memoryview(b"nothing of the kind"), (5, 4), torch.float32) is None
    )
