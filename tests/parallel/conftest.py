"""Models and comparisons that the tests of this room share."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
import torch.nn.functional as F

from shardwise import DTensor


class Attention(nn.Module):
    """Causal attention; with fewer heads of keys and values than of queries where asked."""

    def __init__(self, width, heads, kv_heads=None, dropout=0.0):
        super().__init__()
        self.size, self.group = width // heads, heads // (kv_heads or heads)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // self.group)
        self.v = nn.Linear(width, width // self.group)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        B, T = x.shape[:2]
        q, k, v = (
            f(x).view(B, T, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(self.group, 1) if self.group > 1 else t for t in (k, v))
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        a = (q @ k.transpose(-1, -2) * self.size**-0.5).masked_fill(mask, -torch.inf)
        y = a.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, width, heads, hidden, kv_heads=None, dropout=0.0):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, kv_heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.n1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class GPT(nn.Module):
    """Tied embeddings, unless the head has its own."""

    def __init__(
        self,
        vocab=11,
        width=12,
        heads=4,
        hidden=33,
        layers=2,
        kv_heads=None,
        dropout=0.0,
        tied=True,
    ):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, kv_heads, dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def state(model):
    """Every parameter, whole."""
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def grads(model):
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def same(got, expected, bound=1e-9):
    assert got.keys() == expected.keys()
    worst = {name: (got[name] - expected[name]).abs().max().item() for name in expected}
    name = max(worst, key=worst.get)
    assert worst[name] <= bound, f"{name}: {worst[name]}"


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def trained(model, batches, steps=10, lr=1e-2):
    """Parameters after some steps of AdamW, and the losses."""
    torch.manual_seed(7)  # of dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for i in range(steps):
        loss = loss_of(model, *batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss.detach()).item())
    return state(model), losses


@pytest.fixture(scope="session")
def zoo():
    """The models and the comparisons, by name."""
    return SimpleNamespace(
        GPT=GPT,
        Block=Block,
        whole=whole,
        state=state,
        grads=grads,
        same=same,
        loss_of=loss_of,
        trained=trained,
        copy=copy.deepcopy,
    )
