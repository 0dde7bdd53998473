"""``capture``: a training step that is recorded once and then runs as one optimized graph.

```text
   call 1    eager                      makes what only a first step makes: optimizer state, meshes, programs
   call 2    record -> passes -> run    on fake tensors: nothing is sent, nothing of the user's is written
   call 3... run                        while the key is the same: layouts, shapes, modes, hyperparameters
```
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
import types
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.cells import Cell
from shardwise.capture.check import (
    agree,
    alike,
    digest_of,
    groups_of,
    leave_word,
    lines_of,
    meet,
    order_of,
    ranks_of,
)
from shardwise.capture.cost import is_heavy
from shardwise.capture.inductor import Compiled, compiled
from shardwise.capture.ir import Step
from shardwise.capture.order import facts_of, settle
from shardwise.capture.overlap import geometry_of
from shardwise.capture.passes import COMPILED, DEFAULT, Pass, late_mean
from shardwise.capture.record import LIFTED_NUMBERS, NewStateError, Recording, record
from shardwise.capture.replay import MISS, replayer
from shardwise.capture.run import executor
from shardwise.capture.state import State, liftable, local_of
from shardwise.comm.transport import current
from shardwise.compat import autocast_dtype, kernel_flags, storage_id, tree_flatten
from shardwise.errors import CaptureError
from shardwise.events import FallbackEvent, emit, user_site
from shardwise.program.modes import mode
from shardwise.random.scope import chosen_stream
from shardwise.recording import recorder
from shardwise.route.cost import objective
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradients import syncing

MAX_CAPTURES = 16
MAX_READY = 4  # steps that are tried at once
_DISAGREE = "the passes would send in another order on some rank; the step runs without some or all of them"


def capture(
    fn: Callable[..., Any] | None = None,
    *,
    passes: Sequence[Pass] | None = None,
    compile: str | None = None,
    max_captures: int = MAX_CAPTURES,
) -> Any:
    """Capture a training step: forward, backward, clipping and optimizer as one graph.

    The first call runs eagerly, the second is recorded, later ones run the recorded graph. Parameters, buffers,
    optimizer state, gradients, learning rates and random numbers are inputs of the graph, read at every call and
    updated in place. Another layout, shape, mode or hyperparameter (but the learning rate) is recorded again.

    What the graph does is what the recorded call did: Python runs only while it is recorded. So print, count and
    step schedulers outside.

    Args:
        fn: The step: any function over DTensors, plain tensors, modules and optimizers; it may close over them.
        passes: What is done to the graph, in order; default `shardwise.capture.passes.DEFAULT`.
        compile: ``"inductor"`` hands the local parts to torch's compiler (needs a C++ compiler; some ten seconds);
            None runs them call by call.
        max_captures: How many variants there may be; more raise, for then something changes at every call.

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
    if passes is None:
        passes = DEFAULT if compile is None else COMPILED
    return Captured(fn, tuple(passes), compile, max_captures)


