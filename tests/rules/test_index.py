"""Reading and writing by slices and positions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.errors import AliasError
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
D = torch.float64
SMALL = ((2,), (4,))


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Cold and warm."""
    return lambda *args: (fn(*args), fn(*args))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


X = rand(5, 3, 7)


# -- reading ---------------------------------------------------------------------------------------
def test_rows_and_slices() -> None:
    def rows(x: torch.Tensor) -> Any:
        return x[3], x[:, 1], x[-1, :, 3], x[0, 0, 0], x.select(1, -1), x[2, None, ..., 1]

    def slices(x: torch.Tensor) -> Any:
        some = x[1:3], x[:4], x[::3], x[2:], x[:, :, 2:5], x[1:2, ..., -1], x[..., None, 3], x[1:1], x[:-1, :-1]
        return *some, x[0:5, None], x.narrow(0, 1, 1), x.narrow(1, 0, 3), torch.narrow(x, 2, 0, 6)

    for fn in (rows, slices):
        assert not sweep(twice(fn), X, meshes=((2,), (4,), (2, 2)), extra=2)
        assert not sweep(fn, X.transpose(0, 2).contiguous().transpose(0, 2), meshes=((4,),), extra=0)


def test_pieces() -> None:
    def pieces(x: torch.Tensor) -> Any:
        split = x.split(2), torch.split(x, [1, 2], 1), x.chunk(3, -1), torch.chunk(x, 4), x.unbind(1), list(x)
        cut = x.tensor_split(3, 1), torch.tensor_split(x, (1, 4), dim=2), torch.hsplit(x, [1]), x.vsplit([1])
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
        some = x.diagonal(0, 1, 2), torch.diagonal(x, 1, 0, 1), torch.linalg.diagonal(x, offset=-1), x.diagonal(-2, 2, 1)
        return *some, x.unfold(2, 3, 2), torch.diag_embed(x[0]), x.diag_embed(1, 0, 2), torch.diag(x[0]), torch.diag(x[0, 0], 1)

    assert not sweep(diagonals, X, meshes=SMALL, extra=1)
    assert bytes_moved(lambda x: x.diagonal(), [rand(4, 4)], (2,), ((S(0),),)) == 0
    assert bytes_moved(lambda x: x.diagonal(1), [rand(4, 6)], (2,), ((S(0),),)) == 0
    assert bytes_moved(lambda x: x.diagonal(), [rand(6, 4)], (2,), ((S(1),),)) == 0


IDS = torch.tensor([0, 2, 2, 1])


def test_positions() -> None:
    def one(x: torch.Tensor, i: torch.Tensor) -> Any:
        return x[i], x[i, 1], x[:, 1, i], x[i, :, i], x[i, None, :, i], x[1:3, i], x[..., i - 3], x[i, i, i]

    assert not sweep(twice(one), X, IDS, meshes=((2,), (4,), (2, 2)), extra=3)

    def more(x: torch.Tensor, i: torch.Tensor) -> Any:
        return x[i], x[:, i], x[:, i, i], x[:, None, i], x[i][:, :, 0]

    assert not sweep(more, X, torch.tensor([[1, -1], [0, 2], [2, 1]]), meshes=SMALL, extra=3)
    assert not sweep(lambda x: (x[[0, 2]], x[:, [1, 1, 0]], x[1, [0, 2], :]), X, meshes=SMALL, extra=1)
    assert not sweep(lambda x, i: x[i], X, torch.arange(40) % 5, meshes=SMALL, extra=1)
    assert not sweep(lambda x, i: x[i], rand(2, 3), torch.tensor([0, 0, 1]), meshes=((4,),), extra=1)


def test_masks_and_scalars_take_the_ladder() -> None:
    assert not sweep(twice(lambda x, m: x[m]), X, X > 0, meshes=((2,),), extra=1)
    assert not sweep(lambda x, i: x[i], X, torch.tensor(2), meshes=((2,),), extra=1)


