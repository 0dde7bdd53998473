"""Optimizers that have not stepped: what `torch.distributed.checkpoint.load` fills."""

import copy

import pytest
import torch
from torch import nn
import torch.distributed.checkpoint as dcp

import shardwise
from shardwise import Replicate, Shard, checkpoint, simulate

KINDS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def step(model, optimizer):
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    if isinstance(next(model.parameters()), shardwise.DTensor):
        mesh = next(model.parameters()).device_mesh
        x = shardwise.distribute_tensor(x, mesh, [Replicate()] * mesh.ndim)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def laid_out(model, mesh):
    def cut(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            p = nn.Parameter(shardwise.distribute_tensor(p, mesh, [Shard(0)]))
            module.register_parameter(key, p)

    return shardwise.distribute_module(model, mesh, cut)


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_entries_of_one_that_has_stepped_and_is_left_alone(kind):
    def run(rank):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        model = laid_out(net(), mesh)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **KINDS[kind])
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # patches step
        before = [p.full_tensor() for p in model.parameters()]
        bare = kind != "Adagrad"  # which makes its state at once
        assert bool(optimizer.state) != bare
        fresh = checkpoint.get_optimizer_state_dict(model, optimizer)
        assert bool(optimizer.state) != bare
        assert all(p.grad is None for p in model.parameters())
        for p, old in zip(model.parameters(), before):
            assert torch.equal(p.full_tensor(), old)
        step(model, optimizer)
        stepped = checkpoint.get_optimizer_state_dict(model, optimizer)
        assert fresh["state"].keys() == stepped["state"].keys()
        for name, values in stepped["state"].items():
            assert fresh["state"][name].keys() == values.keys()
            for key, value in values.items():
                mine = fresh["state"][name][key]
                assert (type(mine), getattr(mine, "shape", 0)) == (
                    type(value),
                    getattr(value, "shape", 0),
                )
                if isinstance(value, shardwise.DTensor):
                    assert mine.placements == value.placements

    simulate(run, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_set_anew_it_takes_the_steps_of_one_that_was_never_saved(kind):
    model = net()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **KINDS[kind])
    twin = copy.deepcopy(model)
    other = getattr(torch.optim, kind)(twin.parameters(), lr=0.01, **KINDS[kind])
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    checkpoint.set_optimizer_state_dict(twin, other, optim_state_dict=state)
    for _ in range(3):
        step(model, optimizer)
        step(twin, other)
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_needs_more_than_gradients_gives_no_state():
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        model = net()
        assert not checkpoint.get_optimizer_state_dict(model, kind(model.parameters()))["state"]


@pytest.mark.filterwarnings("ignore")  # torch says that there is no process group
def test_torchs_load_fills_a_fresh_optimizer(tmp_path):
    """The usual program: take the state of a new model and optimizer, load into it, set it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    names = ("model", "optim")
    state = dict(zip(names, checkpoint.get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=tmp_path / "c")
    other = net(seed=1)
    late = torch.optim.AdamW(other.parameters(), lr=0.5)
    state = dict(zip(names, checkpoint.get_state_dict(other, late)))
    dcp.load(state, checkpoint_id=tmp_path / "c")
    checkpoint.set_state_dict(
        other, late, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert late.param_groups[0]["lr"] == 0.01
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg"], late.state[q]["exp_avg"])
        assert late.state[q]["step"].item() == 1
