"""Factories make the local piece of what plain torch makes; ``*_like`` and ``new_*`` keep layouts."""

from collections.abc import Callable
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.errors import LayoutError, UnsupportedError

ORDERED = (Shard(0, order=1), Shard(0, order=0))


def on_mesh(fn: Callable[[Any], Any], shape: tuple[int, ...] = (2, 2)) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return sw.simulate(lambda: fn(sw.init_device_mesh("cpu", shape)), n)


def layouts(ndim: int, axes: int = 2) -> list[tuple[Any, ...]]:
    """Each placement on each axis, some on both."""
    each = [Partial(), *(Shard(d) for d in range(ndim))]
    out = [
        tuple(p if a == axis else Replicate() for a in range(axes))
        for p in each
        for axis in range(axes)
    ]
    out += list(zip(each, each[1:] + each[:1]))
    return [*out, *([ORDERED, (Shard(0), Shard(0))] if ndim else [])]


def same(got: DTensor, want: Tensor) -> None:
    assert isinstance(got, DTensor)
    assert got.dtype == want.dtype
    assert tuple(got.shape) == tuple(want.shape)
    assert got.stride() == want.stride()
    assert got.requires_grad == want.requires_grad
    assert got._local.shape == got._spec.local_shape
    assert torch.equal(got.detach().full_tensor(), want.detach())


@pytest.mark.parametrize("shape", [(), (1,), (5,), (7, 3), (2, 0, 3), (3, 5, 2)], ids=str)
def test_constants_on_every_layout(shape: tuple[int, ...]) -> None:
    def on_rank(mesh: Any) -> None:
        for placed in layouts(len(shape)):
            where = {"device_mesh": mesh, "placements": placed}
            same(sw.zeros(*shape, **where), torch.zeros(shape))
            same(
                sw.ones(shape, dtype=torch.float64, requires_grad=True, **where),
                torch.ones(shape).double().requires_grad_(),
            )
            same(sw.full(shape, 3, **where), torch.full(shape, 3))
            same(
                sw.full(shape, 2.5, dtype=torch.bfloat16, **where),
                torch.full(shape, 2.5, dtype=torch.bfloat16),
            )
            assert tuple(sw.empty(list(shape), **where).shape) == shape

    on_mesh(on_rank)


def test_sizes_are_given_as_in_torch() -> None:
    def on_rank(mesh: Any) -> None:
        with mesh:
            for size in ((3, 4), ((3, 4),), ([3, 4],), (torch.Size((3, 4)),)):
                assert tuple(sw.zeros(*size).shape) == (3, 4)
            assert tuple(sw.ones().shape) == ()
            assert tuple(sw.full(3, 1.0).shape) == (3,)
            assert sw.full((2,), True).dtype == torch.bool

    on_mesh(on_rank)


