"""A job loses a worker and goes on with others, in real processes, as a user starts it."""

import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/elastic_train.py"
pytestmark = pytest.mark.multi
STEPS = 9


def launch(processes, folder, dtype, *args):
    """With torchrun, as a user does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(EXAMPLE)]
    return read(run([*command, *arguments(folder, dtype), *args]))


# What torchrun does, but for the ranks being forked from one process that has imported everything: seconds less each.
FORKED = """
import os, signal, socket, sys, tempfile
from importlib import util

processes, example, *sys.argv[1:] = sys.argv[1:]
spec = util.spec_from_file_location("elastic_train", example)
example = util.module_from_spec(spec)
spec.loader.exec_module(example)
with tempfile.TemporaryDirectory() as warm:  # what is imported late is imported now, once for all
    import shardwise
    shardwise.simulate(lambda _: example.train(warm, 1, 1, report=lambda _: None), 1)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
children = []
for rank in range(int(processes)):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": processes}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        example.main()
        sys.exit()
    children.append(child)
died = []
while children and not died:
    child, status = os.wait()
    children.remove(child)
    died += [status] if status else []
for child in children:  # who was killed is dead by now, though a rank that lost it may be told of first
    early, status = os.waitpid(child, os.WNOHANG)
    if early:
        died += [status]
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
print(*(f"signal {os.WTERMSIG(status)}" for status in died), file=sys.stderr)
sys.exit(any(died))
"""


def fork(processes, folder, dtype, *args):
    """Real processes, too, sooner."""
    command = [sys.executable, "-c", FORKED, str(processes), str(EXAMPLE)]
    return read(run([*command, *arguments(folder, dtype), *args]))


def arguments(folder, dtype):
    return [
        *("--folder", str(folder), "--dtype", dtype),
        *("--steps", str(STEPS), "--every", "3"),
    ]


def run(command):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def read(done):
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


@pytest.mark.parametrize(
    ("dtype", "tolerance", "start"), [("float64", 1e-12, launch), ("float32", 1e-6, fork)]
)
def test_killed_in_mid_step_and_resumed_on_another_mesh(tmp_path, dtype, tolerance, start):
    done, whole = fork(4 if dtype == "float64" else 1, tmp_path / "whole", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(whole) == list(range(STEPS))
    done, before = start(4, tmp_path / "a", dtype, "--kill-at", "7")
    assert done.returncode != 0
    assert any(word in done.stderr for word in ("SIGKILL", "-9", "signal 9"))
    assert sorted(before)[:7] == list(range(7))
    assert len(before) <= 8, "it died in step 7"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    done, after = start(2, tmp_path / "a", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    goes_on(before, after, whole, tolerance)
    if dtype == "float64":
        done, same = fork(4, tmp_path / "b", dtype)
        assert done.returncode == 0, done.stdout + done.stderr
        goes_on(before, same, whole, 0.0)  # the same mesh: bit for bit
