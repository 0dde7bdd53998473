"""Writing and reading by positions beside slices, by masks, over all elements: pieces stay where they are."""

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
MESHES = ((4,), (2, 2))
G = torch.Generator().manual_seed(0)
X = torch.randn(7, 5, 3, dtype=D, generator=G)
MASK = torch.rand(7, 5, 3, generator=G) > 0.6
IDS, THREE = torch.tensor([4, 0, 3]), torch.tensor(3)
BIG = torch.randn(64, 5, 3, dtype=D, generator=G)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


def written(index: Callable[..., Any]) -> Callable[..., Any]:
    def fn(x: torch.Tensor, v: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x[index(*ids)] = v
        return x

    return fn


@pytest.mark.parametrize(
    ("index", "value", "ids"),
    [
        (lambda i: (slice(1, 6), i), rand(5, 3, 3), (IDS,)),
        (lambda i: (i, slice(1, 4)), rand(3, 3, 3), (IDS,)),
        (lambda i: (i, 3), rand(3, 3), (IDS,)),
        (lambda i: (2, slice(None), i % 3), rand(3), (IDS,)),
        (lambda i: (slice(0, 7, 3), None, i), rand(1, 3, 1), (IDS,)),
        (lambda i: i, rand(5, 3), (THREE,)),
        (lambda i: (slice(None), i), rand(7, 3), (THREE,)),
        (lambda m: m, rand(int(MASK.sum())), (MASK,)),
        (lambda m: m[:, 0, 0], rand(int(MASK[:, 0, 0].sum()), 5, 3), (MASK,)),
        (lambda m: (m[:, :, 0],), rand(int(MASK[:, :, 0].sum()), 3), (MASK,)),
    ],
)
def test_set(index: Callable[..., Any], value: torch.Tensor, ids: Any) -> None:
    assert not sweep(written(index), X, value, *ids, meshes=MESHES, extra=2)
    y, combo = BIG, ((S(0),), *((R,),) * (1 + len(ids)))
    if ids[0].dtype is not torch.bool:
        assert bytes_moved(written(index), [y, value.new_zeros(()), *ids], (4,), combo) == 0


def test_read() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, t: torch.Tensor) -> Any:
        few = x[t], x[:, t], x[t, 1:], x[i, 2], x[3, :, i % 3], x[1:6, i], x[:, i, 1:]
        flat = x.take(i * 7), x.take(-1 - i), x[t - 5], torch.take(x, t)
        return (
            *few,
            *flat,
            x.take_along_dim(i.view(3, 1, 1), 0),
            x.take_along_dim(i[None, :, None], 1),
        )

    assert not sweep(fn, X, IDS, THREE, meshes=MESHES, extra=2)
    for cut in (S(0), S(1)):
        for f in (lambda x, i: x[i], lambda x, i: x.take(i), lambda x, i: x[:, i]):
            assert bytes_moved(f, [BIG, THREE], (4,), ((cut,), (R,))) == 0
    # rows 1.. of 64: three pieces lack their last row
    cut = ((S(0),), (R,))
    assert bytes_moved(lambda x, i: x[1:, i], [BIG, IDS], (4,), cut) == 3 * 15 * 8


def test_masked_scatter() -> None:
    source = rand(90)

    def fn(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor) -> Any:
        return (
            x.masked_scatter(m, s),
            (x * 1).masked_scatter_(m, s),
            x.index_put((m,), s[: int(MASK.sum())]),
        )

    assert not sweep(fn, X, MASK, source, meshes=MESHES, extra=2)
    mask = BIG > 0
    moved = bytes_moved(
        torch.masked_scatter, [BIG, mask, rand(960)], (4,), ((S(0),), (S(0),), (R,))
    )
    assert (
        moved == 3 * BIG.numel() + 2 * 3 * 8
    )  # a byte for each element, and the number of hits


def test_too_few_values_raise_on_all_ranks() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        x, m = (distribute_tensor(t, mesh, [S(0)]) for t in (X.clone(), MASK))
        with pytest.raises(RuntimeError):
            x.masked_scatter(m, torch.zeros(2, dtype=D))
        with pytest.raises((RuntimeError, IndexError)):
            x[m] = torch.zeros(2, dtype=D)
        assert torch.equal(x.full_tensor(), X)

    simulate(on_rank, 4)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_reduced_by_positions(reduce: str, include_self: bool) -> None:
    index = torch.randint(0, 7, (4, 5, 3), generator=G)
    src = rand(4, 5, 3)

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        return x.scatter_reduce(0, i, s, reduce, include_self=include_self)

    assert not sweep(fn, X, index, src, meshes=MESHES, extra=2)
    cut = ((S(0),), (R,), (R,))
    assert bytes_moved(fn, [BIG, index, src], (4,), cut) == 0
    if reduce == "sum":
        return
    rows = index[:, 0, 0].contiguous()

    def by_row(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        return x.index_reduce(0, i, s, reduce, include_self=include_self)

    assert not sweep(by_row, X, rows, src, meshes=MESHES, extra=2)
    assert bytes_moved(by_row, [BIG, rows, src], (4,), cut) == 0
