"""One call under many layouts, against the same call on one device.

```text
   Reference(call)                     plain values, gradients, gradients of gradients
       |
   judge(reference, library, mesh, combos)      on every rank, for every combo:
       cold call, values compared;  warm call, bytes counted, values compared, backward, gradients compared
       -->  Outcome per combo:  right | wrong | error | hang
```

All ranks go through the same stages whatever one of them finds, so that a wrong value on one rank is reported as
that and not as a deadlock. Combos of one mesh share one run; when a run dies, its combos run again one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import math
from typing import Any
import warnings

import torch
from torch import Tensor

from shardwise.errors import AbortedError, DeadlockError
from shardwise.layout.placement import Replicate
from shardwise.testing.calls import Call, results_of
from shardwise.testing.layouts import Combo
from shardwise.testing.libraries import Library, Moved, lay_out

TOLERANCE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 2e-4,
    torch.complex64: 2e-4,
    torch.float16: 3e-2,
    torch.bfloat16: 5e-2,
    torch.complex32: 5e-2,
}
"""Relative and absolute. Sums in another order stay far below; a wrong element does not."""

_EXACT = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


@dataclass(slots=True)
class Outcome:
    """What became of a call under one layout.

    Attributes:
        mesh: Shape of the mesh.
        combo: Placements of each tensor.
        verdict: "right", "wrong" (another value, shape, dtype or gradient), "error" or "hang".
        what: The difference or the exception.
        moved: What the busiest rank moved in the warm forward call.
        pending: A result is a pending sum.
    """

    mesh: tuple[int, ...]
    combo: Combo
    verdict: str = "right"
    what: str = ""
    moved: Moved = field(default_factory=Moved)
    pending: bool = False


class Reference:
    """What one device answers.

    Args:
        call: The call.
        grad: Differentiate it.
        twice: Differentiate the gradients too.
        tol: Relative and absolute; default: by dtype, `TOLERANCE`.
        seed: Of torch's generator before the call.

    Raises:
        Exception: What the plain call raises.
    """

    def __init__(
        self,
        call: Call,
        *,
        grad: bool = True,
        twice: bool = False,
        tol: float | None = None,
        seed: int = 7,
    ) -> None:
        self.call, self.twice, self.tol = call, False, tol
        self.flags = [grad and t.requires_grad for t in call.tensors]
        self.plain = _leaves(call.tensors, self.flags)
        torch.manual_seed(seed)
        self.state = torch.get_rng_state()
        value = call.fn(*self.plain)
        self.want = results_of(value)
        self.rng_after = torch.get_rng_state()
        generator = torch.Generator().manual_seed(5)
        parts = results_of(call.post(value))
        self.seeds = [_seed(w, generator) for w in parts]
        self.seeds2: list[Tensor | None] = []
        self.grads: list[Tensor | None] = [None] * len(self.plain)
        self.grads2 = self.grads
        if not any(s is not None for s in self.seeds):
            return
        self.grads = gradients(parts, self.seeds, self.plain, create_graph=twice)
        if twice and any(g is not None and g.requires_grad for g in self.grads):
            self.twice = True
            self.seeds2 = [_seed(g, generator) for g in self.grads]
            self.grads2 = gradients(self.grads, self.seeds2, self.plain, create_graph=False)

    @property
    def differentiates(self) -> bool:
        """Whether gradients are compared."""
        return any(s is not None for s in self.seeds)


def _leaves(tensors: Sequence[Tensor], flags: Sequence[bool]) -> list[Tensor]:
    return [
        t.detach().clone(memory_format=torch.preserve_format).requires_grad_(flag)
        for t, flag in zip(tensors, flags)
    ]


def _seed(w: Any, generator: torch.Generator) -> Tensor | None:
    if not isinstance(w, Tensor) or not w.requires_grad:
        return None
    return torch.randn(w.shape, dtype=w.dtype, generator=generator)


def gradients(
    outs: Sequence[Any],
    seeds: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    *,
    create_graph: bool,
) -> list[Tensor | None]:
    """`torch.autograd.grad` for those that take part; None where nothing arrives."""
    chosen = [(o, s) for o, s in zip(outs, seeds) if s is not None and o.requires_grad]
    if not chosen:  # none depends on the leaves: a gradient that is constant
        return [None] * len(leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    got = iter(
        torch.autograd.grad(
            [o for o, _ in chosen],
            wanted,
            [s for _, s in chosen],
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return [next(got) if leaf.requires_grad else None for leaf in leaves]


def judge(
    reference: Reference, library: Library, mesh: tuple[int, ...], combos: Sequence[Combo]
) -> list[Outcome]:
    """Run the call under each layout.

    Args:
        reference: The call and its plain answer.
        library: Who runs it.
        mesh: Shape of the mesh.
        combos: Placements of the tensors, each with one per mesh axis.
    """
    n = math.prod(mesh)
    raised: list[str] = []  # what some rank raised, for when the others wait for it in vain
    try:
        ranks = library.run(lambda: _on_rank(reference, library, mesh, combos, raised), n)
    except Exception as error:
        if len(combos) > 1:
            return [o for combo in combos for o in judge(reference, library, mesh, [combo])]
        verdict = "hang" if isinstance(error, (DeadlockError, AbortedError)) else "error"
        what = "; before that one raised ".join([error_text(error), *raised[:1]])
        return [Outcome(mesh, combos[0], verdict, what)]
    return [_merged(list(outcomes)) for outcomes in zip(*ranks)]


def _merged(outcomes: list[Outcome]) -> Outcome:
    """The worst verdict of all ranks, and the most that one moved."""
    worst = max(outcomes, key=lambda o: ("right", "error", "wrong", "hang").index(o.verdict))
    worst.moved = max((o.moved for o in outcomes), key=lambda m: (m.bytes, len(m.kinds)))
    if worst.verdict == "error" and any(o.verdict != "error" for o in outcomes):
        worst.what = "on some ranks only: " + worst.what
    return worst


def error_text(error: BaseException) -> str:
    """Class and first line; of a deadlock all, since the others say who waits for what."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines) if isinstance(error, DeadlockError) else lines[0]
    return f"{type(error).__name__}: {text}"


