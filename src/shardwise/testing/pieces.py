"""Would the plain op on each rank's pieces have done?

If it would (its results, put side by side or added up, are the answer), then nothing has to move, and a
library that moves bytes all the same is slower than it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
import warnings

import torch
from torch import Tensor

from shardwise.layout.placement import Shard
from shardwise.testing.calls import Call, results_of
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


def pieces_suffice(call: Call, n: int, combo: Combo) -> bool:
    """Tell whether concatenating or summing what the op gives on the pieces is the right answer.

    It must be so for the op and not by chance. So it must hold for the call's own values, for the same values in
    another order, and for small whole numbers (random numbers are never equal, and `eq` is False on pieces and
    whole alike), where the op takes these. And there must be pieces: a sharded dim of one row is not cut, and a
    pending sum of one element is the one thing on which every reduction is linear; these do not count.

    Args:
        call: The call; not a random one.
        n: Number of ranks, on one mesh axis.
        combo: Placements of the tensors.
    """
    if call.text.startswith(UNSAFE) or call.random or call.uninitialized:
        return False
    if all(p.is_replicate() for (p,) in combo):
        return False
    for t, (p,) in zip(call.tensors, combo):
        if (p.is_partial() and t.numel() < 2) or (isinstance(p, Shard) and t.shape[p.dim] < 2):
            return False
    generator = torch.Generator().manual_seed(11)
    own = [t.detach() for t in call.tensors]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if not _suffice(call, own, n, combo):
            return False
        mixed = [_mixed(t, generator) for t in own]
        for values in (mixed, [_whole_numbers(t, generator) for t in mixed]):
            try:
                call.fn(*[t.clone() for t in values])
            except Exception:
                continue  # it takes only such values as its own (a positive definite matrix)
            if not _suffice(call, values, n, combo):
                return False
    return True


def _mixed(t: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(t.numel(), generator=generator)
    return t.reshape(-1)[order].reshape(t.shape)


def _whole_numbers(t: Tensor, generator: torch.Generator) -> Tensor:
    if not t.is_floating_point() or t.element_size() == 1:
        return t  # an index must stay within bounds
    return torch.randint(0, 3, t.shape, generator=generator).to(t.dtype)


def _suffice(call: Call, tensors: Sequence[Tensor], n: int, combo: Combo) -> bool:
    try:
        want = results_of(call.fn(*[t.clone() for t in tensors]))
        if not all(isinstance(w, Tensor) and w.numel() for w in want):
            return False
        parts = []
        for rank in range(n):
            local = [piece(t, ps[0], rank, n).clone() for t, ps in zip(tensors, combo)]
            parts.append(results_of(call.fn(*local)))
    except Exception:  # the op does not take the pieces
        return False
    return all(len(got) == len(want) for got in parts) and all(
        _joined(w, [got[i] for got in parts]) for i, w in enumerate(want)
    )


def _joined(want: Tensor, parts: list[Tensor]) -> bool:
    if any(
        not isinstance(p, Tensor) or p.dtype != want.dtype or p.ndim != want.ndim for p in parts
    ):
        return False
    for dim in range(want.ndim):
        rest = [p.shape[:dim] + p.shape[dim + 1 :] for p in parts]
        if sum(p.shape[dim] for p in parts) == want.shape[dim] and all(
            r == want.shape[:dim] + want.shape[dim + 1 :] for r in rest
        ):
            return _close(torch.cat(parts, dim), want)
    if want.dtype == torch.bool or any(p.shape != want.shape for p in parts):
        return False
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return _close(total, want)


def _close(got: Tensor, want: Tensor) -> bool:
    tol = 1e-9 if want.dtype in (torch.float64, torch.complex128) else 1e-4
    return torch.allclose(got, want, rtol=tol, atol=tol, equal_nan=True)


__all__ = ["pieces_suffice"]
