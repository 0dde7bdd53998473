"""The examples of parallel modules run as threads, and train as one device does."""

from pathlib import Path
import runpy

import pytest

import shardwise

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["03_gpt_dp_tp", "04_gpt_fsdp_tp"])
def test_same_losses_as_on_one_device(name):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 150
    script = runpy.run_path(str(path))
    with shardwise.rng(like="torch"):
        runs = shardwise.simulate(script["program"], 4)
    plain = script["train"]()
    assert len(plain) == script["STEPS"]
    for losses in runs:
        assert max(abs(a - b) for a, b in zip(plain, losses)) < 1e-9
