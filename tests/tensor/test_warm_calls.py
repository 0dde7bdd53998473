"""A call that was compiled before gives what it gave the first time: the hot path skips nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, distribute_tensor, init_device_mesh, simulate
from shardwise.tensor import dtensor
from shardwise.testing.sweep import sweep


def assigned(t: Any) -> Any:
    u = t * 1
    u[1:3] = 0.5
    return u


CALLS: dict[str, Callable[[Any], Any]] = {
    "localized default": lambda t: t.tril(),
    "localized number": lambda t: t.triu(-1),
    "localized in place": lambda t: (t * 1).tril_(),
    "float after a move": lambda t: t + 1.0,
    "reflected float": lambda t: 1.0 - t,
    "float that decides": lambda t: t**2.0,
    "int": lambda t: t - 2,
    "float by name": lambda t: t.clamp(min=0.1),
    "two floats": lambda t: t.clamp(-0.5, 0.5),
    "float in place": lambda t: (t * 1).add_(1.0),
    "same tensor twice": lambda t: t * t,
    "local program": lambda t: t.softmax(0),
    "local program, tuple": lambda t: t.max(0),
    "list": lambda t: torch.cat([t, t], 0),
    "view": lambda t: t.t() * 1,
    "moved view": lambda t: t[1:4] * 1,
    "views": lambda t: [c * 1 for c in t.split([2, 3])],
    "write through a view": assigned,
    "plain tensor": lambda t: t.index_select(0, torch.tensor([3, 1])),
    "python function": lambda t: F.layer_norm(t, (3,)),
    "traced": lambda t: F.pad(t, (1, 1)),
    "many sizes": lambda t: t.view(5, 1, 3, 1) * 1,
    "two tensors, an int by name": lambda t: torch.add(t, t, alpha=2),
    "two tensors, a float by name": lambda t: torch.add(t, t, alpha=0.5),
    "two tensors, plain names": lambda t: F.nll_loss(
        t, torch.arange(5) % 3 + (t[:, 0] * 0).long()
    ),
    "a shape, tensors by name": lambda t: F.layer_norm(t, (3,), t[0], t[1]),
}


@pytest.mark.parametrize("f", CALLS.values(), ids=CALLS.keys())
def test_warm_calls(f: Callable[[Any], Any]) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    assert not sweep(lambda t: (f(t), f(t), f(t)), x, meshes=((2,), (2, 2)), extra=1)


HITS = ("int", "many sizes", "two tensors, an int by name", "a shape, tensors by name")


@pytest.mark.parametrize("f", [CALLS[name] for name in HITS], ids=HITS)
def test_the_slow_path_is_asked_once(
    f: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(func: Any, args: Any, kwargs: Any) -> Any:
        raise LookupError(f"{func} is not known")

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (1,))
        t = distribute_tensor(torch.randn(5, 3), mesh, [Replicate()])
        first = f(t)
        with monkeypatch.context() as patch:
            patch.setattr(dtensor, "_SLOW", [refuse, dtensor._SLOW[1]])
            assert torch.equal(f(t).to_local(), first.to_local())

    simulate(on_rank, 1)
