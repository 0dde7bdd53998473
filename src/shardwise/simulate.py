"""Run SPMD code on virtual ranks, in this process, with no launcher.

```python
def step(rank):
    mesh = shardwise.init_device_mesh("cpu", (2, 2))
    ...                                  # exactly what would run under torchrun

results = shardwise.simulate(step, world_size=4)
```

Every rank is a thread and one runs at a time, so a run is deterministic and a deadlock is an
error that says who waits for what. `comm.threads` has the rules.
"""

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
import inspect
from threading import Thread, get_ident
from typing import Any

import torch

from shardwise.comm.threads import ThreadsTransport, World
from shardwise.comm.transport import use
from shardwise.errors import AbortedError, CommError


def simulate(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``fn`` on every rank of a world of threads.

    Each rank starts with the caller's context variables, grad mode, autocast, default device,
    default dtype and torch RNG state, and has them for itself from there on. Afterwards the
    caller's RNG state and default dtype are those that rank 0 ended with.

    Args:
        fn: Called as ``fn(rank, *args)``, or as ``fn()`` when it takes no parameters.
        world_size: Number of ranks.
        *args: More arguments for ``fn``, the same objects on all ranks.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        CommError: ``world_size`` is less than 1.
        DeadlockError: Ranks wait for each other, or called different collectives.
        BaseException: What a rank raised first, with a note that says on which; the other ranks
            were stopped at their next collective.

    Example:
        >>> from shardwise.comm import current
        >>> def total(rank):
        ...     return current().all_reduce(torch.tensor(rank), (0, 1, 2)).item()
        >>> simulate(total, 3)
        [3, 3, 3]
    """
    if world_size < 1:
        raise CommError(f"a world needs at least one rank, not {world_size}.")
    call = _caller(fn, args)
    world = World(world_size)
    modes = _Modes()
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        error: BaseException | None = None
        world.threads[rank] = get_ident()
        world.enter(rank)
        try:
            with modes.entered(), use(ThreadsTransport(world, rank)):
                results[rank] = call(rank)
        except BaseException as raised:  # it is raised again in the caller's thread
            error = raised
        world.finish(rank, error)

    threads = [
        Thread(target=copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        world.start()
        world.done.acquire()
    except BaseException:
        world.failure = world.failure or (
            lambda: AbortedError("the simulation was interrupted.")
        )
        raise
    for thread in threads:
        thread.join()
    world.saved[0].restore()
    if world.origin is not None:
        rank, error = world.origin
        world.origin = None
        error.add_note(f"on rank {rank}")
        raise error
    return results


def _caller(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[int], Any]:
    """Bind ``args``; leave out the rank for a function without parameters."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin that does not say
        return lambda rank: fn(rank, *args)
    if parameters or args:
        return lambda rank: fn(rank, *args)
    return lambda rank: fn()


class _Modes:
    """Torch's thread-local modes, as the caller has them."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    def entered(self) -> ExitStack:
        """Enter the modes in this thread, until the stack is left."""
        stack = ExitStack()
        # One autograd thread per device would be shared by all ranks, and block in the first
        # collective of a backward.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if self._inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self._grad))
        if self._device != torch.device("cpu"):
            stack.enter_context(self._device)
        for device, dtype in self._autocast:
            stack.enter_context(torch.autocast(device, dtype))
        return stack
