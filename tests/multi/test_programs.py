"""What people write with distributed tensors, in real processes over Gloo, against one device."""

import contextlib
import os
from pathlib import Path
import subprocess
import sys
import time
import traceback

import pytest
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh as torch_device_mesh
import torch.distributed.tensor
from torch.multiprocessing.spawn import spawn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.errors import UnsupportedError

WORLD = 4
ROOT = Path(__file__).parents[2]
R, S = Replicate(), Shard
pytestmark = pytest.mark.multi


def line():
    return shardwise.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("x",))


def grid():
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def same(got, want, tol=1e-12):
    if isinstance(got, DTensor):
        got = got.full_tensor()
    torch.testing.assert_close(got.detach(), want.detach(), rtol=tol, atol=tol)


def randn(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# ---- laying out ------------------------------------------------------------------------------


def check_rows_columns_replicas(rank):
    big = randn(888, 12)
    before = big.clone()
    rows = distribute_tensor(big, line(), [S(0)])
    columns = distribute_tensor(big, line(), [S(1)])
    whole = distribute_tensor(big, line(), [R])
    mixed = distribute_tensor(big, grid(), [R, S(0)])
    assert rows.to_local().shape == (222, 12)
    assert columns.to_local().shape == (888, 3)
    assert mixed.to_local().shape == (444, 12)
    same(rows.to_local(), big[rank * 222 : (rank + 1) * 222])
    same(columns.to_local(), big[:, rank * 3 : (rank + 1) * 3])
    same(mixed.to_local(), big[(rank % 2) * 444 : (rank % 2 + 1) * 444])
    for x in (rows, columns, whole, mixed):
        assert x.shape == big.shape
        same(x, big)
        x.to_local().zero_()
    same(big, before)


def check_source_rank_decides(rank):
    mine = torch.full((5, 3), float(rank), dtype=torch.float64)
    x = distribute_tensor(mine, line(), [S(0)])
    assert mine.eq(rank).all(), "the caller's tensor is not written to"
    same(x, torch.zeros(5, 3, dtype=torch.float64))
    same(distribute_tensor(mine, line(), [R]), torch.zeros(5, 3, dtype=torch.float64))
    assert mine.eq(rank).all()
    whole = distribute_tensor(mine, line(), [S(0)], src_data_rank=2).full_tensor()
    assert whole.eq(2).all()


def check_from_local_that_requires_grad(rank):
    local = randn(3, 2, seed=rank).requires_grad_()
    x = DTensor.from_local(local, line(), [S(0)])
    assert x.shape == (12, 2)
    assert x.requires_grad
    w = randn(2, 2, seed=9)
    (x @ distribute_tensor(w, line())).pow(2).sum().backward()
    want = randn(3, 2, seed=rank).requires_grad_()
    (want @ w).pow(2).sum().backward()
    same(local.grad, want.grad)
    y = DTensor.from_local(torch.ones(2, 2).requires_grad_(), line(), [Partial()])
    same(y.full_tensor(), torch.full((2, 2), 4.0))


def check_row_wise_to_column_wise_to_replicated(rank):
    for shape in ((888, 12), (7, 5), (2, 9), (1, 1)):
        t = randn(*shape)
        row = distribute_tensor(t, line(), [S(0)])
        column = row.redistribute(line(), [S(1)])
        replica = column.redistribute(line(), [R])
        same(column.to_local(), t.tensor_split(torch_chunk_ends(shape[1]), 1)[rank])
        same(replica.to_local(), t)
        same(replica.redistribute(line(), [S(0)]).to_local(), row.to_local())


def torch_chunk_ends(n):
    size = -(-n // WORLD)
    return [min(n, size * (i + 1)) for i in range(WORLD - 1)]


def check_uneven_and_empty(rank):
    for shape, placement in (((5, 3), S(0)), ((2, 3), S(0)), ((2, 3), S(1))):
        t = randn(*shape)
        x = distribute_tensor(t, line(), [placement]).requires_grad_()
        p = t.clone().requires_grad_()
        for a in (x, p):
            (
                F.layer_norm(a, shape[1:]).exp() + a.softmax(0) * a.std() + a.amax()
            ).sum().backward()
        same(x.grad, p.grad, 1e-10)


# ---- modules ---------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 6)
        self.net2 = nn.Linear(6, 4)

    def forward(self, x):
        return self.net2(self.net1(x).relu())


def two():
    torch.manual_seed(1)
    return Two().double()


def cut_rows(name, module, mesh):
    if isinstance(module, nn.Linear):
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [S(0)])))


