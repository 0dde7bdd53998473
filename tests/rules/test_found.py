"""Results whose size depends on data, on every layout; what is not in the result is not sent."""

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
X = torch.randn(7, 3, 2, dtype=D, generator=G)
MASK = torch.rand(7, 3, 2, generator=G) > 0.5
IDS = torch.randint(0, 6, (9, 2), generator=G)
CUT = ((S(0),),)


def test_where_something_is() -> None:
    def places(m: torch.Tensor) -> Any:
        tuples = *m.nonzero(as_tuple=True), *torch.where(m), *torch.where(m[:, 0])
        return (
            m.nonzero(),
            m.argwhere(),
            torch.nonzero_static(m, size=30, fill_value=7),
            *tuples,
        )

    assert not sweep(places, MASK, meshes=MESHES)
    assert not sweep(lambda x: (x > 5).nonzero(), X, meshes=((4,),), grad=False)
    big = torch.zeros(64, 8, dtype=D)
    # a byte for each element, of which every rank lacks three quarters
    assert bytes_moved(torch.nonzero, [big], (4,), CUT) == 3 * 64 * 8


def test_masked() -> None:
    def found(x: torch.Tensor, m: torch.Tensor) -> Any:
        first = m[:, 0, 0]
        return (
            x[m],
            x.masked_select(m),
            x[first],
            x[m[:, :, 1]],
            x[first & ~first],
            x[m[:, 0, 0], :],
        )

    assert not sweep(found, X, MASK, meshes=MESHES, extra=4)
    assert not sweep(lambda x, m: x[m[:, 0, 0]] ** 2, X[:2], MASK[:2], meshes=((4,),))


def test_only_what_a_mask_hits_moves() -> None:
    x, few = torch.randn(64, 8, dtype=D, generator=G), torch.zeros(64, dtype=torch.bool)
    few[[3, 20, 40, 63]] = True  # one row of each rank
    assert bytes_moved(lambda x, m: x[m], [x, few], (4,), ((S(0),), (R,))) == 4 * 3 * 8 * 8
    assert bytes_moved(lambda x, m: x[m], [x, few], (4,), ((S(1),), (R,))) == 0


def test_the_size_is_that_of_each_call() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(X, mesh, [S(0)])
        for edge in (-9.0, 0.0, 0.5, 9.0):
            assert torch.equal(x[x > edge].full_tensor(), X[edge < X])
            assert torch.equal((x > edge).nonzero().full_tensor(), (edge < X).nonzero())

    simulate(on_rank, 4)


def test_a_negative_count_raises_on_all_ranks() -> None:
    def fn() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [S(0)])
        n = distribute_tensor(torch.tensor([1, 2, 1, -1]), mesh, [S(0)])
        with pytest.raises(RuntimeError, match="can not be negative"):
            x.repeat_interleave(n)

    simulate(fn, 2)


@pytest.mark.parametrize(
    "f",
    [torch.unique, torch.unique_consecutive, lambda x: torch.histogram(x, 3)[0]],
    ids=["unique", "unique_consecutive", "histogram"],
)
def test_a_gradient_that_torch_does_not_know_is_not_lost(f: Any) -> None:
    def fn() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for p in (R, S(0), S(1)):
            x = distribute_tensor(torch.randn(4, 3), mesh, [p]).requires_grad_()
            loss = f(x).sum() + x.sum()
            with pytest.raises((NotImplementedError, RuntimeError), match="not implemented"):
                loss.backward()

    simulate(fn, 2)


def test_repeated() -> None:
    counts = torch.tensor([2, 0, 1, 3, 0, 0, 1])

    def fn(x: torch.Tensor, n: torch.Tensor) -> Any:
        return (
            x.repeat_interleave(n, 0),
            torch.repeat_interleave(x, n[:3], 1),
            x[:, 0, 0].repeat_interleave(n),
            x[:, :, 0].repeat_interleave(n.repeat(3)),
            torch.repeat_interleave(n),
            x.repeat_interleave(n, 0, output_size=7),
            x.repeat_interleave(n[:1], 2),
        )

    assert not sweep(fn, X, counts, meshes=MESHES, extra=3)
    x = torch.randn(64, 8, dtype=D, generator=G)
    two = torch.zeros(64, dtype=torch.int64)
    two[[0, 16, 32, 48]] = 2
    pair = [x, two]
    assert bytes_moved(lambda x, n: x.repeat_interleave(n, 0), pair, (4,), ((S(1),), (R,))) == 0
    cut = ((S(0),), (R,))
    assert (
        bytes_moved(lambda x, n: x.repeat_interleave(n, 0), pair, (4,), cut) == 4 * 3 * 2 * 64
    )


def test_different_elements() -> None:
    def fn(i: torch.Tensor) -> Any:
        flat = i[:, 0]
        return (
            i.unique(),
            *torch.unique(i, return_inverse=True, return_counts=True),
            *flat.unique(return_counts=True),
            *torch.unique_consecutive(i // 2, return_inverse=True, return_counts=True),
            flat.unique_consecutive(),
            torch.unique(i, dim=0),
        )

    assert not sweep(fn, IDS, meshes=MESHES)
    assert not sweep(lambda i: i.unique(return_inverse=True), IDS[:2], meshes=((4,),))
    # every rank tells how many it has, and then those two
    many = (torch.arange(256) % 2).view(64, 4)
    assert bytes_moved(torch.unique, [many], (4,), CUT) == 4 * 3 * (1 + 2) * 8


def test_masks_of_other_shapes() -> None:
    row, tall = MASK[:1, :, 0].clone(), X[:, :1, :].clone()
    for x, m in ((X, MASK[0]), (X, MASK[:, :1]), (tall, MASK), (X[0], MASK), (X[:, :, 0], row)):
        x, m = x.clone(), m.clone()
        assert not sweep(torch.masked_select, x, m, meshes=MESHES, extra=2, twice=True)
    few = torch.zeros(64, 1, dtype=torch.bool)
    few[[3, 20, 40, 63]] = True
    x = torch.randn(64, 8, dtype=D, generator=G)
    assert bytes_moved(torch.masked_select, [x, few], (4,), ((S(0),), (R,))) == 4 * 3 * 8 * 8
    low = torch.randn(1, 8, dtype=D, generator=G)  # it is sent before it grows
    assert bytes_moved(torch.masked_select, [low, few], (4,), ((S(1),), (R,))) == 3 * 8 * 8
