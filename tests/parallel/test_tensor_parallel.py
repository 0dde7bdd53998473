"""Tensor and sequence parallel modules compute what one device computes, and send no more than they must."""

from collections import Counter
import copy

import pytest
import torch
from torch import nn
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.errors import LayoutError, MeshError
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)


def plain_plan():
    """Plain pieces between the layers: the heads must divide, the hidden units need not."""
    return {
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def sequence_plan():
    """DTensors between the layers, the sequence cut outside of the matrices."""
    seq = Shard(1)
    col, row = ColwiseParallel(use_local_output=False), RowwiseParallel
    out = row(output_layouts=seq, use_local_output=False)
    into = PrepareModuleInput(input_layouts=seq, desired_input_layouts=Replicate())
    return {
        "tok": row(input_layouts=Replicate(), output_layouts=seq, use_local_output=False),
        "blocks.*.n?": SequenceParallel(),
        "blocks.*.drop": SequenceParallel(),
        "blocks.*.attn": into,
        "blocks.*.attn.[qkv]": col,
        "blocks.*.attn.o": out,
        "blocks.*.up": ColwiseParallel(input_layouts=seq, use_local_output=False),
        "blocks.*.down": out,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=seq, use_local_output=False),
    }


def data(batch=3, length=7, vocab=11):
    return torch.randint(vocab, (batch, length)), torch.randint(vocab, (batch, length))


def compare(zoo, plan, ranks, size=None, **model):
    torch.manual_seed(1)
    plain = zoo.GPT(**model).double()
    batches = [data() for _ in range(3)]
    expected, losses = zoo.trained(zoo.copy(plain), batches)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        ours = zoo.copy(plain)
        parallelize_module(ours, mesh, plan())
        return zoo.trained(ours, batches)

    for got, seen in shardwise.simulate(rank, ranks):
        zoo.same(got, expected)
        assert max(abs(a - b) for a, b in zip(seen, losses)) < 1e-9


@pytest.mark.parametrize("ranks", [2, 4])
def test_plain_pieces_between_the_layers(zoo, ranks):
    compare(zoo, plain_plan, ranks)  # 33 hidden units over 2 and 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_sequence_parallel(zoo, ranks):
    """Seven positions, eleven words and four heads over two and three; embeddings tied."""
    compare(zoo, sequence_plan, ranks)


def test_fewer_heads_of_keys_than_ranks(zoo):
    compare(zoo, sequence_plan, 4, kv_heads=2)


def test_plain_pieces_with_grouped_heads(zoo):
    compare(zoo, plain_plan, 2, kv_heads=2)


def test_dropout_as_on_one_device(zoo):
    with shardwise.rng(like="torch"):
        compare(zoo, sequence_plan, 2, dropout=0.2, tied=False)


HEADS = [  # (ranks, model): heads that do not divide; three heads of keys for six of queries; fewer than ranks
    (2, {"width": 20, "heads": 5}),
    (3, {"width": 20, "heads": 5}),
    (2, {"width": 24, "heads": 6, "kv_heads": 3}),
    (4, {"width": 24, "heads": 6, "kv_heads": 3}),
]


def by_heads(plan, width, heads, kv_heads=None):
    """The plan with attention cut in whole heads."""
    size, group = width // heads, heads // (kv_heads or heads)

    def make():
        lines = plan()
        local = lines["blocks.*.attn.[qkv]"].use_local_output
        del lines["blocks.*.attn.[qkv]"]
        more = {"unit": size * group, "use_local_output": local}
        out = lines["blocks.*.attn.o"].output_layouts
        lines["blocks.*.attn.q"] = ColwiseParallel(**more)
        lines["blocks.*.attn.[kv]"] = ColwiseParallel(unit=size, use_local_output=local)
        lines["blocks.*.attn.o"] = RowwiseParallel(output_layouts=out, **more)
        return lines

    return make


@pytest.mark.parametrize(("ranks", "model"), HEADS)
@pytest.mark.parametrize("plan", [plain_plan, sequence_plan])
def test_heads_that_do_not_divide(zoo, plan, ranks, model):
    make = by_heads(plan, **model)
    if plan is plain_plan and ranks == 4:
        with pytest.raises(LayoutError, match="fewer units of 8 than ranks: none on 3"):
            compare(zoo, make, ranks, **model)
    else:
        compare(zoo, make, ranks, **model)


def test_uneven_heads_in_a_fully_sharded_model(zoo):
    torch.manual_seed(1)
    model = HEADS[2][1]
    plain = zoo.GPT(**model, layers=1, tied=False).double()
    batches = [data(batch=4, length=6) for _ in range(2)]
    expected, losses = zoo.trained(zoo.copy(plain), batches)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours = zoo.copy(plain)
        parallelize_module(ours, mesh["tp"], by_heads(plain_plan, **model)())
        for block in ours.blocks:
            fully_shard(block, mesh["dp"])
        fully_shard(ours, mesh["dp"])
        cut = [Shard(0), Replicate()]
        mine = [
            tuple(shardwise.distribute_tensor(t, mesh, cut) for t in batch) for batch in batches
        ]
        return zoo.trained(ours, mine)

    for got, seen in shardwise.simulate(rank, 4):
        zoo.same(got, expected)
        assert max(abs(a - b) for a, b in zip(seen, losses)) < 1e-9


