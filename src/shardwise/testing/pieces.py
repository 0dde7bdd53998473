"""Would the plain op on each rank's pieces have done?

If it would (its results, put side by side or added up, are the answer), then nothing has to move, and a
library that moves bytes all the same is slower than it must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
import warnings

import torch
from torch import Tensor

from shardwise.layout.placement import Placement, Shard
from shardwise.testing.calls import Call, results_of
from shardwise.testing.judge import Reference, gradients
from shardwise.testing.layouts import Combo, piece

UNSAFE = (
    "native_batch_norm(",
    "_native_batch_norm_legit(",
    "lu_unpack(",
    "torch._scaled_mm",
    "hash_tensor(",
    "_segment_reduce(",
    "nn.functional.embedding_bag(",
    "linalg.ldl_solve(",
    "ormqr(",
)
"""Ops that read out of bounds when the pieces of their arguments do not fit together."""

WITHIN_TOLERANCE = ("nextafter(",)
"""Ops whose answer differs from their argument by less than what is told apart here."""

SIGNED = 4  # draws of whole numbers and of quarters; of a scalar each is one number


def pieces_suffice(call: Call, n: int, combo: Combo) -> bool:
    """Tell whether concatenating or summing what the op gives on the pieces is the right answer.

    It must be so for the op and not by chance. So it must hold for the call's own values, for the same values mixed
    and in order, and for small whole numbers and quarters of both signs and other masks (random numbers are never
    equal, and `eq` is False on pieces and whole alike), where the op takes these; and for pending sums whose addends
    are large, of either sign and another share of each element (the median of 2x and -x is 2m and -m), and which hold
    what is not finite (`nansum` of NaN + 1 is 0, not 1). And there must be pieces: a sharded dim of one row is not cut, and a
    pending sum of one element is the one thing on which every reduction is linear; these do not count. Nor does a
    pending sum of which nothing but zeros is made.

    Args:
        call: The call; not a random one.
        n: Number of ranks, on one mesh axis.
        combo: Placements of the tensors.
    """
    if call.text.startswith(UNSAFE + WITHIN_TOLERANCE) or call.random or call.uninitialized:
        return False
    if all(p.is_replicate() for (p,) in combo):
        return False
    for t, (p,) in zip(call.tensors, combo):
        if (p.is_partial() and t.numel() < 2) or (isinstance(p, Shard) and t.shape[p.dim] < 2):
            return False
    pending = any(p.is_partial() for (p,) in combo)
    own = [t.detach() for t in call.tensors]
    constant = pending
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for i, values in enumerate(_other_values(own, combo)):
            try:
                want = results_of(call.fn(*[t.clone() for t in values]))
            except Exception:
                if i == 0:
                    return False
                continue  # it takes only such values as its own (a positive definite matrix)
            found = [w[w.isfinite()] for w in want if isinstance(w, Tensor)]
            constant = constant and not any(f.any() for f in found)
            for split in (False, True) if pending else (False,):
                if not _suffice(call, values, want, n, combo, split=split):
                    return False
    return not constant


def _other_values(own: Sequence[Tensor], combo: Combo) -> Iterator[list[Tensor]]:
    """The values of a call, and others of the same shapes for which the pieces must do too."""
    generator = torch.Generator().manual_seed(11)
    mixed = [_mixed(t, generator) for t in own]
    yield list(own)
    yield mixed
    yield [_in_order(t, p) for t, (p,) in zip(own, combo)]
    yield [_numbers(t, generator, 0, 3, 1) for t in mixed]
    for _ in range(SIGNED):
        yield [_numbers(t, generator, -4, 5, 1) for t in mixed]
        yield [_numbers(t, generator, -4, 5, 4) for t in mixed]
    if any(p.is_partial() for (p,) in combo):
        for value in (torch.nan, torch.inf):
            yield [_with(value, t, generator, p) for t, (p,) in zip(mixed, combo)]


def _mixed(t: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(t.numel(), generator=generator)
    return t.reshape(-1)[order].reshape(t.shape)


def _in_order(t: Tensor, placement: Placement) -> Tensor:
    """From the least up, slice by slice: no piece has the greatest of all but the last."""
    if t.is_complex() or not t.ndim:
        return t
    dim = placement.dim if isinstance(placement, Shard) else 0
    slices = t.movedim(dim, 0)
    return slices.reshape(-1).sort()[0].reshape(slices.shape).movedim(0, dim)


def _numbers(t: Tensor, generator: torch.Generator, least: int, end: int, unit: int) -> Tensor:
    if t.dtype == torch.bool:
        return torch.randint(0, 2, t.shape, generator=generator) > 0
    if not t.is_floating_point() or t.element_size() == 1:
        return t  # an index must stay within bounds
    return torch.randint(least, end, t.shape, generator=generator).to(t.dtype) / unit


def _with(value: float, t: Tensor, generator: torch.Generator, placement: Placement) -> Tensor:
    """The same with this value somewhere, if it is a pending sum."""
    if not placement.is_partial():
        return t
    flat = t.reshape(-1).clone()
    flat[torch.randint(len(flat), (1,), generator=generator)] = value
    return flat.reshape(t.shape)


def _addends(t: Tensor, n: int, seed: int) -> list[Tensor]:
    """Addends of which each has another share of each element: whole numbers, and the rest on the first rank."""
    most = 4096 if t.element_size() // (1 + t.is_complex()) >= 8 else 32
    generator = torch.Generator().manual_seed(seed)
    rest = [
        torch.randint(-most, most + 1, t.shape, generator=generator).to(t.dtype)
        for _ in range(n - 1)
    ]
    return [t - sum(rest), *rest]


def _pieces(t: Tensor, placement: Placement, n: int, seed: int | None) -> list[Tensor]:
    if seed is not None and placement.is_partial() and t.element_size() >= 4:
        return _addends(t, n, seed)
    return [piece(t, placement, rank, n).clone() for rank in range(n)]


def _suffice(
    call: Call,
    tensors: Sequence[Tensor],
    want: Sequence[Any],
    n: int,
    combo: Combo,
    *,
    split: bool,
) -> bool:
    if not all(isinstance(w, Tensor) and w.numel() for w in want):
        return False
    cut = [
        _pieces(t, p, n, 13 + i if split else None)
        for i, (t, (p,)) in enumerate(zip(tensors, combo))
    ]
    try:
        parts = [results_of(call.fn(*[c[rank] for c in cut])) for rank in range(n)]
    except Exception:  # the op does not take the pieces
        return False
    return all(len(got) == len(want) for got in parts) and all(
        _joined(w, [got[i] for got in parts]) for i, w in enumerate(want)
    )


def gradients_suffice(reference: Reference, n: int, combo: Combo) -> bool:
    """Tell whether differentiating the op on the pieces gives the right gradients too.

    A piece of a sharded tensor has the gradient's piece, an addend all of it, and of a tensor that is whole on
    every rank the gradients add up.

    Args:
        reference: The call and its plain answer.
        n: Number of ranks, on one mesh axis.
        combo: Placements of the tensors, for which `pieces_suffice`.
    """
    if not reference.differentiates:
        return True
    call, generator = reference.call, torch.Generator().manual_seed(11)
    other = [
        _numbers(t.detach(), generator, -2, 3, 1).requires_grad_(flag)
        for t, flag in zip(call.tensors, reference.flags)
    ]
    try:
        numbers = Reference(replace(call, tensors=other))
    except Exception:  # it takes only such values as its own
        numbers = reference
    return _gradients_fit(reference, n, combo) and _gradients_fit(numbers, n, combo)


def _gradients_fit(reference: Reference, n: int, combo: Combo) -> bool:
    call = reference.call
    got: list[list[Tensor | None]] = []
    outs: list[list[Any]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cut = [
                _pieces(t.detach(), p, n, 13 + i)
                for i, (t, (p,)) in enumerate(zip(call.tensors, combo))
            ]
            leaves = [
                [c[rank].requires_grad_(flag) for c, flag in zip(cut, reference.flags)]
                for rank in range(n)
            ]
            outs = [results_of(call.post(call.fn(*own))) for own in leaves]
            for rank, own in enumerate(leaves):
                seeds = [
                    None if s is None else _part(s, [o[i] for o in outs], rank)
                    for i, s in enumerate(reference.seeds)
                ]
                got.append(gradients(outs[rank], seeds, own, create_graph=False))
    except Exception:
        return False
    return all(
        w is None or _fits(w, [_zeros_if_none(g[i], w, p, r, n) for r, g in enumerate(got)], p)
        for i, (w, (p,)) in enumerate(zip(reference.grads, combo))
    )


def _zeros_if_none(
    grad: Tensor | None, want: Tensor, placement: Placement, rank: int, n: int
) -> Tensor:
    if grad is not None:
        return grad
    shape = (
        piece(want, placement, rank, n).shape if isinstance(placement, Shard) else want.shape
    )
    return want.new_zeros(shape)


def _part(seed: Tensor, outs: Sequence[Tensor], rank: int) -> Tensor:
    """What a rank's result has of the seed of all."""
    dim = _joined_on(seed.shape, outs)
    if dim is None:
        return seed
    start = sum(o.shape[dim] for o in outs[:rank])
    return seed.narrow(dim, start, outs[rank].shape[dim])


