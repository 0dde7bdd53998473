"""What a call costs: plain local torch, torch's DTensor and shardwise, interleaved in one process.

Torch's "fake" process group of 8 ranks moves no data, so what is measured is each library's own work. Every
ratio is the median of the ratios of neighbouring samples, so that slow drift of the machine drops out.

    python benchmarks/overhead.py                # all tables, as markdown
    python benchmarks/overhead.py ops block      # some
    python benchmarks/overhead.py --json out.json
"""

import argparse
from collections.abc import Callable
import json
import math
import platform
import statistics
import time
from typing import Any
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

WORLD = 8
LIBS = {"torch": torch_dtensor, "shardwise": shardwise}

# input: (local shape, layout on the mesh); ints are indices below the bound
INPUTS = {
    "x": ((4, 16), "S0"),
    "y": ((4, 16), "S0"),
    "h": ((4, 6, 16), "S0"),
    "w": ((16, 16), "R"),
    "b": ((16,), "R"),
    "p": ((4, 6, 8), "S0"),
    "q": ((4, 8, 6), "S0"),
    "table": ((32, 16), "R"),
    "ids": ((4, 6), "S0", 32),
    "logits": ((8, 16), "S0"),
    "labels": ((8,), "S0", 16),
}
OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("x y", lambda x, y: x + y),
    "mul by a number": ("x", lambda x: x * 2.0),
    "relu": ("x", torch.relu),
    "gelu": ("x", F.gelu),
    "silu": ("x", F.silu),
    "linear, bias": ("h w b", F.linear),
    "matmul": ("x w", torch.matmul),
    "bmm": ("p q", torch.bmm),
    "transpose": ("h", lambda h: h.transpose(0, 1)),
    "view heads": ("h", lambda h: h.view(-1, 6, 2, 8)),
    "softmax": ("x", lambda x: x.softmax(-1)),
    "layer_norm": ("x b", lambda x, b: F.layer_norm(x, (16,), b, b)),
    "rms_norm": ("x b", lambda x, b: F.rms_norm(x, (16,), b)),
    "sum": ("x", lambda x: x.sum()),
    "mean": ("x", lambda x: x.mean()),
    "embedding": ("ids table", F.embedding),
    "cross_entropy": ("logits labels", F.cross_entropy),
    "cat": ("x y", lambda x, y: torch.cat([x, y], -1)),
    "split": ("x", lambda x: x.split(4, -1)),
    "slice": ("x", lambda x: x[:, 2:10]),
    "to(bf16)": ("x", lambda x: x.to(torch.bfloat16)),
}
COLD: dict[str, Callable[..., Any]] = {
    "add": lambda x, w: x + x,
    "linear": F.linear,
    "softmax": lambda x, w: x.softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (16,)),
    "sum(dim)": lambda x, w: x.sum(-1),
    "view heads": lambda x, w: x.view(x.shape[0], x.shape[1], 2, 8),
    "cat": lambda x, w: torch.cat([x, x], -1),
}


def placements(lib: Any, spec: str) -> list[Any]:
    """``"S0 R P"`` as placements of a library."""
    made = {"R": lib.Replicate, "P": lib.Partial}
    return [lib.Shard(int(s[1:])) if s[0] == "S" else made[s]() for s in spec.split()]


def wrap(lib: Any, local: torch.Tensor, spec: str) -> Any:
    """A local tensor as a distributed one, without communication; itself for plain torch."""
    if lib is None:
        return local
    return lib.DTensor.from_local(local, MESHES[lib], placements(lib, spec), run_check=False)


MESHES: dict[Any, Any] = {}


def interleave(
    fns: dict[str, Callable[[], Any]], reps: int, target: float = 1e-3
) -> dict[str, list[float]]:
    """us per call of each, samples taken A B C, C B A, ...; those that raise are left out."""
    inner: dict[str, int] = {}
    out: dict[str, list[float]] = {}
    for name, fn in fns.items():
        try:
            fn(), fn()
            start = time.perf_counter()
            fn()
            inner[name] = min(1000, max(1, int(target / (time.perf_counter() - start))))
            out[name] = []
        except Exception as error:  # a peer that cannot run an op is shown as such
            print(f"({name}: {type(error).__name__}: {str(error).splitlines()[0][:100]})")
    for rep in range(reps):
        for name, count in list(inner.items())[:: 1 if rep % 2 == 0 else -1]:
            fn = fns[name]
            start = time.perf_counter()
            for _ in range(count):
                fn()
            out[name].append((time.perf_counter() - start) / count * 1e6)
    return out


def ratio(a: list[float] | None, b: list[float] | None) -> float | None:
    """Median ratio of neighbouring samples."""
    return statistics.median(x / y for x, y in zip(a, b)) if a and b else None