def test_only_the_piece_is_made() -> None:
    def on_rank(mesh: Any) -> None:
        for make in (sw.zeros, sw.ones, sw.empty):
            x = make(8, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)])
            assert x.to_local().untyped_storage().nbytes() == 4 * 3 * 4
        numbers = sw.arange(1000, device_mesh=mesh, placements=[Shard(0), Shard(0)])
        assert numbers.to_local().untyped_storage().nbytes() == 250 * 8
        eye = sw.eye(8, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        assert eye.to_local().untyped_storage().nbytes() == 4 * 4 * 4

    on_mesh(on_rank)


@pytest.mark.parametrize(
    "args",
    [
        (0,),
        (11,),
        (3, 20),
        (0, 1, 0.1),
        (10, -3, -2),
        (1.5, 9.0),
        (-4.0, 11.0, 3.0),
        (0.0, 2e7, 1e6 + 0.5),
    ],
    ids=str,
)
def test_arange(args: tuple[Any, ...]) -> None:
    def on_rank(mesh: Any) -> None:
        dtypes = (
            (None, torch.float64) if args[-1] == 0.1 else (None, torch.float64, torch.int32)
        )
        for placed, dtype in itertools.product(layouts(1), dtypes):
            same(
                sw.arange(*args, dtype=dtype, device_mesh=mesh, placements=placed),
                torch.arange(*args, dtype=dtype),
            )

    on_mesh(on_rank)


def test_eye_and_linspace() -> None:
    def on_rank(mesh: Any) -> None:
        for placed in layouts(2):
            for n, m in ((5, None), (3, 7), (7, 3), (1, 4), (0, 3)):
                want = torch.eye(n, m if m is not None else n)
                same(sw.eye(n, m, device_mesh=mesh, placements=placed), want)
        for placed in layouts(1):
            same(
                sw.linspace(-1, 2.5, 7, device_mesh=mesh, placements=placed),
                torch.linspace(-1, 2.5, 7),
            )

    on_mesh(on_rank)


def test_out() -> None:
    def on_rank(mesh: Any) -> None:
        for placed in layouts(2):
            x = sw.empty(5, 3, device_mesh=mesh, placements=placed)
            calls: list[Callable[[Any], Tensor]] = [
                lambda t: torch.eye(5, 3, out=t),
                lambda t: torch.full((5, 3), 2.0, out=t),
                lambda t: torch.zeros(5, 3, out=t),
                lambda t: torch.ones((5, 3), out=t),
                lambda t: torch.rand(5, 3, out=t),
                lambda t: torch.randn(5, 3, out=t),
                lambda t: torch.randint(2, 9, (5, 3), out=t),
            ]
            for call in calls:
                torch.manual_seed(3)
                want = call(torch.empty(5, 3))
                torch.manual_seed(3)
                assert call(x) is x
                assert x.placements == tuple(placed)
                assert torch.equal(x.full_tensor(), want)
        y = sw.empty(6, device_mesh=mesh, placements=[Shard(0)])
        torch.arange(6, out=y)
        assert torch.equal(y.full_tensor(), torch.arange(6.0))
        with pytest.raises(LayoutError, match="shape"):
            torch.zeros(4, out=y)

    on_mesh(on_rank)


def test_wrong_arguments() -> None:
    def on_rank(mesh: Any) -> None:
        with pytest.raises(LayoutError, match="dims"):
            sw.zeros(3, device_mesh=mesh, placements=[Shard(1)])
        with pytest.raises(UnsupportedError, match="strided"):
            sw.zeros(3, layout=torch.sparse_coo, device_mesh=mesh)
        with pytest.raises(LayoutError, match="shape"):
            sw.zeros(-1, device_mesh=mesh)
        with pytest.raises(LayoutError, match="randint takes"):
            sw.randint(3, device_mesh=mesh)

    on_mesh(on_rank)


# ---- *_like and new_* -------------------------------------------------------------------------------

LIKES: dict[str, Callable[[Any], Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": lambda x: torch.ones_like(x, dtype=torch.int32),
    "full": lambda x: torch.full_like(x, 2.5, requires_grad=True),
    "rand": torch.rand_like,
    "randn": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randn contiguous": lambda x: torch.randn_like(x, memory_format=torch.contiguous_format),
    "randint": lambda x: torch.randint_like(x, 7),
    "randint low": lambda x: torch.randint_like(x, 3, 9, dtype=torch.int64),
    "randint named": lambda x: torch.randint_like(x, low=3, high=9),
    "meta": lambda x: torch.zeros_like(x, device="meta"),
}


@pytest.mark.parametrize("name", LIKES)
def test_like_keeps_the_layout(name: str) -> None:
    def on_rank(mesh: Any) -> None:
        for placed, turned in itertools.product(layouts(2), (False, True)):
            plain = torch.randn(7, 5).t() if turned else torch.randn(5, 7)
            x = sw.distribute_tensor(plain, mesh, placed)
            torch.manual_seed(5)
            want = LIKES[name](plain)
            state = torch.get_rng_state()
            torch.manual_seed(5)
            got = LIKES[name](x)
            assert torch.equal(torch.get_rng_state(), state)
            assert got.placements == tuple(
                Replicate() if p.is_partial() else p for p in x.placements
            )
            if name == "meta":
                assert (got.device.type, got.is_meta, got.stride()) == (
                    "meta",
                    True,
                    want.stride(),
                )
            else:
                same(got, want)

    on_mesh(on_rank)


def test_like_channels_last_and_expanded() -> None:
    def on_rank(mesh: Any) -> None:
        plain = torch.randn(3, 4, 2, 5).to(memory_format=torch.channels_last)
        x = sw.distribute_tensor(plain, mesh, [Shard(0), Shard(1)])
        for call in (torch.zeros_like, torch.randn_like, torch.rand_like):
            torch.manual_seed(1)
            want = call(plain)
            torch.manual_seed(1)
            same(call(x), want)
        y = sw.distribute_tensor(torch.randn(3, 1), mesh, [Shard(0)]).expand(3, 4)
        assert (
            torch.zeros_like(y).stride()
            == torch.zeros_like(torch.randn(3, 1).expand(3, 4)).stride()
        )
        assert torch.empty_like(x).placements == x.placements
        with pytest.raises(UnsupportedError, match="cpu mesh"):
            torch.zeros_like(x, device="cuda")

    on_mesh(on_rank)


def test_new() -> None:
    def on_rank(mesh: Any) -> None:
        for placed in layouts(2):
            plain = torch.randn(5, 3)
            x = sw.distribute_tensor(plain, mesh, placed)
            kept = tuple(Replicate() if p.is_partial() else p for p in x.placements)
            calls: list[Callable[[Any], Tensor]] = [
                lambda t: t.new_zeros(5, 3),
                lambda t: t.new_ones((5, 3), dtype=torch.int64),
                lambda t: t.new_full((5, 3), 2.5, requires_grad=True),
                lambda t: t.new_zeros(t.shape),
                lambda t: t.new_full(size=(5, 3), fill_value=1),
            ]
            for call in calls:
                got = call(x)
                same(got, call(plain))
                assert got.placements == kept
            for call in (
                lambda t: t.new_zeros(4),
                lambda t: t.new_ones(()),
                lambda t: t.new_full((2, 2, 2), 1.0),
            ):
                same(call(x), call(plain))
                assert call(x).layout.is_replicated
            assert x.new_empty((5, 3)).placements == kept
            strided = x.new_empty_strided((5, 3), (1, 5))
            assert strided.placements == kept
            assert strided.stride() == (1, 5)

    on_mesh(on_rank)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    def on_rank(rank: int) -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.randn(4, 3, device_mesh=mesh, placements=[Shard(0)])
        assert x.to_local().numel() == (6 if rank < 2 else 0)
        assert torch.zeros_like(x).to_local().numel() == (6 if rank < 2 else 0)
        everywhere = sw.init_device_mesh("cpu", (3,))  # the outsider has kept step
        torch.manual_seed(0)
        torch.randn(4, 3)
        want = torch.rand(5)
        torch.manual_seed(0)
        sw.randn(4, 3, device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(
            sw.rand(5, device_mesh=everywhere, placements=[Shard(0)]).full_tensor(), want
        )
        assert tuple(torch.multinomial(x.exp(), 2).shape) == (4, 2)
        assert (
            tuple(torch.bernoulli(x.sigmoid()).shape)
            == tuple(torch.dropout(x, 0.5, True).shape)
            == (4, 3)
        )

    sw.simulate(on_rank, 3)
