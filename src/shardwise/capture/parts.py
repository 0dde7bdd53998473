"""Cut a step into parts that can be compiled, and what has to run call by call between them.

```text
   draws, constants | part | start, numbers | part | wait | part | views that are handed out
```

A part is a run of local calls, and of the arithmetic on numbers that is tied up with them; what can be done before or
after is done in Python, for free while a collective runs. What a compiler may do inside one it may not see across its edges: whether two
tensors share memory. So views never cross an edge: they cost nothing and depend on no data, and each part takes them
anew from the memory that they show. And what is written in pieces (a buffer that is packed) stays between the parts:
compilers know no writes, only other tensors, and each piece would cost as much as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from shardwise.capture.ir import PLACED, RNG, Node, Step, Value, flatten

_EMPTY_STRIDED = torch.ops.aten.empty_strided.default
_EMPTY = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty.memory_format,
    _EMPTY_STRIDED,
}
LEAST = 3  # calls: a smaller part costs more to compile than it saves


def cut(
    step: Step,
    compiles: Callable[[Node], bool],
    part: Callable[[list[Node], list[Value], list[Value]], Node],
) -> Step:
    """The step with its parts in place of their calls.

    Args:
        step: The step; moves in it are carried out.
        compiles: Whether a call or a number can be in a part.
        part: Makes one node of nodes, of the values that they take, and of those that they give.
    """
    nodes = _early(list(flatten(step.nodes)))
    views = {v: n for n in nodes if _is_view(n) for v in n.outs}
    nodes = [n for n in nodes if not _is_view(n)]
    pieces = {n for n in nodes if _writes_piece(n, views)}

    def inside(n: Node) -> bool:
        return n not in pieces and compiles(n) and not _is_lazy(n, views)

    nodes = list(_numbers_aside(nodes, inside))
    last = _last_needed(nodes, step.outputs, views)
    out: list[Node] = []
    there: set[Value] = set()  # views that the calls between parts have taken
    at = 0
    while at < len(nodes):
        end = at
        if nodes[at].kind != "number":
            end = _end_of(nodes, at, inside)
            while end > at and nodes[end - 1].kind == "number":
                end -= 1
        run, seen = nodes[at:end], set[Value]()
        full = [x for n in run for x in (*_views_of(n.inputs, views, seen), n)]
        made = dict.fromkeys(v for n in full for v in n.outs)
        takes = [v for v in dict.fromkeys(v for n in full for v in n.inputs) if v not in made]
        written = {r for n in run for r in n.writes}
        if sum(map(_calls, run)) < LEAST or _share(takes, written):
            end = max(end, at + 1)
            for n in nodes[at:end]:
                out += [*_views_of(n.inputs, views, there), n]
        else:
            shown = _shown(step.outputs, seen - there, takes, nodes[at:])
            there |= shown
            gives = [v for v in made if v in shown or last.get(v, -1) >= end]
            out.append(part(full, takes, gives))
        at = end
    out += _views_of(step.outputs, views, there)
    return step.with_nodes(out)


def _is_view(n: Node) -> bool:
    """Whether a call only shows the memory of what it takes."""
    if n.kind != "call" or n.writes or not n.outs or RNG in n.reads or n.target in PLACED:
        return False
    roots = {v.root for v in n.inputs if v.kind == "tensor"}
    return all(v.root in roots for v in n.outs)


def _is_lazy(n: Node, views: dict[Value, Node]) -> bool:
    """Whether a call works on what only says that it is conjugated or negated: a compiler sees the numbers."""
    todo = [*n.inputs, *n.outs]
    while todo:
        v = todo.pop()
        if v.fake is not None and (v.fake.is_conj() or v.fake.is_neg()):
            return True
        if v in views:
            todo += views[v].inputs
    return False


def _writes_piece(n: Node, views: dict[Value, Node]) -> bool:
    """Whether a call writes a piece of a larger tensor: compiled, it would go over all of that."""
    if n.kind != "call":
        return False
    for v in n.inputs:
        base = v
        while base in views:
            base = next(x for x in views[base].inputs if x.root == v.root)
        if v.root in n.writes and v.nbytes < base.nbytes:
            return True
    return False


def _end_of(nodes: Sequence[Node], at: int, compiles: Callable[[Node], bool]) -> int:
    while at < len(nodes) and compiles(nodes[at]):
        at += 1
    return at


def _calls(n: Node) -> int:
    """How many calls a node is worth: a list call as many as it has entries."""
    if n.kind != "call":
        return 0
    return max([1, *(len(a) for a in n.args if isinstance(a, (list, tuple)))])


def _numbers_aside(nodes: Sequence[Node], compiles: Callable[[Node], bool]) -> Iterator[Node]:
    """In each run the arithmetic on numbers that needs none of its calls first, and what none of them needs last."""
    at = 0
    while at < len(nodes):
        end = _end_of(nodes, at, compiles)
        if end == at:
            yield nodes[at]
            at += 1
            continue
        before: list[Node] = []
        within: list[Node] = []
        made: set[Value] = set()
        for n in nodes[at:end]:
            free = n.kind == "number" and all(
                v.kind == "number" and v not in made for v in n.inputs
            )
            (before if free else within).append(n)
            if not free:
                made.update(n.outs)
        after: list[Node] = []
        kept: list[Node] = []
        used: set[Value] = set()
        written: set[int] = set()
        for n in reversed(within):
            if n.kind == "number" and used.isdisjoint(n.outs) and written.isdisjoint(n.reads):
                after.append(n)
                continue
            kept.append(n)
            used.update(n.inputs)
            written |= n.writes
        yield from (*before, *reversed(kept), *reversed(after))
        at = end


def _early(nodes: list[Node]) -> list[Node]:
    """Draws and constants go first, where they wait for nothing: fewer, larger parts.

    What a draw fills (``empty_like`` of an activation) goes with it: it is made by its shape.
    """
    early: list[Node] = []
    rest: dict[int, Node] = {}
    empty: dict[Value, int] = {}
    touched: set[int] = set()
    blocked = False
    for at, n in enumerate(nodes):
        taken = list(dict.fromkeys(n.inputs))
        free = n.kind == "opaque" or (n.kind == "call" and RNG in n.reads)
        if free and not blocked and all(v in empty and v.root not in touched for v in taken):
            early += [_made_by_shape(rest.pop(empty.pop(v))) for v in taken]
            early.append(n)
            continue
        blocked = blocked or RNG in n.reads
        rest[at] = n
        if n.kind == "call" and n.target in _EMPTY:
            empty[n.outs[0]] = at
        else:
            touched |= n.reads | n.writes
    return early + list(rest.values())


def _made_by_shape(n: Node) -> Node:
    """A call that makes a tensor without numbers in it, as one that takes no other tensor."""
    fake = n.outs[0].fake
    assert fake is not None, "it makes a tensor"
    return replace(
        n,
        target=_EMPTY_STRIDED,
        name=str(_EMPTY_STRIDED),
        args=(list(fake.shape), list(fake.stride())),
        kwargs={"dtype": fake.dtype, "device": fake.device},
        reads=frozenset(),
    )


def _views_of(
    values: Iterable[Value], views: dict[Value, Node], there: set[Value]
) -> Iterator[Node]:
    """The views that lead to some values, those that are there already left out."""
    for v in values:
        n = views.get(v)
        if n is not None and v not in there:
            yield from _views_of(n.inputs, views, there)
            there.update(n.outs)
            yield n


def _last_needed(
    nodes: Sequence[Node], outputs: Iterable[Value], views: dict[Value, Node]
) -> dict[Value, int]:
    """For each value that is no view where it, or a view of it, is needed last."""
    last: dict[Value, int] = {}

    def need(values: Iterable[Value], at: int) -> None:
        for v in values:
            n = views.get(v)
            if n is None:
                last[v] = at
            else:
                need(n.inputs, at)

    for at, n in enumerate(nodes):
        need(n.inputs, at)
    need(outputs, len(nodes))
    return last


def _shown(
    outputs: Iterable[Value], views: set[Value], takes: Sequence[Value], rest: Sequence[Node]
) -> set[Value]:
    """Outputs that a part may give although they are views: of memory that it takes, and that nobody writes anymore."""
    taken = {v.root for v in takes}
    written = {r for n in rest for r in n.writes}
    return {v for v in outputs if v in views and v.root in taken and v.root not in written}


def _share(takes: Sequence[Value], written: set[int]) -> bool:
    """Whether two of the values lie over each other in memory that is written: a compiler would have to know.

    Gradients side by side in one buffer do not.
    """
    inside: dict[int, list[Value]] = {}
    for v in takes:
        if v.kind == "tensor" and v.root in written:
            inside.setdefault(v.root, []).append(v)
    for values in inside.values():
        if len(values) > 1:
            ranges = sorted(map(_range, values))
            if any(end > start for (_, end), (start, _) in pairwise(ranges)):
                return True
    return False


def _range(v: Value) -> tuple[int, int]:
    """From which byte of its memory to which a tensor lies."""
    fake = v.fake
    assert fake is not None, "a tensor has a fake"
    start, size = int(fake.storage_offset()), fake.element_size()
    if not fake.numel():
        return start * size, start * size
    last = sum((int(n) - 1) * int(by) for n, by in zip(fake.shape, fake.stride(), strict=True))
    return start * size, (start + last + 1) * size
