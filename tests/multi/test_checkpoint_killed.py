"""One of three processes is killed in each phase of a save, over Gloo: the checkpoint before is whole, and nobody who
lives on takes the save for complete when it is not.
"""

import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.multi

# Forks three ranks for each case, so that torch is imported once. A rank ends with 0 when its save is said to be
# complete, with 3 when it raised, and with -9 when it was killed.
KILLED = """
import datetime, os, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
import shardwise
from shardwise import Shard, checkpoint, distribute_tensor
from shardwise.checkpoint.storage import PhaseEvent
from shardwise.events import observe

root, WORLD = Path(sys.argv[1]), 3
checkpoint.save({"x": torch.ones(2)}, root / "warm")  # imports what a save needs


def state(value):
    mesh = shardwise.init_device_mesh("cpu", (WORLD,))
    x = distribute_tensor(torch.arange(40.0).view(8, 5) + value, mesh, [Shard(0)], src_data_rank=None)
    return {"x": x, "step": value}


def run(rank, folder, kind, phase, victim):
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=WORLD, timeout=limit)
    checkpoint.save(state(1), folder, step=1)

    def die(event):
        if rank == victim and isinstance(event, PhaseEvent) and event.phase == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    step = 1 if kind == "replace" else 2
    options = {"step": step, "overwrite": kind == "replace", "keep": 1}
    with observe(die):
        if phase == "before" and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "background":
            checkpoint.async_save(state(2), folder, timeout_s=1.0, **options).result()
        else:
            checkpoint.save(state(2), folder, **options)


def fork(rank, *case):
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        run(rank, *case)
        code = 0
    except BaseException as error:
        print("   ", rank, type(error).__name__, str(error)[:100].replace(chr(10), " "), file=sys.stderr, flush=True)
    os._exit(code)


cases = []
for kind in ("series", "replace", "background"):
    for phase in ("before", "planned", "opened", "writing", "written"):
        cases += [(kind, phase, 0), (kind, phase, 1)]
    rest = ("indexed", "replacing", "visible", "pruned") if kind == "replace" else ("indexed", "visible", "pruned")
    cases += [(kind, phase, 0) for phase in rest]
for kind, phase, victim in cases:
    folder = root / f"{kind}-{phase}-{victim}"
    children = [fork(rank, folder, kind, phase, victim) for rank in range(WORLD)]
    codes, end = {}, time.monotonic() + 30
    while len(codes) < WORLD and time.monotonic() < end:
        for child in set(children) - set(codes):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        codes[child] = "hangs"
    newest = checkpoint.latest(folder)
    got = {"x": torch.zeros(8, 5), "step": 0}
    checkpoint.load(got, newest)
    assert torch.equal(got["x"], torch.arange(40.0).view(8, 5) + got["step"]), (kind, phase, victim)
    print(kind, phase, victim, got["step"], *(codes[c] for c in children), flush=True)
"""

PHASES = [
    "before",
    "planned",
    "opened",
    "writing",
    "written",
    "indexed",
    "replacing",
    "visible",
    "pruned",
]


def test_one_of_several_ranks_is_killed_in_any_phase(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 10 + 3 + 4 + 3
    for line in lines:
        _, phase, victim, step, *codes = line
        assert codes.pop(int(victim)) == "-9", f"{line}: the test kills"
        visible = PHASES.index(phase) >= PHASES.index("visible")
        assert step == ("2" if visible else "1"), line
        assert all(code in (("0", "3") if visible else ("3",)) for code in codes), (
            line,
            done.stderr,
        )