class Captured:
    """A function with its captured steps; see `capture`.

    Attributes:
        fn: The function.
        passes: What is done to its graphs.
        compiler: ``"inductor"`` or None.
        max_captures: How many variants there may be.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        passes: tuple[Pass, ...],
        compiler: str | None,
        max_captures: int,
    ) -> None:
        self.fn, self.passes, self.compiler, self.max_captures = (
            fn,
            passes,
            compiler,
            max_captures,
        )
        self._of_ranks: dict[Any, _OfRank] = {}
        self._last: _OfRank | None = None
        self.__name__ = getattr(fn, "__name__", "step")
        self.__doc__ = fn.__doc__

    def __reduce__(self) -> Any:
        return Captured, (self.fn, self.passes, self.compiler, self.max_captures)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if recorder() is not None:  # within another captured step
            return self.fn(*args, **kwargs)
        own = self._own()
        own.calls += 1
        if own.calls == 1:
            return self.fn(*args, **kwargs)
        for _, replay in own.ready:
            result = replay(args, kwargs)
            if result is not MISS:
                return result
        leaves, tree = tree_flatten((args, kwargs))
        where = tuple([id(x) for x in leaves if _is_object(x)])
        state = own.states.get(where)
        moved = None if state is None else state.stale()
        if state is None or moved is not None:
            own.suspects = [] if state is None else state.moved_loose()
            state = own.states[where] = own.look(self.fn, args, kwargs)
            own.moved = moved.name if moved is not None else own.moved
        memory = _memory(leaves)
        key = (
            tree,
            *map(_leaf_key, leaves),
            shared(memory),
            *_surroundings(state, own.lifted),
        )
        found = own.steps.get(key)
        if found is None or not found.fits(memory, leaves):
            found = self._capture(own, key, args, kwargs, where, memory)
            if found is None:
                return self.fn(*args, **kwargs)
            state = own.states[where]
        own.watch(found, state, args, kwargs, memory)
        return found(leaves)

    def _own(self) -> _OfRank:
        transport = current()
        found = self._of_ranks.get(transport)
        if found is None:
            found = self._of_ranks[transport] = _OfRank()
        self._last = found
        return found

    def _capture(
        self, own: _OfRank, key: Any, args: Any, kwargs: Any, where: Any, memory: Any
    ) -> CapturedStep | None:
        """A new step; None if an optimizer is to make its state first, eagerly."""
        if own.captures + own.eager >= self.max_captures:
            raise CaptureError(
                f"{self.__name__} was captured {own.captures} times, and this call needs yet another step: its "
                "arguments, modes or hyperparameters differ from all before"
                + (f"; last, {own.moved} was another." if own.moved else "."),
                tries=[
                    "pad inputs whose sizes change",
                    "pass numbers that change as tensors",
                    f"capture(..., max_captures={2 * self.max_captures})",
                ],
            )
        state = own.states[where] = own.look(self.fn, args, kwargs)
        if own.vary(state):
            key = own.key_for(key, state)
        transport = current()
        known = [*(c.read() for c in state.cells()), *tree_flatten((args, kwargs))[0]]
        ranks = ranks_of(x._spec.layout for x in known if isinstance(x, DTensor))
        try:
            recording = self._record(own, state, args, kwargs)
        except NewStateError:
            if own.agreed:
                meet(transport, ranks)
            agree(
                transport,
                [ranks],
                ["an optimizer makes new state: the call runs eagerly"],
                None,
            )
            own.eager += 1
            return None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if own.agreed:  # this rank may be the only one that records
                leave_word(transport, ranks, text)
            else:
                agree(transport, [ranks], [], text)
            raise
        found = self._ready(own, recording, state, memory, groups_of(recording.step, ranks))
        own.captures += 1
        if own.ignore(recording) or own.compare_arrays(recording):
            state = own.states[where] = own.look(self.fn, args, kwargs)
            key = own.key_for(key, state)
        found.lie(tree_flatten((args, kwargs))[0])
        own.steps[key] = found
        return found

    def _ready(
        self, own: _OfRank, recording: Recording, state: State, memory: Any, groups: Any
    ) -> CapturedStep:
        """The recorded step with its passes done, in an order of collectives that all ranks have.

        What ranks have agreed on before they need not again: so one alone may record anew, because of a plain
        batch of another size.
        """
        transport, lines = current(), lines_of(recording.step)
        digest = digest_of(lines)
        known = own.agreed.get(digest)
        if known is None:
            if own.agreed:
                meet(transport, groups[0])
            facts = agree(transport, groups, lines, None, facts_of(recording.step, is_heavy))
        else:
            facts = known[0]
        settle(recording.step, facts)
        first = known is None
        if known is None:
            found, order = self._agreed(recording, state, memory, groups)
            own.agreed[digest] = facts, found.passes, order
        else:
            found = CapturedStep(recording, known[1], state, memory)
            order = order_of(found.step) if found.passes else ""
        if order != own.agreed[digest][2]:
            raise CaptureError(
                f"{self.__name__}: this rank would send in another order than the ranks have agreed on.",
                tries=[
                    "give all ranks batches of one shape",
                    "capture(..., passes=[simplify])",
                ],
            )
        try:
            found.prepare(self.compiler)
        except Exception as error:
            if first and self.compiler is not None:
                agree(transport, groups, [], f"{type(error).__name__}: {error}")
            raise
        if first and self.compiler is not None:  # lest one waits for a rank that cannot compile
            agree(transport, groups, [], None)
        return found

    def _agreed(
        self, recording: Recording, state: State, memory: Any, groups: Any
    ) -> tuple[CapturedStep, str]:
        """The step after passes that leave all ranks one order of collectives, and that order; as recorded if need be."""
        without = tuple(p for p in self.passes if p is not late_mean)
        for passes in dict.fromkeys((self.passes, without)):
            found = CapturedStep(recording, passes, state, memory)
            order = order_of(found.step)
            if alike(current(), groups, order):
                return found, order
            emit(FallbackEvent(f"capture of {self.__name__}", _DISAGREE, user_site()))
        return CapturedStep(recording, (), state, memory), ""

    def _record(self, own: _OfRank, state: State, args: Any, kwargs: Any) -> Recording:
        try:
            return record(self.fn, state, args, kwargs, own.lifted)
        except CaptureError as error:
            if isinstance(error, NewStateError) or own.lifted == LIFTED_NUMBERS:
                raise
        own.lifted, own.may_lift = LIFTED_NUMBERS, False  # it looks at them: a step for each
        return record(self.fn, state, args, kwargs, own.lifted)

    @property
    def calls(self) -> int:
        """How often this rank has called it."""
        return self._here.calls

    @property
    def captures(self) -> int:
        """How often this rank has recorded it."""
        return self._here.captures

    @property
    def steps(self) -> dict[Any, CapturedStep]:
        """The captured steps by key, newest last."""
        return self._here.steps

    @property
    def _here(self) -> _OfRank:
        return self._of_ranks.get(current()) or self._last or _OfRank()

    @property
    def last(self) -> CapturedStep:
        """The step captured last."""
        if not self.steps:
            raise CaptureError(
                f"{self.__name__} is not captured yet: the first call runs eagerly, the second is recorded."
            )
        return list(self.steps.values())[-1]


class _OfRank:
    """What one rank has of a captured function: virtual ranks may share the function.

    Attributes:
        calls: How often it was called.
        captures: How often it was recorded.
        eager: How often an optimizer made state after the first call.
        steps: By key.
        states: What it works on, by the objects among its arguments.
        lifted: Hyperparameters that are inputs: those that were seen to change, too.
        may_lift: Whether more may become inputs.
        moved: The place that was last seen to hold something else.
        agreed: Steps that the ranks have agreed on, by digest: the facts of the collectives, the passes, and the
            order after them.
        suspects: Loose places that held something else at the last look.
        ignored: Those that the step was seen not to depend on, with their holders.
        arrays: Whether the numbers in large arrays and lists count, too.
        ready: Steps that can be run at once, newest first, with what does it (``replay.py``).
    """

    def __init__(self) -> None:
        self.calls = self.captures = self.eager = 0
        self.steps: dict[Any, CapturedStep] = {}
        self.states: dict[Any, State] = {}
        self.lifted, self.may_lift = LIFTED_NUMBERS, True
        self.moved = ""
        self.agreed: dict[str, tuple[Any, tuple[Pass, ...], str]] = {}
        self.suspects: list[Cell] = []
        self.ignored: dict[tuple[int, Any], Any] = {}
        self.arrays = False
        self.ready: list[tuple[CapturedStep, Callable[..., Any]]] = []
        self._numbers: dict[str, Any] = {}

    def look(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> State:
        """What a function works on now."""
        return State.of(fn, args, kwargs, self.ignored, arrays=self.arrays)

    def vary(self, state: State) -> bool:
        """Make inputs of the hyperparameters that are not what they were at the last recording."""
        now = {c.name: (c.key, c.read()) for c in state.numbers()}
        before, self._numbers = self._numbers, now
        changed = {
            key
            for name, (key, x) in now.items()
            if name in before and liftable(x) and before[name][1] != x
        }
        if not self.may_lift or changed <= self.lifted:
            return False
        self.lifted = self.lifted | changed
        self.steps.clear()  # they took these for constants
        self.ready.clear()
        return True

    def key_for(self, key: tuple[Any, ...], state: State) -> tuple[Any, ...]:
        """The key with another state in it."""
        around = _surroundings(state, self.lifted)
        return (*key[: -len(around)], *around)

    def ignore(self, recording: Recording) -> bool:
        """Whether the loose places that hold something else count no more: a step like an earlier one has come of it."""
        suspects, self.suspects = self.suspects, []
        if not suspects or not any(recording.does_as(s.recording) for s in self.steps.values()):
            return False
        self.ignored.update({(id(c.holder), c.key): c.holder for c in suspects})
        return True

    def compare_arrays(self, recording: Recording) -> bool:
        """Whether large arrays count from now on: the step makes tensors of some."""
        if self.arrays or not recording.step.tape.from_arrays:
            return False
        self.arrays = True
        return True

    def watch(
        self, step: CapturedStep, state: State, args: Any, kwargs: Any, memory: Any
    ) -> None:
        """Make a quick way for calls like this one, which has gone the careful way; seldom, if that does not help."""
        step.missed += 1
        if step.missed < step.patience:
            return
        step.missed, step.patience = 0, 2 * step.patience
        known = shared(memory)

        def same_memory(leaves: Sequence[Any]) -> bool:
            return step.in_place(now := _memory(leaves)) and shared(now) == known

        made = replayer(step, state, self.lifted, args, kwargs, _modes, same_memory)
        others = [r for r in self.ready if r[0] is not step]
        self.ready = others if made is None else [(step, made), *others][:MAX_READY]


class CapturedStep:
    """One graph, ready to run.

    Attributes:
        recording: As recorded.
        passes: What was done to it.
        log: For each pass its name and the step after it.
        step: After all passes.
        compiled: Its parts, if they are compiled.
        execute: Runs it on its inputs, once it is prepared.
        missed: Calls that went the careful way since the last quick one was made.
        patience: How many of these before another is made.
    """

    def __init__(
        self,
        recording: Recording,
        passes: Sequence[Pass],
        state: State | None = None,
        memory: Sequence[Any] = (),
    ) -> None:
        self.recording, self.passes = recording, tuple(passes)
        self.state = state  # kept, so that no id of its objects is used twice
        self.log: list[tuple[str, Step]] = []
        step = recording.step
        for p in passes:
            step = p(step)
            self.log.append((_name_of(p), step))
        self.step = step
        self.missed, self.patience = 0, 1
        self.compiled: Compiled | None = None
        self.execute: Any = None
        self._getters = [slot.get for _, slot in step.inputs]
        self._cells = [c for c, _ in recording.read]
        self._known = [x for _, x in recording.read]
        self._kinds = list(map(_kind, self._known))
        self._roots = self._of_state()
        self._aliases = self._places(memory)
        self._geometry, self._lies = geometry_of(step), None
        self._results = len(recording.results.places)

    def prepare(self, compiler: str | None) -> None:
        """Make what runs it; ``"inductor"`` compiles the local parts.

        Raises:
            CaptureError: The compiler failed.
        """
        if compiler is None:
            self.execute = executor(self.step)
        else:
            self.compiled = compiled(self.step)
            self.execute = self.compiled.run

    def inputs(self, leaves: list[Any]) -> list[Any]:
        """What it takes at a run."""
        return [get(leaves) for get in self._getters]

    def lie(self, leaves: list[Any]) -> None:
        """Note how what it takes lies, as it was recorded."""
        self._lies = self._geometry(self.inputs(leaves))

    def lies(self, inputs: Sequence[Any]) -> bool:
        """Whether what it takes lies as it was recorded."""
        return self._geometry(inputs) == self._lies

    def fits(self, memory: Sequence[Any], leaves: list[Any]) -> bool:
        """Whether the places that it reads still hold what they held, or the like; ``memory`` is the arguments'."""
        return (
            self.fits_at(range(len(self._cells)))
            and self.in_place(memory)
            and self.guarded()
            and self.lies(self.inputs(leaves))
        )

    def fits_at(self, places: Iterable[int]) -> bool:
        """Whether some of the places still hold what they held, or the like."""
        known, kinds, replaced = self._known, self._kinds, False
        for i in places:
            now = self._cells[i].read()
            if now is not known[i]:
                if not _alike(now, known[i]) or _kind(now) != kinds[i]:
                    return False
                known[i], replaced = now, True
            elif kinds[i] is not None and _kind(now) != kinds[i]:
                return False
        if replaced:
            self._roots = self._of_state()
        return True

    def in_place(self, memory: Sequence[Any]) -> bool:
        """Whether the arguments' memory is that of the same places as ever, or of none."""
        return self._places(memory) == self._aliases

    def _places(self, memory: Sequence[Any]) -> list[Any]:
        roots = self._roots
        return [(roots[root], at) if root in roots else None for root, at in memory]

    def guarded(self) -> bool:
        """Whether hyperparameters compare with constants as they did."""
        guards = self.recording.guards
        return all(
            bool(compare(slot.get(None), x)) is is_so for slot, compare, x, is_so in guards
        )

    def _of_state(self) -> dict[int, int]:
        """Memory of the state: the first place that lies in it."""
        roots: dict[int, int] = {}
        for i, x in enumerate(self._known):
            if isinstance(x, Tensor):
                roots.setdefault(storage_id(local_of(x)), i)
        return roots

    def __call__(self, leaves: list[Any]) -> Any:
        """Run on the leaves of other arguments of the same kind."""
        outs = self.execute(self.inputs(leaves))
        self.recording.effects.apply(outs[self._results :], leaves)
        return self.recording.results.rebuild(outs, leaves)


