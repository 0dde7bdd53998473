"""Random tensors of which each rank makes its own box, without communication."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Generator, Tensor

from shardwise.errors import LayoutError, ShardError
from shardwise.random.box import Box
from shardwise.random.kinds import Draw
from shardwise.random.philox import draw_philox
from shardwise.random.scope import Like, next_key, stream_in_force
from shardwise.random.torch_stream import draw_torch
from shardwise.recording import recorder


def draw(
    what: Draw,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    generator: Generator | None = None,
    like: Like | None = None,
    order: Sequence[int] | None = None,
) -> Tensor:
    """Draw the local box of a random global tensor.

    Means:  ``full[offsets : offsets + sizes]`` of one random tensor of ``shape``, the same on
            every mesh and layout
    Needs:  every rank calls it, also for an empty box, with equal arguments but for the box; the
            generators of all ranks are in step before it (see `generator_fingerprint`) and after
    Cost:   like="torch" O(global) time, like="philox" O(local); O(local) memory, no communication

    Both streams start from ``generator``: "torch" walks it as plain torch on one CPU would;
    "philox" draws one 64-bit key from it per call. So `torch.manual_seed`, `torch.get_rng_state`,
    `torch.set_rng_state` and the recompute of activation checkpointing work as they are. Nothing
    is drawn for a global tensor without elements, nor on the meta device.

    Args:
        what: What to draw.
        shape: Shape of the global tensor.
        offsets: Where the box starts, one for each dim.
        sizes: Sizes of the box; may have zeros.
        dtype: As plain torch takes it for this kind; complex for uniform and normal.
        device: Where the result lives. "torch" draws on the CPU and moves the result there.
        generator: None is torch's default CPU generator, whatever the device.
        like: The stream. None: the one that `rng` chose, else "torch" on a CPU and "philox" on
            anything else, the device being that of the result or of the generator.
        order: The dims of the global tensor from the outermost to the innermost in memory, for
            a dense one that is not row-major: torch draws in the order of memory. The result
            has its dims in this order in memory too.

    Returns:
        A fresh tensor of ``sizes`` on ``device``, contiguous unless ``order`` says otherwise.

    Raises:
        LayoutError: The box does not lie in the shape.
        UnsupportedError: "torch" was asked to draw from a generator that is not on the CPU.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> full = torch.rand(4, 6)
        >>> _ = torch.manual_seed(0)
        >>> box = draw(Draw("uniform"), (4, 6), (2, 0), (2, 6), torch.float32, "cpu", like="torch")
        >>> torch.equal(box, full[2:])
        True
    """
    if (tape := recorder()) is not None:
        args = (what, tuple(shape), tuple(offsets), tuple(sizes), dtype)
        return tape.opaque(
            "draw",
            draw,
            lambda: draw(*args, "meta", None, like, order),
            *args,
            torch.device(device),
            generator,
            like,
            order,
        )
    if order is not None:
        return _draw_in_order(
            what, (shape, offsets, sizes), dtype, device, generator, like, order
        )
    if dtype.is_complex and what.kind in ("uniform", "normal", "normal_strided"):
        if what.kind != "uniform":
            what = Draw(what.kind, (what.params[0], what.params[1] / sqrt(2)))
        halves = (*shape, 2), (*offsets, 0), (*sizes, 2)
        real = _draw(what, Box(*halves), dtype.to_real(), device, generator, like)
        return torch.view_as_complex(real)
    box = Box(tuple(shape), tuple(offsets), tuple(sizes))
    return _draw(what, box, dtype, device, generator, like)


def _draw(
    what: Draw,
    box: Box,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: Generator | None,
    like: Like | None,
) -> Tensor:
    """Draw a real, row-major box from the stream in force."""
    device = torch.device(device)
    if device.type == "meta" or not box.total:
        return torch.empty(box.sizes, dtype=dtype, device=device)
    if like is None:
        on_cpu = device.type == "cpu" and (generator is None or generator.device.type == "cpu")
        like = stream_in_force("torch" if on_cpu else "philox")
    if like == "torch":
        return draw_torch(what, box, dtype, generator).to(device)
    return draw_philox(what, box, dtype, device, next_key(generator))


def _draw_in_order(
    what: Draw,
    place: tuple[Sequence[int], Sequence[int], Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str,
    generator: Generator | None,
    like: Like | None,
    order: Sequence[int],
) -> Tensor:
    """Draw row-major in the order of memory, then name the dims back."""
    dims = len(place[0])
    if sorted(order) != list(range(dims)):
        raise LayoutError(f"order {tuple(order)} is not a permutation of {dims} dims.")
    shape, offsets, sizes = ([xs[d] for d in order] for xs in place)
    long = [d for d in order if place[0][d] != 1]
    if what.kind == "normal" and long != sorted(long):
        what = replace(what, kind="normal_strided")
    local = draw(what, shape, offsets, sizes, dtype, device, generator, like)
    return local.permute([list(order).index(d) for d in range(dims)])


def draw_bernoulli(
    p: Tensor,
    shape: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
    generator: Generator | None = None,
    like: Like | None = None,
) -> Tensor:
    """Draw the local box of ``torch.empty(shape).bernoulli_(p)`` for a tensor of probabilities.

    Torch compares each probability with one uniform number: of float64 if ``p`` is float64, else
    of float32 (also for bfloat16 and float16), whatever the dtype of the result.

    Args:
        p: The local box of the probabilities, already expanded to the box of the result.
        shape: Shape of the global tensor.
        offsets: Where the box starts.
        dtype: Dtype of the result.
        generator: See `draw`.
        like: See `draw`.

    Returns:
        A fresh contiguous tensor of ``p``'s shape and device.

    Raises:
        ShardError: A local probability is not in [0, 1] (checked on the CPU only, as in torch).
    """
    if (tape := recorder()) is not None:
        return tape.opaque(
            "draw",
            draw_bernoulli,
            lambda: torch.empty(p.shape, dtype=dtype),
            p,
            tuple(shape),
            tuple(offsets),
            dtype,
            generator,
            like,
        )
    precision = torch.float64 if p.dtype == torch.float64 else torch.float32
    u = draw(Draw("uniform"), shape, offsets, p.shape, precision, p.device, generator, like)
    if p.device.type == "cpu" and not bool(((p >= 0) & (p <= 1)).all()):
        raise ShardError("bernoulli: a probability is not between 0 and 1.")
    return (u < p.to(precision)).to(dtype)