def table(
    title: str, rows: dict[str, dict[str, list[float]]], base: str = "local"
) -> dict[str, Any]:
    """Print a markdown table; return its figures."""
    print(
        f"\n### {title}\n\n| | {base}, us | torch | shardwise | shardwise/torch |\n| --- | --- | --- | --- | --- |"
    )
    columns: list[list[float]] = [[], [], []]
    out: dict[str, Any] = {}
    for name, got in rows.items():
        figures = [
            ratio(got.get("torch"), got.get(base)),
            ratio(got.get("shardwise"), got.get(base)),
            ratio(got.get("shardwise"), got.get("torch")),
        ]
        for column, figure in zip(columns, figures):
            if figure is not None:
                column.append(figure)
        cells = ["-" if f is None else f"{f:.2f}" for f in figures]
        print(f"| {name} | {statistics.median(got[base]):.1f} | {' | '.join(cells)} |")
        out[name] = figures
    means = [
        math.exp(statistics.fmean(map(math.log, c))) if c else float("nan") for c in columns
    ]
    print(f"| **geometric mean** | | {' | '.join(f'**{m:.2f}**' for m in means)} |")
    return out | {"geometric mean": means}


def make_inputs(lib: Any, requires_grad: bool) -> dict[str, Any]:
    """The inputs of ``OPS`` for a library."""
    torch.manual_seed(0)
    out = {}
    for name, (shape, spec, *bound) in INPUTS.items():
        local = torch.randint(bound[0], shape) if bound else torch.randn(shape)
        x = wrap(lib, local, spec)
        out[name] = x.requires_grad_(requires_grad) if not bound else x
    return out


def forward_backward(lib: Any, fn: Callable[..., Any], args: list[Any]) -> Callable[[], Any]:
    """A thunk that runs ``fn`` and differentiates its results."""
    many = lambda y: list(y) if isinstance(y, (tuple, list)) else [y]  # noqa: E731
    wanted = list({id(a): a for a in args if a.requires_grad}.values())
    grads = []
    for y in many(fn(*args)):
        if lib is None:
            grads.append(torch.ones_like(y))
            continue
        spec = [lib.Replicate() if p.is_partial() else p for p in y.placements]
        local = torch.ones_like(y.detach().to_local())
        grads.append(lib.DTensor.from_local(local, MESHES[lib], spec, run_check=False))
    return lambda: torch.autograd.grad(many(fn(*args)), wanted, grads)


def ops(reps: int) -> dict[str, Any]:
    """Warm calls on tiny tensors in layouts that need no communication."""
    out = {}
    for title, grad in (("forward", False), ("forward + backward", True)):
        sides = {
            name: (lib, make_inputs(lib, grad)) for name, lib in {"local": None, **LIBS}.items()
        }
        rows = {}
        for op, (names, fn) in OPS.items():
            fns = {}
            for side, (lib, inputs) in sides.items():
                args = [inputs[n] for n in names.split()]
                try:
                    fns[side] = (
                        forward_backward(lib, fn, args)
                        if grad
                        else lambda fn=fn, args=args: fn(*args)
                    )
                except Exception as error:
                    print(f"({op} in {side}: {type(error).__name__})")
            rows[op] = interleave(fns, reps)
        out[title] = table(f"warm call, {title}, mesh (8,): ratio to local", rows)
    return out


def cold(reps: int) -> dict[str, Any]:
    """The first call at a shape never seen."""
    rows: dict[str, dict[str, list[float]]] = {}
    for op, fn in COLD.items():
        rows[op] = {"local": [], "torch": [], "shardwise": []}
        weights = {
            name: wrap(lib, torch.randn(16, 16), "R")
            for name, lib in {"local": None, **LIBS}.items()
        }
        for t in range(3, 3 + 2 * reps):
            for name, lib in list({"local": None, **LIBS}.items())[:: 1 if t % 2 else -1]:
                x = wrap(lib, torch.randn(2, t, 16), "S0")
                start = time.perf_counter()
                fn(x, weights[name])
                rows[op][name].append((time.perf_counter() - start) * 1e6)
    return table("first call at a new shape, mesh (8,): ratio to local", rows)


