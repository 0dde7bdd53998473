"""Block-cyclic pieces as views: a dim of blocks * ranks * block elements, cut along its middle."""

import itertools

import pytest
import torch

from shardwise import (
    CommLog,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    explain_redistribute,
    init_device_mesh,
    minimize,
    simulate,
)

R, S = Replicate(), Shard
BLOCK, RANKS, BLOCKS = 2, 4, 3
N = BLOCK * RANKS * BLOCKS


def dealt(x, rank):
    """The rows of a block-cyclic piece, the textbook way."""
    return torch.cat([x[i : i + BLOCK] for i in range(rank * BLOCK, N, RANKS * BLOCK)])


def test_it_is_dealt_and_comes_back():
    x = torch.randn(N, 5, dtype=torch.float64)

    def check(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        y = distribute_tensor(x.view(BLOCKS, RANKS, BLOCK, 5), mesh, [S(1)])
        assert torch.equal(y.to_local().reshape(-1, 5), dealt(x, rank))
        mine = dealt(x, rank).view(BLOCKS, 1, BLOCK, 5)
        z = DTensor.from_local(mine, mesh, [S(1)])
        assert torch.equal(z.full_tensor().view(N, 5), x)
        whole = distribute_tensor(x, mesh, [R])
        with CommLog() as log:
            cut = whole.view(BLOCKS, RANKS, BLOCK, 5).redistribute(mesh, [S(1)])
        assert not log.events  # a slice
        assert torch.equal(cut.to_local(), y.to_local())

    simulate(check, RANKS)


@pytest.mark.parametrize("to", [S(0), R])
def test_to_rows_and_back_moves_what_it_must(to):
    """To rows in one piece for each rank: what a rank needs and does not hold, and nothing else."""
    x = torch.randn(N, 5, dtype=torch.float64)

    def check(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        blocks = distribute_tensor(x.view(BLOCKS, RANKS, BLOCK, 5), mesh, [S(1)])
        flat = blocks.requires_grad_()
        with minimize("bytes"), CommLog() as log:
            told = explain_redistribute(flat, [to])
            rows = flat.redistribute(mesh, [to]).view(N, 5)
        assert log.on(rank).bytes == told.bytes[rank] == told.least[rank]
        assert torch.equal(rows.full_tensor().detach(), x)
        (rows * rows).sum().backward()
        assert torch.equal(flat.grad.to_local().reshape(-1, 5), 2 * dealt(x, rank))
        back = rows.detach().view(BLOCKS, RANKS, BLOCK, 5).redistribute(mesh, [S(1)])
        assert torch.equal(back.to_local(), flat.to_local().detach())

    simulate(check, RANKS)


def test_ops_stay_where_they_are():
    """Pointwise ops, products with whole factors and reductions over whole dims send nothing."""
    x, w = torch.randn(N, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    want = torch.tanh(leaves[0] @ leaves[1]).softmax(-1)
    want.square().sum().backward()

    def check(rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        a = distribute_tensor(x.view(BLOCKS, RANKS, BLOCK, 6), mesh, [S(1)]).requires_grad_()
        b = distribute_tensor(w, mesh, [R]).requires_grad_()
        with CommLog() as log:
            y = torch.tanh(a @ b).softmax(-1)
        assert not log.events
        assert torch.allclose(y.to_local().detach().reshape(-1, 3), dealt(want, rank))
        y.square().sum().backward()
        assert torch.allclose(a.grad.full_tensor().view(N, 6), leaves[0].grad)
        assert torch.allclose(b.grad.full_tensor(), leaves[1].grad)

    simulate(check, RANKS)


def test_matrices_in_two_dims():
    """As dense linear algebra deals them over a grid of processes."""
    p, q, b = 2, 2, 3
    x = torch.randn(p * b * 2, q * b * 3, dtype=torch.float64)

    def check():
        mesh = init_device_mesh("cpu", (p, q))
        blocks = x.view(2, p, b, 3, q, b)
        y = distribute_tensor(blocks, mesh, [S(1), S(4)])
        i, j = mesh.get_coordinate()
        mine = [
            x[r * b : (r + 1) * b, c * b : (c + 1) * b]
            for r, c in itertools.product(range(i, 2 * p, p), range(j, 3 * q, q))
        ]
        got = y.to_local().permute(0, 3, 1, 4, 2, 5).reshape(-1, b, b)
        assert torch.equal(got, torch.stack(mine))
        plain = y.redistribute(mesh, [S(0), S(3)])
        assert torch.equal(plain.full_tensor().view(x.shape), x)

    simulate(check, p * q)
