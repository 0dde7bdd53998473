"""Saves in the background: what is copied, what is kept for the next, what every rank is told."""

import pytest
import torch

import shardwise
from shardwise import CommLog, Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import preparing
from shardwise.comm.transport import current
from shardwise.errors import CheckpointError

WORLD = 4


def state(value):
    mesh = shardwise.init_device_mesh("cpu", (WORLD,))
    full = torch.arange(36.0).reshape(9, 4) + value
    return {
        "a": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
        "n": {"plain": torch.full((5,), float(value)), "step": value},
    }


def is_whole(path, value):
    def read(rank):
        got, want = state(7), state(value)
        checkpoint.load(got, path)
        assert torch.equal(got["a"].to_local(), want["a"].to_local())
        assert torch.equal(got["n"]["plain"], want["n"]["plain"])
        assert got["n"]["step"] == value

    simulate(read, WORLD)


@pytest.mark.parametrize("background", [False, True])
def test_an_object_that_cannot_be_pickled_is_told_on_every_rank(tmp_path, background):
    def run(rank):
        bad = {**state(1), "bad": [lambda: None]}
        save = checkpoint.save
        if background:
            save = lambda *args: checkpoint.async_save(*args).result()  # noqa: E731
        with pytest.raises(CheckpointError, match="bad cannot be pickled"):
            save(bad, tmp_path / "c")
        return checkpoint.save(state(1), tmp_path / "c")

    simulate(run, WORLD)
    is_whole(tmp_path / "c", 1)


def test_what_a_background_save_keeps_for_the_next(tmp_path):
    """Memory for the copies, and the plan: what is told once more is a digest and a name, 49 bytes."""

    def run(rank):
        counts, places = [], []
        for k in range(3):
            with CommLog() as log:
                under_way = checkpoint.async_save(state(k), tmp_path / str(k))
            counts.append([(e.kind, e.bytes) for e in log.on(rank).events if e.bytes])
            places.append(current().state[preparing.STAGING]._buffer.data_ptr())
            under_way.result()
        assert counts[1:] == [[("all_gather", 49 * (WORLD - 1))]] * 2
        assert len(set(places)) == 1
        # another state: other keys, other sizes, other layouts
        mesh = shardwise.init_device_mesh("cpu", (WORLD,))
        x = distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(1)])
        checkpoint.async_save({"x": x, "a": 3}, tmp_path / "x").result()
        back = {"x": torch.zeros(6, 5), "a": 0}
        checkpoint.load(back, tmp_path / "x")
        assert back["a"] == 3
        assert torch.equal(back["x"], torch.arange(30.0).view(6, 5))

    simulate(run, WORLD)
    for k in range(3):
        is_whole(tmp_path / str(k), k)


def test_a_copy_that_fails_is_told_on_every_rank(tmp_path, monkeypatch):
    """Say, for want of memory."""
    real = preparing.Staging.copies

    def copies(self, pieces):
        if current().rank == 1:
            raise MemoryError("none left")
        return real(self, pieces)

    monkeypatch.setattr(preparing.Staging, "copies", copies)

    def run(rank):
        with pytest.raises(CheckpointError, match="MemoryError: none left"):
            checkpoint.async_save(state(1), tmp_path / "c").result()

    simulate(run, WORLD)
    assert not (tmp_path / "c").exists()


def test_a_state_that_changes_on_one_rank_only(tmp_path):
    """The other ranks have copied by the old plan already; what is saved is by the new one."""

    def run(rank):
        mesh = shardwise.init_device_mesh("cpu", (WORLD,))
        for k in range(4):
            x = distribute_tensor(torch.full((8, 2), float(k)), mesh, [Shard(0)])
            s = {"x": x, "step": k}
            if k % 2:
                s[f"own{WORLD - 1}" if rank == WORLD - 1 else "y"] = torch.ones(3) * k
            checkpoint.async_save(s, tmp_path / str(k)).result()

    simulate(run, WORLD)
    for k in range(4):
        back = {"x": torch.zeros(8, 2), "step": -1}
        if k % 2:
            back |= {f"own{WORLD - 1}": torch.zeros(3), "y": torch.zeros(3)}
        checkpoint.load(back, tmp_path / str(k))
        assert back["step"] == k
        assert all((v == k).all() for v in back.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("background", [False, True])
def test_rank_0_says_where(tmp_path, monkeypatch, background):
    """Ranks may write the same path differently."""
    monkeypatch.chdir(tmp_path)

    def run(rank):
        s = state(1)
        for name in ("c", "d"):
            path = tmp_path / name if rank % 2 else name
            if background:
                checkpoint.async_save(s, path).result()
            else:
                checkpoint.save(s, path)

    simulate(run, WORLD)
    is_whole(tmp_path / "c", 1)
    is_whole(tmp_path / "d", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "d"]
