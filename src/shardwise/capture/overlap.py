"""How the inputs of a step lie: a step that was recorded for some fits no others.

Two tensors over each other are one memory to the recorder, and what is written to one is seen in the other. Were they
apart when the step was recorded, its nodes may have changed places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwise.capture.ir import PLACED, Step, flatten


def overlaps(tensors: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """Which of them lie over each other: their places, and how many bytes the second begins behind the first.

    Cost: some 0.3 us a tensor.
    """
    ranges: list[tuple[int, int, int]] = []
    for i, x in enumerate(tensors):
        if isinstance(x, Tensor) and (size := _span(x)):
            start = x.data_ptr()
            ranges.append((start, start + size, i))
    ranges.sort()
    found: list[tuple[int, int, int]] = []
    open_ranges: list[tuple[int, int, int]] = []
    most = 0
    for start, end, i in ranges:
        if start < most:
            open_ranges = [r for r in open_ranges if r[1] > start]
            found += [
                (a[2], i, start - a[0]) if a[2] < i else (i, a[2], a[0] - start)
                for a in open_ranges
            ]
        else:
            open_ranges = []
        open_ranges.append((start, end, i))
        most = max(most, end)
    return tuple(sorted(found))


def _span(x: Tensor) -> int:
    """From its first to its last byte."""
    if x.is_contiguous() or not x.numel():
        return x.nbytes
    return (sum((n - 1) * by for n, by in zip(x.shape, x.stride())) + 1) * x.element_size()


def _form(x: Any) -> Any:
    """Dtype and strides of a gradient; its shape is that of its leaf."""
    if not isinstance(x, Tensor):
        return None
    return x.dtype, [by for n, by in zip(x.shape, x.stride()) if n != 1]


def geometry_of(step: Step) -> Callable[[Sequence[Any]], Any]:
    """A function of a run's inputs that gives what must be as it was recorded, beside what the key tells."""
    rooted = {n.args[0].root for n in flatten(step.nodes) if n.target in PLACED}
    placed = [i for i, (v, _) in enumerate(step.inputs) if v.root in rooted]
    grads = [i for i, (_, slot) in enumerate(step.inputs) if slot.role == "grad"]

    def geometry(inputs: Sequence[Any]) -> Any:
        return (
            overlaps(inputs),
            [inputs[i].storage_offset() for i in placed],
            [_form(inputs[i]) for i in grads],
        )

    return geometry
