"""The c10d transport in four real processes over Gloo; one launch runs every check."""

from pathlib import Path
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shardwise.comm import C10dTransport, current
from shardwise.errors import CommError
from shardwise.events import CommLog

WORLD = 4
ALL = (0, 1, 2, 3)
# Sorted and not, the whole world and parts of it. All members of a part are in it together.
GROUPS = [ALL, (2, 0, 3, 1), (1, 3), (3, 1), (2, 0), (3, 0, 1)]
MOVED = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
SHAPES = [(), (3,), (2, 3), (0, 4)]


def value(rank, shape, dtype=torch.float32):
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 + rank * 3 + 1
    if dtype == torch.bool:
        return numbers % 3 == 0
    if dtype.is_complex:
        return torch.complex(numbers.double() % 5, numbers.double() % 3).to(dtype)
    return (numbers % 5).to(dtype)


def same(got, want):
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.dtype.itemsize == 1 and got.dtype.is_floating_point:
        got, want = got.float(), want.float()
    assert torch.equal(got, want), (got, want)


def stacked(ranks, shape, dtype):
    return torch.stack([value(r, shape, dtype) for r in ranks])


def check_world(t, rank):
    assert isinstance(t, C10dTransport)
    assert (t.rank, t.world_size, t.name) == (rank, WORLD, "c10d")
    assert t.group(ALL) is dist.group.WORLD
    assert current() is t


def check_moves(t, rank):
    for ranks in GROUPS:
        if rank not in ranks:
            continue
        for shape in SHAPES:
            for dtype in MOVED:
                x = value(rank, shape, dtype)
                same(t.all_gather(x, ranks), stacked(ranks, shape, dtype))
                if shape == (2, 3):
                    same(t.all_gather_async(x, ranks).wait(), stacked(ranks, shape, dtype))
                same(t.broadcast(x, ranks, ranks[-1]), value(ranks[-1], shape, dtype))
                same(x, value(rank, shape, dtype))


def check_reductions(t, rank):
    combine = {
        "sum": lambda parts: parts.sum(0),
        "avg": lambda parts: parts.sum(0) / parts.shape[0],
        "product": lambda parts: parts.prod(0),
        "max": lambda parts: parts.amax(0),
        "min": lambda parts: parts.amin(0),
    }
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.uint8]
    for ranks in GROUPS:
        if rank not in ranks:
            continue
        n, place = len(ranks), ranks.index(rank)
        for shape in SHAPES:
            for dtype in dtypes:
                for op, function in combine.items():
                    if op == "avg" and not dtype.is_floating_point:
                        continue
                    tall = (n, *shape)
                    want = function(stacked(ranks, shape, dtype).double()).to(dtype)
                    chunks = function(stacked(ranks, tall, dtype).double()).to(dtype)
                    x, y = value(rank, shape, dtype), value(rank, tall, dtype)
                    # Three and more halves round on the way, in an order of Gloo's own.
                    close = op == "avg" and dtype.itemsize == 2
                    check = torch.testing.assert_close if close else same
                    check(t.all_reduce(x, ranks, op), want)
                    check(t.all_reduce_owned(x.clone(), ranks, op), want)
                    check(t.reduce_scatter(y, ranks, op), chunks[place])
                    if op == "sum":
                        check(t.all_reduce_async(x, ranks, op).wait(), want)
                        check(t.reduce_scatter_async(y, ranks, op).wait(), chunks[place])
                    same(x, value(rank, shape, dtype))


