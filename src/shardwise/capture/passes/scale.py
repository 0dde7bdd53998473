"""What is scaled and then packed is packed and then scaled: one call in place of one for each part.

```text
   cat(a * 0.5, b * 0.5)  ->  send        cat(a, b), *= 0.5  ->  send
```

A wrapper that averages gradients multiplies each before they travel together. A product is rounded element by
element, wherever the element lies: the values are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.capture.ir import Node, Step, Value, users

_ATEN = torch.ops.aten


def scale(step: Step) -> Step:
    """Multiply what has been joined for a collective, not its parts."""
    uses = users(step.nodes)
    made = {v: at for at, n in enumerate(step.nodes) for v in n.outs}
    sent = {n.args[0] for n in step.nodes if n.kind == "start"}
    instead: dict[int, list[Node]] = {}
    new: dict[Value, Value] = {}
    index = step.next_index
    for at, n in enumerate(step.nodes):
        if n.target is not _ATEN.cat.default or n.outs[0] not in sent:
            continue
        parts = [p for v in n.args[0] if (p := _scaled(step, v, uses, made)) is not None]
        if len(parts) < max(2, len(n.args[0])) or len({repr(p.number) for p in parts}) > 1:
            continue
        if any(_is_written(step, p, at) for p in parts):
            continue
        shapes = [v.fake.shape for v in n.args[0]]

        def packed(*xs: Tensor, n: Node = n, shapes: list[torch.Size] = shapes) -> list[Tensor]:
            ys = [x if x.shape == s else x.view(s) for x, s in zip(xs, shapes)]
            return [torch.cat(ys, *n.args[1:]).mul_(parts[0].number)]  # noqa: B023  called at once

        calls, (out,), index = step.tape.note_calls(packed, [p.source for p in parts], index)
        for c in calls:
            c.site = n.site
        instead.update({place: [] for p in parts for place in p.places})
        instead[at] = calls
        new[n.outs[0]] = out
    if not new:
        return step
    nodes = [m for at, n in enumerate(step.nodes) for m in instead.get(at, (n,))]
    return step.with_nodes(nodes, index).substituted(new)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part that is a multiple of something, and nothing else is done with it.

    Attributes:
        source: What is multiplied.
        number: With what.
        places: The product and the views of it.
    """

    source: Value
    number: float
    places: tuple[int, ...]


def _scaled(
    step: Step, v: Value, uses: dict[Value, list[int]], made: dict[Value, int]
) -> _Part | None:
    places: list[int] = []
    while v in made and len(uses[v]) == 1 and v not in step.outputs:
        places.append(made[v])
        n = step.nodes[made[v]]
        if n.target is _ATEN.view.default:
            v = n.args[0]
            continue
        if n.target is not _ATEN.mul.Tensor or type(n.args[1]) not in (int, float):
            return None
        return _Part(n.args[0], n.args[1], tuple(places)) if _like(n.args[0], v) else None
    return None


def _like(source: Value, product: Value) -> bool:
    """Whether what is multiplied may take the place of the product, and is held no longer than it would be."""
    a, b = source.fake, product.fake
    return (
        a is not None
        and b is not None
        and not a.is_complex()
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and a.untyped_storage().nbytes() == source.nbytes
    )


def _is_written(step: Step, part: _Part, before: int) -> bool:
    between = step.nodes[min(part.places) + 1 : before]
    return any(part.source.root in n.writes for n in between)
