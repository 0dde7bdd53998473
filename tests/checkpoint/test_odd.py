"""Odd states, odd places, odd optimizers: saved and loaded whole, or refused before anything is lost."""

import copy

import pytest
import torch
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard, checkpoint, distribute_tensor, simulate
from shardwise.errors import CheckpointError
from shardwise.parallel import data_parallel, fully_shard


def mesh_of(size):
    return shardwise.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def test_tensors_whose_memory_is_odd(tmp_path):
    x = torch.arange(24.0).view(4, 6)
    state = {
        "turned": x.t(),
        "expanded": torch.ones(3).expand(4, 3),
        "conjugate": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "empty": torch.empty(3, 0, 2),
        "scalar": torch.tensor(3.5),
        "narrow": torch.ones(5).to(torch.float8_e4m3fn),
        "slice": x[:, 1:4],
    }
    checkpoint.save(state, tmp_path / "c")
    got = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in state.items()}
    checkpoint.load(got, tmp_path / "c")
    for key, value in state.items():
        a, b = got[key], value.resolve_conj().resolve_neg().contiguous()
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (
            key
        )


def test_what_shares_memory_with_itself_is_not_loaded_into(tmp_path):
    checkpoint.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "c")
    state = {"a": torch.zeros(4), "b": torch.zeros(1).expand(4)}
    with pytest.raises(CheckpointError, match="b is expanded"):
        checkpoint.load(state, tmp_path / "c")
    assert not state["a"].any()


def test_complex_numbers_do_not_lose_their_imaginary_part(tmp_path):
    checkpoint.save({"c": torch.ones(2, dtype=torch.complex64)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"c: stored complex64\[2\], wanted float32\[2\]"):
        checkpoint.load({"c": torch.zeros(2)}, tmp_path / "c", cast=True)
    got = {"c": torch.zeros(2, dtype=torch.complex128)}
    checkpoint.load(got, tmp_path / "c", cast=True)
    assert got["c"].eq(1).all()


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("precious")
    (tmp_path / "empty").mkdir()
    state = {"x": torch.ones(2)}
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match="is no checkpoint, and so is not replaced"):
            checkpoint.save(state, tmp_path / name, overwrite=True)
    with pytest.raises(CheckpointError, match="other things in it, which would be lost: notes"):
        checkpoint.save_safetensors(state, tmp_path / "folder", overwrite=True)
    assert (tmp_path / "file").read_text() == "precious"
    assert (tmp_path / "folder" / "notes").read_text() == "precious"
    for _ in range(2):
        checkpoint.save(state, tmp_path / "empty", overwrite=True)
        checkpoint.save_safetensors(state, tmp_path / "export", overwrite=True)
    (tmp_path / "empty" / ".metadata").unlink()  # damaged
    checkpoint.save(state, tmp_path / "empty", overwrite=True)
    with pytest.raises(CheckpointError, match="step=-1: steps are counted from 0"):
        checkpoint.save(state, tmp_path / "series", step=-1)


def test_a_keeper_of_state_that_fails_on_one_rank(tmp_path):
    class Counter:
        def __init__(self, rank):
            self.rank = rank

        def state_dict(self):
            return {"count": 1}

        def load_state_dict(self, state):
            if self.rank == 1:
                raise ValueError("no")

    def run(rank):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = {"counter": Counter(rank), "model": model, "optimizer": optimizer}
        checkpoint.save(state, tmp_path / "c")
        with pytest.raises(
            CheckpointError, match="rank 1: what was loaded is not taken: ValueError"
        ):
            checkpoint.load(state, tmp_path / "c")

    simulate(run, 2)


