"""Safetensors in and out, against the library that defines them."""

import errno
import json
import math
import os

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch
from torch import nn

import shardwise
from shardwise import Replicate, Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import convert, export
from shardwise.checkpoint.storage import ReadEvent
from shardwise.errors import CheckpointError
from shardwise.events import observe

R, S = Replicate(), Shard


def tensors():
    def values(*shape):
        return (torch.arange(math.prod(shape)) % 251).reshape(shape)

    return {
        "a": values(300, 70).float(),
        "b": values(7, 5).bfloat16(),
        "c": values(9).to(torch.int64),
        "d": values(3, 2, 5).bool(),
        "e": torch.tensor(3.5, dtype=torch.float64),
        "f": torch.empty(0, 4),
        "g": values(4, 4).to(torch.float8_e4m3fn),
        "h": values(5).to(torch.uint16),
    }


def same(got, want):
    assert got.dtype == want.dtype
    assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1,)])
@pytest.mark.parametrize("places", [[S(0)], [S(-1)], [R], [S(0), S(0)]])
@pytest.mark.parametrize("shard", [10**9, 40_000])
def test_written_from_shards_and_read_back(tmp_path, monkeypatch, shape, places, shard):
    monkeypatch.setattr(export, "BLOCK_BYTES", 1000)
    places = places[: len(shape)]

    def write(rank):
        mesh = shardwise.init_device_mesh("cpu", shape)
        state = {
            k: distribute_tensor(x, mesh, places if x.ndim else [R], src_data_rank=None)
            for k, x in tensors().items()
        }
        checkpoint.save_safetensors(state, tmp_path / "out", max_shard_bytes=shard)
        blank = {
            k: distribute_tensor(
                torch.zeros_like(x), mesh, [S(-1) if x.ndim else R], src_data_rank=None
            )
            for k, x in tensors().items()
        }
        checkpoint.load(blank, tmp_path / "out")
        for key, x in tensors().items():
            want = distribute_tensor(x, mesh, blank[key].layout, src_data_rank=None)
            same(blank[key].to_local(), want.to_local())

    simulate(write, math.prod(shape))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == (1 if shard == 10**9 else 2)
    got = {}
    for file in files:
        got |= load_file(file)
    for key, x in tensors().items():
        same(got[key], x)
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors())
        for key, name in index["weight_map"].items():
            with safe_open(tmp_path / "out" / name, "pt") as file:
                assert key in file.keys()  # noqa: SIM118


def test_a_foreign_folder_loads_straight_into_shards(tmp_path):
    x, y = torch.randn(64, 32), torch.randn(33)
    save_file({"x": x}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"y": y}, tmp_path / "model-00002-of-00002.safetensors")
    events = []

    def read(rank):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        state = {
            "x": distribute_tensor(torch.empty(64, 32, device="meta"), mesh, [S(0)]),
            "y": shardwise.zeros(33, device_mesh=mesh, placements=[S(0)], dtype=torch.bfloat16),
        }
        report = checkpoint.load(state, tmp_path, cast=True)
        assert report.converted == ["y"]
        assert torch.equal(state["x"].full_tensor(), x)
        assert torch.equal(state["y"].full_tensor(), y.bfloat16())

    with observe(lambda e: events.append(e) if isinstance(e, ReadEvent) else None):
        simulate(read, 4)
    assert sum(e.bytes for e in events if e.what == "elements") == x.nbytes + y.nbytes


def test_a_module_of_single_file_and_tied_weights(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    net = Net()
    path = checkpoint.save_safetensors(net, tmp_path / "net.safetensors", metadata={"by": "us"})
    assert set(load_file(path)) == {"a.weight", "a.bias", "b.bias"}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
    other = Net()
    checkpoint.load({"m": other}, path, strict=False)
    state = checkpoint.get_model_state_dict(other)
    assert checkpoint.load(state, path).missing == []
    assert torch.equal(other.b.weight, net.a.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="step is a int"):
        checkpoint.save_safetensors({"x": torch.ones(2), "step": 3}, tmp_path / "o")
    with pytest.raises(CheckpointError, match=r"x is torch\.complex128"):
        checkpoint.save_safetensors(
            {"x": torch.ones(2, dtype=torch.complex128)}, tmp_path / "o"
        )
    checkpoint.save_safetensors({"x": torch.ones(2)}, tmp_path / "o")
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoint.save_safetensors({"x": torch.zeros(2)}, tmp_path / "o")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)

    def run(rank):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(8), mesh, [S(0)])
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save_safetensors({"x": x}, tmp_path / "o", overwrite=True)

    simulate(run, 2)
    x = torch.zeros(2)
    checkpoint.load({"x": x}, tmp_path / "o")
    assert x.eq(1).all()
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(100)}, path)
    whole = path.read_bytes()
    state = {"x": torch.zeros(100)}
    for broken, text in (
        (whole[:-8], "is truncated"),
        (whole[:20], r"truncated|damaged"),
        (b"\xff" * 8 + whole[8:], "truncated"),
        (whole[:8] + b"[" + whole[9:], "header is damaged"),
        (whole.replace(b"[100]", b"[101]"), "400 bytes for"),
        (whole.replace(b"F32", b"F99"), "header is damaged"),
        (b"", r"truncated|empty"),
    ):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=text) as told:
            checkpoint.load(state, path)
        assert "m.safetensors" in str(told.value)
        assert state["x"].eq(0).all()


@pytest.mark.parametrize(
    "info",
    [
        '{"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}',
        '{"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": [4.7], "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": [true, 4], "data_offsets": [0, 16]}',
        '{"dtype": "F32", "shape": [4], "data_offsets": ["0", "16"]}',
        '{"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}',
        '{"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}',
        "5",
        "null",
    ],
)
def test_headers_that_make_no_sense_name_file_and_key(tmp_path, info):
    header = f'{{"x": {info}}}'.encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    for use in (
        lambda: checkpoint.load({"x": torch.zeros(4)}, path),
        lambda: convert.convert(path, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match=r"m\.safetensors, x: the header is damaged"):
            use()


def test_a_header_that_has_a_key_twice(tmp_path):
    info = '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
    header = f'{{"x": {info}, "x": {info}}}'.encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="a key is there twice"):
        checkpoint.load({"x": torch.zeros(4)}, path)
