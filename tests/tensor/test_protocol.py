"""What Python, numpy and torch's helpers ask of a tensor, asked of a DTensor."""

from collections.abc import Callable
import math
from typing import Any
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from shardwise import (
    CommLog,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import AliasError, ShardError, UnsupportedError
from shardwise.testing.sweep import lay_out, sweep

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACED = [((2,), (R,)), ((2,), (S0,)), ((2,), (P,)), ((4,), (S1,)), ((2, 2), (S0, P))]
placed = pytest.mark.parametrize(("shape", "ps"), PLACED, ids=str)


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    """Run ``fn(mesh)`` on the virtual ranks of a mesh."""
    return simulate(lambda: fn(init_device_mesh("cpu", shape)), math.prod(shape))


def close(got: Any, want: Tensor) -> None:
    """The whole value of ``got`` is ``want``."""
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.detach().full_tensor(), want.detach())


def fits(ps: Any, ndim: int) -> tuple[Any, ...]:
    return tuple(R if p.is_shard() and p.dim >= ndim else p for p in ps)


@placed
def test_numbers(shape: Any, ps: Any) -> None:
    def fn(mesh: Any) -> None:
        for value in (2.5, -0.0, 7.0, math.inf):
            for t in (torch.tensor(value), torch.tensor([value]), torch.tensor([[value]])):
                if value == math.inf and any(p.is_partial() for p in ps):
                    continue
                d = lay_out(t.double(), mesh, fits(ps, t.ndim))
                assert d.item() == value
                assert float(d) == value
                assert complex(d) == value
                assert bool(d) == bool(value)
                if value != math.inf:
                    assert int(d) == int(value)
                    assert round(d).item() == round(value)
                    assert math.floor(d) == math.floor(value)
        d = lay_out(torch.tensor(math.pi).double(), mesh, fits(ps, 0))
        assert f"{d:.3f}" == "3.142"
        assert f"{d:e}" == f"{math.pi:e}"
        assert f"{d}"
        assert round(d, ndigits=2).item() == pytest.approx(3.14)
        assert d == pytest.approx(math.pi)
        assert d == d
        assert 3 < d < 4
        n = distribute_tensor(
            torch.tensor([2]),
            mesh,
            fits(ps, 1) if not any(p.is_partial() for p in ps) else None,
        )
        assert [1, 2, 3][n] == 3
        assert list(range(5))[: int(n)] == [0, 1]
        assert torch.zeros(4)[n.item()] == 0
        many = lay_out(torch.ones(5, 3).double(), mesh, ps)
        for ask in (float, int, bool, complex, lambda t: t.item()):
            with pytest.raises((ShardError, RuntimeError, ValueError)):
                ask(many)
        with pytest.raises(ShardError, match=r"0-d"):
            len(d)

    on_mesh(shape, fn)


