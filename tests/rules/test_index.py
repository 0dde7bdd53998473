"""Reading by slices and positions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64
SMALL = ((4,),)


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Cold and warm."""
    return lambda *args: (fn(*args), fn(*args))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


X = rand(5, 3, 7)


def test_rows_and_slices() -> None:
    def rows(x: torch.Tensor) -> Any:
        return x[3], x[:, 1], x[-1, :, 3], x[0, 0, 0], x.select(1, -1), x[2, None, ..., 1]

    def slices(x: torch.Tensor) -> Any:
        some = (
            x[1:3],
            x[:4],
            x[::3],
            x[2:],
            x[:, :, 2:5],
            x[1:2, ..., -1],
            x[..., None, 3],
            x[1:1],
            x[:-1, :-1],
        )
        return (
            *some,
            x[0:5, None],
            x.narrow(0, 1, 1),
            x.narrow(1, 0, 3),
            torch.narrow(x, 2, 0, 6),
        )

    for fn in (rows, slices):
        assert not sweep(twice(fn), X, meshes=((4,), (2, 2)), extra=2)
        assert not sweep(
            fn, X.transpose(0, 2).contiguous().transpose(0, 2), meshes=((4,),), extra=0
        )


def test_pieces() -> None:
    def pieces(x: torch.Tensor) -> Any:
        split = (
            x.split(2),
            torch.split(x, [1, 2], 1),
            x.chunk(3, -1),
            torch.chunk(x, 4),
            x.unbind(1),
            list(x),
        )
        cut = (
            x.tensor_split(3, 1),
            torch.tensor_split(x, (1, 4), dim=2),
            torch.hsplit(x, [1]),
            x.vsplit([1]),
        )
        return split, cut

    assert not sweep(pieces, X, meshes=SMALL, extra=1)

    def on_rank() -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [S(0)])
        for _ in range(2):
            assert isinstance(x.chunk(2, 1), type(X.chunk(2, 1)))
            assert isinstance(x.split(2, 1), type(X.split(2, 1)))
            assert [p.placements for p in x.chunk(2, 2)] == [(S(0),), (S(0),)]
            q, k = x.split([3, 4], dim=2)
            assert q.shape == (5, 3, 3)
            assert k.placements == (S(0),)

    simulate(on_rank, 2)


def test_diagonals_and_windows() -> None:
    def diagonals(x: torch.Tensor) -> Any:
        some = (
            x.diagonal(0, 1, 2),
            torch.diagonal(x, 1, 0, 1),
            torch.linalg.diagonal(x, offset=-1),
            x.diagonal(-2, 2, 1),
        )
        return (
            *some,
            x.unfold(2, 3, 2),
            torch.diag_embed(x[0]),
            x.diag_embed(1, 0, 2),
            torch.diag(x[0]),
            torch.diag(x[0, 0], 1),
        )

    assert not sweep(diagonals, X, meshes=SMALL, extra=1)
    assert bytes_moved(lambda x: x.diagonal(), [rand(4, 4)], (2,), ((S(0),),)) == 0
    assert bytes_moved(lambda x: x.diagonal(1), [rand(4, 6)], (2,), ((S(0),),)) == 0
    assert bytes_moved(lambda x: x.diagonal(), [rand(6, 4)], (2,), ((S(1),),)) == 0


IDS = torch.tensor([0, 2, 2, 1])


def test_positions() -> None:
    def one(x: torch.Tensor, i: torch.Tensor) -> Any:
        return (
            x[i],
            x[i, 1],
            x[:, 1, i],
            x[i, :, i],
            x[i, None, :, i],
            x[1:3, i],
            x[..., i - 3],
            x[i, i, i],
        )

    assert not sweep(twice(one), X, IDS, meshes=((4,), (2, 2)), extra=3)

    def more(x: torch.Tensor, i: torch.Tensor) -> Any:
        return x[i], x[:, i], x[:, i, i], x[:, None, i], x[i][:, :, 0]

    assert not sweep(more, X, torch.tensor([[1, -1], [0, 2], [2, 1]]), meshes=SMALL, extra=3)
    assert not sweep(
        lambda x: (x[[0, 2]], x[:, [1, 1, 0]], x[1, [0, 2], :]), X, meshes=SMALL, extra=1
    )
    assert not sweep(lambda x, i: x[i], X, torch.arange(40) % 5, meshes=SMALL, extra=1)
    assert not sweep(
        lambda x, i: x[i], rand(2, 3), torch.tensor([0, 0, 1]), meshes=((4,),), extra=1
    )


def test_masks_and_scalars_take_the_ladder() -> None:
    assert not sweep(twice(lambda x, m: x[m]), X, X > 0, meshes=((2,),), extra=1)
    assert not sweep(lambda x, i: x[i], X, torch.tensor(2), meshes=((2,),), extra=1)


def test_along_one_dim() -> None:
    ids = torch.randint(0, 5, (5, 3, 7), generator=torch.Generator().manual_seed(0))

    def along(x: torch.Tensor, i: torch.Tensor) -> Any:
        return (
            x.gather(0, i),
            torch.gather(x, 2, i),
            torch.take_along_dim(x, i, 0),
            torch.take_along_dim(x, i[:, :1, :2], 2),
        )

    assert not sweep(twice(along), X, ids, meshes=((4,), (2, 2)), extra=3)
    assert not sweep(lambda x, i: torch.gather(x, 1, i), X, ids[:2] % 3, meshes=SMALL, extra=2)
    assert not sweep(
        twice(lambda x, i: (x.index_select(0, i), torch.index_select(x, 2, i))),
        X,
        IDS,
        meshes=SMALL,
    )


