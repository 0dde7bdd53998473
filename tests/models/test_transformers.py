"""Models of the ``transformers`` library, as they are, batch-sharded and with tensor-parallel weights.

Everything is compared with the plain model in float64. Some of them compute norms or router weights, and all
of them their own loss, in float32: what passes through that is compared to float32 rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
import copy
from dataclasses import dataclass
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    mark_sharding,
    propagate,
    rng,
    simulate,
)
from shardwise.events import CommEvent, FallbackEvent, observe
from shardwise.layout.mesh import Mesh

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

# transformers warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

R, S = Replicate(), Shard
IDS = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
PIXELS = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()
CLASSES = torch.tensor([0, 1, 2, 4])
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {"vocab_size": 32, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Model:
    """A model to build.

    Attributes:
        config, task: Names in ``transformers``.
        options: Of the config.
        inputs: What the model is called with.
        columns: Ends of the names of linear modules whose outputs are cut over tp.
        rows: Those whose inputs are cut; their results are summed.
        norm32: Some values inside are float32 in a float64 model.
        sums: All-reduces of a forward over tp.
    """

    config: str
    task: str
    options: dict[str, Any]
    inputs: dict[str, Tensor]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norm32: bool = False
    sums: int = 4

    def build(self, **more: Any) -> nn.Module:
        """The model with random weights, in float64 and eval mode."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options, **more)
        return getattr(transformers, self.task)(config).double().eval()


QKV = ("q_proj", "k_proj", "v_proj")
MODELS = {
    "llama": Model(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**SIZES, **TEXT, "num_key_value_heads": 2},
        {"input_ids": IDS, "labels": IDS},
        (*QKV, "gate_proj", "up_proj"),
        ("o_proj", "down_proj"),
        norm32=True,
    ),
    "mixtral": Model(
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            **SIZES,
            **TEXT,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "output_router_logits": True,
            "experts_implementation": "batched_mm",
        },
        {"input_ids": IDS, "labels": IDS},
        QKV,
        ("o_proj",),
        norm32=True,
        sums=2,
    ),
    "gpt2": Model(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"input_ids": IDS, "labels": IDS},
        ("c_fc",),
        ("c_proj",),
    ),
    "bert": Model(
        "BertConfig",
        "BertForMaskedLM",
        {**SIZES, "vocab_size": 32, "max_position_embeddings": 32},
        {"input_ids": IDS, "labels": IDS.masked_fill(IDS % 3 == 0, -100)},
        ("query", "key", "value", "intermediate.dense"),
        ("attention.output.dense", "output.dense"),
    ),
    "t5": Model(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 32,
            "d_model": 16,
            "d_ff": 24,
            "d_kv": 4,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        {"input_ids": IDS, "labels": IDS[:, :5].contiguous()},
        ("q", "k", "v", "wi"),
        ("o", "wo"),
        norm32=True,
        sums=10,
    ),
    "vit": Model(
        "ViTConfig",
        "ViTForImageClassification",
        {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 5},
        {"pixel_values": PIXELS, "labels": CLASSES},
        (*QKV, "query", "key", "value", "intermediate.dense", "fc1"),
        ("o_proj", "attention.output.dense", "output.dense", "fc2"),
    ),
    "resnet": Model(
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5},
        {"pixel_values": torch.cat([PIXELS, PIXELS], 3), "labels": CLASSES},
        sums=0,
    ),
}
LANGUAGE = ("llama", "gpt2", "t5", "mixtral")
every = pytest.mark.parametrize("name", MODELS)

# Mesh, whether the batch is cut over its first axis, whether weights are cut over its last.
DP, TP, DP_TP, WHOLE = (
    ((2,), True, False),
    ((2,), False, True),
    ((2, 2), True, True),
    ((2,), False, False),
)
LAYOUTS = (((4,), True, False), TP, DP_TP)


def partition(model: Model) -> Callable[[str, nn.Module, Any], None]:
    """Cuts the named linear modules over the last axis of the mesh; a Conv1D has its weight the other way."""

    def cut(name: str, sub: nn.Module, mesh: Any) -> None:
        column = any(f".{name}".endswith(f".{end}") for end in model.columns)
        row = any(f".{name}".endswith(f".{end}") for end in model.rows)
        other_way = type(sub).__name__ == "Conv1D"
        for key, p in list(sub.named_parameters(recurse=False)):
            last: Any = R
            if column:
                last = S(p.ndim - 1 if other_way else 0)
            elif row and p.ndim == 2:
                last = S(0 if other_way else 1)
            laid = distribute_tensor(p.detach(), mesh, [*[R] * (mesh.ndim - 1), last])
            sub.register_parameter(key, nn.Parameter(laid))

    return cut


