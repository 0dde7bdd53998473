"""The table: which rule answers for a callable.

A rule is a function with the parameters of the op it stands for, which gets ``Arg``s for tensors and
returns a ``Rule`` (or None: not like this, go down the ladder). The built-in table is sealed after import;
rules of users live in a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.compat import NN_BUILTINS, custom_overload
from shardwise.errors import UnsupportedError
from shardwise.rules.notation import Rule, line

RuleFunction = Callable[..., Rule | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered rule.

    Attributes:
        rule: The rule function.
        lifts: Float arguments do not decide the program; they are passed at run time.
        inplace: The call writes into its first tensor argument, and returns it.
        of_user: What the rule raises is the user's to see.
    """

    rule: RuleFunction
    lifts: bool = False
    inplace: bool = False
    of_user: bool = False


_BUILTIN: dict[Any, Entry] = {}
_USER: dict[Any, Entry] = {}
_SEALED: list[bool] = []
SPACES = (torch, torch.Tensor, F, NN_BUILTINS, torch.special, torch.linalg, torch.fft)


def lookup(func: Any) -> Entry | None:
    """The rule for a callable: a user's before ours."""
    return _USER.get(func) or _BUILTIN.get(func)


def seal() -> None:
    """Close the built-in table."""
    _SEALED.append(True)


def functions(*names: str) -> list[Any]:
    """Every torch callable of these names: function, method, functional, in-place forms not included.

    ``aten.name`` or ``aten.name.overload`` names ATen ops; without an overload, all of them.
    """
    found: list[Any] = []
    for name in names:
        if name.startswith("aten."):
            found += _aten(name.removeprefix("aten."))
            continue
        hits = [getattr(space, name) for space in SPACES if hasattr(space, name)]
        assert hits, f"torch has nothing called {name}"
        found += hits
    return list(dict.fromkeys(f for f in found if callable(f)))


def _aten(name: str) -> list[Any]:
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    assert packet is not None, f"aten has nothing called {name}"
    return [
        getattr(packet, o)
        for o in ([overload] if overload else packet.overloads())
        if not o.endswith("out")
    ]


def rule(
    *targets: Any, lifts: bool = False, inplace: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for callables, or for names (see ``functions``)."""

    def register(fn: RuleFunction) -> RuleFunction:
        assert not _SEALED, "the built-in table is sealed; use register_rule"
        entry = Entry(fn, lifts, inplace)
        for target in targets:
            for f in functions(target) if isinstance(target, str) else [target]:
                _BUILTIN[f] = entry
        return fn

    return register


def register_rule(
    op: Any, fn: RuleFunction | str, *, lifts: bool = False, inplace: bool = False
) -> None:
    """Register a user's rule for any callable, also for one that has a built-in rule.

    Register before the first call: programs that are compiled already keep the rule they were made by.

    Args:
        op: The torch function, or the custom op: what ``torch.library.custom_op`` returned, ``torch.ops.my.op``
            (all its overloads), or one overload.
        fn: Takes the op's arguments with ``Arg`` for tensors, returns a ``Rule`` or None; or one line such
            as ``"m k, k n -> m n"`` (see ``notation.line``).
        lifts: Float arguments do not decide the program.
        inplace: The op writes into its first tensor argument.

    Raises:
        UnsupportedError: ``op`` is not callable.
    """
    if not callable(op):
        raise UnsupportedError(f"a rule is registered for a callable, got {op!r}")
    entry = Entry(line(fn) if isinstance(fn, str) else fn, lifts, inplace, True)
    for name in _names_of(op):
        _USER[name] = entry


def _names_of(op: Any) -> list[Any]:
    """All that a call of this op may arrive as: a custom op is called as itself, its packet or its overload."""
    op = custom_overload(op) or op
    packet = getattr(op, "overloadpacket", None) or op
    if not hasattr(packet, "overloads"):
        return [op]
    overloads = [getattr(packet, name) for name in packet.overloads()]
    if op is packet:
        return [packet, *overloads]
    return [op, packet] if overloads == [op] else [op]


def registered() -> Iterable[tuple[Any, Entry]]:
    """All built-in entries."""
    return _BUILTIN.items()
