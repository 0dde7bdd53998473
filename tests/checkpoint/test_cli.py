"""The command line, called as a user calls it."""

import pytest
from safetensors.torch import load_file, save_file
import torch
from typer.testing import CliRunner

import shardwise
from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import convert, export, saving
from shardwise.cli import app


def run(*args, code=0):
    done = CliRunner().invoke(app, ["checkpoint", *map(str, args)], env={"COLUMNS": "160"})
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


@pytest.fixture
def saved(tmp_path):
    def write(rank):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        w = distribute_tensor(torch.arange(3000.0).reshape(60, 50), mesh, [Shard(0), Shard(1)])
        state = {
            "model": {"w": w, "tied": w, "b": torch.ones(7, dtype=torch.bfloat16)},
            "step": 3,
        }
        checkpoint.save(state, tmp_path / "c")

    simulate(write, 4)
    return tmp_path / "c"


def test_inspect(saved):
    out = run("inspect", saved, "--verify")
    for text in (
        "model.w",
        "float32",
        "[60, 50]",
        "dp: S(0), tp: S(1)",
        "bfloat16",
        "step",
        "object",
        "4 ranks",
    ):
        assert text in out, text
    assert "every file is whole: 6 pieces right" in out


def test_inspect_finds_damage(saved):
    file = saved / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(torch.arange(25.0, 50.0).numpy().tobytes()[:40])
    data[at + 5] ^= 1
    file.write_bytes(data)
    out = run("inspect", saved, "--verify", code=1)
    assert "damaged" in out
    assert "__1_0.distcp" in out
    assert "model.w" in out
    (saved / "__2_0.distcp").unlink()
    assert "__2_0.distcp: No such file" in run("inspect", saved, "--verify", code=1)
    assert "there is no such checkpoint" in run("inspect", saved.parent / "nowhere", code=1)


@pytest.mark.parametrize("block", [1 << 22, 400])
def test_there_and_back(saved, tmp_path, monkeypatch, block):
    monkeypatch.setattr(export, "BLOCK_BYTES", block)
    out = run("convert", saved, tmp_path / "hf", "--strip", "model.", "--keys", "model.*")
    assert "3 tensors" in out
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(got) == {"w", "tied", "b"}
    assert torch.equal(got["w"], torch.arange(3000.0).reshape(60, 50))
    assert torch.equal(got["b"], torch.ones(7, dtype=torch.bfloat16))
    assert "left out step" in run("convert", saved, tmp_path / "one.safetensors")
    run("convert", tmp_path / "hf", tmp_path / "back")
    state = {
        "w": torch.zeros(60, 50),
        "tied": torch.zeros(60, 50),
        "b": torch.zeros(7, dtype=torch.bfloat16),
    }
    checkpoint.load(state, tmp_path / "back")
    assert torch.equal(state["w"], got["w"])
    assert "is there already" in run("convert", tmp_path / "hf", tmp_path / "back", code=1)
    run("convert", tmp_path / "hf", tmp_path / "back", "--overwrite")
    run("convert", saved, tmp_path / "again", "--to", "dcp", "--keys", "model.*")
    state = {k: torch.zeros_like(v) for k, v in state.items()}
    checkpoint.load({"model": state}, tmp_path / "again", strict=False)
    assert "form" in run("convert", saved, tmp_path / "x", "--to", "zip", code=1)


def test_large_output_is_cut_into_files(tmp_path):
    save_file(
        {k: torch.full((100, 100), float(i)) for i, k in enumerate("abc")},
        tmp_path / "m.safetensors",
    )
    run(
        "convert",
        tmp_path / "m.safetensors",
        tmp_path / "cut",
        "--to",
        "safetensors",
        "--max-shard-gb",
        "0.00005",
    )
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == 3
    assert (tmp_path / "cut" / "model.safetensors.index.json").exists()


def test_a_damaged_source_is_not_converted(saved, tmp_path):
    file = saved / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(0.0, 25.0).numpy().tobytes()[4:40]) + 9] ^= 1
    file.write_bytes(data)
    assert "the checksum is wrong" in run("convert", saved, tmp_path / "hf", code=1)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_conversion_of_torchs_own_files(tmp_path):
    state = {"x": torch.randn(6, 4).t(), "y": torch.arange(5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            saving, "ALIGNMENT", 1
        )  # elements that are not aligned, as torch leaves them
        checkpoint.save(state, tmp_path / "c")
    (tmp_path / "c" / "shardwise.json").unlink()
    done = convert.convert(tmp_path / "c", tmp_path / "out.safetensors")
    assert (done.tensors, done.left_out) == (2, ())
    got = load_file(tmp_path / "out.safetensors")
    assert torch.equal(got["x"], state["x"])
    assert torch.equal(got["y"], state["y"])
