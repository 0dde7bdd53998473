"""Record one call: run it on fakes, note what it makes and what it leaves behind, put everything back.

What a step leaves behind are new objects in places that outlive it: gradients, above all. Each such place becomes a
binding: after every run the executor's output is put there, as the recorded call has done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import re
import types
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.aftermath import Aftermath, Seeds, holds_fake
from shardwise.capture.cells import Cell, TableCell, is_value
from shardwise.capture.ir import Slot, Step, Value
from shardwise.capture.sources import Watch
from shardwise.capture.state import (
    State,
    liftable,
    local_of,
    shown_cells,
    slot_of,
)
from shardwise.capture.tape import Tape
from shardwise.comm.transport import current
from shardwise.compat import direct_apply, is_fake, storage_id, tree_flatten, tree_unflatten
from shardwise.errors import CaptureError
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.gradients import leaf_of
from shardwise.tensor.views import Origin, fresh, version

LIFTED_NUMBERS = frozenset(
    {"lr"}
)  # hyperparameters that are inputs of the graph from the start
_SEES_VALUES = (
    "SymFloat",
    "supported for tensor subclasses",
    "numpy",
    "for 'meta' device type",
    "data is not allocated yet",
)


class NewStateError(CaptureError):
    """An optimizer makes new state: this call is to run eagerly."""


class _NoHistory(torch.autograd.Function):
    """Stands where a result has a history in eager mode: there is a gradient function, and it says what is wrong."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.data  # no view: it may be written to, as any result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise CaptureError(
            "what a captured step gives has no history: no gradient can go back into the step.",
            tries=[
                "call backward in the step",
                "detach() the result, if no gradient is wanted",
            ],
        )


_apply_no_history = direct_apply(_NoHistory)


