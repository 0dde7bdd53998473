"""What is scaled and then packed is packed and then scaled, and the other way round: one call in place of one for each part.

```text
   cat(a * 0.5, b * 0.5)  ->  send             cat(a, b), *= 0.5  ->  send
   wait  ->  a, b = split(x), a * s, b * s     wait  ->  x *= s, split(x)
```

A wrapper that averages gradients multiplies each before they travel together; what ``late_mean`` divides has travelled
together. A product is rounded element by element, wherever the element lies: the values are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.capture.ir import Node, Step, Value, users

_ATEN = torch.ops.aten


def scale(step: Step) -> Step:
    """Multiply what is joined for a collective, not its parts."""
    return _arrived(_sent(step))


def _sent(step: Step) -> Step:
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
        if any(_is_written(step, p, at) for p in parts) or _promotes(n):
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


def _like(source: Value, product: Value, *, whole: bool = True) -> bool:
    """Whether what is multiplied may take the place of the product, and (whole) is held no longer than it would be."""
    a, b = source.fake, product.fake
    return (
        a is not None
        and b is not None
        and not a.is_complex()
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and (not whole or a.untyped_storage().nbytes() == source.nbytes)
    )


def _promotes(cat: Node) -> bool:
    """Whether parts are of another dtype than what they are joined to: each is rounded in its own."""
    fakes = [v.fake for v in (*cat.args[0], *cat.outs) if v.fake is not None]
    return len({f.dtype for f in fakes}) > 1


def _is_written(step: Step, part: _Part, before: int) -> bool:
    between = step.nodes[min(part.places) + 1 : before]
    return any(part.source.root in n.writes for n in between)


def _arrived(step: Step) -> Step:
    uses = users(step.nodes)
    waited = {n.outs[0] for n in step.nodes if n.kind == "wait"}  # memory that nobody else has
    instead: dict[int, list[Node]] = {}
    new: dict[Value, Value] = {}
    index = step.next_index
    for n in step.nodes:
        if n.target is not _ATEN.split_with_sizes.default or n.args[0].fake.ndim != 1:
            continue
        if n.args[0] not in waited or len(uses[n.args[0]]) > 1 or n.args[0] in step.outputs:
            continue
        sizes = list(n.args[1])
        muls = {i: at for i, v in enumerate(n.outs) if (at := _multiplied(step, v, uses)) >= 0}
        first, last = min(muls, default=0), max(muls, default=0)
        factors = {step.nodes[at].args[1] for at in muls.values()}
        if len(factors) != 1 or len(muls) != last - first + 1 or len(muls) < 2:
            continue
        between = step.nodes[min(muls.values()) : max(muls.values())]
        if any(f.root in m.writes for f in factors for m in between):
            continue
        start, end = sum(sizes[:first]), sum(sizes[: last + 1])

        def whole(x: Tensor, by: Tensor, start: int = start, end: int = end) -> list[Tensor]:
            return [(x if end - start == len(x) else x[start:end]).mul_(by)]

        calls, _, index = step.tape.note_calls(whole, (n.args[0], *factors), index)
        for c in calls:
            c.site = n.site
        instead.update({at: [] for at in muls.values()})
        instead[min(muls.values())] = calls
        products = [step.nodes[at] for at in muls.values()]
        new.update({m.outs[0]: m.args[0] for m in products})
    if not new:
        return step
    nodes = [m for at, n in enumerate(step.nodes) for m in instead.get(at, (n,))]
    return step.with_nodes(nodes, index).substituted(new)


def _multiplied(step: Step, v: Value, uses: dict[Value, list[int]]) -> int:
    """Where a piece, or a view of it, is multiplied by a scalar, if nothing else is done with it; else -1."""
    while len(places := uses.get(v, ())) == 1 and v not in step.outputs:
        n = step.nodes[places[0]]
        if n.target is _ATEN.view.default:
            v = n.outs[0]
            continue
        by = n.args[1] if n.target is _ATEN.mul.Tensor else None
        if not isinstance(by, Value) or by.fake is None or by.fake.ndim or n.args[0] is not v:
            return -1
        return places[0] if _like(v, n.outs[0], whole=False) else -1
    return -1