def steps(model, optimizer, batch, count=4, clip=None):
    losses = []
    for i in range(count):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch(randn(7, 10, seed=i))), batch(randn(7, 4, seed=100 + i)))
        loss.backward()
        if clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        losses.append(loss)
    return losses


def plain(x):
    return x


def check_two_linears_by_rows(rank):
    for mesh, lay in (
        (line(), [S(0)]),
        (line(), [R]),
        (grid(), [S(0), R]),
        (grid(), [S(0), S(1)]),
    ):
        want, model = two(), distribute_module(two(), mesh, cut_rows)
        assert model.net1.weight.placements[0] == S(0)
        expected = steps(want, torch.optim.SGD(want.parameters(), lr=0.1), plain)
        got = steps(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda t, mesh=mesh, lay=lay: distribute_tensor(t, mesh, lay),
        )
        for g, w in zip(got, expected):
            same(g, w)
        for p, w in zip(model.parameters(), want.parameters()):
            same(p, w)


def check_input_and_output_functions(rank):
    def inputs(module, args, mesh):
        return tuple(DTensor.from_local(a, mesh, [S(0)], run_check=False) for a in args)

    def outputs(module, out, mesh):
        return out.redistribute(mesh, [S(0)]).to_local()

    model = distribute_module(two(), line(), cut_rows, inputs, outputs)
    want = two()
    x = randn(3, 10, seed=rank)
    y = model(x)
    assert type(y) is torch.Tensor
    same(y, want(x))
    y.pow(2).sum().backward()
    want(torch.cat([randn(3, 10, seed=r) for r in range(WORLD)])).pow(2).sum().backward()
    for p, w in zip(model.parameters(), want.parameters()):
        same(p.grad, w.grad)


def check_torch_device_mesh(rank):
    theirs = torch_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = torch_device_mesh("cpu", (WORLD,))
    t = randn(6, 5)
    x = distribute_tensor(t, theirs, [S(0), S(1)])
    same(x, t)
    same(x.redistribute(theirs, [R, S(0)]), t)
    assert x.device_mesh == grid()
    same(DTensor.from_local(x.to_local(), theirs, [S(0), S(1)], shape=t.shape), t)
    assert shardwise.ones(4, 3, device_mesh=flat, placements=[S(0)]).to_local().shape == (1, 3)
    assert shardwise.zeros(4, device_mesh=theirs).to_local().shape == (4,)
    model, want = distribute_module(two(), flat, cut_rows), two()
    same(model(distribute_tensor(randn(3, 10), flat, [S(0)])), want(randn(3, 10)))
    same((x + distribute_tensor(t, grid(), [R, R])), 2 * t)
    same(x @ distribute_tensor(randn(5, 2), theirs["tp"], [S(0)]), t @ randn(5, 2))
    with shardwise.DeviceMesh("cpu", theirs.mesh):
        same(distribute_tensor(t, placements=[S(0)]), t)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def check_optimizers_and_clipping(rank):
    for name, make in OPTIMIZERS.items():
        want, model = two(), distribute_module(two(), line(), cut_rows)
        expected = steps(want, make(want.parameters()), plain, clip=0.3)
        got = steps(
            model,
            make(model.parameters()),
            lambda t: distribute_tensor(t, line(), [S(0)]),
            clip=0.3,
        )
        for g, w in zip((*got, *model.parameters()), (*expected, *want.parameters())):
            same(g, w, 1e-8), name


