"""The stream "torch": a box of what plain torch would draw on one CPU, bit for bit.

Torch's CPU draws walk one Mersenne Twister serially, element by element in memory order, whatever
the number of threads. So a box is drawn by walking the generator over the whole global tensor in
blocks, keeping only what is inside: O(global) time, O(block + local) memory, and the generator
ends where plain torch leaves it. What does not meet the box is skipped by drawing raw words.

What torch 2.13 consumes, in 32-bit words of the generator (from its headers
`ATen/native/cpu/DistributionTemplates.h` and `ATen/core/DistributionsHelper.h`, and by experiment):

```text
uniform                      1 (float64: 2)     split anywhere
normal, n < 16               4 for 2 values     split anywhere; the generator keeps the second value
normal, n >= 16              1 (float64: 2)     blocks of 16; see below
normal_strided, log_normal   4 for 2 values     split anywhere; the generator keeps the second value
bernoulli, a number p        2, any dtype       split anywhere: a float64 uniform < p
bernoulli, a tensor p        1 (p float64: 2)   a uniform of p's precision < p (bfloat16: float32)
exponential cauchy geometric 2, any dtype       split anywhere: computed in float64
random, randint              1 or 2             split anywhere: 2 for ranges from 2**28 on
randperm                     -                  not split: drawn whole
```

normal with n >= 16 and n % 16 != 0: the whole blocks of 16 come first; float32 and float64 then
consume n % 16 more uniforms for nothing, bfloat16 and float16 do not; then 16 fresh values
overwrite the last 16 elements.

None of this is taken on trust: `_words` measures each (draw, dtype) once on a generator of its
own, and a kind that does not behave so (a build whose bernoulli or exponential draws one seed for
a vendor's generator instead) is drawn whole and sliced, which is right but O(global) memory.
"""

from functools import lru_cache

import torch
from torch import Generator, Tensor

from shardwise.errors import UnsupportedError
from shardwise.random.box import Box, paste
from shardwise.random.kinds import Draw, drawn, validate

BLOCK = 1 << 20


def draw_torch(
    draw: Draw,
    box: Box,
    dtype: torch.dtype,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Draw a box of a contiguous global tensor from torch's own CPU stream.

    Means: ``full.narrow(...)`` for ``full = fill(torch.empty(box.shape), draw, generator)``, and
    the same end state of the generator. Cost: O(global) time, O(block + local) memory.

    Args:
        draw: What to draw.
        box: Which part of the global tensor.
        dtype: The tensor's dtype, real.
        generator: A CPU generator; None is the default one.
        block: Elements drawn at a time, at least 16. The result does not depend on it.

    Returns:
        A fresh contiguous CPU tensor of ``box.sizes``.

    Raises:
        UnsupportedError: The generator is not a CPU one.
    """
    assert block >= 16, "a block of torch's normal fill has 16 elements"
    if generator is not None and generator.device.type != "cpu":
        raise UnsupportedError(
            f'like="torch" is a CPU stream; it cannot draw from a generator on '
            f'{generator.device}. Pass a CPU generator, or like="philox".'
        )
    validate(draw, dtype)
    if not box.total:
        return torch.empty(box.sizes, dtype=dtype, device="cpu")
    if box.numel == box.total:
        return drawn(draw, box.total, dtype, generator).view(box.sizes)
    out = torch.empty(box.sizes, dtype=dtype, device="cpu")
    words = 0 if box.total <= block else _words(draw, dtype)
    if not words:
        paste(out, box.first, box.strides, drawn(draw, box.total, dtype, generator), 0)
        return out
    _walk(out, draw, box, words, generator, block)
    return out


def _walk(
    out: Tensor, draw: Draw, box: Box, words: int, generator: Generator | None, block: int
) -> None:
    """Draw the blocks that meet the box, skip the rest."""
    step = 16 if draw.kind == "normal" else 1
    block -= block % step
    end = box.total - box.total % step
    position = 0
    while (index := box.count_before(position)) < box.numel:
        start = box.position(index) // step * step
        if start >= end:
            break
        _skip(draw, start - position, words, generator)
        size = min(block, end - start)
        values = drawn(draw, size, out.dtype, generator)
        paste(out, box.first, box.strides, values, start)
        position = start + size
    _skip(draw, end - position, words, generator)
    if end < box.total:
        if out.dtype in (torch.float32, torch.float64):
            _skip_words((box.total - end) * words, generator)
        values = drawn(draw, 16, out.dtype, generator)
        paste(out, box.first, box.strides, values, box.total - 16)


def _skip(draw: Draw, count: int, words: int, generator: Generator | None) -> None:
    """Advance the generator by ``count`` elements (normal: a multiple of 16)."""
    if draw.kind not in ("log_normal", "normal_strided"):
        _skip_words(count * words, generator)
        return
    # Values come in pairs and the generator may hold the second of one. Skipping the words of
    # an even number of elements keeps its parity; drawing two or three then renews what it holds.
    even = max(count - 2, 0) // 2 * 2
    _skip_words(even * words, generator)
    if count > even:
        drawn(draw, count - even, torch.float64, generator)


def _skip_words(count: int, generator: Generator | None) -> None:
    """Advance the generator by 32-bit words; 1.7 ns a word, against 3 to 30 ns a value."""
    sink = torch.empty(min(count // 2, BLOCK), dtype=torch.int64, device="cpu")
    left = count // 2
    while left:
        size = min(left, sink.numel())
        sink[:size].random_(generator=generator)
        left -= size
    if count % 2:
        torch.empty(1, dtype=torch.int32, device="cpu").random_(generator=generator)


@lru_cache(maxsize=1024)
def _words(draw: Draw, dtype: torch.dtype) -> int:
    """Words per value if the draw can be walked in blocks, else 0; measured, not assumed."""
    if draw.kind == "randperm":
        return 0
    whole, split, raw = (Generator("cpu").manual_seed(1) for _ in range(3))
    values = drawn(draw, 64, dtype, whole)
    halves = [drawn(draw, 32, dtype, split) for _ in range(2)]
    # bytes: NaN (a draw may overflow a half) is not equal to itself
    same = torch.equal(_bytes(values), _bytes(torch.cat(halves)))
    if not same or not torch.equal(whole.get_state(), split.get_state()):
        return 0
    for words in (1, 2):
        raw.manual_seed(1)
        _skip_words(64 * words, raw)
        if torch.equal(raw.get_state(), whole.get_state()):
            return words
    return 0


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