def distributed(model: Model, plain: nn.Module, mesh: Any, tp: bool) -> nn.Module:
    return distribute_module(copy.deepcopy(plain), mesh, partition(model) if tp else None)


def placed(inputs: dict[str, Tensor], mesh: Any, dp: bool) -> dict[str, Any]:
    ps = [S(0) if dp else R, *[R] * (mesh.ndim - 1)]
    return {k: distribute_tensor(v, mesh, ps) for k, v in inputs.items()}


def on_mesh(shape: tuple[int, ...], fn: Callable[[Any], Any]) -> list[Any]:
    return simulate(lambda: fn(init_device_mesh("cpu", shape)), math.prod(shape))


def objective(logits: Any, labels: Any) -> Any:
    """A loss in float64; the models' own are in float32."""
    labels = labels.clamp(min=0)
    return (
        F.cross_entropy(logits.flatten(0, -2), labels.flatten()) + 0.1 * logits.square().mean()
    )


def close(what: str, got: Any, want: Tensor, tol: float) -> None:
    """Equal up to ``tol`` of the largest element."""
    whole = got.detach().full_tensor() if isinstance(got, DTensor) else got.detach()
    assert whole.dtype == want.dtype, what
    scale = max(want.abs().max().item(), 1e-6)
    torch.testing.assert_close(
        whole, want.detach(), rtol=tol, atol=tol * scale, msg=lambda m: f"{what}: {m}"
    )


def same_gradients(net: nn.Module, plain: nn.Module, tol: float) -> None:
    want = dict(plain.named_parameters())
    for name, p in net.named_parameters():
        g = want[name].grad
        assert (p.grad is None) == (g is None), name
        if g is not None:
            close(name, p.grad, g, tol)


