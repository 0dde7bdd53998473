"""Train a small GPT with data and tensor parallel modules, as one would with torch's own, and compare.

    python examples/03_gpt_dp_tp.py                                        four ranks as threads
    torchrun --standalone --nproc-per-node=4 examples/03_gpt_dp_tp.py      four processes, Gloo

Every rank runs plain torch on its part of the batch. `parallelize_module` cuts the matrices over the mesh
axis "tp", `data_parallel` averages gradients over "dp" while backward runs. One device that trains on the whole
batch has the same losses.
"""

import os

import torch
from torch import nn
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Partial
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    data_parallel,
    parallelize_module,
)

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 64, 64, 4, 2, 32
BATCH, STEPS = 8, 10


# ---- The model: plain torch, written for one device ------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, _ = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(B, T, -1, WIDTH // HEADS) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, -1))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


# ---- The only lines that know about devices --------------------------------------------------

PLAN = {
    "blocks.*.[qkv]": ColwiseParallel(),  # a rank computes its own heads ...
    "blocks.*.o": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),  # ... and its own hidden units
    "blocks.*.down": RowwiseParallel(),
}


def distribute(model, mesh):
    parallelize_module(model, mesh["tp"], PLAN)
    return data_parallel(model, mesh["dp"])


# ---- Training: the same code for both --------------------------------------------------------


def train(mesh=None):
    """Losses of some steps; without a mesh this is plain torch on one device."""
    torch.manual_seed(0)
    model = GPT().double()
    if mesh is not None:
        distribute(model, mesh)
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
    launched = "WORLD_SIZE" in os.environ  # by torchrun: this process is one of the ranks
    losses = program() if launched else shardwise.simulate(program, 4)[0]
    if int(os.environ.get("RANK", 0)) == 0:
        plain = train()
        for step, (a, b) in enumerate(zip(plain, losses), 1):
            print(f"step {step:2d}   one device {a:.8f}   four {b:.8f}")
        worst = max(abs(a - b) for a, b in zip(plain, losses))
        print(f"largest difference: {worst:.1e}")
        assert worst < 1e-9, "the losses must agree"


if __name__ == "__main__":
    main()
