"""What may go wrong with a save or a load: nothing of what was there before is ever lost or half changed."""

import errno
import os
from pathlib import Path
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import shardwise
from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import background, metadata, storage
from shardwise.checkpoint.storage import PhaseEvent
from shardwise.comm.transport import current
from shardwise.errors import CheckpointError
from shardwise.events import observe

WORLD = 4
ROOT = Path(__file__).parents[2]


def state(value, rank=None):
    mesh = shardwise.init_device_mesh("cpu", (WORLD,))
    full = torch.arange(4096.0).reshape(64, 64) + value
    return {
        "a": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
        "b": distribute_tensor(full.t().contiguous(), mesh, [Shard(1)], src_data_rank=None),
        "n": {"plain": torch.full((5,), float(value)), "step": value},
    }


def write(path, value=1, **options):
    return simulate(lambda rank: checkpoint.save(state(value), path, **options), WORLD)[0]


def refused(path, **options):
    """What every rank is told when it loads; and nothing of its state may have changed."""

    def read(rank):
        s = state(7)
        with pytest.raises(CheckpointError) as told:
            checkpoint.load(s, path, **options)
        before = state(7)
        for key in ("a", "b"):
            assert torch.equal(s[key].to_local(), before[key].to_local()), key
        assert torch.equal(s["n"]["plain"], before["n"]["plain"])
        assert s["n"]["step"] == 7
        return str(told.value)

    errors = simulate(read, WORLD)
    assert len(set(errors)) == 1, "every rank is told the same"
    return errors[0]


def is_whole(path, value):
    def read(rank):
        s = state(0)
        checkpoint.load(s, path)
        want = state(value)
        assert torch.equal(s["a"].to_local(), want["a"].to_local())
        assert torch.equal(s["b"].to_local(), want["b"].to_local())
        assert s["n"]["step"] == value

    simulate(read, WORLD)


def flip(path, at):
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x10]))


