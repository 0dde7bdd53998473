"""Views: what stays sharded, sizes of pieces, aliases and copies."""

from collections.abc import Callable
import itertools
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.errors import UnsupportedError
from shardwise.events import CommLog
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, check, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Cold and warm."""
    return lambda *args: (fn(*args), fn(*args))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(0))


EVEN = {
    "view split": lambda x: x.view(2, 2, 6, 8),
    "view merge": lambda x: x.view(-1, 8),
    "view tuple": lambda x: x.view((4, 48)),
    "view infer": lambda x: x.view(4, -1, 3, 2, 8),
    "view flat": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(8, 3, 8),
    "reshape copies": lambda x: (
        x.transpose(0, 1).reshape(24, 8),
        x.permute(2, 0, 1).reshape(8, -1),
    ),
    "flatten": lambda x: (x.flatten(1), x.flatten(), torch.flatten(x, 0, 1), x.ravel()),
    "unflatten": lambda x: (x.unflatten(1, (2, -1)), torch.unflatten(x, 0, (2, 2))),
    "permute": lambda x: (x.permute(2, 0, 1), torch.permute(x, (1, 0, 2)), x.permute(0, -1, 1)),
    "transpose": lambda x: (
        x.transpose(-1, 0),
        torch.swapaxes(x, 0, 2),
        x.swapdims(1, 2),
        x.mT,
        x.adjoint(),
    ),
    "movedim": lambda x: (x.movedim(0, -1), torch.moveaxis(x, (0, 1), (2, 0))),
    "unsqueeze": lambda x: (x.unsqueeze(1), torch.unsqueeze(x, -1), x[None]),
    "squeeze": lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 2))),
    "expand": lambda x: (
        x.unsqueeze(0).expand(3, -1, 6, 8),
        x.expand(2, 4, 6, 8),
        torch.broadcast_to(x, (2, 4, 6, 8)),
    ),
    "repeat": lambda x: (
        x.repeat(1, 2, 1),
        x.repeat(2, 1, 1, 1),
        x.tile(2),
        torch.tile(x, (2, 1, 1)),
    ),
    "as": lambda x: (
        x.view_as(torch.zeros(8, 3, 8)),
        x.reshape_as(torch.zeros(24, 8)),
        x.expand_as(torch.zeros(2, 4, 6, 8)),
    ),
    "complex": lambda x: (
        torch.view_as_real(torch.complex(x, x)),
        torch.view_as_complex(x.view(4, 6, 4, 2)).abs(),
    ),
    "atleast": lambda x: (
        torch.atleast_3d(x[0, 0], x),
        torch.atleast_2d(x[0, 0]),
        torch.atleast_1d(x[0, 0, 0]),
    ),
    "detach": lambda x: x.detach(),
    "chain": lambda x: (
        x.view(4, 6, 2, 4).transpose(1, 2).reshape(4, 12, 4).transpose(1, 2).flatten(1)
    ),
}


@pytest.mark.parametrize("name", EVEN)
def test_even_sizes(name: str) -> None:
    assert not sweep(EVEN[name], rand(4, 6, 8), meshes=((2, 2),), extra=2)


def test_uneven_sizes_and_empty_pieces() -> None:
    def odd(x: torch.Tensor) -> Any:
        return (
            x.view(15, 7),
            x.view(5, 21),
            x.reshape(-1),
            x.view(5, 1, 3, 7),
            x.unflatten(0, (5, 1)),
            x.mT,
        )

    assert not sweep(twice(odd), rand(5, 3, 7), meshes=((4,),), extra=2)

    def ones(x: torch.Tensor) -> Any:
        shapes = (x.view(5, 4), x.view(20), x.view(1, 1, 5, 4), x.expand(3, 5, 2, 4))
        return (
            *shapes,
            x.squeeze(),
            x.squeeze(0),
            x.squeeze(1),
            x.squeeze((0, 2)),
            torch.squeeze(x, dim=2),
        )

    assert not sweep(twice(ones), rand(1, 5, 1, 4), meshes=((4,),), extra=2)
    assert not sweep(
        lambda x: (x.view(3, 0), x.reshape(0), x.reshape(3, 2, 0, 5), x.squeeze(), x.t()),
        rand(0, 3),
        meshes=((2,),),
    )
    assert not sweep(
        lambda x: (x.view(1, 1), x.reshape(-1), x.flatten(), x.expand(3)),
        rand(),
        meshes=((2,),),
    )


def test_dims_of_one_that_are_cut_are_merged_and_split_in_their_places() -> None:
    """The shapes alone do not tell which of two dims of size one was merged; some ranks hold none of it."""

    def merged(x: torch.Tensor) -> Any:
        return x.flatten(0, 1), x.flatten(1, 2), torch.flatten(x, 0, 1).flatten()

    def split(x: torch.Tensor) -> Any:
        return x.unflatten(1, (1, 1)), x.unflatten(0, (3, 1)), x.unflatten(2, (1, -1))

    for fn in (merged, split):
        assert not sweep(twice(fn), rand(3, 1, 1), meshes=((2,), (2, 2)), extra=2)


def test_squeeze_drops_no_dim_that_is_one_only_in_a_piece() -> None:
    def on_rank() -> None:
        x = distribute_tensor(rand(2, 5), init_device_mesh("cpu", (2,)), [S(0)])
        for y in (
            x.squeeze(),
            x.squeeze(0),
            torch.ops.aten.squeeze.default(x),
            torch.ops.aten.squeeze.dim(x, 0),
        ):
            assert y.shape == (2, 5)
            assert y.to_local().shape == (1, 5)

    simulate(on_rank, 2)


def test_what_stays_sharded() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(rand(8, 4, 6), mesh, [S(0), S(0)])
        with CommLog() as log:
            assert x.view(-1, 6).placements == (S(0), S(0))
            assert x.view(4, 2, 4, 6).placements == (S(0), S(0))
            assert x.view(16, 2, 6).placements == (S(0), S(0))
            assert x.permute(1, 2, 0).placements == (S(2), S(2))
            assert x.unsqueeze(0).expand(3, -1, -1, -1).placements == (S(1), S(1))
            assert x.repeat(1, 2, 1).placements == (S(0), S(0))
            assert x.transpose(0, 1).reshape(4, 48).placements == (S(1), S(1))
            assert x.squeeze().flatten(1).placements == (S(0), S(0))
        assert log.bytes == 0
        y = distribute_tensor(rand(8, 4, 6), mesh, [S(0), S(2)])
        with CommLog() as log:
            assert y.view(8, 4, 2, 3).placements == (S(0), S(2))
            assert y.view(2, 4, 4, 6).placements == (S(0), S(3))
            assert y.view(8, 4, 6, 1).placements == (S(0), S(2))
        assert log.bytes == 0

    simulate(on_rank, 4)


@pytest.mark.parametrize("placement", [S(0), P])
def test_nothing_moves(placement: Any) -> None:
    def calls(x: torch.Tensor) -> None:
        x.view(-1, 3, 8)
        x.view(4, 48)
        x.reshape(8, 3, 8)
        x.transpose(1, 2).reshape(4, 48)
        x.flatten(1)
        x.unflatten(0, (2, 2))
        x.permute(2, 1, 0)
        x.squeeze()
        x.expand(2, 4, 6, 8)
        x.repeat(1, 2, 1)

    assert bytes_moved(calls, [rand(4, 6, 8)], (2,), ((placement,),)) == 0


def test_a_view_is_an_alias_and_a_reshape_that_copies_is_not() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placements in ([S(0)], [S(1)], [R]):
            x = distribute_tensor(torch.zeros(4, 6), mesh, placements)
            x.view(4, 6, 1).add_(1)
            x.t().add_(1)
            x.reshape(2, 2, 6).add_(1)
            if placements == [S(0)]:
                x.view(-1).add_(1)
            copy = x.t().reshape(24)
            copy.add_(100)
            assert torch.equal(
                x.full_tensor(), torch.full((4, 6), 4.0 if placements == [S(0)] else 3.0)
            )
        x = distribute_tensor(
            torch.zeros(2, 3), mesh, [S(0)]
        )  # each piece alone could be viewed
        x.t().reshape(6).add_(1)
        assert x.full_tensor().abs().sum() == 0

    simulate(on_rank, 2)


def test_a_view_that_had_to_move() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, want = distribute_tensor(rand(4, 6), mesh, [S(1)]), rand(4, 6)
        for _ in range(2):  # cold and warm
            flat = x.view(-1)
            assert torch.equal(flat.full_tensor(), want.view(-1))
            flat.add_(1)
            flat[2:5].mul_(2.0)
            flat.view(6, 4)[1] = 0.5
            want.add_(1).view(-1)[2:5] *= 2.0
            want.view(6, 4)[1] = 0.5
            assert torch.equal(x.full_tensor(), want)
            for write in (
                lambda y: y.view(-1).detach().add_(1),
                lambda y: y.view(-1).view(6, 4).t().add_(1),
                lambda y: y.view(-1).clone().add_(1),
                lambda y: y.t().reshape(-1).add_(1),  # a copy on one device, too
                lambda y: y.t().flatten().add_(1),
            ):
                write(x)
                write(want)
                assert torch.equal(x.full_tensor(), want)
        flat, part = x.view(-1), x.view(-1)[1:3]
        x.mul_(2)
        want.mul_(2)
        assert torch.equal((flat + 1).full_tensor(), want.view(-1) + 1)
        assert torch.equal((part + 1).full_tensor(), want.view(-1)[1:3] + 1)
        assert (x.view(-1) + 1).shape == (24,)

    simulate(on_rank, 2)


def test_refused_as_torch_refuses() -> None:
    def on_rank() -> None:
        x = distribute_tensor(rand(4, 6), init_device_mesh("cpu", (2,)), [S(0)])
        for bad in (
            lambda: x.view(5, 5),
            lambda: x.t().view(-1),
            lambda: x.permute(0, 0),
            lambda: x.expand(3, 4),
            lambda: x.unflatten(0, (3, -1)),
        ):
            with pytest.raises(RuntimeError):
                bad()
        with pytest.raises(IndexError):
            x.transpose(0, 2)

    simulate(on_rank, 2)


def test_as_another_dtype() -> None:
    ids = torch.arange(24).view(4, 6)
    assert not sweep(twice(lambda i: (i.view(D), i.view(torch.int32))), ids, meshes=((2,),))


def test_in_place() -> None:
    def changed(x: torch.Tensor) -> Any:
        y = x * 1
        y.t_().unsqueeze_(1)
        y.add_(1)
        z = (x * 2).transpose_(0, 1).unsqueeze_(0).squeeze_()
        return y, z, z.sum(0), (x * 3).swapaxes_(0, 1) @ x

    assert not sweep(twice(changed), rand(4, 3), meshes=((4,),))

    def on_rank() -> None:
        x = distribute_tensor(rand(4, 3), init_device_mesh("cpu", (2,)), [S(0)])
        assert x.t_() is x
        assert x.shape == x.size() == (3, 4)
        assert x.stride() == (1, 3)
        assert x.placements == (S(1),)
        for refused in (lambda: x.resize_(2, 2), lambda: x.as_strided_((2,), (2,))):
            with pytest.raises(UnsupportedError):
                refused()
        x.requires_grad_()
        with pytest.raises(RuntimeError):
            x.t_()

    simulate(on_rank, 2)


def test_of_several_tensors() -> None:
    def several(a: torch.Tensor, b: torch.Tensor) -> Any:
        grids = torch.meshgrid(a[:, 0], b, indexing="xy") + torch.meshgrid(
            [a[:, 0], b], indexing="ij"
        )
        return *grids, *torch.broadcast_tensors(a, b), torch.cartesian_prod(a[:, 0], b)

    assert not sweep(several, rand(5, 1), rand(4), meshes=((4,),), extra=2)


def test_aten_forms() -> None:
    aten = torch.ops.aten

    def forms(x: torch.Tensor) -> Any:
        return (
            aten.view.default(x, [4, 2, 3]),
            aten._unsafe_view.default(x, [24]),
            aten.reshape.default(x, [-1, 3]),
            aten.expand.default(x, [2, 4, 6]),
            aten.permute.default(x, [1, 0]),
            aten.transpose.int(x, 0, 1),
            aten.t.default(x),
            aten.unsqueeze.default(x, 0),
            aten.squeeze.dims(x, [0, 1]),
            aten.repeat.default(x, [2, 1, 1]),
            aten.alias.default(x),
        )

    assert not sweep(twice(forms), rand(4, 6), meshes=((4,),), extra=1)


@pytest.mark.parametrize(
    ("fn", "shape", "placement"),
    [
        (lambda x: x.flatten(), (5, 5, 5), S(0)),
        (lambda x: x.view(5, 25).reshape(-1), (5, 5, 5), S(0)),
        (lambda x: x.flatten(1), (3, 5, 4), S(1)),
        (lambda x: x.unflatten(1, (5, 3)), (2, 15), S(1, unit=3)),
        (lambda x: x.view(2, 5, 3).transpose(0, 1), (2, 15), S(1, sizes=(3, 12))),
        (lambda x: x.ravel() + 1, (5, 4), S(0, owner=1)),
    ],
)
def test_dims_merge_and_split_where_pieces_end_between_rows(fn, shape, placement):
    assert bytes_moved(fn, [rand(*shape)], (2,), ((placement,),)) == 0
    assert not sweep(fn, rand(*shape))
    assert not sweep(fn, rand(*shape), chosen=True)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x.view(2, 12), (4, 6)),
        (lambda x: x.view(4, 6), (2, 12)),
        (lambda x: x.view(5, 3, 2), (5, 6)),
        (lambda x: x.flatten(), (5, 3)),
    ],
)
def test_dims_that_merge_next_to_a_dim_that_must_be_whole(fn, shape):
    placements = [R, S(0), S(1), P, S(0, owner=1), S(1, unit=2)]
    for a, b in itertools.product(placements, placements):
        assert check(fn, [rand(*shape)], (2, 2), ((a, b),)) is None


def test_a_flattened_uneven_dim_is_cut_in_units():
    def check(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(rand(5, 5, 5), mesh, [S(0)])
        flat = x.flatten()
        assert flat.placements == (S(0, sizes=(75, 50)),)
        assert flat.layout is distribute_tensor(rand(125), mesh, [S(0, unit=25)]).layout
        assert flat.view(5, 25).layout is x.view(5, 25).layout
        assert flat.view(25, 5).placements == (S(0, sizes=(15, 10)),)
        with CommLog() as log:
            flat.view(125, 1)
        assert log.bytes == 0

    simulate(check, 2)
