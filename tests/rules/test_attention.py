"""Attention: batch, heads and queries cut without communication; dropout from the stream in force."""
# ruff: noqa: B023  (every lambda is called before its loop goes on)

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
import torch.nn.functional as F

from shardwise import CommLog, Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.random import rng
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_module, distribute_tensor
from shardwise.testing.sweep import bytes_moved, check, sweep

R, S, P = Replicate(), Shard, Partial()
attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def qkv(
    batch: int = 3, heads: int = 3, queries: int = 5, keys: int = 4, kv_heads: int = 3
) -> list[Tensor]:
    return [
        rand(batch, heads, queries, 2),
        rand(batch, kv_heads, keys, 2),
        rand(batch, kv_heads, keys, 2),
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    call = partial(attend, is_causal=causal)
    assert not sweep(call, *qkv(), meshes=((2,), (2, 2)))
    assert not sweep(call, *qkv(queries=2, keys=7), meshes=((4,),))
    assert not sweep(
        partial(call, scale=0.3), rand(2, 3, 3), rand(2, 4, 3), rand(2, 4, 5), meshes=((2,),)
    )
    assert not sweep(call, rand(3, 3), rand(4, 3), rand(4, 3), meshes=((2,),))
    assert not sweep(
        call, rand(2, 2, 1, 3, 4), rand(2, 2, 1, 3, 4), rand(2, 2, 1, 3, 4), meshes=((2,),)
    )


def test_transposed_operands_keep_their_order() -> None:
    def call(x: Tensor) -> Tensor:
        q = x.unflatten(-1, (3, 2)).transpose(1, 2)
        return attend(q, q, q).transpose(1, 2).flatten(-2)

    assert not sweep(call, rand(4, 5, 6), meshes=((2,), (4,)))

    def on_rank() -> bool:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(rand(4, 5, 3, 2), mesh, [S(0)]).transpose(1, 2)
        out = attend(x, x, x)
        assert out.stride() == x.stride(), "the kernel's order is the query's"
        back = out.transpose(1, 2)
        flat = back.reshape(4, 5, 6)
        return flat.to_local().data_ptr() == out.to_local().data_ptr()

    assert all(simulate(on_rank, 2)), "the reshape after attention copies nothing"


@pytest.mark.parametrize(
    "shape", [(5, 4), (1, 4), (3, 1, 1, 4), (3, 3, 5, 4), (1, 3, 5, 1), (3, 5, 4)]
)
def test_masks(shape: tuple[int, ...]) -> None:
    boolean = torch.rand(shape) > 0.4
    boolean[..., :1] = True
    assert not sweep(attend, *qkv(), boolean, meshes=((2, 2),), extra=6)
    assert not sweep(attend, *qkv(), rand(*shape), meshes=((2,),))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads: int) -> None:
    operands = qkv(2, 8, 3, 4, kv_heads)
    for causal in (False, True):
        call = partial(attend, enable_gqa=True, is_causal=causal)
        assert not sweep(call, *operands, meshes=((4,),), extra=3)
    assert not sweep(
        partial(attend, enable_gqa=True),
        *qkv(2, 6, 3, 4, 3 if kv_heads == 4 else kv_heads),
        meshes=((4,),),
    )


