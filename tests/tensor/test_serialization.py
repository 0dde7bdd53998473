"""Copies, pickles and files of DTensors."""

from collections.abc import Callable
import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import LayoutError
from shardwise.testing.sweep import lay_out

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACED = [
    ((2,), (R,)),
    ((2,), (S0,)),
    ((2,), (P,)),
    ((4,), (S1,)),
    ((2, 2), (S0, S1)),
    ((2, 2), (P, S0)),
]
placed = pytest.mark.parametrize(("shape", "ps"), PLACED, ids=str)


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    """Run ``fn(mesh)`` on the virtual ranks of a mesh."""
    return simulate(
        lambda: fn(init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])),
        math.prod(shape),
    )


def close(got: Any, want: Tensor) -> None:
    """The whole value of ``got`` is ``want``."""
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-9, atol=1e-9)


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_file(x: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "file": lambda x: through_file(x, weights_only=False),
    "safe file": lambda x: through_file(x, weights_only=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@ways
@placed
def test_tensors(shape: Any, ps: Any, way: Any) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        for requires_grad in (False, True):
            d = lay_out(x, mesh, ps).requires_grad_(requires_grad)
            e = way(d)
            assert e is not d
            assert e.layout is d.layout
            assert e.device_mesh is mesh
            assert e.requires_grad == requires_grad
            close(e, x)
            shares = e._local_tensor.data_ptr() == d._local_tensor.data_ptr()
            if d._local_tensor.numel():
                assert shares == (way is copy.copy)
            if requires_grad:  # it is a leaf in full
                (e * e).sum().backward()
                close(e.grad, 2 * x)
                assert d.grad is None
        p = nn.Parameter(lay_out(x, mesh, ps))
        p.tag = "mine"
        q = way(p)
        assert isinstance(q, nn.Parameter)
        assert q.tag == "mine"
        assert q.requires_grad
        t = lay_out(x, mesh, ps).t()  # not row-major
        close(way(t), x.t())
        assert way(t).layout is t.layout
        other = lay_out(x, mesh, ps).redistribute(placements=[R] * len(shape)).bfloat16()
        assert way(other).dtype == torch.bfloat16

    on_mesh(shape, fn)


def test_deepcopy_takes_the_gradient_of_tensors_along() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        for ps in ((R,), (S0,)):
            d = distribute_tensor(x, mesh, ps).requires_grad_()
            (d * d).sum().backward()
            pair = copy.deepcopy([d, d])
            assert pair[0] is pair[1]
            close(pair[0].grad, 2 * x)
            assert pair[0].grad.placements == d.placements
            pair[0].grad.zero_()
            close(d.grad, 2 * x)
            assert copy.deepcopy(nn.Parameter(d)).grad is None

    on_mesh((2,), fn)


@ways
def test_state_dicts_and_modules(way: Any) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(3, 5, dtype=torch.float64)

    def fn(mesh: Any) -> None:
        def cut(name: str, sub: nn.Module, mesh: Any) -> None:
            sub.weight = nn.Parameter(distribute_tensor(sub.weight, mesh, [S0]))

        net = distribute_module(copy.deepcopy(plain), mesh, cut)
        opt = torch.optim.AdamW(net.parameters())
        net(distribute_tensor(torch.randn(4, 3, dtype=torch.float64), mesh)).sum().backward()
        opt.step()
        state = way({"net": net.state_dict(), "opt": opt.state_dict()})
        assert all(isinstance(v, DTensor) for v in state["net"].values())
        other = distribute_module(copy.deepcopy(plain), mesh, cut)
        other.load_state_dict(state["net"])
        for p, q in zip(other.parameters(), net.parameters()):
            close(p, q.full_tensor())
        fresh = torch.optim.AdamW(other.parameters())
        fresh.load_state_dict(state["opt"])
        for p, q in zip(other.parameters(), net.parameters()):
            close(fresh.state[p]["exp_avg"], opt.state[q]["exp_avg"].full_tensor())
            assert fresh.state[p]["exp_avg"].placements == q.placements
        if way not in (WAYS["safe file"],):
            twin = way(net)
            for p, q in zip(twin.parameters(), net.parameters()):
                close(p, q.full_tensor())

    on_mesh((2,), fn)


def test_between_simulations_and_a_single_process() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)

    def write(mesh: Any) -> Any:
        files = []
        for ps in ((R,), (S0,)):
            file = io.BytesIO()
            torch.save({"x": distribute_tensor(x, mesh, ps).requires_grad_()}, file)
            files.append(file.getvalue())
        return files

    written = on_mesh((2,), write)

    def read(mesh: Any) -> None:
        for i in range(2):
            d = torch.load(io.BytesIO(written[mesh.get_rank()][i]))["x"]
            close(d, x)
            assert d.device_mesh == mesh
            assert d.requires_grad

    on_mesh((2,), read)
    # what every rank has whole can be read anywhere; a piece only where it was written
    d = torch.load(io.BytesIO(written[1][0]))["x"]
    torch.testing.assert_close(d.to_local(), x)
    assert d.device_mesh.size() == 2
    d = torch.load(io.BytesIO(written[0][1]))["x"]
    torch.testing.assert_close(d.detach().to_local(), x[:3])
    with pytest.raises(LayoutError, match="piece"):
        torch.load(io.BytesIO(written[1][1]))


def test_one_rank_alone() -> None:
    """A mesh over the world of one real process: no process group is needed."""
    x = torch.randn(5, 3, dtype=torch.float64)
    d = distribute_tensor(x, init_device_mesh("cpu", (1,)), [S0]).requires_grad_()
    for way in WAYS.values():
        e = way(d)
        close(e, x)
        (e * e).sum().backward()
        close(e.grad, 2 * x)