def check_bools_bits_complex(t, rank):
    for ranks in GROUPS:
        if rank not in ranks:
            continue
        n, place = len(ranks), ranks.index(rank)
        flags, chunks = stacked(ranks, (6,), torch.bool), stacked(ranks, (n, 3), torch.bool)
        x, y = value(rank, (6,), torch.bool), value(rank, (n, 3), torch.bool)
        for op in ("sum", "max", "bor"):
            same(t.all_reduce(x, ranks, op), flags.any(0))
            same(t.reduce_scatter(y, ranks, op), chunks.any(0)[place])
        for op in ("product", "min", "band"):
            same(t.all_reduce(x, ranks, op), flags.all(0))
            same(t.reduce_scatter(y, ranks, op), chunks.all(0)[place])
        same(t.all_reduce(x, ranks, "bxor"), flags.sum(0) % 2 == 1)

        for dtype in (torch.int32, torch.int16):
            bits = list(stacked(ranks, (6,), dtype))
            band, bor, bxor = bits[0], bits[0], bits[0]
            for each in bits[1:]:
                band, bor, bxor = band & each, bor | each, bxor ^ each
            x = value(rank, (6,), dtype)
            same(t.all_reduce(x, ranks, "band"), band)
            same(t.all_reduce(x, ranks, "bor"), bor)
            same(t.all_reduce(x, ranks, "bxor"), bxor)

        for shape in ((), (2, 3)):
            parts, chunks = (
                stacked(ranks, shape, torch.complex64),
                stacked(ranks, (n, *shape), torch.complex64),
            )
            x, y = (
                value(rank, shape, torch.complex64),
                value(rank, (n, *shape), torch.complex64),
            )
            same(t.all_reduce(x, ranks), parts.sum(0))
            same(t.all_reduce(x.conj(), ranks), parts.sum(0).conj().resolve_conj())
            same(t.reduce_scatter(y, ranks), chunks.sum(0)[place])
            same(t.reduce_scatter_async(y, ranks).wait(), chunks.sum(0)[place])
            torch.testing.assert_close(t.all_reduce(x, ranks, "avg"), parts.mean(0))
            torch.testing.assert_close(t.all_reduce(x, ranks, "product"), parts.prod(0))
            torch.testing.assert_close(
                t.reduce_scatter_async(y, ranks, "product").wait(), chunks.prod(0)[place]
            )


def check_equal_bits_on_all_ranks(t, rank):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(rank)
        x = torch.randn(1001).to(dtype)
        for op in ("sum", "avg", "product"):
            rows = t.all_gather(t.all_reduce(x, ALL, op), ALL)
            assert bool((rows == rows[0]).all())


def check_all_to_all(t, rank):
    counts = [[0, 2, 1, 0], [3, 0, 0, 1], [1, 1, 4, 2], [0, 0, 0, 0]]
    for ranks in GROUPS:
        if rank not in ranks:
            continue
        n, i = len(ranks), ranks.index(rank)
        table = [row[:n] for row in counts[:n]]
        for dtype in MOVED:

            def sent(j, table=table, ranks=ranks, dtype=dtype):
                return value(ranks[j], (sum(table[j]),), dtype)

            into = [row[i] for row in table]
            want = torch.cat([sent(j).split(table[j])[i] for j in range(n)])
            same(t.all_to_all(sent(i), ranks, table[i], into), want)
            same(t.all_to_all_async(sent(i), ranks, table[i], into).wait(), want)
            same(t.all_to_all(sent(i)[:0], ranks, [0] * n, [0] * n), want[:0])


def check_scatter(t, rank):
    shapes = [(2, 2), (), (0, 3), (5,)]
    for ranks in GROUPS:
        if rank not in ranks:
            continue
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
            for src in ranks:
                pieces = [value(i, shapes[i], dtype) for i in range(len(ranks))]
                mine = pieces[ranks.index(rank)]
                got = t.scatter(
                    pieces if rank == src else None, torch.empty_like(mine), ranks, src
                )
                same(got, mine)
                assert got.numel() == 0 or got.data_ptr() != mine.data_ptr()


def check_objects(t, rank):
    for ranks in GROUPS:
        if rank in ranks:
            assert t.all_gather_object(("rank", rank), ranks) == [("rank", r) for r in ranks]
            t.barrier(ranks)


def check_inputs_with_graphs_and_views(t, rank):
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    y = t.all_reduce(x.t(), ALL)
    assert not y.requires_grad
    same(y, (4 * x.t()).detach().contiguous())
    same(t.all_reduce(torch.tensor([1 + 2j]).conj().imag, ALL), torch.tensor([-8.0]))


def check_groups_that_cannot_be(t, rank):
    for ranks in ((rank, rank), (rank, 9), tuple(r for r in ALL if r != rank)):
        with pytest.raises(CommError, match="cannot join"):
            t.all_reduce(torch.ones(1), ranks)
    with pytest.raises(CommError, match="no reduction"):
        t.all_reduce(torch.ones(1), ALL, "mean")


def check_events(t, rank):
    with CommLog() as log:
        t.all_gather(torch.ones(2), ALL, tag="dp")
        t.all_reduce(torch.ones(2, dtype=torch.bool), ALL, "bxor")
        t.broadcast(torch.ones(2), ALL, 0)
    assert [(e.kind, e.bytes, e.rank) for e in log.events] == [
        ("all_gather", 24, rank),
        ("all_reduce", 3, rank),
        ("broadcast", 0 if rank == 0 else 8, rank),
    ]


