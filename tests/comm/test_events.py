"""Events, the log, the dry transport's counts, and the current transport of a plain process."""

import time

import pytest
import torch

from shardwise.comm import DryTransport, current, use
from shardwise.errors import CommError, LayoutError, ShardError, UnsupportedError, explain
from shardwise.events import CommEvent, CommLog, emit, observe, observing, received_bytes
from shardwise.simulate import simulate


def test_nobody_observes_by_default_and_emit_is_cheap():
    assert not observing()
    start = time.perf_counter()
    for _ in range(10_000):
        emit(None)
    assert (time.perf_counter() - start) / 10_000 < 2e-6  # 0.1 us when measured alone


def test_observers_nest_and_end_with_their_block():
    first, second = [], []
    with observe(first.append):
        emit(1)
        with observe(second.append):
            emit(2)
        with pytest.raises(ZeroDivisionError), observe(second.append):
            emit(1 / 0)
        emit(3)
    emit(4)
    assert (first, second) == ([1, 2, 3], [2])


def every_collective(t):
    """Call each once on ranks 0-3, with 8 bytes a piece where sizes are free."""
    ranks, x = (0, 1, 2, 3), torch.ones(2)
    t.all_gather(x, ranks, tag="dp")
    t.reduce_scatter(torch.ones(4, 2), ranks, tag="dp")
    t.all_reduce(x, ranks, "max", tag="dp,tp")
    t.all_to_all(torch.ones(8), ranks, [2] * 4, [2] * 4)
    t.broadcast(x, ranks, 0)
    t.scatter([x] * 4 if t.rank == 0 else None, x, ranks, 0)
    t.barrier(ranks)
    t.all_reduce_async(x, ranks).wait()
    t.all_reduce(x, (t.rank,))  # alone: nothing is sent


def test_bytes_of_every_collective_threads_and_dry_agree():
    with CommLog() as log:
        simulate(lambda: every_collective(current()), 4)
    for rank in range(4):
        with CommLog() as dry:
            every_collective(DryTransport(rank, 4))
        away = 0 if rank == 0 else 8
        sizes = [
            ("all_gather", 24),
            ("reduce_scatter", 24),
            ("all_reduce", 12),
            ("all_to_all", 24),
            ("broadcast", away),
            ("scatter", away),
            ("barrier", 0),
            ("all_reduce", 12),
        ]
        for each in (log.on(rank), dry):
            assert [(event.kind, event.bytes) for event in each.events] == sizes
            assert each.bytes == 96 + 2 * away
            assert each.count() == 8
            assert each.count("all_reduce") == 2
        assert [e.blocking for e in dry.events] == [True] * 7 + [False]
        assert {e.transport for e in dry.events} == {"dry"}


def test_what_an_event_says():
    with CommLog() as log:
        DryTransport(1, 4).all_reduce(torch.ones(2, 3), (1, 3), "max", tag="tp")
    (event,) = log.events
    assert event.site.rpartition(":")[0] == __file__
    assert event == CommEvent(
        kind="all_reduce",
        bytes=24,
        ranks=(1, 3),
        rank=1,
        tag="tp",
        op="max",
        shape=(2, 3),
        dtype="float32",
        blocking=True,
        transport="dry",
        site=event.site,
    )


def test_log_as_a_table_and_used_again():
    log = CommLog()
    t = DryTransport(0, 8)
    with log:
        for _ in range(2):
            t.all_gather(torch.ones(2), (0, 2, 4, 6), tag="dp")
    t.barrier((0, 1))
    with log:
        t.barrier((3, 0))
    lines = str(log).splitlines()
    assert lines[0].split() == ["collective", "ranks", "axes", "calls", "bytes", "at"]
    assert lines[1].split()[:7] == ["all_gather", "0-6", "by", "2", "dp", "2", "48"]
    assert lines[2].split()[:4] == ["barrier", "3,0", "1", "0"]
    assert lines[3].split() == ["total", "3", "48"]
    log.clear()
    assert (log.count(), log.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("all_gather", 60), ("reduce_scatter", 15), ("all_reduce", 30), ("broadcast", 20)],
)
def test_received_bytes(kind, size):
    assert received_bytes(kind, 20, 4) == size


def test_dry_shapes():
    t = DryTransport(5, 4096)
    x = torch.ones(2, 3, dtype=torch.bfloat16, device="meta")
    ranks = tuple(range(4096))
    assert t.all_gather(x, ranks).shape == (4096, 2, 3)
    assert t.all_reduce(x, ranks).shape == x.shape
    assert t.reduce_scatter(x.expand(4096, 2, 3), ranks).shape == x.shape
    assert t.all_to_all(x.view(-1), ranks, [6] + [0] * 4095, [1] * 4096).shape == (4096,)
    assert t.broadcast(x, ranks, 7).device.type == "meta"
    assert t.scatter(None, x, ranks, 7).dtype == torch.bfloat16
    assert t.all_gather_object("a", (4, 5)) == ["a", "a"]
    assert torch.equal(t.all_gather(torch.ones(1), (4, 5)), torch.zeros(2, 1))
    assert (t.group((9, 5)).size(), t.group((9, 5)).rank()) == (2, 1)


def test_current_transport():
    alone = current()
    assert (alone.name, alone.rank, alone.world_size) == ("c10d", 0, 1)
    assert current() is alone
    x = torch.ones(2)
    assert torch.equal(alone.all_reduce(x, (0,)), x)
    with pytest.raises(CommError, match="alone"):
        alone.all_reduce(x, (0, 1))
    dry = DryTransport(0, 2)
    with use(dry) as t:
        assert t is dry
        assert current() is dry
    assert current() is alone


def test_errors_are_shard_errors_and_what_their_leaves_say():
    assert issubclass(LayoutError, ShardError)
    assert issubclass(LayoutError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
    text = explain(
        "what happened.", {"in": "aten.mm(x)", "at": "", "mesh": "a\nb"}, ["this", "that"]
    )
    assert text.splitlines() == [
        "what happened.",
        "  in     aten.mm(x)",
        "  mesh   a",
        "         b",
        "  try    - this",
        "         - that",
    ]