def test_what_moves() -> None:
    operands = qkv(4, 4, 4, 4, 4)
    for dim in (0, 1):
        assert bytes_moved(attend, operands, (2,), ((S(dim),),) * 3) == 0
    for causal in (False, True):
        assert (
            bytes_moved(
                partial(attend, is_causal=causal), operands, (2,), ((S(2),), (R,), (R,))
            )
            == 0
        )
    assert bytes_moved(attend, operands, (2, 2), ((S(0), S(1)),) * 3) == 0
    grouped = partial(attend, enable_gqa=True)
    few = qkv(4, 4, 4, 4, 2)
    assert bytes_moved(grouped, few, (2,), ((S(1),),) * 3) == 0
    whole_keys = bytes_moved(grouped, few, (4,), ((S(1),), (R,), (R,)))
    assert whole_keys == 0, "each rank picks the key heads of its query heads"
    one = qkv(4, 4, 4, 4, 1)
    assert bytes_moved(grouped, one, (4,), ((S(1),), (R,), (R,))) == 0
    mask = torch.ones(4, 1, 4, 4, dtype=torch.bool)
    assert (
        bytes_moved(attend, [*operands, mask], (2,), ((S(0),), (S(0),), (S(0),), (S(0),))) == 0
    )
    assert bytes_moved(partial(attend, dropout_p=0.5), operands, (2,), ((S(1),),) * 3) == 0


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers repeats keys and values."""
    (b, few, n, width), heads = k.shape, q.shape[1]
    k, v = (
        t[:, :, None].expand(b, few, heads // few, n, width).reshape(b, heads, n, width)
        for t in (k, v)
    )
    return attend(q, k, v)


@pytest.mark.parametrize(("few", "group", "ranks"), [(3, 2, 2), (5, 3, 4), (2, 2, 4)])
@pytest.mark.parametrize("call", [partial(attend, enable_gqa=True), repeated, expanded])
def test_groups_of_heads_that_do_not_divide_stay_where_they_are(
    call: Any, few: int, group: int, ranks: int
) -> None:
    """Query heads in units of a group: forward and backward as on one device, and nothing is sent."""
    operands = qkv(2, few * group, 3, 4, few)
    whole = [x.clone().requires_grad_() for x in operands]
    want = call(*whole)
    grads = torch.autograd.grad(want.square().sum(), whole)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        units = group, 1, 1
        mine = [
            distribute_tensor(x, mesh, [S(1, unit=n)]).requires_grad_()
            for x, n in zip(operands, units)
        ]
        with CommLog() as log:
            got = call(*mine)
            back = torch.autograd.grad(got, mine, got.detach() * 2)
        assert not log.events
        for a, b in zip((got, *back), (want, *grads), strict=True):
            torch.testing.assert_close(a.full_tensor().detach(), b.detach())

    simulate(on_rank, ranks)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}])
def test_dropout_is_that_of_one_device(options: dict[str, Any]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with rng(like="torch"):
            return attend(q, k, v, dropout_p=0.4, **options)

    operands = qkv(3, 4, 5, 4, 2 if "enable_gqa" in options else 4)
    assert not sweep(call, *operands, meshes=((2,), (2, 2)), extra=3)


def test_dropout_of_the_default_stream_does_not_depend_on_the_layout() -> None:
    operands = qkv(2, 2, 8, 8, 2)

    def on_rank() -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        out = []
        for placement in (R, S(0), S(1), S(2)):
            torch.manual_seed(1)
            q, k, v = (distribute_tensor(x, mesh, [placement]) for x in operands)
            out.append(attend(q, k, v, dropout_p=0.5).full_tensor())
        return out

    first, *others = simulate(on_rank, 2)[0]
    assert all(torch.allclose(first, x) for x in others)
    assert not torch.allclose(first, attend(*operands)), "something was dropped"


# -- modules ----------------------------------------------------------------------------------------
def same_as_one_device(
    make: Callable[[], nn.Module],
    call: Callable[..., Any],
    *inputs: Tensor,
    dims: tuple[int, ...] = (0, 1),
    train: bool = True,
) -> None:
    """Outputs and gradients of a module with a cut input equal those of one device."""
    torch.manual_seed(3)
    module = make().double().train(train)
    want = call(module, *inputs)
    want = [w for w in (want if isinstance(want, tuple) else (want,)) if w is not None]
    sum(w.square().sum() for w in want).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}

    def on_rank(dim: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(3)
        ours = distribute_module(make().double().train(train), mesh)
        got = call(
            ours,
            *(distribute_tensor(x, mesh, [S(dim)] if x.ndim == 3 else None) for x in inputs),
        )
        got = [g for g in (got if isinstance(got, tuple) else (got,)) if g is not None]
        for g, w in zip(got, want, strict=True):
            assert torch.allclose(g.full_tensor(), w), "the output differs"
        sum(g.square().sum() for g in got).backward()
        for name, p in ours.named_parameters():
            if grads[name] is None:
                assert p.grad is None
            else:
                assert torch.allclose(p.grad.full_tensor(), grads[name]), (
                    f"the gradient of {name} differs"
                )

    for dim in dims:
        simulate(partial(lambda d, rank: on_rank(d), dim), 2)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multi_head_self_attention(weights: bool, batch_first: bool) -> None:
    make = partial(nn.MultiheadAttention, 6, 3, batch_first=batch_first)
    x = rand(3, 4, 6)
    same_as_one_device(make, lambda m, x: m(x, x, x, need_weights=weights), x)
    same_as_one_device(
        make,
        lambda m, x: m(x, x, x, need_weights=weights, average_attn_weights=False),
        x,
        train=False,
    )


def test_multi_head_masks_and_cross_attention() -> None:
    make = partial(nn.MultiheadAttention, 6, 3, batch_first=True)
    x, y = rand(3, 4, 6), rand(3, 5, 6)
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[1, 3:] = True
    many = (torch.rand(9, 4, 4) > 0.7) & ~torch.eye(4, dtype=torch.bool)
    for options in (
        {"attn_mask": causal},
        {"attn_mask": causal, "is_causal": True},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "attn_mask": causal, "is_causal": True},
        {"attn_mask": many},
        {"attn_mask": rand(4, 4)},
    ):
        for weights in (False, True):
            same_as_one_device(
                make, lambda m, x: m(x, x, x, need_weights=weights, **options), x, dims=(0,)
            )
    same_as_one_device(make, lambda m, x, y: m(x, y, y), x, y, dims=(0,))
    same_as_one_device(make, lambda m, x, y, z: m(x, y, z), x, y, rand(3, 5, 6), dims=(0,))
    same_as_one_device(make, lambda m, x: m(x[0], x[0], x[0]), x)


def test_multi_head_rare_options() -> None:
    x = rand(3, 4, 6)
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}):
        make = partial(nn.MultiheadAttention, 6, 3, **options)
        same_as_one_device(make, lambda m, x: m(x, x, x), x)
    apart = partial(nn.MultiheadAttention, 6, 3, kdim=4, vdim=5, batch_first=True)
    same_as_one_device(
        apart, lambda m, x, y, z: m(x, y, z), x, rand(3, 5, 4), rand(3, 5, 5), dims=(0,)
    )


@pytest.mark.parametrize("train", [False, True])
def test_transformer_layers(train: bool) -> None:
    x = rand(3, 4, 6)
    layer = partial(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, batch_first=True)
    same_as_one_device(layer, lambda m, x: m(x), x, train=train)
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    same_as_one_device(
        layer, lambda m, x: m(x, src_mask=causal, is_causal=True), x, train=train, dims=(0,)
    )
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[0, 3:] = True
    stack = partial(lambda: nn.TransformerEncoder(layer(), 2))
    same_as_one_device(
        stack, lambda m, x: m(x, src_key_padding_mask=padding), x, train=train, dims=(0,)
    )


def test_transformer_layer_in_no_grad_eval() -> None:
    """Torch has a fused path for this case, which must not see a DTensor."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()
    x = torch.randn(3, 4, 6)
    with torch.no_grad():
        want = layer(x)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(3)
        ours = distribute_module(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval(), mesh
        )
        with torch.no_grad():
            got = ours(distribute_tensor(x, mesh, [S(0)]))
        assert torch.allclose(got.full_tensor(), want, atol=1e-6)

    simulate(on_rank, 2)


