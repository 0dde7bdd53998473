"""The stream "philox": published vectors, one global tensor whatever the box, distributions."""

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise import random as sr
from shardwise.random import Box, Draw
from shardwise.random.kinds import Kind

# Random123 (Salmon et al.), kat_vectors: philox4x32 10, counter, key, result
KNOWN = (
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
MASK = 0xFFFFFFFF
KEY = -0x123456789ABCDEF
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KINDS: tuple[tuple[Kind, tuple, tuple[torch.dtype, ...]], ...] = (
    ("uniform", (-1.0, 2.0), FLOATS),
    ("normal", (0.5, 2.0), FLOATS),
    ("bernoulli", (0.3,), (torch.float32, torch.bool, torch.bfloat16)),
    ("random", (), (torch.float32, torch.int64, torch.uint8, torch.bool, torch.int32)),
    ("randint", (-5, 100), (torch.int64, torch.float32, torch.int8)),
    ("exponential", (1.5,), FLOATS),
    ("log_normal", (0.1, 0.5), FLOATS),
    ("cauchy", (0.0, 1.0), (torch.float32, torch.float64)),
    ("geometric", (0.3,), (torch.float32, torch.int64)),
)
CASES = [(Draw(kind, params), dtype) for kind, params, dtypes in KINDS for dtype in dtypes]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter: tuple, key: tuple, want: tuple) -> None:
    assert sr.philox4x32(counter, key) == want
    tensors: Any = tuple(torch.full((3,), c) for c in counter)
    keys: Any = key, tuple(torch.tensor(x) for x in key)
    for k in keys:
        got: Any = sr.philox4x32(tensors, k)
        assert [int(w[1]) & MASK for w in got] == list(want)
        mixed: Any = sr.philox4x32((tensors[0], counter[1], tensors[2], counter[3]), k)
        assert [int(w[2]) & MASK for w in mixed] == list(want)


def test_the_bits_of_a_position_are_the_papers() -> None:
    box = Box((2**40,), (2**36 - 3,), (9,))
    got = sr.draw_philox(Draw("uniform"), box, torch.float32, "cpu", KEY)
    for i, value in enumerate(got.tolist()):
        counter, lane = divmod(2**36 - 3 + i, 4)
        key = KEY & MASK, KEY >> 32 & MASK
        word = sr.philox4x32((counter & MASK, counter >> 32, 0, 0), key)[lane]
        assert value == (word >> 8) * 2**-24


def cut(x: Tensor, box: Box) -> Tensor:
    for d, (o, s) in enumerate(zip(box.offsets, box.sizes)):
        x = x.narrow(d, o, s)
    return x


@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=str)
def test_any_box_of_one_tensor(draw: Draw, dtype: torch.dtype) -> None:
    for shape in ((61,), (12, 8), (9, 7), (2, 3, 1, 6)):
        zeros = (0,) * len(shape)
        full = sr.draw_philox(draw, Box(shape, zeros, shape), dtype, "cpu", KEY)
        for step in (1, 2, 3):
            offsets = tuple(min(step, n - 1) for n in shape)
            for sizes in (tuple(n - o for n, o in zip(shape, offsets)), (1,) * len(shape)):
                for o, s in ((offsets, sizes), ((0, *offsets[1:]), (shape[0], *sizes[1:]))):
                    box = Box(shape, o, s)
                    for chunk in (3, None):
                        got = sr.draw_philox(draw, box, dtype, "cpu", KEY, chunk)
                        assert torch.equal(got, cut(full, box)), (box, chunk)
    empty = sr.draw_philox(draw, Box((4, 4), (4, 0), (0, 4)), dtype, "cpu", KEY)
    assert empty.shape == (0, 4)


@pytest.mark.parametrize("kind", ["uniform", "normal", "bernoulli", "exponential"])
def test_threads_chunks_and_tensor_keys_change_nothing(kind: Kind) -> None:
    box = Box((700, 451), (3, 1), (690, 450))
    want = sr.draw_philox(Draw(kind), box, torch.float32, "cpu", KEY)
    torch.set_num_threads(3)
    try:
        threads = sr.draw_philox(Draw(kind), box, torch.float32, "cpu", KEY)
    finally:
        torch.set_num_threads(1)
    keyed = sr.draw_philox(Draw(kind), box, torch.float32, "cpu", torch.tensor(KEY), chunk=5000)
    assert torch.equal(threads, want)
    assert torch.equal(keyed, want)


N = 1 << 19


def sample(draw: Draw, dtype: torch.dtype = torch.float32) -> Tensor:
    return sr.draw_philox(draw, Box((N,), (0,), (N,)), dtype, "cpu", 77).double()


