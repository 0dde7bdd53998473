"""A training job that may die at any moment, and goes on with another number of processes.

    torchrun --nproc-per-node=4 examples/elastic_train.py --folder runs/a --steps 20
    ... a worker is killed ...
    torchrun --nproc-per-node=2 examples/elastic_train.py --folder runs/a --steps 20

The second launch finds the last complete checkpoint, lays it out on its own mesh, and the losses go on as if
nothing had happened: the order of the data and the dropout masks included. ``--kill-at 7`` plays the accident.
"""

import argparse
import os
from pathlib import Path
import signal

import torch
from torch import nn
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard, checkpoint, distribute_module, distribute_tensor


def make_model(mesh, dtype, width=48, classes=10):
    """A small network, built on the meta device: no rank ever holds a whole weight."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(16, width), nn.GELU(), nn.Dropout(0.2),
            nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, classes),
        ).to(dtype)  # fmt: skip
    dims = {"0": 0, "3": 1, "6": 1}  # rows of the first, columns of the others, over "tp"

    def place(name, module, mesh):
        for key, p in module.named_parameters(recurse=False):
            where = Shard(dims[name]) if p.ndim == 2 else Replicate()
            setattr(
                module,
                key,
                nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), where])),
            )

    return distribute_module(model, mesh, place)


def init(model):
    """Start values, the same on every mesh."""
    model.to_empty(device=next(model.parameters()).device_mesh.device_type)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p, std=0.2) if p.ndim == 2 else nn.init.zeros_(p)


def batch(step, mesh, dtype):
    """The data of a step: it depends on the step and on nothing else."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(32, 16, generator=g, dtype=dtype)
    y = (x[:, :10] + x[:, 6:]).argmax(-1)
    return (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (x, y))


def train(folder, steps, every=5, dtype=torch.float32, kill_at=None, report=print):
    """Train from the last checkpoint in ``folder``, or from the start."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = shardwise.init_device_mesh(
        "cpu", (max(1, size // 2), min(2, size)), mesh_dim_names=("dp", "tp")
    )
    torch.manual_seed(7)
    model = make_model(mesh, dtype)
    newest = checkpoint.latest(folder)
    if newest is None:
        init(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": checkpoint.RNG(),
        "step": 0,
    }
    if newest is not None:
        checkpoint.load(state, newest)
    for step in range(state["step"], steps):
        x, y = batch(step, mesh, dtype)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if step == kill_at and mesh.get_rank() == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        value = loss.item()
        if mesh.get_rank() == 0:
            report(f"{step} {value!r}")
        state["step"] = step + 1
        if state["step"] % every == 0:
            checkpoint.save(state, folder, step=state["step"], keep=2, overwrite=True)


def main():
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("elastic"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--kill-at", type=int, help="the last worker kills itself in this step")
    args = parser.parse_args()
    train(args.folder, args.steps, args.every, getattr(torch, args.dtype), args.kill_at,
          lambda line: print(line, flush=True))  # fmt: skip


if __name__ == "__main__":
    main()