def _fits(want: Tensor, grads: Sequence[Tensor], placement: Placement) -> bool:
    if placement.is_partial():
        return all(_close(g, want, 1e-7) for g in grads)
    if isinstance(placement, Shard):
        return _close(torch.cat(list(grads), placement.dim), want, 1e-7)
    return _close(torch.stack(list(grads)).sum(0), want, 1e-7)


def _joined_on(shape: Sequence[int], parts: Sequence[Tensor]) -> int | None:
    """The dim on which the parts side by side have this shape; None if there is none."""
    for dim, size in enumerate(shape):
        rest = (*shape[:dim], *shape[dim + 1 :])
        if sum(p.shape[dim] for p in parts) == size and all(
            (*p.shape[:dim], *p.shape[dim + 1 :]) == rest for p in parts
        ):
            return dim
    return None


def _joined(want: Tensor, parts: list[Tensor]) -> bool:
    if any(
        not isinstance(p, Tensor) or p.dtype != want.dtype or p.ndim != want.ndim for p in parts
    ):
        return False
    if (dim := _joined_on(want.shape, parts)) is not None:
        return _close(torch.cat(parts, dim), want)
    if want.dtype == torch.bool or any(p.shape != want.shape for p in parts):
        return False
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return _close(total, want)


def _close(got: Tensor, want: Tensor, double: float = 1e-9) -> bool:
    tol = double if want.dtype in (torch.float64, torch.complex128) else 1e-4
    if want.is_complex():  # else an infinite part makes the other one NaN
        got, want = (torch.view_as_real(t.resolve_conj()) for t in (got, want))
    return torch.allclose(got, want, rtol=tol, atol=tol, equal_nan=True)


__all__ = ["gradients_suffice", "pieces_suffice"]