def _ended(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return _apply_no_history(torch.empty(0, requires_grad=True), x)


@dataclass(frozen=True, slots=True)
class Form:
    """What an output of the graph becomes: the tensor that eager mode would give.

    Attributes:
        spec: Of a DTensor; None for a plain tensor or a number.
        history: Whether it has a gradient function in eager mode.
        copied: Whether it is a view that needed communication, and so a copy, of what the caller has.
    """

    spec: Any
    history: bool
    copied: bool

    @classmethod
    def like(cls, x: Any, copied: bool = False) -> Form:
        """That of a recorded result."""
        spec = x._spec if isinstance(x, DTensor) else None
        return cls(spec, isinstance(x, Tensor) and x.requires_grad, copied)

    def of(self, out: Any) -> Any:
        """Give an output this form."""
        if self.history:
            out = _ended(out)
        if self.spec is None:
            return out
        made = wrap(out, self.spec)
        if (
            self.copied
        ):  # its base is known to the recorded call alone: who writes to it is told
            made._view_of = Origin(out, version(out), None, lambda: made)
        return made


@dataclass(frozen=True, slots=True)
class Results:
    """What a call returned: the tree, its plain leaves, and where tensors go.

    Attributes:
        leaves: The leaves; None where an output of the graph belongs.
        tree: Their tree.
        places: Which leaves are outputs, in order.
        forms: For each of these, what the output is to become.
        given: Leaves that are a tensor which was there before, with what finds it among the arguments' leaves.
        again: Leaves that are the same object as an earlier leaf.
    """

    leaves: list[Any]
    tree: Any
    places: list[int]
    forms: list[Form]
    given: list[tuple[int, Callable[[list[Any]], Any]]]
    again: list[tuple[int, int]]

    def rebuild(self, outs: Any, arguments: list[Any]) -> Any:
        """The result, with the graph's outputs in it."""
        leaves = list(self.leaves)
        for at, form, out in zip(self.places, self.forms, outs):
            leaves[at] = form.of(out)
        for at, find in self.given:
            leaves[at] = find(arguments)
        for at, first in self.again:
            leaves[at] = leaves[first]
        return tree_unflatten(leaves, self.tree)


@dataclass(slots=True)
class Effects:
    """What a call left behind in Python.

    Attributes:
        bound: Places that hold an output of the graph afterwards, with its form.
        reset: Places that hold something else that was there before, or nothing.
        forgotten: Wrappers of gradients that are no longer true.
        of_arguments: Arguments that get a gradient: the last outputs of the graph, in order.
    """

    bound: list[tuple[Cell, Form]]
    reset: list[tuple[Cell, Any]]
    forgotten: list[Cell]
    of_arguments: list[int]

    def apply(self, outs: Any, leaves: list[Any]) -> None:
        """Leave the same behind, with the outputs of a run."""
        for at, out in zip(self.of_arguments, outs[len(self.bound) :]):
            local = local_of(leaves[at])
            leaf = leaf_of(local)
            if leaf is None:
                local.grad = out
            else:
                leaf.grad, leaf.shown = out, None
        for (cell, form), out in zip(self.bound, outs):
            cell.write(form.of(out))
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
        read: Places of the state, and what they held: they must hold the like at every run.
        guards: How hyperparameters that are inputs compare with constants; it must be so at every run.
    """

    step: Step
    results: Results
    effects: Effects
    read: list[tuple[Cell, Any]]
    guards: list[Any]

    def does_as(self, other: Recording) -> bool:
        """Whether it would do the same as another at every run, as far as can be told."""
        mine, theirs = self._constants(), other._constants()
        return (
            _text_of(self.step) == _text_of(other.step)
            and self.results.tree == other.results.tree
            and len(mine) == len(theirs)
            and all(map(_equal, mine, theirs))
        )

    def _constants(self) -> list[Any]:
        """What the text of the step does not show."""
        found = [x for x in self.results.leaves if not isinstance(x, Tensor)]
        found += [x for _, x in self.effects.reset]
        found += [
            x for _, compare, other, answer in self.guards for x in (compare, other, answer)
        ]
        tape = self.step.tape
        found += [state for _, state in tape.own_generators.values()]
        return found + list(tape.constants.values())

    def _outside(self) -> list[Tensor]:
        """Tensors that no name leads to, or that were made in a way that is not seen."""
        return [slot.get(None) for _, slot in self.step.inputs if slot.role == "closed-over"]

    def agrees_with(self, other: Recording) -> bool:
        """Whether the same call has given the same step at another time."""
        mine, theirs = self._outside(), other._outside()
        return (
            self.does_as(other) and len(mine) == len(theirs) and all(map(_equal, mine, theirs))
        )


def _text_of(step: Step) -> str:
    """The step in words; where an object lies in memory does not count."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(step))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(a, b))
    return a is b or (is_value(a) and type(a) is type(b) and a == b)


def record(
    fn: Callable[..., Any],
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lifted: Collection[str] = LIFTED_NUMBERS,
) -> Recording:
    """Run a call on fakes and give its graph. Whatever happens, nothing of the user's is changed.

    Args:
        fn: The function.
        state: What it works on.
        args: Its arguments.
        kwargs: Those by name.
        lifted: Hyperparameters that are inputs of the graph.

    Raises:
        CaptureError: It does what no later run could repeat; a `NewStateError` if that is an optimizer's first step.
    """
    found = _record(fn, state, args, kwargs, lifted)
    tape = found.step.tape
    if not tape.doubts and not tape.own_generators:
        return found
    again = _record(fn, state, args, kwargs, lifted, later=True)
    known = tape.own_generators.keys() & again.step.tape.own_generators.keys()
    if known:  # no name leads to them, but they were there
        state.generators += [tape.own_generators[g][0] for g in known]
        return record(fn, state, args, kwargs, lifted)
    if not again.agrees_with(found):
        what = tape.doubts[0] if tape.doubts else "seeds a random generator that it makes"
        raise CaptureError(
            f"this step cannot be captured: it {what}, and what it does depends on that.",
            tries=["do it before the step, and pass on what comes of it as an argument"],
        )
    return found


def _record(
    fn: Callable[..., Any],
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lifted: Collection[str],
    *,
    later: bool = False,
) -> Recording:
    """`record`, once; ``later``: with clocks that are wrong."""
    cells = state.cells()
    before = [c.read() for c in cells]
    tape = Tape(_slots(cells, before, args, kwargs), current().rank)
    tape.generators.update(map(id, state.generators))
    leaves, tree = tree_flatten((args, kwargs))
    aftermath, done = Aftermath(state), False
    modes = state.modes()
    modes_before = [c.read() for c in modes]
    data = [
        (local, local.detach()) for local in map(local_of, before) if isinstance(local, Tensor)
    ]
    with _put_back(state, tape, lifted) as check_numbers:
        shown = list(shown_cells(p for _, p in state.parameters().values()))
        shown_before = [c.read() for c in shown]
        try:
            with tape.running(), Watch(state, tape, later=later).running():
                own = _stand_ins(tape, leaves, before)
                own_args, own_kwargs = tree_unflatten(own, tree)  # lists and dicts of our own
                got = _called(fn, own_args, own_kwargs, tape)
                if tape.reads_file is not None:  # and nobody was told
                    raise tape.reads_file
                check_numbers()
                for check in tape.checks:
                    check()
                _check_data(tape, data)
                _check_arguments(tape, own, tree_flatten((own_args, own_kwargs))[0])
                results, outs = _results(tape, got, own, cells, state)
                new = aftermath.places(tape, cells)
                news = [(c, None) for c in new]
                effects, more = _effects(tape, [*zip(cells, before), *news], shown)
                effects.reset += [
                    (c, c.read()) for c, x in zip(modes, modes_before) if c.read() is not x
                ]
                effects.of_arguments, grads = _gradients(tape, state, leaves)
                done = True
        finally:
            for x, old in data:
                if storage_id(x) != storage_id(old):
                    x.data = old
            for x, grad, reduced in tape.lifted_leaves:
                _restore_gradient(x, grad, reduced)
            for c, x in [*zip(cells, before), *zip(shown, shown_before)]:
                if c.read() is not x:
                    c.write(x)
            aftermath.restore(everything=not done)
            for c, x in zip(modes, modes_before):
                if not done and c.read() is not x:
                    c.write(x)
    used = {v for n in tape.nodes for part in (n, *n.body) for v in part.inputs}
    used |= {*outs, *more, *grads}
    step = Step(
        nodes=tuple(tape.nodes),
        inputs=tuple([(v, slot) for v, slot in tape.inputs if v in used]),
        outputs=(*outs, *more, *grads),
        next_index=tape.next_index,
        rank=tape.rank,
        tape=tape,
    )
    read = [
        (c, x) for c, x in zip(cells, before) if isinstance(x, Tensor) and c.role == "state"
    ]
    read += [(c, c.read()) for c in new]
    return Recording(step, results, effects, read, tape.guards)


def _stand_ins(tape: Tape, leaves: list[Any], state: list[Any]) -> list[Any]:
    """The arguments' leaves, with fakes for plain tensors: calls like ``x.numpy()`` would give values of this call.

    A tensor that may get a gradient, or that the state has too, is the object that it is.
    """
    known = {id(x) for x in state}
    return [
        tape.fake_of(x)
        if type(x) is Tensor and not (x.requires_grad or id(x) in known or vars(x))
        else x
        for x in leaves
    ]


def _called(fn: Callable[..., Any], args: Any, kwargs: Any, tape: Tape) -> Any:
    try:
        return fn(*args, **kwargs)
    except (TypeError, RuntimeError) as error:  # torch's own words for: there is no value
        if isinstance(error, CaptureError) or not any(s in str(error) for s in _SEES_VALUES):
            raise
        raise tape.refuse(
            f"Python or numpy asks for the value of a tensor ({error})",
            ["return it, and look at it outside the step"],
        ) from error


def _check_data(tape: Tape, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, old in data:
        if storage_id(x) != storage_id(old):
            raise tape.refuse(
                "it gives a tensor other memory (x.data = ...)",
                ["with torch.no_grad(): x.copy_(...)"],
            )


def _check_arguments(tape: Tape, before: list[Any], after: list[Any]) -> None:
    if len(before) != len(after) or any(x is not y for x, y in zip(before, after)):
        raise tape.refuse(
            "it changes a list or dict that is an argument", ["return what is new in it"]
        )


def _gradients(tape: Tape, state: State, leaves: list[Any]) -> tuple[list[int], list[Value]]:
    """Which arguments get a gradient, and what it is; other leaves are parameters, or are refused."""
    known = {id(local_of(p)) for _, p in state.parameters().values()}
    places = {id(local_of(x)): i for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    found: list[int] = []
    outs: list[Value] = []
    for x, grad, reduced in tape.lifted_leaves:
        leaf = leaf_of(x)
        was = reduced or (None, None)
        now = (None, None) if leaf is None else (leaf.grad, leaf.pending)
        if id(x) in known or (x.grad is grad and now[0] is was[0] and now[1] is was[1]):
            continue
        at = places.get(id(x))
        if at is None:
            raise tape.refuse(
                "backward leaves a gradient in a tensor that lies where capture does not look",
                [
                    "torch.autograd.grad(loss, x), and return it",
                    "let the function name the tensor",
                ],
            )
        if grad is not None or was != (None, None) or now[1] is not None:
            raise tape.refuse(
                f"backward adds to a gradient that argument {at} has already, or leaves a pending sum in it",
                ["torch.autograd.grad(loss, x), and return it", "set its grad to None before"],
            )
        found.append(at)
        outs.append(tape.value_of(local_of(x.grad if leaf is None else now[0])))
    return found, outs


def _restore_gradient(x: Tensor, grad: Any, reduced: Any) -> None:
    if x.grad is not grad:
        x.grad = grad
    leaf = leaf_of(x)
    if leaf is not None:
        was = reduced or (None, None)
        if leaf.grad is not was[0] or leaf.pending is not was[1]:
            leaf.grad, leaf.pending = was
            leaf.shown = None


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
def _put_back(
    state: State, tape: Tape, lifted: Collection[str]
) -> Iterator[Callable[[], None]]:
    """Around a recording: optimizers' numbers and tables, generators, and what other rooms have set aside."""
    numbers = state.numbers()
    values = [c.read() for c in numbers]
    during = [_lifted(c, x, tape, lifted) for c, x in zip(numbers, values)]
    for c, x in zip(numbers, during):
        c.write(x)
    tables = [
        (o, {p: dict(held) if isinstance(held, dict) else held for p, held in o.state.items()})
        for o in state.optimizers.values()
    ]
    seeds, seeded, failed = Seeds(state), None, True

    def check_numbers() -> None:
        changed = [c.name for c, x in zip(numbers, during) if c.read() is not x]
        if changed:
            raise CaptureError(
                f"this step cannot be captured: it changes {changed[0]}, a Python number, which a later run of "
                "the graph would not do.",
                tries=["call scheduler.step() after the captured step, not in it"],
            )

    try:
        yield check_numbers
        failed = False
    finally:
        tape.restore()
        for c, x in zip(numbers, values):
            c.write(x)
        counted = [name for o, table in tables for name in _restore_table(o, table)]
        seeded = seeds.changed()
    new = [name for name in counted if name is _NEW]
    if failed:
        return
    if new:
        raise NewStateError(
            "this step cannot be captured: an optimizer makes new state in it.",
            tries=["run one eager step first"],
        )
    if counted:
        raise CaptureError(
            f"this step cannot be captured: an optimizer changes {counted[0]!r} in its state, which is no tensor; "
            "a later run of the graph would not.",
            tries=["keep it as a tensor, as torch's optimizers keep their step"],
        )
    if seeded is not None:
        raise CaptureError(
            f"this step cannot be captured: {seeded}.",
            tries=["do it before the step", "pass the number as a tensor"],
        )


_NEW = "new"


def _restore_table(o: torch.optim.Optimizer, before: dict[Any, Any]) -> list[str]:
    """Put an optimizer's state back; the names of what is no tensor and has changed, `_NEW` for what is new."""
    found: list[str] = []
    for p in [p for p in o.state if p not in before]:
        del o.state[p]
        found.append(_NEW)
    for p, was in before.items():
        held = o.state.get(p)
        if not isinstance(held, dict) or not isinstance(was, dict):
            continue
        for key in [k for k in held if k not in was]:
            del held[key]
            found.append(_NEW)
        for key, x in was.items():
            now = held.get(key)
            if now is x or (isinstance(x, Tensor) and isinstance(now, Tensor)):
                continue
            held[key] = x
            if isinstance(now, Tensor):
                found.append(_NEW)
            elif type(now) is not type(x) or now != x:
                found.append(str(key))
    return found


def _lifted(cell: TableCell, x: Any, tape: Tape, lifted: Collection[str]) -> Any:
    """A number as the recorded step sees it: one that changes from call to call is an input."""
    if cell.key not in lifted or not liftable(x):
        return x
    find, key = cell.find, cell.key
    if type(x) is tuple:
        return tuple(
            [
                tape.lift_number(Slot(cell.name, "number", lambda _, i=i: find()[key][i]), x[i])
                for i in range(len(x))
            ]
        )
    made = tape.lift_number(Slot(cell.name, "number", lambda _: find()[key]), x)
    if key != "lr" or not find().get("fused"):
        return made
    with tape.running():  # the fused kernels take it as a tensor
        return torch.scalar_tensor(made, dtype=torch.float64)  # pyright: ignore[reportArgumentType]


def _now(x: Tensor) -> Tensor:
    """The local tensor of what a step leaves; a view that is a copy is taken again if its base was written to."""
    if isinstance(x, DTensor):
        fresh(x)
    return local_of(x)


def _results(
    tape: Tape, result: Any, arguments: list[Any], cells: list[Cell], state: State
) -> tuple[Results, list[Value]]:
    leaves, tree = tree_flatten(result)
    finders = _gradient_finders(state) | _finders(arguments, cells)
    first: dict[int, int] = {}
    places: list[int] = []
    outs: list[Value] = []
    given: list[tuple[int, Any]] = []
    again: list[tuple[int, int]] = []
    for i, r in enumerate(leaves):
        if isinstance(r, torch.SymFloat):
            places.append(i)
            outs.append(r.node.value)
        elif not isinstance(r, Tensor):
            continue
        elif id(r) in first:
            again.append((i, first[id(r)]))
        elif id(r) in finders:
            given.append((i, finders[id(r)]))
        else:
            first[id(r)] = i
            places.append(i)
            outs.append(tape.value_of(_now(r)))
    chosen = {*places, *(i for i, _ in given), *(i for i, _ in again)}
    if any(isinstance(r, (types.GeneratorType, types.CoroutineType)) for r in leaves):
        raise tape.refuse("it returns a generator, which runs after it", ["return a list"])
    if any(holds_fake(r) for i, r in enumerate(leaves) if i not in chosen):
        raise tape.refuse(
            "it returns an object with tensors in it, which a later run could not make",
            ["return tensors in tuples, lists and dicts"],
        )
    roots = {v.root for v in (*outs, *(v for v, _ in tape.inputs))}

    def copied(x: Any) -> bool:
        origin = vars(x).get("_view_of") if isinstance(x, DTensor) else None
        return origin is not None and tape.value_of(origin.root).root in roots

    forms = [Form.like(leaves[i], copied(leaves[i])) for i in places]
    kept = [None if i in chosen else r for i, r in enumerate(leaves)]
    return Results(kept, tree, places, forms, given, again), outs


def _finders(arguments: list[Any], cells: list[Cell]) -> dict[int, Callable[[list[Any]], Any]]:
    """For each tensor that was there before the call: what finds the one in its place at a later run."""
    found: dict[int, Callable[[list[Any]], Any]] = {}
    for c in cells:
        x = c.read()
        if isinstance(x, Tensor):
            found[id(x)] = lambda _, c=c: c.read()
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor):
            found[id(x)] = lambda leaves, i=i: leaves[i]
    return found


def _gradient_finders(state: State) -> dict[int, Callable[[list[Any]], Any]]:
    """The same for gradients as parameters show them: a result that is one is the parameter's after each run."""
    found: dict[int, Callable[[list[Any]], Any]] = {}
    for p in state.all_parameters:
        leaf = leaf_of(p._local) if isinstance(p, DTensor) else None
        pending = leaf is not None and leaf.pending is not None
        for c in () if pending else shown_cells([p]):
            x = c.read()
            if x is not None and x is p.grad:
                found[id(x)] = lambda _, p=p: p.grad
    return found


def _effects(
    tape: Tape, places: list[tuple[Cell, Any]], shown: list[Cell]
) -> tuple[Effects, list[Value]]:
    bound: list[tuple[Cell, Form]] = []
    reset: list[tuple[Cell, Any]] = []
    outs: list[Value] = []
    for c, x in places:
        now = c.read()
        if now is x:
            continue
        if isinstance(now, Tensor) and is_fake(local_of(now)):
            if isinstance(now, torch.nn.Parameter) or (now.requires_grad and now.is_leaf):
                raise tape.refuse(f"{c.name} becomes another parameter in the step")
            outs.append(tape.value_of(_now(now)))
            bound.append((c, Form.like(now)))
        else:
            reset.append((c, now))
    touched = {id(c.holder) for c, _ in (*bound, *reset)}
    forgotten = [
        c
        for c in shown
        if id(c.holder) in touched
        or (isinstance(c.holder, DTensor) and id(c.holder._local) in touched)
    ]
    return Effects(bound, reset, forgotten, []), outs