# ---- files that were damaged ---------------------------------------------------------------------


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path):
    target = write(tmp_path / "c")
    index = metadata.read_index(
        (target / ".metadata").read_bytes(), (target / "shardwise.json").read_bytes(), ""
    )
    for key, entry in index.tensors():
        for chunk in entry.chunks:
            flip(target / chunk.item.file, chunk.start + 3)
            error = refused(target)
            assert chunk.item.file in error
            assert key in error
            assert "checksum" in error
            flip(target / chunk.item.file, chunk.start + 3)
    item = index.entries["n.step"].item
    flip(target / item.file, item.offset + item.length // 2)
    error = refused(target)
    assert "n.step" in error
    assert item.file in error
    flip(target / item.file, item.offset + item.length // 2)
    for name in (".metadata", "shardwise.json"):
        for at in (1, 40, (target / name).stat().st_size - 2):
            flip(target / name, at)
            assert name in refused(target)
            flip(target / name, at)
    is_whole(target, 1)


def test_without_checksums_only_what_is_asked_for_is_believed(tmp_path):
    target = write(tmp_path / "c")
    flip(target / "__2_0.distcp", 2000)
    simulate(lambda rank: checkpoint.load(state(0), target, verify=False), WORLD)


def test_a_missing_or_cut_file_is_named(tmp_path):
    target = write(tmp_path / "c")
    file = target / "__2_0.distcp"
    kept = file.read_bytes()
    file.unlink()
    error = refused(target)
    assert "__2_0.distcp" in error
    assert "a:" in error or "b:" in error
    assert checkpoint.latest(tmp_path) is None
    file.write_bytes(kept[:-3000])
    error = refused(target)
    assert "__2_0.distcp is truncated" in error
    file.write_bytes(b"")
    assert "__2_0.distcp is empty" in refused(target)
    file.write_bytes(kept)
    is_whole(target, 1)
    (target / ".metadata").unlink()
    assert "is no checkpoint" in refused(target)
    assert "there is no such checkpoint" in refused(tmp_path / "nowhere")


def test_a_wrong_shape_dtype_or_kind_names_the_key(tmp_path):
    other = {
        "a": torch.zeros(64, 65),
        "b": torch.zeros(64, 64, dtype=torch.float64),
        "n": {"plain": [1], "step": torch.zeros(2)},
    }
    target = checkpoint.save(other, tmp_path / "c")
    error = refused(target)
    for text in (
        "a: stored float32[64, 65], wanted f32[64, 64]",
        "b: stored float64[64, 64]",
        "n.plain: stored an object",
        "n.step: stored float32[2], wanted an object",
    ):
        assert text in error
    assert "float64" not in refused(target, cast=True)


def test_missing_and_unexpected_keys_are_named_or_reported(tmp_path):
    target = checkpoint.save(
        {"m": {"a": torch.ones(2), "extra": torch.ones(1)}, "o": 3}, tmp_path / "c"
    )
    s = {"m": {"a": torch.zeros(2), "new": torch.zeros(3)}}
    with pytest.raises(CheckpointError) as told:
        checkpoint.load(s, target)
    assert "missing in the checkpoint: m.new" in str(told.value)
    assert "in the checkpoint only: m.extra" in str(told.value)
    assert s["m"]["a"].eq(0).all()
    report = checkpoint.load(s, target, strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (
        ["m.a"],
        ["m.new"],
        ["m.extra"],
    )
    assert s["m"]["a"].eq(1).all()
    report = checkpoint.load({"m": {"a": s["m"]["a"]}}, target, keys=["m.a"])
    assert report.unexpected == []
    checkpoint.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "flat")
    with pytest.raises(CheckpointError, match="in the checkpoint only: b"):
        checkpoint.load({"a": torch.ones(1)}, tmp_path / "flat")


def test_a_dtype_is_converted_when_asked(tmp_path):
    target = checkpoint.save({"x": torch.arange(5.0)}, tmp_path / "c")
    s = {"x": torch.zeros(5, dtype=torch.bfloat16)}
    report = checkpoint.load(s, target, cast=True)
    assert report.converted == ["x"]
    assert torch.equal(s["x"], torch.arange(5.0).bfloat16())


def test_chunks_that_do_not_cover_a_tensor_are_refused(tmp_path):
    target = write(tmp_path / "c")
    index = metadata.read_index((target / ".metadata").read_bytes(), None, "")
    entry = index.entries["a"]
    index.entries["a"] = metadata.replace(entry, chunks=entry.chunks[1:])
    (target / ".metadata").write_bytes(metadata.write_pickle(index))
    (target / "shardwise.json").unlink()
    assert "a: the stored chunks hold 3072 of 4096 elements" in refused(target)


# ---- files that are hostile ------------------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_runs_from_metadata(tmp_path):
    target = checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")
    mark = tmp_path / "ran"
    for hostile in (
        pickle.dumps(Bomb(mark)),
        pickle.dumps({"state_dict_metadata": Bomb(mark)}, protocol=0),
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x0f__import__('os')\x85R.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch\n_C\n.",
        b"cpathlib\nos\n.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
        b"\x82\x01.",
    ):
        (target / ".metadata").write_bytes(hostile)
        for sidecar in (True, False):
            if not sidecar:
                (target / "shardwise.json").unlink(missing_ok=True)
            with pytest.raises(CheckpointError, match=r"\.metadata"):
                checkpoint.load({"x": torch.zeros(2)}, target)
        assert not mark.exists()
        checkpoint.save({"x": torch.ones(2)}, target, overwrite=True)


def test_a_hostile_file_cannot_change_the_classes_that_stand_in(tmp_path):
    target = checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")
    kept = (target / ".metadata").read_bytes()
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for hostile in (
        name + b"(N}S'__setstate__'\nI1\nstb.",
        name + b"(NctOrch\n}ttb.",
        b"ctorch\nSize\n(N}S'__defaults__'\nI1\nstb.",
    ):
        with pytest.raises(CheckpointError):
            metadata.read_pickle(hostile, "")
        assert metadata.read_pickle(kept, "").entries.keys() == {"x"}
    import torch.distributed.checkpoint.metadata as theirs

    assert isinstance(theirs.Metadata({}), theirs.Metadata)


def test_files_outside_the_folder_are_not_read(tmp_path):
    target = checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")
    index = metadata.read_index((target / ".metadata").read_bytes(), None, "")
    (target / "shardwise.json").unlink()
    for name in ("/etc/passwd", "../c/__0_0.distcp", "a/../../b"):
        chunk = index.entries["x"].chunks[0]
        bad = metadata.replace(chunk, item=metadata.Item(name, 0, 10))
        index.entries["x"] = metadata.replace(index.entries["x"], chunks=(bad,))
        (target / ".metadata").write_bytes(metadata.write_pickle(index))
        with pytest.raises(CheckpointError, match="outside its folder"):
            checkpoint.load({"x": torch.zeros(2)}, target)


def test_objects_are_unpickled_only_when_asked(tmp_path):
    mark = tmp_path / "ran"
    target = checkpoint.save(
        {"x": Bomb(mark), "y": {"fine": (1, 2.5, "three", None)}}, tmp_path / "c"
    )
    s = {"x": None, "y": {"fine": None}}
    with pytest.raises(CheckpointError, match="the object x cannot be read safely"):
        checkpoint.load(s, target)
    assert s["y"]["fine"] is None
    assert not mark.exists()
    checkpoint.load({"y": s["y"]}, target)
    assert s["y"]["fine"] == (1, 2.5, "three", None)
    checkpoint.load(s, target, unsafe_objects=True)
    assert mark.exists(), "the test can fail"


# ---- saves that fail -----------------------------------------------------------------------------------


def failing(monkeypatch, rank, number, after=0):
    """Let the disk of one rank fail once that many bytes are written."""
    real = storage.Writer.write

    def write(self, data):
        if f"__{rank}_0" in self.path.name and self.position > after:
            raise OSError(number, os.strerror(number), str(self.path))
        return real(self, data)

    monkeypatch.setattr(storage.Writer, "write", write)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_on_every_rank_and_loses_nothing(tmp_path, monkeypatch, background):
    write(tmp_path, 1, step=1)
    failing(monkeypatch, rank=2, number=errno.ENOSPC, after=300)
    save = (
        (lambda *a, **k: checkpoint.async_save(*a, **k).result())
        if background
        else checkpoint.save
    )

    def again(rank):
        with pytest.raises(CheckpointError, match=r"__2_0\.distcp: No space left on device"):
            save(state(2), tmp_path, step=2, keep=1)

    simulate(again, WORLD)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    assert not list(tmp_path.rglob(".tmp-*/__*"))
    is_whole(tmp_path / "step-00000001", 1)
    monkeypatch.undo()
    write(tmp_path, 2, step=2, keep=1)
    assert list(checkpoint.steps(tmp_path)) == [2]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_without_room_for_a_note_either(tmp_path, monkeypatch, background):
    """Nothing more fits on it: a rank makes room before it says so, and nobody waits for long."""
    real, room = storage.Writer.write, threading.Lock()

    def size(path):
        try:
            return 0 if path.is_dir() else path.stat().st_size
        except FileNotFoundError:  # another rank has just made room
            return 0

    def write(self, data):
        with room:
            used = sum(map(size, tmp_path.rglob("*")))
            if used + len(data) > 2000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            return real(self, data)

    monkeypatch.setattr(storage.Writer, "write", write)

    def save():
        if background:
            checkpoint.async_save(state(1), tmp_path / "c", timeout_s=20).result()
        else:
            checkpoint.save(state(1), tmp_path / "c")

    def run(rank):
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="No space left on device"):
            save()
        assert time.monotonic() - began < 10

    simulate(run, WORLD)
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.rglob("*.distcp"))


