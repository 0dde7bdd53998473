"""The stream "philox": counter-based, so a value depends only on (key, global position).

Each call has one 64-bit key; the element at a global position takes its bits from Philox4x32-10
of (counter, key), where one counter value serves 4 positions (2 for 64-bit results). Nothing is
walked: O(local) time and memory on any device, and the same value whatever the box, mesh, layout,
chunk or number of threads. Bits, uniforms, bernoullis and integers are equal on all devices;
kinds that take a logarithm or a cosine agree between devices to the last few bits.

Everything is int64 tensor arithmetic. A product of two 32-bit numbers wraps into the sign bit
and its upper half comes out of an arithmetic shift with the sign above bit 32, so upper halves of
all numbers are left dirty and cut off just before the next multiplication.

References:
    J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as
    1, 2, 3", SC'11, 2011, section 3.3. We use counter words 0 and 1 for the position.
"""

from math import log1p, pi
import sys
from typing import assert_never, cast

import torch
from torch import Tensor

from shardwise.errors import UnsupportedError
from shardwise.random.box import Box
from shardwise.random.kinds import Draw, validate

assert sys.byteorder == "little", "two 32-bit words are read as the halves of an int64"

Word = int | Tensor

_MASK = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_WEYL = (0x9E37_79B9, 0xBB67_AE85)
_CPU_CHUNK = 1 << 15  # counters at a time: 256 KiB an array, so that the rounds run in cache
_DEVICE_CHUNK = 1 << 21  # temporaries of some 160 MiB


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], rounds: int = 10
) -> tuple[Word, Word, Word, Word]:
    """Philox4x32: four random 32-bit words for each counter.

    Args:
        counter: Four 32-bit words, least significant first; each an int or an int64 tensor.
        key: Two 32-bit words; ints or 0-d int64 tensors.
        rounds: Number of rounds; 10 is the published generator.

    Returns:
        Four words. In a tensor only the lower 32 bits count.

    References:
        Salmon et al. 2011 (above), figure 3 and table 2.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(rounds):
        if i:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        product0, product1 = _times(c0, _MULTIPLIERS[0]), _times(c2, _MULTIPLIERS[1])
        c0, c2 = _xor(product1 >> 32, c1, k0), _xor(product0 >> 32, c3, k1)
        c1, c3 = _low(product1), _low(product0)
    return c0, c1, c2, c3


def _times(word: Word, multiplier: int) -> Word:
    """The 64-bit product."""
    if isinstance(word, int):
        return (word & _MASK) * multiplier
    return (word & _MASK).mul_(multiplier)


def _low(word: Word) -> Word:
    return word & _MASK if isinstance(word, int) else word


def _xor(fresh: Word, a: Word, b: Word) -> Word:
    """XOR of three; a tensor ``fresh`` is overwritten where it has the result's shape."""
    if isinstance(fresh, int) or fresh.dim() == 0:
        return fresh ^ b ^ a
    if isinstance(a, int):
        return fresh.bitwise_xor_(a ^ b)
    return fresh.bitwise_xor_(a).bitwise_xor_(b)


def draw_philox(
    draw: Draw,
    box: Box,
    dtype: torch.dtype,
    device: torch.device | str,
    key: int | Tensor,
    chunk: int | None = None,
) -> Tensor:
    """Draw a box of a global tensor from the counter-based stream.

    Means: ``full.narrow(...)`` of one fixed global tensor given by (draw, shape, dtype, key).
    Cost: O(local) time and memory; "randperm" alone is O(global), by sorting random numbers.

    Args:
        draw: What to draw.
        box: Which part of the global tensor.
        dtype: The tensor's dtype, real.
        device: Where to draw.
        key: 64 bits, from `next_key`; an int, or a 0-d int64 tensor on ``device``.
        chunk: Counters worked on at a time. The result does not depend on it.

    Returns:
        A fresh contiguous tensor of ``box.sizes`` on ``device``.

    References:
        Salmon et al. 2011 (above); G. E. P. Box, M. E. Muller, "A note on the generation of
        random normal deviates", 1958, for normals.
    """
    validate(draw, dtype)
    device = torch.device(device)
    words = key & _MASK, (key >> 32) & _MASK
    if draw.kind == "randperm":
        whole = Box(box.shape, (0,), box.shape)
        keys = draw_philox(Draw("randint", (-(2**63), None)), whole, torch.int64, device, key)
        order = keys.argsort(stable=True).to(dtype)
        return order.narrow(0, box.offsets[0], box.sizes[0]).clone()
    out = torch.empty(box.sizes, dtype=dtype, device=device)
    if not box.numel:
        return out
    if draw.kind == "bernoulli" and draw.params[0] in (0, 1):
        return out.fill_(draw.params[0])
    merged = box.merged()
    if chunk is None:
        chunk = _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK
    _fill(out.view(merged.sizes), merged.first, merged.strides, draw, words, chunk)
    return out


