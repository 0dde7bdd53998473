"""Decide: from a rule and the operands' layouts to the layouts that the call runs on.

Each mesh axis is decided by itself. Its options are: the factors that some operand is sharded on over this
axis, a pending sum passed through, or nothing sharded. The cheapest in bytes wins; an option that moves
nothing always does. The choice depends on global facts only, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
import math

from shardwise.layout import boxes
from shardwise.layout.cut import Cut, cut, plain
from shardwise.layout.layout import Layout
from shardwise.route.moves import piece_numel
from shardwise.route.search import LATENCY_BYTES, LOCAL_COST_BYTES
from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule

KEEP = "keep"  # whole, but added on one rank only


@dataclass(frozen=True, slots=True)
class Option:
    """What one mesh axis could do.

    Attributes:
        factor: The factor it shards, or None.
        pending: Arguments that must have a pending sum.
        out: The pending reduction of the results that lack the factor, or None.
    """

    factor: str | None = None
    pending: frozenset[Arg] = frozenset()
    out: str | None = None


@dataclass(slots=True)
class Choice:
    """The decided layouts of a call.

    Attributes:
        ins: For each argument its layout.
        outs: For each result (axes per dim, pending reductions).
        axes: The mesh axes that shard each factor, major to minor.
        local: Whether the rule's local program must run.
        keeps_sizes: Every factor that stays sharded, and that its largest operand has at chosen sizes, has
            them in all operands and results.
    """

    ins: dict[Arg, Layout]
    outs: list[tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]]
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    local: bool = False
    keeps_sizes: bool = True


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How a factor is cut.

    Attributes:
        axes: The entry of the dim that it was taken from.
        n: Size of that dim.
        scaled: In dims of other sizes the cuts fall in proportion.
    """

    axes: tuple[int, ...]
    n: int
    scaled: bool

    def at(self, n: int | None, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The entry for a dim of ``n``; None if the cuts would not fall between rows."""
        if n == self.n:
            return self.axes
        if not self.scaled or not n or not self.n:
            return None if isinstance(self.axes, Cut) else self.axes
        sizes: list[int] = []
        for _, m in boxes.pieces(self.n, self.axes, ranks):
            if m * n % self.n:
                return None
            sizes.append(m * n // self.n)
        return cut(self.axes, sizes, [ranks[a] for a in self.axes])


def decide(rule: Rule, args: Sequence[Arg], pinned: Arg | None = None) -> Choice | None:
    """The cheapest layouts that the rule allows.

    Args:
        rule: The rule.
        args: The tensor arguments.
        pinned: An argument that is written in place: it must not move, and the first result must be
            placed like it.

    Returns:
        None if a pinned argument would have to move.
    """
    mesh = args[0].layout.mesh
    free = _scalable(rule, args) if rule.scaled else frozenset()
    if free:
        given = rule
        rule = replace(rule, divides={f: n for f, n in rule.divides.items() if f not in free})
    shards: dict[str, int] = {}
    options: list[Option] = []
    busy = {a for arg in args for axes in arg.layout.dims for a in axes}
    busy.update(a for arg in args for a, op in enumerate(arg.layout.partial) if op is not None)
    for axis in range(mesh.ndim):
        if axis not in busy:  # everything is whole over it, and stays so
            options.append(Option())
            continue
        options.append(_cheapest(rule, args, axis, shards, pinned))
        if (f := options[-1].factor) is not None:
            shards[f] = shards.get(f, 1) * mesh.shape[axis]
    axes = _orders(rule, args, options)
    choice = Choice({}, [], axes, any(f in rule.special for f in axes) or rule.always_local)
    how = {f: _cut_like(rule, args, f, a, pinned, f in free) for f, a in axes.items()}
    if any(f in free and pieces.n < 0 for f, pieces in how.items()):
        # over these axes no operand is cut now, so nothing is known of where the cuts would fall
        return decide(replace(given, scaled=frozenset()), args, pinned)
    for f, pieces in how.items():
        axes[f] = pieces.axes
        if isinstance(pieces.axes, Cut) and rule.divides.get(f):
            choice.keeps_sizes = False

    def entry(name: str, n: int | None) -> tuple[int, ...]:
        if (pieces := how.get(name)) is None:
            return ()
        found = pieces.at(n, mesh.shape)
        # where a program runs, it makes the result's pieces, whichever
        remade = rule.boxed is not False and name in rule.special
        choice.keeps_sizes &= found is not None or remade
        return plain(pieces.axes) if found is None else found

    for arg in args:
        names = rule.ins.get(arg, ())
        dims = tuple(map(entry, names, arg.shape)) if names else ((),) * arg.ndim
        partial = tuple(_pending(rule, arg, names, option) for option in options)
        choice.ins[arg] = arg.layout.with_placement(dims, partial)
    for i, names in enumerate(rule.outs):
        dims = tuple(map(entry, names, _out_shape(rule, args, i)))
        partial = tuple(_left_pending(names, option) for option in options)
        choice.outs.append((dims, partial))
    if free and not choice.keeps_sizes:
        return decide(replace(given, scaled=frozenset()), args, pinned)
    if pinned is not None:
        kept = choice.ins[pinned] is pinned.layout
        if not kept or choice.outs[0] != (pinned.layout.dims, pinned.layout.partial):
            return None
    return choice


def _out_shape(rule: Rule, args: Sequence[Arg], i: int) -> Sequence[int | None]:
    """The sizes of a result's dims, as far as labels or the rule tell."""
    if rule.out_shapes is not None:
        return rule.out_shapes[i]
    sizes: dict[str, int] = {}
    for arg in args:
        for name, n in zip(rule.ins.get(arg, ()), arg.shape):
            sizes.setdefault(name, n)
    return [sizes.get(name) for name in rule.outs[i]]


def _scalable(rule: Rule, args: Sequence[Arg]) -> frozenset[str]:
    """Factors whose dim is cut, as it is now, between whole rows of every operand and result."""
    found: set[str] = set()
    for arg in args:
        ranks = arg.layout.mesh.shape
        for name, n, axes in zip(rule.ins.get(arg, ()), arg.shape, arg.layout.dims):
            if not axes or name not in rule.scaled:
                continue
            pieces = _Pieces(axes, n, True)
            everywhere = [
                pieces.at(m, ranks)
                for names, shape in [
                    *((rule.ins.get(a, ()), a.shape) for a in args),
                    *((names, _out_shape(rule, args, i)) for i, names in enumerate(rule.outs)),
                ]
                for other, m in zip(names, shape)
                if other == name
            ]
            if None not in everywhere:
                found.add(name)
    return frozenset(found)


def _cut_like(
    rule: Rule,
    args: Sequence[Arg],
    factor: str,
    axes: tuple[int, ...],
    pinned: Arg | None,
    scaled: bool,
) -> _Pieces:
    """How a factor is cut: as the largest of the operands that have it over just these axes."""
    best, most = _Pieces(axes, -1, False), -1.0
    for arg in args:
        size = math.inf if arg is pinned else arg.layout.numel
        for name, n, on_dim in zip(rule.ins.get(arg, ()), arg.shape, arg.layout.dims):
            if name == factor and plain(on_dim) == axes and size > most:
                best, most = _Pieces(on_dim, n, scaled), size
    return best


def _left_pending(names: Labels, option: Option) -> str | None:
    if option.factor is not None and option.factor in names:
        return None
    return option.out


def _pending(rule: Rule, arg: Arg, names: Labels, option: Option) -> str | None:
    if arg in option.pending:
        return "sum"
    once = (
        arg in rule.addends
        and option.out == "sum"
        and (option.factor is None or option.factor not in names)
    )
    return "sum" if once else None


def _orders(
    rule: Rule, args: Sequence[Arg], options: Sequence[Option]
) -> dict[str, tuple[int, ...]]:
    """For each sharded factor its axes in order: as the operand with the most of them has it."""
    wanted: dict[str, list[int]] = {}
    for axis, option in enumerate(options):
        if option.factor is not None:
            wanted.setdefault(option.factor, []).append(axis)
    out: dict[str, tuple[int, ...]] = {}
    for factor, axes in wanted.items():
        best: list[int] = []
        for arg in args:
            for name, on_dim in zip(rule.ins.get(arg, ()), arg.layout.dims):
                kept = [a for a in on_dim if a in axes] if name == factor else []
                best = kept if len(kept) > len(best) else best
        out[factor] = (*best, *(a for a in axes if a not in best))
    return out


def _cheapest(
    rule: Rule, args: Sequence[Arg], axis: int, shards: dict[str, int], pinned: Arg | None
) -> Option:
    best, best_cost = Option(), math.inf
    for option in _options(rule, args, axis, shards):
        if pinned is not None and _move_cost(rule, pinned, option, axis) > 0:
            continue
        cost = sum(_move_cost(rule, arg, option, axis) for arg in args)
        if cost == 0:
            return option
        if cost < best_cost:
            best, best_cost = option, cost
    return best


def _options(
    rule: Rule, args: Sequence[Arg], axis: int, shards: dict[str, int]
) -> Iterator[Option]:
    k = args[0].layout.mesh.shape[axis]
    seen: set[str] = set()
    for arg in args:
        dim = arg.layout.axis_dim(axis)
        names = rule.ins.get(arg, ())
        if dim is None or dim >= len(names):
            continue
        name = names[dim]
        if name not in seen and not _must_be_whole(rule, name, shards, k):
            seen.add(name)
            yield _sharding(rule, name)
    for together in rule.linear:
        if any(arg.layout.partial[axis] == "sum" for arg in together):
            yield Option(None, together, "sum")
    for name in _elsewhere(rule, args, axis, shards):
        if name not in seen:
            seen.add(name)
            yield _sharding(rule, name)
    yield Option()


def _sharding(rule: Rule, name: str) -> Option:
    op = rule.reduce.get(name, "sum")
    missing = any(name not in out for out in rule.outs)
    return Option(name, frozenset(), op if missing and op != "none" else None)


def _elsewhere(rule: Rule, args: Sequence[Arg], axis: int, shards: dict[str, int]) -> list[str]:
    """Factors to which an operand could be cut anew where its own must be whole: that moves less than a gather."""
    found: list[tuple[bool, str]] = []
    k = args[0].layout.mesh.shape[axis]
    for arg in args:
        dim = arg.layout.axis_dim(axis)
        names = rule.ins.get(arg, ())
        if dim is None or dim >= len(names) or not _must_be_whole(rule, names[dim], shards, k):
            continue
        for n, name in zip(arg.shape, names):
            if (
                _must_be_whole(rule, name, shards, k)
                or rule.divides.get(name)
                == 0  # the local program knows of the cuts that were there
                or any(name not in o for o in rule.outs)
            ):
                continue
            pieces = max(shards.get(name, 1), _cut_by_others(rule, args, axis, name)) * k
            if -(-n // pieces) * (pieces - 1) < n:  # no rank would be left with nothing
                found.append((n % pieces != 0, name))
    return [name for _, name in sorted(found, key=lambda f: f[0])]


def _cut_by_others(rule: Rule, args: Sequence[Arg], axis: int, name: str) -> int:
    """Into how many pieces the other axes cut a factor, in whichever operand: they may stay."""
    shape = args[0].layout.mesh.shape
    axes = {
        a
        for arg in args
        for label, on_dim in zip(rule.ins.get(arg, ()), arg.layout.dims)
        if label == name
        for a in on_dim
    }
    return math.prod(shape[a] for a in axes - {axis})


def _must_be_whole(rule: Rule, name: str, shards: dict[str, int], k: int) -> bool:
    return (
        name in (WHOLE, ONE)
        or name in rule.whole
        or (name in rule.divides and rule.divides[name] % (shards.get(name, 1) * k) != 0)
    )


def _move_cost(rule: Rule, arg: Arg, option: Option, axis: int) -> float:
    layout = arg.layout
    k = layout.mesh.shape[axis]
    if k == 1 and layout.partial[axis] is None:
        return 0
    names = rule.ins.get(arg, ())
    want_pending = _pending(rule, arg, names, option) is not None
    want_dim = (
        names.index(option.factor)
        if option.factor is not None and option.factor in names
        else None
    )
    pending, dim = layout.partial[axis], layout.axis_dim(axis)
    if pending is not None:
        if want_pending and pending == "sum":
            return 0
        share = 1 if want_dim is not None else 2
        return LATENCY_BYTES + share * _piece_bytes(layout) * (k - 1) / k
    if dim is not None:
        if want_pending:
            return math.inf if arg not in rule.addends else LOCAL_COST_BYTES
        if want_dim == dim:
            return 0
        times = (k - 1) / k if want_dim is not None else k - 1
        return LATENCY_BYTES + _piece_bytes(layout) * times
    if want_pending:
        return LOCAL_COST_BYTES if arg in rule.addends else math.inf
    return 0 if want_dim is None else LOCAL_COST_BYTES


def _piece_bytes(layout: Layout) -> int:
    return piece_numel(layout) * getattr(layout.dtype, "itemsize", 4)