def test_reading_moves_nothing_or_little() -> None:
    def local(x: torch.Tensor) -> None:
        x[:, 1]
        x[:, 1:2]
        x[3]
        x[1:3]
        x[0:8, ..., None, 2]
        x[:7]
        x[::2]
        x[:, [0, 2]]
        x[torch.tensor([1, 7])]
        x.index_select(0, torch.tensor([1, 7]))
        x.chunk(2, 1)
        x.unbind(2)

    assert bytes_moved(local, [rand(8, 4, 6)], (2,), ((S(0),),)) == 0
    assert (
        bytes_moved(
            lambda x, i: torch.gather(x, 1, i),
            [rand(8, 9), torch.ones(8, 2, dtype=torch.int64)],
            (2,),
            ((S(0),), (S(0),)),
        )
        == 0
    )
    assert (
        bytes_moved(
            lambda x, i: torch.gather(x, 1, i),
            [rand(8, 9), torch.ones(8, 2, dtype=torch.int64)],
            (2,),
            ((S(1),), (R,)),
        )
        == 0
    )

    def on_rank() -> None:
        x = distribute_tensor(rand(8, 4, 6), init_device_mesh("cpu", (2,)), [S(0)])
        assert x[3].placements == (P,)
        assert x[1:3].placements == (P,)
        assert x[:7].placements == x[::2].placements == x[:, 1].placements == (S(0),)

    simulate(on_rank, 2)


def test_positions_outside_raise_on_all_ranks() -> None:
    def on_rank() -> None:
        x = distribute_tensor(rand(8, 4), init_device_mesh("cpu", (2,)), [S(0)])
        for bad in (torch.tensor([1, 8]), torch.tensor([-9, 0])):
            with pytest.raises((IndexError, RuntimeError)):
                x[bad]
        with pytest.raises((IndexError, RuntimeError)):
            x.index_select(0, torch.tensor([8]))
        with pytest.raises((IndexError, RuntimeError)):
            x[torch.tensor([8])] = 1.0
        with pytest.raises(IndexError):
            x[8]

    simulate(on_rank, 2)


def test_writes_into_rows_of_a_sharded_dim() -> None:
    def on_rank() -> None:
        x, want = (
            distribute_tensor(rand(4, 6), init_device_mesh("cpu", (2,)), [S(0)]),
            rand(4, 6),
        )
        for _ in range(2):  # cold and warm
            for y in (x, want):
                y[1].add_(1)
                y[1:2].mul_(2.0)
                y[:, 1].add_(1)
                y[:3].mul_(2)
                y[2] += 1
                y[1][2:4] = 7.0
                y.select(0, 1).add_(1)
                y.narrow(0, 2, 1).mul_(3)
                y.unbind(0)[1].add_(1)
            assert torch.equal(x.full_tensor(), want)
        row, row_ = x[1], want[1]
        x[0] = want[0] = 0.0
        x[1:3] = want[1:3] = 5.0
        assert torch.equal((row + 1).full_tensor(), row_ + 1)

    simulate(on_rank, 2)


def test_aten_forms() -> None:
    aten = torch.ops.aten

    def forms(x: torch.Tensor, i: torch.Tensor) -> Any:
        pieces = (
            aten.split.Tensor(x, 2),
            aten.split_with_sizes.default(x, [1, 4]),
            aten.unbind.int(x, 1),
        )
        looked_up = (
            aten.index.Tensor(x, [i]),
            aten.index.Tensor(x, [None, None, i]),
            aten.index_select.default(x, 0, i),
        )
        cut = (
            aten.select.int(x, 0, 1),
            aten.slice.Tensor(x, 0, 1, 3),
            aten.slice.Tensor(x, 2, 0, 9223372036854775807, 2),
        )
        return (
            pieces,
            looked_up,
            cut,
            aten.constant_pad_nd.default(x, [1, 0]),
            aten.tril.default(x, 1),
        )

    assert not sweep(twice(forms), X, IDS, meshes=SMALL, extra=1)


def test_take_along_dim_wraps_around() -> None:
    """Alone among the lookups: positions count modulo the size of the dim."""

    def wrapped(x: torch.Tensor) -> Any:
        some = [
            torch.tensor([[[i]]]) for i in (-1, 7, -12, 104)
        ]  # few: looked up where they are
        return [x.take_along_dim(i, 0) for i in some], x.take_along_dim(
            some[0].expand(1, 3, 7), 0
        )

    assert not sweep(twice(wrapped), X, meshes=((2,), (4,), (2, 2)), extra=2)


def test_a_list_out_of_range_raises_on_all_ranks() -> None:
    def on_rank(rank: int) -> None:
        x = distribute_tensor(rand(4, 6), init_device_mesh("cpu", (4,)), [S(1)])  # 2, 2, 2, 0
        with pytest.raises(IndexError, match="out of bounds"):
            x[[0, 4]]

    simulate(on_rank, 4)
