"""Writing by slices and positions: what is written into stays where it is."""

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
    assert not sweep(put(index), X, value.clone(), meshes=((4,), (2, 2)), extra=2)


def test_written_numbers() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for v in (5.0, 6.0):
            y[1] = v
            y[:, 1:2] = -1
            y[-1, ..., 2] = v
            y[::2, :, 3] = True
        return y

    assert not sweep(write, X, meshes=((4,), (2, 2)), extra=2)
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
    assert not sweep(write, X, ids, X[:3].clone(), meshes=((4,), (2, 2)), extra=3)

    def put_in(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
        more = (
            (x * 1).index_put_((i,), v, True),
            torch.ops.aten.index_put.default(x, [None, None, i], x[0, 0, 0], True),
        )
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
    assert (
        bytes_moved(lambda x, m: x.__setitem__(m, 1.0), [X, mask], (2,), ((S(0),), (R,))) == 0
    )
    assert not sweep(
        put(mask), X, rand(int(mask.sum())), meshes=((2,),), extra=1
    )  # the ladder: gathered, written back


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
    ids = torch.stack(
        [torch.randperm(5, generator=torch.Generator().manual_seed(k)) for k in range(21)], 1
    ).view(5, 3, 7)

    def scattered(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        into = (
            (x * 1).scatter_add_(0, i, s),
            (x * 1).scatter_(0, i, s),
            (x * 1).scatter_(0, i, 1.5),
        )
        return (
            x.scatter(0, i, s),
            torch.scatter_add(x, 0, i, s),
            x.scatter(dim=0, index=i, value=2.0),
            *into,
        )

    assert not sweep(twice(scattered), X, ids, rand(5, 3, 7) + 1, meshes=((4,),), extra=3)
    few = ids[:2, :2] % 3

    def fewer(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        with torch.no_grad():
            longer = x.scatter_add(1, i, s)
        return x.scatter_add(1, i, s[:2, :2]), x.scatter_reduce(1, i, s[:2, :2], "amax"), longer

    assert not sweep(fewer, X, few, rand(4, 3, 7), meshes=((2,),), extra=2)


def test_added_copied_and_filled_rows() -> None:
    def rows(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        into = (
            (x * 1).index_add_(0, i, s),
            (x * 1).index_copy_(0, i, s),
            (x * 1).index_fill_(0, i, 2),
        )
        return (
            x.index_add(0, i, s),
            torch.index_add(x, 0, i, s, alpha=2),
            x.index_copy(0, i, s),
            x.index_fill(0, i, 3.0),
            *into,
        )

    assert not sweep(
        twice(rows), X, torch.tensor([3, 0, 4]), rand(3, 3, 7) + 1, meshes=((4,),), extra=3
    )

    def many(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        by_element = (x * 1).scatter_add_(0, i[:, None].expand(20, 2), s)
        return (x * 1).index_add_(0, i, s, alpha=2), x.index_add(0, i, s), by_element

    assert not sweep(
        twice(many),
        rand(3, 2),
        torch.arange(20) % 3,
        rand(20, 2),
        meshes=((4,), (2, 2)),
        extra=3,
    )
    combo = ((R,), (S(0),), (S(0),))
    args = [torch.zeros(3, 2, dtype=D), torch.arange(20) % 3, rand(20, 2)]
    assert bytes_moved(lambda x, i, s: x.index_add(0, i, s), args, (2,), combo) == 0
    assert (
        bytes_moved(lambda x, i, s: x.index_add_(0, i, s), args, (2,), combo) == 2 * 3 * 2 * 8
    )  # one all_reduce of x


def test_replaced_parts() -> None:
    def replaced(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> Any:
        return torch.slice_scatter(x, s, 0, 1, 3), x.select_scatter(t, 1, 2)

    assert not sweep(twice(replaced), X, rand(2, 3, 7), rand(5, 7), meshes=SMALL, extra=2)


def test_second_gradients_of_products_by_place() -> None:
    """Zeros that go to other ranks' rows are not several at one place here."""
    x = torch.tensor([[0.0, 13.0], [2.0, 17.0]], dtype=torch.float64)
    src = torch.tensor([[0.0, 0.0, 2.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    index = torch.tensor([[0, 1, 1], [1, 0, 1]])

    def placed(x: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(1, index, src, "prod")

    def rows(x: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return x.index_reduce(1, index[0, :2], src[:, :2], "prod")

    for fn in (placed, rows):
        assert not sweep(fn, x, src, meshes=((2,), (4,)), extra=0, twice=True)


def test_index_fill_counts_from_the_end_too() -> None:
    def fill(x: Any) -> Any:
        ends = torch.tensor([-1, 0, -4])
        return x.index_fill(0, ends, 2.0), x.clone().index_fill_(-1, ends, 3.0)

    assert not sweep(twice(fill), X, meshes=((4,), (2, 2)), extra=2)
