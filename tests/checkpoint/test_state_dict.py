"""The state of models and optimizers by name: resumed on another mesh, training goes on as on one device."""

import random

import numpy as np
import pytest
import torch
from torch import nn
import torch.nn.functional as F

import shardwise
from shardwise import (
    DTensor,
    Replicate,
    Shard,
    checkpoint,
    distribute_module,
    distribute_tensor,
    simulate,
)
from shardwise.checkpoint import StateDictOptions
from shardwise.errors import CheckpointError

R, S = Replicate(), Shard


class Net(nn.Module):
    """Tied weights, a buffer, uneven sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        x = F.dropout(torch.relu(self.norm(self.up(self.embed(i)))), 0.3, self.training)
        return self.head(self.down(x))


def net(dtype=torch.float64, device=None):
    torch.manual_seed(3)
    with torch.device(device or "cpu"):
        return Net().to(dtype)


def laid_out(model, mesh, rows):
    def place(name, module, mesh):
        for key, p in module.named_parameters(recurse=False):
            where = [rows if p.ndim else R] + [R] * (mesh.ndim - 1)
            new = nn.Parameter(
                distribute_tensor(p.detach(), mesh, where), requires_grad=p.requires_grad
            )
            setattr(module, key, new)
        if name == "":
            module.head.weight = module.embed.weight

    tied = model.head.weight is model.embed.weight
    assert tied
    distribute_module(model, mesh, place)
    model.head.weight = model.embed.weight
    return model


def optimizer(model, kind=torch.optim.AdamW, split=False, **options):
    ps = list(dict.fromkeys(model.parameters()))
    groups = [{"params": ps[:2]}, {"params": ps[2:]}] if split else [{"params": ps}]
    return kind(groups, **({"lr": 0.01} | options))


def data(step):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (13,), generator=g), torch.randint(0, 11, (13,), generator=g)


def train(model, opt, sched, steps, mesh=None):
    losses = []
    for step in steps:
        i, target = data(step)
        if mesh is not None:
            i, target = (distribute_tensor(t, mesh, [S(0)]) for t in (i, target))
        with shardwise.rng(like="torch"):
            loss = F.cross_entropy(model(i), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        losses.append(loss.item())
    return losses


def schedule(opt):
    return torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)


@pytest.fixture(scope="module")
def alone():
    """The losses of one device that was never interrupted."""
    model = net()
    opt = optimizer(model)
    torch.manual_seed(5)
    return train(model, opt, schedule(opt), range(6))


@pytest.mark.parametrize("second", ["same", "grid", "one", "plain", "meta"])
def test_a_run_goes_on_on_another_mesh_as_if_nothing_had_happened(tmp_path, alone, second):
    def first(rank):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        model = laid_out(net(), mesh, S(0))
        opt = optimizer(model)
        sched = schedule(opt)
        torch.manual_seed(5)
        losses = train(model, opt, sched, range(3), mesh)
        state = {"model": model, "opt": opt, "sched": sched, "rng": checkpoint.RNG(), "step": 3}
        checkpoint.save(state, tmp_path / "c")
        return losses

    def again(rank):
        shape = {"same": (4,), "grid": (2, 2), "one": (1,), "plain": (1,), "meta": (3,)}[second]
        mesh = None if second == "plain" else shardwise.init_device_mesh("cpu", shape)
        model = net(device="meta" if second == "meta" else None)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        if mesh is not None:
            laid_out(model, mesh, S(0) if second == "same" else S(-1))
        opt = optimizer(model)
        sched = schedule(opt)
        state = {"model": model, "opt": opt, "sched": sched, "rng": checkpoint.RNG(), "step": 0}
        report = checkpoint.load(state, tmp_path / "c")
        assert not report.missing
        assert model.head.weight is model.embed.weight
        for p in model.parameters():
            assert isinstance(p, nn.Parameter)
            assert p.requires_grad
            assert not p.is_meta
            if mesh is not None:
                assert isinstance(p, DTensor)
                assert opt.state[p]["exp_avg"].layout is p.layout, "sharded like its parameter"
        return train(model, opt, sched, range(state["step"], 6), mesh)

    before = simulate(first, 4)[0]
    after = simulate(again, {"same": 4, "grid": 4, "one": 1, "plain": 1, "meta": 3}[second])[0]
    assert before + after == pytest.approx(alone, rel=1e-12, abs=0)


KINDS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda v: getattr(v, "__name__", ""))
def test_any_optimizer(tmp_path, kind, options):
    def grads(opt, mesh, seed):
        for group in opt.param_groups:
            for k, p in enumerate(group["params"]):
                g = torch.Generator().manual_seed(seed * 100 + k)
                full = torch.randn(p.shape, generator=g, dtype=p.dtype)
                p.grad = distribute_tensor(full, mesh, p.layout)
        opt.step()

    def run(rank):
        torch.manual_seed(0)
        values = [torch.randn(5, 3), torch.randn(7)]
        line = shardwise.init_device_mesh("cpu", (4,))
        grid = shardwise.init_device_mesh("cpu", (2, 2))
        a = nn.ParameterList([nn.Parameter(distribute_tensor(v, line, [S(0)])) for v in values])
        opt = kind(a.parameters(), lr=0.1, **options)
        grads(opt, line, 1)
        checkpoint.save({"m": a, "o": opt}, tmp_path / "c")
        b = nn.ParameterList(
            [nn.Parameter(distribute_tensor(v * 0, grid, [R, S(-1)])) for v in values]
        )
        other = kind(b.parameters(), lr=0.5, **options)
        checkpoint.load({"m": b, "o": other}, tmp_path / "c")
        assert other.param_groups[0]["lr"] == 0.1
        for seed in (2, 3):
            grads(opt, line, seed)
            grads(other, grid, seed)
        for p, q in zip(a, b):
            torch.testing.assert_close(p.full_tensor(), q.full_tensor(), rtol=1e-6, atol=1e-7)

    simulate(run, 4)


def test_other_groups_and_frozen_parameters(tmp_path):
    model = net()
    opt = optimizer(model, split=True)
    opt.param_groups[1]["weight_decay"] = 0.5
    train(model, opt, schedule(opt), range(2))
    checkpoint.save({"model": model, "opt": opt}, tmp_path / "c")
    names = {id(p): n for n, p in model.named_parameters()}
    saved = {names[id(p)]: s for p, s in opt.state.items()}

    other = net()
    other.up.weight.requires_grad_(False)
    kept = [p for p in other.parameters() if p.requires_grad]
    two = torch.optim.AdamW([{"params": [kept[k]]} for k in (2, 0, 3, 1, 4, 5)])
    checkpoint.load({"model": other, "opt": two}, tmp_path / "c")
    names = {id(p): n for n, p in other.named_parameters()}
    for group in two.param_groups:
        name = names[id(group["params"][0])]
        assert group["weight_decay"] == (0.01 if name == "embed.weight" else 0.5), name
        for key, value in two.state[group["params"][0]].items():
            assert torch.equal(value, saved[name][key]), (name, key)

    model = net()
    state = {"model": model, "opt": optimizer(model)}
    with pytest.raises(
        CheckpointError, match="had different weight_decay when they were saved"
    ):
        checkpoint.load(state, tmp_path / "c")
    assert state["opt"].param_groups[0]["weight_decay"] == 0.01


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="that is in no module given"):
        checkpoint.save({"model": net(), "opt": optimizer(net())}, tmp_path / "c")


def test_full_state_dicts_and_back():
    plain = net()
    opt0 = optimizer(plain)
    train(plain, opt0, schedule(opt0), range(2))
    want, want_opt = checkpoint.get_state_dict(plain, opt0)

    def run(rank):
        mesh = shardwise.init_device_mesh("cpu", (2, 2))
        model = laid_out(net(), mesh, S(0))
        opt = optimizer(model)
        # from rank 0 only
        options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
        given = (want, want_opt) if rank == 0 else ({}, {})
        checkpoint.set_state_dict(
            model, opt, model_state_dict=given[0], optim_state_dict=given[1], options=options
        )
        full, full_opt = checkpoint.get_state_dict(
            model, opt, options=StateDictOptions(full_state_dict=True)
        )
        for key, value in want.items():
            assert torch.equal(full[key], value), key
        for name, values in want_opt["state"].items():
            for key, value in values.items():
                assert torch.equal(full_opt["state"][name][key], value), (name, key)
                assert isinstance(
                    opt.state[dict(model.named_parameters())[name]][key], DTensor
                ) == bool(value.ndim)
        assert [g["params"] for g in full_opt["param_groups"]] == [
            g["params"] for g in want_opt["param_groups"]
        ]
        # whole values on every rank
        other = laid_out(net(), mesh, S(-1))
        opt2 = optimizer(other)
        flat = checkpoint.get_optimizer_state_dict(
            model,
            opt,
            options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
        )
        assert "state.up.weight.exp_avg" in flat
        assert flat["param_groups.up.weight.lr"] == opt.param_groups[0]["lr"]
        checkpoint.set_state_dict(other, opt2, model_state_dict=full, optim_state_dict=flat)
        for key, value in checkpoint.get_model_state_dict(other).items():
            assert torch.equal(value.full_tensor(), want[key]), key
        for (_, a), (_, b) in zip(model.named_parameters(), other.named_parameters()):
            assert torch.equal(
                opt.state[a]["exp_avg"].full_tensor(), opt2.state[b]["exp_avg"].full_tensor()
            )
        # on rank 0 only
        state, o = checkpoint.get_state_dict(
            model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        assert bool(state) == bool(o) == (rank == 0)

    simulate(run, 4)


def test_torchs_options_are_accepted():
    from torch.distributed.checkpoint.state_dict import StateDictOptions as Theirs

    model = net()
    state = checkpoint.get_model_state_dict(model, options=Theirs(ignore_frozen_params=True))
    assert set(state) == set(model.state_dict())
    model.up.weight.requires_grad_(False)
    state = checkpoint.get_model_state_dict(model, options=Theirs(ignore_frozen_params=True))
    assert set(model.state_dict()) - set(state) == {"up.weight"}


def test_wrong_states_are_refused_before_anything_changes():
    def run(rank):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        model = laid_out(net(), mesh, S(0))
        before = {k: v.full_tensor().clone() for k, v in model.state_dict().items()}
        state = {k: torch.ones_like(v) for k, v in before.items()}
        del state["up.bias"]
        state["new"] = torch.ones(1)
        state["down.weight"] = torch.ones(2, 2, dtype=torch.float64)
        with pytest.raises(CheckpointError) as told:
            checkpoint.set_model_state_dict(model, state)
        for text in (
            "missing in the state: up.bias",
            "in the state only: new",
            "down.weight has shape (2, 2)",
        ):
            assert text in str(told.value)
        for key, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), before[key]), key
        state["down.weight"] = torch.ones(6, 9, dtype=torch.float64)
        del state["head.weight"]  # tied: there under another name
        report = checkpoint.set_model_state_dict(
            model, state, options=StateDictOptions(strict=False)
        )
        assert (report.missing, report.unexpected) == (["up.bias"], ["new"])
        assert model.head.weight.full_tensor().eq(1).all()

    simulate(run, 2)


def test_generators_resume(tmp_path):
    state = {"rng": checkpoint.RNG()}
    torch.rand(3), random.random(), np.random.rand(2)
    checkpoint.save(state, tmp_path / "c")
    want = (
        torch.rand(4),
        torch.randn(20),
        random.random(),
        random.gauss(0, 1),
        np.random.randn(3),
    )
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    checkpoint.load(state, tmp_path / "c")
    got = (
        torch.rand(4),
        torch.randn(20),
        random.random(),
        random.gauss(0, 1),
        np.random.randn(3),
    )
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])
    assert want[2:4] == got[2:4]
    assert (want[4] == got[4]).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_torch_reads_and_writes_the_same_state(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict as theirs

    model = net()
    opt = optimizer(model)
    train(model, opt, schedule(opt), range(1))
    m, o = theirs(model, opt)
    dcp.save({"model": m, "opt": o}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    other = net()
    with torch.no_grad():
        other.up.weight.zero_()
    opt2 = optimizer(other, lr=7.0)
    checkpoint.load({"model": other, "opt": opt2}, tmp_path / "theirs")
    assert torch.equal(other.up.weight, model.up.weight)
    assert opt2.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    checkpoint.save({"model": other, "opt": opt2}, tmp_path / "ours")
    third = net()
    opt3 = optimizer(third)
    train(third, opt3, schedule(opt3), range(5, 6))
    m, o = theirs(third, opt3)
    dcp.load({"model": m, "opt": o}, checkpoint_id=tmp_path / "ours", no_dist=True)
    for (n, p), (_, q) in zip(third.named_parameters(), model.named_parameters()):
        assert torch.equal(p, q), n
        assert torch.equal(opt3.state[p]["exp_avg"], opt.state[q]["exp_avg"]), n


def test_keepers_and_values_anywhere_in_the_state(tmp_path):
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    opt = torch.optim.Adam([*a.parameters(), *b.parameters()])
    state = {
        "models": [a, {"inner": b}],
        "opt": opt,
        7: {"list": [1, 2], "none": None},
        "t": torch.ones(2),
    }
    checkpoint.save(state, tmp_path / "c")
    c, d = nn.Linear(2, 2), nn.Linear(2, 2)
    t = torch.zeros(2)
    other = {
        "models": [c, {"inner": d}],
        "opt": torch.optim.Adam([*c.parameters(), *d.parameters()], lr=3.0),
        7: {"list": [], "none": 3},
        "t": t,
    }
    checkpoint.load(other, tmp_path / "c")
    assert torch.equal(c.weight, a.weight)
    assert torch.equal(d.bias, b.bias)
    assert other["opt"].param_groups[0]["lr"] == 1e-3
    assert other[7] == {"list": [1, 2], "none": None}
    assert other["t"] is t
    assert t.eq(1).all()
