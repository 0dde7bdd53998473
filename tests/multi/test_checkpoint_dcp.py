"""torch.distributed.checkpoint with our DTensors, in four real processes; one launch runs every check."""

from pathlib import Path
import sys
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.multiprocessing.spawn import spawn

import shardwise
from shardwise import Replicate, Shard, checkpoint, distribute_tensor
from shardwise.errors import CheckpointError

WORLD = 4
R, S = Replicate(), Shard
pytestmark = pytest.mark.multi


def line(size=WORLD):
    return shardwise.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))


def grid():
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def value(*shape, dtype=torch.float64):
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) % 97).to(dtype).reshape(shape)


PLACES = {
    "rows": (line, [S(0)]),
    "columns": (line, [S(1)]),
    "whole": (line, [R]),
    "grid": (grid, [S(0), S(1)]),
    "twice": (grid, [S(0), S(0)]),
    "turned": (grid, [Shard(0, order=1), Shard(0, order=0)]),
    "half": (lambda: line(2), [S(0)]),
    "one": (lambda: line(1), [S(1)]),
}
TENSORS = {
    "even": value(8, 4),
    "uneven": value(7, 5),
    "few": value(2, 3, dtype=torch.bfloat16),
    "cube": value(5, 3, 2, dtype=torch.int32),
    "none": value(0, 4),
    "bits": value(3, 3, dtype=torch.bool),
}


def state(place, blank=False):
    mesh, placements = PLACES[place]
    return {
        name: distribute_tensor(torch.zeros_like(x) if blank else x, mesh(), placements)
        for name, x in TENSORS.items()
    } | {"scalar": distribute_tensor(torch.tensor(0 if blank else 3), mesh(), [R])}


def same(got, want):
    for name, x in want.items():
        y = got[name]
        assert y.dtype == x.dtype, name
        if x.device_mesh.get_coordinate() is None:
            continue
        assert torch.equal(y.to_local(), x.to_local()), (name, y.to_local(), x.to_local())


def check_any_layout_to_any(folder, rank):
    for place in PLACES:
        dcp.save({"model": state(place)}, checkpoint_id=folder / place)
    for source, target in zip(PLACES, [*list(PLACES)[3:], *list(PLACES)[:3]]):
        got = state(target, blank=True)
        dcp.load({"model": got}, checkpoint_id=folder / source)
        same(got, state(target))
        plain = {name: torch.zeros_like(x) for name, x in TENSORS.items()}
        dcp.load({"model": plain}, checkpoint_id=folder / source)
        for name, x in TENSORS.items():
            assert torch.equal(plain[name], x), (source, name)


