"""Data parallel modules train as one device does on the whole batch; reductions run during backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Replicate, Shard
from shardwise.errors import GradientError, LayoutError
from shardwise.events import observe
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    data_parallel,
    parallelize_module,
)

NAMES = ("dp", "tp")


def whole_batches(batch, vocab=11, length=7):
    return [
        (torch.randint(vocab, (batch, length)), torch.randint(vocab, (batch, length)))
        for _ in range(3)
    ]


def tensor_plan(local=True):
    return {
        "blocks.*.attn.[qkv]": ColwiseParallel(use_local_output=local),
        "blocks.*.attn.o": RowwiseParallel(use_local_output=local),
        "blocks.*.up": ColwiseParallel(use_local_output=local),
        "blocks.*.down": RowwiseParallel(use_local_output=local),
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_plain_batches_are_averaged(zoo, tp):
    plain, batches = zoo.GPT().double(), whole_batches(4)
    expected, losses = zoo.trained(zoo.copy(plain), batches)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2, tp), mesh_dim_names=NAMES)
        ours = zoo.copy(plain)
        if mesh.get_local_rank("dp"):  # the first rank's values count
            nn.init.zeros_(ours.norm.weight)
        parallelize_module(ours, mesh["tp"], tensor_plan())
        data_parallel(ours, mesh["dp"], bucket_cap_mb=0.01)
        i = mesh.get_local_rank("dp")
        mine = [[t.chunk(2)[i] for t in pair] for pair in batches]
        return zoo.trained(ours, mine)

    runs = shardwise.simulate(rank, 2 * tp)
    for got, _ in runs:
        zoo.same(got, expected)
    seen = [(a + b) / 2 for a, b in zip(runs[0][1], runs[tp][1])]
    assert max(abs(a - b) for a, b in zip(seen, losses)) < 1e-9


@pytest.mark.parametrize(("dp", "tp", "batch"), [(2, 1, 5), (3, 1, 4), (2, 2, 3)])
def test_one_program_on_the_whole_batch(zoo, dp, tp, batch):
    """Uneven batches, dropout on: as one device."""
    plain, batches = zoo.GPT(dropout=0.2).double(), whole_batches(batch)
    with shardwise.rng(like="torch"):
        expected, losses = zoo.trained(zoo.copy(plain), batches)

        def rank(_):
            mesh = shardwise.init_device_mesh("cpu", (dp, tp), mesh_dim_names=NAMES)
            ours = zoo.copy(plain)
            parallelize_module(ours, mesh["tp"], tensor_plan())
            data_parallel(ours, mesh["dp"], bucket_cap_mb=0.01)
            mine = [
                [shardwise.distribute_tensor(t, mesh, [Shard(0)]) for t in pair]
                for pair in batches
            ]
            out = zoo.trained(ours, mine)
            assert all(p.layout.mesh == mesh for p in ours.parameters())
            return out

        runs = shardwise.simulate(rank, dp * tp)
    for got, seen in runs:
        zoo.same(got, expected)
        assert max(abs(a - b) for a, b in zip(seen, losses)) < 1e-9


def run_two(fn, ranks=2):
    def rank(r):
        mesh = shardwise.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        return fn(r, mesh)

    return shardwise.simulate(rank, ranks)


def stack(n=4, width=8):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def test_as_many_all_reduces_as_buckets_and_no_more_bytes():
    def fn(r, mesh):
        model = data_parallel(stack(8, 16), mesh, bucket_cap_mb=0.003)
        x = torch.randn(4, 16)
        model(x).sum().backward()
        with shardwise.CommLog() as log:
            model(x).sum().backward()
        return log.on(r)

    log = run_two(fn)[0]
    size = 8 * (16 * 16 + 16) * 4
    assert log.count() == log.count("all_reduce") == 3  # three layers' bytes fill a bucket
    assert size <= log.bytes <= size + 16 * 4  # and one number per parameter


def test_reductions_start_before_backward_ends():
    def fn(r, mesh):
        model = data_parallel(stack(6), mesh, bucket_cap_mb=0.0005)
        x, seen = torch.randn(4, 8, requires_grad=True), []
        for i, layer in enumerate(model):
            layer.register_full_backward_pre_hook(lambda *_, i=i: seen.append(i))
        model(x).sum().backward()
        seen.clear()
        with observe(lambda e: e.rank == r and seen.append("sent")):
            model(x).sum().backward()
        return seen

    seen = run_two(fn)[0]
    assert seen.count("sent") == 3
    assert seen.index("sent") < seen.index(2), "the first goes out long before the first layer"
    assert seen[-1] == "sent"


def test_buckets_follow_the_order_of_use():
    """Layers that are used in another order than they were made in are cut into buckets anew."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for i in (2, 0, 3, 1):
                x = self.layers[i](x)
            return x

    def fn(r, mesh):
        model = data_parallel(Odd(), mesh, bucket_cap_mb=0.0001)
        seen = []
        for i, layer in enumerate(model.layers):
            layer.register_full_backward_pre_hook(lambda *_, i=i: seen.append(i))
        x = torch.randn(4, 8, requires_grad=True)
        model(x).sum().backward()
        seen.clear()
        with observe(lambda e: e.rank == r and seen.append("sent")):
            model(x).sum().backward()
        return seen

    seen = run_two(fn)[1]
    assert [s for s in seen if s != "sent"] == [1, 3, 0, 2]
    assert seen.index("sent") < seen.index(3)