def counted(log):
    return Counter(event.kind for event in log.events)


def events(zoo, plan, layers, ranks, width=16, **more):
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model = zoo.GPT(layers=layers, width=width, hidden=64, tied=False, **more)
        parallelize_module(model, mesh, plan())
        ids, targets = data(length=8)
        zoo.loss_of(model, ids, targets)  # plain tensors are compared at their first call
        with shardwise.CommLog() as forward:
            loss = zoo.loss_of(model, ids, targets)
        with shardwise.CommLog() as backward:
            loss.backward()
        return forward, backward

    return shardwise.simulate(rank, ranks)[0]


def a_block(zoo, plan, ranks=2, **model):
    """What the third block adds to two."""
    out = []
    for two, three in zip(
        events(zoo, plan, 2, ranks, **model), events(zoo, plan, 3, ranks, **model)
    ):
        two, three = two.on(0), three.on(0)
        out.append((counted(three) - counted(two), three.bytes - two.bytes))
    return out


SIZE = 3 * 8 * 16 * 4  # batch, sequence, width, bytes


def test_a_block_sends_two_all_reduces_each_way(zoo):
    """Also with plain tensors: q, k and v take one input, whose gradient is reduced once."""
    forward, backward = a_block(zoo, plain_plan)
    assert forward == ({"all_reduce": 2}, 2 * SIZE)
    assert backward == ({"all_reduce": 2}, 2 * SIZE + 2 * 16 * 4)  # two whole biases


@pytest.mark.parametrize(("ranks", "model"), HEADS[:3])
def test_heads_that_do_not_divide_send_what_even_ones_do(zoo, ranks, model):
    """Two all-reduces each way, or the gathers and scatters that they are made of, and nothing else."""
    each = 3 * 8 * model["width"] * 4 * 2 * (ranks - 1) // ranks
    biases = 2 * model["width"] * 4 * 2 * (ranks - 1) // ranks
    forward, backward = a_block(zoo, by_heads(plain_plan, **model), ranks, **model)
    assert forward == ({"all_reduce": 2}, 2 * each)
    assert abs(backward[1] - 2 * each - biases) <= 2  # the bucket's bytes are rounded down
    assert backward[0] == {"all_reduce": 2}
    forward, backward = a_block(zoo, by_heads(sequence_plan, **model), ranks, **model)
    assert forward[0] == backward[0] == {"all_gather": 2, "reduce_scatter": 2}


