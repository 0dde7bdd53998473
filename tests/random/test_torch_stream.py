"""The stream "torch": every box equals that of a plain torch draw, and so does the end state."""

from collections.abc import Callable, Iterator
from itertools import product
import warnings

import pytest
import torch
from torch import Generator, Tensor
import torch.nn.functional as F

from shardwise import random as sr
from shardwise.errors import LayoutError, ShardError, UnsupportedError
from shardwise.random import Box, Draw, torch_stream
from shardwise.random.kinds import Kind, drawn
from shardwise.random.torch_stream import _words

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DRAWS = (
    (Draw("uniform", (-1.5, 2.0)), FLOATS),
    (Draw("normal", (0.5, 2.0)), FLOATS),
    (Draw("normal_strided", (0.5, 2.0)), FLOATS),
    (Draw("bernoulli", (0.3,)), (*FLOATS, torch.bool, torch.uint8, torch.int64)),
    (Draw("random"), (*FLOATS, torch.bool, torch.uint8, torch.int32, torch.int64)),
    (Draw("randint", (-5, 100)), (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64)),
    (Draw("randint", (0, 2**30)), (torch.int32, torch.int64)),
    (Draw("randint", (-(2**63), None)), (torch.int64,)),
    (Draw("exponential", (1.5,)), FLOATS),
    (Draw("log_normal", (0.1, 0.5)), FLOATS),
    (Draw("cauchy", (0.0, 1.0)), FLOATS),
    (Draw("geometric", (0.3,)), (*FLOATS, torch.int32, torch.int64)),
)
CASES = [pytest.param(d, t, id=f"{d.kind}{d.params}-{t}"[:50]) for d, ts in DRAWS for t in ts]
SIZES = (1, 7, 15, 16, 17, 31, 32, 33, 37, 64, 100, 255)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)  # NaN and inf compare too


def plain(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, g: Generator) -> Tensor:
    numel = torch.Size(shape).numel()
    return drawn(draw, numel, dtype, g).view(shape)


def seeded(pending: bool = False) -> Generator:
    """A generator, on request one that keeps the second value of a pair of normals."""
    g = Generator().manual_seed(3)
    torch.empty(3 if pending else 4).normal_(generator=g)
    return g


def check(draw: Draw, box: Box, dtype: torch.dtype, pending: bool = False) -> None:
    want_generator, generators = (
        seeded(pending),
        {b: seeded(pending) for b in (16, 32, 1 << 20)},
    )
    want = plain(draw, box.shape, dtype, want_generator)
    for d, (o, s) in enumerate(zip(box.offsets, box.sizes)):
        want = want.narrow(d, o, s)
    for block, g in generators.items():
        got = sr.draw_torch(draw, box, dtype, g, block)
        where = f"{draw} {box} {dtype} block {block}"
        assert got.is_contiguous(), where
        assert (got.dtype, got.shape) == (dtype, want.shape), where
        assert torch.equal(bits(got), bits(want)), where
        assert torch.equal(g.get_state(), want_generator.get_state()), where