class Block(torch.nn.Module):
    """A pre-norm transformer block; ``share`` makes the piece that one tensor-parallel rank holds."""

    def __init__(self, d: int, head: int, share: int = 1) -> None:
        super().__init__()
        self.head = head
        self.n1, self.n2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.q, self.k, self.v = (torch.nn.Linear(d, d // share, bias=False) for _ in range(3))
        self.o = torch.nn.Linear(d // share, d, bias=False)
        self.up, self.down = (
            torch.nn.Linear(d, 4 * d // share),
            torch.nn.Linear(4 * d // share, d),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n1(x)
        b, t = x.shape[0], x.shape[1]
        q, k, v = (
            f(y).view(b, t, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        a = (q @ k.transpose(-1, -2) * self.head**-0.5).softmax(-1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def megatron(name: str) -> str:
    """q, k, v, up by output; o, down by input; the rest replicated."""
    layer, kind = name.split(".")[-2:]
    if layer in ("q", "k", "v", "up"):
        return "S0"
    return "S1" if layer in ("o", "down") and kind == "weight" else "R"


def make_block(lib: Any, layout: str, d: int) -> torch.nn.Module:
    """A block, laid out: data parallel (all replicated) or Megatron's tensor parallel."""
    torch.manual_seed(0)
    if lib is None:
        return Block(d, 8, share=1 if layout == "dp" else WORLD)

    def part(prefix: str, module: torch.nn.Module, mesh: Any) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            spec = placements(lib, "R" if layout == "dp" else megatron(f"{prefix}.{name}"))
            module.register_parameter(
                name, torch.nn.Parameter(lib.distribute_tensor(p.detach(), mesh, spec))
            )

    return lib.distribute_module(Block(d, 8), MESHES[lib], part)


def train_block(block: torch.nn.Module, x: Any) -> None:
    """Forward and backward; our gradients are reduced here, torch's when the optimizer steps."""
    for p in block.parameters():
        p.grad = None
    block(x).sum().backward()


def block(reps: int) -> dict[str, Any]:
    """Forward + backward of a transformer block."""
    out = {}
    for d, batch, seq in ((64, 2, 16), (256, 4, 64)):
        rows = {}
        for layout in ("dp", "tp"):
            fns = {}
            for name, lib in {"local": None, **LIBS}.items():
                x = wrap(lib, torch.randn(batch, seq, d), "S0" if layout == "dp" else "R")
                module = make_block(lib, layout, d)
                fns[name] = lambda module=module, x=x: train_block(module, x)
            rows[layout] = interleave(fns, reps, target=5e-3)
        title = f"transformer block, forward + backward, d = {d}, batch {batch}, length {seq}: ratio to local"
        out[title] = table(title, rows)
    return out


def adamw(reps: int) -> dict[str, Any]:
    """One step of AdamW(foreach=True) over 50 parameters."""
    fns = {}
    for name, lib in {"local": None, **LIBS}.items():
        params = [torch.nn.Parameter(wrap(lib, torch.randn(8, 64), "S0")) for _ in range(50)]
        for p in params:
            p.grad = wrap(lib, torch.randn(8, 64), "S0")
        fns[name] = torch.optim.AdamW(params, foreach=True).step
    return table(
        "AdamW(foreach=True).step, 50 parameters: ratio to local",
        {"step": interleave(fns, reps, 5e-3)},
    )


def redistribute(reps: int) -> dict[str, Any]:
    """A warm redistribute, torch and ours."""
    cases = {
        "S0 -> R": ("S0", "R"),
        "R -> S0": ("R", "S0"),
        "S0 -> S1": ("S0", "S1"),
        "P -> R": ("P", "R"),
        "P -> S0": ("P", "S0"),
    }
    rows = {}
    for title, (src, dst) in cases.items():
        shape = (8, 64) if src == "S0" else (64, 64)
        local = torch.randn(shape)
        fns: dict[str, Callable[[], Any]] = {"clone": local.clone}
        for name, lib in LIBS.items():
            x, to = wrap(lib, local, src), placements(lib, dst)
            fns[name] = lambda x=x, to=to, lib=lib: x.redistribute(MESHES[lib], to)
        rows[title] = interleave(fns, reps)
    return table(
        "warm redistribute of 64 x 64, mesh (8,): ratio to a local clone", rows, base="clone"
    )


TABLES = {
    "ops": ops,
    "cold": cold,
    "block": block,
    "adamw": adamw,
    "redistribute": redistribute,
}


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", default=list(TABLES), help=f"of {', '.join(TABLES)}"
    )
    parser.add_argument("--reps", type=int, default=21)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    for lib in LIBS.values():
        MESHES[lib] = lib.init_device_mesh("cpu", (WORLD,))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread"
    )
    figures = {name: TABLES[name](args.reps) for name in args.tables}
    if args.json:
        with open(args.json, "w") as f:
            json.dump(
                {
                    "torch": torch.__version__,
                    "machine": platform.processor(),
                    "tables": figures,
                },
                f,
                indent=1,
            )


if __name__ == "__main__":
    main()
