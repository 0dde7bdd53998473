"""Dims cut at chosen sizes: by sizes, in units, all on one rank."""

import io
import pickle

import pytest
import torch
from torch import nn
import torch.nn.functional as F

from shardwise import (
    CommLog,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
import shardwise.checkpoint
from shardwise.errors import LayoutError
from shardwise.parallel import fully_shard
from shardwise.testing.sweep import sweep

X = torch.arange(40, dtype=torch.float64).reshape(8, 5) / 7


def on_ranks(n, fn):
    return simulate(lambda rank: fn(init_device_mesh("cpu", (n,)), rank), n)


def test_a_dim_is_cut_at_the_sizes_that_are_asked_for():
    def check(mesh, rank):
        x = distribute_tensor(X, mesh, [Shard(0, sizes=(5, 0, 3))])
        assert x.to_local().shape[0] == (5, 0, 3)[rank]
        assert x.placements == (Shard(0, sizes=(5, 0, 3)),)
        assert torch.equal(x.full_tensor(), X)
        unit = distribute_tensor(X, mesh, [Shard(1, unit=2)])
        assert unit.to_local().shape[1] == (2, 2, 1)[rank]
        owned = distribute_tensor(X, mesh, [Shard(0, owner=2)])
        assert owned.to_local().shape[0] == (0, 0, 8)[rank]
        return str(x.layout), str(owned.layout)

    assert on_ranks(3, check)[0] == ("f64[8, 5] {0: S(0: 5|0|3)}", "f64[8, 5] {0: S(0: 0|0|8)}")


def test_sizes_that_chunk_would_give_are_the_plain_layout():
    def check(mesh, rank):
        plain = distribute_tensor(X, mesh, [Shard(0)])
        assert distribute_tensor(X, mesh, [Shard(0, sizes=(4, 4))]).layout is plain.layout
        assert distribute_tensor(X, mesh, [Shard(0, unit=4)]).layout is plain.layout

    on_ranks(2, check)


def test_two_axes_may_cut_one_dim():
    def check(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(X, mesh, [Shard(0, sizes=(6, 2)), Shard(0, sizes=(5, 1, 0, 2))])
        assert x.to_local().shape[0] == (5, 1, 0, 2)[rank]
        assert x.placements == (Shard(0, sizes=(6, 2)), Shard(0, sizes=(5, 1, 0, 2)))
        again = x.redistribute(mesh, x.placements)
        assert again.layout is x.layout
        return x.full_tensor()

    assert all(torch.equal(full, X) for full in simulate(check, 4))


@pytest.mark.parametrize(
    "placement",
    [
        Shard(0, sizes=(4, 3)),
        Shard(0, sizes=(8,)),
        Shard(0, owner=2),
    ],
)
def test_sizes_that_do_not_make_the_dim_raise_on_every_rank(placement):
    def check(mesh, rank):
        with pytest.raises(LayoutError):
            distribute_tensor(X, mesh, [placement])
        return True

    assert on_ranks(2, check) == [True, True]


def test_a_placement_says_one_thing():
    for bad in ({"sizes": (1, 2), "unit": 2}, {"sizes": (-1, 9)}, {"unit": 0}, {"owner": -1}):
        with pytest.raises(LayoutError):
            Shard(0, **bad)
    assert repr(Shard(1, unit=64)) == "Shard(dim=1, unit=64)"
    assert str(Shard(0, owner=3)) == "S(0: owner 3)"


def test_from_local_takes_pieces_of_any_size():
    def check(mesh, rank):
        sizes = (1, 4, 3)
        piece = X.split(sizes)[rank]
        for shape in (None, X.shape):
            for run_check in (True, False):
                x = DTensor.from_local(
                    piece, mesh, [Shard(0, sizes=sizes)], run_check=run_check, shape=shape
                )
                assert x.shape == X.shape
                assert torch.equal(x.full_tensor(), X)
        unit = X.split((6, 2, 0))[rank]
        assert torch.equal(DTensor.from_local(unit, mesh, [Shard(0, unit=6)]).full_tensor(), X)
        with pytest.raises(LayoutError, match="does not tell"):
            DTensor.from_local(unit, mesh, [Shard(0, unit=6)], run_check=False)
        with pytest.raises(LayoutError, match="contradict"):
            DTensor.from_local(unit, mesh, [Shard(0, sizes=(2, 6, 0))])
        return True

    assert all(on_ranks(3, check))


def test_gradients_have_the_layout_of_the_value():
    def check(mesh, rank):
        x = distribute_tensor(X, mesh, [Shard(0, sizes=(1, 7))]).requires_grad_()
        w = distribute_tensor(X.t().contiguous(), mesh, [Shard(1, owner=1)]).requires_grad_()
        (x @ w).sin().sum().backward()
        assert x.grad.layout.dims == x.layout.dims
        assert w.grad.layout.dims == w.layout.dims
        return x.grad.full_tensor(), w.grad.full_tensor()

    a, b = X.clone().requires_grad_(), X.t().contiguous().requires_grad_()
    (a @ b).sin().sum().backward()
    for ga, gb in on_ranks(2, check):
        assert torch.allclose(ga, a.grad)
        assert torch.allclose(gb, b.grad)


def test_ops_on_operands_cut_alike_move_nothing():
    def check(mesh, rank):
        x = distribute_tensor(X, mesh, [Shard(0, sizes=(1, 7))])
        y = distribute_tensor(X + 1, mesh, [Shard(0, sizes=(1, 7))])
        w = distribute_tensor(X.t().contiguous(), mesh, [Replicate()])
        with CommLog() as log:
            z = F.layer_norm(torch.relu(x * y + 2) @ w, (8,)).softmax(-1)
            z.add_(
                distribute_tensor(
                    torch.ones(8, 8).double(), mesh, [Replicate()], src_data_rank=None
                )
            )
        assert log.bytes == 0
        assert z.placements == (Shard(0, sizes=(1, 7)),)

    on_ranks(2, check)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, y: x * y + 1, [(6, 5), (5,)]),
        (torch.matmul, [(3, 6, 5), (5, 7)]),
        (lambda x: (x.sum(0), x.mean(1), x.var(0), x.amax(1)), [(6, 5)]),
        (lambda x: x.softmax(0), [(6, 5)]),
        (lambda x: F.layer_norm(x, (6, 5)), [(4, 6, 5)]),
        (lambda x: x[1:5].flip(0), [(7, 3)]),
        (lambda x, y: torch.cat([x, y]).roll(2, 0), [(3, 4), (5, 4)]),
        (lambda x: x.reshape(-1).cumsum(0), [(6, 5)]),
        (lambda x: x.view(2, 3, 5).transpose(0, 1).flatten(), [(6, 5)]),
        (lambda x: x.unflatten(0, (4, 3)).topk(2, 0)[0], [(12, 2)]),
        (lambda x, w: F.group_norm(x, 3, w), [(2, 6, 4), (6,)]),
        (lambda x, w: F.conv1d(x, w, groups=2), [(2, 4, 7), (6, 2, 3)]),
        (lambda x: x.clone().mul_(2).relu_(), [(6, 5)]),
    ],
)
def test_ops_are_right_however_dims_are_cut(fn, shapes):
    torch.manual_seed(0)
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes]
    assert not sweep(fn, *tensors, chosen=True)