def test_a_dtensor_inside_an_object_is_refused_when_it_is_saved(tmp_path):
    """One rank pickles an object: its piece would be all that is kept."""

    def run(rank):
        x = distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)])
        for odd in ((x, 1), [({"x": x},)]):
            with pytest.raises(
                CheckpointError, match=r"t(\.0)? holds a DTensor, of which a rank"
            ):
                checkpoint.save({"t": odd}, tmp_path / "c")
            with pytest.raises(
                CheckpointError, match=r"t(\.0)? holds a DTensor, of which a rank"
            ):
                checkpoint.async_save({"t": odd}, tmp_path / "c").result()

    simulate(run, 2)
    checkpoint.save({"t": (torch.ones(2), 1)}, tmp_path / "plain")
    got = {"t": None}
    checkpoint.load(got, tmp_path / "plain")
    assert got["t"][0].eq(1).all()
    assert got["t"][1] == 1


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_tensors_without_elements_of_their_own_are_refused(tmp_path):
    class Odd(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    odd = {
        "is quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "is not initialized": nn.LazyLinear(3).weight,
        "is not strided": torch.eye(2).to_sparse(),
        "Odd, which only its own class": Odd(),
    }
    checkpoint.save({"x": torch.ones(2)}, tmp_path / "c")
    for text, value in odd.items():
        told = f"rank 1: x {text}|rank 1: x is a .*{text}"

        def run(rank, value=value, told=told):
            state = {"x": value if rank == 1 else torch.zeros(2)}
            with pytest.raises(CheckpointError, match=told):
                checkpoint.save(state, tmp_path / "d")
            with pytest.raises(CheckpointError, match=told):
                checkpoint.load(state, tmp_path / "c")
            with pytest.raises(CheckpointError, match="rank 1: x is"):
                checkpoint.save_safetensors(state, tmp_path / "e")

        simulate(run, 2)


def test_groups_that_cannot_be_joined_are_told_before_anything_changes(tmp_path):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    checkpoint.save({"model": model, "optimizer": optimizer, "step": 1}, tmp_path / "c")
    one = torch.optim.SGD(model.parameters(), 0.3)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.weight += 1
        before["weight"] += 1
    state = {"model": model, "optimizer": one, "step": 0}
    with pytest.raises(CheckpointError, match=r"one group now .* had different lr"):
        checkpoint.load(state, tmp_path / "c")
    assert state["step"] == 0
    assert one.param_groups[0]["lr"] == 0.3
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_tied_parameters_on_the_meta_device_whatever_the_order(tmp_path):
    class Tied(nn.Module):
        def __init__(self, names):
            super().__init__()
            one = nn.Parameter(torch.arange(4.0))
            for name in names:
                self.register_parameter(name, one)

    checkpoint.save({"m": Tied("ab")}, tmp_path / "c")
    with torch.device("meta"):
        model = Tied("ba")
    checkpoint.load({"m": model}, tmp_path / "c")
    assert model.a is model.b
    assert torch.equal(model.a.detach(), torch.arange(4.0))


def test_ranks_that_ask_for_different_things(tmp_path):
    checkpoint.save({"x": torch.ones(2), "y": torch.ones(2)}, tmp_path / "c")

    def run(rank):
        state = {"x": torch.zeros(2), "y": torch.zeros(2)}
        for options in ({"keys": ["x", "y"][rank]}, {"verify": bool(rank)}):
            with pytest.raises(CheckpointError, match="not all ranks call load with the same"):
                checkpoint.load(state, tmp_path / "c", **options)
        assert not state["x"].any()
        report = checkpoint.load(state, tmp_path / "c", keys={"x", "z*", "a"})  # any order
        assert report.loaded == ["x"]

    simulate(run, 2)


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
OPTIMIZERS = [
    lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    lambda ps: torch.optim.SGD(ps, 0.1),
    lambda ps: torch.optim.Adam(ps, 0.1, amsgrad=True),
    lambda ps: torch.optim.Adafactor(ps),
    lambda ps: torch.optim.ASGD(ps, lambd=0.1),
    lambda ps: torch.optim.Rprop(ps),
    lambda ps: torch.optim.Adagrad(ps, 0.1),
    lambda ps: torch.optim.NAdam(ps, torch.tensor(0.1), foreach=False),
]


@pytest.mark.parametrize(
    "make", OPTIMIZERS, ids=lambda make: type(make([nn.Parameter(X)])).__name__
)
def test_optimizers_go_on_in_another_parallelism(tmp_path, make):
    """Fully sharded over two ranks, then replicas on three: as one process that went on."""

    def step(model, optimizer):
        def loss():
            optimizer.zero_grad()
            value = model(X).square().mean()
            value.backward()
            return value

        optimizer.step(loss)

    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6)).double()
    one = copy.deepcopy(start)
    optimizer = make(one.parameters())
    for _ in range(4):
        step(one, optimizer)

    def save(rank):
        model = copy.deepcopy(start)
        for layer in model:
            fully_shard(layer, mesh_of(2))
        fully_shard(model, mesh_of(2))
        optimizer = make(model.parameters())
        for _ in range(2):
            step(model, optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "c")

    def go_on(rank):
        model = data_parallel(copy.deepcopy(start), mesh_of(3))
        optimizer = make(model.parameters())
        checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
        for _ in range(2):
            step(model, optimizer)
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)

    simulate(save, 2)
    simulate(go_on, 3)