def distance(x: Tensor, cdf: Tensor) -> float:
    """Kolmogorov and Smirnov's distance, times sqrt(N): above 1.95 with probability 0.1 %."""
    i = torch.arange(1, N + 1, dtype=torch.float64) / N
    return float((cdf - i).abs().max()) * math.sqrt(N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continuous_distributions(dtype: torch.dtype) -> None:
    x, _ = sample(Draw("uniform", (-1, 3)), dtype).sort()
    assert distance(x, (x + 1) / 4) < 1.95
    assert x[0] >= -1
    assert x[-1] < 3
    x, _ = sample(Draw("normal", (1, 2)), dtype).sort()
    assert distance(x, torch.special.ndtr((x - 1) / 2)) < 1.95
    x, _ = sample(Draw("log_normal", (1, 2)), dtype).sort()
    assert distance(x, torch.special.ndtr((x.log() - 1) / 2)) < 1.95
    x, _ = sample(Draw("exponential", (3,)), dtype).sort()
    assert distance(x, 1 - (-3 * x).exp()) < 1.95
    assert x[0] > 0
    x, _ = sample(Draw("cauchy", (1, 2)), dtype).sort()
    assert distance(x, ((x - 1) / 2).atan() / math.pi + 0.5) < 1.95


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5])
def test_neighbours_are_independent(lag: int) -> None:
    cases: tuple[tuple[Kind, torch.dtype], ...] = (
        ("uniform", torch.float32),
        ("normal", torch.float32),
        ("normal", torch.float64),
    )
    for kind, dtype in cases:
        x = sample(Draw(kind), dtype)
        x = (x - x.mean()) / x.std()
        for f in (lambda t: t, torch.square, torch.abs):
            y = f(x) - f(x).mean()
            correlation = float((y[lag:] * y[:-lag]).mean() / y.square().mean())
            assert abs(correlation) * math.sqrt(N) < 4


def test_discrete_distributions() -> None:
    for p in (0.001, 0.3, 0.9):
        x = sample(Draw("bernoulli", (p,)), torch.bool)
        assert abs(float(x.mean()) - p) < 4 * math.sqrt(p * (1 - p) / N)
    for low, high, dtype in ((-3, 4, torch.int64), (0, 2, torch.bool), (0, 10, torch.bfloat16)):
        x = sample(Draw("randint", (low, high)), dtype)
        counts = torch.bincount((x - low).long(), minlength=high - low).double()
        assert len(counts) == high - low
        assert float(((counts - N / len(counts)) ** 2).sum() / (N / len(counts))) < 35
    for high in (2**31 + 5, 2**40, 2**63 - 1):
        x = sample(Draw("randint", (-7, high)), torch.int64)
        assert x.min() >= -7
        assert x.max() < high
        assert abs(float(x.mean()) / high - 0.5) < 4 * 0.2887 / math.sqrt(N)
    wide = sr.draw_philox(
        Draw("randint", (-(2**63), 2**62)), Box((N,), (0,), (N,)), torch.int64, "cpu", 7
    )
    assert wide.max() < 2**62
    assert wide.min() < -(2**62)
    x = sample(Draw("geometric", (0.25,)), torch.int64)
    assert x.min() == 1
    assert abs(float(x.mean()) - 4) < 4 * math.sqrt(12 / N)
    x = sample(Draw("random"), torch.uint8)
    assert x.min() == 0
    assert x.max() == 255


def test_half_precision_stays_below_the_end() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = sample(Draw("uniform", (1, 3)), dtype)
        assert x.min() >= 1
        assert x.max() < 3


def test_randperm() -> None:
    torch.manual_seed(0)
    full = sr.draw(Draw("randperm"), (1000,), (0,), (1000,), torch.int64, "cpu", like="philox")
    torch.manual_seed(0)
    part = sr.draw(Draw("randperm"), (1000,), (300,), (200,), torch.int64, "cpu", like="philox")
    assert torch.equal(full.sort().values, torch.arange(1000))
    assert torch.equal(part, full[300:500])


def test_one_number_of_torchs_generator_a_call() -> None:
    def mask() -> Tensor:
        return sr.dropout_mask((64,), (0,), (64,), torch.float32, "cpu", 0.5)

    torch.manual_seed(3)
    first, second = mask(), mask()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(mask(), first)
    state = torch.get_rng_state()
    again = mask()
    torch.set_rng_state(state)
    assert torch.equal(mask(), again)
    assert torch.equal(again, second)
    torch.set_rng_state(state)
    sr.draw(Draw("bernoulli"), (64,), (64,), (0,), torch.float32, "cpu", like="philox")
    after = sr.generator_fingerprint()
    torch.set_rng_state(state)
    mask()
    assert sr.generator_fingerprint() == after, "an empty box advances the generator too"


def test_dropout_masks() -> None:
    for p in (0.1, 0.5):
        mask = sr.dropout_mask((1000, 100), (0, 0), (1000, 100), torch.float32, "cpu", p)
        assert set(mask.unique().tolist()) == {0.0, torch.ones(1).div_(1 - p).item()}
        assert abs(float((mask == 0).double().mean()) - p) < 0.01


def test_checkpoint_recompute_draws_the_same_mask() -> None:
    seen = []

    def drop(x: Tensor) -> Tensor:
        seen.append(sr.dropout_mask(x.shape, (0,), x.shape, x.dtype, "cpu", 0.5))
        return x * seen[-1]

    x = torch.ones(100, requires_grad=True)
    checkpoint(drop, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert x.grad is not None
    assert torch.equal(x.grad, seen[0])


def test_a_mask_of_65536_elements_takes_about_a_millisecond() -> None:
    shape = (256, 256)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        sr.dropout_mask(shape, (0, 0), shape, torch.float32, "cpu", 0.1)
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3, f"{best * 1e3:.2f} ms"  # wide, for a busy machine
