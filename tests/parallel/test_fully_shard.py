"""Fully sharded modules train as one device does; what is sent is what must be, when it should be."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.errors import LayoutError, MeshError
from shardwise.events import observe
from shardwise.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)


def batches_of(batch, vocab=11, length=7):
    return [
        (torch.randint(vocab, (batch, length)), torch.randint(vocab, (batch, length)))
        for _ in range(3)
    ]


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(model, mesh, **options)


def tensor_plan(local=True):
    return {
        "blocks.*.attn.[qkv]": ColwiseParallel(use_local_output=local),
        "blocks.*.attn.o": RowwiseParallel(use_local_output=local),
        "blocks.*.up": ColwiseParallel(use_local_output=local),
        "blocks.*.down": RowwiseParallel(use_local_output=local),
    }


def sequence_plan():
    seq = Shard(1)
    col, row = ColwiseParallel(use_local_output=False), RowwiseParallel
    out = row(output_layouts=seq, use_local_output=False)
    return {
        "tok": row(input_layouts=Replicate(), output_layouts=seq, use_local_output=False),
        "blocks.*.n?": SequenceParallel(),
        "blocks.*.attn": PrepareModuleInput(
            input_layouts=seq, desired_input_layouts=Replicate()
        ),
        "blocks.*.attn.[qkv]": col,
        "blocks.*.attn.o": out,
        "blocks.*.up": ColwiseParallel(input_layouts=seq, use_local_output=False),
        "blocks.*.down": out,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=seq, output_layouts=Replicate(), use_local_output=True
        ),
    }


def train_plain(zoo, ranks, shape, names, make, split, *, batch=4, **model):
    """Local programs on even batches against one device on all of it."""
    plain, batches = zoo.GPT(**model).double(), batches_of(batch)
    expected, losses = zoo.trained(zoo.copy(plain), batches)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
        ours = make(zoo.copy(plain), mesh)
        n, i = split(mesh)
        mine = [[t.chunk(n)[i] for t in pair] for pair in batches]
        return zoo.trained(ours, mine)

    for got, _ in shardwise.simulate(rank, ranks):
        zoo.same(got, expected)
    return losses


def along(mesh, axis):
    return mesh.size(axis), mesh.get_local_rank(axis)


@pytest.mark.parametrize(
    "options", [{}, {"zero": 2}, {"zero": 1}, {"reshard_after_forward": True}], ids=str
)
def test_plain_batches_are_averaged(zoo, options):
    train_plain(
        zoo,
        2,
        (2,),
        ("dp",),
        lambda m, mesh: sharded(m, mesh, **options),
        lambda m: along(m, 0),
    )


def test_uneven_and_empty_pieces(zoo):
    train_plain(zoo, 4, (4,), None, sharded, lambda m: along(m, 0), hidden=5)


def test_hybrid(zoo):
    train_plain(zoo, 4, (2, 2), ("rep", "dp"), sharded, lambda m: (4, m.get_rank()), hidden=7)


def test_with_tensor_parallel(zoo):
    def make(model, mesh):
        parallelize_module(model, mesh["tp"], tensor_plan())
        sharded(model, mesh["dp"])
        w = model.blocks[0].up.weight
        assert w.layout.mesh == mesh
        assert w.layout.dims == ((1, 0), ()), "cut by tp first, then by dp"
        return model

    train_plain(zoo, 4, (2, 2), ("dp", "tp"), make, lambda m: along(m, "dp"), hidden=33)


@pytest.mark.parametrize("dp", [1, 2])
def test_with_sequence_parallel(zoo, dp):
    def make(model, mesh):
        parallelize_module(model, mesh["tp"], sequence_plan())
        return sharded(model, mesh["dp"])

    train_plain(zoo, 2 * dp, (dp, 2), ("dp", "tp"), make, lambda m: along(m, "dp"))


def test_three_axes(zoo):
    def make(model, mesh):
        parallelize_module(model, mesh["tp"], tensor_plan())
        return sharded(model, mesh["rep", "dp"])

    names = ("rep", "dp", "tp")
    i = lambda m: (4, 2 * m.get_local_rank("rep") + m.get_local_rank("dp"))  # noqa: E731
    train_plain(zoo, 8, (2, 2, 2), names, make, i, layers=1)


@pytest.mark.parametrize(
    ("shape", "batch", "options"),
    [((2, 1), 5, {}), ((3, 1), 4, {"zero": 2}), ((2, 2), 3, {}), ((2, 2, 2), 5, {})],
    ids=str,
)
def test_one_program_on_the_whole_batch(zoo, shape, batch, options):
    """Uneven batches, dropout on, tensors on the whole mesh: as one device."""
    plain, batches = zoo.GPT(dropout=0.2, layers=1).double(), batches_of(batch)
    names = ("rep", "dp", "tp")[-len(shape) :]
    with shardwise.rng(like="torch"):
        expected, losses = zoo.trained(zoo.copy(plain), batches)

        def rank(_):
            mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
            ours = zoo.copy(plain)
            if mesh.size("tp") > 1:
                parallelize_module(ours, mesh["tp"], tensor_plan())
            over = mesh["dp"] if len(shape) == 2 else mesh["rep", "dp"]
            sharded(ours, over, **options)
            cut = [Shard(0)] * (len(shape) - 1)
            mine = [[shardwise.distribute_tensor(t, mesh, cut) for t in p] for p in batches]
            return zoo.trained(ours, mine)

        runs = shardwise.simulate(rank, torch.Size(shape).numel())
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


def shard_stack(model, mesh, **options):
    for layer in model:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


@pytest.mark.parametrize(("again", "times"), [(True, 3), (False, 2)])
def test_bytes_of_a_step(again, times):
    def fn(r, mesh):
        model = shard_stack(stack(4, 16), mesh, reshard_after_forward=again)
        x = torch.randn(4, 16, requires_grad=True)
        model(x).sum().backward()
        with shardwise.CommLog() as log:
            model(x).sum().backward()
        return log.on(r)

    log = run_two(fn)[0]
    size = 4 * (16 * 16 + 16) * 4
    assert log.count("reduce_scatter") == 4
    assert log.count("all_gather") == 4 * (times - 1)
    assert log.count() == 4 * times
    assert times * size // 2 <= log.bytes <= times * size // 2 + 4 * 2 * 4


def timeline(again=True):
    def fn(r, mesh):
        model = shard_stack(stack(4), mesh, reshard_after_forward=again)
        x, seen = torch.randn(4, 8, requires_grad=True), []
        for i, layer in enumerate(model):
            layer.register_forward_pre_hook(lambda *_, i=i: seen.append(f"use {i}"))
            layer.register_full_backward_pre_hook(lambda *_, i=i: seen.append(f"back {i}"))
        model(x).sum().backward()
        seen.clear()
        with observe(lambda e: e.rank == r and seen.append(e.kind)):
            model(x).sum().backward()
        return seen

    return run_two(fn)[0]


def test_gathers_start_before_they_are_needed_and_reductions_before_backward_ends():
    seen = timeline()
    first = seen.index("back 3")
    forward, backward = seen[:first], seen[first:]
    for i in range(1, 4):
        assert forward[: forward.index(f"use {i - 1}")].count("all_gather") >= i + 1
    for i in range(3):
        before = [s for s in backward[: backward.index(f"back {i}")] if s == "reduce_scatter"]
        assert len(before) >= 2 - i
    sent = [i for i, s in enumerate(backward) if s == "reduce_scatter"]
    for k, at in enumerate(sent[:3]):  # the next layer is on its way before this one is done
        assert backward[:at].count("all_gather") >= k + 2
    assert backward.count("all_gather") == 4
    assert seen[-1] == "reduce_scatter"


def test_parameters_are_pieces_outside_of_forward():
    def fn(r, mesh):
        model = stack(3)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        shard_stack(model, mesh)
        assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
        shapes = []
        model[1].register_forward_hook(lambda m, *_: shapes.append(tuple(m.weight.shape)))
        x = torch.ones(2, 8)
        y = model(x)
        assert all(p.placements == (Shard(0),) for p in model.parameters())
        y.sum().backward()
        before = [p.full_tensor().clone() for p in model.parameters()]
        assert all(p.grad.placements == (Shard(0),) for p in model.parameters())
        optimizer.step()
        after = [p.full_tensor() for p in model.parameters()]
        assert not any(torch.equal(a, b) for a, b in zip(before, after))
        flats = vars(model[0])["_shardwise_group"].flats
        assert not flats[0].full.untyped_storage().nbytes()

    run_two(fn)


def test_no_sync_and_one_reduction_per_step():
    x = torch.randn(3, 2, 4, 8)
    plain = stack()
    for part in x.flatten(0, 1):
        (plain(part).square().sum() / 2).backward()

    def fn(r, mesh):
        model = stack()
        model.load_state_dict(plain.state_dict())
        shard_stack(model, mesh)
        with shardwise.CommLog() as log:
            with model.no_sync():
                for part in x[:2, r]:
                    model(part).square().sum().backward()
            model(x[2, r]).square().sum().backward()
        assert log.on(r).count("reduce_scatter") == 4
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4)
        model(x[2, r]).square().sum().backward()  # adds to them

    run_two(fn)


def test_unused_parameters_and_modules():
    def fn(r, mesh):
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        model.forward = lambda x: (
            model[1](model[0](x)) if r == 0 else model[0](model[1](x) * 0 + x)
        )
        for layer in model:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        model[3].weight.requires_grad_(False)
        x = torch.ones(1, 4, requires_grad=True)
        model.forward = lambda x: model[1](model[3](model[0](x)))
        model(x).sum().backward()
        assert model[2].weight.grad is None
        assert model[3].weight.grad is None
        assert model[3].bias.grad is not None
        assert model[0].weight.grad is not None
        model[0].bias.requires_grad_(False)
        model(x).sum().backward()

    run_two(fn)


def test_a_parameter_that_one_rank_uses():
    class Pick(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(3)) for _ in range(3))

        def forward(self, x, which):
            return x * (self.a if which == 0 else self.b)

    def fn(r, mesh):
        model = fully_shard(Pick(), mesh)
        model(torch.ones(3), r).sum().backward()
        torch.testing.assert_close(model.a.grad.full_tensor(), torch.full((3,), 0.5))
        torch.testing.assert_close(model.b.grad.full_tensor(), torch.full((3,), 0.5))
        assert model.c.grad is None

    run_two(fn)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    x = torch.randn(2, 8, dtype=torch.float64)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack(4).double()

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
            return x

    def fn(r, mesh):
        model, twin = Net(), Net()
        twin.load_state_dict(model.state_dict())
        for layer in model.layers:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        for _ in range(2):
            model(x.clone().requires_grad_()).square().sum().backward()
            twin(x.clone().requires_grad_()).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_two(fn)


def test_a_module_that_is_called_twice_and_a_graph_that_is_kept():
    x = torch.randn(2, 8, dtype=torch.float64)

    def fn(r, mesh):
        layers = stack(2).double()
        model = nn.Sequential(layers[0], layers[1], layers[0])
        twin = nn.Sequential(*(nn.Linear(8, 8).double() for _ in range(2)))
        twin = nn.Sequential(twin[0], twin[1], twin[0])
        twin.load_state_dict(model.state_dict())
        for layer in layers:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        for m in (model, twin):
            loss = m(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_two(fn)


def test_evaluation_and_a_forward_that_raises():
    def fn(r, mesh):
        model = shard_stack(stack(2), mesh)
        x = torch.ones(2, 8)
        with torch.no_grad():
            a = model(x)
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        torch.testing.assert_close(model(x).detach(), a)
        y = model(x)
        y.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run_two(fn)


@pytest.mark.parametrize("again", [True, False])
def test_values_that_change_between_forwards(again):
    def fn(r, mesh):
        model = shard_stack(stack(2), mesh, reshard_after_forward=again)
        x = torch.ones(2, 8)
        model(x)  # and no backward
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert not model(x).any()
        with pytest.raises(LayoutError, match=r"is of torch\.float64 on cpu now"):
            model.double()(x)

    run_two(fn)


def test_mixed_precision():
    x = torch.randn(4, 8)

    def fn(r, mesh):
        model, twin = stack(2), stack(2)
        twin.load_state_dict(model.state_dict())
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
        dtypes = []
        model[1].register_forward_pre_hook(lambda m, a: dtypes.append(a[0].dtype))
        for layer in model:
            fully_shard(
                layer, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            )
        fully_shard(model, mesh, mp_policy=policy)
        with shardwise.CommLog() as log:
            y = model(x)
            y.sum().backward()
        assert y.dtype is torch.float64
        kinds = {(e.kind, e.dtype) for e in log.events}
        assert kinds == {("all_gather", "bfloat16"), ("reduce_scatter", "float32")}
        twin = twin.bfloat16()
        twin(x.bfloat16()).sum().backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            assert p.dtype is p.grad.dtype is torch.float32
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad.float(), rtol=2e-2, atol=2e-2
            )

    run_two(fn)


def test_meta_device_straight_to_pieces():
    def fn(r, mesh):
        with torch.device("meta"):
            model = stack(3)
        shard_stack(model, mesh)
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        with shardwise.rng(like="torch"):
            torch.manual_seed(3)
            for layer in model:
                layer.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        twin = stack(3)
        x = torch.ones(2, 8)
        for m, o in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
            for _ in range(2):
                m(x).square().sum().backward()
                o.step()
                o.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.full_tensor(), q)

    run_two(fn)


def test_clipping_and_hooks(zoo):
    plain, batch = zoo.GPT().double(), batches_of(4)[0]
    twin = zoo.copy(plain)
    zoo.loss_of(twin, *batch).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours = zoo.copy(plain)
        parallelize_module(ours, mesh["tp"], tensor_plan())
        sharded(ours, mesh["dp"])
        seen = []
        for p in (ours.norm.weight, ours.blocks[0].down.bias):
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
        i = mesh.get_local_rank("dp")
        zoo.loss_of(ours, *(t.chunk(2)[i] for t in batch)).backward()
        assert len(seen) == 2
        total = zoo.whole(nn.utils.clip_grad_norm_(ours.parameters(), 0.1))
        torch.testing.assert_close(total, expected)
        zoo.same(zoo.grads(ours), zoo.grads(twin))

    shardwise.simulate(rank, 4)


def test_state_dicts_are_of_pieces():
    def fn(r, mesh):
        model, twin = shard_stack(stack(2), mesh), stack(2)
        state = model.state_dict()
        assert all(v.placements == (Shard(0),) for v in state.values())
        model.load_state_dict(twin.state_dict())
        x = torch.ones(2, 8)
        torch.testing.assert_close(model(x), twin(x))

    run_two(fn)


def test_recurrent_modules():
    def fn(r, mesh):
        torch.manual_seed(1)
        twin = nn.LSTM(4, 6)
        model = nn.LSTM(4, 6)
        model.load_state_dict(twin.state_dict())
        fully_shard(model, mesh)
        x = torch.randn(3, 2, 4)
        for m in (model, twin):
            m(x)[0].sum().backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_two(fn)


def test_what_is_refused():
    def fn(r, mesh):
        model = nn.Module()
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.w = nn.Parameter(torch.ones(3))
        with pytest.raises(LayoutError, match='"scale" has no dim to cut'):
            fully_shard(model, mesh)
        assert not isinstance(model.w, DTensor)
        fully_shard(model, mesh, ignored_params=[model.scale])
        with pytest.raises(LayoutError, match="was called on this Module already"):
            fully_shard(model, mesh)
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(shardwise.distribute_tensor(layer.weight, mesh))
        with pytest.raises(LayoutError, match=r'"weight" is .* distributed over the axis'):
            fully_shard(layer, mesh)
        with pytest.raises(LayoutError, match="not zero=4"):
            fully_shard(nn.Linear(2, 2), mesh, zero=4)

    run_two(fn)


def test_three_axes_at_once_are_refused():
    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (1, 1, 1))
        with pytest.raises(MeshError, match="one axis or two"):
            fully_shard(nn.Linear(2, 2), mesh)

    shardwise.simulate(rank, 1)


@pytest.mark.parametrize("norm", [2.0, 1.0, 3.0, float("inf")])
def test_clipping_sends_one_message(zoo, norm):
    """Pieces over dp, over tp, over both, and whole ones, on several meshes."""
    plain, batch = zoo.GPT().double(), batches_of(4)[0]
    twin = zoo.copy(plain)
    zoo.loss_of(twin, *batch).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm)

    def rank(_):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours = zoo.copy(plain)
        plan = {k: v for k, v in tensor_plan().items() if "attn" not in k}
        parallelize_module(ours, mesh["tp"], plan)
        fully_shard(ours.blocks[0], mesh["dp"])
        fully_shard(ours.norm, mesh["dp"])
        zoo.loss_of(ours, *batch).backward()
        nn.utils.clip_grad_norm_(
            ours.parameters(), 1e9, norm
        )  # plain numbers are compared once
        with shardwise.CommLog() as log:
            total = zoo.whole(nn.utils.clip_grad_norm_(ours.parameters(), 0.1, norm))
        assert log.on(mesh.get_rank()).count() == 1
        torch.testing.assert_close(total, expected)
        zoo.same(zoo.grads(ours), zoo.grads(twin))

    shardwise.simulate(rank, 4)


def test_loss_scaling_agrees_on_overflow():
    """An infinite gradient in one rank's piece skips the step on all; a good step is the unscaled one."""

    def fn(r, mesh):
        model, twin = shard_stack(stack(2), mesh), stack(2)
        model.load_state_dict(twin.state_dict())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 8)
        scales = []
        for overflow in (True, False):
            scaler.scale(model(x).square().mean()).backward()
            if overflow:  # in the last row: in the last rank's piece alone
                model[0].weight.grad[-1, -1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales == [2.0, 2.0]
        twin(x).square().mean().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.full_tensor(), q)

    run_two(fn)