def test_a_failed_background_save_is_told_at_the_next_one_if_nobody_asked(
    tmp_path, monkeypatch
):
    failing(monkeypatch, rank=1, number=errno.EIO)

    def run(rank):
        checkpoint.async_save(state(1), tmp_path / "c")
        with pytest.raises(CheckpointError, match="the save before this one failed"):
            checkpoint.save(state(1), tmp_path / "d")
        monkeypatch.undo()
        return checkpoint.save(state(1), tmp_path / "d")

    simulate(run, WORLD)
    is_whole(tmp_path / "d", 1)


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")

    def run(rank):
        with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
            checkpoint.save(state(1), tmp_path / "file" / "c")

    simulate(run, WORLD)
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if ".tmp" in self.name:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)

    def again(rank):
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpoint.save(state(1), tmp_path / "c")

    simulate(again, WORLD)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_checkpoint_that_is_there_is_not_overwritten_unless_asked(tmp_path):
    write(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match="is there already"):
        write(tmp_path / "c", 2)
    is_whole(tmp_path / "c", 1)
    write(tmp_path / "c", 2, overwrite=True)
    is_whole(tmp_path / "c", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_jobs_saving_to_one_path(tmp_path, overwrite):
    """The second job saves while the first is about to become visible: one of them stands, whole."""
    busy = []

    def other_job(event):
        if isinstance(event, PhaseEvent) and event.phase == "indexed" and not busy:
            busy.append(1)
            checkpoint.save({"x": torch.ones(3)}, tmp_path / "c", overwrite=overwrite)

    s = {"x": torch.zeros(3)}
    with observe(other_job):
        if overwrite:
            checkpoint.save({"x": torch.full((3,), 2.0)}, tmp_path / "c", overwrite=True)
        else:
            with pytest.raises(CheckpointError, match="was written by another job meanwhile"):
                checkpoint.save({"x": torch.full((3,), 2.0)}, tmp_path / "c")
    checkpoint.load(s, tmp_path / "c")
    assert s["x"].eq(2 if overwrite else 1).all()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_bad_arguments(tmp_path):
    for options in ({"keep": 2}, {"keep": 0, "step": 1}):
        with pytest.raises(CheckpointError, match="keep="):
            checkpoint.save({"x": torch.ones(1)}, tmp_path / "c", **options)
    with pytest.raises(CheckpointError, match="x is on the meta device"):
        checkpoint.save({"x": torch.ones(1, device="meta")}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"have the key 'a\.b'"):
        checkpoint.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="rank 1 holds"):
        simulate(lambda rank: checkpoint.save({"x": torch.ones(1 + rank)}, tmp_path / "c"), 2)
    assert not list(tmp_path.iterdir())