def check_no_sync(rank):
    want, model = two(), distribute_module(two(), line())
    for i in range(3):
        held = shardwise.no_sync() if i < 2 else contextlib.nullcontext()
        with held:
            model(distribute_tensor(randn(7, 10, seed=i), line(), [S(0)])).pow(
                2
            ).mean().backward()
        want(randn(7, 10, seed=i)).pow(2).mean().backward()
    for p, w in zip(model.parameters(), want.parameters()):
        assert p.grad.placements == (R,)
        same(p.grad, w.grad)


# ---- randomness ------------------------------------------------------------------------------


def check_dropout(rank):
    t = randn(13, 5)
    for stream in ("torch", "philox"):
        masks = []
        for mesh, lay in (
            (line(), [S(0)]),
            (line(), [S(1)]),
            (line(), [R]),
            (grid(), [S(1), S(0)]),
        ):
            torch.manual_seed(5)
            with shardwise.rng(like=stream):
                masks.append(F.dropout(distribute_tensor(t, mesh, lay), 0.4).full_tensor())
        for mask in masks[1:]:
            assert torch.equal(mask, masks[0])
        if stream == "torch":
            torch.manual_seed(5)
            assert torch.equal(masks[0], F.dropout(t, 0.4))


def check_checkpoint_draws_the_same_mask(rank):
    model = distribute_module(two(), line(), cut_rows)

    def block(x):
        return F.dropout(model(x), 0.5)

    for stream in ("torch", "philox"):
        for reentrant in (True, False):
            grads = []
            for kept in (True, False):
                torch.manual_seed(3)
                x = distribute_tensor(randn(7, 10), line(), [S(0)]).requires_grad_()
                with shardwise.rng(like=stream):
                    y = block(x) if kept else checkpoint(block, x, use_reentrant=reentrant)
                    y.pow(2).sum().backward()
                grads.append(x.grad.full_tensor())
            assert torch.equal(*grads)


# ---- many steps, and memory ------------------------------------------------------------------


def check_500_steps_with_sharded_parameters(rank):
    """Parameters cut by rows are gathered for use, batches are cut: the shape that corrupted a heap."""
    model, want = distribute_module(two().float(), line(), cut_rows), two().float()
    ours = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs = torch.optim.SGD(want.parameters(), lr=0.01)
    batches = [
        (randn(8, 10, seed=i).float(), randn(8, 4, seed=50 + i).float()) for i in range(5)
    ]
    cut = [tuple(distribute_tensor(t, line(), [S(0)]) for t in batch) for batch in batches]
    for step in range(500):
        for net, optimizer, (x, y) in (
            (model, ours, cut[step % 5]),
            (want, theirs, batches[step % 5]),
        ):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    for p, w in zip(model.parameters(), want.parameters()):
        same(p, w, 1e-4)


def resident(field):
    with open("/proc/self/status") as status:
        return next(int(row.split()[1]) * 1024 for row in status if row.startswith(field))


def check_memory(rank):
    """Laying out 256 MiB by rows takes a rank no more than its own piece."""
    mesh, shape = line(), (8192, 8192)
    distribute_tensor(torch.ones(64, 64), mesh, [S(0)])
    full = torch.ones(shape)
    piece = full.numel() * 4 // WORLD
    for placements, most in (([S(0)], piece), ([S(1)], 2 * piece)):
        dist.barrier()
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = resident("VmRSS")
        x = distribute_tensor(full, mesh, placements)
        peak, kept = resident("VmHWM") - before, resident("VmRSS") - before
        slack = 8 << 20
        assert peak <= most + slack, f"rank {rank}: {placements} took {peak / piece:.2f} pieces"
        assert kept <= piece + slack
        assert x.to_local().eq(1).all()
        del x
    assert full.eq(1).all()