def test_no_sync_and_one_reduction_per_step():
    x = torch.randn(3, 2, 4, 8)
    plain = stack()
    for part in x.flatten(0, 1):
        (plain(part).square().sum() / 2).backward()

    def fn(r, mesh):
        model = stack()
        model.load_state_dict(plain.state_dict())
        data_parallel(model, mesh)
        with shardwise.CommLog() as quiet, model.no_sync():
            for part in x[:2, r]:
                model(part).square().sum().backward()
        assert quiet.count() == 0
        model(x[2, r]).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)

    run_two(fn)


def test_gradients_add_up_over_backwards():
    """Also where they are zeroed in place, and where somebody keeps the last ones."""

    def fn(r, mesh):
        model = data_parallel(stack(2), mesh)
        x = torch.full((1, 8), float(r + 1))
        model(x).sum().backward()
        kept = [p.grad for p in model.parameters()]
        first = [g.clone() for g in kept]
        model.zero_grad()
        model(x * 2).sum().backward()
        for g, f in zip(kept, first):
            torch.testing.assert_close(g, f)
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()
        for p, f in zip(model.parameters(), first):
            torch.testing.assert_close(p.grad, f)
        model(x).sum().backward()
        for p, f in zip(model.parameters(), first):
            torch.testing.assert_close(p.grad, 2 * f)

    run_two(fn)


def test_unused_parameters():
    """What nobody used has no gradient; what one rank used has its part of it on all."""

    def fn(r, mesh):
        model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        data_parallel(model, mesh, bucket_cap_mb=0.00001)
        x = torch.ones(1, 3)
        for _ in range(3):
            model.zero_grad()
            used = model[0](x)
            if r == 0:
                used = model[1](used)
            used.sum().backward()
            assert model[2].weight.grad is None
            w = model[1].weight.grad
            assert w is not None
            torch.testing.assert_close(w, model[0](x).detach().expand(3, 3) / 2)

    run_two(fn)


def test_reentrant_checkpoint_and_a_backward_that_raised():
    def fn(r, mesh):
        model = data_parallel(stack(3), mesh, bucket_cap_mb=0.0001)
        x = torch.randn(2, 8, requires_grad=True)

        def go(reentrant):
            y = model[0](x)
            y = checkpoint(model[1], y, use_reentrant=reentrant)
            model[2](y).sum().backward()
            out = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            return out

        expected = go(False)
        for a, b in zip(go(True), expected):
            torch.testing.assert_close(a, b)

        y = model(x)
        y.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        z = model[1](model[0](x))
        z.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[2](z).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        for p, b in zip(model.parameters(), expected):
            torch.testing.assert_close(p.grad, b)

    run_two(fn)


def test_buffers_are_those_of_the_first_rank():
    def fn(r, mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        data_parallel(model, mesh)
        model(torch.randn(5, 4) + r)
        model(torch.randn(5, 4) + r)
        model.eval()
        return model[1].running_mean

    first, second = run_two(fn)
    assert not torch.equal(first, second)  # each updates its own after the broadcast


def test_batch_norm_of_the_whole_batch():
    x = torch.randn(7, 4, dtype=torch.float64)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    twin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    twin.load_state_dict(plain.state_dict())
    plain(x).square().mean().backward()

    def fn(r, mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
        model.load_state_dict(twin.state_dict())
        data_parallel(model, mesh)
        model(shardwise.distribute_tensor(x, mesh, [Shard(0)])).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        got = model[1].running_mean.full_tensor()
        torch.testing.assert_close(got, plain[1].running_mean)

    run_two(fn)


def test_hooks_of_users_run_after_the_reduction():
    def fn(r, mesh):
        model = data_parallel(stack(2), mesh)
        x = shardwise.distribute_tensor(torch.ones(2, 8), mesh, [Shard(0)])
        model(x)
        seen = []
        w = model[0].weight
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
        model(x).sum().backward()
        assert seen == [(Replicate(),)]

    run_two(fn)


def test_double_backward_is_refused():
    def fn(r, mesh):
        model = data_parallel(stack(1), mesh)
        with pytest.raises(GradientError, match="has a history"):
            model(torch.ones(2, 8)).square().sum().backward(create_graph=True)

    run_two(fn)


def test_parameters_that_are_cut_over_the_axis_are_refused():
    def fn(r, mesh):
        model = stack(1)
        w = shardwise.distribute_tensor(model[0].weight, mesh, [Shard(0)])
        model[0].weight = nn.Parameter(w)
        with pytest.raises(LayoutError, match=r'"0.weight" is .*not whole along the axis "dp"'):
            data_parallel(model, mesh)

    run_two(fn)


def test_sparse_and_low_precision_gradients():
    def fn(r, mesh):
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4).bfloat16())
        data_parallel(model, mesh)
        ids = torch.tensor([r, 4])
        model[1](model[0](ids).bfloat16()).float().sum().backward()
        g = model[0].weight.grad
        assert g.layout is torch.strided
        assert model[1].weight.grad.dtype is torch.bfloat16
        used = [bool(row.any()) for row in g]
        assert used == [True, True, False, False, True]

    run_two(fn)


def test_clipping_and_scaling(zoo):
    """torch's own tools on the parameters."""
    plain, batch = zoo.GPT().double(), whole_batches(4)[0]
    twin = zoo.copy(plain)
    zoo.loss_of(twin, *batch).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        ours = zoo.copy(plain)
        parallelize_module(ours, mesh["tp"], tensor_plan())
        data_parallel(ours, mesh["dp"])
        i = mesh.get_local_rank("dp")
        zoo.loss_of(ours, *(t.chunk(2)[i] for t in batch)).backward()
        total = zoo.whole(nn.utils.clip_grad_norm_(ours.parameters(), 0.1))
        torch.testing.assert_close(total, expected)
        zoo.same(zoo.grads(ours), zoo.grads(twin))

    shardwise.simulate(rank, 4)
