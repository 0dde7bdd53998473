"""``nn.init`` and ``reset_parameters`` on distributed parameters give what one device would have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

LAYOUTS = [
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(0, order=1), Shard(0, order=0)),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def on_mesh(fn: Callable[[Any], Any], shape: tuple[int, ...] = (2, 2)) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return sw.simulate(lambda: fn(sw.init_device_mesh("cpu", shape)), n)


INITS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "uniform": (lambda w: nn.init.uniform_(w, -1, 2), (7, 5)),
    "normal": (lambda w: nn.init.normal_(w, 1.0, 3.0), (7, 5)),
    "normal uneven": (lambda w: nn.init.normal_(w), (1, 37)),
    "constant": (lambda w: nn.init.constant_(w, 2.5), (7, 5)),
    "ones": (nn.init.ones_, (7, 5)),
    "zeros": (nn.init.zeros_, (7, 5)),
    "eye": (nn.init.eye_, (7, 5)),
    "dirac": (nn.init.dirac_, (4, 3, 3)),
    "dirac groups": (lambda w: nn.init.dirac_(w, 2), (4, 2, 3, 3)),
    "xavier_uniform": (lambda w: nn.init.xavier_uniform_(w, 2.0), (7, 5)),
    "xavier_normal": (nn.init.xavier_normal_, (7, 5, 3)),
    "kaiming_uniform": (nn.init.kaiming_uniform_, (7, 5)),
    "kaiming_uniform fan_out": (
        lambda w: nn.init.kaiming_uniform_(w, a=0.3, mode="fan_out", nonlinearity="relu"),
        (7, 5, 2, 3),
    ),
    "kaiming_normal": (lambda w: nn.init.kaiming_normal_(w, mode="fan_out"), (7, 5, 2)),
    "trunc_normal": (nn.init.trunc_normal_, (7, 5)),
    "trunc_normal tail": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, -0.5, 0.1), (7, 5)),
    "trunc_normal far": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.0, 2.0), (7, 5)),
    "orthogonal tall": (nn.init.orthogonal_, (7, 5)),
    "orthogonal wide": (lambda w: nn.init.orthogonal_(w, gain=2.0), (5, 7)),
    "orthogonal kernel": (nn.init.orthogonal_, (5, 3, 2)),
    "sparse": (lambda w: nn.init.sparse_(w, 0.3), (7, 5)),
    "empty": (lambda w: nn.init.normal_(w), (0, 5)),
}


@pytest.mark.parametrize("name", INITS)
@DTYPES
def test_init(name: str, dtype: torch.dtype) -> None:
    init, shape = INITS[name]

    def on_rank(mesh: Any) -> None:
        torch.manual_seed(12)
        want = nn.Parameter(torch.empty(shape, dtype=dtype))
        init(want)
        state = torch.get_rng_state()
        for placed in LAYOUTS:
            w = nn.Parameter(sw.empty(shape, dtype=dtype, device_mesh=mesh, placements=placed))
            torch.manual_seed(12)
            assert init(w) is w
            assert isinstance(w, nn.Parameter)
            assert w.requires_grad
            assert w.placements == tuple(placed)
            assert torch.equal(w.detach().full_tensor(), want.detach()), placed
            assert torch.equal(torch.get_rng_state(), state)

    on_mesh(on_rank)


def test_init_of_a_pending_sum() -> None:
    def on_rank(mesh: Any) -> None:
        for init in (
            nn.init.normal_,
            nn.init.kaiming_uniform_,
            nn.init.ones_,
            nn.init.eye_,
            nn.init.trunc_normal_,
        ):
            torch.manual_seed(1)
            want = init(torch.empty(5, 3))
            torch.manual_seed(1)
            w = sw.empty(5, 3, device_mesh=mesh, placements=[Partial(), Shard(0)])
            init(w)
            assert torch.equal(w.full_tensor(), want)

    on_mesh(on_rank)


def test_init_raises_and_warns_as_torch_does() -> None:
    def on_rank(mesh: Any) -> None:
        with pytest.raises(ValueError, match="fewer than 2 dimensions"):
            nn.init.kaiming_uniform_(sw.empty(3, device_mesh=mesh))
        with pytest.raises(ValueError, match="Mode"):
            nn.init.kaiming_uniform_(sw.empty(3, 3, device_mesh=mesh), mode="fan")
        with pytest.warns(UserWarning, match="no-op"):
            nn.init.kaiming_uniform_(sw.empty(0, 3, device_mesh=mesh))

    on_mesh(on_rank, (1,))


MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "Linear": lambda kw: nn.Linear(5, 7, **kw),
    "Bilinear": lambda kw: nn.Bilinear(3, 5, 7, **kw),
    "Conv1d": lambda kw: nn.Conv1d(3, 5, 3, **kw),
    "Conv2d": lambda kw: nn.Conv2d(4, 6, 3, groups=2, **kw),
    "ConvTranspose2d": lambda kw: nn.ConvTranspose2d(4, 6, 3, **kw),
    "Embedding": lambda kw: nn.Embedding(9, 5, **kw),
    "Embedding padding": lambda kw: nn.Embedding(9, 5, padding_idx=7, **kw),
    "EmbeddingBag": lambda kw: nn.EmbeddingBag(9, 5, **kw),
    "LayerNorm": lambda kw: nn.LayerNorm((3, 5), **kw),
    "RMSNorm": lambda kw: nn.RMSNorm(5, **kw),
    "GroupNorm": lambda kw: nn.GroupNorm(3, 6, **kw),
    "BatchNorm": lambda kw: nn.BatchNorm1d(7, **kw),
    "RNN": lambda kw: nn.RNN(5, 3, 2, **kw),
    "LSTM": lambda kw: nn.LSTM(5, 3, bidirectional=True, **kw),
    "GRUCell": lambda kw: nn.GRUCell(5, 3, **kw),
    "PReLU": lambda kw: nn.PReLU(5, **kw),
    "MultiheadAttention": lambda kw: nn.MultiheadAttention(6, 2, **kw),
    "MultiheadAttention kv": lambda kw: nn.MultiheadAttention(
        6, 2, kdim=3, vdim=5, add_bias_kv=True, **kw
    ),
    "TransformerLayer": lambda kw: nn.TransformerEncoderLayer(6, 2, 7, **kw),
}


def reset(module: nn.Module) -> None:
    """Ask every submodule, in order, for fresh parameters."""
    for sub in module.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(sub, name):
                getattr(sub, name)()
                break


def place(module: nn.Module, mesh: Any, dim: int) -> None:
    """Shard all parameters on one dim over the first axis, and on the first over the second."""
    for sub in module.modules():
        for name, p in list(sub.named_parameters(recurse=False)):
            placed = [
                Shard(dim % p.ndim) if p.ndim else Replicate(),
                Shard(0) if p.ndim else Replicate(),
            ]
            setattr(sub, name, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, placed)))
        for name, b in list(sub.named_buffers(recurse=False)):
            sub.register_buffer(name, sw.distribute_tensor(b, mesh, [Replicate(), Replicate()]))


@pytest.mark.parametrize("name", MODULES)
@DTYPES
def test_from_meta_to_reset_parameters(name: str, dtype: torch.dtype) -> None:
    def on_rank(mesh: Any) -> None:
        want = MODULES[name]({"dtype": dtype})
        torch.manual_seed(13)
        reset(want)
        for dim in (0, 1):
            module = MODULES[name]({"dtype": dtype, "device": "meta"})
            place(module, mesh, dim)
            assert all(p.is_meta for p in module.parameters())
            module.to_empty(device="cpu")
            torch.manual_seed(13)
            reset(module)
            got = dict(module.named_parameters()) | dict(module.named_buffers())
            for key, value in [*want.named_parameters(), *want.named_buffers()]:
                assert isinstance(got[key], DTensor)
                assert not got[key].is_meta
                assert torch.equal(got[key].detach().full_tensor(), value.detach()), key

    on_mesh(on_rank)


def test_reset_of_distributed_modules_in_place() -> None:
    def on_rank(mesh: Any) -> None:
        want: Any = nn.Linear(5, 7)
        module = sw.distribute_module(nn.Linear(5, 7), mesh)
        weight = module.weight
        for m in (want, module):
            torch.manual_seed(2)
            m.reset_parameters()
        assert module.weight is weight
        assert torch.equal(module.weight.detach().full_tensor(), want.weight.detach())

    on_mesh(on_rank)
