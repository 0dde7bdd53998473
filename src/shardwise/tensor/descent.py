"""The lower rungs of the ladder for one call: traced into ATen calls, else gathered and run whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.compat import is_autocast_enabled, kernel_flags
from shardwise.errors import ShardError, StrictError
from shardwise.events import FallbackEvent, emit, observing, user_site
from shardwise.program.compile import fill
from shardwise.program.lower import GraphProgram, lower
from shardwise.program.modes import strict_mode
from shardwise.program.trace import trace
from shardwise.rules.norm import HIDDEN_WRITES
from shardwise.tensor.casts import onto
from shardwise.tensor.dtensor import wrap
from shardwise.tensor.whole import run_whole

Run = Callable[[Any], Any]  # of a Call


class Descent:
    """A call that no rule answers for, compiled once per set of autograd and kernel flags.

    What a trace holds depends on more than the layouts: which arguments require grad, the kernels that are
    allowed, and the value of every number. So this has a second key under the first.
    """

    __slots__ = ("by_flags", "entry", "func", "operands")

    def __init__(self, func: Any, entry: Any, operands: Callable[[Any, Any], Any]) -> None:
        self.func, self.entry, self.operands = func, entry, operands
        self.by_flags: dict[Any, Run] = {}

    def __call__(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Run the call, compiling it first if need be."""
        flags = (
            torch.is_grad_enabled(),
            tuple(
                (t.requires_grad, not torch.is_grad_enabled() or t.is_leaf)
                for t in call.tensors
            ),
            is_autocast_enabled(),
            kernel_flags(),
            _numbers(args, kwargs) if self.entry is not None and self.entry.lifts else None,
        )
        run = self.by_flags.get(flags)
        if run is None:
            if len(self.by_flags) > 256:
                self.by_flags.clear()
            run = self.by_flags[flags] = self._compile(call)
        return run(call)

    def _compile(self, call: Any) -> Run:
        operands = self.operands(call, self.func)
        graph = None
        if not torch.is_inference_mode_enabled() and self.func not in HIDDEN_WRITES:
            graph = trace(self.func, operands, call.tree, call.kwargs)
        if graph is None or not graph.nodes:
            return lambda call: run_whole(self.func, call.tensors, call.tree, call.kwargs)
        program = lower(
            graph, operands, call.transport, getattr(self.func, "__name__", str(self.func))
        )
        mesh = operands[0].layout.mesh
        checked: list[bool] = []

        def run(call: Any) -> Any:
            _report(program)
            registers = program.run([onto(t, mesh) for t in call.tensors])
            if not checked:
                _check_shapes(program, registers)
                checked.append(True)
            return fill(program.result, _Wrapped(program, registers))

        return run


class _Wrapped:
    """Wraps the registers that the result asks for."""

    def __init__(self, program: GraphProgram, registers: list[Any]) -> None:
        self.program, self.registers = program, registers

    def __getitem__(self, index: int) -> Tensor:
        spec = self.program.specs[index]
        local = self.registers[index]
        if spec.stride is None and not local.is_contiguous():
            local = local.contiguous()
        return wrap(local, spec)


def _report(program: GraphProgram) -> None:
    if not program.gathered:
        return
    what = ", ".join(dict.fromkeys(program.gathered))
    if strict_mode():
        raise StrictError(
            f"{program.name}: no rule for {what} in this layout, and strict() forbids to gather.",
            tries=["redistribute the operand to Replicate() first, if the gather is meant"],
        )
    if observing():
        emit(FallbackEvent(program.name, f"no rule for {what} in this layout", user_site()))


def _check_shapes(program: GraphProgram, registers: list[Any]) -> None:
    for index, spec in program.specs.items():
        if spec.coord is not None and registers[index].shape != spec.local_shape:
            raise ShardError(
                f"{program.name}: the local result has shape {tuple(registers[index].shape)}, the layout "
                f"{spec.layout} asks for {tuple(spec.local_shape)} here; a rule is wrong"
            )


def _numbers(args: Any, kwargs: Any) -> tuple[str, ...]:
    found: list[str] = []

    def visit(x: Any) -> None:
        if isinstance(x, (float, complex)):
            found.append(repr(x))
        elif isinstance(x, (tuple, list)):
            for y in x:
                visit(y)

    visit(args)
    visit(tuple(kwargs.values()))
    return tuple(found)