def small(place, size, meta=False):
    model = nn.Linear(6, 5).double()
    for name, p in list(model.named_parameters()):
        q = nn.Parameter(distribute_tensor(p.detach(), mesh_of(size), [place]))
        setattr(model, name, q)
    return model.to("meta") if meta else model


def trained(model, optimizer, steps):
    def loss():
        optimizer.zero_grad()
        value = model(X).square().mean()
        value.backward()
        return value

    return [float(whole(optimizer.step(loss).detach())) for _ in range(steps)]


@pytest.mark.parametrize("how", ["load", "full"])
@pytest.mark.parametrize("kind", ["Adagrad", "LBFGS", "Adam"])
def test_optimizers_of_parameters_on_the_meta_device(tmp_path, kind, how):
    """What the optimizer made for them then, and lists of tensors, whole ones, too."""
    options = {"lr": torch.tensor(0.1)} if kind == "Adam" else {"lr": 0.1}
    make = lambda model: getattr(torch.optim, kind)(model.parameters(), **options)  # noqa: E731
    full = checkpoint.StateDictOptions(full_state_dict=True)
    states = {}

    def save(rank):
        torch.manual_seed(3)
        model = small(Shard(0), 2)
        optimizer = make(model)
        trained(model, optimizer, 2)
        checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
        taken = checkpoint.get_state_dict(model, optimizer, options=full)
        states[rank] = copy.deepcopy(taken)
        return trained(model, optimizer, 2)

    def go_on(rank):
        model = small(Replicate() if how == "load" else Shard(0), 3, meta=True)
        optimizer = make(model)
        if how == "load":
            checkpoint.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
        else:
            mine, its = states[0]
            checkpoint.set_state_dict(
                model, optimizer, model_state_dict=mine, optim_state_dict=its
            )
        return trained(model, optimizer, 2)

    want = simulate(save, 2)
    got = simulate(go_on, 3)
    torch.testing.assert_close(got, [*want, want[0]], rtol=1e-10, atol=0)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_sizes_that_leave_ranks_without_elements(tmp_path, before, after):
    x = torch.arange(30.0).view(5, 6)

    def state(size, factor):
        mesh = mesh_of(size)
        return {
            "rows": distribute_tensor(x * factor, mesh, [Shard(0)]),
            "columns": distribute_tensor((x * factor).bfloat16(), mesh, [Shard(1)]),
            "scalar": distribute_tensor(torch.tensor(2.0) * factor, mesh, [Replicate()]),
            "empty": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]),
            "one": distribute_tensor(torch.ones(1, 3) * factor, mesh, [Shard(0)]),
        }

    simulate(lambda rank: checkpoint.save(state(before, 1), tmp_path / "c"), before)

    def load(rank):
        got, want = state(after, 0), state(after, 1)
        checkpoint.load(got, tmp_path / "c")
        for key in want:
            assert torch.equal(whole(got[key]), whole(want[key])), key

    simulate(load, after)
