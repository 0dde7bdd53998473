"""What a captured training step costs, beside torch's eager modules and our own eager step, on real processes.

    torchrun --standalone --nproc-per-node=2 benchmarks/capture.py
    torchrun --standalone --nproc-per-node=2 benchmarks/capture.py --only data layers --turns 21

A step is zero_grad, forward, backward, optimizer. Variants take turns, back and forth, with a barrier before each step;
a time is the median over the turns of the slower rank, a ratio the median of the turns' ratios. All variants of
a row start from the same weights and must end with the same loss.

    data       2-block language model, d = 64, AdamW: DistributedDataParallel + AdamW(foreach)
    layers     40 parameters in 20 small layers, SGD with momentum
    fsdp       4 blocks, d = 256, fully sharded
    tensor     4 blocks, d = 256, tensor parallel

With --inductor there is another line for each row named (data, if none is): our step compiled.
"""

import argparse
import copy
from pathlib import Path
import statistics
import sys
import time

import torch
from torch import nn
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))
from train_step import LIBS, Block, everywhere, mean

import shardwise
from shardwise import Shard


class Model(nn.Module):
    def __init__(self, width, layers, vocab=256, length=64):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


def stepper(model, batch, kind="adamw"):
    groups = {}
    for p in model.parameters():
        groups.setdefault(type(p.data), []).append(p)
    groups = [{"params": ps} for ps in groups.values()]
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, foreach=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, foreach=True)

    def step(*batch):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, batch


def captured(build, lib, mesh, model, mine, whole, **how):
    step, batch = build(lib, mesh, model, mine, whole)
    return shardwise.capture(step, **how), batch


def data(lib, mesh, model, mine, whole):
    if lib is LIBS["torch"]:
        return stepper(lib.data_parallel(model, mesh), mine)
    shardwise.distribute_module(model, mesh)
    wrap = shardwise.DTensor.from_local
    return stepper(model, [wrap(t, mesh, [Shard(0)], run_check=False) for t in mine])


def layers(lib, mesh, model, mine, whole):
    return stepper(lib.data_parallel(model, mesh), mine, "sgd")


def fsdp(lib, mesh, model, mine, whole):
    for block in model.blocks:
        lib.fully_shard(block, mesh=mesh)
    lib.fully_shard(model, mesh=mesh)
    return stepper(model, mine)


def tensor(lib, mesh, model, mine, whole):
    col, row = lib.ColwiseParallel, lib.RowwiseParallel
    plan = {f"attn.{name}": col() for name in "qkv"}
    plan |= {"attn.o": row(), "up": col(), "down": row()}
    for block in model.blocks:
        lib.parallelize_module(block, mesh, plan)
    return stepper(model, whole)


ROWS = {"data": data, "layers": layers, "fsdp": fsdp, "tensor": tensor}


def case(name, world, rank):
    torch.manual_seed(0)
    if name == "layers":
        base = Layers()
        whole = tuple(torch.randn(8 * world, 64) for _ in range(2))
    else:
        small = name == "data"
        base = Model(64, 2, 64) if small else Model(256, 4)
        length, vocab = (16, 64) if small else (64, 256)
        whole = tuple(torch.randint(vocab, (4 * world, length)) for _ in range(2))
    return base, tuple(t.chunk(world)[rank] for t in whole), whole


def timed(steps, turns, warmup):
    times, losses = {label: [] for label in steps}, {}
    for turn in range(warmup + turns):
        for label, (step, batch) in list(steps.items())[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            start = time.perf_counter()
            losses[label] = step(*batch)
            times[label].append((time.perf_counter() - start) * 1e3)
    every = everywhere({label: ts[warmup:] for label, ts in times.items()})
    return {k: [max(ts) for ts in zip(*(e[k] for e in every))] for k in steps}, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument(
        "--inductor", nargs="*", help="rows to compile, too; data if none is named"
    )
    options = parser.parse_args()
    also = [] if options.inductor is None else options.inductor or ["data"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = [
        "| step | torch, ms | ours eager, ms | captured, ms | captured / torch | captured / eager | collectives |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in options.only:
        base, mine, whole = case(name, world, rank)
        steps = {}
        for label in ("torch", "eager", "captured", "inductor"):
            if label == "inductor" and name not in also:
                continue
            lib = LIBS["torch" if label == "torch" else "shardwise"]
            mesh = lib.mesh("cpu", (world,), mesh_dim_names=("x",))
            model = copy.deepcopy(base)
            if label == "captured":
                steps[label] = captured(ROWS[name], lib, mesh, model, mine, whole)
            elif label == "inductor":
                steps[label] = captured(
                    ROWS[name], lib, mesh, model, mine, whole, compile="inductor"
                )
            else:
                steps[label] = ROWS[name](lib, mesh, model, mine, whole)
        times, losses = timed(steps, options.turns, 3)
        found = {label: mean(loss) for label, loss in losses.items()}
        for label, value in found.items():
            assert abs(value / found["torch"] - 1) < 1e-4, f"{name}, {label}: {found}"
        step = steps["captured"][0].last.step
        for label in steps:
            if label in ("torch", "eager"):
                continue
            ratios = [
                statistics.median(b / a for a, b in zip(times[other], times[label]))
                for other in ("torch", "eager")
            ]
            ms = [statistics.median(times[k]) for k in ("torch", "eager", label)]
            what = name if label == "captured" else f"{name}, inductor"
            cells = [
                what,
                *(f"{m:.1f}" for m in ms),
                *(f"{r:.2f}" for r in ratios),
                str(len(step.collectives())),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if rank == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