def _name_of(p: Pass) -> str:
    call = getattr(p, "func", p)  # of a functools.partial
    return getattr(call, "__name__", type(call).__name__)


def _is_object(x: Any) -> bool:
    return not (x is None or isinstance(x, (Tensor, str, bytes, int, float)))


def _memory(leaves: Sequence[Any]) -> list[tuple[int, int]]:
    """Where the arguments' tensors lie: memory, and place in it."""
    found = []
    for x in leaves:
        if isinstance(x, Tensor):
            local = local_of(x)
            found.append((storage_id(local), local.storage_offset()))
    return found


def shared(memory: list[tuple[int, int]]) -> tuple[Any, ...] | None:
    """Which of the arguments share memory, and how; None if none do."""
    first: dict[int, int] = {}
    for i, (root, _) in enumerate(memory):
        first.setdefault(root, i)
    if len(first) == len(memory):
        return None
    return tuple([(first[root], offset) for root, offset in memory])


class _Same:
    """An object that has no hash, as part of a key: itself alone is equal to it."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)


def _leaf_key(x: Any) -> Any:
    if isinstance(x, DTensor):
        local = x._local
        graded = local.requires_grad and x.is_leaf and x.grad is not None
        return (
            x._spec,
            local.requires_grad,
            graded,
            local.stride(),
            local.is_conj(),
            local.is_neg(),
        )
    if isinstance(x, Tensor):
        return (
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            x.requires_grad,
            x.requires_grad and x.is_leaf and x.grad is not None,
            x.is_conj(),
            x.is_neg(),
        )
    if type(x).__module__ == "numpy" and hasattr(x, "__array_interface__") and x.ndim:
        raise CaptureError(
            "a numpy array cannot be an argument of a captured step: its values would be those of the recorded call.",
            tries=["torch.from_numpy(x), outside the step"],
        )
    if type(x) is float:
        return float, repr(x)  # 0.0 and -0.0 are equal, and no nan is
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return type(x), x


def _modes() -> tuple[Any, ...]:
    """What is set outside of what the function works on."""
    transport = current()
    return (
        transport,
        transport.state.get("module_settings"),  # of fully sharded modules
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        mode(),
        autocast_dtype("cpu"),
        kernel_flags(),
        chosen_stream(),
        objective(),
        syncing(),
    )


def _surroundings(state: State, lifted: Collection[str]) -> tuple[Any, ...]:
    """What else decides what the step does; what is added here is added to ``replay.py``, too."""
    return (
        _modes(),
        state.signature(),
        tuple([m.training for m in state.all_modules]),
        state.fixed_numbers(lifted),
        tuple([p.requires_grad for p in state.all_parameters]),
        state.grads_there(),
    )


def _kind(x: Any) -> Any:
    """What a tensor may change while it remains itself; None if nothing of it is looked at."""
    if isinstance(x, DTensor):
        return x._spec, x._local.stride()
    return (x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else None


def _alike(now: Any, known: Any) -> bool:
    """Whether another tensor may take the place of one; a leaf may not, for it has a gradient and a hook."""
    if not (isinstance(now, Tensor) and isinstance(known, Tensor)):
        return False
    a, b = local_of(now), local_of(known)
    if (
        isinstance(now, DTensor) != isinstance(known, DTensor)
        or a.requires_grad
        or b.requires_grad
    ):
        return False
    return (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
