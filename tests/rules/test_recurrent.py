"""Recurrent layers with a cut batch: right, and nothing gathered."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import CommLog, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_module, distribute_tensor


def flat(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [t for x in tree for t in flat(x)]


def compare(make: Callable[[], nn.Module], x: Tensor, dim: int, ranks: int = 2) -> int:
    """Outputs and gradients equal one device; the bytes that the forward received."""
    torch.manual_seed(0)
    module = make().double()
    torch.manual_seed(1)
    want = flat(module(x))
    sum(w.square().sum() for w in want).backward()

    def on_rank() -> int:
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(0)
        ours = distribute_module(make().double(), mesh)
        cut = distribute_tensor(x, mesh, [Shard(dim)])
        torch.manual_seed(1)
        with CommLog() as log:
            got = flat(ours(cut))
        for g, w in zip(got, want, strict=True):
            assert torch.allclose(g.full_tensor(), w), "the output differs"
            assert g.stride() == w.stride()
        sum(g.square().sum() for g in got).backward()
        for (name, p), q in zip(ours.named_parameters(), module.parameters()):
            assert torch.allclose(p.grad.full_tensor(), q.grad), (
                f"the gradient of {name} differs"
            )
        return log.bytes

    return sum(simulate(on_rank, ranks))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(3, 5, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "layer", [nn.LSTM, nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")]
)
def test_layers(layer: Callable[..., nn.Module], x: Tensor) -> None:
    assert compare(partial(layer, 4, 3, 2, batch_first=True), x, 0) == 0
    assert compare(partial(layer, 4, 3, bidirectional=True), x, 1) == 0
    assert compare(partial(layer, 4, 3), x, 1, ranks=4) == 0, "some ranks hold no batch"
    assert compare(partial(layer, 4, 3, bias=False), x, 0) > 0, "time is worked on"
    assert compare(partial(layer, 4, 3), x[0], 0) > 0, "unbatched"


def test_projected_and_dropout(x: Tensor) -> None:
    assert compare(partial(nn.LSTM, 4, 3, proj_size=2), x, 1) == 0
    compare(partial(nn.LSTM, 4, 3, 2, dropout=0.5), x, 1)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell: Callable[..., nn.Module], x: Tensor) -> None:
    assert compare(partial(cell, 4, 3), x[0], 0) == 0