def check_handles_for_500_steps(t, rank):
    """Gathers of an FSDP-like step, some used late, some dropped un-waited."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard, handle):
            return handle.wait().flatten(0, 1)

        @staticmethod
        def backward(ctx, grad):
            handle = t.reduce_scatter_async(grad.view(WORLD, -1, grad.shape[1]), ALL)
            return handle.wait(), None

    shards = [torch.full((16, 8), 0.5, requires_grad=True) for _ in range(2)]
    for step in range(500):
        handles = [t.all_gather_async(shard.detach().clone(), ALL) for shard in shards]
        if step % 5 == 0:
            del handles[1]
        x = torch.ones(2, 64)
        loss = torch.zeros(())
        for shard, handle in zip(shards, handles, strict=False):
            loss = loss + (x @ Gather.apply(shard, handle).view(64, 8)).sum()
        loss.backward()
        assert loss.item() == len(handles) * 2 * 64 * 8 * 0.5
    assert shards[0].grad is not None
    same(shards[0].grad, torch.full((16, 8), 500 * 2.0 * WORLD))


def check_large_messages(t, rank):
    """Those that go straight into place: several in flight at once, one dropped un-waited."""
    shape = (300, 333)
    for ranks in GROUPS:
        if rank not in ranks:
            continue
        n, place = len(ranks), ranks.index(rank)
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64):
            x, y = value(rank, shape, dtype), value(rank, (n, *shape), dtype)
            handles = [t.all_gather_async(x, ranks) for _ in range(3)]
            sums = [t.reduce_scatter_async(y, ranks) for _ in range(2)]
            del handles[1]
            same(t.all_gather(x[:2], ranks), stacked(ranks, shape, dtype)[:, :2])
            for handle in reversed(handles):
                same(handle.wait(), stacked(ranks, shape, dtype))
            for handle in sums:
                total = stacked(ranks, (n, *shape), dtype).sum(0, dtype=dtype)
                same(handle.wait(), total[place])
            same(x, value(rank, shape, dtype))
            same(y, value(rank, (n, *shape), dtype))


def check_large_gathers_make_no_copy(t, rank):
    x = torch.ones(1 << 18)
    t.all_gather(x, ALL)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        t.all_gather(x, ALL)
        t.barrier(ALL)
    events = seen.profiler.kineto_results.events()
    made = sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")
    assert WORLD * x.nbytes <= made < WORLD * x.nbytes + 10_000


def check_speed(t, rank):
    """Printed, not asserted: our cost above the bare call."""
    x, pg = torch.ones(4), t.group(ALL)
    t.barrier(ALL)
    start = time.perf_counter()
    for _ in range(300):
        pg.allreduce([x.clone()]).wait()
    middle = time.perf_counter()
    for _ in range(300):
        t.all_reduce(x, ALL)
    end = time.perf_counter()
    if rank == 0:
        bare, ours = (middle - start) / 300 * 1e6, (end - middle) / 300 * 1e6
        sys.stdout.write(f"all_reduce over Gloo: bare {bare:.0f} us, ours {ours:.0f} us\n")


CHECKS = [function for name, function in list(globals().items()) if name.startswith("check_")]


def run_checks(rank: int, folder: str) -> None:
    """Run in every process; the report is a file per rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    lines = []
    for check in CHECKS:
        try:
            check(current(), rank)
            lines.append(f"ok {check.__name__}")
        except Exception:
            lines.append(f"FAILED {check.__name__}\n{traceback.format_exc()}")
            break  # the others may be anywhere; what follows means nothing
    Path(folder, f"report{rank}").write_text("\n".join(lines))
    if any(line.startswith("FAILED") for line in lines):
        sys.exit(1)
    dist.destroy_process_group()
    assert current().world_size == 1


def run_from_environment(rank: int, folder: str, port: int) -> None:
    """Let `current` start the world, as under torchrun."""
    import os

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    assert current().all_reduce(torch.tensor(rank + 1), (0, 1)).item() == 3
    Path(folder, f"env{rank}").write_text("ok")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c10d")
    try:
        spawn(run_checks, (str(folder),), nprocs=WORLD)
    except Exception as error:
        sys.stdout.write(f"{error}\n")
    return [
        path.read_text() if (path := folder / f"report{rank}").exists() else "died"
        for rank in range(WORLD)
    ]


@pytest.mark.multi
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_c10d(reports, name):
    for rank, report in enumerate(reports):
        assert f"ok {name}" in report.splitlines(), f"rank {rank}: {report}"


@pytest.mark.multi
def test_world_from_the_environment(tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(run_from_environment, (str(tmp_path), port), nprocs=2)
    assert [(tmp_path / f"env{rank}").read_text() for rank in range(2)] == ["ok", "ok"]
