"""Ten steps of AdamW with dropout on, every parallelism on meshes of one to three axes: as on one device.

Parameters and losses in float64 within 1e-9, losses in float32 within 1e-5, sizes that divide and sizes that do not.
"""

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

EVEN = {"vocab": 12, "width": 16, "hidden": 32, "batch": 8, "length": 8}
UNEVEN = {"vocab": 11, "width": 12, "hidden": 33, "batch": 5, "length": 7}


def tensor(model, mesh):
    local = 4 % mesh["tp"].size() == 0  # with plain pieces the heads must divide
    plan = {
        "blocks.*.attn.[qkv]": ColwiseParallel(use_local_output=local),
        "blocks.*.attn.o": RowwiseParallel(use_local_output=local),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)


def sequence(model, mesh):
    seq, col = Shard(1), ColwiseParallel(use_local_output=False)
    out = RowwiseParallel(output_layouts=seq, use_local_output=False)
    plan = {
        "tok": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=seq, use_local_output=False
        ),
        "blocks.*.n?": SequenceParallel(),
        "blocks.*.drop": SequenceParallel(),
        "blocks.*.attn": PrepareModuleInput(
            input_layouts=seq, desired_input_layouts=Replicate()
        ),
        "blocks.*.attn.[qkv]": col,
        "blocks.*.attn.o": out,
        "blocks.*.up": ColwiseParallel(input_layouts=seq, use_local_output=False),
        "blocks.*.down": out,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=seq, use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)


def data(model, mesh):
    data_parallel(model, mesh["dp"], bucket_cap_mb=0.002)


def shard(zero):
    def make(model, mesh):
        over = mesh["rep", "dp"] if "rep" in mesh.mesh_dim_names else mesh["dp"]
        for block in model.blocks:
            fully_shard(block, over, zero=zero)
        fully_shard(model, over, zero=zero)

    make.__name__ = f"zero{zero}"
    return make


def meshes(*makes):
    """The meshes that some ways are tried on: with every axis that they need, and then with more."""
    axes = {"dp": 2} if makes[-1] not in (tensor, sequence) else {}
    if makes[0] in (tensor, sequence):
        axes["tp"] = 2
    out = [axes]
    if len(axes) == 1:
        out.append(dict.fromkeys(axes, 3))
    if "dp" in axes:
        out.append({"rep": 2, **axes})
    else:
        out += [{"more": 2, **axes}, {"more": 1, "dp": 2, **axes}]
    if len(axes) == 1 and "dp" in axes:
        out.append({"rep": 2, "dp": 2, "more": 2})
    return out


WAYS = [
    (data,), (shard(1),), (shard(2),), (shard(3),), (tensor,), (sequence,),
    (tensor, data), (sequence, data), (tensor, shard(2)), (tensor, shard(3)), (sequence, shard(3)),
]  # fmt: skip
CASES = [(makes, axes) for makes in WAYS for axes in meshes(*makes)]


def name_of(case):
    makes, axes = case
    return (
        "+".join(m.__name__ for m in makes) + "-" + "x".join(f"{a}{n}" for a, n in axes.items())
    )


def cut_for(names):
    """The batch is cut over all axes of data."""
    return [Shard(0) if name in ("rep", "dp") else Replicate() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ten_steps(zoo, case, sizes):
    makes, axes = case
    names, shape = tuple(axes), tuple(axes.values())
    model = {k: sizes[k] for k in ("vocab", "width", "hidden")}
    plain = zoo.GPT(**model, layers=1, dropout=0.2)
    size = (sizes["batch"], sizes["length"])
    batches = [tuple(torch.randint(sizes["vocab"], size) for _ in range(2)) for _ in range(3)]
    expected = {}
    with shardwise.rng(like="torch"):
        for dtype in (torch.float64, torch.float32):
            expected[dtype] = zoo.trained(zoo.copy(plain).to(dtype), batches)

        def rank(_):
            mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
            mine = [
                [shardwise.distribute_tensor(t, mesh, cut_for(names)) for t in p]
                for p in batches
            ]
            out = {}
            for dtype in expected:
                ours = zoo.copy(plain).to(dtype)
                for make in makes:
                    make(ours, mesh)
                out[dtype] = zoo.trained(ours, mine)
            return out

        runs = shardwise.simulate(rank, torch.Size(shape).numel())
    for run in runs:
        for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            (got, seen), (want, losses) = run[dtype], expected[dtype]
            if dtype == torch.float64:
                zoo.same(got, want)
            assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < bound
