"""Saving and loading against torch.distributed.checkpoint with torch's DTensor, interleaved in the same processes.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--mib 512] [--rounds 3]

Four processes save a state of ``--mib`` sharded on dim 0. It is loaded again by the four, and by two of them
sharded on dim 1. Medians of the slowest rank; the ratio is ours over torch's.
"""

import argparse
from pathlib import Path
import shutil
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import Shard as TorchShard, zeros as torch_zeros
from torch.multiprocessing.spawn import spawn

import shardwise
from shardwise import Shard, checkpoint

WIDTH, TENSORS = 2048, 8


def timed(action, group_size):
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def ours(mesh, rows, dim, value=0.0):
    return {
        f"w{i}": shardwise.full(
            (rows, WIDTH), value + i, device_mesh=mesh, placements=[Shard(dim)]
        )
        for i in range(TENSORS)
    }


def theirs(mesh, rows, dim, value=0.0):
    out = {}
    for i in range(TENSORS):
        out[f"w{i}"] = torch_zeros(rows, WIDTH, device_mesh=mesh, placements=[TorchShard(dim)])
        out[f"w{i}"].to_local().fill_(value + i)
    return out


def run(rank, args, folder):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    size = 4 if args.part == "four" else 2
    dist.init_process_group(
        "gloo", f"file://{folder}/store-{args.part}", rank=rank, world_size=size
    )
    rows = args.mib * 2**20 // (4 * WIDTH * TENSORS)
    mesh, other = shardwise.init_device_mesh("cpu", (size,)), torch_mesh("cpu", (size,))
    dim = 0 if args.part == "four" else 1
    a, b = ours(mesh, rows, dim, 1.0), theirs(other, rows, dim, 1.0)
    folder = Path(folder)
    touched = [x.to_local().clone() for x in b.values()]
    table = {}

    def note(what, who, action):
        table.setdefault(what, {}).setdefault(who, []).append(timed(action, size))

    for k in range(args.rounds + 1):
        if args.part == "four":
            if rank == 0:
                for name in ("ours", "torch"):
                    shutil.rmtree(folder / name, ignore_errors=True)
            note("save S(0) on 4", "ours", lambda: checkpoint.save(a, folder / "ours"))
            note("save S(0) on 4", "torch", lambda: dcp.save(b, checkpoint_id=folder / "torch"))
            saving = []
            if rank == 0:
                shutil.rmtree(folder / "async", ignore_errors=True)
            note("async_save, until it returns", "ours",
                 lambda out=saving: out.append(checkpoint.async_save(a, folder / "async")))  # fmt: skip
            saving[0].result()
            note("async_save, until it returns", "torch",
                 lambda: [y.copy_(x.to_local()) for x, y in zip(b.values(), touched)])  # fmt: skip
        what = "load S(0) on 4" if args.part == "four" else "load S(1) on 2"
        note(what, "ours", lambda: checkpoint.load(a, folder / "ours"))
        note(what, "torch", lambda: dcp.load(b, checkpoint_id=folder / "torch"))
        if k == 0:
            table.clear()  # the first time imports and makes groups
    for name, x in a.items():
        assert x.to_local().eq(1.0 + int(name[1:])).all(), "what was loaded is right"
    if rank == 0:
        for what, times in table.items():
            mine, other_s = (statistics.median(times[who]) for who in ("ours", "torch"))
            against = (
                "copy of the local state into memory at hand"
                if what.startswith("async")
                else "torch"
            )
            print(
                f"{what:30} ours {mine:7.3f} s   {against} {other_s:7.3f} s   ratio {mine / other_s:5.2f}"
            )
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for args.part, size in (("four", 4), ("two", 2)):
            spawn(run, (args, folder), nprocs=size)


if __name__ == "__main__":
    main()
