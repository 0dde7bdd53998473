"""What a training step costs: torch's data, fully sharded and tensor parallel modules beside ours, on real processes.

    torchrun --standalone --nproc-per-node=2 benchmarks/train_step.py
    torchrun --standalone --nproc-per-node=2 benchmarks/train_step.py --turns 5 --only fsdp memory

Four transformer blocks (d = 256, 4 heads, length 64, batch 4 per rank), AdamW(foreach), one thread per process. A step
is forward, backward, optimizer, zero_grad. Variants take turns, back and forth, with a barrier before each step; a
time is the median over the turns of the slower rank, a ratio the median of the turns' ratios. Every variant starts
from the same weights and must end with the loss of one process that trains on the whole batch.

The last row counts memory: the most bytes that a step has allocated beyond what is there before it.
"""

import argparse
import copy
from pathlib import Path
import statistics
import sys
import time
from types import SimpleNamespace

import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
import shardwise
from shardwise import parallel

WIDTH, HEADS, LAYERS, VOCAB, LENGTH, BATCH = 256, 4, 4, 256, 64, 4

TORCH = SimpleNamespace(
    **{k: getattr(torch_parallel, k) for k in torch_parallel.__all__},
    fully_shard=torch_fsdp.fully_shard,
    data_parallel=lambda m, mesh: nn.parallel.DistributedDataParallel(
        m, process_group=mesh.get_group()
    ),
    tensor=torch_tensor,
    mesh=torch_mesh,
)
OURS = SimpleNamespace(
    **{k: getattr(parallel, k) for k in parallel.__all__},
    tensor=shardwise,
    mesh=shardwise.init_device_mesh,
)
LIBS = {"torch": TORCH, "shardwise": OURS}


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)
        self.head = width // HEADS

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (
            f(x).view(B, T, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        a = (q @ k.transpose(-1, -2) * self.head**-0.5).softmax(-1) @ v
        return self.o(a.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def stepper(model, batch):
    groups = {}
    for p in model.parameters():
        groups.setdefault(type(p.data), []).append(p)
    optimizer = torch.optim.AdamW([{"params": ps} for ps in groups.values()], foreach=True)

    def step():
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# ---- the rows -----------------------------------------------------------------------------------


def data(lib, mesh, model, mine, whole):
    return stepper(lib.data_parallel(model, mesh), mine)


def replicated(lib, mesh, model, mine, whole):
    model = lib.tensor.distribute_module(model, mesh)
    cut = [lib.tensor.Shard(0)]
    wrap = lib.tensor.DTensor.from_local
    return stepper(model, [wrap(t, mesh, cut, run_check=False) for t in mine])


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


def sequence(lib, mesh, model, mine, whole):
    seq, rep = lib.tensor.Shard(1), lib.tensor.Replicate()
    col, row = lib.ColwiseParallel, lib.RowwiseParallel
    into = lib.PrepareModuleInput(input_layouts=seq, desired_input_layouts=rep)
    plan = {
        "embed": row(input_layouts=rep, output_layouts=seq, use_local_output=False),
        "norm": lib.SequenceParallel(),
        "head": col(input_layouts=seq, output_layouts=rep),
    }
    for i in range(LAYERS):
        b = f"blocks.{i}."
        plan |= {b + "n1": lib.SequenceParallel(), b + "n2": lib.SequenceParallel()}
        plan[b + "attn"] = into
        plan |= {f"{b}attn.{name}": col() for name in "qkv"}
        plan[b + "attn.o"] = row(output_layouts=seq, use_local_output=False)
        plan[b + "up"] = col(input_layouts=seq)
        plan[b + "down"] = row(output_layouts=seq, use_local_output=False)
    lib.parallelize_module(model, mesh, plan)
    return stepper(model, whole)


ROWS = {
    "data": data,
    "replicated": replicated,
    "fsdp": fsdp,
    "tensor": tensor,
    "sequence": sequence,
}


# ---- measuring ------------------------------------------------------------------------------------


def everywhere(x):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, x)
    return out


def mean(loss):
    if hasattr(loss, "full_tensor"):
        return loss.full_tensor().item()
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def timed(steps, turns, warmup=2):
    """{label: ms of each turn, of the slower rank}, and the last losses."""
    times, losses = {label: [] for label in steps}, {}
    for turn in range(warmup + turns):
        for label, step in list(steps.items())[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            start = time.perf_counter()
            losses[label] = step()
            times[label].append((time.perf_counter() - start) * 1e3)
    every = everywhere({label: ts[warmup:] for label, ts in times.items()})
    return {k: [max(ts) for ts in zip(*(e[k] for e in every))] for k in steps}, losses


def peak(step):
    """The most bytes allocated at once within a step, beyond those before it."""
    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as prof:
        step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        live += e.nbytes()
        most = max(most, live)
    return most


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--only", nargs="*", default=[*ROWS, "memory"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    base = Model()
    whole = tuple(torch.randint(VOCAB, (BATCH * world, LENGTH)) for _ in range(2))
    mine = tuple(t.chunk(world)[rank] for t in whole)
    names = [name for name in ROWS if name in options.only]
    steps = {("local", "plain"): stepper(copy.deepcopy(base), mine)}
    for name in names:
        for label, lib in LIBS.items():
            mesh = lib.mesh("cpu", (world,), mesh_dim_names=("x",))
            steps[label, name] = ROWS[name](lib, mesh, copy.deepcopy(base), mine, whole)
    times, losses = timed(steps, options.turns)
    reference = stepper(copy.deepcopy(base), whole)
    for _ in range(2 + options.turns):
        expected = reference()
    for label, name in steps:
        if label != "local":
            off = abs(mean(losses[label, name]) / expected.item() - 1)
            assert off < 1e-5, f"{label} {name}: the loss is off by {off:.1e}"
    lines = ["| | plain local, ms | torch, ms | shardwise, ms | shardwise / torch |"]
    lines.append("| --- | --- | --- | --- | --- |")
    plain = statistics.median(times["local", "plain"])
    for name in names:
        a, b = times["torch", name], times["shardwise", name]
        ratio = statistics.median(y / x for x, y in zip(a, b))
        a, b = statistics.median(a), statistics.median(b)
        lines.append(f"| {name} | {plain:.0f} | {a:.0f} | {b:.0f} | {ratio:.2f} |")
    if "memory" in options.only:
        found = []
        for lib in LIBS.values():
            mesh = lib.mesh("cpu", (world,), mesh_dim_names=("x",))
            found.append(peak(fsdp(lib, mesh, copy.deepcopy(base), mine, whole)) / 2**20)
        a, b = (max(ms) for ms in zip(*everywhere(found)))
        lines.append(f"| fsdp, peak MiB of a step | | {a:.1f} | {b:.1f} | {b / a:.2f} |")
    if rank == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
