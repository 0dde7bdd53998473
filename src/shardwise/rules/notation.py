"""How a rule is written: the *factors* of an op, as einsum names them.

A factor names a dim in every operand and result that it runs through. From the labels follows what may be
sharded over a mesh axis without communication: a factor in operands and results stays sharded; one that
only operands have leaves a pending reduction. (The idea is that of einsum and of Shardy's op sharding
rules; the notation is ours.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
import re
from typing import Any

from shardwise.errors import UnsupportedError
from shardwise.layout import boxes
from shardwise.layout.layout import Layout

Labels = tuple[str, ...]

WHOLE = "."  # a dim that must be whole
ONE = "1"  # a dim of size one: whole, and a fresh dim of a result


class Arg:
    """A tensor argument of the call that is being compiled; the rule sees this in its place.

    Attributes:
        index: Position among the call's tensor arguments.
        layout: Its layout on the mesh of the call (plain tensors are replicated).
        plain: Whether it is a plain tensor.
        requires_grad: Whether a gradient will be asked of it.
        is_leaf: Whether it is a leaf of the autograd graph.
        device: Its device.
    """

    __slots__ = ("device", "index", "is_leaf", "layout", "plain", "requires_grad")

    def __init__(
        self,
        index: int,
        layout: Layout,
        *,
        plain: bool = False,
        requires_grad: bool = False,
        is_leaf: bool = True,
        device: Any = None,
    ) -> None:
        self.index, self.layout, self.plain, self.device = index, layout, plain, device
        self.requires_grad, self.is_leaf = requires_grad, is_leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.layout.dtype

    def __repr__(self) -> str:
        """Short typed form."""
        return str(self.layout)


LocalProgram = Callable[
    ..., Any
]  # (ctx, *args, **kwargs) with local tensors for tensor arguments
Localize = Callable[
    ..., tuple[tuple[Any, ...], dict[str, Any]]
]  # (ctx, *args, **kwargs) -> (args, kwargs)


@dataclass(frozen=True, slots=True)
class Rule:
    """What an op allows.

    Attributes:
        ins: Labels of each tensor argument; an argument that is missing must be whole.
        outs: Labels of each tensor result, in order.
        reduce: The pending reduction that sharding a factor leaves when no result has it ("sum" when not
            named); "none" if the local program settles it itself.
        whole: Factors that must not be sharded.
        special: Factors that may be sharded only by the ``local`` program.
        divides: Factors that may be sharded only by a number of ranks that divides this (0: by any); they
            may have other sizes in other operands.
        linear: Sets of arguments that may have a pending sum together (the others being whole of it),
            which the results then have.
        addends: Arguments that are added once: kept on one rank where the result becomes a pending sum.
        local: Local program to run in place of the op where a special factor is sharded.
        always_local: Run ``local`` in any case.
        localize: Makes the op's plain arguments local (view sizes, slice bounds).
        out_shapes: Global shapes of the results, where labels do not tell. A size of None is known to the
            data only, at each run; that dim is whole.
        out_strides: Global strides of the results, where they are not row-major. A local result in another
            order is copied.
        view: The result aliases the first tensor argument.
        scaled: Those of ``divides`` that may also be cut anywhere else, if the cuts fall between whole rows of
            every operand and result.
        boxed: ``local`` and ``localize`` take where pieces lie from the layouts of the context, so any cut of
            the operands will do. None: so it is with our own rules, but not with those of users.
        checked: The rule has checked all that torch refuses; the op's meta kernel is not asked.
        gathers: Results whose labels hold no factor that was sharded are equal on all ranks even so.
    """

    ins: Mapping[Arg, Labels]
    outs: tuple[Labels, ...]
    reduce: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()
    divides: Mapping[str, int] = field(default_factory=dict)
    linear: tuple[frozenset[Arg], ...] = ()
    addends: frozenset[Arg] = frozenset()
    local: LocalProgram | None = None
    always_local: bool = False
    localize: Localize | None = None
    out_shapes: tuple[tuple[Any, ...], ...] | None = None  # of int or None
    out_strides: tuple[tuple[int, ...] | None, ...] | None = None
    view: bool = False
    scaled: frozenset[str] = frozenset()
    boxed: bool | None = None
    checked: bool = False


def labels(text: str) -> Labels:
    """``"b m k"`` as a tuple of labels."""
    return tuple(text.split())


@lru_cache(maxsize=256)
def numbered(prefix: str, count: int) -> Labels:
    """``count`` labels: prefix0, prefix1, ..."""
    return tuple(f"{prefix}{i}" for i in range(count))


def aligned(arg: Arg, names: Labels, shape: tuple[int, ...] | None = None) -> Labels:
    """Labels of an operand that broadcasts against a result with labels ``names``: aligned right.

    With the result's shape, a dim of size one that has that size there too keeps its label.
    """
    tail = names[len(names) - arg.ndim :]
    if shape is not None:
        sizes = shape[len(shape) - arg.ndim :]
        return tuple(
            ONE if n == 1 and size != 1 else name
            for n, name, size in zip(arg.shape, tail, sizes)
        )
    return tuple(ONE if n == 1 else name for n, name in zip(arg.shape, tail))


def _check(text: str, arrow: str, ins: Sequence[Labels], outs: Sequence[Labels]) -> None:
    """Refuse a line that says nothing, or the impossible.

    Raises:
        UnsupportedError: With what is wrong.
    """
    given = {name for names in ins for name in names}
    why = None if arrow else "it has no arrow"
    for names in (*ins, *outs):
        for name in names:
            if not re.fullmatch(r"\w+|\[\w+\]|\.", name):
                why = f"{name!r} is no label"
            elif names.count(name) > 1 and name not in (ONE, WHOLE):
                why = f"{name!r} is there twice in one tensor"
    for name in (name for names in outs for name in names):
        if name not in given and name not in (ONE, WHOLE):
            why = f"{name!r} is in no argument"
    if why is not None:
        raise UnsupportedError(
            f"a rule cannot be read from {text!r}: {why}.",
            tries=['"b m k, b k n -> b m n", as in einsum, with spaces between the labels'],
        )


def without_empty(ins: Mapping[Arg, Labels], factors: Sequence[str]) -> frozenset[str]:
    """Those of the factors that must be whole, because some rank's piece would be empty: the kernel fails there.

    Looks at all axes that cut a factor in some operand, which is at least what will be cut.
    """
    bad: set[str] = set()
    for factor in factors:
        where = [
            (arg, dim)
            for arg, names in ins.items()
            for dim, n in enumerate(names)
            if n == factor
        ]
        axes = tuple(dict.fromkeys(a for arg, dim in where for a in arg.layout.dims[dim]))
        if not axes:
            continue
        sizes = [where[0][0].layout.mesh.shape[a] for a in axes]
        last = [k - 1 for k in sizes]
        if any(
            boxes.nested(arg.shape[dim], sizes, last)[1] == 0 or arg.layout.may_be_empty(dim)
            for arg, dim in where
        ):
            bad.add(factor)
    return frozenset(bad)


def some_empty(ins: Mapping[Arg, Labels]) -> bool:
    """Whether some rank's piece of an operand may be empty, by the axes that cut it or its factors elsewhere."""
    names = {n: None for labels in ins.values() for n in labels if n not in (WHOLE, ONE)}
    return bool(without_empty(ins, tuple(names)))


def line(text: str, *, linear: bool = False) -> Callable[..., Rule | None]:
    """A rule function from one line: ``"b m k, b k n -> b m n"``.

    Args:
        text: The labels of each tensor argument, an arrow, those of each result. ``[n]`` is a dim that must
            be whole, ``1`` a dim of size one. What only arguments have is reduced: a pending sum is left.
        linear: The op is linear in each tensor argument alone, so a pending sum in one passes.

    Returns:
        A rule function; it does not answer for arguments of other shapes than the line's.
    """
    left, arrow, right = text.partition("->")
    ins = [labels(term) for term in left.split(",")]
    outs = tuple(labels(term) for term in right.split(","))
    _check(text, arrow, ins, outs)
    whole = frozenset(name for names in (*ins, *outs) for name in names if name.startswith("["))

    def rule(*args: Any, **kwargs: Any) -> Rule | None:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Arg)]
        if [a.ndim for a in operands] != [len(names) for names in ins]:
            return None
        passing = tuple(frozenset([a]) for a in operands) if linear else ()
        return Rule(dict(zip(operands, ins)), outs, whole=whole, linear=passing)

    return rule
