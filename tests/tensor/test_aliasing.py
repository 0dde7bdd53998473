"""Views follow their bases and bases their views, on every sharding, as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import GradientError, UnsupportedError
from shardwise.testing import sweep

MESHES = ((2,), (2, 2))
X = torch.arange(24.0, dtype=torch.float64).view(4, 6)
Z = torch.complex(X, X.flip(0))

VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[1],
    "row by tensor": lambda x: x[torch.tensor(1)],
    "steps": lambda x: x[::2, 1:],
    "reshape": lambda x: x.view(2, 12),
    "flat part": lambda x: x.flatten()[3:9],
    "of a view": lambda x: x.t()[2][1:3],
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split([1, 5], 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided slices": lambda x: x.as_strided((2, 3), (6, 1), 7),
    "as_strided transposed": lambda x: x.as_strided((6, 4), (1, 6)),
    "as_strided": lambda x: x.as_strided((3, 2), (8, 2), 1),
}
SEVERAL = ("chunk", "split", "unbind")  # torch refuses to write these where grad is recorded
PARTS: dict[str, Callable[[Any], Any]] = {
    "real": lambda z: z.real,
    "imag": lambda z: z.imag[1:, ::2],
    "imag of conj": lambda z: z.conj().imag,
    "pairs": lambda z: torch.view_as_real(z)[..., 0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_base_written(name: str) -> None:
    def fn(x: Any) -> Any:
        y = x * 2
        view = VIEWS[name](y)
        y.mul_(3)
        return view * 1, y

    assert not sweep(fn, X, meshes=MESHES, extra=2, grad=name not in SEVERAL)


@pytest.mark.parametrize("name", VIEWS)
def test_view_written(name: str) -> None:
    def fn(x: Any) -> Any:
        y = x * 2
        VIEWS[name](y).mul_(3)
        return y

    assert not sweep(fn, X, meshes=MESHES, extra=2, grad=name not in SEVERAL)


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_complex_numbers_are_views(name: str) -> None:
    def fn(z: Any) -> Any:
        y = z * 2
        part = PARTS[name](y)
        part.mul_(3)
        y.mul_(2)
        return part * 1, y

    assert not sweep(fn, Z, meshes=MESHES, extra=2, grad=False)


def test_lazy_bits_are_those_of_the_piece() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        z = sw.distribute_tensor(Z, mesh, [Shard(0)])
        assert z.conj().is_conj()
        assert z.conj().imag.is_neg()
        assert not z.conj().resolve_conj().is_conj()

    sw.simulate(on_rank, 2)


def test_bits_written_through_another_dtype() -> None:
    def fn(x: Any) -> Any:
        x.view(torch.int64).copy_(
            torch.full((4, 6), 2.5, dtype=torch.float64).view(torch.int64)
        )
        return x

    assert not sweep(fn, X, meshes=MESHES, extra=2, grad=False)


def test_a_stale_copy_is_never_read() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(X, mesh, [Shard(0)])
        reads: list[Callable[[Any], Any]] = [
            lambda v: v.full_tensor(),
            lambda v: v.redistribute(placements=[Replicate()]).to_local(),
            lambda v: torch.tensor(v.tolist()),
        ]
        for read in reads:
            view = x.view(3, 8)
            x.add_(10)
            assert torch.equal(read(view).double(), x.full_tensor().view(3, 8))

    sw.simulate(on_rank, 2)


def test_out_without_elements_is_given_memory() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Partial()):
            x = sw.distribute_tensor(X, mesh, [Shard(0)]).redistribute(placements=[placement])
            out = sw.empty(0, device_mesh=mesh, dtype=torch.float64)
            assert torch.add(x, x, out=out) is out
            assert out.shape == X.shape
            assert torch.equal(out.full_tensor(), X * 2)

    sw.simulate(on_rank, 2)


def test_out_into_a_view_that_is_a_copy() -> None:
    def fn(x: Any, y: Any) -> Any:
        torch.add(x[1], y[1], out=x[2])
        return x

    assert not sweep(fn, X, X.flip(1), meshes=((2,),), extra=2, grad=False)


def test_out_takes_no_gradient() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
        with pytest.raises(GradientError, match="automatic differentiation"):
            torch.add(x, x, out=torch.zeros_like(x))
        with torch.no_grad():
            torch.add(x, x, out=torch.zeros_like(x))

    sw.simulate(on_rank, 2)


def test_resize() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(X, mesh, [Shard(0)])
        assert x.resize_(4, 6) is x
        with pytest.raises(UnsupportedError, match="in pieces"):
            x.resize_(2, 6)
        whole = sw.distribute_tensor(X, mesh)
        view = whole[1]
        whole.resize_(3, 8).mul_(2)
        assert torch.equal(whole.full_tensor(), X.view(3, 8) * 2)
        assert torch.equal(view.full_tensor(), X[1] * 2)
        empty = sw.empty(0, 6, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64)
        assert torch.equal(empty.resize_as_(x).copy_(x).full_tensor(), X)

    sw.simulate(on_rank, 2)


def test_a_complex_loss_is_refused_as_in_torch() -> None:
    def on_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        z = sw.distribute_tensor(Z, mesh, [Shard(0)]).requires_grad_()
        with pytest.raises(GradientError, match="real scalar"):
            z.sum().backward()
        with pytest.raises(GradientError, match="real scalar"):
            torch.autograd.grad(z.sum(), z)

    sw.simulate(on_rank, 2)


def test_where_of_a_condition_alone() -> None:
    assert not sweep(lambda x: torch.where(x > 7), X, meshes=MESHES, extra=1, grad=False)


def test_versions_agree_on_all_ranks() -> None:
    """A view that is a copy is taken again where the base's version says so: on all ranks or on none."""
    writes: list[Callable[[Any], Any]] = [
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.__setitem__((slice(0, 1), 0), 1.0),
        lambda x: x.__setitem__(x > 3, 1.0),
        lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 6, dtype=torch.float64)),
        lambda x: x[-1].zero_(),
        lambda x: x[0:0].zero_(),
        lambda x: x.diagonal().fill_(1),
    ]

    def on_rank() -> list[int]:
        mesh = sw.init_device_mesh("cpu", (4,))
        found: list[int] = []
        for placement in (Shard(0), Shard(1), Replicate()):
            x = sw.distribute_tensor(X[:3], mesh, [placement])
            for write in writes:
                before = x._version
                write(x)
                found.append(x._version - before)
        return found

    first, *others = sw.simulate(on_rank, 4)
    assert all(other == first for other in others)
    assert all(first)


UNCHANGED: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "double": lambda x: x.double(),
    "to dtype": lambda x: x.to(torch.float64),
    "to device": lambda x: x.to(x.device),
    "cpu": lambda x: x.cpu(),
    "real": lambda x: x.real,
    "no dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_torch_gives_the_operand_back(name: str, placement: Any) -> None:
    def on_rank(rank: int) -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        module = torch.nn.Linear(6, 4, bias=False)
        weight = torch.nn.Parameter(sw.distribute_tensor(X, mesh, [placement]))
        fn = UNCHANGED[name]
        for _ in range(3):  # cold and warm
            assert fn(weight) is weight
            module.weight = fn(weight)  # which takes parameters only
            with torch.no_grad():
                assert fn(weight) is weight
        assert (weight.t().contiguous() is weight) is False
        assert weight.float().dtype == torch.float32

    assert UNCHANGED[name](X) is X
    sw.simulate(on_rank, 2)
