"""``capture``: a training step that is recorded once and then runs as one optimized graph.

```text
   call 1    eager                      makes what only a first step makes: optimizer state, meshes, programs
   call 2    record -> passes -> run    on fake tensors: nothing is sent, nothing of the user's is written
   call 3... run                        while the key is the same: layouts, shapes, modes, hyperparameters
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.check import agree, alike, group_of, lines_of, order_of, ranks_of
from shardwise.capture.inductor import compiled
from shardwise.capture.ir import Step
from shardwise.capture.passes import DEFAULT, Pass
from shardwise.capture.record import LIFTED_NUMBERS, Recording, record
from shardwise.capture.run import executor
from shardwise.capture.state import State
from shardwise.comm.transport import current
from shardwise.compat import autocast_dtype, kernel_flags, tree_flatten
from shardwise.errors import CaptureError
from shardwise.events import FallbackEvent, emit, user_site
from shardwise.program.modes import mode
from shardwise.random.scope import chosen_stream
from shardwise.recording import recorder
from shardwise.route.cost import objective
from shardwise.tensor.dtensor import DTensor

MAX_CAPTURES = 16
_DISAGREE = "the passes would send in another order on some rank; the step runs as recorded"


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
    return Captured(fn, DEFAULT if passes is None else tuple(passes), compile, max_captures)


class Captured:
    """A function with its captured steps; see `capture`.

    Attributes:
        fn: The function.
        passes: What is done to its graphs.
        compiler: ``"inductor"`` or None.
        captures: How often it was recorded.
        calls: How often it was called.
        steps: The captured steps by key, newest last.
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
        self.captures = self.calls = 0
        self.steps: dict[Any, CapturedStep] = {}
        self._state: State | None = None
        self.__name__ = getattr(fn, "__name__", "step")
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if recorder() is not None:  # within another captured step
            return self.fn(*args, **kwargs)
        self.calls += 1
        if self.calls == 1:
            return self.fn(*args, **kwargs)
        state = self._state
        if state is None:
            state = self._state = State.of(self.fn, args, kwargs)
        if not state.ready():
            return self.fn(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        key = (tree, *map(_leaf_key, leaves), *_surroundings(state))
        found = self.steps.get(key)
        if found is None or not found.fits():
            found = self._capture(key, args, kwargs)
        return found(leaves)

    def _capture(self, key: Any, args: Any, kwargs: Any) -> CapturedStep:
        if self.captures >= self.max_captures:
            raise CaptureError(
                f"{self.__name__} was captured {self.captures} times, and this call needs yet another step: its "
                "arguments, modes or hyperparameters differ from all before.",
                tries=[
                    "pad inputs whose sizes change",
                    f"capture(..., max_captures={2 * self.max_captures})",
                ],
            )
        state = self._state = State.of(self.fn, args, kwargs)
        transport = current()
        known = [*(c.read() for c in state.cells()), *tree_flatten((args, kwargs))[0]]
        ranks = ranks_of(x._spec.layout for x in known if isinstance(x, DTensor))
        try:
            recording = record(self.fn, state, args, kwargs)
        except Exception as error:
            agree(transport, ranks, [], f"{type(error).__name__}: {error}")
            raise
        ranks = ranks or group_of(recording.step)
        agree(transport, ranks, lines_of(recording.step), None)
        found = CapturedStep(recording, self.passes, self.compiler)
        if not alike(transport, ranks, order_of(found.step)):
            # Passes go by what a rank has recorded, which may differ where pieces are empty. As recorded all agree.
            emit(FallbackEvent(f"capture of {self.__name__}", _DISAGREE, user_site()))
            found = CapturedStep(recording, (), self.compiler)
        self.captures += 1
        self.steps[key] = found
        return found

    @property
    def last(self) -> CapturedStep:
        """The step captured last."""
        if not self.steps:
            raise CaptureError(
                f"{self.__name__} is not captured yet: the first call runs eagerly, the second is recorded."
            )
        return list(self.steps.values())[-1]


class CapturedStep:
    """One graph, ready to run.

    Attributes:
        recording: As recorded.
        log: For each pass its name and the step after it.
        step: After all passes.
    """

    def __init__(
        self, recording: Recording, passes: Sequence[Pass], compiler: str | None = None
    ) -> None:
        self.recording = recording
        self.log: list[tuple[str, Step]] = []
        step = recording.step
        for p in passes:
            step = p(step)
            self.log.append((_name_of(p), step))
        self.step = step
        self._run = compiled(step) if compiler == "inductor" else executor(step)
        self._getters = [slot.get for _, slot in step.inputs]
        self._known = [c.read() for c in recording.read]
        self._results = len(recording.results.places)

    def fits(self) -> bool:
        """Whether the places that it reads still hold what they held, or the like."""
        cells, known = self.recording.read, self._known
        for i, cell in enumerate(cells):
            now = cell.read()
            if now is not known[i]:
                if not _alike(now, known[i]):
                    return False
                known[i] = now
        return True

    def __call__(self, leaves: list[Any]) -> Any:
        """Run on the leaves of other arguments of the same kind."""
        outs = self._run([get(leaves) for get in self._getters])
        self.recording.effects.apply(outs[self._results :])
        return self.recording.results.rebuild(outs)


def _name_of(p: Pass) -> str:
    call = getattr(p, "func", p)  # of a functools.partial
    return getattr(call, "__name__", type(call).__name__)


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
        autocast_dtype("cpu"),
        kernel_flags(),
        chosen_stream(),
        objective(),
        tuple([m.training for m in state.all_modules]),
        state.fixed_numbers(LIFTED_NUMBERS),
        tuple([p.requires_grad for p in state.all_parameters]),
    )


def _alike(now: Any, known: Any) -> bool:
    if isinstance(now, DTensor) or isinstance(known, DTensor):
        both = isinstance(now, DTensor) and isinstance(known, DTensor)
        return both and now._spec is known._spec
    if isinstance(now, Tensor) and isinstance(known, Tensor):
        return (now.shape, now.dtype, now.stride(), now.device) == (
            known.shape,
            known.dtype,
            known.stride(),
            known.device,
        )
    return False
