"""A job loses a worker and goes on with others, in real processes, as a user starts it."""

import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.multi
STEPS = 9


def launch(processes, folder, dtype, *args):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(ROOT / "examples/elastic_train.py")]
    command += [
        "--folder",
        str(folder),
        "--steps",
        str(STEPS),
        "--every",
        "3",
        "--dtype",
        dtype,
        *args,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    lines = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    return done, {int(step): float(loss) for step, loss in lines}


def goes_on(before, after, whole, tolerance):
    """What the two launches did together is what one would have done."""
    assert sorted(after) == list(range(6, STEPS)), "from the last complete checkpoint"
    for step, loss in {**before, **after}.items():
        assert abs(loss - whole[step]) <= tolerance * abs(whole[step]), (
            step,
            loss,
            whole[step],
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_killed_in_mid_step_and_resumed_on_another_mesh(tmp_path, dtype, tolerance):
    done, whole = launch(4 if dtype == "float64" else 1, tmp_path / "whole", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(whole) == list(range(STEPS))
    done, before = launch(4, tmp_path / "a", dtype, "--kill-at", "7")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr or "-9" in done.stderr
    assert sorted(before)[:7] == list(range(7))
    assert len(before) <= 8, "it died in step 7"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    done, after = launch(2, tmp_path / "a", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    goes_on(before, after, whole, tolerance)
    if dtype == "float64":
        done, same = launch(4, tmp_path / "b", dtype)
        assert done.returncode == 0, done.stdout + done.stderr
        goes_on(before, same, whole, 0.0)  # the same mesh: bit for bit
