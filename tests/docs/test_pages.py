"""Every Python block of the pages runs as it is written; what the pages name is there.

A page's blocks run one after the other in one namespace, on virtual ranks. `BEFORE` makes what a block takes for
granted (a model, a mesh), `AFTER` looks at what it has made. A block that is in neither table fails.
"""

import os
from pathlib import Path
import re
import shlex
import subprocess
import sys
from textwrap import dedent

import pytest

import shardwise

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
PAGES += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))
ELSEWHERE = {  # (page, block): run by another test
    ("README.md", 0): "tests/docs/test_readme.py",
    ("docs/propagation.md", 0): "tests/docs/test_propagation.py",
}

COMMON = """
import torch
from torch import nn
import torch.nn.functional as F
import shardwise
from shardwise import *
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
"""
DISTRIBUTED = """
model = distribute_module(nn.Linear(4, 3), mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
ids = torch.randint(32, (4, 6))
"""
BLOCKS = """
from shardwise.parallel import *
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
model = Net()
"""
BEFORE = {
    ("docs/capture.md", 0): DISTRIBUTED
    + """
place = lambda x: distribute_tensor(x, mesh, [Shard(0)])
loader = [(place(torch.randn(8, 4)), place(torch.randint(3, (8,)))) for _ in range(4)]
""",
    ("docs/checkpoint.md", 0): DISTRIBUTED,
    ("docs/checkpoint.md", 1): """
checkpoint.save_safetensors(model, "llama")
model_state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
""",
    ("docs/models.md", 0): LLAMA,
    ("docs/models.md", 1): "model, ids = LlamaForCausalLM(config), torch.randint(32, (4, 6))",
    ("docs/migration.md", 0): BLOCKS
    + """
model = Block()
batches = [torch.randn(2, 4) for _ in range(4)]
""",
    ("docs/parallel.md", 0): BLOCKS,
    ("docs/parallel.md", 1): "width, heads, kv_heads = 24, 6, 3",
    ("docs/redistribute.md", 0): """
whole = torch.randn(8, 8)
x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
other_mesh, serve_mesh = DeviceMesh("cpu", [3, 1]), DeviceMesh("cpu", [0, 2])
xs = [x, x + 1]
sd = {"head.weight": distribute_tensor(whole, DeviceMesh("cpu", [0, 1, 2, 3]), [Replicate()])}
""",
    ("docs/redistribute.md", 1): """
mesh, w = mesh["tp"], torch.randn(8, 4)
lengths = (3, 5)
mine = torch.randn(lengths[mesh.get_local_rank()], 2)
""",
    (
        "docs/redistribute.md",
        2,
    ): "x = w = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])",
    ("docs/design/0005-block-cyclic-is-a-view.md", 0): """
mesh = mesh["tp"]
blocks, ranks, block, k, n = 3, 2, 2, 5, 12
x = torch.randn(n, k)
mine = x.view(blocks, ranks, block, k)[:, mesh.get_local_rank()].reshape(-1, k)
""",
}
AFTER = {
    ("docs/capture.md", 0): "assert loss.ndim == 0",
    ("docs/checkpoint.md", 0): "assert checkpoint.latest('runs/a').name == 'step-00001000'",
    ("docs/checkpoint.md", 1): """
for key, value in model.state_dict().items():
    assert torch.equal(model_state[key].full_tensor(), value.full_tensor())
""",
    ("docs/migration.md", 0): """
assert optimizer_state["state"]["up.weight"]["step"] == 2
""",
    ("docs/models.md", 0): """
assert model.model.layers[0].mlp.up_proj.weight.grad.placements == (Replicate(), Shard(0))
""",
    ("docs/models.md", 1): """
assert model.model.layers[0].mlp.down_proj.weight.placements == (Replicate(), Shard(1))
""",
    ("docs/parallel.md", 0): """
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
assert model.blocks[0].up.weight.layout.dims == ((1, 0), ())
""",
    ("docs/redistribute.md", 0): """
assert torch.equal(y.full_tensor(), whole)
assert sd["head.weight"].device_mesh == serve_mesh
""",
    ("docs/redistribute.md", 2): "assert torch.equal(y.full_tensor(), x.full_tensor())",
    (
        "docs/design/0005-block-cyclic-is-a-view.md",
        0,
    ): "assert torch.equal(rows.full_tensor(), x)",
}


def blocks_of(page, language):
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.S | re.M)
    return [dedent(block) for block in found]


CODE = {page: blocks_of(page, "python") for page in PAGES}


def test_every_block_is_run_somewhere():
    there = {(page, i) for page, blocks in CODE.items() for i in range(len(blocks))}
    known = {*BEFORE, *ELSEWHERE, ("CONTRIBUTING.md", 0)}
    assert there == known, "each Python block needs an entry in BEFORE, and each entry a block"
    assert AFTER.keys() <= BEFORE.keys()
    for (page, _), test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in BEFORE}))
def test_the_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def rank(_):
        names = {"__name__": "program"}
        exec(COMMON, names)
        for i, code in enumerate(CODE[page]):
            exec(BEFORE[page, i], names)
            exec(compile(code, f"{page}, block {i}", "exec"), names)
            exec(AFTER.get((page, i), ""), names)

    shardwise.simulate(rank, 4)
    if page == "docs/checkpoint.md":
        the_commands_run(page)


def the_commands_run(page):
    """The lines for a shell, on what the page's program has left."""
    from typer.testing import CliRunner

    from shardwise.cli import app

    for line in "".join(blocks_of(page, "sh")).splitlines():
        program, *words = shlex.split(line)
        assert program == "shardwise"
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{line}: {done.output}"


def test_the_rule_that_is_shown_is_one_of_ours():
    ours = (ROOT / "src/shardwise/rules/matmul.py").read_text(encoding="utf-8")
    assert CODE["CONTRIBUTING.md"][0].strip() in ours


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_is_there(page):
    """Files, make's targets and links."""
    text = (ROOT / page).read_text(encoding="utf-8")
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (here / target).exists(), f"{page} links to {target}"
    inside = r"\b((?:src|tests|examples|benchmarks|docs)/[\w/.-]*\w)"
    for name in re.findall(inside, text):
        assert (ROOT / name).exists(), f"{page} names {name}"
    rooms = "|".join(p.name for p in (ROOT / "src/shardwise").iterdir() if p.is_dir())
    for name in re.findall(rf"`((?:{rooms})/[\w/]+\.py)", text):
        assert (ROOT / "src/shardwise" / name).exists(), f"{page} names {name}"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for name in re.findall(r"(?:`|^)make ([a-z]+)", text, re.M):
        assert name in targets, f"{page} names make {name}"


def test_options_of_the_scripts_that_are_named_exist():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for script, options in re.findall(
            r"((?:benchmarks|examples)/\w+\.py)((?: +--?[\w-]+(?: [\w.]+)?)*)", text
        ):
            source = (ROOT / script).read_text(encoding="utf-8")
            for option in re.findall(r"--[\w-]+", options):
                assert f'"{option}"' in source, f"{page}: {script} has no {option}"


def test_public_names_on_the_pages_exist():
    """``sw.x`` and ``shardwise.x``."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"\b(?:sw|shardwise)\.([a-z_]+)\b(?!/)", text):
            assert name == "json" or hasattr(shardwise, name), f"{page} names shardwise.{name}"


def test_rooms_are_there_without_an_import_of_their_own():
    code = "import shardwise as sw; sw.parallel.fully_shard; sw.debug.CommDebugMode; sw.testing.sweep"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardwise.nothing  # noqa: B018
