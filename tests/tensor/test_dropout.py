"""Dropout has one mask for the whole tensor, the same on every layout; torch's own under rng(like="torch")."""

from collections.abc import Callable
from typing import Any
import warnings

import pytest
import torch
from torch import Tensor, nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import CommLog, DTensor, Partial, Replicate, Shard
from shardwise.errors import ShardError
from shardwise.testing import sweep
from shardwise.testing.sweep import lay_out

LAYOUTS = [
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Shard(0, order=1), Shard(0, order=0)),
    (Partial(), Shard(0)),
    (Partial(), Partial()),
]


def on_mesh(fn: Callable[[Any], Any], shape: tuple[int, ...] = (2, 2)) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return sw.simulate(lambda: fn(sw.init_device_mesh("cpu", shape)), n)


FORMS: dict[str, Callable[[Any], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "F.dropout inplace": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "F.dropout p=1": lambda x: F.dropout(x, 1.0),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "torch.dropout_": lambda x: torch.dropout_(x * 1, 0.5, train=True),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native mask": lambda x: torch.native_dropout(x, 0.4, None)[1],
    "native p=1": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "native eval": lambda x: torch.native_dropout(x, 0.4, False)[0],
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "alpha inplace": lambda x: F.alpha_dropout(x * 1, 0.3, training=True, inplace=True),
    "alpha p=1": lambda x: F.alpha_dropout(x, 1.0, training=True),
    "torch.alpha": lambda x: torch.alpha_dropout(x, 0.3, True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "feature": lambda x: torch.feature_dropout(x, 0.3, True),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "module": nn.Dropout(0.2),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_bit_equal_to_torch(name: str, dtype: torch.dtype) -> None:
    def on_rank(mesh: Any) -> None:
        for plain in (torch.randn(5, 7, dtype=dtype), torch.randn(7, 5, dtype=dtype).t()):
            torch.manual_seed(6)
            want = FORMS[name](plain)
            state = torch.get_rng_state()
            for placed in LAYOUTS:
                x = sw.distribute_tensor(plain, mesh, placed)
                torch.manual_seed(6)
                with sw.rng(like="torch"):
                    got = FORMS[name](x)
                assert (got.dtype, got.stride()) == (want.dtype, want.stride())
                assert torch.equal(got.full_tensor(), want), placed
                assert torch.equal(torch.get_rng_state(), state)

    on_mesh(on_rank)


SHAPED: list[tuple[Callable[[Any], Tensor], tuple[int, ...]]] = [
    (lambda x: F.dropout1d(x, 0.5), (3, 5, 2)),
    (lambda x: F.dropout2d(x, 0.5), (3, 5, 2, 3)),
    (lambda x: F.dropout2d(x, 0.5), (3, 5, 4)),
    (lambda x: F.dropout3d(x, 0.5), (2, 3, 2, 1, 2)),
    (lambda x: F.dropout3d(x, 0.5), (5, 2, 3, 2)),
    (lambda x: F.dropout1d(x * 1, 0.5, inplace=True), (5, 3)),
    (lambda x: F.feature_alpha_dropout(x, 0.5, training=True), (3, 5, 4)),
]


@pytest.mark.parametrize("i", range(len(SHAPED)))
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_channels(i: int) -> None:
    fn, shape = SHAPED[i]

    def on_rank(mesh: Any) -> None:
        plain = torch.randn(shape)
        torch.manual_seed(6)
        want = fn(plain)
        for placed in [*LAYOUTS, (Shard(len(shape) - 1), Shard(0))]:
            torch.manual_seed(6)
            with sw.rng(like="torch"):
                got = fn(sw.distribute_tensor(plain, mesh, placed))
            assert torch.equal(got.full_tensor(), want), placed

    on_mesh(on_rank)


def test_channels_last_and_expanded() -> None:
    def on_rank(mesh: Any) -> None:
        images = torch.randn(3, 4, 2, 5).to(memory_format=torch.channels_last)
        thin = torch.randn(3, 1)
        for plain, make in (
            (images, lambda: sw.distribute_tensor(images, mesh, [Shard(0), Shard(1)])),
            (
                thin.expand(3, 4),
                lambda: sw.distribute_tensor(thin, mesh, [Shard(0)]).expand(3, 4),
            ),
        ):
            torch.manual_seed(6)
            want = F.dropout(plain, 0.5)
            torch.manual_seed(6)
            with sw.rng(like="torch"):
                got = F.dropout(make(), 0.5)
            assert torch.equal(got.full_tensor(), want)
            assert got.stride() == want.stride()

    on_mesh(on_rank)


@pytest.mark.parametrize("like", ["torch", "philox"])
@pytest.mark.parametrize(
    "name", ["F.dropout", "native", "alpha", "feature", "dropout1d", "F.dropout inplace"]
)
def test_one_mask_on_every_layout_and_gradients(name: str, like: Any) -> None:
    x = torch.randn(5, 7, dtype=torch.float64)

    def on_rank(mesh: Any) -> list[tuple[Tensor, Tensor]]:
        found = []
        for placed in LAYOUTS:
            d = lay_out(x, mesh, placed).requires_grad_()
            torch.manual_seed(6)
            with sw.rng(like):
                y = FORMS[name](d)
            (y * y).sum().backward()
            found.append((y.detach().full_tensor(), d.grad.full_tensor()))
        return found

    found = [pair for rank in on_mesh(on_rank) for pair in rank]
    for value, grad in found:
        torch.testing.assert_close(value, found[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, found[0][1], rtol=1e-12, atol=1e-12)
    assert 0 < int((found[0][1] == 0).sum()) < 35 or name == "alpha"


def test_sweep_against_torch() -> None:
    def fn(x: Tensor) -> Tensor:
        with sw.rng(like="torch"):
            return F.dropout(x, 0.4) + torch.alpha_dropout(x, 0.2, True)

    assert not sweep(
        fn, torch.randn(5, 3, 2, dtype=torch.float64), meshes=((3,), (2, 2)), extra=2
    )


def test_default_stream_is_philox() -> None:
    def on_rank(mesh: Any) -> None:
        x = sw.ones(8, 8, device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(0)
        default = F.dropout(x, 0.5).full_tensor()
        for like in ("philox", "torch"):
            torch.manual_seed(0)
            with sw.rng(like):
                assert torch.equal(F.dropout(x, 0.5).full_tensor(), default) == (
                    like == "philox"
                )

    on_mesh(on_rank)


def test_when_nothing_is_dropped_the_input_is_returned() -> None:
    def on_rank(mesh: Any) -> None:
        x = sw.ones(4, 3, device_mesh=mesh, placements=[Shard(0)])
        none = sw.ones(0, 3, device_mesh=mesh, placements=[Shard(0)])
        before = torch.get_rng_state()
        for got in (
            F.dropout(x, 0.0),
            F.dropout(x, 0.5, training=False),
            torch.dropout(x, 0.5, False),
            F.alpha_dropout(x),
        ):
            assert got is x
        assert F.dropout(none) is none
        assert nn.Dropout(0.5).eval()(x) is x
        assert torch.equal(torch.get_rng_state(), before)
        with pytest.raises(ShardError, match="between 0 and 1"):
            F.dropout(x, 1.5)

    on_mesh(on_rank)


def test_in_place() -> None:
    def on_rank(mesh: Any) -> None:
        for placed in [
            (Shard(0), Replicate()),
            (Partial(), Shard(1)),
            (Partial("max"), Replicate()),
        ]:
            for fn in (F.dropout, F.alpha_dropout):
                plain = torch.rand(5, 7)
                x = sw.distribute_tensor(plain, mesh, placed)
                torch.manual_seed(6)
                fn(plain, 0.5, training=True, inplace=True)
                torch.manual_seed(6)
                with sw.rng(like="torch"):
                    assert fn(x, 0.5, training=True, inplace=True) is x
                assert x.placements == tuple(placed)
                assert torch.equal(x.full_tensor(), plain)
        leaf = sw.ones(4, 3, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):
            F.dropout(leaf, 0.5, inplace=True)

    on_mesh(on_rank)


def test_nothing_moves() -> None:
    def on_rank(mesh: Any) -> None:
        with CommLog() as log:
            for placed in LAYOUTS:
                F.dropout(sw.ones(5, 7, device_mesh=mesh, placements=placed), 0.5)
                F.dropout1d(sw.ones(5, 7, device_mesh=mesh, placements=placed), 0.5)
        assert log.bytes == 0

    on_mesh(on_rank)


def test_torch_warns_as_ever() -> None:
    def on_rank(mesh: Any) -> None:
        with pytest.raises(RuntimeError, match="Expected 2D or 3D"):
            F.dropout1d(sw.ones(2, 2, 2, 2, device_mesh=mesh))

    on_mesh(on_rank)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        on_mesh(lambda mesh: F.dropout2d(sw.ones(2, 2, 2, device_mesh=mesh)))


# ---- drawn again in backward -------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_the_same_mask(reentrant: bool) -> None:
    w0, x0 = torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)

    def on_rank(mesh: Any) -> None:
        def block(x: Any, w: Any) -> Any:
            h = F.dropout(F.linear(x, w), 0.5)
            return F.dropout((h * h).sum(-1), 0.3) * torch.rand_like(h[:, 0]).bernoulli_(0.5)

        for like, placed in [
            ("torch", (Shard(0), Replicate())),
            (None, (Shard(0), Replicate())),
            ("torch", (Replicate(), Shard(1))),
            ("philox", (Replicate(), Shard(1))),
        ]:
            grads = []
            for saved in (False, True):
                x = sw.distribute_tensor(x0, mesh, placed).requires_grad_()
                w = sw.distribute_tensor(w0, mesh, [Replicate(), Shard(0)]).requires_grad_()
                torch.manual_seed(8)
                with sw.rng(like):
                    if saved:
                        y = checkpoint(block, x, w, use_reentrant=reentrant)
                        z = checkpoint(block, x, w, use_reentrant=reentrant)
                    else:
                        y, z = block(x, w), block(x, w)
                loss = (y + 2 * z).sum()
                F.dropout(x.detach(), 0.5)  # backward starts from another state
                loss.backward()  # outside of rng(...)
                grads.append((x.grad.full_tensor(), w.grad.full_tensor()))
            for a, b in zip(*grads):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert grads[0][0].abs().sum() > 0

    on_mesh(on_rank)


def test_training_is_the_same_on_every_layout() -> None:
    def train(wrap: Callable[[nn.Module], Any], data: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3), nn.AlphaDropout(0.1)
        ).double()
        wrap(net)
        torch.manual_seed(1)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            with sw.rng(like="torch"):
                net(data).square().sum().backward()
            opt.step()
        return [
            p.full_tensor() if isinstance(p, DTensor) else p.detach()
            for p in (q.detach() for q in net.parameters())
        ]

    data = torch.randn(7, 5, dtype=torch.float64)
    wants = train(lambda net: net, data)

    def on_rank(mesh: Any) -> None:
        def shard(name: str, module: nn.Module, mesh: Any) -> None:
            for key, p in list(module.named_parameters(recurse=False)):
                module.register_parameter(
                    key,
                    nn.Parameter(
                        sw.distribute_tensor(p.detach(), mesh, [Shard(0), Replicate()])
                    ),
                )

        gots = train(
            lambda net: sw.distribute_module(net, mesh, shard),
            sw.distribute_tensor(data, mesh, [Replicate(), Shard(0)]),
        )
        for got, want in zip(gots, wants):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    on_mesh(on_rank)
