"""Fourier transforms: the dims that are transformed are whole, the others are cut anyhow; linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.rules.edges import Unempty
from shardwise.rules.linalg import like_torch
from shardwise.rules.notation import WHOLE, Arg, Rule, numbered
from shardwise.rules.registry import functions, rule
from shardwise.rules.view import some_dims


def _along(x: Arg, dims: Any, func: Any, args: tuple[Any, ...], kwargs: Any) -> Rule | None:
    """The rule of a transform of ``x`` along these dims."""
    along = some_dims(dims, x.ndim)
    results = like_torch(func, args, kwargs)
    if along is None or results is None or len(results) != 1 or len(results[0][0]) != x.ndim:
        return None
    names = tuple(WHOLE if d in along else n for d, n in enumerate(numbered("d", x.ndim)))
    return Rule(
        {x: names},
        (names,),
        linear=(frozenset([x]),),
        local=Unempty(results[0][2]),
        always_local=x.layout.has_empty(),
        out_shapes=(results[0][0],),
        out_strides=(results[0][1],),
    )


def _one(func: Any) -> Callable[..., Rule | None]:
    def transform(input: Arg, n: Any = None, dim: Any = -1, norm: Any = None) -> Rule | None:
        return _along(input, (dim,), func, (input, n, dim, norm), {})

    return transform


def _several(func: Any, default: Any) -> Callable[..., Rule | None]:
    def transform(
        input: Arg, s: Any = None, dim: Any = default, norm: Any = None
    ) -> Rule | None:
        dims = dim
        if dims is None:
            count = input.ndim if s is None else len(s)
            dims = tuple(range(input.ndim - count, input.ndim))
        return _along(input, dims, func, (input, s, dim, norm), {})

    return transform


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _f in dict.fromkeys(
        [getattr(torch.fft, _name), *functions(f"aten.fft_{_name}.default")]
    ):
        rule(_f)(_one(_f))
    for _f in dict.fromkeys(
        [getattr(torch.fft, f"{_name}2"), *functions(f"aten.fft_{_name}2.default")]
    ):
        rule(_f)(_several(_f, (-2, -1)))
    for _f in dict.fromkeys(
        [getattr(torch.fft, f"{_name}n"), *functions(f"aten.fft_{_name}n.default")]
    ):
        rule(_f)(_several(_f, None))


@rule("aten._fft_c2c.default")
def fft_c2c(self: Arg, dim: Any, normalization: int, forward: bool) -> Rule | None:
    """Complex to complex."""
    op = torch.ops.aten._fft_c2c.default
    return _along(self, tuple(dim), op, (self, dim, normalization, forward), {})


@rule("aten._fft_r2c.default")
def fft_r2c(self: Arg, dim: Any, normalization: int, onesided: bool) -> Rule | None:
    """Real to complex."""
    op = torch.ops.aten._fft_r2c.default
    return _along(self, tuple(dim), op, (self, dim, normalization, onesided), {})


@rule("aten._fft_c2r.default")
def fft_c2r(self: Arg, dim: Any, normalization: int, last_dim_size: int) -> Rule | None:
    """Complex to real."""
    op = torch.ops.aten._fft_c2r.default
    return _along(self, tuple(dim), op, (self, dim, normalization, last_dim_size), {})


def _shift(input: Arg, dim: Any = None) -> Rule | None:
    dims = some_dims(range(input.ndim) if dim is None else dim, input.ndim)
    if dims is None:
        return None
    names = tuple(WHOLE if d in dims else n for d, n in enumerate(numbered("d", input.ndim)))
    return Rule({input: names}, (names,), linear=(frozenset([input]),))


rule(torch.fft.fftshift, torch.fft.ifftshift)(_shift)


@rule("stft")
def stft(  # noqa: PLR0913  torch's parameters
    input: Arg,
    n_fft: int,
    hop_length: Any = None,
    win_length: Any = None,
    window: Arg | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: Any = None,
    return_complex: Any = None,
    align_to_window: Any = None,
) -> Rule | None:
    """``n [t], [w] -> n [f] [l]``; linear in the signal, and in the window."""
    if input.ndim not in (1, 2) or not return_complex:
        return None
    args = (input, n_fft, hop_length, win_length, window, center, pad_mode, normalized)
    more = {"onesided": onesided, "return_complex": True, "align_to_window": align_to_window}
    results = like_torch(torch.stft, args, more)
    if results is None or len(results[0][0]) != input.ndim + 1:
        return None
    batch = ("n",) * (input.ndim - 1)
    ins = {input: (*batch, WHOLE)} | ({} if window is None else {window: (WHOLE,)})
    return Rule(
        ins,
        ((*batch, WHOLE, WHOLE),),
        linear=tuple(frozenset([a]) for a in ins),
        local=Unempty(results[0][2]),
        always_local=input.layout.has_empty(),
        out_shapes=(results[0][0],),
        out_strides=(results[0][1],),
    )


@rule("istft")
def istft(
    input: Arg,
    n_fft: int,
    hop_length: Any = None,
    win_length: Any = None,
    window: Arg | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: Any = None,
    length: Any = None,
    return_complex: bool = False,
) -> Rule | None:
    """``n [f] [l], [w] -> n [t]``; linear in the spectrum."""
    if input.ndim not in (2, 3) or not input.dtype.is_complex or 0 in input.shape[-2:]:
        return None
    one = torch.zeros(1, *input.shape[-2:], dtype=input.dtype, device="cpu")
    size = n_fft if win_length is None else win_length
    kind = one.real.dtype if window is None else window.dtype
    ones = torch.ones(size, dtype=kind, device="cpu")
    try:  # torch has no meta form; how long the result is does not depend on values
        result = torch.istft(
            one,
            n_fft,
            hop_length,
            win_length,
            ones,
            center,
            normalized,
            onesided,
            length,
            return_complex,
        )
    except (RuntimeError, ValueError):
        return None
    batch = ("n",) * (input.ndim - 2)
    ins = {input: (*batch, WHOLE, WHOLE)} | ({} if window is None else {window: (WHOLE,)})
    return Rule(
        ins,
        ((*batch, WHOLE),),
        linear=(frozenset([input]),),
        local=Unempty(result.dtype),
        always_local=input.layout.has_empty(),
        out_shapes=((*input.shape[:-2], result.shape[-1]),),
        checked=True,
    )