def train_step(net: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Logits and loss; gradients of a loss in float64 and of the model's own are left."""
    out = net(**inputs)
    objective(out.logits, inputs["labels"]).backward(retain_graph=True)
    out.loss.backward()
    return out.logits, out.loss


@every
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_forward_and_backward(name: str, attention: str) -> None:
    model = MODELS[name]
    if name == "resnet" and attention == "eager":
        return
    plain = model.build(**({} if name == "resnet" else {"attn_implementation": attention}))
    want, loss = train_step(plain, model.inputs)
    for shape, dp, tp in LAYOUTS if attention == "sdpa" else (DP_TP,):
        tol = 1e-6 if model.norm32 and tp else 1e-9

        def on_rank(mesh: Any, dp: bool = dp, tp: bool = tp, tol: float = tol) -> None:
            net = distributed(model, plain, mesh, tp)
            inputs = placed(model.inputs, mesh, dp)
            got, own = train_step(net, inputs)
            close("logits", got, want, tol)
            assert not dp or got.placements[0] == S(0)
            close("loss", own, loss, 1e-6)
            same_gradients(net, plain, max(tol, 1e-7))

        on_mesh(shape, on_rank)


def moved(model: Model, plain: nn.Module, how: Any) -> tuple[Counter[Any], list[FallbackEvent]]:
    """What one rank moves in a warm forward: counts of (kind, axis, shape); and fallbacks."""
    shape, dp, tp = how

    def on_rank(mesh: Any) -> tuple[Counter[Any], list[FallbackEvent]]:
        net = distributed(model, plain, mesh, tp)
        inputs = placed(model.inputs, mesh, dp)
        net(**inputs)
        events: list[Any] = []
        with observe(events.append):
            net(**inputs)
        mine = [e for e in events if isinstance(e, CommEvent) and e.rank == 0]
        slow = [e for e in events if isinstance(e, FallbackEvent)]
        return Counter((e.kind, e.tag, e.shape) for e in mine), slow

    return on_mesh(shape, on_rank)[0]


@pytest.mark.parametrize("name", [n for n in MODELS if n != "mixtral"])
def test_a_forward_moves_the_loss_and_one_sum_a_row_cut_weight(name: str) -> None:
    model = MODELS[name]
    plain = model.build()
    for how in (DP, DP_TP):
        (shape, dp, tp) = how
        tag = str(len(shape) - 1)
        counts, slow = moved(model, plain, how)
        assert not slow
        if dp:
            assert counts.pop(("all_reduce", "0", ())) == 1
        width = 16
        sums = [key for key in counts if key[0] == "all_reduce" and key[1] == tag]
        assert set(sums) == set(counts), "something else was moved"
        assert all(key[2][-1] == width for key in sums)
        assert sum(counts.values()) == (model.sums if tp else 0)


def test_what_a_mixture_of_experts_moves() -> None:
    """The load-balancing loss counts the tokens of each expert."""
    model = MODELS["mixtral"]
    counts, _ = moved(model, model.build(), DP)
    assert max(math.prod(shape) for kind, _, shape in counts if kind == "all_reduce") <= 4
    gathered = [shape for kind, _, shape in counts if kind == "all_gather"]
    assert all(math.prod(shape) <= IDS.numel() for shape in gathered)


@pytest.mark.parametrize(
    ("name", "side"), [("bert", "right"), ("llama", "left"), ("t5", "right"), ("gpt2", "left")]
)
def test_padded_batch(name: str, side: str) -> None:
    model = MODELS[name]
    mask = torch.ones_like(IDS)
    mask[1, slice(0, 3) if side == "left" else slice(3, 6)] = 0
    mask[2, slice(0, 1) if side == "left" else slice(5, 6)] = 0
    given = {**model.inputs, "attention_mask": mask}
    plain = model.build()
    want, loss = train_step(plain, given)

    def on_rank(mesh: Any) -> None:
        net = distributed(model, plain, mesh, True)
        got, own = train_step(net, placed(given, mesh, True))
        close("logits", got, want, 1e-6 if model.norm32 else 1e-9)
        close("loss", own, loss, 1e-6)
        same_gradients(net, plain, 1e-6)

    on_mesh((2, 2), on_rank)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_dropout_draws_what_one_device_draws(name: str) -> None:
    model = MODELS[name]
    plain = model.build().train()
    with rng(like="torch"):
        torch.manual_seed(5)
        want, _ = train_step(plain, model.inputs)

        def on_rank(mesh: Any) -> None:
            net = distributed(model, plain, mesh, True).train()
            torch.manual_seed(5)
            got, _ = train_step(net, placed(model.inputs, mesh, True))
            close("logits", got, want, 1e-6 if model.norm32 else 1e-9)
            same_gradients(net, plain, 1e-6)

        on_mesh((2, 2), on_rank)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = MODELS[name]
    plain = model.build().train()
    with rng(like="torch"):
        torch.manual_seed(5)
        plain(**model.inputs).loss.backward()

        def on_rank(mesh: Any) -> None:
            net = distributed(model, plain, mesh, True).train()
            net.gradient_checkpointing_enable({"use_reentrant": reentrant})
            torch.manual_seed(5)
            net(**placed(model.inputs, mesh, True)).loss.backward()
            same_gradients(net, plain, 1e-6)

        on_mesh((2, 2), on_rank)


def fit(net: nn.Module, inputs: dict[str, Any]) -> None:
    """What a training script does."""
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(opt)
    for _ in range(3):
        opt.zero_grad()
        out = net(**inputs)
        objective(out.logits, inputs["labels"]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        schedule.step()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "resnet"])
