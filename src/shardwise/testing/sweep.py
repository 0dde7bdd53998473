"""One call, every sharding: against the same call on one device.

``sweep(fn, x, y)`` lays the tensors out in every way (one at a time sharded on each dim or as a pending
sum of unequal addends, the rest replicated; then random combinations), runs ``fn`` on virtual ranks, and
compares values, shapes, dtypes and gradients with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
import random
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.meshes import init_device_mesh
from shardwise.events import CommLog
from shardwise.layout.placement import Partial, Placement, Replicate, Shard
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.dtensor import DTensor

Combo = tuple[tuple[Placement, ...], ...]  # for each tensor, one placement per mesh axis


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
        placed = "; ".join(",".join(map(str, ps)) for ps in self.combo)
        return f"mesh {self.mesh} [{placed}]: {self.what}"


def choices(t: Tensor) -> list[Placement]:
    """What one axis can do to a tensor."""
    out: list[Placement] = [Replicate(), *(Shard(d) for d in range(t.ndim))]
    return [*out, Partial()] if t.is_floating_point() or t.is_complex() else out


def combos(tensors: Sequence[Tensor], axes: int, extra: int, seed: int) -> Iterator[Combo]:
    """One tensor at a time in every placement on the last axis, then ``extra`` random combinations."""
    whole = tuple((Replicate(),) * axes for _ in tensors)
    yield whole
    for i, t in enumerate(tensors):
        for p in choices(t)[1:]:
            one = (*(Replicate(),) * (axes - 1), p)
            yield (*whole[:i], one, *whole[i + 1 :])
    rng = random.Random(seed)
    for _ in range(extra):
        yield tuple(tuple(rng.choice(choices(t)) for _ in range(axes)) for t in tensors)


def lay_out(t: Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    """A leaf with these placements; a pending sum has unequal addends."""
    settled = [Replicate() if p.is_partial() else p for p in placements]
    x = distribute_tensor(t, mesh, settled, src_data_rank=None)
    if any(p.is_partial() for p in placements):
        local = x.to_local().clone()
        coord = mesh.get_coordinate()
        for axis, p in enumerate(placements):
            if p.is_partial():
                n = mesh.shape[axis]
                weights = [float(i + 1) for i in range(n - 1)]
                weights.append(1.0 - sum(weights))
                local = local * weights[coord[axis]]
        x = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=t.shape, stride=x.layout.stride
        )
    return x.detach()  # pyright: ignore[reportReturnType]


def _results(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [y for x in value for y in _results(x)]
    if isinstance(value, dict):
        return [y for x in value.values() for y in _results(x)]
    return [value]


def check(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    mesh_shape: tuple[int, ...],
    combo: Combo,
    *,
    grad: bool = True,
    tol: float = 1e-9,
) -> str | None:
    """Compare one layout of the arguments with one device; None if all is equal.

    Args:
        fn: Takes the tensors; returns a tensor or a tree of tensors.
        tensors: Plain arguments.
        mesh_shape: Shape of the mesh of virtual ranks.
        combo: Placements of each argument.
        grad: Compare gradients too, of the floating arguments.
        tol: Relative and absolute tolerance.
    """
    plain = [t.detach().clone().requires_grad_(grad and t.is_floating_point()) for t in tensors]
    state = torch.get_rng_state()
    want = _results(fn(*plain))
    torch.set_rng_state(state)
    seeds = [
        torch.randn_like(w) if isinstance(w, Tensor) and w.requires_grad else None for w in want
    ]
    torch.set_rng_state(state)
    with_grad = [(w, s) for w, s in zip(want, seeds) if s is not None]
    if with_grad:
        torch.autograd.backward([w for w, _ in with_grad], [s for _, s in with_grad])

    def on_rank() -> str | None:
        mesh = init_device_mesh("cpu", mesh_shape)
        args = [lay_out(t, mesh, ps) for t, ps in zip(tensors, combo)]
        for a, p in zip(args, plain):
            a.requires_grad_(p.requires_grad)
        now = torch.get_rng_state()
        fn(*args)  # compiles: what is compared below is the warm call
        torch.set_rng_state(now)
        got = _results(fn(*args))
        if len(got) != len(want):
            return f"{len(got)} results, want {len(want)}"
        for i, (g, w) in enumerate(zip(got, want)):
            if (bad := _differs(g, w, tol)) is not None:
                return f"result {i}: {bad}"
        outs = [(g, s) for g, s in zip(got, seeds) if s is not None]
        if not outs:
            return None
        if any(not g.requires_grad for g, _ in outs):
            return "a result that should require grad does not"
        torch.autograd.backward(
            [g for g, _ in outs], [distribute_tensor(s, mesh) for _, s in outs]
        )
        for i, (a, p) in enumerate(zip(args, plain)):
            if p.grad is None:
                if a.grad is not None and a.grad.full_tensor().abs().sum() != 0:
                    return f"gradient {i}: there is one, want none"
            elif a.grad is None:
                return f"gradient {i}: there is none"
            elif (bad := _differs(a.grad, p.grad, tol)) is not None:
                return f"gradient {i}: {bad}"
        return None

    n = 1
    for k in mesh_shape:
        n *= k
    bad = [b for b in simulate(on_rank, n) if b is not None]
    return bad[0] if bad else None


def _differs(got: Any, want: Any, tol: float) -> str | None:
    if not isinstance(want, Tensor):
        return None if got == want else f"{got!r}, want {want!r}"
    if not isinstance(got, Tensor):
        return f"{type(got).__name__}, want a tensor"
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, want {want.dtype}"
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    whole, want = whole.detach(), want.detach()
    if whole.shape != want.shape:
        return f"full_tensor has shape {tuple(whole.shape)}, want {tuple(want.shape)}"
    if not torch.allclose(whole, want, rtol=tol, atol=tol, equal_nan=True):
        if want.is_floating_point() or want.is_complex():
            return f"wrong values (largest difference {(whole - want).abs().max().item():.3g})"
        return f"wrong values ({int((whole != want).sum())} of {want.numel()} differ)"
    return None


def sweep(
    fn: Callable[..., Any],
    *tensors: Tensor,
    meshes: Sequence[tuple[int, ...]] = ((2,), (4,), (2, 2)),
    extra: int = 4,
    seed: int = 0,
    grad: bool = True,
    tol: float = 1e-9,
) -> list[Failure]:
    """All layouts of the arguments; returns what differed, empty when all is right.

    Args:
        fn: Takes the tensors; returns a tensor or a tree of tensors.
        *tensors: Plain arguments, float64 where floating.
        meshes: Mesh shapes.
        extra: Random combinations over all arguments, per mesh.
        seed: Of those.
        grad: Compare gradients too.
        tol: Relative and absolute tolerance.
    """
    out: list[Failure] = []
    for shape in meshes:
        for combo in combos(tensors, len(shape), extra, seed):
            try:
                bad = check(fn, tensors, shape, combo, grad=grad, tol=tol)
            except Exception as error:  # every failure is reported, none stops the sweep
                bad = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if bad is not None:
                out.append(Failure(shape, combo, bad))
    return out


def bytes_moved(
    fn: Callable[..., Any], tensors: Sequence[Tensor], mesh_shape: tuple[int, ...], combo: Combo
) -> int:
    """Bytes that the ranks receive in the forward call alone."""

    def on_rank() -> int:
        mesh = init_device_mesh("cpu", mesh_shape)
        args = [lay_out(t, mesh, ps) for t, ps in zip(tensors, combo)]
        with CommLog() as log, torch.no_grad():
            fn(*args)
        return log.bytes

    n = 1
    for k in mesh_shape:
        n *= k
    return sum(simulate(on_rank, n))


__all__ = ["Combo", "Failure", "bytes_moved", "check", "choices", "combos", "lay_out", "sweep"]
