"""Random DTensors have the values that plain torch draws after the same seed, whatever the layout."""

from collections.abc import Callable
import itertools
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
import torch.nn.functional as F

import shardwise as sw
from shardwise import CommLog, DTensor, Partial, Replicate, Shard
from shardwise.errors import ShardError, StrictError

REVERSED = (Shard(0, order=1), Shard(0, order=0))
LAYOUTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
    REVERSED,
    (Partial(), Shard(0)),
    (Shard(1), Partial()),
    (Partial("max"), Replicate()),
]


def on_mesh(fn: Callable[[Any], Any], shape: tuple[int, ...] = (2, 2)) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return sw.simulate(lambda: fn(sw.init_device_mesh("cpu", shape)), n)


def compare(
    call: Callable[[Any], Tensor],
    plain: Tensor,
    mesh: Any,
    layouts: Any = LAYOUTS,
    inplace: bool = False,
) -> None:
    """One call on every layout: values and the generator's end state are plain torch's."""
    base = plain.detach().clone(memory_format=torch.preserve_format)
    torch.manual_seed(11)
    want = call(plain.detach().clone(memory_format=torch.preserve_format))
    state = torch.get_rng_state()
    for placed in layouts:
        x = sw.distribute_tensor(base, mesh, placed, src_data_rank=None)
        torch.manual_seed(11)
        got = call(x)
        assert isinstance(got, DTensor)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert torch.equal(got.full_tensor(), want), placed
        assert torch.equal(torch.get_rng_state(), state), placed
        if inplace:
            assert got is x
            assert x.placements == tuple(placed)


