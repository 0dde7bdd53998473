"""The demo in four real processes, as a user starts it."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
SIZES = ["--steps=4", "--layers=2", "--width=32", "--heads=4", "--context=16"]


def torchrun(*args):
    """Run the script under torchrun; its lines."""
    command = [sys.executable, *TORCHRUN, str(ROOT / "examples/01_train_gpt.py"), *SIZES, *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.multi
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_same_losses_over_gloo(dtype, bound):
    lines = torchrun("--quiet", "--dtype", dtype)
    assert len(lines) == 1, "only rank 0 prints"
    found = re.search(r"relative difference of the losses: (\S+)", lines[0])
    assert found is not None, lines
    assert float(found[1]) <= bound
