"""Wall time of ``redistribute``: torch's DTensor and shardwise, interleaved, four processes over Gloo.

Twelve pairs of layouts on a mesh (4,) and twelve on (2, 2), at 1 and 16 MiB. In each turn both libraries run
every pair, in changing order; a sample is the slowest rank's time between two barriers. The ratio of a pair is
the median of the ratios of its turns, over all launches the median of those.

    python benchmarks/redistribute.py                       # three launches, markdown
    python benchmarks/redistribute.py --launches 1 --turns 7 --mib 1
"""

import argparse
import json
import math
from pathlib import Path
import socket
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import torch.distributed.tensor as torch_dtensor
import torch.multiprocessing as mp

import shardwise

PAIRS = {
    (4,): [(a, b) for a in ("R", "S0", "S1", "P") for b in ("R", "S0", "S1")],
    (2, 2): [
        ("S0 S0", "R R"),
        ("S0 S1", "R R"),
        ("S0 S0", "S1 S1"),
        ("S0 S1", "S1 S0"),
        ("S0 R", "S1 R"),
        ("R S0", "S0 R"),
        ("S0 R", "R S1"),
        ("P P", "R R"),
        ("P R", "R S0"),
        ("P P", "S0 S1"),
        ("P S0", "S1 R"),
        ("P S0", "R R"),
    ],
}


def placements(lib, text):
    names = {"R": lib.Replicate, "P": lib.Partial}
    return [names[w]() if w in names else lib.Shard(int(w[1])) for w in text.split()]


def local_piece(full, shape, coord, text):
    for size, i, what in zip(shape, coord, text.split()):
        if what[0] == "S":
            full = full.chunk(size, int(what[1]))[i]
    return full.contiguous()


def time_pair(lib, mesh, x, dst):
    dist.barrier()
    start = time.perf_counter()
    out = x.redistribute(mesh, dst).to_local()
    out = out.wait() if hasattr(out, "wait") else out
    took = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def worker(rank, port, sizes, turns, path):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4
    )
    found = {}
    for shape, pairs in PAIRS.items():
        meshes = {
            "torch": init_device_mesh("cpu", shape),
            "shardwise": shardwise.init_device_mesh("cpu", shape),
        }
        libs = {"torch": torch_dtensor, "shardwise": shardwise}
        coord = meshes["torch"].get_coordinate()
        for mib in sizes:
            side = int(math.sqrt(mib * 2**20 / 4))
            full = torch.randn(side, side)
            for src, dst in pairs:
                local = local_piece(full, shape, coord, src)
                runs = {}
                for name, lib in libs.items():
                    x = lib.DTensor.from_local(
                        local, meshes[name], placements(lib, src), run_check=False
                    )
                    runs[name] = (lib, meshes[name], x, placements(lib, dst))
                    time_pair(*runs[name])
                samples = {name: [] for name in libs}
                for turn in range(turns):
                    for name in list(libs)[:: 1 if turn % 2 else -1]:
                        samples[name].append(time_pair(*runs[name]))
                ratios = [s / t for s, t in zip(samples["shardwise"], samples["torch"])]
                found[f"{shape} {mib} MiB [{src}] -> [{dst}]".replace("  ", " ")] = (
                    statistics.median(samples["torch"]) * 1e3,
                    statistics.median(samples["shardwise"]) * 1e3,
                    statistics.median(ratios),
                )
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(sizes, turns):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/found.json"
        mp.spawn(worker, (port, sizes, turns, path), nprocs=4)
        return json.loads(Path(path).read_text())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 16])
    args = parser.parse_args()
    launches = [launch(args.mib, args.turns) for _ in range(args.launches)]
    print("| what | torch ms | shardwise ms | ratio |\n| --- | ---: | ---: | ---: |")
    ratios = []
    for what in launches[0]:
        t, s, r = (statistics.median(run[what][i] for run in launches) for i in range(3))
        ratios.append(r)
        print(f"| {what} | {t:.2f} | {s:.2f} | {r:.2f} |")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\ngeometric mean {mean:.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