@placed
def test_sequences(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        assert len(d) == 5
        assert d.tolist() == x.tolist()
        rows = list(d)
        assert len(rows) == 5
        for row, want in zip(rows, x):
            close(row, want)
        for row, want in zip(reversed(d), reversed(x)):
            close(row, want)
        a, *rest = d
        close(a, x[0])
        assert len(rest) == 4
        assert 7.0 in d
        assert 99.0 not in d
        close(d[1:3], x[1:3])
        close(d[-1], x[-1])
        close(d[..., None], x[..., None])
        close(torch.stack(list(d.unbind(1))), x.T)
        assert [t.shape for t in d.split(2)] == [(2, 3), (2, 3), (1, 3)]
        with pytest.raises(IndexError):
            d[7]

    on_mesh(shape, fn)


@placed
def test_numpy(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        np.testing.assert_array_equal(np.asarray(d), x.numpy())
        np.testing.assert_array_equal(np.array(d, dtype=np.float64), x.double().numpy())
        with pytest.raises(RuntimeError, match="detach"):
            np.asarray(d.clone().requires_grad_())
        assert np.asarray(d).sum() == x.sum()
        if d.layout.is_replicated:
            array = d.numpy()
            array[0, 0] = 100
            assert d[0, 0].item() == 100  # shares memory
            array[0, 0] = 0
        else:
            with pytest.raises(AliasError, match="full_tensor"):
                d.numpy()
        close(d + np.ones(3, dtype=np.float32), x + 1)
        close(np.float32(2) * d, x * 2)
        close(d * np.float64(2), x * 2)
        close(d[np.int64(1)], x[1])
        close(d[np.array([0, 2])], x[[0, 2]])

    on_mesh(shape, fn)


@placed
def test_identity(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        assert hash(d) == id(d)
        assert {d: 1}[d] == 1
        assert len({d, d}) == 1
        ref = weakref.ref(d)
        assert ref() is d
        assert torch.is_tensor(d)
        assert isinstance(d, Tensor)
        assert isinstance(d, torch.FloatTensor) or type(d) is DTensor
        assert torch.overrides.is_tensor_like(d)
        assert d.type() == "torch.FloatTensor"
        assert torch.is_floating_point(d)
        assert not torch.is_complex(d)
        assert d.shape == x.shape
        assert d.size() == x.size()
        assert d.size(-1) == 3
        assert d.size(dim=0) == 5
        assert d.numel() == d.nelement() == torch.numel(d) == 15
        assert d.ndim == d.dim() == d.ndimension() == 2
        assert d.dtype == x.dtype
        assert d.device == x.device
        assert d.layout is not None
        assert d.is_contiguous()
        assert d.stride() == x.stride()
        assert d.t().stride() == x.t().stride()
        assert d.element_size() == 4
        assert d.itemsize == 4
        assert d.nbytes == x.nbytes
        assert not d.is_sparse
        assert d.is_cpu
        assert not d.is_cuda
        assert not d.is_meta
        assert d.is_leaf
        assert d.grad is None
        assert d.grad_fn is None
        assert d.get_device() == -1
        assert d.storage_offset() == 0
        assert d.is_same_size(x)
        assert d.is_shared() in (False, True)
        assert d.T.shape == d.mT.shape == (3, 5)
        d.mine = 3
        assert d.mine == 3
        with pytest.raises(AttributeError):
            d.nothing  # noqa: B018

    on_mesh(shape, fn)


@placed
def test_printing_never_communicates(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        p = nn.Parameter(d)
        net = nn.Linear(3, 5)
        net.weight = p
        y = p * 2
        with CommLog() as log:
            for t in (d, p, y, d.t()):
                text = repr(t)
                assert text == str(t)
                assert "DTensor" in text
                assert "shape=(" in text
            assert repr(net) == "Linear(in_features=3, out_features=5, bias=True)"
            assert str(list(net.parameters()))
            assert str({"a": d})
            assert "Parameter" in repr(nn.ParameterDict({"w": p}))
        assert log.count() == 0

    on_mesh(shape, fn)


@placed
def test_comparing(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        e = distribute_tensor(x.clone(), mesh, [S1] * len(shape))
        assert torch.equal(d, e)
        assert d.equal(e)
        assert torch.equal(d, x)
        assert not torch.equal(d, d + 1)
        assert torch.allclose(d, e)
        assert d.allclose(e + 1e-9)
        assert not torch.allclose(d, e + 1)
        torch.testing.assert_close(d, e)
        torch.testing.assert_close(d, x)
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(d, e + 1)
        close((d == e).float(), torch.ones(5, 3))
        assert bool((d == e).all())
        assert (d == 3.0).any()

    on_mesh(shape, fn)


@placed
def test_collate_and_dictionaries(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        batch = default_collate([{"x": d, "n": 1}, {"x": d, "n": 2}])
        close(batch["x"], torch.stack([x, x]))
        assert batch["n"].tolist() == [1, 2]
        flat, tree = torch.utils._pytree.tree_flatten({"a": [d, (d, 1)]})
        assert flat[0] is d
        assert torch.utils._pytree.tree_unflatten(flat, tree)["a"][1][0] is d

    on_mesh(shape, fn)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@placed
def test_memory(shape: Any, ps: Any) -> None:
    x = torch.arange(15.0).reshape(5, 3)

    def fn(mesh: Any) -> None:
        d = lay_out(x, mesh, ps)
        whole = d.layout.is_replicated
        for ask in (
            lambda t: t.data_ptr(),
            lambda t: t.untyped_storage(),
            lambda t: t.storage(),
            lambda t: t.numpy(),
        ):
            if whole:
                ask(d)
            else:
                with pytest.raises((AliasError, UnsupportedError), match="to_local"):
                    ask(d)
        for ask in (
            lambda t: t.apply_(abs),
            lambda t: t.share_memory_(),
            lambda t: t.map_(t, max),
        ):
            with pytest.raises(UnsupportedError, match="to_local"):
                ask(d)
        close(d, x)

    on_mesh(shape, fn)


def test_errors_inside_operators_are_ours() -> None:
    """Not "unsupported operand": torch would try the reflected operator after a ``TypeError``."""

    def fn() -> None:
        a = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)))
        b = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2, 2)))
        with pytest.raises(ShardError, match="mesh"):
            a + b

    simulate(fn, 4)


def test_integers_of_numpy() -> None:
    def some(x: Any) -> Any:
        n = np.int64
        rows = x[: n(3)], x[:, np.int32(1) :], x[:: n(2)], x[n(-1)], x[n(0), n(1)]
        return *rows, x.sum(n(1)), x.view(n(2), -1), x.narrow(0, n(1), n(2)), x * n(2)

    def written(x: Any) -> Any:
        y = x * 2
        y[: np.int64(2), np.int64(1)] = 5
        return y

    x = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    assert not sweep(
        lambda x: (some(x), some(x), written(x)), x, meshes=((2,), (2, 2)), extra=2
    )
