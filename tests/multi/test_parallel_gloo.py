"""Parallel modules in real processes: the examples unchanged, and reductions that run beside backward."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]


def torchrun(script, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.multi
@pytest.mark.parametrize("name", ["03_gpt_dp_tp", "04_gpt_fsdp_tp"])
def test_the_examples_over_gloo(name):
    lines = torchrun(ROOT / "examples" / f"{name}.py", 4)
    assert lines[-1].startswith("largest difference: ")


STEPS = """
import copy
import torch
from torch import nn
import shardwise
from shardwise.parallel import data_parallel, fully_shard

torch.set_num_threads(1)
mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
torch.manual_seed(0)
plain = nn.Sequential(*(nn.Linear(33, 33) for _ in range(6))).double()
x = torch.randn(8, 33, dtype=torch.float64)


def steps(model, x, count=150):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(count):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


data = data_parallel(copy.deepcopy(plain), mesh, bucket_cap_mb=0.02)
sharded = copy.deepcopy(plain)
for layer in sharded:
    fully_shard(layer, mesh)
fully_shard(sharded, mesh)
mine = x.chunk(2)[mesh.get_rank()]
expected = steps(plain, x)
for model in (data, sharded):
    for p, q in zip(steps(model, mine), expected):
        torch.testing.assert_close(p, q)
"""


@pytest.mark.multi
def test_many_steps_with_everything_in_flight(tmp_path):
    """Handles keep what Gloo's threads read and write; freed too early, the heap would break."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS, encoding="utf-8")
    torchrun(script, 2)
