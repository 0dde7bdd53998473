"""What cannot be right raises, on all ranks, before anything is changed; what looks odd and can be right is."""

import copy

import pytest
import torch
from torch import nn
import torch.distributed.tensor.parallel as torch_parallel

import shardwise
from shardwise import DTensor, Shard
from shardwise.errors import GradientError, LayoutError
from shardwise.parallel import (
    ColwiseParallel,
    SequenceParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)


def run(fn, shape=(2,), names=("dp",)):
    def rank(r):
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        return fn(r, mesh)

    return shardwise.simulate(rank, torch.Size(shape).numel())


def stack(n=2, width=6):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n))).double()


def shard_stack(model, mesh, **options):
    for layer in model:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


@pytest.mark.parametrize("style", [ColwiseParallel, SequenceParallel])
def test_a_module_is_parallelized_once(style):
    """A second time its hooks would run twice."""

    def fn(r, mesh):
        model = stack()
        parallelize_module(model, mesh, {"0": style()})
        with pytest.raises(
            LayoutError, match=f'"0" is parallelized already, with {style.__name__}'
        ):
            parallelize_module(model, mesh, {"1": ColwiseParallel(), "0": style()})
        assert not isinstance(model[1].weight, DTensor)

    run(fn)


def test_gradients_are_reduced_by_one_module():
    def fn(r, mesh):
        model = stack()
        data_parallel(model[0], mesh)
        with pytest.raises(
            LayoutError, match=r'"0\.weight" is in a data parallel module already'
        ):
            data_parallel(model, mesh)
        for change in (
            lambda: fully_shard(model, mesh),
            lambda: parallelize_module(
                model, mesh, {"1": ColwiseParallel(), "0": ColwiseParallel()}
            ),
        ):
            with pytest.raises(LayoutError, match="would part it from its bucket"):
                change()
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    run(fn)


def test_data_parallel_over_an_axis_after_fully_shard_over_another():
    x = torch.randn(4, 6, dtype=torch.float64)
    plain = stack()

    def fn(r, mesh):
        model = shard_stack(copy.deepcopy(plain), mesh["dp"])
        data_parallel(model, mesh["rep"])
        for _ in range(2):
            model(x[r : r + 1]).square().mean().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    for _ in range(2):
        plain(x).square().mean().backward()
    for grads in run(fn, (2, 2), ("rep", "dp")):
        for g, p in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def test_parameters_without_values_are_not_data_parallel():
    """What makes them real makes other parameters, of which nobody reduces the gradients."""

    def fn(r, mesh):
        with torch.device("meta"):
            model = stack()
        with pytest.raises(LayoutError, match=r'"0\.weight" is on the meta device'):
            data_parallel(model, mesh)

    run(fn)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_between_forward_and_backward(zero):
    """The parameters that backward would gather are others than forward has used; torch raises, too."""

    def fn(r, mesh):
        model = shard_stack(stack(), mesh, zero=zero)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 6, dtype=torch.float64)
        first, second = model(x).sum(), model(2 * x).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(GradientError, match="have changed between forward and backward"):
            second.backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run(fn)


def test_writes_to_gathered_parameters_are_not_lost():
    def fn(r, mesh):
        model = fully_shard(nn.Embedding(5, 3, max_norm=0.1), mesh)
        with pytest.raises(LayoutError, match='"weight" was written to while its module ran'):
            model(torch.tensor([0, 4]))

    run(fn)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("make", [data_parallel, fully_shard])
def test_an_optimizer_made_before_a_recurrent_module_is_parallel(make, whole):
    """Recurrent modules hold weak references to their parameters, which keep their identity nonetheless."""
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    plain = nn.LSTM(6, 5, num_layers=2, batch_first=True).double()
    start = copy.deepcopy(plain)

    def train(model, optimizer, x):
        for _ in range(3):
            model(x)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), x)

    def fn(r, mesh):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        make(model, mesh)
        mine = shardwise.distribute_tensor(x, mesh, [Shard(0)]) if whole else x.chunk(2)[r]
        train(model, optimizer, mine)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor() if isinstance(p, DTensor) else p, q)

    run(fn)


def test_a_parameter_that_somebody_watches():
    """It cannot become a DTensor and stay the same object, so the optimizer would lose it."""
    from weakref import ref

    def fn(r, mesh):
        model = data_parallel(stack(), mesh)
        kept = ref(model[0].weight)
        x = shardwise.distribute_tensor(torch.ones(2, 6).double(), mesh, [Shard(0)])
        with pytest.raises(LayoutError, match="holds a weak reference"):
            model(x)
        assert kept() is not None

    run(fn)


@pytest.mark.parametrize(
    ("style", "says"),
    [
        (shardwise.parallel.ColwiseParallel, r"try +- ColwiseParallel\(\)"),
        (torch_parallel.ColwiseParallel(), "from shardwise.parallel import ColwiseParallel"),
        (Shard(0), r"ColwiseParallel\(\), RowwiseParallel\(\)"),
    ],
    ids=["the class", "torch's", "a placement"],
)
def test_what_is_no_style_names_one(style, says):
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        with pytest.raises(LayoutError, match=f"(?s)is no style.*{says}"):
            shardwise.parallel.parallelize_module(
                nn.Sequential(nn.Linear(2, 2)), mesh, {"0": style}
            )

    shardwise.simulate(rank, 2)
