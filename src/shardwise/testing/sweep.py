"""One call, every sharding: against the same call on one device.

``sweep(fn, x, y)`` lays the tensors out in every way (one at a time sharded on each dim or as a pending
sum of unequal addends, the rest replicated; then random combinations), runs ``fn`` on virtual ranks, and
compares values, shapes, dtypes and gradients with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.testing.calls import Call
from shardwise.testing.judge import Outcome, Reference, error_text, judge
from shardwise.testing.layouts import Combo, choices, combo_text, combos
from shardwise.testing.libraries import Shardwise, lay_out


@dataclass(frozen=True, slots=True)
class Failure:
    """What differed.

    Attributes:
        mesh: Shape of the mesh.
        combo: The placements of each tensor.
        what: The difference, or the exception.
    """

    mesh: tuple[int, ...]
    combo: Combo
    what: str

    def __str__(self) -> str:
        """One line."""
        return f"mesh {self.mesh} [{combo_text(self.combo)}]: {self.what}"


def sweep(
    fn: Callable[..., Any],
    *tensors: Tensor,
    meshes: Sequence[tuple[int, ...]] = ((2,), (4,), (2, 2)),
    extra: int = 4,
    seed: int = 0,
    grad: bool = True,
    twice: bool = False,
    tol: float = 1e-9,
    chosen: bool = False,
) -> list[Failure]:
    """All layouts of the arguments; returns what differed, empty when all is right.

    Args:
        fn: Takes the tensors; returns a tensor or a tree of tensors.
        *tensors: Plain arguments, float64 where floating.
        meshes: Mesh shapes.
        extra: Random combinations over all arguments, per mesh.
        seed: Of those.
        grad: Compare gradients too, of all floating arguments.
        twice: Compare gradients of gradients too.
        tol: Relative and absolute tolerance, in double precision.
        chosen: Cut dims at chosen sizes (units, all on one rank, more on each rank than on the one before) instead of evenly.

    Example:
        >>> sweep(torch.mul, torch.rand(3, 5).double(), torch.rand(5).double(), meshes=[(2,)])
        []
    """
    try:
        reference = _reference(fn, tensors, grad=grad, twice=twice, tol=tol)
    except Exception as error:
        error.add_note("from the call on one device")
        raise

    def todo(mesh: tuple[int, ...]) -> list[Combo]:
        ranks = mesh[-1] if chosen else 0
        return list(combos(tensors, len(mesh), extra, seed, chosen=ranks))

    return [
        Failure(outcome.mesh, outcome.combo, outcome.what)
        for mesh in meshes
        for outcome in judge(reference, Shardwise(), mesh, todo(mesh))
        if outcome.verdict != "right"
    ]


def check(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    mesh_shape: tuple[int, ...],
    combo: Combo,
    *,
    grad: bool = True,
    twice: bool = False,
    tol: float = 1e-9,
) -> str | None:
    """Compare one layout of the arguments with one device; None if all is equal.

    Args:
        fn: Takes the tensors; returns a tensor or a tree of tensors.
        tensors: Plain arguments.
        mesh_shape: Shape of the mesh of virtual ranks.
        combo: Placements of each argument.
        grad: Compare gradients too, of the floating arguments.
        twice: Compare gradients of gradients too.
        tol: Relative and absolute tolerance, in double precision.
    """
    reference = _reference(fn, tensors, grad=grad, twice=twice, tol=tol)
    (outcome,) = judge(reference, Shardwise(), mesh_shape, [combo])
    return outcome.what if outcome.verdict != "right" else None


def _reference(
    fn: Callable[..., Any], tensors: Sequence[Tensor], *, grad: bool, twice: bool, tol: float
) -> Reference:
    leaves = [
        t.detach().clone().requires_grad_(grad and (t.is_floating_point() or t.is_complex()))
        for t in tensors
    ]
    return Reference(Call(fn, leaves), grad=grad, twice=twice, tol=tol)


def bytes_moved(
    fn: Callable[..., Any], tensors: Sequence[Tensor], mesh_shape: tuple[int, ...], combo: Combo
) -> int:
    """Bytes that the ranks receive in the forward call alone, added up."""
    library = Shardwise()

    def on_rank() -> int:
        mesh = library.mesh(mesh_shape)
        args = [lay_out(t, mesh, ps) for t, ps in zip(tensors, combo)]
        with library.watch() as moved, torch.no_grad():
            fn(*args)
        return moved.bytes + moved.flag_bytes

    return sum(library.run(on_rank, math.prod(mesh_shape)))


__all__ = [
    "Combo",
    "Failure",
    "Outcome",
    "bytes_moved",
    "check",
    "choices",
    "combos",
    "error_text",
    "lay_out",
    "sweep",
]