@pytest.mark.parametrize("shape", [(3, 5), (7, 5), (1, 37), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rand_and_randn(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def on_rank(mesh: Any) -> None:
        for ours, theirs in ((sw.rand, torch.rand), (sw.randn, torch.randn)):
            torch.manual_seed(3)
            want = theirs(*shape, dtype=dtype)
            state = torch.get_rng_state()
            for placed in LAYOUTS:
                torch.manual_seed(3)
                got = ours(*shape, dtype=dtype, device_mesh=mesh, placements=placed)
                assert got.placements == tuple(placed)
                assert torch.equal(got.full_tensor(), want)
                assert torch.equal(torch.get_rng_state(), state)

    on_mesh(on_rank)


def test_one_axis_three_ranks() -> None:
    def on_rank(mesh: Any) -> None:
        torch.manual_seed(3)
        want = torch.randn(7, 5)
        for placed in (Replicate(), Shard(0), Shard(1), Partial()):
            torch.manual_seed(3)
            assert torch.equal(
                sw.randn(7, 5, device_mesh=mesh, placements=[placed]).full_tensor(), want
            )

    on_mesh(on_rank, (3,))


def test_other_factories() -> None:
    def on_rank(mesh: Any) -> None:
        for placed in [(Shard(0), Replicate()), (Shard(0), Shard(0)), (Partial(), Replicate())]:
            where = {"device_mesh": mesh, "placements": placed}
            torch.manual_seed(3)
            wants = (
                torch.randint(9, (7, 3)),
                torch.randint(-3, 9, (5,), dtype=torch.int32),
                torch.randperm(11),
            )
            wants = *wants, torch.randn(5, dtype=torch.complex64)
            torch.manual_seed(3)
            gots = [
                sw.randint(9, (7, 3), **where),
                sw.randint(-3, 9, (5,), dtype=torch.int32, **where),
            ]
            gots += [sw.randperm(11, **where), sw.randn(5, dtype=torch.complex64, **where)]
            for got, want in zip(gots, wants):
                assert got.dtype == want.dtype
                assert torch.equal(got.full_tensor(), want)
            named = sw.randint(low=2, high=3, size=(4,), **where)
            assert torch.equal(named.full_tensor(), torch.full((4,), 2))

    on_mesh(on_rank)


IN_PLACE: dict[str, Callable[[Any], Tensor]] = {
    "uniform": lambda x: x.uniform_(),
    "uniform from to": lambda x: x.uniform_(-3, to=2),
    "normal": lambda x: x.normal_(),
    "normal mean std": lambda x: x.normal_(1.0, std=2),
    "bernoulli": lambda x: x.bernoulli_(),
    "bernoulli p": lambda x: x.bernoulli_(0.3),
    "random": lambda x: x.random_(),
    "random to": lambda x: x.random_(100),
    "random from to": lambda x: x.random_(-5, 9),
    "exponential": lambda x: x.exponential_(2.0),
    "log_normal": lambda x: x.log_normal_(std=0.5),
    "cauchy": lambda x: x.cauchy_(1.0, 2.0),
    "geometric": lambda x: x.geometric_(p=0.3),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    def on_rank(mesh: Any) -> None:
        compare(IN_PLACE[name], torch.zeros(7, 5), mesh, inplace=True)
        some = LAYOUTS[2:6:3] + LAYOUTS[6:7]
        compare(
            IN_PLACE[name], torch.zeros(5, 7, dtype=torch.float64).t(), mesh, some, inplace=True
        )

    on_mesh(on_rank)


def test_in_place_integers_and_channels_last() -> None:
    def on_rank(mesh: Any) -> None:
        some = [p for p in LAYOUTS if not any(q.is_partial() for q in p)]
        compare(
            lambda x: x.random_(-5, 100),
            torch.zeros(7, 5, dtype=torch.int64),
            mesh,
            some,
            inplace=True,
        )
        compare(
            lambda x: x.bernoulli_(0.4),
            torch.zeros(7, 5, dtype=torch.bool),
            mesh,
            some,
            inplace=True,
        )
        images = torch.zeros(3, 4, 2, 5).to(memory_format=torch.channels_last)
        for call in (lambda x: x.normal_(), lambda x: x.uniform_()):
            compare(call, images, mesh, inplace=True)

    on_mesh(on_rank)


def test_in_place_through_an_aliasing_view() -> None:
    def on_rank(mesh: Any) -> None:
        x = sw.zeros(6, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
        view = x.t()
        torch.manual_seed(1)
        view.normal_()
        torch.manual_seed(1)
        assert torch.equal(x.full_tensor(), torch.zeros(6, 4).t().normal_().t())

    on_mesh(on_rank)


def test_in_place_obeys_autograd() -> None:
    def on_rank(mesh: Any) -> None:
        leaf = sw.zeros(4, 3, requires_grad=True, device_mesh=mesh, placements=[Shard(0)])
        with pytest.raises(RuntimeError, match="leaf"):
            leaf.normal_()
        with torch.no_grad():
            assert leaf.normal_() is leaf
        y = leaf * 2
        y.uniform_()
        y.sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), torch.zeros(4, 3))

    on_mesh(on_rank)


def test_tensor_probabilities() -> None:
    p = torch.rand(7, 5)

    def on_rank(mesh: Any) -> None:
        compare(torch.bernoulli, p, mesh, LAYOUTS[:-1])
        compare(torch.bernoulli, p.t(), mesh, LAYOUTS[:4])
        compare(lambda x: torch.bernoulli(x, 0.3), p, mesh, LAYOUTS[:4])
        compare(lambda x: x.bernoulli(), p.double(), mesh, LAYOUTS[:4])
        compare(lambda x: x.bernoulli_(p), torch.zeros(7, 5), mesh, inplace=True)
        compare(
            lambda x: x.bernoulli_(p[:1]), torch.zeros(7, 5), mesh, LAYOUTS[:6], inplace=True
        )
        compare(
            lambda x: x.bernoulli_(p.t()),
            torch.zeros(7, 5).t(),
            mesh,
            LAYOUTS[:6],
            inplace=True,
        )
        for placed in ((Shard(1), Shard(0)), (Replicate(), Shard(0)), (Partial(), Shard(1))):
            q = sw.distribute_tensor(p, mesh, placed)
            torch.manual_seed(2)
            want = torch.zeros(7, 5).bernoulli_(p)
            torch.manual_seed(2)
            x = sw.zeros(7, 5, device_mesh=mesh, placements=[Shard(0), Shard(0)])
            assert torch.equal(x.bernoulli_(q).full_tensor(), want)
            torch.manual_seed(2)
            assert torch.equal(torch.zeros(7, 5).bernoulli_(q), want)

    on_mesh(on_rank)


def test_normal_of_tensors() -> None:
    mean, std, row = torch.randn(7, 5), torch.rand(7, 5), torch.rand(5)

    def on_rank(mesh: Any) -> None:
        compare(lambda x: torch.normal(x, 2.0), mean, mesh, LAYOUTS[:-1])
        compare(lambda x: torch.normal(x), mean, mesh, LAYOUTS[:4])
        compare(lambda x: torch.normal(1.5, x), std, mesh, LAYOUTS[:-1])
        compare(lambda x: torch.normal(x, std), mean, mesh, LAYOUTS[:6])
        compare(lambda x: torch.normal(x, row), mean, mesh, LAYOUTS[:6])
        x = sw.distribute_tensor(mean, mesh, [Shard(0)]).requires_grad_()
        for y in (torch.normal(x, 1.0), torch.bernoulli(x.sigmoid())):
            x.grad = None
            (y * y).sum().backward()
            assert torch.equal(x.grad.full_tensor(), torch.zeros(7, 5))

    on_mesh(on_rank)


WHOLE: dict[str, Callable[[Any], Tensor]] = {
    "multinomial": lambda x: torch.multinomial(x, 3),
    "method": lambda x: x.multinomial(3, replacement=True),
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5.0), x),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu eval": lambda x: F.rrelu(x - 0.5),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "gumbel hard": lambda x: F.gumbel_softmax(x, hard=True, dim=0),
    "gamma": lambda x: torch.distributions.Gamma(x, x, validate_args=False).sample(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_draws_that_depend_on_data(name: str) -> None:
    def on_rank(mesh: Any) -> None:
        x = torch.rand(7, 5)
        for placed in LAYOUTS[:-1]:
            d = sw.distribute_tensor(x, mesh, placed)
            torch.manual_seed(4)
            want = WHOLE[name](x)
            torch.manual_seed(4)
            got = WHOLE[name](d)
            torch.testing.assert_close(got.full_tensor(), want)

    on_mesh(on_rank)


def test_distributions() -> None:
    def on_rank(mesh: Any) -> None:
        loc = torch.rand(7, 5)
        d = sw.distribute_tensor(loc, mesh, [Shard(0), Shard(1)])
        for make in (
            lambda x: torch.distributions.Normal(x, x + 1),
            lambda x: torch.distributions.Bernoulli(x),
            lambda x: torch.distributions.Categorical(x),
        ):
            torch.manual_seed(4)
            want = make(loc).sample()
            torch.manual_seed(4)
            assert torch.equal(make(d).sample().full_tensor(), want)

    on_mesh(on_rank)


# ---- streams and generators -----------------------------------------------------------------------


def test_a_generator_of_ones_own() -> None:
    def on_rank(mesh: Any) -> None:
        def seeded() -> Generator:
            return Generator().manual_seed(9)

        before = torch.get_rng_state()
        x = sw.zeros(7, 5, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        for call in (
            lambda t, g: t.normal_(generator=g),
            lambda t, g: t.bernoulli_(0.5, generator=g),
            lambda t, g: torch.rand_like(t, generator=g),
            lambda t, g: torch.bernoulli(t * 0 + 0.5, generator=g),
            lambda t, g: torch.multinomial(t * 0 + 0.5, 2, generator=g),
        ):
            assert torch.equal(
                call(x, seeded()).full_tensor(), call(torch.zeros(7, 5), seeded())
            )
        got = sw.randn(6, device_mesh=mesh, placements=[Shard(0)], generator=seeded())
        assert torch.equal(got.full_tensor(), torch.randn(6, generator=seeded()))
        assert torch.equal(torch.get_rng_state(), before)

    on_mesh(on_rank)


def test_philox_is_the_same_on_every_layout() -> None:
    def on_rank(mesh: Any) -> None:
        with sw.rng(like="philox"):
            wholes = []
            for placed in LAYOUTS:
                torch.manual_seed(2)
                x = sw.randn(7, 5, device_mesh=mesh, placements=placed)
                y = x.uniform_().full_tensor()
                wholes.append(
                    torch.stack(
                        [
                            y,
                            torch.rand_like(x).full_tensor(),
                            torch.bernoulli(x * 0 + 0.5).full_tensor(),
                        ]
                    )
                )
            assert all(torch.equal(w, wholes[0]) for w in wholes)
        torch.manual_seed(2)
        assert not torch.equal(torch.randn(7, 5), wholes[0][0])

    on_mesh(on_rank)


def test_nothing_is_communicated() -> None:
    def on_rank(mesh: Any) -> None:
        x = sw.zeros(7, 5, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        pending = sw.zeros(7, 5, device_mesh=mesh, placements=[Shard(0), Partial()])
        with CommLog() as log, sw.strict():
            x.normal_()
            pending.normal_()
            torch.rand_like(pending)
            torch.bernoulli(x.sigmoid())
            x.bernoulli_(x.sigmoid())
            sw.randn(9, 9, device_mesh=mesh, placements=[Shard(1)])
        assert log.bytes == 0
        with sw.strict(), pytest.raises(StrictError):
            torch.multinomial(x.exp(), 2)

    on_mesh(on_rank)


def test_ranks_out_of_step_are_told() -> None:
    def on_rank(rank: int) -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        sw.manual_seed(0)
        for call in range(1, 8):
            torch.manual_seed(rank if call in (4, 5) else 0)
            if call in (4, 5):  # 4 is looked at; after an error the next one is too
                with pytest.raises(ShardError, match=r"out of step: call torch\.manual_seed"):
                    sw.rand(3, device_mesh=mesh)
            else:
                sw.rand(3, device_mesh=mesh)

    sw.simulate(on_rank, 2)


def test_each_call_that_draws_looks() -> None:
    def on_rank(rank: int) -> None:
        for i, call in enumerate(
            (
                lambda x: x.normal_(),
                lambda x: F.dropout(x, 0.5),
                lambda x: torch.multinomial(x.exp(), 2),
                torch.rand_like,
                torch.bernoulli,
                lambda x: nn.init.kaiming_uniform_(x),
            )
        ):
            mesh = sw.init_device_mesh("cpu", (2,) + (1,) * i)  # counts for itself
            x = sw.zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
            torch.manual_seed(rank)
            with pytest.raises(ShardError, match="out of step"):
                call(x)

    sw.simulate(on_rank, 2)


def test_a_generator_shared_by_virtual_ranks_is_refused() -> None:
    shared = Generator()

    def on_rank(mesh: Any) -> None:
        with pytest.raises(ShardError, match="share one"):
            sw.rand(4, device_mesh=mesh, generator=shared)

    on_mesh(on_rank)


def test_ranks_draw_for_themselves() -> None:
    def on_rank(rank: int) -> Tensor:
        torch.manual_seed(rank)
        a = torch.rand(2)
        sw.zeros(
            4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[Shard(0)]
        ).full_tensor()
        b = torch.rand(2)
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(2), a)
        assert torch.equal(torch.rand(2), b)
        return a

    a, b = sw.simulate(on_rank, 2)
    assert not torch.equal(a, b)


def test_writing_into_a_view_that_moved() -> None:
    views = [
        lambda x: x.view(4, 5),  # three rows and two of four elements: a copy
        lambda x: x[1],
        lambda x: x[1:4],
        lambda x: x[:, 1],
        lambda x: x.view(20)[7:9],
    ]
    calls = [
        lambda v: v.normal_(),
        lambda v: v.random_(9),
        lambda v: F.dropout(v, 0.5, inplace=True),
        lambda v: v.bernoulli_(v.sigmoid()),
        lambda v: v.mul_(2),
    ]

    def on_rank(mesh: Any) -> None:
        for view, call, dim in itertools.product(views, calls, (0, 1)):
            want = torch.arange(20.0).view(5, 4)
            x = sw.distribute_tensor(want, mesh, [Shard(dim)])
            with sw.rng(like="torch"):
                torch.manual_seed(1)
                call(view(want))
                torch.manual_seed(1)
                call(view(x))
            assert torch.equal(x.full_tensor(), want)
        y = sw.zeros(5, 4, device_mesh=mesh, placements=[Shard(0)])
        moved = y.unflatten(1, (2, 2)).flatten(0, 1)
        if "_view_of" in moved.__dict__:
            stale = y[1]
            moved.normal_()
            assert torch.equal(stale.full_tensor(), y.full_tensor()[1])
            stale.normal_()
            assert torch.equal(stale.full_tensor(), y.full_tensor()[1])

    on_mesh(on_rank, (2,))


def test_bad_parameters_raise_on_every_rank() -> None:
    def on_rank(mesh: Any) -> None:
        x = sw.zeros(1, 3, device_mesh=mesh, placements=[Shard(0)])
        for call in (
            lambda: x.normal_(0, -1),
            lambda: x.uniform_(2, 1),
            lambda: x.bernoulli_(1.5),
            lambda: x.geometric_(),
        ):
            with pytest.raises(Exception, match=r"std|uniform|p to be in|\"p\""):
                call()

    on_mesh(on_rank)


def test_layout_combinations_are_all_equal() -> None:
    def on_rank(mesh: Any) -> None:
        torch.manual_seed(0)
        want = torch.randn(3, 6, 5)
        each = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]
        for placed in itertools.product(each, each):
            torch.manual_seed(0)
            assert torch.equal(
                sw.randn(3, 6, 5, device_mesh=mesh, placements=placed).full_tensor(), want
            )

    on_mesh(on_rank)
