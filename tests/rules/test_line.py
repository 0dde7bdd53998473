"""Rules of one line, also for a user's own op."""

import torch

from shardwise import Partial, Replicate, Shard
from shardwise.rules.registry import register_rule
from shardwise.testing import bytes_moved, sweep


def weighted_rows(x, w):
    return (x * w[:, None]).sum(1)


@torch.library.custom_op("shardwise_tests::weighted_rows", mutates_args=())
def weighted_rows_op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return weighted_rows(x, w)


@weighted_rows_op.register_fake
def _(x, w):
    return x.new_empty(x.shape[0])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, g):
    x, w = ctx.saved_tensors
    return (g * w)[:, None].expand_as(x), (g[:, None] * x).sum(1)


weighted_rows_op.register_autograd(_backward, setup_context=_setup)
register_rule(weighted_rows_op._opoverload, "m k, m -> m")


def test_a_users_op_runs_sharded():
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    op = torch.ops.shardwise_tests.weighted_rows.default
    assert not sweep(op, x, w)
    S0, S1, R = Shard(0), Shard(1), Replicate()
    for combo in (((S0,), (S0,)), ((S0,), (R,)), ((S1,), (R,))):
        assert bytes_moved(op, (x, w), (2,), combo) == 0
    assert bytes_moved(op, (x, w), (2,), ((Partial(),), (R,))) > 0  # not said to be linear


def test_an_op_without_a_rule_falls_to_the_ladder():
    @torch.library.custom_op("shardwise_tests::row_sums", mutates_args=())
    def row_sums(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)

    row_sums.register_fake(lambda x: x.new_empty(x.shape[0]))
    assert not sweep(
        torch.ops.shardwise_tests.row_sums.default, torch.randn(5, 4), grad=False, tol=1e-6
    )
