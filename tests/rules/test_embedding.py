"""Lookups: ids and columns cut without communication, rows of the table with a pending sum."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()


@pytest.fixture
def table() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(7, 5, dtype=torch.float64)


IDS = torch.tensor([[0, 3, 6], [2, 2, 5], [6, 1, 0]])


@pytest.mark.parametrize("padding", [None, 0, 2, 6, -1, -7])
def test_embedding(table: torch.Tensor, padding: int | None) -> None:
    assert not sweep(lambda i, w: F.embedding(i, w, padding), IDS, table)


def test_embedding_of_few_rows_and_few_ids(table: torch.Tensor) -> None:
    assert not sweep(lambda i, w: F.embedding(i, w), IDS[:1, :1] % 3, table[:3], meshes=((4,),))
    assert not sweep(lambda i, w: F.embedding(i, w), torch.tensor(2), table[:3], meshes=((4,),))
    assert not sweep(
        lambda i, w: F.embedding(i.view(1, 3, 3, 1), w), IDS, table, meshes=((2,),)
    )


def test_torch_and_aten_forms(table: torch.Tensor) -> None:
    for fn in (torch.embedding, torch.ops.aten.embedding.default):
        assert not sweep(lambda w, i, fn=fn: fn(w, i, 3), table, IDS)
        assert not sweep(lambda w, i, fn=fn: fn(w, i), table, IDS, meshes=((4,),))


def test_gradients_by_frequency_and_sparse(table: torch.Tensor) -> None:
    assert not sweep(lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), IDS, table)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        w = distribute_tensor(table, mesh, [S(0)]).requires_grad_()
        i = distribute_tensor(IDS, mesh, [S(0)])
        F.embedding(i, w, sparse=True).sum().backward()
        assert not w.grad.is_sparse, "a dense gradient has a layout"
        assert torch.equal(
            w.grad.full_tensor(),
            torch.bincount(IDS.reshape(-1), minlength=7).double()[:, None].expand(7, 5),
        )

    simulate(on_rank, 2)


def test_max_norm_writes_into_the_table(table: torch.Tensor) -> None:
    def renormed(i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.detach().clone()
        return F.embedding(i, w, max_norm=1.0), w

    assert not sweep(renormed, IDS, table, grad=False)


def test_ids_out_of_range_raise_where_rows_are_cut(table: torch.Tensor) -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        F.embedding(torch.tensor([7]), distribute_tensor(table, mesh, [S(0)]))

    with pytest.raises(IndexError):
        simulate(on_rank, 2)


def test_nothing_is_gathered(table: torch.Tensor) -> None:
    def call(i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.embedding(i, w, 0)

    for combo in (((S(0),), (R,)), ((S(1),), (R,)), ((R,), (S(0),)), ((R,), (S(1),))):
        assert bytes_moved(call, [IDS, table], (2,), combo) == 0, combo
    assert bytes_moved(call, [IDS, table], (2, 2), ((S(0), R), (R, S(0)))) == 0


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(table: torch.Tensor, mode: str) -> None:
    assert not sweep(lambda i, w: F.embedding_bag(i, w, mode=mode, padding_idx=2), IDS, table)
    flat, starts = IDS.reshape(-1), torch.tensor([0, 4, 4])
    assert not sweep(
        lambda i, w, o: F.embedding_bag(i, w, o, mode=mode), flat, table, starts, meshes=((2,),)
    )
    last = torch.tensor([0, 4, 9])
    assert not sweep(
        lambda i, w, o: F.embedding_bag(i, w, o, mode=mode, include_last_offset=True),
        flat,
        table,
        last,
        meshes=((2,),),
    )
    for combo in (((S(0),), (R,)), ((R,), (S(1),))):
        assert (
            bytes_moved(
                lambda i, w: F.embedding_bag(i, w, mode=mode), [IDS, table], (2,), combo
            )
            == 0
        )


def test_weighted_bags(table: torch.Tensor) -> None:
    weights = torch.rand(3, 3, dtype=torch.float64)
    assert not sweep(
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        IDS,
        table,
        weights,
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_over_cut_tables_and_cut_ids(mode: str) -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(0, 7, (3, 5)), torch.randn(7, 4, dtype=torch.float64)
    flat, starts = ids.flatten(), torch.tensor([0, 4, 4, 15])
    shares = torch.randn(15, dtype=torch.float64)

    def fn(i, w, o, p):
        bags = (
            F.embedding_bag(flat_of(i), w, o, mode=mode),
            F.embedding_bag(flat_of(i), w, o, mode=mode, include_last_offset=True),
            F.embedding_bag(i, w, mode=mode, padding_idx=-3),
        )
        if mode == "mean":
            return bags
        weighted = F.embedding_bag(flat_of(i), w, o, mode="sum", per_sample_weights=p)
        return (
            *bags,
            weighted,
            F.embedding_bag(i, w, mode="sum", per_sample_weights=p.view(3, 5)),
        )

    def flat_of(i):
        return i.reshape(-1)

    assert not sweep(fn, ids, table, starts, shares, meshes=((4,), (2, 2)), extra=3)
    assert not sweep(
        lambda i, w, o: F.embedding_bag(i, w, o, mode=mode), flat, table, starts, meshes=((4,),)
    )


def test_bags_send_no_rows() -> None:
    ids, table = torch.arange(64).view(16, 4), torch.randn(64, 8, dtype=torch.float64)
    starts = torch.arange(0, 64, 8)
    for cut in ((S(0), R), (S(1), R), (R, S(0)), (R, S(1))):
        combo = tuple((p,) for p in cut)
        f = lambda i, w: F.embedding_bag(i, w, mode="sum")  # noqa: E731
        assert bytes_moved(f, [ids, table], (4,), combo) == 0
    for cut in ((S(0), R, R), (R, S(0), R), (R, S(1), R)):
        combo = tuple((p,) for p in cut)
        f = lambda i, w, o: F.embedding_bag(i, w, o, mode="sum")  # noqa: E731
        assert bytes_moved(f, [ids.flatten(), table, starts], (4,), combo) == 0
    # of a mean over cut ids, how many each of the 16 bags has: an all_reduce
    combo = ((S(1),), (R,))
    mean = bytes_moved(lambda i, w: F.embedding_bag(i, w), [ids, table], (4,), combo)
    assert mean == 2 * 3 * 16 * 8


def test_an_infinite_row_stays_where_it_is() -> None:
    table = torch.randn(8, 2, dtype=torch.float64)
    table[0], table[7] = float("inf"), float("nan")
    ids = torch.tensor([[1, 2], [3, 4]])

    def on_rank() -> None:
        w = distribute_tensor(table, init_device_mesh("cpu", (4,)), [S(0)])
        for mode in ("sum", "mean"):
            want = F.embedding_bag(ids, table, mode=mode)
            assert torch.allclose(F.embedding_bag(ids, w, mode=mode).full_tensor(), want)

    simulate(on_rank, 4)


def test_greatest_of_bags_over_a_cut_table() -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(0, 24, (3, 5)), torch.randint(0, 3, (24, 4)).double()
    table[ids[0, 0]] = table[ids[1, 3]] = float(
        "nan"
    )  # counts where it is the first of its bag
    flat, starts = ids.flatten(), torch.tensor([0, 4, 4, 15])

    def of_rows(i, w):
        return F.embedding_bag(i, w, mode="max", padding_idx=2)

    def of_lists(i, w, o):
        return (
            F.embedding_bag(i, w, o, mode="max"),
            F.embedding_bag(i, w, o[:3], mode="max", include_last_offset=True),
        )

    def of_nothing(i, w):
        return F.embedding_bag(i * 0 + 2, w, mode="max", padding_idx=2)

    assert not sweep(of_rows, ids, table, extra=4)
    assert not sweep(of_lists, flat, table, starts, extra=2)
    assert not sweep(of_nothing, ids, table, meshes=((4,),), extra=0)
    table, ids = torch.randn(64, 8).double(), torch.arange(12).view(2, 6) * 5
    moved = bytes_moved(of_rows, [ids, table], (4,), ((R,), (S(0),)))
    assert moved == 2 * 3 * 3 * 2 * 8 * 8  # three numbers for each of two bags' eight
    assert bytes_moved(of_rows, [ids, table], (4,), ((R,), (S(1),))) == 0
