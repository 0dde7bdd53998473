"""Which reductions exist, for which dtypes, and their value computed in one place.

The value is defined as: combine the members' tensors one after the other, in group order, in
float32 where the dtype is narrower than that. So it is the same on every rank and on every run.
A backend (NCCL, Gloo) may add up in another order of its own; it too gives every rank the same.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.errors import CommError

OPS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")

_NARROW_FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
FLOATS = (torch.float32, torch.float64, *_NARROW_FLOATS)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
INTS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

ALLOWED = frozenset(
    [(op, dtype) for op in ("sum", "avg", "product") for dtype in (*FLOATS, *COMPLEX)]
    + [(op, dtype) for op in ("max", "min") for dtype in FLOATS]
    + [(op, dtype) for op in OPS if op != "avg" for dtype in (*INTS, torch.bool)]
)
"""The (op, dtype) pairs that mean something. For bool: sum, max, bor are "or"; product, min,
band are "and"."""

BOOL_AS = {
    "sum": "max",
    "bor": "max",
    "max": "max",
    "product": "min",
    "band": "min",
    "min": "min",
    "bxor": "bxor",
}
"""The op on 0/1 bytes that is the op on bools."""

# A dtype that torch's CPU kernels cannot add, or that loses too much, and what to add up in.
_WIDER = dict.fromkeys(_NARROW_FLOATS, torch.float32) | {
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}

_INTO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a.add_(b),
    "avg": lambda a, b: a.add_(b),
    "product": lambda a, b: a.mul_(b),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "band": lambda a, b: a.bitwise_and_(b),
    "bor": lambda a, b: a.bitwise_or_(b),
    "bxor": lambda a, b: a.bitwise_xor_(b),
}


class Accumulator:
    """Combines addends, part by part, into ``out``: the value that `reduce_in_order` defines.

    Every place must be taken from its first addend before any other.

    Args:
        out: A fresh tensor.
        op: The reduction.
        count: Number of addends, for an average.
    """

    __slots__ = ("_count", "_op", "_out", "_total")

    def __init__(self, out: Tensor, op: str, count: int) -> None:
        wide = _WIDER.get(out.dtype)
        if out.dtype == torch.bool:
            op = {"max": "bor", "min": "band"}.get(BOOL_AS[op], op)
        self._out, self._op, self._count = out, op, count
        self._total = out if wide is None else out.to(wide)

    def take(self, at: tuple[slice, ...], part: Tensor, first: bool) -> None:
        """Combine one addend of a part of the whole."""
        if first:
            self._total[at] = part
        else:
            total = self._total[at]
            _INTO[self._op](total, part.to(total.dtype))

    def result(self) -> Tensor:
        """The combined tensor."""
        if self._op == "avg":
            self._total.div_(self._count)
        return self._total if self._total is self._out else self._total.to(self._out.dtype)


def refuse(op: str, dtype: torch.dtype) -> CommError:
    """Say why (op, dtype) is not in `ALLOWED`."""
    if op not in OPS:
        return CommError(f"there is no reduction {op!r}; there are {', '.join(OPS)}.")
    return CommError(f"a reduction by {op!r} means nothing for {dtype}.")


def reduce_in_order(parts: Sequence[Tensor], op: str) -> Tensor:
    """Combine ``parts`` one after the other; a fresh tensor of their shape and dtype.

    The parts must not require grad, and (op, dtype) must be in `ALLOWED`.
    """
    dtype = parts[0].dtype
    wide = _WIDER.get(dtype)
    if wide is not None:
        parts = [part.to(wide) for part in parts]
        total = parts[0]
    elif dtype == torch.bool:
        op = {"max": "bor", "min": "band"}.get(BOOL_AS[op], op)
        total = parts[0].clone()
    else:
        total = parts[0].clone()
    into = _INTO[op]
    for part in parts[1:]:
        into(total, part)
    if op == "avg":
        total.div_(len(parts))
    return total if wide is None else total.to(dtype)
