"""The copying forms of views: as the views, but sharing no memory."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.testing import bytes_moved, sweep

X = torch.randn(4, 6, 5, dtype=torch.float64)

CALLS = {
    "alias": (torch.alias_copy, (0, 1, 2)),
    "expand": (lambda x: torch.expand_copy(x, (3, 4, 6, 5)), (0, 1, 2)),
    "diagonal": (lambda x: torch.diagonal_copy(x, 0, 0, 1), (2,)),
    "narrow": (lambda x: torch.narrow_copy(x, 1, 1, 3), (0, 2)),
    "permute": (lambda x: torch.permute_copy(x, (2, 0, 1)), (0, 1, 2)),
    "select": (lambda x: torch.select_copy(x, 1, 2), (0, 2)),
    "split": (lambda x: torch.split_copy(x, 2, 1), (0, 2)),
    "squeeze": (lambda x: torch.squeeze_copy(x, 1), (0, 1, 2)),
    "transpose": (lambda x: torch.transpose_copy(x, 0, 2), (0, 1, 2)),
    "unbind": (lambda x: torch.unbind_copy(x, 1), (0, 2)),
    "unfold": (lambda x: torch.unfold_copy(x, 1, 3, 2), (0, 2)),
    "unsqueeze": (lambda x: torch.unsqueeze_copy(x, 1), (0, 1, 2)),
    "view": (lambda x: torch.view_copy(x, (4, 3, 2, 5)), (0, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_right_and_nothing_moves(name):
    fn, dims = CALLS[name]
    assert not sweep(fn, X, meshes=[(2,), (2, 2)], extra=2)
    for placement in [*(Shard(d) for d in dims), Partial(), Replicate()]:
        assert bytes_moved(fn, [X], (2,), ((placement,),)) == 0


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_copy_shares_no_memory(placement):
    def on_rank():
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [placement])
        y = torch.narrow_copy(x, 1, 0, 6)
        y.zero_()
        assert torch.equal(x.full_tensor(), X)

    simulate(on_rank, 2)
