"""Faults that torch's own table of ops (a to l) has found: one test for every kind."""

from collections.abc import Callable
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.simulate import simulate
from shardwise.testing import sweep

D = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _ids(n: int, *shape: int) -> Tensor:
    return torch.randint(0, n, shape)


# -- tensors by name -------------------------------------------------------------------------------
BY_NAME: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "gather": (
        lambda x, i: torch.gather(index=i, input=x, dim=1),
        [torch.randn(5, 7, dtype=D), _ids(7, 5, 3)],
    ),
    "index_add": (
        lambda x, i, s: torch.index_add(source=s, index=i, input=x, dim=0),
        [torch.randn(5, 3, dtype=D), _ids(5, 2), torch.randn(2, 3, dtype=D)],
    ),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(target=t, input=x),
        [torch.randn(5, 7, dtype=D), _ids(7, 5)],
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q, is_causal=True),
        [torch.randn(2, 4, 5, 3, dtype=D) for _ in range(3)],
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(bias=b, weight=w, num_groups=2, input=x),
        [torch.randn(3, 4, 5, dtype=D), torch.rand(4, dtype=D), torch.rand(4, dtype=D)],
    ),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(B=b, upper=True, input=a),
        [torch.eye(3, dtype=D) + torch.ones(3, 3, dtype=D).triu(), torch.randn(3, 2, dtype=D)],
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_tensors_by_name_in_any_order(name: str) -> None:
    fn, tensors = BY_NAME[name]
    assert not sweep(fn, *tensors, meshes=((2,), (2, 2)), extra=2)


def test_operands_of_a_traced_call_are_counted_as_they_appear() -> None:
    x, w = torch.randn(8, 3, dtype=D), torch.randn(4, 3, dtype=D)
    assert not sweep(F.linear_cross_entropy, x, w, _ids(4, 8), meshes=((2,), (3,)), extra=2)


# -- results that are no tensors -------------------------------------------------------------------
def test_equal_has_one_answer_on_all_ranks() -> None:
    def on_rank() -> bool:
        mesh = init_device_mesh("cpu", (3,))
        x = torch.arange(6.0)
        y = x.clone()
        y[0] = -1  # the ranks' own pieces are equal on all but one
        return torch.equal(
            distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)])
        )

    assert simulate(on_rank, 3) == [False, False, False]


def test_equal_has_no_rule_whatever_was_loaded_before() -> None:
    code = (
        "import torch; torch.ops.aten.equal\n"
        "import shardwise\n"
        "from shardwise.rules.registry import lookup\n"
        "assert lookup(torch.equal) is None and lookup(torch.Tensor.equal) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what cannot be cut ----------------------------------------------------------------------------
def test_lists_of_positions_next_to_a_sharded_tensor_of_them() -> None:
    x, i = torch.randn(5, 5, 5, dtype=D), torch.tensor([0, 1, -2])
    assert not sweep(
        lambda x, i: x[[0, 2, 3], [1, 3, 3], i], x, i, meshes=((2,), (3,)), extra=2
    )


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (torch.column_stack, ((), (1, 3))),
        (torch.vstack, ((), (1,))),
        (torch.dstack, ((4,), (1, 4, 3))),
    ],
)
def test_a_stacked_tensor_without_the_sharded_dim(fn: Any, shapes: Any) -> None:
    tensors = [torch.randn(s, dtype=D) for s in shapes]
    assert not sweep(lambda *ts: fn(ts), *tensors, meshes=((2,), (3,)), extra=2)


def test_integers_scaled_by_fractions() -> None:
    x, a, b = (torch.randint(-9, 9, s) for s in ((1,), (5, 5, 5), (5, 5, 10)))
    assert not sweep(
        lambda x, a, b: torch.baddbmm(x, a, b, beta=0.2, alpha=0.6),
        x,
        a,
        b,
        meshes=((2, 3),),
        extra=4,
    )


# -- values are read, or the shapes are wrong ------------------------------------------------------
def test_a_check_of_values_with_operands_in_another_order() -> None:
    x, y, v = (
        torch.randn(4, 3, 5, dtype=D),
        torch.randn(4, 3, 5, dtype=D),
        torch.rand(3, 4, dtype=D),
    )
    y = y.transpose(0, 2).contiguous().transpose(0, 2)
    v = v.t().unsqueeze(-1)
    assert not sweep(F.gaussian_nll_loss, x, y, v, meshes=((3,),), extra=3)


REFUSED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "gather": (
        lambda x, i: torch.gather(x, 1, i),
        [torch.rand(1, 1), torch.zeros(2, 2).long()],
    ),
    "scatter": (
        lambda x, i: torch.scatter(x, 1, i, 1.0),
        [torch.rand(1, 1), torch.zeros(2, 2).long()],
    ),
    "cat": (lambda x, y: torch.cat([x, y]), [torch.tensor(1.0), torch.tensor(2.0)]),
    "embedding": (lambda w, i: F.embedding(i, w), [torch.tensor(1.0), _ids(2, 2, 2)]),
    "complex": (torch.complex, [torch.rand(5, 2), _ids(5, 5, 2)]),
    "out": (
        lambda x, y: torch.mul(x, 1j, out=y),
        [torch.rand(2, 2), torch.rand(2, 2)],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_by_all_ranks_alike(name: str) -> None:
    fn, tensors = REFUSED[name]
    with pytest.raises(RuntimeError):
        fn(*tensors)

    def on_rank() -> int:
        mesh = init_device_mesh("cpu", (3,))
        refused = 0
        for i, t in enumerate(tensors):
            for p in (Replicate(), *(Shard(d) for d in range(t.ndim))):
                args = [
                    distribute_tensor(u, mesh, [p if i == j else Replicate()])
                    for j, u in enumerate(tensors)
                ]
                with pytest.raises(RuntimeError):
                    fn(*args)
                refused += 1
        return refused

    assert len(set(simulate(on_rank, 3))) == 1