def _on_rank(
    reference: Reference,
    library: Library,
    shape: tuple[int, ...],
    combos: Sequence[Combo],
    raised: list[str],
) -> list[Outcome]:
    mesh = library.mesh(shape)
    out = []
    for combo in combos:
        outcome = Outcome(shape, combo)
        try:
            with library.random_like_torch(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                differences = _trial(reference, library, mesh, outcome)
        except (DeadlockError, AbortedError):
            raise
        except Exception as error:
            outcome.verdict, outcome.what = "error", error_text(error)
            raised.append(outcome.what)
        else:
            if differences:
                outcome.verdict, outcome.what = "wrong", differences[0]
        out.append(outcome)
    return out


def _trial(reference: Reference, library: Library, mesh: Any, outcome: Outcome) -> list[str]:
    """The stages of one check; returns what differed. Collective: no rank leaves early."""
    call, seeds = reference.call, reference.seeds

    def run() -> tuple[list[Any], Any]:
        args = [lay_out(t, mesh, ps, library) for t, ps in zip(call.tensors, outcome.combo)]
        for arg, flag in zip(args, reference.flags):
            arg.requires_grad_(flag)
        torch.set_rng_state(reference.state)
        return args, call.fn(*args)

    bad = [f"first call, {b}" for b in _compare(run()[1], reference, library)]
    with library.watch() as moved:
        args, value = run()
    outcome.moved = moved
    if call.random and not torch.equal(torch.get_rng_state(), reference.rng_after):
        bad.append("the generator is not where plain torch leaves it")
    outcome.pending = any(
        any(p.is_partial() for p in r.placements)  # pyright: ignore[reportAttributeAccessIssue]
        for r in results_of(value)
        if library.is_dtensor(r)
    )
    bad += _compare(value, reference, library)
    if not reference.differentiates:
        return bad

    def whole(s: Tensor | None) -> Tensor | None:
        return None if s is None else library.distribute(s, mesh, [Replicate()] * mesh.ndim)

    outs = results_of(call.post(value))
    lost = [s is not None and not o.requires_grad for o, s in zip(outs, seeds)]
    if any(lost):
        return [*bad, "a result that should require grad does not"]
    grads = gradients(outs, [whole(s) for s in seeds], args, create_graph=reference.twice)
    bad += _compare_gradients("gradient", grads, reference.grads, reference.tol)
    if reference.twice:
        seeds2 = [None if g is None else whole(s) for g, s in zip(grads, reference.seeds2)]
        grads2 = gradients(grads, seeds2, args, create_graph=False)
        bad += _compare_gradients("second gradient", grads2, reference.grads2, reference.tol)
    return bad


def _compare(value: Any, reference: Reference, library: Library) -> list[str]:
    got, want, values = results_of(value), reference.want, not reference.call.uninitialized
    if len(got) != len(want):
        return [f"{len(got)} results, want {len(want)}"]
    bad = []
    for i, (g, w) in enumerate(zip(got, want)):
        if isinstance(w, Tensor) and isinstance(g, Tensor) and not library.is_dtensor(g):
            bad.append(f"result {i} is a plain tensor")
        elif (
            isinstance(w, Tensor)
            and isinstance(g, Tensor)
            and g.requires_grad != w.requires_grad
        ):
            bad.append(
                f"result {i}: requires_grad is {g.requires_grad}, want {w.requires_grad}"
            )
        elif (text := difference(g, w, tol=reference.tol, values=values)) is not None:
            bad.append(f"result {i}: {text}")
    return bad


def _compare_gradients(
    name: str, got: Sequence[Any], want: Sequence[Tensor | None], tol: float | None
) -> list[str]:
    bad = []
    for i, (g, w) in enumerate(zip(got, want)):
        if w is None:
            if g is not None and g.detach().full_tensor().abs().sum() != 0:
                bad.append(f"{name} {i}: there is one, want none")
        elif g is None:
            if w.detach().abs().sum() != 0:
                bad.append(f"{name} {i}: there is none")
        elif (text := difference(g, w, tol=tol, scale=10.0)) is not None:
            bad.append(f"{name} {i}: {text}")
    return bad


def difference(
    got: Any, want: Any, *, tol: float | None = None, scale: float = 1.0, values: bool = True
) -> str | None:
    """What differs between a result and the plain one; None if nothing does.

    Args:
        got: A distributed tensor (then `full_tensor` is called, on every rank), or anything else.
        want: The plain one.
        tol: Relative and absolute, for double precision; default: by dtype, `TOLERANCE`.
        scale: Times the default tolerance.
        values: Compare values, not only shape and dtype.
    """
    if not isinstance(want, Tensor):
        return _difference_of_numbers(got, want)
    if not isinstance(got, Tensor):
        return f"{type(got).__name__}, want a tensor"
    whole = got.detach()
    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole  # pyright: ignore
    want = want.detach()
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, want {want.dtype}"
    if whole.shape != want.shape or whole.dtype != want.dtype:
        return f"full_tensor is {whole.dtype} {tuple(whole.shape)}, want {want.dtype} {tuple(want.shape)}"
    if not values:
        return None
    if tol is None or want.dtype not in (torch.float64, torch.complex128):
        tol = max(tol or 0.0, TOLERANCE.get(want.dtype, 0.0) * scale)
    if want.dtype in _EXACT or want.dtype == torch.complex32:
        whole, want = whole.to(torch.complex64), want.to(torch.complex64)
    if torch.allclose(whole, want, rtol=tol, atol=tol, equal_nan=True):
        return None
    if want.is_floating_point() or want.is_complex():
        return f"wrong values (largest difference {(whole - want).abs().max().item():.3g})"
    return f"wrong values ({int((whole != want).sum())} of {want.numel()} differ)"


def _difference_of_numbers(got: Any, want: Any) -> str | None:
    if isinstance(want, float) and isinstance(got, float):
        if math.isclose(got, want, rel_tol=1e-7, abs_tol=1e-7) or (got != got and want != want):
            return None
    elif type(got) is type(want) and got == want:
        return None
    return f"{got!r}, want {want!r}"


__all__ = [
    "TOLERANCE",
    "Outcome",
    "Reference",
    "difference",
    "error_text",
    "gradients",
    "judge",
]
