"""Custom ops: rules of users, under every name an op is called by; without one they are right all the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Replicate, Shard
from shardwise.errors import UnsupportedError
from shardwise.rules import registry
from shardwise.testing import bytes_moved, sweep

X = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6)
W = torch.linspace(2, -1, 18, dtype=torch.float64).view(6, 3)
BIAS = torch.linspace(0, 1, 6, dtype=torch.float64)
MESHES = ((2,), (2, 2))


@torch.library.custom_op("shardwise_tests::mm", mutates_args=())
def mm(a: Tensor, w: Tensor) -> Tensor:
    return a @ w


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    a, w = ctx.saved_tensors
    return g @ w.t(), a.t() @ g


mm.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("shardwise_tests::shift_", mutates_args={"a"})
def shift_(a: Tensor, b: Tensor) -> None:
    a.add_(b.sum())


@torch.library.custom_op("shardwise_tests::mix", mutates_args=())
def mix(
    a: Tensor, b: Tensor | None = None, c: Tensor | None = None, *, s: float = 1.0
) -> Tensor:
    out = a * s if b is None else a * s + b
    return out if c is None else out * c


@torch.library.custom_op("shardwise_tests::each", mutates_args=())
def each(ts: list[Tensor], a: Tensor) -> list[Tensor]:
    return [t + a.sum() for t in ts]


LIB = torch.library.Library("shardwise_tests_lib", "DEF")
LIB.define("double(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIB.impl("double", lambda x, out: out.copy_(x * 2), "CPU")

NAMES = {
    "as it was made": mm,
    "packet": torch.ops.shardwise_tests.mm,
    "overload": torch.ops.shardwise_tests.mm.default,
}


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    before = dict(registry._USER)
    yield
    registry._USER.clear()
    registry._USER.update(before)


def _shifted(a: Any, b: Any) -> Any:
    a = a.clone()  # it is called twice
    assert shift_(a, b) is None
    return a


def test_without_a_rule() -> None:
    assert not sweep(mm, X, W, meshes=MESHES, extra=2)
    assert not sweep(_shifted, X, BIAS, meshes=MESHES, extra=2, grad=False)
    assert not sweep(
        lambda a, b: (mix(a), mix(a, b), mix(a, c=b), mix(a, b, b, s=2.0)),
        X,
        BIAS,
        meshes=MESHES,
        extra=1,
        grad=False,
    )
    assert not sweep(
        lambda a, b: (each([a, b], b), each([], a)), X, BIAS, meshes=MESHES, extra=1, grad=False
    )
    assert not sweep(
        lambda a, b: (torch.ops.shardwise_tests_lib.double(a, out=b), b),
        X,
        X.flip(0),
        meshes=MESHES,
        extra=1,
        grad=False,
    )


@pytest.mark.parametrize("called", NAMES)
@pytest.mark.parametrize("registered", NAMES)
def test_a_rule_holds_under_every_name(registered: str, called: str) -> None:
    registry.register_rule(NAMES[registered], "m k, k n -> m n")
    assert bytes_moved(NAMES[called], [X, W], (2,), ((Shard(0),), (Replicate(),))) == 0
    assert not sweep(NAMES[called], X, W, meshes=((2,),), extra=2)


def test_a_rule_of_an_op_that_writes_and_returns_nothing() -> None:
    registry.register_rule(shift_, "m n, [k] -> m n", inplace=True)
    assert not sweep(_shifted, X, BIAS, meshes=MESHES, extra=2, grad=False)
    assert bytes_moved(_shifted, [X, BIAS], (2,), ((Shard(0),), (Replicate(),))) == 0


def test_a_wrong_rule_is_shown() -> None:
    registry.register_rule(mm, "m k, k n -> n m")
    assert sweep(mm, X, W, meshes=((2,),), extra=0)


@pytest.mark.parametrize("text", ["m k, k n - m n", "m m -> m", "m k -> m q", "m-k -> m"])
def test_a_line_that_cannot_be_a_rule(text: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be read"):
        registry.register_rule(mm, text)