def test_training_and_state(name: str) -> None:
    """Three steps of AdamW; then the state goes into other layouts, and back to one device."""
    model = MODELS[name]
    plain = model.build()
    start = copy.deepcopy(plain)
    # Adam divides by roots of squares, and makes any rounding of a tiny gradient a whole step.
    tol = 1e-4 if model.norm32 else 1e-7

    def same(net: nn.Module, other: nn.Module) -> None:
        for (key, p), q in zip(net.named_parameters(), other.parameters()):
            assert (p.detach().full_tensor() - q.detach()).abs().max() < tol, key

    fit(plain, model.inputs)

    def on_rank(mesh: Any) -> None:
        net = distributed(model, start, mesh, True)
        fit(net, placed(model.inputs, mesh, True))
        same(net, plain)
        other = distributed(model, start, mesh, False)
        assert not any(other.load_state_dict(net.state_dict()))
        same(other, plain)
        net.load_state_dict(start.state_dict())
        same(net, start)

    on_mesh((2, 2), on_rank)


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, DP) for name in LANGUAGE), ("llama", DP_TP), ("t5", DP_TP), ("gpt2", WHOLE)],
    ids=str,
)
def test_greedy_generation(name: str, how: Any) -> None:
    model, (shape, dp, tp) = MODELS[name], how
    plain = model.build()
    asked: list[dict[str, Any]] = [{}, {"use_cache": False}] if how is DP else [{}]
    for more in asked:
        options = {"max_new_tokens": 3, "do_sample": False, **more}
        want = plain.generate(IDS, **options)

        def on_rank(mesh: Any, options: Any = options, want: Any = want) -> None:
            net = distributed(model, plain, mesh, tp)
            got = net.generate(placed({"ids": IDS}, mesh, dp)["ids"], **options)
            assert torch.equal(got.full_tensor(), want)
            assert not dp or got.placements[0] == S(0)

        on_mesh(shape, on_rank)


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"do_sample": True}], ids=["beams", "sample"]
)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generation(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]
    plain = model.build()
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    given = {"input_ids": IDS, "attention_mask": mask}
    with rng(like="torch"):
        torch.manual_seed(5)
        want = plain.generate(**given, max_new_tokens=3, **options)

        def on_rank(mesh: Any) -> None:
            net = distributed(model, plain, mesh, False)
            torch.manual_seed(5)
            got = net.generate(**placed(given, mesh, True), max_new_tokens=3, **options)
            assert torch.equal(got.full_tensor(), want)

        on_mesh((2,), on_rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["autocast", "bfloat16 weights"])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_low_precision(name: str, dtype: torch.dtype | None) -> None:
    """A forward per row is what one device computes; gradients are summed in another order."""
    model = MODELS[name]
    plain = model.build().float() if dtype else model.build().bfloat16()
    given = {
        k: v.to(plain.dtype) if v.is_floating_point() else v for k, v in model.inputs.items()
    }

    def step(net: nn.Module, inputs: dict[str, Any]) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            out = net(**inputs)
        out.loss.backward()
        return out

    want = step(plain, given)

    def on_rank(mesh: Any) -> None:
        net = distributed(model, plain, mesh, False)
        got = step(net, placed(given, mesh, True))
        close("logits", got.logits, want.logits, 1e-6)
        close("loss", got.loss, want.loss, 1e-2)
        same_gradients(net, plain, 3e-2)

    on_mesh((2,), on_rank)


def test_grouped_experts_in_float32() -> None:
    """The library's default for experts; torch has it in float32 and less."""
    model = MODELS["mixtral"]
    plain = model.build().float()
    plain.set_experts_implementation("grouped_mm")
    plain(**model.inputs).loss.backward()
    eager = copy.deepcopy(plain)
    eager.set_experts_implementation("eager")

    def on_rank(mesh: Any) -> None:
        for one in (plain, eager):
            net = distributed(model, one, mesh, True)
            net.zero_grad()
            net(**placed(model.inputs, mesh, True)).loss.backward()
            same_gradients(net, plain, 1e-5)

    on_mesh((2, 2), on_rank)


@pytest.mark.parametrize("cut", ["experts", "columns"])
def test_experts_cut_over_tp(cut: str) -> None:
    """Whole experts on a rank, or a part of each; over dp the tokens' products stay with the ranks."""
    model = MODELS["mixtral"]
    plain = model.build().float()
    plain.set_experts_implementation("grouped_mm")
    plain(**model.inputs).loss.backward()
    dims = {"experts": (0, 0), "columns": (1, 2)}[cut]

    def on_rank(mesh: Any) -> list[tuple[str, str, int]]:
        def part(name: str, sub: nn.Module, mesh: Any) -> None:
            if name.endswith(".experts"):
                for key, dim in zip(("gate_up_proj", "down_proj"), dims):
                    w = distribute_tensor(getattr(sub, key).detach(), mesh, [R, S(dim)])
                    sub.register_parameter(key, nn.Parameter(w))

        net = distribute_module(copy.deepcopy(plain), mesh, part)
        net.zero_grad()
        given = placed(model.inputs, mesh, True)
        net(**given).loss.backward()
        same_gradients(net, plain, 1e-5)
        events: list[Any] = []
        with observe(events.append):
            net(**given)
        return [
            (e.kind, e.tag, math.prod(e.shape))
            for e in events
            if isinstance(e, CommEvent) and e.rank == 0
        ]

    moved = on_mesh((2, 2), on_rank)[0]
    summed = [n for kind, axis, n in moved if kind == "all_reduce" and axis == "1"]
    tokens = IDS.numel() // 2
    hidden, inner = 16 * tokens, 24 * 2 * tokens  # two experts a token
    gate_and_up = [inner] * 2 * 2 * (cut == "experts")
    assert sorted(summed) == sorted([hidden] * 2 + gate_and_up)


