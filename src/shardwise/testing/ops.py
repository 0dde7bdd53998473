"""Judge every op of torch's database on every sharding: ``python -m shardwise.testing.ops``.

```text
   names --> workers (a process each, one entry at a time) --> records.jsonl --> docs/ops.md, exit status
                |  one that is silent for too long is killed: a hang
```

Resumable: what is in ``records.jsonl`` for the same sources is not judged again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import fields
import fnmatch
import hashlib
import json
import multiprocessing as mp
from multiprocessing.connection import Connection, wait
import os
from pathlib import Path
import sys
import time
from typing import Any

import torch

from shardwise.testing.entry import SAMPLES, Record, judge_entry
from shardwise.testing.libraries import Library, Shardwise
from shardwise.testing.opinfo import entries
from shardwise.testing.report import REASONS, faults, page, summary

LIMIT = 240.0  # seconds for one entry


def library_named(name: str) -> Library:
    """The library to judge: "shardwise" or "torch"."""
    if name == "shardwise":
        return Shardwise()
    from shardwise.testing.torch_peer import Torch  # noqa: PLC0415  # patches torch's process groups

    return Torch()


def fingerprint() -> str:
    """Of our sources and torch's version: records of another one do not count."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def work(pipe: Connection, library: str, count: int, chosen: bool) -> None:
    """A worker: names in, records out."""
    torch.set_num_threads(1)
    judged_by, table = library_named(library), entries()
    pipe.send(None)  # ready
    while (name := pipe.recv()) is not None:
        record = judge_entry(table[name], judged_by, count=count, chosen=chosen)
        pipe.send(record.to_json())


class Worker:
    """A worker process and what it is at."""

    def __init__(self, library: str, count: int, chosen: bool) -> None:
        context = mp.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(
            target=work, args=(far, library, count, chosen), daemon=True
        )
        self.process.start()
        far.close()
        self.name: str | None = None
        self.since = time.monotonic()

    def give(self, name: str | None) -> None:
        """Hand it an entry; None ends it."""
        self.name, self.since = name, time.monotonic()
        self.pipe.send(name)

    def kill(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.join()


def run(
    names: Sequence[str],
    library: str,
    *,
    jobs: int,
    count: int,
    limit: float,
    chosen: bool = False,
) -> Iterator[Record]:
    """Judge the entries in worker processes; yields records as they are done.

    Args:
        names: Of entries.
        library: "shardwise" or "torch".
        jobs: Processes; 0: in this one, without a time limit.
        count: Samples per entry.
        limit: Seconds for one entry, after which it counts as hung.
        chosen: Cut dims at chosen sizes.
    """
    if not jobs:
        judged_by, table = library_named(library), entries()
        for name in names:
            yield judge_entry(table[name], judged_by, count=count, chosen=chosen)
        return
    queue = list(reversed(names))
    workers = [Worker(library, count, chosen) for _ in range(min(jobs, len(queue)))]
    while workers:
        ready = wait([w.pipe for w in workers], timeout=1.0)
        for worker in list(workers):
            replacement = None
            if worker.pipe in ready:
                try:
                    got = worker.pipe.recv()
                except EOFError:  # it crashed
                    yield _lost(worker, "error", "the process died")
                    worker.kill()
                    replacement = Worker(library, count, chosen) if queue else None
                    workers.remove(worker)
                else:
                    if got is not None:
                        yield Record(**got)
                    worker.give(queue.pop() if queue else None)
                    if worker.name is None:
                        workers.remove(worker)
            elif worker.name is not None and time.monotonic() - worker.since > limit:
                yield _lost(worker, "hang", f"no answer in {limit:.0f} s")
                worker.kill()
                replacement = Worker(library, count, chosen) if queue else None
                workers.remove(worker)
            if replacement is not None:
                workers.append(replacement)


def _lost(worker: Worker, status: str, why: str) -> Record:
    name = worker.name or "a worker that did not start"
    return Record(
        name, status=status, checks=1, problems=[why], kinds={f"function: {status}": 1}
    )


def load(path: Path, mark: str) -> dict[str, Record]:
    """Records of these sources."""
    if not path.exists():
        return {}
    known = {f.name for f in fields(Record)}
    out: dict[str, Record] = {}
    for line in path.read_text().splitlines():
        data: dict[str, Any] = json.loads(line)
        if data.get("fingerprint") == mark:
            record = Record(**{k: v for k, v in data.items() if k in known})
            out[record.name] = record
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 if something is wrong that no reason excuses."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.testing.ops", description=__doc__
    )
    parser.add_argument("--only", default="*", help="names to judge, with wildcards, by commas")
    parser.add_argument("--library", default="shardwise", choices=("shardwise", "torch"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="0: no workers")
    parser.add_argument("--chosen", action="store_true", help="cut dims at chosen sizes")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one entry")
    parser.add_argument("--out", type=Path, default=Path("out/ops"))
    parser.add_argument("--docs", type=Path, help="write the page of results here")
    parser.add_argument("--fresh", action="store_true", help="forget earlier records")
    parser.add_argument("--keep", action="store_true", help="keep records of other sources too")
    options = parser.parse_args(argv)

    mark = fingerprint() if not options.keep else "kept"
    path = options.out / f"{options.library}{'_chosen' * options.chosen}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {} if options.fresh else load(path, mark)
    patterns = options.only.split(",")
    wanted = [n for n in entries() if any(fnmatch.fnmatch(n, p) for p in patterns)]
    todo = [n for n in wanted if n not in done]
    start = time.monotonic()
    with path.open("w" if options.fresh or not done else "a") as file:
        for record in run(
            todo,
            options.library,
            jobs=options.jobs,
            count=options.samples,
            limit=options.limit,
            chosen=options.chosen,
        ):
            done[record.name] = record
            file.write(json.dumps({**record.to_json(), "fingerprint": mark}) + "\n")
            file.flush()
            _tell(record, len(done), len(wanted), time.monotonic() - start)
    records = [done[n] for n in wanted if n in done]
    print(summary(records))  # noqa: T201
    if options.docs is not None:
        options.docs.write_text(page(records, options.library))
    if options.library != "shardwise":
        return 0
    bad = faults(records, REASONS)
    print("\n".join(bad))  # noqa: T201
    return 1 if bad else 0


def _tell(record: Record, done: int, total: int, seconds: float) -> None:
    mark = "" if record.status == "right" else f"  {record.status}"
    lines = [f"{done:4d}/{total} {seconds:6.0f} s  {record.name}{mark}"]
    lines += [f"        {problem}" for problem in record.problems[:4]]
    lines += [f"        moved without need: {text}" for text in record.needless[:2]]
    print("\n".join(lines), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
