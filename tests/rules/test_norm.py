"""Normalisation layers: statistics over sharded dims from sums; batch norm's running statistics on all ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.comm.meshes import init_device_mesh
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.testing.sweep import bytes_moved, sweep

R, S, P = Replicate(), Shard, Partial()
MESHES = ((4,), (2, 2))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_layer_norm() -> None:
    x, w, b = rand(5, 3, 4), rand(4), rand(4)
    assert not sweep(lambda x, w, b: F.layer_norm(x, (4,), w, b), x, w, b, meshes=MESHES)
    assert not sweep(
        lambda x, w: F.layer_norm(x, (3, 4), w, eps=0.1), x, rand(3, 4), meshes=MESHES
    )
    assert not sweep(lambda x: F.layer_norm(x, [4]), x[:1], meshes=((4,),))
    assert not sweep(lambda x, w, b: torch.layer_norm(x, (4,), w, b), x, w, b, meshes=((2,),))
    assert not sweep(
        lambda x, w, b: torch.native_layer_norm(x, (4,), w, b, 1e-5)[0], x, w, b, meshes=((4,),)
    )
    assert not sweep(
        lambda x, w: torch.native_layer_norm(x, (3, 4), w, None, 1e-5),
        x,
        rand(3, 4),
        meshes=((4,),),
        grad=False,
    )


def test_rms_norm() -> None:
    x, w = rand(5, 3, 4), rand(4)
    assert not sweep(lambda x, w: F.rms_norm(x, (4,), w), x, w, meshes=MESHES)
    assert not sweep(lambda x: torch.rms_norm(x, (3, 4), eps=0.1), x, meshes=((4,),))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm(groups: int) -> None:
    x, w, b = rand(3, 6, 5), rand(6), rand(6)
    assert not sweep(
        lambda x, w, b: F.group_norm(x, groups, w, b), x, w, b, meshes=MESHES, extra=3
    )


def test_group_norm_without_space_or_params() -> None:
    assert not sweep(lambda x: F.group_norm(x, 2), rand(3, 6), meshes=((4,),))
    assert not sweep(lambda x, w: F.group_norm(x, 6, w), rand(3, 6), rand(6), meshes=((4,),))
    assert not sweep(lambda x: F.group_norm(x, 2), rand(2, 4, 3, 2), meshes=((2, 2),))


def test_instance_norm() -> None:
    assert not sweep(
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        rand(3, 6, 5),
        rand(6),
        rand(6),
        meshes=MESHES,
    )
    assert not sweep(lambda x: F.instance_norm(x), rand(2, 3, 4, 3), meshes=((4,),))


def batch_norm(training: bool):
    def fn(x, mean, var, w, b):
        mean, var = mean.detach().clone(), var.detach().clone()
        y = F.batch_norm(x, mean, var, w, b, training, 0.3)
        return y, mean, var

    return fn


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_running_statistics(training: bool) -> None:
    args = rand(3, 6, 5), rand(6), torch.rand(6).double() + 1, rand(6), rand(6)
    assert not sweep(batch_norm(training), *args, meshes=MESHES, extra=6)


def test_batch_norm_forms() -> None:
    x, w, b = rand(5, 6), rand(6), rand(6)
    assert not sweep(
        lambda x, w: F.batch_norm(x, None, None, w, training=True), x, w, meshes=MESHES
    )
    assert not sweep(
        lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        x,
        w,
        b,
        meshes=((4,),),
    )
    assert not sweep(
        lambda x: F.batch_norm(x, None, None, training=True), rand(2, 3, 2, 2), meshes=((4,),)
    )


@pytest.mark.parametrize("stats", ["plain", R, S(0)])
@pytest.mark.parametrize("cut", [S(0), S(1), S(2)])
@pytest.mark.parametrize("c", [6, 1])
def test_running_statistics_are_written_in_place(stats, cut, c) -> None:
    x, mean, var = rand(3, c, 5), rand(c), torch.rand(c).double() + 1
    want_mean, want_var = mean.clone(), var.clone()
    for momentum in (0.1, 0.5):
        F.batch_norm(x, want_mean, want_var, training=True, momentum=momentum)

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        d = distribute_tensor(x, mesh, [cut])
        bufs = [
            t.clone() if stats == "plain" else distribute_tensor(t, mesh, [stats])
            for t in (mean, var)
        ]
        for momentum in (0.1, 0.5):
            F.batch_norm(d, *bufs, training=True, momentum=momentum)
        for got, want in zip(bufs, (want_mean, want_var)):
            got = got if stats == "plain" else got.full_tensor()
            torch.testing.assert_close(got, want)

    simulate(on_rank, 4)


def test_batch_norm_module_trains_as_on_one_device() -> None:
    x = rand(6, 3, 2)
    alone = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    for _ in range(2):
        alone(x).square().sum().backward()

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        bn = torch.nn.BatchNorm1d(3, dtype=torch.float64)
        for name, p in list(bn.named_parameters()):
            setattr(bn, name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [R])))
        d = distribute_tensor(x, mesh, [S(0)])
        for _ in range(2):
            bn(d).square().sum().backward()
        torch.testing.assert_close(bn.running_mean, alone.running_mean)
        torch.testing.assert_close(bn.running_var, alone.running_var)
        torch.testing.assert_close(bn.weight.grad.full_tensor(), alone.weight.grad)

    simulate(on_rank, 4)


def test_too_few_values_raise_what_torch_raises() -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="more than 1 value"):
            F.batch_norm(distribute_tensor(rand(1, 4), mesh, [S(1)]), None, None, training=True)
        assert F.batch_norm(
            distribute_tensor(rand(2, 4), mesh, [S(0)]), None, None, training=True
        ).shape == (2, 4)

    simulate(on_rank, 2)


def test_second_derivatives() -> None:
    def slope(f):
        def fn(x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad((f(x) ** 3).sum(), x, create_graph=True)[0]

        return fn

    x = rand(5, 3)
    assert not sweep(slope(lambda x: F.layer_norm(x, (5, 3))), x, meshes=((4,),), extra=0)
    assert not sweep(
        slope(lambda x: F.batch_norm(x, None, None, training=True)), x, meshes=((4,),), extra=0
    )
    assert not sweep(
        slope(lambda x: F.group_norm(x.unsqueeze(0), 1)), x, meshes=((4,),), extra=0
    )


def test_narrow_floats_are_worked_on_wide() -> None:
    x = torch.randn(5, 64).bfloat16()

    def on_rank() -> None:
        d = distribute_tensor(x, init_device_mesh("cpu", (4,)), [S(1)])
        for f in (F.layer_norm, F.rms_norm):
            y, want = f(d, (64,)), f(x, (64,))
            assert y.dtype == want.dtype
            torch.testing.assert_close(y.full_tensor(), want, rtol=1e-2, atol=1e-2)

    simulate(on_rank, 4)


def test_only_statistics_move() -> None:
    x, w = rand(8, 6, 4), rand(4)
    row = 2 * 3 * 8  # an all_reduce of one double over four ranks
    both = ((S(0),), (R,)), ((S(1),), (R,)), ((S(0),), (R,))
    for combo in both:
        assert bytes_moved(lambda x, w: F.layer_norm(x, (4,), w), [x, w], (4,), combo) == 0
    assert (
        bytes_moved(lambda x, w: F.layer_norm(x, (4,), w), [x, w], (4,), ((S(2),), (S(0),)))
        == 2 * 48 * row
    )
    assert bytes_moved(lambda x: F.rms_norm(x, (4,)), [x], (4,), ((S(2),),)) == 48 * row
    assert bytes_moved(lambda x: F.group_norm(x, 2), [x], (2,), ((S(1),),)) == 0
    assert bytes_moved(lambda x: F.group_norm(x, 2), [x], (4,), ((S(2),),)) == 2 * 16 * row
    assert bytes_moved(lambda x: F.instance_norm(x), [x], (4,), ((S(1),),)) == 0
    assert (
        bytes_moved(lambda x: F.batch_norm(x, None, None, training=True), [x], (4,), ((S(0),),))
        == 2 * 6 * row
    )
    assert (
        bytes_moved(lambda x: F.batch_norm(x, None, None, training=True), [x], (2,), ((S(1),),))
        == 0
    )
    # A sharded weight alone is gathered: it must not make the statistics of a replicated input communicate.
    gathered = 4 * 3 * 8
    assert (
        bytes_moved(lambda x, w: F.layer_norm(x, (4,), w), [x, w], (4,), ((R,), (S(0),)))
        == gathered
    )


@pytest.mark.parametrize("own", [True, False])
def test_running_statistics_of_instances(own: bool) -> None:
    x, w, b = rand(5, 3, 4), rand(3), rand(3)
    mean, var = rand(3), rand(3).abs() + 0.1

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *stats: torch.Tensor) -> Any:
        mean, var = (t.detach().clone() for t in stats)
        y = F.instance_norm(x, mean, var, w, b, use_input_stats=own, momentum=0.3)
        return y, mean, var

    assert not sweep(fn, x, w, b, mean, var, extra=4)
    assert not sweep(fn, x[:2].clone(), w, b, mean, var, meshes=((4,), (2, 2)), extra=2)
    assert not sweep(lambda x: fn(x, w, b, mean, var)[0], x, meshes=((4,),), twice=True)
    at, rest = ((S(0),),), ((R,),) * 4
    moved = bytes_moved(fn, [x, w, b, mean, var], (2,), (*at, *rest))
    assert moved == (2 * 2 * 3 * 8 if own else 0)  # two statistics of three channels go round
