"""Record one call: run it on fakes, note what it makes and what it leaves behind, put everything back.

What a step leaves behind are new objects in places that outlive it: gradients, above all. Each such place becomes a
binding: after every run the executor's output is put there, as the recorded call has done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.ir import Slot, Step, Value
from shardwise.capture.state import Cell, State, TableCell, local_of, shown_cells, slot_of
from shardwise.capture.tape import Tape
from shardwise.comm.transport import current
from shardwise.compat import is_fake, tree_flatten, tree_unflatten
from shardwise.errors import CaptureError
from shardwise.tensor.dtensor import DTensor, wrap

LIFTED_NUMBERS = ("lr",)  # hyperparameters that change from call to call: inputs of the graph


@dataclass(frozen=True, slots=True)
class Results:
    """What a call returned: the tree, its plain leaves, and where tensors go.

    Attributes:
        leaves: The leaves; None where an output of the graph belongs.
        tree: Their tree.
        places: Which leaves are outputs, in order.
        specs: For each of these the spec of a DTensor, or None.
    """

    leaves: list[Any]
    tree: Any
    places: list[int]
    specs: list[Any]

    def rebuild(self, outs: Any) -> Any:
        """The result, with the graph's outputs in it."""
        leaves = list(self.leaves)
        for at, spec, out in zip(self.places, self.specs, outs):
            leaves[at] = out if spec is None else wrap(out, spec)
        return tree_unflatten(leaves, self.tree)


@dataclass(frozen=True, slots=True)
class Effects:
    """What a call left behind in Python.

    Attributes:
        bound: Places that hold an output of the graph afterwards.
        reset: Places that hold something else that was there before, or nothing.
        forgotten: Wrappers of gradients that are no longer true.
    """

    bound: list[Cell]
    reset: list[tuple[Cell, Any]]
    forgotten: list[Cell]

    def apply(self, outs: Any) -> None:
        """Leave the same behind, with the outputs of a run."""
        for cell, out in zip(self.bound, outs):
            cell.write(out)
        for cell, x in self.reset:
            cell.write(x)
        for cell in self.forgotten:
            cell.write(None)


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded call.

    Attributes:
        step: The graph; its outputs are the results' tensors, then the bound ones.
        results: How to rebuild what it returned.
        effects: How to leave behind what it left.
        read: Places of the state that were looked at: they must hold the like at every run.
    """

    step: Step
    results: Results
    effects: Effects
    read: list[Cell]


def record(
    fn: Callable[..., Any], state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Recording:
    """Run a call on fakes and give its graph. Whatever happens, nothing of the user's is changed.

    Raises:
        CaptureError: It does what no later run could repeat.
    """
    cells = state.cells()
    before = [c.read() for c in cells]
    tape = Tape(_slots(cells, before, args, kwargs), current().rank)
    with _put_back(state, tape):
        shown = list(shown_cells(p for _, p in state.parameters().values()))
        shown_before = [c.read() for c in shown]
        try:
            with tape.running():
                results, outs = _results(tape, fn(*args, **kwargs))
                effects, more = _effects(tape, cells, before, shown)
        finally:
            for c, x in [*zip(cells, before), *zip(shown, shown_before)]:
                if c.read() is not x:
                    c.write(x)
    step = Step(
        nodes=tuple(tape.nodes),
        inputs=tuple(tape.inputs),
        outputs=(*outs, *more),
        next_index=tape.next_index,
        rank=tape.rank,
        tape=tape,
    )
    read = [c for c, x in zip(cells, before) if isinstance(x, Tensor) and c.role == "state"]
    return Recording(step, results, effects, read)


def _slots(
    cells: list[Cell], before: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Slot]:
    """Where each known tensor comes from."""
    slots: dict[int, Slot] = {}
    for c, x in zip(cells, before):
        if isinstance(x, Tensor):
            slots.setdefault(id(local_of(x)), slot_of(c))
    leaves, _ = tree_flatten((args, kwargs))
    for i, x in enumerate(leaves):
        if isinstance(x, DTensor):
            slots[id(x._local)] = Slot(
                str(i), "argument", lambda leaves, i=i: leaves[i]._local, x._spec.layout
            )
        elif isinstance(x, Tensor):
            slots[id(x)] = Slot(str(i), "argument", lambda leaves, i=i: leaves[i])
    return slots


@contextmanager
def _put_back(state: State, tape: Tape) -> Iterator[None]:
    """Around a recording: the optimizers' numbers and tables, and what other rooms have set aside."""
    numbers = state.numbers()
    values = [c.read() for c in numbers]
    during = [_lifted(c, x, tape) for c, x in zip(numbers, values)]
    for c, x in zip(numbers, during):
        c.write(x)
    tables = [(o, set(o.state)) for o in state.optimizers.values()]
    try:
        yield
        changed = [c for c, x in zip(numbers, during) if c.read() is not x]
        new = [o for o, keys in tables if set(o.state) != keys]
    finally:
        tape.restore()
        for c, x in zip(numbers, values):
            c.write(x)
        for o, keys in tables:
            for p in set(o.state) - keys:
                del o.state[p]
    if changed:
        raise CaptureError(
            f"this step cannot be captured: it changes {changed[0].name}, a Python number, which a later run of "
            "the graph would not do.",
            tries=["call scheduler.step() after the captured step, not in it"],
        )
    if new:
        raise CaptureError(
            "this step cannot be captured: an optimizer makes new state in it.",
            tries=["run one eager step first"],
        )


def _lifted(cell: TableCell, x: Any, tape: Tape) -> Any:
    """A number as the recorded step sees it: one that changes from call to call is an input."""
    if cell.key not in LIFTED_NUMBERS or type(x) is not float:
        return x
    find, key = cell.find, cell.key
    made = tape.lift_number(Slot(cell.name, "number", lambda _: find()[key]))
    if not find().get("fused"):
        return made
    with tape.running():  # the fused kernels take it as a tensor
        return torch.scalar_tensor(made, dtype=torch.float64)  # pyright: ignore[reportArgumentType]


def _results(tape: Tape, result: Any) -> tuple[Results, list[Value]]:
    leaves, tree = tree_flatten(result)
    places = [i for i, r in enumerate(leaves) if isinstance(r, (Tensor, torch.SymFloat))]
    specs = [r._spec if isinstance(r, DTensor) else None for r in (leaves[i] for i in places)]
    outs = [
        tape.value_of(local_of(r)) if isinstance(r, Tensor) else r.node.value
        for r in (leaves[i] for i in places)
    ]
    chosen = set(places)
    kept = [None if i in chosen else r for i, r in enumerate(leaves)]
    return Results(kept, tree, places, specs), outs


def _effects(
    tape: Tape, cells: list[Cell], before: list[Any], shown: list[Cell]
) -> tuple[Effects, list[Value]]:
    bound: list[Cell] = []
    reset: list[tuple[Cell, Any]] = []
    outs: list[Value] = []
    for c, x in zip(cells, before):
        now = c.read()
        if now is x:
            continue
        if isinstance(now, Tensor) and is_fake(local_of(now)):
            if isinstance(now, DTensor):
                raise tape.refuse(f"{c.name} becomes another DTensor in the step")
            bound.append(c)
            outs.append(tape.value_of(now))
        else:
            reset.append((c, now))
    touched = {id(c.holder) for c in (*bound, *(c for c, _ in reset))}
    forgotten = [
        c
        for c in shown
        if id(c.holder) in touched
        or (isinstance(c.holder, DTensor) and id(c.holder._local) in touched)
    ]
    return Effects(bound, reset, forgotten), outs
