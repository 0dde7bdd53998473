"""``torch._foreach_*``: N single calls, each with the rule of its own op, run as one call on the locals.

The layouts of the lists are the key. A plan says which entries move first (normally none) and what the
results are; with it, one call of the torch function on lists of locals does the work. An entry for which
the single op's rule does not answer (or which is written in place and would have to move) is *odd*: the
single op runs on it by itself, and takes whatever moves it needs.

Numbers never decide a plan, so they are not part of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import Mover, mover
from shardwise.comm.many import move_each
from shardwise.comm.transport import Transport, current
from shardwise.compat import FOREACH, make_wrapper
from shardwise.errors import ShardError
from shardwise.layout.layout import Layout
from shardwise.program.compile import compile_rule
from shardwise.program.modes import mode
from shardwise.program.spec import Spec, spec_of
from shardwise.rules.registry import Entry, lookup
from shardwise.tensor.dispatch import MAX_PROGRAMS, Call, _operands
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.overrides import OVERRIDES

Movers = list[Mover | None] | None  # one per entry of a list; None: nothing moves


@dataclass(slots=True)
class Plan:
    """How one foreach call runs.

    Attributes:
        simple: Nothing moves and no entry is odd.
        moves: For each argument that is a list of tensors, by position or name, what moves.
        lone: For each argument that is one tensor and not whole, the move that makes it so.
        odd: Entries that the single op must take.
        layouts: Layouts of the results (None: a plain tensor), dtypes not known before the first run.
        specs: The results, after the first run; None of an in-place call.
        tidy: Some result comes in another stride order than its layout's.
        lasting: Its key may come again.
    """

    simple: bool = True
    moves: dict[Any, list[Mover | None]] = field(default_factory=dict)
    lone: dict[Any, Mover] = field(default_factory=dict)
    odd: frozenset[int] = frozenset()
    layouts: list[Layout | None] = field(default_factory=list)
    specs: list[Spec | None] | None = None
    tidy: bool = False
    lasting: bool = True


# ---- arguments ------------------------------------------------------------------------------


def take(a: Any) -> tuple[Any, Any]:
    """An argument's part of the key, and the argument with locals in place of DTensors."""
    kind = type(a)
    if kind is list or kind is tuple:
        try:
            return tuple([t._spec for t in a]), [t._local for t in a]
        except AttributeError:  # plain tensors or numbers among them
            kinds = tuple(map(type, a))
            if kinds.count(float) == len(
                kinds
            ):  # a step size for each: their kinds are the key
                return kinds, a
            return tuple([_key(t) for t in a]), [
                t._local if type(t) is DTensor else t for t in a
            ]
    if kind is DTensor:
        return a._spec, a._local
    return _key(a), a


def _key(a: Any) -> Any:
    kind = type(a)
    if kind is DTensor:
        return a._spec
    if isinstance(a, Tensor):
        return "plain", a.shape, a.stride(), a.dtype, a.device, a.requires_grad
    if kind is torch.SymFloat:  # a number of a step that is being recorded
        return float
    return kind if kind is float or kind is int or kind is bool or kind is complex else a


def transport_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Transport:
    """The transport of the first DTensor among the arguments."""
    lists = args[0] if args else None
    if type(lists) is list and lists and type(lists[0]) is DTensor:
        return lists[0]._spec.transport
    for a in (*args, *kwargs.values()):
        for t in a if type(a) in (list, tuple) else (a,):
            if type(t) is DTensor:
                return t._spec.transport
    return current()


def wrap_all(locals_: Sequence[Tensor], specs: Sequence[Spec | None]) -> tuple[Tensor, ...]:
    """Wrap a list of locals; an entry without a spec stays plain."""
    out: list[Any] = []
    for local, spec in zip(locals_, specs):
        if spec is None:
            out.append(local)
        elif spec.plain:
            r = make_wrapper(DTensor, spec.shape, None, None, None, spec.dtype)
            r._local, r._spec = local, spec
            out.append(r)
        else:
            out.append(wrap(local, spec))
    return tuple(out)


# ---- one foreach function -------------------------------------------------------------------


