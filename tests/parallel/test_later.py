"""What happens to a parallel module later: thawed, converted, exchanged parts, hooks, inference, nested backwards."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor
from shardwise.errors import GradientError, LayoutError
from shardwise.parallel import data_parallel, fully_shard

X = torch.arange(24, dtype=torch.float64).view(4, 6) / 24


def run(fn):
    def rank(r):
        mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        return fn(r, mesh)

    return shardwise.simulate(rank, 2)


def stack(n=3):
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(n))).double()


def shard_stack(model, mesh, **options):
    for layer in model:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def same_gradients(r, model, twin):
    """Each rank trains on its half; the twin on all."""
    for m, x in ((model, X.chunk(2)[r]), (twin, X)):
        m.zero_grad()
        m(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            g = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
            torch.testing.assert_close(g, q.grad)


def test_parameters_that_are_thawed_converted_or_put_in_later():
    def fn(r, mesh):
        twin = stack()
        twin[0].requires_grad_(False)
        model = data_parallel(copy.deepcopy(twin), mesh)
        same_gradients(r, model, twin)
        for m in (model, twin):
            m[0].requires_grad_(True)
        same_gradients(r, model, twin)
        torch.manual_seed(5)
        twin[1] = nn.Linear(6, 6).double()
        model[1] = copy.deepcopy(twin[1])
        if r:  # the first rank's values count
            nn.init.zeros_(model[1].weight)
        same_gradients(r, model, twin)
        for m in (model, twin):
            m.float()
            m(X.float()).sum().backward()
            m.double()
        same_gradients(r, model, twin)

    run(fn)


def test_a_module_that_is_put_into_a_fully_sharded_one():
    def fn(r, mesh):
        model = shard_stack(stack(), mesh)
        model[1] = nn.Linear(6, 6).double()
        with pytest.raises(
            LayoutError, match=r'"1\.weight" was put into a fully sharded module'
        ):
            model(X)
        fully_shard(model[1], mesh)
        model(X)
        model.scale = nn.Parameter(torch.ones(()))
        model.scale.requires_grad_(False)
        model(X)

    run(fn)


def test_ignored_parameters_are_left_alone():
    def fn(r, mesh):
        model = stack()
        model.scale = nn.Parameter(torch.ones(()))
        fully_shard(model[0], mesh)
        fully_shard(model, mesh, ignored_params=[model.scale])
        model(X).sum().backward()
        assert model[0].weight.grad is not None

    run(fn)


@pytest.mark.parametrize("make", [data_parallel, shard_stack])
def test_every_layer_in_a_reentrant_checkpoint(make):
    """The last gradients come in backwards inside the outer one, which is told to end the reductions."""

    class Net(nn.Sequential):
        def forward(self, x):
            x = x.clone().requires_grad_()
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True).tanh()
            return x

    def fn(r, mesh):
        twin = Net(*stack())
        model = make(copy.deepcopy(twin), mesh)
        for _ in range(3):
            same_gradients(r, model, twin)

    run(fn)


@pytest.mark.parametrize("make", [data_parallel, shard_stack])
def test_optimizers_that_step_in_backward(make):
    """Post-accumulate hooks see the reduced gradient, whether they were registered before or after."""

    def hook(p):
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(_):
            optimizer.step()
            optimizer.zero_grad()

        return p.register_post_accumulate_grad_hook(step)

    def fn(r, mesh):
        twin = stack()
        model = copy.deepcopy(twin)
        if make is data_parallel:
            hook(model[0].weight)
            gone = hook(model[1].weight)
            make(model, mesh)
            gone.remove()
        else:
            make(model, mesh)
            hook(model[0].weight)
        hook(model[1].weight)
        hook(model[2].bias).remove()
        hook(model[2].bias)
        for p in (twin[0].weight, twin[1].weight, twin[2].bias):
            hook(p)
        for _ in range(3):
            same_gradients(r, model, twin)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor() if isinstance(p, DTensor) else p, q)

    run(fn)


def test_hooks_that_would_see_no_gradient():
    def fn(r, mesh):
        model = shard_stack(stack(), mesh)
        handle = model[0].weight.register_hook(lambda g: g)
        with pytest.raises(LayoutError, match="such hooks see no gradient"):
            model(X)
        handle.remove()
        model(X)

    run(fn)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_of_gradients_are_refused(zero):
    def fn(r, mesh):
        model = shard_stack(stack(), mesh, zero=zero)
        x = X.clone().requires_grad_()
        with pytest.raises(GradientError, match="create_graph=True"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run(fn)


def test_inference_mode_first():
    def fn(r, mesh):
        twin = stack()
        model = shard_stack(copy.deepcopy(twin), mesh)
        with torch.inference_mode():
            torch.testing.assert_close(model(X), twin(X))
        same_gradients(r, model, twin)

    run(fn)
