"""Train a small GPT on a 2 x 2 mesh, next to the same model in plain torch: the losses agree.

    python examples/01_train_gpt.py                                        four ranks as threads
    torchrun --standalone --nproc-per-node=4 examples/01_train_gpt.py      four processes, Gloo

The batch is split over the mesh axis "dp", the matrices and attention heads over "tp". Dropout is on
everywhere, yet both runs drop the same elements: a random tensor has the values one device would draw.
"""

import argparse
from dataclasses import dataclass, field
import math
import os
from pathlib import Path
import sys
import time

from show import Bars, picture, table
import torch
from torch import nn
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard

VOCAB = 256  # the text is read as bytes
MICRO_BATCHES = 2  # gradients of two batches are added up before each step
BOUND = {"float32": 1e-5, "float64": 1e-10}  # how far the losses may differ, relatively


# ---- The model: plain torch, written for one device ------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, D = x.shape
        h = self.ln1(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        q, k, v = (x.view(B, T, self.heads, -1).transpose(1, 2) for x in (q, k, v))
        p = self.dropout.p if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.dropout(self.o(a.transpose(1, 2).reshape(B, T, D)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(self, context, width, heads, layers, dropout):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tok.weight  # tied
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.dropout(self.tok(tokens) + self.pos.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


# ---- The only lines that know about devices --------------------------------------------------


def distribute(model, mesh, shard_vocab=False):
    """Megatron's layout: q, k, v and up are cut by their outputs, o and down by their inputs.

    So a rank computes its own heads, and its own hidden units, without a word to the others; what
    it lacks is one all-reduce at the end of o and of down. What is not named here is replicated.
    """
    over_tp = dict.fromkeys(("q", "k", "v", "up"), Shard(0))
    over_tp |= dict.fromkeys(("o", "down"), Shard(1))
    if shard_vocab:
        over_tp["tok"] = Shard(0)  # and the head, which is tied to it

    def partition(name, module, mesh):
        how = over_tp.get(name.rpartition(".")[2])
        for key, p in list(module.named_parameters(recurse=False)):
            if how is not None and how.dim < p.ndim:  # the bias of a row-wise layer is whole
                p = shardwise.distribute_tensor(p, mesh, [Replicate(), how][: mesh.ndim])
                module.register_parameter(key, nn.Parameter(p))

    return shardwise.distribute_module(model, mesh, partition)


# ---- Training: the same code for both --------------------------------------------------------


@dataclass
class Run:
    """What a training run leaves behind."""

    losses: list = field(default_factory=list)
    seconds: list = field(default_factory=list)  # of each step
    log: shardwise.CommLog | None = None  # what this rank sent in the last step
    layouts: dict = field(default_factory=dict)  # of each parameter
    weights: dict = field(default_factory=dict)  # whole again: an ordinary state_dict


def build(options):
    torch.manual_seed(options.seed)
    model = GPT(options.context, options.width, options.heads, options.layers, options.dropout)
    return model.to(getattr(torch, options.dtype))


def train(options, text, mesh=None, tick=lambda: None):
    """Train for some steps; without a mesh this is plain torch on one device."""
    model = build(options)
    if mesh is not None:
        distribute(model, mesh, options.shard_vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(options.steps))
    order = torch.Generator().manual_seed(options.seed)  # both runs read the same batches
    run = Run()

    def batch():
        start = torch.randint(len(text) - options.context, (options.batch, 1), generator=order)
        window = text[start + torch.arange(options.context + 1)].long()
        pair = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        if mesh is None:
            return pair
        return [shardwise.distribute_tensor(x, mesh, [Shard(0)]) for x in pair]

    def step(batches):
        losses = []
        for tokens, targets in batches:
            loss = F.cross_entropy(model(tokens).view(-1, VOCAB), targets.view(-1))
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    if options.capture and mesh is not None:
        step = shardwise.capture(
            step
        )  # the same step, run as one graph from the second time on

    for _ in range(options.steps):
        start = time.perf_counter()
        with shardwise.CommLog() as run.log:
            losses = step([batch() for _ in range(MICRO_BATCHES)])
            run.losses.append(sum(loss.item() for loss in losses) / MICRO_BATCHES)
        schedule.step()
        run.seconds.append(time.perf_counter() - start)
        tick()
    if mesh is not None:
        run.layouts = {name: p.layout for name, p in model.named_parameters()}
        run.weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
    return run


def warmup_cosine(steps, warmup=10):
    """The share of the learning rate at each step."""

    def share(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))

    return share


def difference(a, b):
    """The largest relative difference between two lists of losses."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def write(options, weights, prompt, count=70):
    """Let the trained model go on with a text."""
    model = build(options).eval()
    model.load_state_dict(weights)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(tokens[:, -options.context :])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(0), 1)[None]], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


# ---- The program -----------------------------------------------------------------------------


def stdlib_text():
    """The sources of Python's standard library: real text that every machine has."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"".join(f.read_bytes() for f in files))
    return torch.frombuffer(text, dtype=torch.uint8)


def parse(args=None):
    show_doc = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show_doc)
    add = parser.add_argument
    add("--steps", type=int, default=50)
    add("--mesh", type=int, nargs="+", default=[2, 2], help="sizes of dp and (optional) tp")
    add("--dtype", choices=list(BOUND), default="float32")
    add("--capture", action="store_true", help="capture the sharded step as one graph")
    add("--shard-vocab", action="store_true", help="cut the tied embedding over tp, too")
    add("--layers", type=int, default=3)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--context", type=int, default=128)
    add("--batch", type=int, default=8, help="sequences in a micro batch, over all ranks")
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path(__file__).parent / "out", help="for the picture")
    add("--quiet", action="store_true", help="print the last line only")
    return parser.parse_args(args)


def main():
    options = parse()
    torch.set_num_threads(1)  # for a fair comparison; the matrices are small anyway
    text, shape = stdlib_text(), tuple(options.mesh)
    launched = "WORLD_SIZE" in os.environ  # by torchrun: this process is one of the ranks
    first = int(os.environ.get("RANK", 0)) == 0
    bars = Bars(options.steps, show=first and not options.quiet)

    def rank(_=None):
        names = ("dp", "tp")[: len(shape)]
        mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
        tick = bars.tick("sharded") if mesh.get_rank() == 0 else lambda: None
        return train(options, text, mesh, tick)

    # Draw what plain torch would draw. The default stream does not depend on the mesh either, and
    # is cheaper on many ranks, but its numbers are its own.
    with shardwise.rng(like="torch"), bars:
        plain = train(options, text, tick=bars.tick("plain")) if first else None
        sharded = rank() if launched else shardwise.simulate(rank, math.prod(shape))[0]
    if not first:
        return
    worst, bound = difference(plain.losses, sharded.losses), BOUND[options.dtype]
    if not options.quiet:
        print(table(plain, sharded, MICRO_BATCHES * options.batch * options.context))
        print("the model writes:", repr(write(options, sharded.weights, "def ")))
        print("see", picture(plain, sharded, options.out))
    print(f"largest relative difference of the losses: {worst:.1e} (allowed: {bound:.0e})")
    sys.exit(worst > bound)


if __name__ == "__main__":
    main()
