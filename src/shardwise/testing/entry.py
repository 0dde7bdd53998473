"""One entry of the database of ops, judged: the unit of work of `shardwise.testing.ops`.

```text
   samples (up to 5)  x  { one tensor in every placement, on (2,) and (4,);  4 random on (2,), (4,), (2, 2) }
        forward, gradients;  on (2,) of the first two samples also gradients of gradients, in place, out=, method
        may nothing move?  the plain op on the pieces says so, the log must agree
   -->  a record: what was wrong, what moved without need, what each placement costs
```
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
import random
import time
from typing import Any
import warnings

from shardwise.testing.calls import Call
from shardwise.testing.judge import Outcome, Reference, error_text, judge
from shardwise.testing.layouts import Combo, combo_text, randoms, singles
from shardwise.testing.libraries import Library
from shardwise.testing.opinfo import (
    calls,
    differentiable,
    dtype_of,
    entry_name,
    has_float32,
    samples,
)
from shardwise.testing.pieces import gradients_suffice, pieces_suffice

SAMPLES = 5
MESHES = ((2,), (4,))
RANDOM_COMBOS = 4


@dataclass(slots=True)
class Record:
    """What one entry showed.

    Attributes:
        name: Of the entry.
        float32: It has float32, so it is counted with the larger part.
        dtype: What it was judged in.
        status: "right", or the worst that happened: "wrong", "hang", "error"; "unjudged" if nothing
            could be compared.
        checks: Layouts that were compared.
        problems: Text per failed check.
        kinds: How often each form failed, as "form: verdict".
        local: Pairs of call and layout for which the plain op on the pieces is the answer.
        needless: Text for those of them that moved bytes all the same.
        flags: How many of them moved only the number by which the ranks agree whether to raise.
        costs: For each placement of each tensor, how often what had to be done.
        seconds: How long it took.
        note: Why nothing was judged.
    """

    name: str
    float32: bool = True
    dtype: str = ""
    status: str = "right"
    checks: int = 0
    problems: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    local: int = 0
    needless: list[str] = field(default_factory=list)
    flags: int = 0
    costs: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def judge_entry(
    op: Any,
    library: Library,
    *,
    count: int = SAMPLES,
    forms: bool = True,
    chosen: bool = False,
) -> Record:
    """Judge one entry.

    Args:
        op: An entry of the database.
        library: Whose tensors.
        count: Samples.
        forms: Also in place, ``out=``, method, and gradients of gradients.
        chosen: Cut dims at chosen sizes.
    """
    record = Record(entry_name(op), has_float32(op), str(dtype_of(op)).removeprefix("torch."))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            picked = samples(op, count) if dtype_of(op) is not None else []
        except Exception as error:
            picked = []
            record.note = f"the database has no samples: {error_text(error)}"
        rng = random.Random(record.name)
        for number, sample in enumerate(picked):
            for form, call in calls(op, sample):
                if form == "function" or (forms and number < 2):
                    _judge_call(
                        record, op, library, form, call, rng, forms and number < 2, chosen
                    )
    for verdict in ("error", "hang", "wrong"):
        if any(key.endswith(verdict) for key in record.kinds):
            record.status = verdict
    if not record.checks:
        record.status = "unjudged"
        record.note = record.note or "no sample is a strided tensor that plain torch takes"
    record.seconds = round(time.perf_counter() - start, 2)
    return record


def _judge_call(
    record: Record,
    op: Any,
    library: Library,
    form: str,
    call: Call,
    rng: random.Random,
    deep: bool,
    chosen: bool,
) -> None:
    function = form == "function"
    grad = differentiable(op) and form != "out"
    twice = function and deep and op.supports_gradgrad and grad
    reference = _reference(call, grad, twice)
    if reference is None:
        record.note = "plain torch raises"
        return
    if not call.tensors:  # a factory: there is nothing to lay out, torch's answer is the answer
        record.checks += 1
        record.note = "takes no tensor"
        return
    todo: list[tuple[tuple[int, ...], list[Combo], Reference]] = []
    if function:
        light = _reference(call, grad, False) if twice else reference
        assert light is not None, "the plain call answered a moment ago"

        def alone(n: int) -> list[Combo]:
            return list(singles(call.tensors, chosen=n if chosen else 0))

        def some(n: int, axes: int = 1) -> list[Combo]:
            ranks = n if chosen else 0
            return list(randoms(call.tensors, axes, RANDOM_COMBOS, rng, chosen=ranks))

        todo.append(((2,), alone(2), reference))
        todo.append(((2,), some(2), light))
        todo.append(((4,), [*alone(4), *some(4)], light))
        todo.append(((2, 2), some(2, 2), light))
    else:
        todo.append(((2,), list(singles(call.tensors, chosen=2 if chosen else 0)), reference))
    for mesh, combos, ref in todo:
        for outcome in judge(ref, library, mesh, combos):
            _enter(record, form, call, outcome)
            if function and len(mesh) == 1:
                _enter_cost(record, ref, outcome)


def _reference(call: Call, grad: bool, twice: bool) -> Reference | None:
    """The plain answer, with as many gradients as plain torch gives."""
    for g, t in ((grad, twice), (grad, False), (False, False)):
        try:
            return Reference(call, grad=g, twice=t)
        except Exception:  # plain torch does not do this
            continue
    return None


def _enter(record: Record, form: str, call: Call, outcome: Outcome) -> None:
    record.checks += 1
    if outcome.verdict == "right":
        return
    key = f"{form}: {outcome.verdict}"
    record.kinds[key] = record.kinds.get(key, 0) + 1
    if sum(record.kinds.values()) <= 12:
        record.problems.append(
            f"{key}: {outcome.what} | mesh {outcome.mesh} [{combo_text(outcome.combo)}] {call.text}"
        )


def _enter_cost(record: Record, reference: Reference, outcome: Outcome) -> None:
    if outcome.verdict in ("error", "hang"):
        return
    call, moved = reference.call, outcome.moved.bytes > 0
    if pieces_suffice(call, outcome.mesh[0], outcome.combo) and (
        not moved or gradients_suffice(reference, outcome.mesh[0], outcome.combo)
    ):
        record.local += 1
        record.flags += not moved and outcome.moved.flag_bytes > 0
        if moved:
            record.needless.append(
                f"{cost_of(outcome)}, {outcome.moved.bytes} bytes | mesh {outcome.mesh} "
                f"[{combo_text(outcome.combo)}] {call.text}"
            )
    laid = [i for i, (p,) in enumerate(outcome.combo) if not p.is_replicate()]
    if len(laid) == 1:
        name = call.names[laid[0]] if call.names else f"tensor {laid[0]}"
        place = str(outcome.combo[laid[0]][0]).replace("P(sum)", "P")
        costs = Counter(record.costs.setdefault(f"{name} {place}", {}))
        costs[cost_of(outcome)] += 1
        record.costs[f"{name} {place}"] = dict(costs)


def cost_of(outcome: Outcome) -> str:
    """What a layout costs: "nothing", "partial", "flag", the collectives, or "gather"."""
    moved = outcome.moved
    if moved.gathered:
        return "gather"
    if not moved.bytes:
        return "partial" if outcome.pending else "flag" if moved.flag_bytes else "nothing"
    return "+".join(sorted(set(moved.kinds)))


__all__ = ["Record", "cost_of", "judge_entry"]
