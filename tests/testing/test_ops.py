"""A slice of `make ops`, and the machinery around it."""

import json

import pytest
import torch

from shardwise.testing import ops, report
from shardwise.testing.entry import Record, judge_entry
from shardwise.testing.libraries import Shardwise
from shardwise.testing.opinfo import entries

# Every 23rd entry, and some of the families that are easy to get wrong.
SLICE = sorted(
    {
        *list(entries())[::40],
        "add",
        "cumsum",
        "gather",
        "index_put",
        "nn.functional.batch_norm",
        "nn.functional.cosine_embedding_loss",
        "nn.functional.cross_entropy",
        "std_mean",
        "topk",
    }
    - set(report.REASONS)
)


@pytest.mark.parametrize("name", SLICE)
def test_entry(name):
    record = judge_entry(entries()[name], Shardwise(), count=1)
    record.local = 0  # what moves without need is a matter of the whole run
    record.needless.clear()
    assert not report.faults([record], {}), record.problems


def test_the_database_is_whole():
    assert len(entries()) > 690
    assert sum(torch.float32 in op.dtypes for op in entries().values()) > 670


def test_a_run_is_resumed(tmp_path, capsys):
    args = ["--only", "neg,sign", "--jobs", "0", "--samples", "1", "--out", str(tmp_path)]
    args += ["--docs", str(tmp_path / "ops.md")]
    assert ops.main(args) == 0
    lines = (tmp_path / "shardwise.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["neg", "sign"]
    assert "2 of 2 right" in capsys.readouterr().out
    assert ops.main(args) == 0
    assert (tmp_path / "shardwise.jsonl").read_text().splitlines() == lines
    text = (tmp_path / "ops.md").read_text()
    assert "- `neg`: input S(0): nothing" in text


def test_faults():
    right, wrong = Record("a"), Record("b", status="wrong", problems=["1, want 2"])
    raises = Record("c", status="error", problems=["ShardError: no"])
    assert report.faults([right], {}) == []
    assert report.faults([right], {"a": "it cannot"}) == ["a is right: remove its reason"]
    assert report.faults([raises], {"c": "it cannot"}) == []
    assert len(report.faults([raises], {})) == 1
    assert len(report.faults([wrong], {"b": "a reason does not excuse a wrong value"})) == 1
    moved = Record("d", local=100, needless=["x"] * 3)
    assert len(report.faults([moved], {})) == 1
    assert not report.faults([Record("d", local=100, needless=["x"] * 2)], {})


@pytest.mark.multi
def test_an_entry_that_never_ends_is_a_hang_and_the_others_go_on(monkeypatch):
    got = {
        r.name: r.status
        for r in ops.run(["neg", "cumsum"], "shardwise", jobs=1, count=1, limit=0.01)
    }
    assert set(got.values()) <= {"hang", "right"}
    assert set(got) == {"neg", "cumsum"}
