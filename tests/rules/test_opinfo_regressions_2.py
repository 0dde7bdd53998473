"""What torch's own samples of the ops from m to z found, one test for each kind of fault."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.comm.meshes import init_device_mesh
from shardwise.layout.placement import Partial, Replicate, Shard
from shardwise.simulate import simulate
from shardwise.testing.sweep import check, lay_out, sweep


def _double(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


# -- kernels on an empty piece ---------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_that_leave_an_empty_sum_unwritten(reduction: str) -> None:
    """Two kernels do not write the sum of an empty batch: a rank without rows would add what lay there."""
    x, y = _double(5, 4), torch.randint(0, 4, (5,))
    junk = [torch.full((), 7.7, dtype=torch.float64) for _ in range(64)]
    del junk
    for fn, target in (
        (F.multi_margin_loss, y),
        (F.multilabel_margin_loss, torch.stack([y, y - 1, y, y], 1)),
    ):
        assert not sweep(
            lambda x, t, fn=fn: fn(x, t, reduction=reduction),
            x,
            target,
            meshes=((4,),),
            extra=0,
        )


@pytest.mark.parametrize("sharded", [0, 1])
def test_attention_on_an_empty_piece_gives_the_mask_its_gradient(sharded: int) -> None:
    """Without it the empty rank reduces fewer gradients than the others, which hang."""
    q, k, v, mask = _double(4, 4, 3, 8), _double(4, 4, 6, 8), _double(4, 4, 6, 8), _double(3, 6)
    whole = (Replicate(),)
    combo = ((Shard(sharded),), whole, whole, whole)
    assert check(F.scaled_dot_product_attention, (q, k, v, mask), (3,), combo) is None
    combo = (whole, whole, (Shard(sharded),), whole)
    assert check(F.scaled_dot_product_attention, (q, k, v, mask), (3,), combo) is None


# -- rules -----------------------------------------------------------------------------------------
def test_a_weight_of_every_element() -> None:
    """The weight of a multilabel loss may have the shape of the input: it is cut with it."""
    x, y = _double(5, 3), torch.randint(0, 2, (5, 3)).double()
    for weight in (_double(5, 3), _double(3), _double(1, 3), _double(5, 1)):
        assert not sweep(
            lambda x, y, w: F.multilabel_soft_margin_loss(x, y, weight=w),
            x,
            y,
            weight,
            meshes=((2,),),
        )


def test_statistics_of_rows_have_no_gradient() -> None:
    """Mean and deviation of ``native_layer_norm`` do not require grad, cut or not."""

    def on_rank() -> list[bool]:
        x = lay_out(_double(2, 4), init_device_mesh("cpu", (2,)), [Shard(1)]).requires_grad_()
        return [y.requires_grad for y in torch.native_layer_norm(x, [4], None, None, 1e-5)]

    assert simulate(on_rank, 2) == [[True, False, False]] * 2


def test_hidden_writes_of_legit_batch_norm() -> None:
    """Its running statistics are written though their version does not say so."""
    x, mean, var = (
        _double(4, 3),
        torch.zeros(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64),
    )

    def fn(x, mean, var):
        mean, var = mean.clone(), var.clone()
        torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5)
        return mean, var

    assert not sweep(fn, x, mean, var, meshes=((2,),), grad=False)


def test_logsumexp_of_integers_far_apart() -> None:
    """The greatest integer is not subtracted from the least one as integers."""
    x = torch.tensor([[9, -(2**63)], [3, 4], [-(2**63), 0]])
    assert not sweep(lambda x: torch.logsumexp(x, (0, 1)), x, meshes=((2,), (3,)), tol=1e-5)


def test_whole_dims_of_unequal_size() -> None:
    """Two whole dims share the label of whole dims, not their size."""
    x, at, src = _double(6, 4), torch.randint(0, 6, (6, 2)), _double(6, 2)
    assert not sweep(
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), x, at, src, meshes=((2,),), extra=2
    )
    x, at, src = _double(6, 4, 3), torch.randint(0, 6, (2, 3, 2)), _double(2, 3, 2)
    assert not sweep(
        lambda x, i, s: x.scatter_add(0, i, s), x, at, src, meshes=((2,),), extra=2
    )


# -- the ladder ------------------------------------------------------------------------------------
def test_a_kernel_that_reads_values_while_traced() -> None:
    """``tensor_split`` reads its indices; the fake ones have no data."""
    x, at = _double(5, 3), torch.tensor([1, 2, 4])
    assert not sweep(lambda x, i: torch.tensor_split(x, i), x, at, meshes=((2,),), extra=2)


# -- memory order ----------------------------------------------------------------------------------
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(3), Partial()])
def test_channels_last_is_kept(placement: object) -> None:
    """A memory format that is asked for is that of the result."""
    x = torch.rand(3, 4, 5, 6)
    calls = (
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: torch.clone(x, memory_format=torch.channels_last),
        lambda x: x.permute(0, 2, 3, 1).contiguous(),
        lambda x: torch.rot90(x),
    )

    def on_rank() -> bool:
        a = lay_out(x, init_device_mesh("cpu", (2,)), [placement])  # pyright: ignore[reportArgumentType]
        for call in calls:
            for _ in range(2):
                got, want = call(a), call(x)
                assert got.stride() == want.stride(), "the order of the result"
                assert torch.allclose(got.full_tensor(), want, atol=1e-6), "its values"
        return True

    assert all(simulate(on_rank, 2))


# -- torch's Python above us -----------------------------------------------------------------------
def test_masked_functions() -> None:
    """``torch.masked`` asks a tensor for its layout, and looks that of a mask up in a set."""
    x, mask = _double(3, 5), torch.rand(3, 5) > 0.5
    for fn in (torch.masked.sum, torch.masked.mean, torch.masked.amax, torch.masked.argmin):
        assert not sweep(lambda x, m, fn=fn: fn(x, 1, mask=m), x, mask, meshes=((2,),), extra=1)
        assert not sweep(lambda x, fn=fn: fn(x, 1), x, meshes=((2,),), extra=0)
    assert not sweep(
        lambda x, m: torch.masked.softmax(x, 0, mask=m),
        x,
        mask[:1] | True,
        meshes=((2,),),
        extra=1,
    )


def test_a_layout_is_strided() -> None:
    """``x.layout`` is ours; to torch's code it equals ``torch.strided``, and is no other layout's equal."""

    def on_rank() -> bool:
        mesh = init_device_mesh("cpu", (2,))
        x, y = lay_out(_double(4), mesh, [Shard(0)]), lay_out(_double(4), mesh, [Replicate()])
        assert x.layout == torch.strided, "strided"
        assert torch.strided == x.layout, "from the other side"
        assert x.layout != torch.sparse_coo, "and nothing else"
        return x.layout != y.layout

    assert all(simulate(on_rank, 2))