def test_along_one_dim() -> None:
    ids = torch.randint(0, 5, (5, 3, 7), generator=torch.Generator().manual_seed(0))

    def along(x: torch.Tensor, i: torch.Tensor) -> Any:
        return x.gather(0, i), torch.gather(x, 2, i), torch.take_along_dim(x, i, 0), torch.take_along_dim(x, i[:, :1, :2], 2)

    assert not sweep(twice(along), X, ids, meshes=((2,), (4,), (2, 2)), extra=3)
    assert not sweep(lambda x, i: torch.gather(x, 1, i), X, ids[:2] % 3, meshes=SMALL, extra=2)
    assert not sweep(twice(lambda x, i: (x.index_select(0, i), torch.index_select(x, 2, i))), X, IDS, meshes=SMALL)


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
    assert bytes_moved(lambda x, i: torch.gather(x, 1, i), [rand(8, 9), torch.ones(8, 2, dtype=torch.int64)], (2,), ((S(0),), (S(0),))) == 0
    assert bytes_moved(lambda x, i: torch.gather(x, 1, i), [rand(8, 9), torch.ones(8, 2, dtype=torch.int64)], (2,), ((S(1),), (R,))) == 0

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


def test_a_row_of_a_sharded_dim_is_no_alias() -> None:
    def on_rank() -> None:
        x = distribute_tensor(rand(4, 6), init_device_mesh("cpu", (2,)), [S(0)])
        for view in (x[1], x[1:2], x.select(0, 1), x.narrow(0, 1, 1), x[1][None]):
            with pytest.raises(AliasError):
                view.add_(1)
        row = x[1]
        x[0] = 0.0
        with pytest.raises(AliasError):
            row + 1
        x[:, 1].add_(1)
        x[:3].mul_(2)
        want = rand(4, 6)
        want[0] = 0
        want[:, 1] += 1
        want[:3] *= 2
        assert torch.equal(x.full_tensor(), want)

    simulate(on_rank, 2)


# -- writing ---------------------------------------------------------------------------------------
def put(index: Any) -> Callable[..., Any]:
    """``y[index] = v`` into a copy, twice."""

    def write(x: torch.Tensor, v: Any) -> torch.Tensor:
        y = x * 1
        y[index] = v
        y[index] = v * 1
        return y

    return write


