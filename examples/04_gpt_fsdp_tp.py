"""Train a small GPT in pieces: fully sharded over "dp", tensor and sequence parallel over "tp"; and compare.

    python examples/04_gpt_fsdp_tp.py                                        four ranks as threads
    torchrun --standalone --nproc-per-node=4 examples/04_gpt_fsdp_tp.py      four processes, Gloo

No rank ever holds the whole model, nor the activations of a whole sequence between the matrices. The model is made on
the meta device: only its pieces are ever real. One device that trains on the whole batch has the same losses.
"""

import os

import torch
from torch import nn
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 64, 64, 4, 2, 32
BATCH, STEPS = 8, 10

# ---- The model: plain torch, written for one device ------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        heads = (f(x).unflatten(2, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in heads)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(a.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


# ---- The only lines that know about devices --------------------------------------------------

SEQ = Shard(1)  # between the matrices every rank has a part of the sequence
DTENSOR = {"use_local_output": False}  # what the modules hand to each other
PLAN = {
    "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQ, **DTENSOR),
    "blocks.*.ln?": SequenceParallel(),
    "blocks.*.attn": PrepareModuleInput(input_layouts=SEQ, desired_input_layouts=Replicate()),
    "blocks.*.attn.[qkv]": ColwiseParallel(**DTENSOR),
    "blocks.*.attn.o": RowwiseParallel(output_layouts=SEQ, **DTENSOR),
    "blocks.*.up": ColwiseParallel(input_layouts=SEQ, **DTENSOR),
    "blocks.*.down": RowwiseParallel(output_layouts=SEQ, **DTENSOR),
    "ln": SequenceParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def distribute(model, mesh):
    parallelize_module(model, mesh["tp"], PLAN)
    for block in model.blocks:
        fully_shard(block, mesh["dp"])
    return fully_shard(model, mesh["dp"])


# ---- Training: the same code for both --------------------------------------------------------


def train(mesh=None):
    """Losses of some steps; without a mesh this is plain torch on one device."""
    with torch.device("meta"):
        model = GPT().double()
    if mesh is not None:
        distribute(model, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)  # the pieces of what one device would draw
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        text = torch.randint(VOCAB, (BATCH, CONTEXT + 1), generator=batches)
        if mesh is not None:  # this rank's part of the batch
            text = text.chunk(mesh.size("dp"))[mesh.get_local_rank("dp")]
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mesh is not None:  # the mean over "dp"
            loss = DTensor.from_local(loss, mesh["dp"], [Partial("avg")]).full_tensor()
        losses.append(loss.item())
    return losses


def program(_=None):
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return train(mesh)


def main():
    torch.set_num_threads(1)
    launched = "WORLD_SIZE" in os.environ  # by torchrun
    with shardwise.rng(like="torch"):
        losses = program() if launched else shardwise.simulate(program, 4)[0]
    if int(os.environ.get("RANK", 0)) == 0:
        plain = train()
        for a, b in zip(plain, losses):
            print(f"one device {a:.8f}   four {b:.8f}")
        worst = max(abs(a - b) for a, b in zip(plain, losses))
        print(f"largest difference: {worst:.1e}")
        assert worst < 1e-9, "the losses must agree"


if __name__ == "__main__":
    main()
