"""Numbers that a step reads from tensors (``step.item()`` of an optimizer, a learning rate).

Python must not see their values while the step is recorded: at the next run they are others. So it sees a
``torch.SymFloat`` whose arithmetic is noted, operation by operation in Python's own order (bit for bit what eager
mode computes), and whose value cannot be asked for.
"""
# ruff: noqa: D102  the methods are those that torch calls

from __future__ import annotations

from collections.abc import Callable
import operator
import sys
from typing import Any

import torch

_ASKED = "a number that is read from a tensor decides what the program does, or leaves it"
HINT = 0.5  # what a fake kernel is given: it decides nothing


class NumberNode:
    """What torch calls the node of a SymFloat; ``note`` adds an operation to the tape."""

    __slots__ = ("decide", "note", "refuse", "value")

    def __init__(
        self,
        value: Any,
        note: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any],
        refuse: Callable[[str], Exception],
        decide: Callable[..., bool] | None = None,
    ) -> None:
        self.value, self.note, self.refuse, self.decide = value, note, refuse, decide

    # ---- what torch asks before it computes ------------------------------------------------------

    def is_int(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def constant_int(self) -> None:
        return None

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def has_hint(self) -> bool:
        return True

    @property
    def hint(self) -> float:
        return HINT

    def clone(self) -> NumberNode:
        return self

    def str(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return repr(self.value)

    __repr__ = __str__

    def _graph_repr(self) -> str:
        return repr(self.value)

    def wrap_float(self, x: float) -> NumberNode:
        return NumberNode(x, self.note, self.refuse)

    def wrap_int(self, x: int) -> NumberNode:
        return NumberNode(x, self.note, self.refuse)

    # ---- arithmetic ------------------------------------------------------------------------------

    def _noted(self, name: str, call: Callable[..., Any], *others: Any) -> NumberNode:
        args = tuple(x.value if isinstance(x, NumberNode) else x for x in (self, *others))
        return NumberNode(self.note(name, call, args), self.note, self.refuse)

    def add(self, other: Any) -> NumberNode:
        return self._noted("+", operator.add, other)

    def sub(self, other: Any) -> NumberNode:
        return self._noted("-", operator.sub, other)

    def mul(self, other: Any) -> NumberNode:
        return self._noted("*", operator.mul, other)

    def truediv(self, other: Any) -> NumberNode:
        return self._noted("/", operator.truediv, other)

    float_truediv = int_truediv = truediv

    def pow(self, other: Any) -> NumberNode:
        return self._noted("**", operator.pow, other)

    float_pow = pow_by_natural = pow

    def neg(self) -> NumberNode:
        return self._noted("neg", operator.neg)

    def sym_float(self) -> NumberNode:
        return self

    def sym_sqrt(self) -> NumberNode:
        return self._noted("sqrt", _root)

    def sym_max(self, other: Any) -> NumberNode:
        return self._noted("max", max, other)

    def sym_min(self, other: Any) -> NumberNode:
        return self._noted("min", min, other)

    def mod(self, other: Any) -> NumberNode:
        return self._noted("%", operator.mod, other)

    def abs(self) -> NumberNode:
        return self._noted("abs", abs)

    # ---- comparisons: torch may assume what it checks, Python may not look ------------------------

    def _compared(self, call: Callable[..., bool], other: Any) -> NumberNode:
        against = other.value if isinstance(other, NumberNode) else other
        decide = self.decide
        if decide is None or not isinstance(against, (int, float)):
            return _Comparison(self.value, self.note, self.refuse)
        return _Comparison(self.value, self.note, self.refuse, lambda: decide(call, against))

    def ge(self, other: Any) -> NumberNode:
        return self._compared(operator.ge, other)

    def gt(self, other: Any) -> NumberNode:
        return self._compared(operator.gt, other)

    def le(self, other: Any) -> NumberNode:
        return self._compared(operator.le, other)

    def lt(self, other: Any) -> NumberNode:
        return self._compared(operator.lt, other)

    def eq(self, other: Any) -> NumberNode:
        return self._compared(operator.eq, other)

    def ne(self, other: Any) -> NumberNode:
        return self._compared(operator.ne, other)

    def bool_(self) -> bool:
        if self.decide is None:
            raise self.refuse(_ASKED)
        return self.decide(operator.ne, 0)

    # ---- its value -------------------------------------------------------------------------------

    def guard_float(self, file: Any, line: Any) -> Any:
        """Its value is asked for; for a hash the answer is that there is none."""
        if sys._getframe(2).f_code.co_name == "__hash__":
            return hash([])
        raise self.refuse(_ASKED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refused(*args: Any) -> Any:
            raise self.refuse(_ASKED)

        return refused


class _Comparison(NumberNode):
    """Whether one number is larger than another: torch checks it (``x >= 0`` of a power), a program may not."""

    __slots__ = ()

    def is_bool(self) -> bool:
        return True

    def is_float(self) -> bool:
        return False

    def expect_true(self, file: Any, line: Any) -> bool:
        """Torch's check of an argument: taken to hold, as in eager mode a step before."""
        return True

    def bool_(self) -> bool:
        """Python asks: a hyperparameter's answer holds for this step, and is asked for again before each run."""
        if self.decide is None:
            raise self.refuse(_ASKED)
        return self.decide()

    def guard_bool(self, file: Any, line: Any) -> bool:
        return self.bool_()


def _root(x: float) -> float:
    return x**0.5


def number(
    value: Any,
    note: Callable[..., Any],
    refuse: Callable[[str], Exception],
    decide: Callable[..., bool] | None = None,
) -> torch.SymFloat:
    """A number for Python that stands for a value of the tape; ``decide`` answers its comparisons."""
    return torch.SymFloat(NumberNode(value, note, refuse, decide))