WRITES = {
    "row": (3, X[3]),
    "column": ((slice(None), 1), X[0, 0]),
    "box": ((slice(1, 4), slice(None), 2), X[1:4, :, 1]),
    "steps": ((Ellipsis, slice(0, 5, 2)), X[:1, :, :3]),
    "row and new": ((2, None, 1), X[:1, 1]),
    "all": (slice(None), X[0]),
    "leading ones": (2, X[:1]),
    "nothing": (slice(2, 2), X[:1]),
    "list": ([0, 2], X[:2]),
    "list inside": ((slice(None), [0, 2], 1), X[0, 0, :1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_written_rows(name: str) -> None:
    index, value = WRITES[name]
    assert not sweep(put(index), X, value.clone(), meshes=((2,), (4,), (2, 2)), extra=2)


def test_written_numbers() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for v in (5.0, 6.0):
            y[1] = v
            y[:, 1:2] = -1
            y[-1, ..., 2] = v
            y[::2, :, 3] = True
        return y

    assert not sweep(write, X, meshes=((2,), (4,), (2, 2)), extra=2)
    assert not sweep(write, torch.arange(105).view(5, 3, 7), meshes=((2,),), extra=1)


def test_written_positions() -> None:
    def write(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for _ in range(2):
            y[i] = v
            y[:, :, i - 7] = v[0, :, :3]
            y[i, 1] = 0.5
        return y

    ids = torch.tensor([0, 4, 2])
    assert not sweep(write, X, ids, X[:3].clone(), meshes=((2,), (4,), (2, 2)), extra=3)

    def put_in(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
        more = (x * 1).index_put_((i,), v, True), torch.ops.aten.index_put.default(x, [None, None, i], x[0, 0, 0], True)
        return x.index_put((i,), v), x.index_put((i,), v, accumulate=True), *more

    assert not sweep(put_in, X, ids, rand(3, 7), meshes=SMALL, extra=2)


def test_written_masks() -> None:
    def write(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for _ in range(2):
            y[m] = 0.0
            y[m[:, :, 0]] = y[0, 0] * 1
        return y

    mask = X > 0.3
    assert not sweep(write, X, mask, meshes=SMALL, extra=2)
    assert bytes_moved(lambda x, m: x.__setitem__(m, 1.0), [X, mask], (2,), ((S(0),), (R,))) == 0
    assert not sweep(put(mask), X, rand(int(mask.sum())), meshes=((2,),), extra=1)  # the ladder: gathered, written back


def test_what_is_written_stays_where_it_is() -> None:
    def writes(x: torch.Tensor) -> None:
        x[3] = 1.0
        x[1:6] = 2.0
        x[1:6, 2] = torch.ones(5, dtype=D)
        x[:, 1] = x[:, 0]
        x[[1, 7]] = 3.0
        x[torch.tensor([0, 5])] = torch.zeros(2, 4, dtype=D)

    for placement in (S(0), R):
        assert bytes_moved(writes, [rand(8, 4)], (2,), ((placement,),)) == 0


def test_writes_reach_bases_and_leaves_refuse_them() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placements in ([S(0)], [S(1)], [R]):
            x = distribute_tensor(torch.zeros(4, 6), mesh, placements)
            x.t()[1:3] = 1
            x.view(4, 3, 2)[:, 2, 1] = 2
            x[..., None][3, 0] = 3
            want = torch.zeros(4, 6)
            want[:, 1:3], want[:, 5], want[3, 0] = 1, 2, 3
            assert torch.equal(x.full_tensor(), want)
            x.requires_grad_()
            with pytest.raises(RuntimeError):
                x[0] = 1
            with torch.no_grad():
                x[0] = 1
            assert x.full_tensor()[0].sum() == 6

    simulate(on_rank, 2)


def test_written_into_a_plain_tensor() -> None:
    def on_rank() -> None:
        v = distribute_tensor(rand(4, 3), init_device_mesh("cpu", (2,)), [S(0)])
        buffer = torch.zeros(8, 3, dtype=D)
        buffer[2:6] = v
        assert torch.equal(buffer[2:6], rand(4, 3))

    simulate(on_rank, 2)


def test_scattered() -> None:
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(k)) for k in range(21)], 1).view(5, 3, 7)

    def scattered(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        into = (x * 1).scatter_add_(0, i, s), (x * 1).scatter_(0, i, s), (x * 1).scatter_(0, i, 1.5)
        return x.scatter(0, i, s), torch.scatter_add(x, 0, i, s), x.scatter(dim=0, index=i, value=2.0), *into

    assert not sweep(twice(scattered), X, ids, rand(5, 3, 7) + 1, meshes=((2,), (4,)), extra=3)
    few = ids[:2, :2] % 3

    def fewer(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        with torch.no_grad():
            longer = x.scatter_add(1, i, s)
        return x.scatter_add(1, i, s[:2, :2]), x.scatter_reduce(1, i, s[:2, :2], "amax"), longer

    assert not sweep(fewer, X, few, rand(4, 3, 7), meshes=((2,),), extra=2)


def test_added_copied_and_filled_rows() -> None:
    def rows(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        into = (x * 1).index_add_(0, i, s), (x * 1).index_copy_(0, i, s), (x * 1).index_fill_(0, i, 2)
        return x.index_add(0, i, s), torch.index_add(x, 0, i, s, alpha=2), x.index_copy(0, i, s), x.index_fill(0, i, 3.0), *into

    assert not sweep(twice(rows), X, torch.tensor([3, 0, 4]), rand(3, 3, 7) + 1, meshes=((2,), (4,)), extra=3)

    def many(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        by_element = (x * 1).scatter_add_(0, i[:, None].expand(20, 2), s)
        return (x * 1).index_add_(0, i, s, alpha=2), x.index_add(0, i, s), by_element

    assert not sweep(twice(many), rand(3, 2), torch.arange(20) % 3, rand(20, 2), meshes=((2,), (4,), (2, 2)), extra=3)
    combo = ((R,), (S(0),), (S(0),))
    args = [torch.zeros(3, 2, dtype=D), torch.arange(20) % 3, rand(20, 2)]
    assert bytes_moved(lambda x, i, s: x.index_add(0, i, s), args, (2,), combo) == 0
    assert bytes_moved(lambda x, i, s: x.index_add_(0, i, s), args, (2,), combo) == 2 * 3 * 2 * 8  # one all_reduce of x


def test_replaced_parts() -> None:
    def replaced(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> Any:
        return torch.slice_scatter(x, s, 0, 1, 3), x.select_scatter(t, 1, 2)

    assert not sweep(twice(replaced), X, rand(2, 3, 7), rand(5, 7), meshes=SMALL, extra=2)


# -- by place --------------------------------------------------------------------------------------
def test_rearranged() -> None:
    def triangles(x: torch.Tensor) -> Any:
        return x.tril(), torch.triu(x, diagonal=2), (x * 1).tril_(-1), x.triu(-1)

    assert not sweep(twice(triangles), X, meshes=((2,), (4,), (2, 2)), extra=2)
    for placement in (S(0), S(1), P):
        assert bytes_moved(lambda x: x.tril(), [rand(5, 6)], (2,), ((placement,),)) == 0

    def moved(x: torch.Tensor) -> Any:
        turned = x.flip(0, 2), torch.fliplr(x), x.roll(2, 1), torch.roll(x, 3), torch.rot90(x, 1, (0, 2))
        longer = x.repeat_interleave(2, 1), torch.repeat_interleave(x, 3), torch.repeat_interleave(x, 2, dim=0)
        return *turned, *longer

    assert not sweep(moved, X, meshes=SMALL, extra=1)
    assert bytes_moved(lambda x: x.repeat_interleave(3, 0), [rand(4, 2)], (2,), ((S(0),),)) == 0


def test_padded_and_one_hot() -> None:
    def padded(x: torch.Tensor) -> Any:
        more = F.pad(x, (1, 1), mode="reflect"), F.pad(x, (0, 0, 0, 0, 2, 0))
        return F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, -1), value=2.0), torch.constant_pad_nd(x, (0, 1)), *more

    assert not sweep(padded, X, meshes=SMALL, extra=1)
    ids = torch.arange(15).view(5, 3) % 4
    assert not sweep(lambda i: (F.one_hot(i, 6), F.one_hot(i)), ids, meshes=SMALL, extra=1)


def test_aten_forms() -> None:
    aten = torch.ops.aten

    def forms(x: torch.Tensor, i: torch.Tensor) -> Any:
        pieces = aten.split.Tensor(x, 2), aten.split_with_sizes.default(x, [1, 4]), aten.unbind.int(x, 1)
        looked_up = aten.index.Tensor(x, [i]), aten.index.Tensor(x, [None, None, i]), aten.index_select.default(x, 0, i)
        cut = aten.select.int(x, 0, 1), aten.slice.Tensor(x, 0, 1, 3), aten.slice.Tensor(x, 2, 0, 9223372036854775807, 2)
        return pieces, looked_up, cut, aten.constant_pad_nd.default(x, [1, 0]), aten.tril.default(x, 1)

    assert not sweep(twice(forms), X, IDS, meshes=SMALL, extra=1)
