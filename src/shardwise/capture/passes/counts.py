"""How many labels count is known before anything is computed.

A cross entropy gives its sum and the number of its labels together, and what divides by that number over all ranks
waits for the loss. The number depends on the labels alone: counted by itself it can be summed over the ranks while the
model runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.capture.ir import Node, Step, Value

_NLL = torch.ops.aten.nll_loss_forward.default


def counts(step: Step) -> Step:
    """Count labels apart from the loss where the number is sent."""
    sent = {n.args[0] for n in step.nodes if n.kind in ("move", "start")}
    nodes: list[Node] = []
    new: dict[Value, Value] = {}
    index = step.next_index
    for n in step.nodes:
        # args: log-probabilities, labels, weight, reduction, the label that does not count
        if n.target is _NLL and n.outs[1] in sent and n.args[2] is None and n.args[3]:
            made, (count,), index = step.tape.note_calls(
                lambda labels, n=n: [_count(labels, n.args[4], n.outs[1])], (n.args[1],), index
            )
            for m in made:
                m.site = n.site
            nodes += made
            new[n.outs[1]] = count
            old = Value(index, n.outs[1].fake, index)  # the loss still gives its own
            index += 1
            n = n.with_values({n.outs[1]: old})
        nodes.append(n)
    if not new:
        return step
    return step.with_nodes(nodes, index).substituted(new)


def _count(labels: Tensor, ignored: int, like: Value) -> Tensor:
    assert like.fake is not None, "the number is a tensor"
    return labels.ne(ignored).sum().to(like.fake.dtype)