def test_written_buffers_are_written_where_they_are():
    def check(mesh, rank):
        norm = nn.BatchNorm1d(5).double()
        for name, buffer in list(norm._buffers.items()):
            if buffer.ndim:
                norm._buffers[name] = distribute_tensor(buffer, mesh, [Shard(0, sizes=(4, 1))])
        x = distribute_tensor(X, mesh, [Shard(1)])
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh))
        norm.bias = nn.Parameter(distribute_tensor(norm.bias.detach(), mesh))
        norm.num_batches_tracked = distribute_tensor(norm.num_batches_tracked, mesh)
        norm(x)
        return norm.running_mean.full_tensor()

    plain = nn.BatchNorm1d(5).double()
    plain(X)
    for got in on_ranks(2, check):
        assert torch.allclose(got, plain.running_mean)


def test_fully_sharded_parameters_keep_the_cut_of_the_other_axes():
    def check(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(5, 8).double()
        with torch.no_grad():
            model.weight.copy_(X)
            model.bias.zero_()
        rows = [Shard(0, sizes=(7, 1))]
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], rows))
        model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh["tp"], rows))
        fully_shard(model, mesh=mesh["dp"])
        x = distribute_tensor(X, mesh["tp"], [Replicate()])
        model(x).square().sum().backward()
        model(x).square().sum().backward()
        assert model.weight._local.shape[0] == (4, 1, 3, 0)[rank]
        return model.weight.full_tensor(), model.weight.grad.full_tensor()

    w = X.clone().requires_grad_()
    (2 * (X @ w.t()).square().sum()).backward()
    for value, grad in simulate(check, 4):
        assert torch.equal(value, X)
        assert torch.allclose(grad, w.grad)