def test_hidden_states_attentions_and_cache() -> None:
    model = MODELS["llama"]
    plain = model.build(attn_implementation="eager")
    asked = {"output_hidden_states": True, "output_attentions": True}
    want = plain(IDS, **asked)

    def on_rank(mesh: Any) -> None:
        net = distributed(model, plain, mesh, True)
        ids = placed({"ids": IDS}, mesh, True)["ids"]
        got = net(ids, **asked)
        for a, b in zip(
            got.hidden_states + got.attentions, want.hidden_states + want.attentions
        ):
            close("state", a, b, 1e-6)
        close("tuple", net(ids, return_dict=False)[0], want.logits, 1e-6)
        with torch.inference_mode():
            first = net(ids[:, :4], use_cache=True)
            rest = net(ids[:, 4:], past_key_values=first.past_key_values)
        close("rest", rest.logits, want.logits[:, 4:], 1e-6)

    on_mesh((2, 2), on_rank)


def test_plain_inputs_count_as_replicated() -> None:
    model = MODELS["bert"]
    plain = model.build()
    want, _ = train_step(plain, model.inputs)

    def on_rank(mesh: Any) -> None:
        net = distributed(model, plain, mesh, True)
        got, _ = train_step(net, model.inputs)
        close("logits", got, want, 1e-9)
        same_gradients(net, plain, 1e-7)

    on_mesh((2,), on_rank)


def test_saved_and_loaded(tmp_path: Path) -> None:
    """``save_pretrained`` of the whole values, ``from_pretrained``, and distributed again."""
    model = MODELS["llama"]
    plain = model.build()
    want = plain(**model.inputs).logits

    def on_rank(mesh: Any) -> None:
        net = distributed(model, plain, mesh, True)
        whole = {k: v.full_tensor() for k, v in net.state_dict().items()}
        if mesh.get_rank() == 0:
            net.save_pretrained(tmp_path, state_dict=whole)
        torch.manual_seed(0)
        first = DTensor.from_local(torch.zeros(()), mesh).full_tensor()  # rank 0 has saved
        assert first == 0
        again = type(plain).from_pretrained(tmp_path)
        for p, q in zip(again.parameters(), plain.parameters()):
            assert torch.equal(p, q)
        net = distributed(model, again, mesh, True)
        close("logits", net(**placed(model.inputs, mesh, True)).logits, want, 1e-6)

    on_mesh((2, 2), on_rank)


@pytest.mark.parametrize(
    ("name", "marked"),
    [
        ("llama", ("q_proj", "up_proj")),
        ("bert", ("query", "intermediate.dense")),
        ("t5", ("q", "wi")),
        ("vit", ("q_proj", "query", "fc1", "intermediate.dense")),
    ],
)
def test_two_marked_weights_a_layer_give_the_manual_plan(
    name: str, marked: tuple[str, ...]
) -> None:
    """Queries and hidden units over tp, the batch over dp: all others follow, T5's biases of heads too."""
    model = MODELS[name]
    plain = model.build()
    mesh = Mesh.of("cpu", (2, 2), (0, 1, 2, 3))
    for inner, sub in plain.named_modules():
        if isinstance(sub, nn.Linear) and f".{inner}".endswith(tuple(f".{m}" for m in marked)):
            mark_sharding(sub.weight, [None, S(0)])
    inputs = {k: mark_sharding(v.clone(), [S(0), R]) for k, v in model.inputs.items()}
    plan = propagate(plain, mesh=mesh, **inputs)
    ends = [tuple(f".{m}.weight" for m in names) for names in (model.columns, model.rows)]
    for inner, sub in plain.named_modules():
        if isinstance(sub, nn.Linear):
            key = f"{inner}.weight"
            column, row = (f".{key}".endswith(e) for e in ends)
            want = (R, S(0)) if column else (R, S(1)) if row else (R, R)
            assert plan.layouts[key].placements == want, f"{key}\n{plan}"
    logits, _ = train_step(plain, model.inputs)
    tol = 1e-6 if model.norm32 else 1e-9

    def on_rank(mesh: Any) -> None:
        net = plan.apply(copy.deepcopy(plain))
        _, placed_inputs = plan.distribute(**inputs)
        got, _ = train_step(net, placed_inputs)
        assert got.placements[0] == S(0)
        close("logits", got, logits, tol)
        same_gradients(net, plain, max(tol, 1e-7))

    on_mesh((2, 2), on_rank)