@pytest.mark.parametrize(("draw", "dtype"), CASES)
def test_intervals(draw: Draw, dtype: torch.dtype) -> None:
    for n in SIZES:
        for a, b in {
            (0, n),
            (0, n // 2),
            (n // 2, n),
            (n // 3, 2 * n // 3),
            (n - 1, n),
            (n, n),
        }:
            check(draw, Box((n,), (a,), (b - a,)), dtype, pending=n % 3 == 0)


def boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    cuts = [{(0, n), (0, n // 2), (n // 2, n - n // 2), (n // 3, 1)} for n in shape]
    for box in product(*cuts):
        yield Box(shape, tuple(o for o, _ in box), tuple(s for _, s in box))


@pytest.mark.parametrize("shape", [(9, 13), (3, 5, 7), (2, 3, 4, 5), (40, 1, 2)])
@pytest.mark.parametrize("kind", ["uniform", "normal", "log_normal"])
def test_boxes(kind: Kind, shape: tuple[int, ...]) -> None:
    for box in boxes(shape):
        check(Draw(kind), box, torch.float32)


@pytest.mark.parametrize(("draw", "dtype"), CASES)
def test_large_and_any_number_of_threads(draw: Draw, dtype: torch.dtype) -> None:
    box = Box((300, 217), (100, 60), (150, 33))
    want_state = seeded()
    want = plain(draw, box.shape, dtype, want_state)[100:250, 60:93]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            g, whole = seeded(), seeded()
            got = sr.draw_torch(draw, box, dtype, g, block=4096)
            plainly = plain(draw, box.shape, dtype, whole)[100:250, 60:93]
        finally:
            torch.set_num_threads(1)
        assert torch.equal(bits(got), bits(want))
        assert torch.equal(bits(plainly), bits(want))
        assert torch.equal(g.get_state(), want_state.get_state())


def test_the_walk_is_in_use() -> None:
    """Other kinds depend on the build: what cannot be walked is drawn whole, with equal values."""
    for dtype, words in zip(FLOATS, (1, 2, 1, 1)):
        assert _words(Draw("uniform"), dtype) == _words(Draw("normal"), dtype) == words


@pytest.mark.parametrize("kind", ["uniform", "normal", "bernoulli", "normal_strided"])
def test_what_cannot_be_walked_is_drawn_whole(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_stream, "_words", lambda *_: 0)
    for box in boxes((9, 13)):
        check(Draw(kind), box, torch.float32)


def test_several_default_blocks() -> None:
    n = 2 * (1 << 20) + 37
    for draw in (Draw("normal"), Draw("bernoulli", (0.1,))):
        g, want_g = seeded(), seeded()
        want = plain(draw, (n,), torch.float32, want_g)[n - 9 :]
        assert torch.equal(
            sr.draw_torch(draw, Box((n,), (n - 9,), (9,)), torch.float32, g), want
        )
        assert torch.equal(g.get_state(), want_g.get_state())


FACTORIES: tuple[tuple[Draw, torch.dtype, Callable[..., Tensor]], ...] = (
    (Draw("uniform"), torch.float32, torch.rand),
    (Draw("normal"), torch.float32, torch.randn),
    (Draw("normal"), torch.bfloat16, lambda *s: torch.randn(*s, dtype=torch.bfloat16)),
    (Draw("normal"), torch.complex64, lambda *s: torch.randn(*s, dtype=torch.complex64)),
    (Draw("uniform"), torch.complex128, lambda *s: torch.rand(*s, dtype=torch.complex128)),
    (
        Draw("normal", (1, 2)),
        torch.float64,
        lambda *s: torch.normal(1, 2, s, dtype=torch.float64),
    ),
    (Draw("randint", (3, 50)), torch.int64, lambda *s: torch.randint(3, 50, s)),
    (Draw("normal", (0, 2)), torch.float32, lambda *s: torch.empty(s).normal_(0, 2)),
)


@pytest.mark.parametrize(("what", "dtype", "factory"), FACTORIES)
def test_factories_and_the_default_generator(
    what: Draw, dtype: torch.dtype, factory: Callable[..., Tensor]
) -> None:
    for shape in ((3, 5), (7, 11)):
        sr.manual_seed(5)
        want, after = factory(*shape), torch.rand(3)
        sr.manual_seed(5)
        got = sr.draw(what, shape, (1, 2), (2, 3), dtype, "cpu", like="torch")
        assert torch.equal(got, want[1:3, 2:5])
        assert torch.equal(torch.rand(3), after)


def test_randperm() -> None:
    torch.manual_seed(1)
    want, after = torch.randperm(50), torch.rand(1)
    torch.manual_seed(1)
    got = sr.draw(Draw("randperm"), (50,), (10,), (15,), torch.int64, "cpu", like="torch")
    assert torch.equal(got, want[10:25])
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("kind", ["normal", "uniform", "bernoulli"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_dense_tensors_that_are_not_row_major(kind: Kind, dtype: torch.dtype) -> None:
    if kind == "bernoulli" and dtype.is_complex:
        return
    base = torch.empty(5, 3, 4, dtype=dtype).permute(1, 2, 0)
    torch.manual_seed(1)
    want, after = getattr(base, f"{kind}_")(), torch.rand(1)
    torch.manual_seed(1)
    box = ((3, 4, 5), (1, 0, 2), (2, 3, 3))
    got = sr.draw(Draw(kind), *box, dtype, "cpu", like="torch", order=(2, 0, 1))
    assert torch.equal(got, want[1:3, 0:3, 2:5])
    assert torch.equal(torch.rand(1), after)
    assert got.stride() == (3, 1, 6)


@pytest.mark.parametrize("p_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_bernoulli_of_a_tensor(p_dtype: torch.dtype, dtype: torch.dtype) -> None:
    p = torch.rand(9, 7, dtype=p_dtype)
    torch.manual_seed(1)
    want, after = torch.empty(9, 7, dtype=dtype).bernoulli_(p), torch.rand(1)
    torch.manual_seed(1)
    got = sr.draw_bernoulli(p[3:, 2:5], (9, 7), (3, 2), dtype, like="torch")
    assert torch.equal(got, want[3:, 2:5])
    assert torch.equal(torch.rand(1), after)
    with pytest.raises(ShardError, match="probability"):
        sr.draw_bernoulli(p[3:, 2:5] + 1, (9, 7), (3, 2), dtype)


Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def parts(x: Tensor) -> Place:
    """The last half of dim 0 and the middle of dim 1."""
    n, m = x.shape[:2]
    offsets = (n - n // 2, 1, *(0,) * (x.dim() - 2))
    return tuple(x.shape), offsets, (n // 2, m - 2, *x.shape[2:])


def cut(x: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for d, (o, s) in enumerate(zip(offsets, sizes)):
        x = x.narrow(d, min(o, x.shape[d] - s), s)
    return x


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropouts(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(6, 5, 4, 3, dtype=dtype)
    shape, offsets, sizes = parts(x)
    box, features = (shape, offsets, sizes), sr.feature_box(shape, offsets, sizes)
    local = cut(x, offsets, sizes)

    def native() -> Tensor:
        mask, scale = sr.native_dropout_mask(*box, dtype, "cpu", p)
        return local.mul(mask).mul_(scale)

    def alpha(where: Place) -> Tensor:
        factor, term = sr.alpha_dropout_terms(*where, dtype, "cpu", p)
        return (local * factor).add_(term)

    pairs: tuple[tuple[Callable[[], Tensor], Callable[[], Tensor]], ...] = (
        (lambda: F.dropout(x, p), lambda: local * sr.dropout_mask(*box, dtype, "cpu", p)),
        (
            lambda: F.dropout2d(x, p),
            lambda: local * sr.dropout_mask(*features, dtype, "cpu", p),
        ),
        (lambda: torch.native_dropout(x, p, True)[0], native),
        (lambda: F.alpha_dropout(x, p, training=True), lambda: alpha(box)),
        (lambda: F.feature_alpha_dropout(x, p, training=True), lambda: alpha(features)),
    )
    for theirs, ours in pairs:
        torch.manual_seed(2)
        want, after = theirs(), torch.rand(1)
        torch.manual_seed(2)
        with sr.rng(like="torch"):
            got = ours()
        assert torch.equal(got, cut(want, offsets, sizes))
        assert torch.equal(torch.rand(1), after)


def test_dropout_follows_memory() -> None:
    x = torch.ones(6, 5, 4, 3).to(memory_format=torch.channels_last)
    torch.manual_seed(2)
    want = F.dropout(x, 0.3)
    torch.manual_seed(2)
    box = ((6, 5, 4, 3), (2, 1, 0, 0), (3, 4, 4, 2))
    order = (0, 2, 3, 1)
    got = sr.dropout_mask(*box, torch.float32, "cpu", 0.3, like="torch", order=order)
    assert torch.equal(got, want[2:5, 1:5, :, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_drops_the_softmax(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 8, 4, dtype=dtype) for _ in range(3))
    torch.manual_seed(2)
    want, after = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), torch.rand(1)
    torch.manual_seed(2)
    computed = torch.float32 if dtype == torch.bfloat16 else dtype
    mask = sr.dropout_mask(
        (2, 3, 8, 8), (0, 1, 0, 0), (2, 2, 8, 8), computed, "cpu", 0.3, "torch"
    )
    q, k, v = (t[:, 1:].to(computed) for t in (q, k, v))
    weights = (q @ k.mT / 2).softmax(-1) * mask
    torch.testing.assert_close((weights @ v).to(dtype), want[:, 1:])
    assert torch.equal(torch.rand(1), after)


def test_no_elements_draw_nothing() -> None:
    before = sr.generator_fingerprint()
    likes: tuple[sr.Like, ...] = ("torch", "philox")
    for like in likes:
        assert sr.draw(
            Draw("uniform"), (0, 3), (0, 0), (0, 2), torch.float32, "cpu", like=like
        ).shape == (0, 2)
        assert sr.draw(
            Draw("uniform"), (4,), (0,), (2,), torch.float32, "meta", like=like
        ).is_meta
        assert sr.dropout_mask((4,), (0,), (2,), torch.float32, "cpu", 0.0, like).eq(1).all()
    assert sr.generator_fingerprint() == before


def test_a_rank_without_elements_stays_in_step_and_sees_the_same_error() -> None:
    torch.manual_seed(1)
    torch.randn(5, 7)
    want = sr.generator_fingerprint()
    torch.manual_seed(1)
    sr.draw(Draw("normal"), (5, 7), (5, 0), (0, 7), torch.float32, "cpu", like="torch")
    assert sr.generator_fingerprint() == want
    with pytest.raises(RuntimeError, match="std >= 0"):
        sr.draw(Draw("normal", (0, -1)), (5,), (5,), (0,), torch.float32, "cpu", like="torch")
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        sr.draw(Draw("normal"), (5,), (5,), (0,), torch.int64, "cpu", like="torch")


def test_scalars() -> None:
    torch.manual_seed(1)
    want = torch.randn(())
    torch.manual_seed(1)
    assert torch.equal(sr.draw(Draw("normal"), (), (), (), torch.float32, "cpu"), want)


def test_the_scope_and_the_default() -> None:
    def one(like: sr.Like | None = None) -> Tensor:
        torch.manual_seed(0)
        return sr.draw(Draw("uniform"), (5,), (0,), (5,), torch.float32, "cpu", like=like)

    torch.manual_seed(0)
    want = torch.rand(5)
    assert torch.equal(one(), want)
    assert not torch.equal(one("philox"), want)
    with sr.rng(like="philox"):
        assert torch.equal(one(), one("philox"))
        assert torch.equal(one("torch"), want)
        with sr.rng(like=None):
            assert torch.equal(one(), want)
        assert sr.stream_in_force("torch") == "philox"
    assert sr.stream_in_force("torch") == "torch"


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no random stream"), sr.rng(like="numpy"):  # type: ignore[arg-type]
        pass
    with pytest.raises(UnsupportedError, match="draws 'poisson'"):
        Draw("poisson")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="takes 1 to 1"):
        Draw("geometric")
    with pytest.raises(LayoutError, match="does not lie"):
        Box((4,), (3,), (2,))
    with pytest.raises(LayoutError, match="permutation"):
        sr.draw(Draw("uniform"), (4,), (0,), (4,), torch.float32, "cpu", order=(1,))
    with pytest.raises(ShardError, match="between 0 and 1"):
        sr.dropout_mask((4,), (0,), (4,), torch.float32, "cpu", 1.5)


def test_fingerprint_sees_position_and_the_kept_normal() -> None:
    seen = set()
    torch.manual_seed(0)
    for draw in (
        lambda: None,
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: torch.randn(1),
    ):
        draw()
        seen.add(sr.generator_fingerprint())
    torch.manual_seed(1)
    seen.add(sr.generator_fingerprint())
    assert len(seen) == 5
    assert all(0 <= s < 2**63 for s in seen)
    assert sr.generator_fingerprint(Generator().manual_seed(1)) == sr.generator_fingerprint()


def test_torch_warns_of_nothing_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Draw("normal"), Box((40,), (3,), (30,)), torch.float32)
