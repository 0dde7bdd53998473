"""What a fully sharded module can be told: the methods of torch's FSDPModule, against one device."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.errors import CaptureError, LayoutError, UnsupportedError
from shardwise.parallel import (
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)

WIDTH = 6


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh())

    def generate(self, x):
        return self(x) + self.up(x).sum()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(MLP(), nn.Linear(WIDTH, WIDTH), MLP()).double()


def on(ranks, fn, shape=None):
    def rank(r):
        shape_ = shape or (ranks,)
        names = ("dp",) if len(shape_) == 1 else ("rep", "dp")
        return fn(r, shardwise.init_device_mesh("cpu", shape_, mesh_dim_names=names))

    return shardwise.simulate(rank, ranks)


def sharded(model, mesh):
    for part in model:
        fully_shard(part, mesh)
    return fully_shard(model, mesh)


def batch(i, ranks):
    x = torch.randn(
        2 * ranks, WIDTH, generator=torch.Generator().manual_seed(i), dtype=torch.float64
    )
    return x, list(x.chunk(ranks))


def grads(model):
    return [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


def plain_grads(steps, ranks, factor=1.0):
    model = net()
    for i in range(steps):
        model(batch(i, ranks)[0]).square().mean().backward()
    return [p.grad * factor for p in model.parameters()]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_it_is_an_instance_of_both_classes_and_has_its_name():
    def fn(r, mesh):
        m = fully_shard(MLP(), mesh)
        assert isinstance(m, MLP)
        assert isinstance(m, FSDPModule)
        assert type(m).__name__ == "MLP"
        assert type(fully_shard(MLP(), mesh)) is type(m)
        assert not isinstance(MLP(), FSDPModule)

    on(2, fn)


@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_gradients_add_up_and_travel_once(setting):
    shape = (2, 2)
    want = plain_grads(3, 4)

    def fn(r, mesh):
        model = sharded(net(), mesh)
        for i in range(3):
            getattr(model, setting)(i == 2)
            with shardwise.CommLog() as log:
                model(batch(i, 4)[1][r]).square().mean().backward()
            assert bool(log.on(r).count("reduce_scatter")) == (i == 2)
            assert all((g is None) == (i < 2) for g in grads(model))
        return grads(model)

    for got in on(4, fn, shape):
        close(got, want)


def test_without_recurse_one_group_waits():
    want = plain_grads(2, 2)

    def fn(r, mesh):
        model = sharded(net(), mesh)
        model[1].set_requires_gradient_sync(False)
        model(batch(0, 2)[1][r]).square().mean().backward()
        assert model[1].weight.grad is None
        assert model[0].up.weight.grad is not None
        model.set_requires_gradient_sync(False, recurse=False)  # has nothing of its own
        model[1].set_requires_gradient_sync(True)
        model(batch(1, 2)[1][r]).square().mean().backward()
        return grads(model)

    for got in on(2, fn):
        close(got, want)


def test_all_reduce_is_nothing_on_one_axis():
    def fn(r, mesh):
        model = sharded(net(), mesh)
        model.set_requires_all_reduce(False)
        model(batch(0, 2)[1][r]).square().mean().backward()
        return grads(model)

    close(on(2, fn)[0], plain_grads(1, 2))


def test_the_divisor_is_of_one_group():
    def fn(r, mesh):
        model = sharded(net(), mesh)
        model[1].set_gradient_divide_factor(1.0)
        with pytest.raises(LayoutError, match="divided by 0"):
            model.set_gradient_divide_factor(0)
        model(batch(0, 2)[1][r]).square().mean().backward()
        return grads(model)

    want = plain_grads(1, 2)
    want[4:6] = [2 * g for g in want[4:6]]
    close(on(2, fn)[0], want)


def test_reshard_after_forward_can_be_set():
    def fn(r, mesh):
        model = sharded(net(), mesh)
        x, counts = batch(0, 2)[1][r], []
        for again in (True, False):
            model.set_reshard_after_forward(again)
            model(x).sum().backward()
            with shardwise.CommLog() as log:
                model(x).sum().backward()
            counts.append(log.on(r).count("all_gather"))
        return counts

    # the last group is kept where backward begins with it only if told so
    again, kept = on(2, fn)[0]
    assert again > kept == 3


def test_what_is_gathered_ahead_is_not_gathered_again_unless_it_changed():
    def fn(r, mesh):
        model = sharded(net(), mesh)
        x = batch(0, 2)[1][r]
        with torch.no_grad():
            want = model(x)
            handle = model[0].unshard(async_op=True)
            handle.wait()
            model[1].unshard()
            with shardwise.CommLog() as log:
                assert torch.equal(model(x), want)
            assert log.on(r).count("all_gather") == 1
            model[0].unshard()
            model[0].reshard()
            with shardwise.CommLog() as log:
                assert torch.equal(model(x), want)
            assert log.on(r).count("all_gather") == 3
            model[0].unshard()
            for p in model.parameters():
                p.mul_(2)
            plain = net()
            for p in plain.parameters():
                p.mul_(2)
            torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)

    on(2, fn)


def test_hints_are_taken():
    def fn(r, mesh):
        model = sharded(net(), mesh)
        model[0].set_modules_to_forward_prefetch([model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model(batch(0, 2)[1][r]).square().mean().backward()
        return grads(model)

    close(on(2, fn)[0], plain_grads(1, 2))


def test_another_method_runs_gathered_and_may_call_forward():
    plain = net()[0]
    _, parts = batch(0, 2)
    (sum(plain.generate(part).square().mean() for part in parts) / 2).backward()

    def fn(r, mesh):
        model = fully_shard(net()[0], mesh)
        register_fsdp_forward_method(model, "generate")
        with pytest.raises(LayoutError, match="no method 'sample'"):
            register_fsdp_forward_method(model, "sample")
        register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not sharded: nothing
        for _ in range(2):
            model.zero_grad()
            model.generate(parts[r]).square().mean().backward()
        return grads(model)

    close(on(2, fn)[0], [p.grad for p in plain.parameters()])


def test_a_list_of_modules():
    def fn(r, mesh):
        model = net()
        both = [model[0], model[2]]
        assert fully_shard(both, mesh) is both
        fully_shard(model, mesh)
        with pytest.raises(LayoutError, match="already"):
            fully_shard([nn.Linear(2, 2), model[0]], mesh)
        model(batch(0, 2)[1][r]).square().mean().backward()
        return grads(model)

    close(on(2, fn)[0], plain_grads(1, 2))


def test_offloading_is_refused_where_it_would_do_something():
    def fn(r, mesh):
        fully_shard(MLP(), mesh, offload_policy=CPUOffloadPolicy(), ignored_params=None)
        cuda = shardwise.DeviceMesh("cuda", [0, 1])
        module = MLP()
        with pytest.raises(UnsupportedError, match="CPUOffloadPolicy"):
            fully_shard(module, cuda, offload_policy=CPUOffloadPolicy())
        assert not isinstance(module, FSDPModule)

    on(2, fn)


def captured(model, micro):
    @shardwise.capture
    def step(batches):
        for i, x in enumerate(batches):
            model.set_requires_gradient_sync(i == micro - 1)
            model(x).square().mean().backward()

    return step


def test_a_captured_step_of_micro_batches():
    def fn(r, mesh):
        model = sharded(net(), mesh)
        step = captured(model, 2)
        for i in range(3):
            step([batch(2 * i + k, 2)[1][r] for k in range(2)])
        return grads(model)

    close(on(2, fn)[0], plain_grads(6, 2))


def test_a_captured_step_sees_the_settings():
    def fn(r, mesh):
        model = sharded(net(), mesh)

        @shardwise.capture
        def step(x):
            model(x).square().mean().backward()

        for i in range(6):
            model.set_gradient_divide_factor(1.0) if i == 4 else None
            model[0].set_gradient_divide_factor(2.0 + i % 2)
            step(batch(i, 2)[1][r])
        return grads(model)[:4]

    want = [
        sum(gs)
        for gs in zip(*[[g * 2 / (2 + i % 2) for g in one_step(i)[:4]] for i in range(6)])
    ]
    close(on(2, fn)[0], want)


def one_step(i):
    model = net()
    model(batch(i, 2)[0]).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("first", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("how", ["method", "no_sync"])
def test_gradients_that_wait_do_not_cross_a_captured_step(first, how):
    def fn(r, mesh):
        model = sharded(net(), mesh)

        @shardwise.capture
        def step(x):
            model(x).square().mean().backward()

        def call(i, sync):
            if how == "method":
                model.set_requires_gradient_sync(sync)
                step(batch(i, 2)[1][r])
                return
            with contextlib.nullcontext() if sync else shardwise.no_sync():
                step(batch(i, 2)[1][r])

        call(0, first)
        with pytest.raises(CaptureError, match="no backward has reduced"):
            call(1, not first)

    on(2, fn)


class Checkpointed(nn.Module):
    """As torch's ``checkpoint_wrapper``: what is within runs again in backward, the wrapper does not."""

    def __init__(self, within, reentrant):
        super().__init__()
        self.within, self.reentrant = within, reentrant

    def forward(self, x):
        return checkpoint(self.within, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("again", [None, False])
def test_a_checkpoint_within_a_sharded_module(reentrant, again):
    def fn(r, mesh):
        model = net()
        for i, part in enumerate(model):
            model[i] = fully_shard(
                Checkpointed(part, reentrant), mesh, reshard_after_forward=again
            )
        fully_shard(model, mesh)
        for _ in range(2):
            model.zero_grad()
            x = batch(0, 2)[1][r].requires_grad_()
            model(x).square().mean().backward()
            assert all(isinstance(p, shardwise.DTensor) for p in model.parameters())
        return grads(model)

    for got in on(2, fn):
        close(got, plain_grads(1, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at .grad of what is no leaf
@pytest.mark.parametrize("how", ["compile", "torch.compile"])
def test_compiled_modules(how):
    """The hooks run as they are; what lies between them may be compiled."""

    def fn(r, mesh):
        model = net()
        for part in model:
            part.compile(backend="eager") if how == "compile" else None
            fully_shard(part, mesh)
        fully_shard(model, mesh)
        run = model if how == "compile" else torch.compile(model, backend="eager")
        run(batch(0, 2)[1][r]).square().mean().backward()
        return grads(model)

    for got in on(2, fn):
        close(got, plain_grads(1, 2))