def test_optimizers_step():
    def check(mesh, rank):
        p = nn.Parameter(distribute_tensor(X, mesh, [Shard(0, sizes=(1, 7))]))
        q = nn.Parameter(distribute_tensor(X, mesh, [Shard(1, owner=1)]))
        for optim in (torch.optim.AdamW([p], foreach=True), torch.optim.SGD([q], momentum=0.9)):
            for _ in range(2):
                (p * q).square().sum().backward()
                optim.step()
        return p.full_tensor(), q.full_tensor()

    p, q = nn.Parameter(X.clone()), nn.Parameter(X.clone())
    for optim in (torch.optim.AdamW([p]), torch.optim.SGD([q], momentum=0.9)):
        for _ in range(2):
            (p * q).square().sum().backward()
            optim.step()
    for a, b in on_ranks(2, check):
        assert torch.allclose(a, p.detach())
        assert torch.allclose(b, q.detach())


def test_it_can_be_saved(tmp_path):
    folder = tmp_path

    def check(mesh, rank):
        x = distribute_tensor(X, mesh, [Shard(0, sizes=(1, 7))])
        path = folder / "whole"
        shardwise.checkpoint.save({"x": x}, path)
        there = {"x": distribute_tensor(torch.zeros_like(X), mesh, [Shard(0, owner=1)])}
        shardwise.checkpoint.load(there, path)
        assert torch.equal(there["x"].full_tensor(), X)
        again = pickle.loads(pickle.dumps(x))
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        other = torch.load(file, weights_only=True)
        assert again.layout is other.layout is x.layout
        assert torch.equal(other.full_tensor(), X)

    on_ranks(2, check)


def test_attention_heads_that_do_not_divide_stay_local():
    heads, width, hidden = 5, 4, 6
    torch.manual_seed(0)
    x = torch.randn(2, 3, hidden, dtype=torch.float64)
    wq, wk, wv = (
        torch.randn(heads * width, hidden, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    wo = torch.randn(hidden, heads * width, dtype=torch.float64, requires_grad=True)

    def attend(x, wq, wk, wv, wo):
        q, k, v = (
            F.linear(x, w).view(2, 3, heads, width).transpose(1, 2) for w in (wq, wk, wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(2, 3, heads * width), wo)

    attend(x, wq, wk, wv, wo).square().sum().backward()
    want = [w.grad for w in (wq, wk, wv, wo)]

    def check(mesh, rank):
        rows, columns = [Shard(0, unit=width)], [Shard(1, unit=width)]
        weights = [distribute_tensor(w.detach(), mesh, rows) for w in (wq, wk, wv)]
        weights.append(distribute_tensor(wo.detach(), mesh, columns))
        for w in weights:
            w.requires_grad_()
        d = distribute_tensor(x, mesh, [Replicate()])
        with CommLog() as log:
            y = attend(d, *weights)
        assert log.bytes == 0
        assert weights[0]._local.shape[0] == (12, 8)[rank]
        y.square().sum().backward()
        return [w.grad.full_tensor() for w in weights]

    for grads in on_ranks(2, check):
        assert all(torch.allclose(g, w) for g, w in zip(grads, want))
