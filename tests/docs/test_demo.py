"""The demo trains to the same losses as plain torch, on every mesh."""

import math
from pathlib import Path
import runpy

import pytest

import shardwise
from shardwise import Replicate, Shard

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps=6", "--layers=2", "--width=32", "--heads=4", "--context=16"]


def train_both(demo, *args):
    """Losses of plain torch and of the sharded run."""
    options = demo.parse([*SMALL, *args])
    shape, text = tuple(options.mesh), demo.stdlib_text()

    def rank(_):
        names = ("dp", "tp")[: len(shape)]
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
        return demo.train(options, text, mesh)

    with shardwise.rng(like="torch"):
        runs = shardwise.simulate(rank, math.prod(shape))
        plain = demo.train(options, text)
    assert all(run.losses == runs[0].losses for run in runs), "ranks read different losses"
    return plain, runs[0]


@pytest.mark.parametrize("mesh", ["4 1", "1 4", "2 2", "4"])
def test_same_losses_in_float64(demo, mesh):
    plain, sharded = train_both(demo, "--dtype", "float64", "--mesh", *mesh.split())
    assert demo.difference(plain.losses, sharded.losses) <= 1e-10
    assert plain.losses[-1] < plain.losses[0], "it learns"


def test_same_losses_in_float32(demo):
    plain, sharded = train_both(demo)
    assert demo.difference(plain.losses, sharded.losses) <= 1e-5


def test_same_losses_with_a_sharded_vocabulary(demo):
    plain, sharded = train_both(demo, "--dtype", "float64", "--shard-vocab")
    assert demo.difference(plain.losses, sharded.losses) <= 1e-10
    assert sharded.layouts["tok.weight"].placements == (Replicate(), Shard(0))


def test_same_losses_with_uneven_pieces(demo):
    """Five sequences over two ranks, four heads over three."""
    plain, sharded = train_both(demo, "--dtype", "float64", "--mesh", "2", "3", "--batch", "5")
    assert demo.difference(plain.losses, sharded.losses) <= 1e-10


@pytest.mark.parametrize("more", [[], ["--shard-vocab"]])
def test_the_captured_step_has_the_losses_and_bytes_of_the_eager_one(demo, more):
    _, eager = train_both(demo, *more)
    plain, captured = train_both(demo, "--capture", *more)
    assert captured.losses == eager.losses
    assert demo.difference(plain.losses, captured.losses) <= 1e-5
    assert captured.log.bytes <= eager.log.bytes
    assert captured.log.count() <= eager.log.count()


def test_every_call_has_a_rule(demo):
    with shardwise.strict():
        train_both(demo, "--steps", "2")


def test_dropout_is_on(demo):
    """Equal losses would say little if the masks were all ones."""
    options = demo.parse([*SMALL, "--steps", "2"])
    with_dropout = demo.train(options, demo.stdlib_text())
    options.dropout = 0.0
    assert demo.train(options, demo.stdlib_text()).losses[0] != with_dropout.losses[0]


def test_gathered_weights_are_an_ordinary_state_dict(demo):
    _, sharded = train_both(demo, "--steps", "1")
    line = demo.write(demo.parse(SMALL), sharded.weights, "def ", count=3)
    assert line.startswith("def ")


def test_the_minimal_example():
    """It compares with plain torch itself."""
    program = runpy.run_path(str(EXAMPLES / "02_minimal.py"))["program"]
    lines = shardwise.simulate(program, 4)[0]
    assert [line.partition(":")[0] for line in lines] == ["y", "z", "w.grad"]
