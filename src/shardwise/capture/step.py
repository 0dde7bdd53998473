"""``capture``: a training step that is recorded once and then runs as one optimized graph.

```text
   call 1    eager                      makes what only a first step makes: optimizer state, meshes, programs
   call 2    record -> passes -> run    on fake tensors: nothing is sent, nothing of the user's is written
   call 3... run                        while the key is the same: layouts, shapes, modes, hyperparameters
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.capture.ir import Slot, Step, Value
from shardwise.capture.passes import DEFAULT, Pass
from shardwise.capture.run import executor
from shardwise.capture.state import Cell, State, local_of, shown_cells, slot_of
from shardwise.capture.tape import Tape
from shardwise.comm.transport import current
from shardwise.compat import is_fake, kernel_flags
from shardwise.errors import CaptureError
from shardwise.program.modes import mode
from shardwise.random.scope import stream_in_force
from shardwise.recording import recorder
from shardwise.route.cost import objective
from shardwise.tensor.dtensor import DTensor, wrap

MAX_STEPS = 16  # captured variants of one function


def capture(
    fn: Callable[..., Any] | None = None,
    *,
    passes: Sequence[Pass] | None = None,
    compile: str | None = None,  # noqa: A002  torch's name
    max_captures: int = MAX_STEPS,
) -> Any:
    """Capture a training step: forward, backward, clipping and optimizer as one graph.

    The first call runs eagerly, the second records, later ones run the recorded graph. Parameters, buffers,
    optimizer state, gradients, learning rates and random numbers are inputs of the graph, read at every call and
    updated in place. Another layout, shape, mode or hyperparameter (but the learning rate) records again.

    What the graph does is what the recorded call did: Python runs only while it is recorded. So print, count and
    step schedulers outside.

    Args:
        fn: The step: any function over DTensors, plain tensors, modules and optimizers. It may close over them.
        passes: What is done to the graph, in order; default `shardwise.capture.passes.DEFAULT`.
        compile: ``"inductor"`` hands the local parts to torch's compiler; None runs them op by op.
        max_captures: How many variants are kept; more raise, for then something changes at every call.

    Returns:
        A callable with the same arguments and results; results that are tensors have no history.

    Raises:
        CaptureError: The step depends on data in Python, or does what no later run could repeat. Nothing of the
            user's has changed then.

    Example:
        >>> step = shardwise.capture(train_step)
        >>> for batch in loader:
        ...     loss = step(batch)
        ...     scheduler.step()
    """
    if fn is None:
        return lambda f: capture(f, passes=passes, compile=compile, max_captures=max_captures)
    if compile not in (None, "inductor"):
        raise CaptureError(f"compile={compile!r} is not known.", tries=['compile="inductor"'])
    return Captured(fn, DEFAULT if passes is None else tuple(passes), compile, max_captures)


class Captured:
    """A function with its captured steps; see `capture`.

    Attributes:
        captures: How often it was recorded.
        calls: How often it was called.
        steps: The recorded steps, newest last: with all passes done, by key.
    """

    def __init__(
        self, fn: Callable[..., Any], passes: tuple[Pass, ...], compiler: str | None, most: int
    ) -> None:
        self.fn, self.passes, self.compiler, self.most = fn, passes, compiler, most
        self.captures = self.calls = 0
        self.steps: dict[Any, Recorded] = {}
        self._state: State | None = None
        self.__name__ = getattr(fn, "__name__", "step")
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if recorder() is not None:  # inside another captured step
            return self.fn(*args, **kwargs)
        self.calls += 1
        if self.calls == 1:
            return self.fn(*args, **kwargs)
        if self._state is None:
            self._state = State()
            self._state.look("", self.fn)
            self._state.look("arguments", [args, kwargs])
        if not self._state.ready():
            return self.fn(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        key = (tree, *map(_leaf_key, leaves), *_surroundings(self._state))
        found = self.steps.get(key)
        if found is None or not found.fits():
            if key not in self.steps and len(self.steps) >= self.most:
                raise CaptureError(
                    f"{self.__name__} was captured {len(self.steps)} times, and this call needs yet another "
                    "step: its arguments, modes or hyperparameters differ from all before.",
                    tries=[
                        "give sizes that change as padded tensors",
                        "capture(max_captures=...)",
                    ],
                )
            found = Recorded(self, self._state, args, kwargs)
            self.captures += 1
            self.steps[key] = found
        return found(leaves)

    @property
    def last(self) -> Recorded:
        """The step recorded last."""
        if not self.steps:
            raise CaptureError(
                f"{self.__name__} has not been captured yet: the first call runs eagerly, the second is recorded."
            )
        return list(self.steps.values())[-1]


def _leaf_key(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x._spec, x.requires_grad
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    try:
        hash(x)
    except TypeError:
        return id(x)
    return type(x), x


def _surroundings(state: State) -> tuple[Any, ...]:
    """What else decides what the step does."""
    return (
        current(),
        torch.is_grad_enabled(),
        mode(),
        kernel_flags(),
        torch.is_autocast_enabled("cpu"),
        stream_in_force(None),  # pyright: ignore[reportArgumentType]
        objective(),
        tuple([m.training for m in state.all_modules()]),
        tuple([(c.key, c.read()) for c in state.numbers() if not _lifted(c)]),
        tuple([p.requires_grad for _, p in state.parameters().values()]),
    )


def _lifted(cell: Cell) -> bool:
    """Whether a hyperparameter is an input of the graph: learning rates change all the time."""
    return cell.key == "lr"


class Recorded:
    """One recorded step.

    Attributes:
        raw: As recorded.
        step: After all passes.
        log: For each pass its name and the step after it.
    """

    def __init__(self, owner: Captured, state: State, args: Any, kwargs: Any) -> None:
        self._owner = owner
        self.raw, self._outs, self._tree = self._record(owner.fn, state, args, kwargs)
        self.log: list[tuple[str, Step]] = []
        step = self.raw
        for p in owner.passes:
            step = p(step)
            self.log.append((p.__name__, step))
        self.step = step
        self._run = _made(step, owner.compiler)
        self._getters = [slot.get for _, slot in step.inputs]
        self._known = [c.read() for c in self._fixed]

    def fits(self) -> bool:
        """Whether the places that it reads still hold what they held, or the like."""
        for cell, known in zip(self._fixed, self._known):
            now = cell.read()
            if now is not known and not _alike(now, known):
                return False
        self._known = [c.read() for c in self._fixed]
        return True

    def __call__(self, leaves: list[Any]) -> Any:
        """Run on other arguments of the same kind."""
        outs = self._run([get(leaves) for get in self._getters])
        n = len(self._outs)
        results = [
            made if spec is None else wrap(made, spec)
            for made, spec in zip(outs, self._specs)
        ]
        for cell, made in zip(self._bound, outs[n:]):
            cell.write(made)
        for cell, x in self._set:
            cell.write(x)
        for cell in self._forgotten:
            cell.write(None)
        flat = list(self._flat)
        for at, r in zip(self._outs, results):
            flat[at] = r
        return tree_unflatten(flat, self._tree)

    # ---- recording -----------------------------------------------------------------------------

    def _record(
        self, fn: Callable[..., Any], state: State, args: Any, kwargs: Any
    ) -> tuple[Step, list[int], Any]:
        cells = state.cells()
        before = [c.read() for c in cells]
        numbers = state.numbers()
        values = [c.read() for c in numbers]
        shown = list(shown_cells(p for _, p in state.parameters().values()))
        shown_before = [c.read() for c in shown]
        tape = Tape({}, current().rank)
        leaves, _ = tree_flatten((args, kwargs))
        for c, x in zip(cells, before):
            if isinstance(x, Tensor):
                tape.slots.setdefault(id(local_of(x)), slot_of(c))
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                layout = x._spec.layout if isinstance(x, DTensor) else None
                get = _local_argument(i) if isinstance(x, DTensor) else _argument(i)
                tape.slots[id(local_of(x))] = Slot(f"argument {i}", "argument", get, layout)
        keys_before = [set(o.state) for o in state.optimizers.values()]
        try:
            with tape.running():
                for c in numbers:
                    if _lifted(c) and type(c.read()) is float:
                        c.write(tape.lift_number(_number_slot(c)))
                result = fn(*args, **kwargs)
                flat, tree = tree_flatten(result)
                local_results = [local_of(r) for r in flat]
                outs = [i for i, r in enumerate(flat) if isinstance(r, (Tensor, torch.SymFloat))]
                self._specs = [
                    flat[i]._spec if isinstance(flat[i], DTensor) else None for i in outs
                ]
                out_values: list[Any] = [
                    tape.value_of(local_results[i])
                    if isinstance(flat[i], Tensor)
                    else flat[i].node.value
                    for i in outs
                ]
                self._bound: list[Cell] = []
                self._set: list[tuple[Cell, Any]] = []
                for c, x in zip(cells, before):
                    now = c.read()
                    if now is x:
                        continue
                    if isinstance(now, Tensor) and is_fake(local_of(now)):
                        if isinstance(now, DTensor):
                            raise tape.refuse(f"{c.name} becomes another DTensor in the step")
                        self._bound.append(c)
                        out_values.append(tape.value_of(now))
                    else:
                        self._set.append((c, now))
        finally:
            tape.restore()
            for c, x in zip(cells, before):
                if c.read() is not x:
                    c.write(x)
            changed = [
                c
                for c, x in zip(numbers, values)
                if not (_lifted(c) and isinstance(c.read(), torch.SymFloat))
                and c.read() != x
            ]
            for c, x in zip(numbers, values):
                c.write(x)
            for c, x in zip(shown, shown_before):
                c.write(x)
        if changed:
            raise CaptureError(
                f"this step cannot be captured: it changes {changed[0].name}, a Python number that a later run of "
                "the graph would not change.",
                tries=["call scheduler.step() after the captured step, not in it"],
            )
        for o, old in zip(state.optimizers.values(), keys_before):
            if set(o.state) != old:
                for p in set(o.state) - old:
                    del o.state[p]
                raise CaptureError(
                    "this step cannot be captured: an optimizer makes new state in it.",
                    tries=["run one eager step first"],
                )
        touched = {id(c.holder) for c in self._bound} | {id(c.holder) for c, _ in self._set}
        self._forgotten = [
            c for c in shown if id(c.holder) in touched or _local_touched(c.holder, touched)
        ]
        self._flat = [None if i in set(outs) else r for i, r in enumerate(flat)]
        used = {id(v) for v, _ in tape.inputs}
        self._fixed = [
            c
            for c, x in zip(cells, before)
            if isinstance(x, Tensor) and id(local_of(x)) in tape.slots and c.role == "state"
        ]
        assert used is not None, "inputs were lifted"
        step = Step(
            tuple(tape.nodes),
            tuple(tape.inputs),
            tuple(out_values),
            tape.next_index,
            tape.rank,
            tape,
        )
        return step, outs, tree


def _local_touched(holder: Any, touched: set[int]) -> bool:
    return isinstance(holder, DTensor) and id(holder._local) in touched


def _alike(now: Any, known: Any) -> bool:
    if isinstance(now, DTensor) or isinstance(known, DTensor):
        return (
            isinstance(now, DTensor)
            and isinstance(known, DTensor)
            and now._spec is known._spec
        )
    if isinstance(now, Tensor) and isinstance(known, Tensor):
        return (
            now.shape == known.shape
            and now.dtype == known.dtype
            and now.stride() == known.stride()
            and now.device == known.device
        )
    return False


def _argument(i: int) -> Callable[[Any], Any]:
    return lambda leaves: leaves[i]


def _local_argument(i: int) -> Callable[[Any], Any]:
    return lambda leaves: leaves[i]._local


def _number_slot(cell: Cell) -> Slot:
    holder, key = cell.holder, cell.key
    return Slot(cell.name, "number", lambda _: holder[key])


def _made(step: Step, compiler: str | None) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if compiler == "inductor":
        from shardwise.capture.inductor import compiled  # noqa: PLC0415  torch's compiler is slow to import

        return compiled(step)
    return executor(step)


@contextmanager
def _nothing() -> Any:
    yield


__all__ = ["Captured", "Recorded", "Value", "capture"]