def test_modules_gather_nothing() -> None:
    x = rand(4, 3, 6)

    def on_rank(make: Callable[[], nn.Module], call: Callable[..., Any]) -> int:
        mesh = init_device_mesh("cpu", (2,))
        module, cut = (
            distribute_module(make().double(), mesh),
            distribute_tensor(x, mesh, [S(0)]),
        )
        with CommLog() as log:
            call(module, cut)
        return log.bytes

    attention = partial(nn.MultiheadAttention, 6, 3, batch_first=True)
    layer = partial(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, batch_first=True)
    for make, call in (
        (attention, lambda m, x: m(x, x, x, need_weights=False)),
        (attention, lambda m, x: m(x, x, x)),
        (layer, lambda m, x: m(x)),
    ):
        assert simulate(partial(lambda m, c, rank: on_rank(m, c), make, call), 2) == [0, 0]


def test_cut_heads_leave_a_pending_sum() -> None:
    """Projections cut by heads, as in tensor parallelism: nothing moves before the output is used."""
    q, k, v = rand(4, 3, 6), rand(4, 5, 4), rand(4, 5, 4)
    make = partial(nn.MultiheadAttention, 6, 2, kdim=4, vdim=4, batch_first=True)
    torch.manual_seed(3)
    module = make().double()
    want = module(q, k, v, need_weights=False)[0]
    want.square().sum().backward()

    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            rows = [S(0)] if key.endswith("proj_weight") else [S(1)] if key == "weight" else [R]
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(p.detach(), mesh, rows))
            )

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(3)
        ours = distribute_module(make().double(), mesh, cut)
        with CommLog() as log:
            got = ours(*(distribute_tensor(x, mesh) for x in (q, k, v)), need_weights=False)[0]
        assert sum(e.bytes for e in log.events if e.kind not in ("broadcast", "scatter")) == 0
        assert got.placements == (P,)
        assert torch.allclose(got.full_tensor(), want)
        got.square().sum().backward()
        for p, w in zip(ours.parameters(), module.parameters()):
            assert torch.allclose(p.grad.full_tensor(), w.grad)

    simulate(on_rank, 2)


def test_axes_that_cut_queries_here_and_the_mask_there() -> None:
    """Together they leave a rank without a query."""
    R, across = Replicate(), (Shard(0), Replicate())
    tensors = [rand(1, 2, 4), rand(1, 3, 4), rand(1, 3, 4), rand(2, 3)]
    combo = ((R, Shard(1)), (R, R), (R, R), across)
    assert check(F.scaled_dot_product_attention, tensors, (2, 2), combo) is None