class Foreach:
    """Answers for one foreach function.

    Args:
        func: The foreach function.
        single: The same on one entry.
        entry: The rule of ``single``.
        named: Keyword that the single op has for the argument after ``named_at`` positional ones.
        named_at: See ``named``.
    """

    __slots__ = ("entry", "func", "inplace", "named", "named_at", "single")

    def __init__(
        self,
        func: Any,
        single: Callable[..., Any],
        entry: Entry,
        named: str = "",
        named_at: int = 99,
    ) -> None:
        self.func, self.single, self.entry = func, single, entry
        self.named, self.named_at, self.inplace = named, named_at, entry.inplace

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look the plan up and run it."""
        if self.named and len(args) > self.named_at and isinstance(args[self.named_at], Tensor):
            args = (*args[: self.named_at], args[self.named_at].tolist())  # a number per entry
        key: Any = [func, torch.is_grad_enabled(), torch.get_default_dtype()]
        locals_: list[Any] = []
        for a in args:
            kind = type(a)
            if kind is list or kind is tuple:
                try:
                    key.append(tuple([t._spec for t in a]))
                    locals_.append([t._local for t in a])
                    continue
                except AttributeError:  # plain tensors or numbers
                    pass
            elif kind is float or kind is torch.SymFloat:
                key.append(float)
                locals_.append(a)
                continue
            part, local = take(a)
            key.append(part)
            locals_.append(local)
        named_locals = kwargs
        if kwargs:
            named_locals = {}
            for name, a in kwargs.items():
                part, named_locals[name] = take(a)
                key += (name, part)
        table = transport_of(args, kwargs).state["programs"][mode()]
        key = tuple(key)
        plan = table.get(key)
        if plan is None:
            plan = self.plan(args, kwargs)
            if len(table) > MAX_PROGRAMS:
                table.clear()
            if plan.lasting:
                table[key] = plan
        if not plan.simple:
            return self.run(plan, args, kwargs, locals_, named_locals)
        results = func(*locals_, **named_locals)
        if self.inplace:
            return args[0]
        if plan.specs is None or plan.tidy:
            results = settle(plan, results, transport_of(args, kwargs), self.func)
        return wrap_all(results, plan.specs or ())

    # -- planning ------------------------------------------------------------------------------

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Decide every entry by the single op's rule; entries that look alike are decided once."""
        plan = Plan()
        transport = transport_of(args, kwargs)
        for at, a in _numbered(args, kwargs):
            if type(a) is DTensor and not a._spec.layout.is_replicated:
                plan.lone[at] = mover(a._spec.layout, a._spec.layout.replicated(), transport)
        if plan.lone:
            args, kwargs = _with_whole(args, kwargs)
        odd: set[int] = set()
        known: dict[Any, tuple[dict[Any, Mover | None], Layout | None] | None] = {}
        count = num_entries(args)
        for i in range(count):
            one, named = self.entry_args(i, args, kwargs)
            key = tuple([_key(a) for a in (*one, *named.values())])
            if key not in known:
                known[key] = self._decide(one, named, i, args, kwargs, transport)
            found = known[key]
            if found is None:
                odd.add(i)
                plan.layouts.append(None)
                continue
            movers, layout = found
            plan.layouts.append(layout)
            for at, m in movers.items():
                if m is not None:
                    plan.moves.setdefault(at, [None] * count)[i] = m
        plan.odd = frozenset(odd)
        plan.lasting = not any(is_guarded(a) for _, a in _numbered(args, kwargs))
        plan.simple = not (plan.moves or plan.lone or plan.odd)
        return plan

    def _decide(
        self,
        one: tuple[Any, ...],
        named: dict[str, Any],
        i: int,
        args: Any,
        kwargs: Any,
        transport: Transport,
    ) -> tuple[dict[Any, Mover | None], Layout | None] | None:
        """Moves and result of one entry; None if it is odd."""
        tensors = [t for t in (*one, *named.values()) if isinstance(t, Tensor)]
        specs = [t._spec for t in tensors if type(t) is DTensor]
        if not specs:
            return {}, None
        if any(spec.guards is not None for spec in specs):
            return None  # a copy where a view was asked for: the single call checks what may be done
        if torch.is_grad_enabled():
            mesh = specs[0].layout.mesh
            if any(spec.layout.mesh is not mesh for spec in specs) or any(
                type(t) is not DTensor and t.requires_grad for t in tensors
            ):
                return None  # what enters needs a cast
        call = Call(self.single, one, named, True)
        made = compile_rule(
            self.entry,
            self.single,
            _operands(call, self.single),
            call.tree,
            call.kwargs,
            transport,
        )
        if made is None:
            return None
        program, layouts = made
        if program.ctx is not None or program.template is not None:
            return None
        places = [at for at, a in _numbered(args, kwargs) if isinstance(_nth(a, i), Tensor)]
        movers: dict[Any, Any] = dict(zip(places, program.movers))
        return movers, None if self.inplace else layouts[0]

    def entry_args(
        self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The arguments of the single op for one entry."""
        one = tuple([_nth(a, i) for a in args])
        named = {name: _nth(a, i) for name, a in kwargs.items()}
        if len(one) > self.named_at:
            named[self.named] = one[self.named_at]
            one = one[: self.named_at]
        if "scalars" in named and self.named:
            named[self.named] = named.pop("scalars")
        return one, named

    # -- running -------------------------------------------------------------------------------

    def run(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        locals_: list[Any],
        named: dict[str, Any],
    ) -> Any:
        """Run a plan that moves something, or has odd entries."""
        if plan.lone:
            args, kwargs = _with_whole(args, kwargs)
        count = num_entries(args)
        rest = [i for i in range(count) if i not in plan.odd]
        values: dict[Any, Any] = dict(enumerate(locals_)) | named
        for at, m in plan.lone.items():
            values[at] = m(values[at])
        for at, movers in plan.moves.items():
            values[at] = move_all(values[at], movers)
        results: list[Any] = [None] * count
        if rest:
            picked = {at: _pick(a, rest, count) for at, a in values.items()}
            one = self.func(*[picked.pop(at) for at in range(len(args))], **picked)
            if not self.inplace:
                some = Plan(layouts=[plan.layouts[i] for i in rest])
                one = settle(some, one, transport_of(args, kwargs), self.func)
                assert some.specs is not None, "settled"
                for i, r in zip(rest, wrap_all(one, some.specs)):
                    results[i] = r
        for i in sorted(plan.odd):
            given, by_name = self.entry_args(i, args, kwargs)
            results[i] = self.single(*given, **by_name)
        return args[0] if self.inplace else tuple(results)


def _numbered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def is_guarded(a: Any) -> bool:
    """Whether an argument is, or holds, a view that is a copy, whose every use must be checked."""
    return any(
        type(t) is DTensor and t._spec.guards is not None
        for t in (a if type(a) in (list, tuple) else (a,))
    )


def _nth(a: Any, i: int) -> Any:
    return a[i] if type(a) in (list, tuple) else a


def _pick(a: Any, entries: list[int], count: int) -> Any:
    whole = type(a) not in (list, tuple) or len(entries) == count
    return a if whole else [a[i] for i in entries]


def num_entries(args: tuple[Any, ...]) -> int:
    """Length of the lists; all are equally long, or torch's own check will say so."""
    lists = [len(a) for a in args if type(a) in (list, tuple)]
    if any(n != lists[0] for n in lists):
        raise ShardError(f"the lists of a foreach call must have the same length, got {lists}")
    return lists[0]


def _with_whole(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every lone tensor whole on every rank."""

    def whole(a: Any) -> Any:
        if type(a) is DTensor and not a._spec.layout.is_replicated:
            return a.redistribute(placements=a._spec.layout.replicated())
        return a

    return tuple([whole(a) for a in args]), {name: whole(a) for name, a in kwargs.items()}


def move_all(tensors: Sequence[Tensor], movers: Sequence[Mover | None]) -> list[Tensor]:
    """Move the entries of a list that have a mover, in few collectives."""
    out = list(tensors)
    places = [i for i, m in enumerate(movers) if m is not None]
    moved = move_each([m for m in movers if m is not None], [tensors[i] for i in places])
    for i, t in zip(places, moved):
        out[i] = t
    return out


def settle(
    plan: Plan, results: Sequence[Tensor], transport: Transport, func: Any
) -> list[Tensor]:
    """Fix the results' specs (the dtype is that of the local results), and their stride order."""
    specs: list[Spec | None] = []
    out: list[Tensor] = []
    for t, layout in zip(results, plan.layouts):
        if layout is None:
            specs.append(None)
            out.append(t)
            continue
        spec = spec_of(layout.with_dtype(t.dtype), transport)
        assert t.shape == spec.local_shape or spec.coord is None, (
            f"{func.__name__}: a local result of shape {tuple(t.shape)} for {layout}; the rule is wrong"
        )
        if spec.stride is None and not t.is_contiguous():
            plan.tidy = True
            t = t.contiguous()
        specs.append(spec)
        out.append(t)
    plan.specs = specs
    return out


# ---- the table ------------------------------------------------------------------------------


def _extremum(pure: Any, by_number: Any) -> Callable[..., Any]:
    def single(x: Tensor, other: Any) -> Tensor:
        return pure(x, other) if isinstance(other, Tensor) else by_number(x, other)

    return single


_SINGLES = {
    "maximum": _extremum(torch.maximum, torch.clamp_min),
    "minimum": _extremum(torch.minimum, torch.clamp_max),
    "copy": torch.Tensor.copy_,
    "zero": torch.Tensor.zero_,
}
_OWN = ("norm", "powsum")  # foreach_norm.py


def _in_place(pure: Callable[..., Any]) -> Callable[..., Any]:
    def single(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(pure(x, *args, **kwargs))

    return single


def _register() -> None:
    elementwise = lookup(torch.Tensor.add)
    assert elementwise is not None, "pointwise rules come first"
    for name, func in FOREACH.items():
        if name in _OWN:
            continue
        inplace, base = name.endswith("_"), name.removesuffix("_")
        pure = _SINGLES.get(base) or getattr(torch, base)
        rule = lookup(torch.maximum if base in ("maximum", "minimum") else pure)
        if rule is None:  # no rule for this op: every entry is odd
            rule = Entry(_no_rule)
        method = getattr(torch.Tensor, base + "_", None)
        single = (method or _in_place(pure)) if inplace else pure
        entry = Entry(rule.rule, lifts=True, inplace=inplace)
        named = ("value", 3) if base in ("addcmul", "addcdiv") else ("", 99)
        OVERRIDES[func] = Foreach(func, single, entry, *named)


def _no_rule(*args: Any, **kwargs: Any) -> None:
    return None


_register()