def _fill(
    out: Tensor,
    first: int,
    strides: tuple[int, ...],
    draw: Draw,
    key: tuple[Word, Word],
    chunk: int,
) -> None:
    """Fill ``out``, whose first element is at position ``first``; halve it until it is a chunk."""
    lanes = 2 if _is_wide(draw, out.dtype) else 4
    run = out.shape[-1]
    aligned = all(st % lanes == 0 for n, st in zip(out.shape[:-1], strides) if n > 1)
    # Counters that a run can touch: of any alignment, or of the one that all runs have.
    touched = (
        (first % lanes + run - 1) // lanes + 1 if aligned else (run + lanes - 2) // lanes + 1
    )
    if out.numel() // run * touched > chunk and out.numel() > lanes:
        dim = next(d for d, n in enumerate(out.shape) if n > 1)
        half = out.shape[dim] // 2
        _fill(out.narrow(dim, 0, half), first, strides, draw, key, chunk)
        rest, first = out.narrow(dim, half, out.shape[dim] - half), first + half * strides[dim]
        _fill(rest, first, strides, draw, key, chunk)
        return
    starts = _starts(out.shape[:-1], first, strides, out.device)
    counters = (starts // lanes + torch.arange(touched, device=out.device)).view(-1)
    last = first + sum((n - 1) * st for n, st in zip(out.shape, strides))
    high = counters >> 32 if last // lanes > _MASK else 0
    bits = philox4x32((counters, high, 0, 0), key)
    values = _values(draw, cast(tuple[Tensor, ...], bits), out.dtype).view(-1, touched * lanes)
    if aligned:
        values = values.narrow(1, first % lanes, run)
    else:
        values = values.gather(1, starts % lanes + torch.arange(run, device=out.device))
    out.copy_(values.view(out.shape) if values.is_contiguous() else values.reshape(out.shape))


def _starts(
    outer: tuple[int, ...], first: int, strides: tuple[int, ...], device: torch.device
) -> Tensor:
    """Positions of the first element of each run, as a column."""
    starts = torch.full((1,), first, device=device, dtype=torch.int64)
    for n, stride in zip(outer, strides):
        starts = starts.unsqueeze(-1) + torch.arange(n, device=device) * stride
    return starts.reshape(-1, 1)


def _is_wide(draw: Draw, dtype: torch.dtype) -> bool:
    """Whether a value takes 64 bits, so that a counter serves 2 positions instead of 4."""
    match draw.kind:
        case "bernoulli":
            return False
        case "randint":
            return True
        case "random":
            return dtype in (torch.int64, torch.float64)
        case _:
            return dtype == torch.float64 or not dtype.is_floating_point


def _values(draw: Draw, words: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Turn the four words of each counter into its values, flat in the order of positions."""
    a, b = draw.pair
    wide = _is_wide(draw, dtype)
    match draw.kind:
        case "uniform":
            return _between(_uniform(_bits(words, wide)), a, b, dtype)
        case "normal" | "normal_strided":
            return _normal(words, wide).mul_(b).add_(a)
        case "log_normal":
            return _normal(words, wide).mul_(b).add_(a).exp_()
        case "bernoulli":
            threshold = min(max(round(a * 2**32), 1), _MASK)
            return _bits(words, wide) < threshold - 2**31
        case "exponential":
            positive = _positive(_bits(words, wide))
            # below 1, so that no value is 0: its logarithm or inverse is often wanted
            below = 1 - torch.finfo(positive.dtype).eps / 2
            return positive.clamp_(max=below).log_().div_(-a)
        case "cauchy":
            return _uniform(_bits(words, wide)).sub_(0.5).mul_(pi).tan_().mul_(b).add_(a)
        case "geometric":
            return _positive(_bits(words, wide)).log_().div_(log1p(-a)).ceil_().clamp_(min=1)
        case "random":
            return _integers(_bits(words, wide), 0, _end(dtype), dtype)
        case "randint":
            return _integers(_bits(words, wide), a, _end(dtype) if b is None else b, dtype)
        case "randperm":
            raise UnsupportedError("a permutation is not drawn value by value.")
        case _:
            assert_never(draw.kind)


def _bits(words: tuple[Tensor, ...], wide: bool) -> Tensor:
    """All words of each counter in order, as int32, or two by two as int64."""
    pairs = torch.stack((_join(words[0], words[1]), _join(words[2], words[3])), -1).view(-1)
    return pairs if wide else pairs.view(torch.int32)


def _join(low: Tensor, high: Tensor) -> Tensor:
    return (low & _MASK).bitwise_or_(high << 32)


def _uniform(bits: Tensor) -> Tensor:
    """Multiples of 2**-24 or 2**-53 in [0, 1)."""
    if bits.dtype == torch.int32:
        return ((bits >> 8) & 0xFF_FFFF).to(torch.float32).mul_(2.0**-24)
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64).mul_(2.0**-53)


def _positive(bits: Tensor) -> Tensor:
    """Uniform in (0, 1]; float32 goes down to 2**-32, finer than its spacing near 1."""
    if bits.dtype == torch.int32:
        return (bits & 0x7FFF_FFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64).add_(1).mul_(2.0**-53)


def _normal(words: tuple[Tensor, ...], wide: bool) -> Tensor:
    """Standard normals by Box and Muller: cosine and sine of one pair are neighbours."""
    w0, w1, w2, w3 = words
    radius, angle = (_join(w0, w1), _join(w2, w3)) if wide else (_join(w0, w2), _join(w1, w3))
    if not wide:
        radius, angle = radius.view(torch.int32), angle.view(torch.int32)
    r = _positive(radius).log_().mul_(-2).sqrt_()
    theta = _uniform(angle).mul_(2 * pi)
    return torch.stack((theta.cos().mul_(r), theta.sin_().mul_(r)), -1).view(-1)


def _between(u: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Scale to [low, high) in ``dtype``; what rounds up to ``high`` becomes ``low``, as in torch."""
    if (low, high) != (0, 1):
        u.mul_(high - low).add_(low)
    elif dtype == u.dtype:
        return u
    u = u.to(dtype)
    return u.masked_fill_(u == torch.tensor(high, dtype=dtype, device=u.device), low)


def _end(dtype: torch.dtype) -> int:
    """One past the largest of the natural integers of a dtype, as `random_` has them."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _integers(bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high) from 32 or 64 bits each; skew, as in torch, near 2**63 of them."""
    span = high - low
    if bits.dtype == torch.int32:
        x = (bits.to(torch.int64) & _MASK).mul_(span) >> 32
    elif span <= 2**31:  # the upper half of the 64 x 32 bit product: bias below 2**-33
        x = (((bits >> 32) & _MASK) * span).add_((bits & _MASK).mul_(span) >> 32) >> 32
    elif span <= 2**63:
        x = (bits & (2**63 - 1)) % span if span < 2**63 else bits & (2**63 - 1)
    elif span < 2**64:  # as unsigned numbers: subtract span where that is possible, once
        x = torch.where((bits < 0) & (bits >= span - 2**64), bits - (span - 2**64), bits)
    else:
        x = bits
    values = (x + low).to(dtype)
    if dtype.is_floating_point and max(abs(low), abs(high)) > _end(dtype):
        values = values.masked_fill_(values.double() >= high, low)
    return values