def check_torch_reads_ours_and_we_read_torchs(folder, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import (
        Replicate as TorchReplicate,
        Shard as TorchShard,
        distribute_tensor as torch_distribute,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for k, placements in enumerate(
        ([TorchShard(0), TorchShard(1)], [TorchReplicate(), TorchShard(0)])
    ):
        theirs = {n: torch_distribute(x, mesh, placements) for n, x in TENSORS.items()}
        blank = {
            n: torch_distribute(torch.zeros_like(x), mesh, placements)
            for n, x in TENSORS.items()
        }
        dcp.load({"model": blank}, checkpoint_id=folder / "columns")
        for name, x in theirs.items():
            assert torch.equal(blank[name].to_local(), x.to_local()), name
        dcp.save({"model": theirs}, checkpoint_id=folder / f"theirs{k}")
        for place in ("rows", "twice", "half"):
            got = state(place, blank=True)
            del got["scalar"]
            dcp.load({"model": got}, checkpoint_id=folder / f"theirs{k}")
            same(got, {n: x for n, x in state(place).items() if n in got})


def check_our_own_save_and_load(folder, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import (
        Shard as TorchShard,
        distribute_tensor as torch_distribute,
    )

    mesh = init_device_mesh("cpu", (4,))
    for step, place in enumerate(("grid", "half", "turned")):
        saving = checkpoint.async_save({"model": state(place)}, folder / "ours", step=step)
        assert saving.result() == checkpoint.latest(folder / "ours")
        theirs = {
            n: torch_distribute(torch.zeros_like(x), mesh, [TorchShard(0)])
            for n, x in TENSORS.items()
        }
        dcp.load({"model": theirs}, checkpoint_id=saving.result())
        for name, x in TENSORS.items():
            want = torch_distribute(x, mesh, [TorchShard(0)])
            assert torch.equal(theirs[name].to_local(), want.to_local()), name
        for other in ("columns", "whole", "one"):
            got = state(other, blank=True)
            checkpoint.load({"model": got}, saving.result())
            same(got, state(other))
    for place in ("rows", "twice", "half"):
        got = state(place, blank=True)
        del got["scalar"]
        checkpoint.load({"model": got}, folder / "theirs0")
        same(got, {n: x for n, x in state(place).items() if n in got})
    checkpoint.save_safetensors({"x": state("grid")["uneven"]}, folder / "x.safetensors")
    got = {"x": state("rows", blank=True)["uneven"]}
    checkpoint.load(got, folder / "x.safetensors")
    same(got, {"x": state("rows")["uneven"]})
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoint.save({"x": torch.ones(1)}, folder / "ours", step=2)


def check_chosen_sizes(folder, rank):
    """Cuts at chosen sizes, pieces of nothing included: by torch's functions and ours, and in torch's DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import (
        Shard as TorchShard,
        distribute_tensor as torch_distribute,
    )

    cuts = {
        "line": (line, [S(0, sizes=(1, 0, 4, 2))]),
        "pair": (lambda: line(2), [S(1, sizes=(5, 0))]),
        "grid": (grid, [S(0, sizes=(6, 1)), S(1, sizes=(1, 4))]),
        "both": (grid, [S(1, sizes=(2, 3)), R]),
        "even": (line, [S(1)]),
    }

    def cut(name, blank=False):
        mesh, placements = cuts[name]
        x = TENSORS["uneven"]
        full = torch.zeros_like(x) if blank else x
        return {"x": distribute_tensor(full, mesh(), placements)}

    for name in cuts:
        dcp.save(cut(name), checkpoint_id=folder / f"chosen-{name}")
        checkpoint.save(cut(name), folder / f"chosen-{name}-ours")
        checkpoint.async_save(cut(name), folder / f"chosen-{name}-async").result()
    for source in cuts:
        for target in cuts:
            for form in ("", "-ours", "-async"):
                for load in (
                    lambda got, path: dcp.load(got, checkpoint_id=path),
                    checkpoint.load,
                ):
                    got = cut(target, blank=True)
                    load(got, folder / f"chosen-{source}{form}")
                    same(got, cut(target))
    mesh = init_device_mesh("cpu", (4,))
    theirs = {"x": torch_distribute(torch.zeros(7, 5).double(), mesh, [TorchShard(1)])}
    dcp.load(theirs, checkpoint_id=folder / "chosen-grid-ours")
    assert torch.equal(theirs["x"].full_tensor(), TENSORS["uneven"])
    dcp.save(theirs, checkpoint_id=folder / "chosen-theirs")
    got = cut("line", blank=True)
    checkpoint.load(got, folder / "chosen-theirs")
    same(got, cut("line"))
    checkpoint.save_safetensors(cut("grid"), folder / "chosen.safetensors")
    got = cut("line", blank=True)
    checkpoint.load(got, folder / "chosen.safetensors")
    same(got, cut("line"))


def check_async_save(folder, rank):
    kept = state("grid")
    kept["parameter"] = torch.nn.Parameter(distribute_tensor(value(6, 6), grid(), [S(1), R]))
    future = dcp.async_save({"model": kept}, checkpoint_id=folder / "async")
    with torch.no_grad():
        for x in kept.values():
            x.zero_()
    future.result()
    got = state("rows", blank=True)
    got["parameter"] = distribute_tensor(torch.zeros(6, 6).double(), line(), [S(0)])
    dcp.load({"model": got}, checkpoint_id=folder / "async")
    same(got, state("rows"))
    assert torch.equal(got["parameter"].full_tensor(), value(6, 6))


def check_fewer_processes(folder, rank):
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        mesh = shardwise.DeviceMesh("cpu", [1, 3])
        got = distribute_tensor(torch.zeros(7, 5).double(), mesh, [S(1)], src_data_rank=None)
        dcp.load({"model": {"uneven": got}}, checkpoint_id=folder / "grid", process_group=pair)
        want = TENSORS["uneven"][:, :3] if rank == 1 else TENSORS["uneven"][:, 3:]
        assert torch.equal(got.to_local(), want)


def check_pending_sums_are_refused(folder, rank):
    from shardwise import DTensor, Partial

    x = DTensor.from_local(torch.ones(4), line(), [Partial()])
    with pytest.raises(CheckpointError, match="pending reduction"):
        x.__create_write_items__("x", x)
    with pytest.raises(CheckpointError, match="pending reduction"):
        x.__create_chunk_list__()


CHECKS = [
    check_any_layout_to_any,
    check_torch_reads_ours_and_we_read_torchs,
    check_chosen_sizes,
    check_async_save,
    check_our_own_save_and_load,
    check_fewer_processes,
    check_pending_sums_are_refused,
]


def run_checks(rank, folder):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # torch's own, about files that are overwritten
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    lines = []
    for check in CHECKS:
        try:
            check(Path(folder), rank)
            lines.append(f"ok {check.__name__}")
        except Exception:
            lines.append(f"FAILED {check.__name__}\n{traceback.format_exc()}")
            break
    Path(folder, f"report{rank}").write_text("\n".join(lines))
    if any(text.startswith("FAILED") for text in lines):
        sys.exit(1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    try:
        spawn(run_checks, (str(folder),), nprocs=WORLD)
    except Exception as error:
        sys.stdout.write(f"{error}\n")
    return folder


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_dcp(folder, name):
    for rank in range(WORLD):
        path = folder / f"report{rank}"
        report = path.read_text() if path.exists() else "died"
        assert f"ok {name}" in report.splitlines(), f"rank {rank}: {report}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", list(PLACES))
def test_without_a_process_group(folder, place):
    mesh = shardwise.init_device_mesh("cpu", (1,))
    got = {n: distribute_tensor(torch.zeros_like(x), mesh, [R]) for n, x in TENSORS.items()}
    dcp.load({"model": got}, checkpoint_id=folder / place, no_dist=True)
    for name, x in TENSORS.items():
        assert torch.equal(got[name].to_local(), x), name