def check_collectives_of_the_program_are_refused(rank):
    x = distribute_tensor(randn(4, 3), line(), [S(0)])
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([torch.empty(4, 3)] * WORLD, x),
        lambda: torch.ops._c10d_functional.all_reduce(x, "sum", "0"),
        lambda: nn.parallel.DistributedDataParallel(distribute_module(nn.Linear(3, 2), line())),
    ):
        with pytest.raises(UnsupportedError, match="works on each rank's own tensor"):
            call()
    same(x, randn(4, 3))


def check_tensors_of_torch(rank):
    full, mesh = randn(5, 3), torch_device_mesh("cpu", (WORLD,))
    theirs = torch.distributed.tensor.distribute_tensor(
        full, mesh, [torch.distributed.tensor.Shard(0)]
    ).requires_grad_()
    x = distribute_tensor(theirs, line(), [S(1)])
    same(x, full)
    x.square().sum().backward()
    same(theirs.grad.full_tensor(), 2 * full)
    with pytest.raises(UnsupportedError, match="torch's DTensor"):
        x + theirs
    with pytest.raises(UnsupportedError, match="torch's DTensor"):
        DTensor.from_local(theirs, line(), [S(0)])


CHECKS = [function for name, function in list(globals().items()) if name.startswith("check_")]


def run_checks(rank: int, folder: str) -> None:
    """Run in every process; the report is a file per rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    lines = []
    for check in CHECKS:
        start = time.perf_counter()
        try:
            check(rank)
            lines.append(f"ok {check.__name__}")
            if rank == 0:
                sys.stdout.write(f"{check.__name__}: {time.perf_counter() - start:.1f} s\n")
        except Exception:
            lines.append(f"FAILED {check.__name__}\n{traceback.format_exc()}")
            break  # the others may be anywhere; what follows means nothing
    Path(folder, f"report{rank}").write_text("\n".join(lines))
    if any(row.startswith("FAILED") for row in lines):
        sys.exit(1)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    try:
        spawn(run_checks, (str(folder),), nprocs=WORLD)
    except Exception as error:
        sys.stdout.write(f"{error}\n")
    return [
        path.read_text() if (path := folder / f"report{rank}").exists() else "died"
        for rank in range(WORLD)
    ]


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_program(reports, name):
    for rank, report in enumerate(reports):
        assert f"ok {name}" in report.splitlines(), f"rank {rank}: {report}"


# ---- launched --------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist
import shardwise
from shardwise import Shard, distribute_tensor

assert not dist.is_initialized()
mesh = shardwise.init_device_mesh("cpu", (2,))
assert dist.is_initialized() and mesh.size() == 2
x = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
assert x.to_local().shape == ((2, 2) if mesh.get_rank() == 0 else (1, 2))
assert x.sum().item() == 15
print("right", flush=True)
"""

FAILS = """
import sys, torch
import shardwise
from shardwise import Shard, distribute_tensor
import torch.nn.functional as F

mesh = shardwise.init_device_mesh("cpu", (2,))
rank = mesh.get_rank()
w = distribute_tensor(torch.randn(5, 3), mesh).requires_grad_()
i = distribute_tensor(torch.tensor([0, 1, 2, 7]), mesh, [Shard(0)])
try:
    loss = F.embedding(i, w).sum()
    loss.item()
except Exception as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    raise SystemExit(3)
"""


def torchrun(text, folder):
    path = folder / "script.py"
    path.write_text(text)
    command = [sys.executable, "-W", "error::UserWarning", "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node=2", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_torchrun_starts_the_world(tmp_path):
    done = torchrun(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 2


def test_an_error_on_one_rank_is_told_and_does_not_hang(tmp_path):
    start = time.monotonic()
    done = torchrun(FAILS, tmp_path)
    assert done.returncode != 0
    assert "rank 1: IndexError: index out of range in self" in done.stdout, (
        done.stdout + done.stderr
    )
    assert time.monotonic() - start < 60
