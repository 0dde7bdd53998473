"""An executor that compares each value of a run with what its fake tells: passes decide by fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.binding import binding
from shardwise.capture.ir import Node, Step, Value, flatten, substitute
from shardwise.compat import below_autograd, storage_id

_LATER = ("rng state", "aten.mkldnn_rnn_layer.default")  # their sizes are known at a run only


def truthful(step: Step) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The step as a function of its inputs, as `shardwise.capture.run.executor` gives it.

    Shapes, strides, dtypes must be those of the fakes, memory shared where roots are equal and only there, and what
    lies in one memory must lie there as the fakes do.
    """
    nodes = list(flatten(step.nodes))
    given = {v.root for v, _ in step.inputs}
    taken_over = {n.outs[0] for n in nodes if n.kind == "start" and n.info.get("owned")}
    loose = {n.outs[0].root for n in nodes if n.kind == "wait" and n.args[0] in taken_over}
    written = set(step.written_inputs)

    def run(inputs: Sequence[Any]) -> tuple[Any, ...]:
        env: dict[Value, Any] = {}
        memory: dict[int, tuple[int, int, int]] = {}

        def see(v: Value, x: Any, n: Node | None = None) -> None:
            env[v] = x
            if v.fake is None or (n is not None and n.name in _LATER):
                return
            assert _form(x) == _form(v.fake), f"{v} of {n}: {_form(x)}"
            if v.root in loose or not x.numel():
                return
            shift = _start(x) - _start(v.fake)
            here = storage_id(x), storage_id(v.fake), shift
            assert memory.setdefault(v.root, here) == here, f"{v} of {n} lies elsewhere"
            made = n is not None and n.kind == "call" and v.root not in given
            assert not (made and shift), f"{v} of {n} begins {shift} bytes later"

        with torch.no_grad(), below_autograd():
            for (v, _), x in zip(step.inputs, inputs, strict=True):
                see(v, x)
            for n in nodes:
                args, kwargs = substitute(n.args, env), substitute(n.kwargs, env)
                call: Any = binding(n) if n.kind == "call" else n.target
                got = args[0].wait() if n.kind == "wait" else call(*args, **kwargs)
                for v, x in _pairs(n.result, got):
                    if v in n.outs:
                        see(v, x, n)
        places = [m[0] for m in memory.values()]
        assert len(set(places)) == len(places), "one memory has two roots"
        touched = [x for (v, _), x in zip(step.inputs, inputs, strict=True) if v in written]
        if touched:
            torch.autograd.graph.increment_version(touched)
        return tuple([env[v] for v in step.outputs])

    return run


def _pairs(result: Any, got: Any) -> Iterator[tuple[Value, Any]]:
    if isinstance(result, Value):
        yield result, got
    elif isinstance(result, (tuple, list)):
        for r, g in zip(result, got, strict=True):
            yield from _pairs(r, g)


def _form(x: Tensor) -> Any:
    strides = [by for n, by in zip(x.shape, x.stride()) if n != 1] if x.numel() else []
    return x.shape, strides, x.dtype, x.device.type, x.is_conj(), x.is_neg()


def _start(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()
