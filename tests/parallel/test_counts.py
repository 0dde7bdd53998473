"""What one block more adds to a training step, from the log, where parallelisms are combined: theirs, and nothing else."""

from collections import Counter

import pytest
import torch

import shardwise
from shardwise import Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)


def tensor(model, mesh):
    plan = {
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)


def sequence(model, mesh):
    seq, col = Shard(1), ColwiseParallel(use_local_output=False)
    out = RowwiseParallel(output_layouts=seq, use_local_output=False)
    into = PrepareModuleInput(input_layouts=seq, desired_input_layouts=Replicate())
    plan = {
        "tok": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=seq, use_local_output=False
        ),
        "blocks.*.n?": SequenceParallel(),
        "blocks.*.attn": into,
        "blocks.*.attn.[qkv]": col,
        "blocks.*.attn.o": out,
        "blocks.*.up": ColwiseParallel(input_layouts=seq, use_local_output=False),
        "blocks.*.down": out,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=seq, use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)


def shard(model, mesh):
    over = mesh["rep", "dp"] if "rep" in mesh.mesh_dim_names else mesh["dp"]
    for block in model.blocks:
        fully_shard(block, over)
    fully_shard(model, over)


def data(model, mesh):
    data_parallel(model, mesh["dp"])  # one bucket for each group of ranks


def a_step(zoo, makes, axes, layers):
    names, shape = tuple(axes), tuple(axes.values())

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = zoo.GPT(vocab=12, width=16, hidden=32, layers=layers, tied=False)
        for make in makes:
            make(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        cut = [Shard(0) if name in ("rep", "dp") else Replicate() for name in names]
        x = shardwise.distribute_tensor(torch.arange(64).view(8, 8) % 12, mesh, cut)

        def step():
            zoo.loss_of(model, x, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        with shardwise.CommLog() as log:
            step()
        return Counter((e.kind, e.tag) for e in log.on(mesh.get_rank()).events)

    return shardwise.simulate(rank, torch.Size(shape).numel())


TENSOR = {("all_reduce", "tp"): 4}
SEQUENCE = {("all_gather", "tp"): 4, ("reduce_scatter", "tp"): 4}
SHARD = {("all_gather", "dp"): 2, ("reduce_scatter", "dp"): 1}
HYBRID = {**SHARD, ("all_reduce", "rep"): 1}


@pytest.mark.parametrize(
    ("makes", "axes", "expected"),
    [
        ((tensor, data), {"dp": 2, "tp": 2}, TENSOR),
        ((sequence, data), {"dp": 2, "tp": 2}, SEQUENCE),
        ((shard,), {"dp": 2}, SHARD),
        ((shard,), {"rep": 2, "dp": 2}, HYBRID),
        ((tensor, shard), {"dp": 2, "tp": 2}, TENSOR | SHARD),
        ((sequence, shard), {"dp": 2, "tp": 2}, SEQUENCE | SHARD),
        ((sequence, shard), {"rep": 2, "dp": 2, "tp": 2}, SEQUENCE | HYBRID),
    ],
    ids=lambda v: "+".join(getattr(x, "__name__", str(x)) for x in v),
)
def test_a_block_more(zoo, makes, axes, expected):
    for two, three in zip(
        a_step(zoo, makes, axes, 2), a_step(zoo, makes, axes, 3), strict=True
    ):
        assert three - two == expected
        assert not two - three


def test_parameters_outside_of_the_plan_are_reduced_together_once_they_are_dtensors():
    def on_rank():
        mesh = shardwise.init_device_mesh("cpu", (2,))
        blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "n": torch.nn.LayerNorm(8),
                    "a": torch.nn.Linear(8, 16),
                    "b": torch.nn.Linear(16, 8),
                }
            )
            for _ in range(3)
        )
        plan = {
            "*.a": ColwiseParallel(use_local_output=False),
            "*.b": RowwiseParallel(use_local_output=False),
        }
        parallelize_module(blocks, mesh, plan)
        counts = []
        for _ in range(2):
            x = shardwise.distribute_tensor(torch.ones(4, 8), mesh)
            for b in blocks:
                x = x + b["b"](b["a"](b["n"](x)).relu())
            with shardwise.CommLog() as log:
                x.square().mean().backward()
            counts.append(log.count())
            shardwise.distribute_module(blocks, mesh)
        assert counts[0] - counts[1] >= 2 * len(blocks)  # of each norm two gradients
        assert counts[1] == len(blocks) + 1  # an input each, and one bucket

    shardwise.simulate(on_rank, 2)