@pytest.mark.parametrize("options", [{}, {"zero": 2}, {"zero": 1}], ids=str)
def test_other_dims_are_cut_where_asked(zoo, options):
    """The last dim of every matrix: uneven, with tensor parallel, on a mesh of three axes."""

    def choose(p):
        return Shard(-1) if p.ndim == 2 else None

    def make(model, mesh):
        parallelize_module(model, mesh["tp"], tensor_plan())
        sharded(model, mesh["rep", "dp"], shard_placement_fn=choose, **options)
        assert model.tok.weight.placements == (Replicate(), Shard(1))
        assert model.blocks[0].up.weight.layout.dims == ((2,), (1,))
        assert model.blocks[0].down.weight.layout.dims == ((), (2, 1))
        assert model.blocks[0].up.weight.to_local().is_contiguous()
        return model

    names = ("rep", "dp", "tp")
    i = lambda m: (6, 3 * m.get_local_rank("rep") + m.get_local_rank("dp"))  # noqa: E731
    train_plain(
        zoo, 12, (2, 3, 2), names, make, i, batch=6, layers=1, width=8, hidden=5, heads=2
    )


def test_the_dim_to_cut_must_exist():
    def fn(r, mesh):
        model = stack(1)
        for wrong in (Shard(2), Replicate(), 1):
            with pytest.raises(LayoutError, match=r'for "0\.weight", which has 2 dims'):
                fully_shard(model, mesh, shard_placement_fn=lambda p, wrong=wrong: wrong)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    run_two(fn)
