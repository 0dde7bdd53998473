"""What a first call takes, counted: a decision that moves nothing measures nothing."""

import torch

from shardwise import Partial, Replicate, Shard
from shardwise.layout.layout import Layout
from shardwise.program import decide as module
from shardwise.program.decide import decide
from shardwise.rules.notation import Arg
from shardwise.rules.pointwise import elementwise
from shardwise.testing.strategies import mesh_of


def args(*placements, shape=(8, 6)):
    mesh = mesh_of((2, 4))
    layouts = [Layout.of(mesh, p, shape, dtype=torch.float32) for p in placements]
    return [Arg(i, layout) for i, layout in enumerate(layouts)]


def test_nothing_is_measured_where_nothing_moves(monkeypatch):
    measured, looked_at = [], []
    piece_numel, cheapest = module.piece_numel, module._cheapest
    monkeypatch.setattr(
        module, "piece_numel", lambda layout: measured.append(layout) or piece_numel(layout)
    )
    monkeypatch.setattr(
        module,
        "_cheapest",
        lambda rule, args, axis, *rest: (
            looked_at.append(axis) or cheapest(rule, args, axis, *rest)
        ),
    )
    alike = args([Shard(0), Replicate()], [Shard(0), Replicate()])
    found = decide(elementwise(alike), alike)
    assert found.outs == [(((0,), ()), (None, None))]
    assert all(found.ins[a] is a.layout for a in alike)
    assert not measured
    assert looked_at == [0]  # over the other axis everything is whole

    apart = args([Shard(0), Partial()], [Shard(1), Replicate()])
    found = decide(elementwise(apart), apart)
    assert looked_at == [0, 0, 1]
    assert {a.layout for a in apart} & set(measured)
    assert found.outs[0][1] == (None, None)
