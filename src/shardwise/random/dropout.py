"""The masks of dropout, box by box.

What torch 2.13 draws on a CPU when training (found by logging the aten calls; the stream of a
bernoulli with a number p takes two words an element whatever the dtype, so float32, float64,
bfloat16 and float16 have the same mask):

```text
F.dropout(x, p)          noise = empty_like(x).bernoulli_(1 - p).div_(1 - p)      x * noise
F.dropout1d/2d/3d        the same with noise of (N, C, 1, ...); an unbatched input has its
                         missing N unsqueezed first (dropout2d of a 3-d x takes it as (N, C, L))
torch.native_dropout     mask = empty_like(x, bool).bernoulli_(1 - p)             x * mask * scale
                         scale = 1 / (1 - p), or 0 for p == 1, rounded to x's dtype, which a
                         Python number in bfloat16's mul is not
F.alpha_dropout          noise = empty_like(x).bernoulli_(1 - p)                  x * (a * noise) + b
                         b = (noise - 1) * (alpha * a) + alpha * a * p
F.feature_alpha_dropout  the same with noise of (N, C, 1, ...)
F.scaled_dot_product_attention(dropout_p)
                         F.dropout of the softmax's output (B, H, L, S), contiguous; bfloat16 and
                         float16 inputs are computed, masked and dropped in float32
alpha = 1.7580993408473766     a = 1 / sqrt((alpha**2 * p + 1) * (1 - p))
```

* p == 0, or x without elements: nothing is drawn and x is returned. p == 1: nothing is drawn and
  x is multiplied by 0. `native_dropout` alone draws at p == 0 and p == 1 too.
* `empty_like` keeps the strides of a dense x, and bernoulli_ draws in the order of memory: the
  mask of a transposed or channels-last x is that of its memory read in order (pass ``order``).
  An x with gaps or expanded dims has a contiguous mask.
* A dispatch mode sees `aten.bernoulli_.float` for all but `aten.native_dropout`.

Here a mask is made in the dtype it is used in, so that the products have torch's roundings.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Generator, Tensor

from shardwise.errors import LayoutError, ShardError
from shardwise.random.draw import draw
from shardwise.random.kinds import Draw
from shardwise.random.scope import Like, stream_in_force

_ALPHA = 1.7580993408473766


def dropout_mask(
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    p: float,
    like: Like | None = None,
    generator: Generator | None = None,
    order: Sequence[int] | None = None,
) -> Tensor:
    """Draw the local box of what `F.dropout` multiplies its input with.

    Means: ``F.dropout(x, p) == x * mask`` for a global x of ``shape`` and ``dtype``.

    Args:
        shape: Shape of the global input.
        offsets: Where the box starts.
        sizes: Sizes of the box.
        dtype: Dtype of the input.
        device: Where the mask lives.
        p: Probability of a zero.
        like: The stream. None: the one that `rng` chose, else "philox".
        generator: None is torch's default CPU generator.
        order: Dims of the global input from the outermost to the innermost in memory.

    Returns:
        A tensor of ``sizes`` with values 0 and 1 / (1 - p). Nothing is drawn for p of 0 or 1.

    Raises:
        ShardError: p is not between 0 and 1.
    """
    _check(p)
    if p in (0, 1):
        return torch.full(tuple(sizes), 1.0 - p, dtype=dtype, device=device)
    keep = Draw("bernoulli", (1.0 - p,))
    like = like or stream_in_force("philox")
    noise = draw(keep, shape, offsets, sizes, dtype, device, generator, like, order)
    return noise.div_(1.0 - p)


def native_dropout_mask(
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    p: float,
    like: Like | None = None,
    generator: Generator | None = None,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, float]:
    """Draw the local box of the mask of `torch.native_dropout`, and its scale.

    Means: ``native_dropout(x, p, True) == (x.mul(mask).mul_(scale), mask)``.

    Args:
        shape: Shape of the global input.
        offsets: Where the box starts.
        sizes: Sizes of the box.
        dtype: Dtype of the input.
        device: Where the mask lives.
        p: Probability of a zero.
        like: The stream. None: the one that `rng` chose, else "philox".
        generator: None is torch's default CPU generator.
        order: Dims of the global input from the outermost to the innermost in memory.

    Returns:
        The bool mask, and the number to multiply with, rounded to ``dtype``. Drawn for p
        of 0 and 1 too, as in torch.

    Raises:
        ShardError: p is not between 0 and 1.
    """
    _check(p)
    keep = Draw("bernoulli", (1.0 - p,))
    like = like or stream_in_force("philox")
    mask = draw(keep, shape, offsets, sizes, torch.bool, device, generator, like, order)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return mask, torch.tensor(scale, dtype=dtype, device="cpu").item()


def alpha_dropout_terms(
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    p: float,
    like: Like | None = None,
    generator: Generator | None = None,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the local box of the two terms of `F.alpha_dropout`.

    Means: ``F.alpha_dropout(x, p, training=True) == (x * factor).add_(term)``.

    Args:
        shape: Shape of the global input.
        offsets: Where the box starts.
        sizes: Sizes of the box.
        dtype: Dtype of the input.
        device: Where the terms live.
        p: Probability of a drop.
        like: The stream. None: the one that `rng` chose, else "philox".
        generator: None is torch's default CPU generator.
        order: Dims of the global input from the outermost to the innermost in memory.

    Returns:
        ``factor`` and ``term``. Nothing is drawn for p of 0 (1 and 0) or 1 (0 and 0).

    Raises:
        ShardError: p is not between 0 and 1.
    """
    _check(p)
    if p in (0, 1):
        factor = torch.full(tuple(sizes), 1.0 - p, dtype=dtype, device=device)
        return factor, torch.zeros_like(factor)
    keep = Draw("bernoulli", (1.0 - p,))
    like = like or stream_in_force("philox")
    noise = draw(keep, shape, offsets, sizes, dtype, device, generator, like, order)
    a = 1.0 / sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    term = noise.add(-1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    return noise.mul_(a), term


def feature_box(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The mask's (shape, offsets, sizes) for feature dropout (`F.dropout1d/2d/3d`).

    The mask of an input (N, C, ...) is (N, C, 1, ...); give the result to `dropout_mask` or
    `alpha_dropout_terms`. For a global input without elements torch draws nothing: do not ask.

    Args:
        shape: Shape of the global input, at least (N, C).
        offsets: Where the input's box starts.
        sizes: Sizes of the input's box.

    Returns:
        The three of the mask, which broadcasts against the input's box.

    Raises:
        LayoutError: The input has fewer than two dims.
    """
    if len(shape) < 2:
        raise LayoutError(f"feature dropout needs an input of at least 2 dims, not {shape}.")
    rest = len(shape) - 2
    ones, zeros = (1,) * rest, (0,) * rest
    return (*shape[:2], *ones), (*offsets[:2], *zeros), (*sizes[:2], *ones)


def _check(p: float) -> None:
    if not 0 <= p <= 1:
        raise ShardError(f"dropout probability has to be between 0 and 1, but got {p}.")