# ---- jobs that die ---------------------------------------------------------------------------------------

DYING = """
import os, signal, sys, torch
from pathlib import Path
from shardwise import checkpoint
from shardwise.checkpoint.storage import PhaseEvent
from shardwise.events import observe

root = Path(sys.argv[1])
state = lambda v: {"x": torch.full((4, 4), float(v)), "step": v}
checkpoint.save(state(0), root / "warm")  # imports what a save needs
seen = []
with observe(lambda e: seen.append(e.phase) if isinstance(e, PhaseEvent) else None):
    checkpoint.save(state(0), root / "warm", overwrite=True)
print(" ".join(seen), flush=True)
for i, phase in enumerate(seen):
    for kind in ("series", "replace"):
        folder = root / f"{i}-{kind}"
        checkpoint.save(state(1), folder, step=1) if kind == "series" else checkpoint.save(state(1), folder)
        child = os.fork()
        if child == 0:
            count = [-1]
            def die(event):
                if isinstance(event, PhaseEvent):
                    count[0] += 1
                    if seen[count[0] + (kind == "series" and count[0] >= seen.index("replacing"))] == phase and (
                        phase != "writing" or count[0] == i):
                        os.kill(os.getpid(), signal.SIGKILL)
            with observe(die):
                if kind == "series":
                    checkpoint.save(state(2), folder, step=2, keep=1)
                else:
                    checkpoint.save(state(2), folder, overwrite=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        got = state(9)
        place = checkpoint.latest(folder) if kind == "series" else folder
        checkpoint.load(got, place)
        v = got["step"]
        assert got["x"].eq(v).all()
        print(i, kind, phase, os.WIFSIGNALED(status), v, flush=True)
"""


def test_killed_in_any_phase_of_a_save(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(textwrap.dedent(DYING))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    phases = first.split()
    assert phases == [
        "planned", "opened", "writing", "written", "indexed", "replacing", "visible", "pruned",
    ]  # fmt: skip
    assert len(lines) == 2 * len(phases)
    for line in lines:
        _, kind, phase, killed, value = line.split()
        assert killed == str(not (kind == "series" and phase == "replacing")), line
        done_by_then = phases.index(phase) >= phases.index("visible") or killed == "False"
        assert int(value) == (2 if done_by_then else 1), line


def test_the_latest_is_never_one_that_a_dead_job_left(tmp_path):
    write(tmp_path, 1, step=5)
    write(tmp_path, 2, step=10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".tmp-step-00000020-0123456789ab")
    (tmp_path / ".tmp-step-00000020-0123456789ab" / ".metadata").unlink()
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000010"
    assert list(checkpoint.steps(tmp_path)) == [5, 10]
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 9, 100):
        write(tmp_path, step, step=step, keep=2)
    assert list(checkpoint.steps(tmp_path)) == [9, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000009", "step-00000100"]
    is_whole(checkpoint.latest(tmp_path), 100)


def test_leftovers_go_when_they_are_a_day_old(tmp_path, monkeypatch):
    old, new = tmp_path / ".tmp-step-1-a", tmp_path / ".tmp-step-2-b"
    for folder in (old, new):
        folder.mkdir()
        (folder / "part").write_text("x")
    for path in (old / "part", old):
        os.utime(path, (1, 1))
    write(tmp_path, 1, step=3, keep=1)
    assert not old.exists()
    assert new.exists()


# ---- in the background -------------------------------------------------------------------------------------


def test_training_may_change_the_state_at_once(tmp_path, monkeypatch):
    real, go = background.write, threading.Event()
    monkeypatch.setattr(background, "write", lambda job: go.wait(60) and real(job))

    def run(rank):
        s = state(1)
        under_way = checkpoint.async_save(s, tmp_path / "c")
        assert not under_way.done()
        assert not (tmp_path / "c").exists()
        s["a"].zero_()
        s["n"]["plain"].zero_()
        s["n"]["step"] = 0
        current().barrier((0, 1, 2, 3))
        go.set()
        assert under_way.result() == tmp_path / "c"
        assert under_way.done()

    simulate(run, WORLD)
    is_whole(tmp_path / "c", 1)


def test_rank_0_does_not_wait_for_ever(tmp_path, monkeypatch):
    real = background._leave_note
    monkeypatch.setattr(
        background,
        "_leave_note",
        lambda job, name, text: None if name == "part-1" else real(job, name, text),
    )

    def run(rank):
        with pytest.raises(CheckpointError, match=r"ranks 1 have not written after 0\.3 s"):
            checkpoint.async_save(state(1), tmp_path / "c", timeout_s=0.3).result()

    simulate(run, WORLD)
    assert not (tmp_path / "c").exists()