def test_a_sequence_parallel_block_gathers_and_scatters(zoo):
    """Half of an all-reduce each; but for the norms' gradients, which go in the bucket."""
    forward, backward = a_block(zoo, sequence_plan)
    assert forward == ({"all_gather": 2, "reduce_scatter": 2}, 4 * SIZE // 2)
    assert backward[0] == {"all_gather": 2, "reduce_scatter": 2}
    whole = (4 + 2) * 16 * 4  # two norms and two biases that are whole
    assert backward[1] == 4 * SIZE // 2 + whole


def test_loss_parallel_gathers_no_logits(zoo):
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        head = parallelize_module(
            nn.Linear(4, 11, bias=False), mesh, ColwiseParallel(use_local_output=False)
        )
        x, y = torch.ones(5, 4), torch.arange(5)
        with loss_parallel():
            F.cross_entropy(head(x), y)
            with shardwise.CommLog() as log:
                F.cross_entropy(head(x), y).backward()
        return log

    log = shardwise.simulate(rank, 2)[0].on(0)
    assert all(e.kind != "all_gather" for e in log.events)


def test_embedding_by_width_and_by_rows(zoo):
    table, ids = torch.randn(7, 5, dtype=torch.float64), torch.tensor([[0, 6, 3], [3, 3, 1]])
    weight = torch.randn(2, 3, 5, dtype=torch.float64)

    def run(style, ranks):
        def rank(_):
            mesh = shardwise.init_device_mesh("cpu", (ranks,))
            m = nn.Embedding(7, 5, _weight=table.clone())
            parallelize_module(m, mesh, style)
            y = m(ids)
            assert not isinstance(y, DTensor)
            (y * weight).sum().backward()
            return y.detach(), m.weight.grad.full_tensor()

        return shardwise.simulate(rank, ranks)

    w = table.clone().requires_grad_()
    (F.embedding(ids, w) * weight).sum().backward()
    row = RowwiseParallel(input_layouts=Replicate())
    col = ColwiseParallel(output_layouts=Replicate())
    for style in (row, col):
        for y, g in run(style, 3):
            torch.testing.assert_close(y, F.embedding(ids, table))
            torch.testing.assert_close(g, w.grad)


def test_prepare_inputs_and_outputs():
    class Sum(nn.Module):
        def forward(self, a, b, *, c):
            assert isinstance(a, DTensor)
            assert a.placements == (Replicate(),)
            assert not isinstance(b, DTensor)
            assert c.placements == (Shard(1),)
            return a * 2, c

    def rank(r):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        m = parallelize_module(
            Sum(),
            mesh,
            PrepareModuleInputOutput(
                input_layouts=(Shard(0), None),
                desired_input_layouts=(Replicate(), None),
                input_kwarg_layouts={"c": Shard(0)},
                desired_input_kwarg_layouts={"c": Shard(1)},
                output_layouts=(Replicate(), Shard(1)),
                desired_output_layouts=(Shard(0), Shard(0)),
            ),
        )
        whole = torch.arange(15.0).view(5, 3)
        mine = whole.chunk(2)[r].clone().requires_grad_()  # three rows and two
        c = whole.chunk(2)[r].clone().requires_grad_()
        y, z = m(mine, torch.ones(1), c=c)
        torch.testing.assert_close(y, mine.detach() * 2)
        torch.testing.assert_close(z, c.detach())
        (y * mine.detach()).sum().backward()
        torch.testing.assert_close(mine.grad, mine.detach() * 2)

    shardwise.simulate(rank, 2)


def test_prepare_output_of_plain_values():
    def rank(r):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        m = parallelize_module(nn.Identity(), mesh, style)
        x = torch.full((2 - r, 3), float(r), requires_grad=True)
        y = m(x)
        assert y.shape == (3, 3)
        (y * torch.arange(9.0).view(3, 3)).sum().backward()
        torch.testing.assert_close(x.grad, torch.arange(9.0).view(3, 3).split([2, 1])[r])

    shardwise.simulate(rank, 2)


def test_parameters_keep_their_identity_and_ties(zoo):
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        model = zoo.GPT()
        before = dict(model.named_parameters())
        parallelize_module(model, mesh, sequence_plan())
        assert model.head.weight is model.tok.weight
        assert all(p is before[name] for name, p in model.named_parameters())
        assert model.tok.weight.placements == (Shard(0),)

    shardwise.simulate(rank, 2)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"blocks.*.upp": ColwiseParallel()}, '"blocks.*.upp", which matches no module'),
        ({"blocks.*.n1": ColwiseParallel()}, 'ColwiseParallel does not fit "blocks.0.n1"'),
        ({"blocks.0": SequenceParallel()}, 'SequenceParallel does not fit "blocks.0"'),
        (
            {"blocks.0.up": ColwiseParallel(), "blocks.*.up": RowwiseParallel()},
            '"blocks.0.up" is parallelized twice',
        ),
        (
            {"tok": ColwiseParallel(), "head": ColwiseParallel()},
            '"tok.weight" and "head.weight"',
        ),
        ({"blocks.0.up": 3}, 'the plan for "blocks.0.up" is no style'),
    ],
)
def test_wrong_plans_change_nothing(zoo, plan, says):
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        model = zoo.GPT()
        with pytest.raises(LayoutError, match="(?s)" + says.replace("*", r"\*")):
            parallelize_module(model, mesh, {"blocks.1.up": ColwiseParallel(), **plan})
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert not any(m._forward_pre_hooks for m in model.modules())

    shardwise.simulate(rank, 2)


def test_an_axis_is_not_used_twice(zoo):
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = zoo.GPT(tied=False)
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
        with pytest.raises(LayoutError, match='the axis "tp" is used already'):
            parallelize_module(model, mesh["tp"], {"head": RowwiseParallel()})
        with pytest.raises(MeshError, match="works over one axis"):
            parallelize_module(model, mesh, {"head": RowwiseParallel()})

    shardwise.simulate(rank, 4)


def test_uneven_plain_pieces_of_unknown_size():
    def rank(r):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        m = nn.LayerNorm(4)
        parallelize_module(m, mesh, SequenceParallel(use_local_output=True))
        x = torch.randn(2, 5, 4)
        got = m(x[:, :3] if r == 0 else x[:, 3:])
        torch.testing.assert_close(got, F.layer_norm(x, (4,)).split([3, 2], 1)[r])
        with pytest.raises(LayoutError, match=r"the ranks hold \[1, 4\]"):
            m(x[:, :1] if r == 0 else x[:, 1:])

    shardwise.simulate(rank, 2)


@pytest.mark.parametrize("local", [True, False])
def test_gradients_of_gradients(local):
    """A penalty on the gradient of the input, as one device has it."""

    def penalized(model, x):
        x = x.clone().requires_grad_()
        g = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
        g.square().mean().backward()

    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()
    x = torch.randn(4, 6, dtype=torch.float64)

    def rank(_):
        model = copy.deepcopy(plain)
        plan = {"1": ColwiseParallel(use_local_output=local), "3": RowwiseParallel()}
        parallelize_module(model, shardwise.init_device_mesh("cpu", (2,)), plan)
        penalized(model, x)
        return [
            p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
            for p in model.parameters()
        ]

    runs = shardwise.simulate(rank, 2)
    penalized(plain, x)
    for grads in runs:
        for g, p in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(g, torch.zeros_like(p) if p.grad is None else p.grad)
