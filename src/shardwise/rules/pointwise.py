"""Elementwise ops: every dim is a factor of its own. ATen tags them; torch's names follow from its.

A pending sum passes through what is linear: one factor of a product, both sides of a sum, a dividend.
"""

from __future__ import annotations

from dataclasses import replace
import functools
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import Arg, Rule, aligned, numbered
from shardwise.rules.registry import SPACES, lookup, rule

# Linear in all tensor operands together (a scalar operand would be added once per rank: not linear).
_SUMS = ("add", "sub", "subtract", "rsub")
# Linear in each tensor operand alone.
_PRODUCTS = ("mul", "multiply", "div", "divide", "true_divide")
_LINEAR_UNARY = (
    "neg", "negative", "positive", "clone", "conj", "conj_physical", "deg2rad", "rad2deg",
    "contiguous", "detach", "alias", "resolve_conj", "resolve_neg", "float", "double", "half", "bfloat16",
)  # fmt: skip
# Not tagged by ATen, or composite, but elementwise all the same; no float argument decides the program.
_MORE = (
    "relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "mish", "softplus", "softsign", "tanhshrink",
    "softshrink", "hardshrink", "logsigmoid", "elu", "selu", "celu", "gelu", "leaky_relu", "threshold", "relu",
    "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "clip", "clamp",
    "clamp_min", "clamp_max", "concat_", "divide", "fix", "floor_divide", "fmod", "greater", "greater_equal",
    "less", "less_equal", "logical_and", "logical_or", "logical_not", "logical_xor", "multiply", "negative",
    "not_equal", "square", "subtract", "true_divide", "lerp", "isfinite", "isinf", "isnan", "isreal",
    "isneginf", "isposinf", "float_power", "ldexp", "masked_fill", "sigmoid", "tanh", "copysign", "xlogy",
    "nan_to_num", "addcmul", "addcdiv", "pow", "rsub", "bool", "byte", "char", "short", "int", "long", "float",
    "double", "half", "bfloat16", "clone", "conj", "conj_physical", "positive", "angle", "polar",
    "complex", "sgn", "expm1", "log1p", "log_sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma", "mvlgamma",
    "polygamma", "i0", "sinc", "logit", "expit", "heaviside", "hypot", "nextafter", "gcd", "lcm", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "frexp",
    "fake_quantize_per_tensor_affine", "dequantize", "detach", "resolve_conj", "resolve_neg", "isclose",
)  # fmt: skip
_OPERATORS = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__",
    "__floordiv__", "__rfloordiv__", "__rmod__", "__and__", "__or__", "__xor__", "__rand__", "__ror__", "__rxor__",
    "__invert__", "__lshift__", "__rshift__", "__rlshift__", "__rrshift__", "__add__", "__radd__", "__mul__", "__rmul__",
    "__sub__", "__truediv__", "__mod__", "__pow__", "__neg__", "__abs__", "__div__", "__pos__",
)  # fmt: skip
# A value decides what is computed: keyed by value. (The rest passes floats at run time.)
_KEYED = ("nan_to_num", "fake_quantize_per_tensor_affine", "mvlgamma", "polygamma")
# Wrongly caught by the tag: results are random, or of another shape.
_NOT = frozenset(
    (
        "bernoulli",
        "normal",
        "dropout",
        "native_dropout",
        "rand_like",
        "randn_like",
        "randint_like",
        "copy",
    )
)


def tensor_operands(*trees: Any) -> list[Arg]:
    """The tensor arguments in a call's arguments, in order."""
    out: list[Arg] = []
    for x in trees:
        if isinstance(x, Arg):
            out.append(x)
        elif isinstance(x, (tuple, list)):
            out += tensor_operands(*x)
        elif isinstance(x, dict):
            out += tensor_operands(*x.values())
    return out


def elementwise(
    operands: list[Arg], linear: tuple[frozenset[Arg], ...] = (), results: int = 1
) -> Rule:
    """The rule of an op that broadcasts its operands and works element by element."""
    shape = operands[0].shape if operands else ()
    if all(a.shape == shape for a in operands):  # torch's broadcasting takes its time
        names = numbered("d", len(shape))
        ins = dict.fromkeys(operands, names)
    else:
        shape = tuple(torch.broadcast_shapes(*(a.shape for a in operands)))
        names = numbered("d", len(shape))
        ins = {a: aligned(a, names, shape) for a in operands}
    return Rule(ins, (names,) * results, linear=linear, out_shapes=(shape,) * results)


def pointwise(*args: Any, **kwargs: Any) -> Rule | None:
    """Any elementwise op that is not linear."""
    return elementwise(tensor_operands(args, kwargs))


def choice(*args: Any, **kwargs: Any) -> Rule:
    """One of two values by a condition, of pending sums too; a value that is whole is one rank's addend then.

    The condition is the first of the function's arguments, the second of the method's.
    """
    operands = tensor_operands(args, kwargs)
    values = frozenset(a for a in operands if a.dtype.is_floating_point or a.dtype.is_complex)
    made = elementwise(operands)
    pending = [a for a in values if any(a.layout.partial)]
    if len(values) != 2 or len(operands) != 3 or not pending:
        return made
    if len(pending) == 1 and (pending[0].shape,) != made.out_shapes:
        return made  # it is smaller than the result, so it is settled for less
    return replace(made, linear=(values,), addends=values)


def lerp(input: Arg, end: Any, weight: Any) -> Rule | None:
    """Between two values, of pending sums too."""
    operands = tensor_operands(input, end, weight)
    ends = frozenset(tensor_operands(input, end))
    return elementwise(operands, (ends,) if len(ends) == 2 and weight not in ends else ())


def linear_unary(x: Arg, *args: Any, **kwargs: Any) -> Rule:
    """Elementwise and linear in its one operand."""
    return elementwise([x], (frozenset([x]),))


def pointwise_sum(*args: Any, **kwargs: Any) -> Rule:
    """A sum of tensors: pending sums on all sides may stay."""
    operands = tensor_operands(args, kwargs)
    return elementwise(operands, (frozenset(operands),) if len(operands) > 1 else ())


def pointwise_product(a: Any, b: Any = None, *args: Any, **kwargs: Any) -> Rule:
    """A product or quotient: linear in one factor; a quotient only in the dividend."""
    operands = tensor_operands(a, b, args, kwargs)
    linear = tuple(frozenset([x]) for x in operands)
    return _by_number(elementwise(operands, linear), operands, torch.mul)


def pointwise_quotient(
    a: Any, b: Any = None, *args: Any, rounding_mode: str | None = None, **kwargs: Any
) -> Rule:
    """A quotient: linear in the dividend, unless it is rounded."""
    operands = tensor_operands(a, b, args, kwargs)
    linear = (frozenset([a]),) if isinstance(a, Arg) and rounding_mode is None else ()
    made = elementwise(operands, linear)
    return _by_number(made, operands, torch.div) if linear else made


def _by_number(made: Rule, operands: list[Arg], op: Any) -> Rule:
    """The rule of a pending sum times, or over, a Python number: it looks at the number at each run."""
    if len(operands) != 1 or "sum" not in operands[0].layout.partial:
        return made
    return replace(made, local=functools.partial(_multiple, op), always_local=True)


def _multiple(op: Any, ctx: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The multiple of each addend; where that could be inf - inf, of the sum, which then is the first rank's addend."""
    if not isinstance(x, Tensor):  # number * x
        x, args = args[0], (x, *args[1:])
    number = next(n for n in (*args, *kwargs.values()) if n is not None)
    if not _infinite(number, x.dtype, op is torch.div):
        return ctx.func(x, *args, **kwargs)
    pending = tuple(a for a, how in enumerate(ctx.ins[0].layout.partial) if how == "sum")
    group = ctx.group_over(pending)
    out = group.keep(op(group.sum(x), number))
    return x.copy_(out) if ctx.func.__name__.endswith("_") else out


def _infinite(number: Any, dtype: torch.dtype, divides: bool) -> bool:
    """Whether a factor, in the precision that it is applied in, may be infinite."""
    if not isinstance(number, (int, float, complex)):  # one that a captured step is given later
        return False
    double = dtype in (torch.float64, torch.complex128)
    limits = torch.finfo(torch.float64 if double else torch.float32)
    return abs(number) < limits.tiny if divides else abs(number) > limits.max


def two_results(*args: Any, **kwargs: Any) -> Rule:
    """Elementwise with two results (frexp)."""
    return elementwise(tensor_operands(args, kwargs), results=2)


def _cast(x: Arg, *args: Any, **kwargs: Any) -> Rule:
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    others = tensor_operands(args, kwargs)
    dtypes += [a.dtype for a in others]
    exact = (
        all(d.is_floating_point or d.is_complex for d in dtypes) and x.dtype.is_floating_point
    )
    names = numbered("d", x.ndim)
    ins = {x: names} | {a: (".",) * a.ndim for a in others}
    return Rule(ins, (names,), linear=(frozenset([x]),) if exact else ())


def _copy_(x: Arg, src: Any, *args: Any, **kwargs: Any) -> Rule:
    names = numbered("d", x.ndim)
    operands = tensor_operands(src)
    both = len(operands) == 1 and operands[0].shape == x.shape
    ins = {x: names} | {a: aligned(a, names, x.shape) for a in operands}
    return Rule(ins, (names,), linear=(frozenset([x, *operands]),) if both else ())


def _fill_(input: Arg, value: Any) -> Rule:
    names = numbered("d", input.ndim)
    return Rule({input: names} | {a: (".",) * a.ndim for a in tensor_operands(value)}, (names,))


def _zero_(x: Arg) -> Rule:
    return linear_unary(x)


def _elementwise(overload: Any) -> bool:
    """Whether ATen says so; its tag is also on ``equal``, which gives one bool."""
    returns = overload._schema.returns
    return torch.Tag.pointwise in overload.tags and all(
        isinstance(r.type, torch.TensorType) for r in returns
    )


def _names() -> dict[str, Any]:
    """Every elementwise name with its rule function."""
    names: dict[str, Any] = {}
    for packet in dir(torch.ops.aten):
        if packet.startswith("_") or packet.endswith(("_", "_backward")) or packet in _NOT:
            continue
        op = getattr(torch.ops.aten, packet)
        if not hasattr(op, "overloads"):
            continue
        if any(_elementwise(getattr(op, o)) for o in op.overloads() if not o.endswith("out")):
            names[packet] = pointwise
    names |= dict.fromkeys(_MORE, pointwise) | dict.fromkeys(_OPERATORS, pointwise)
    names |= dict.fromkeys(_SUMS, pointwise_sum) | dict.fromkeys(
        _PRODUCTS[:2], pointwise_product
    )
    names |= dict.fromkeys(_PRODUCTS[2:], pointwise_quotient) | dict.fromkeys(
        _LINEAR_UNARY, linear_unary
    )
    names |= {
        "__mul__": pointwise_product,
        "__rmul__": pointwise_product,
        "__add__": pointwise_sum,
    }
    names |= {"__sub__": pointwise_sum, "__radd__": pointwise_sum, "__rsub__": pointwise_sum}
    names |= {"__truediv__": pointwise_quotient, "__neg__": linear_unary, "frexp": two_results}
    names |= {"lerp": lerp}
    names |= {"to": _cast, "type_as": _cast, "_to_copy": _cast, "type": _cast}
    names.pop("copy", None)
    return names


def _register() -> None:
    for name, fn in _names().items():
        spaces = [s for s in SPACES if hasattr(s, name) and callable(getattr(s, name))]
        found = [getattr(s, name) for s in spaces]
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and hasattr(packet, "overloads"):
            found += [getattr(packet, o) for o in packet.overloads() if not o.endswith("out")]
        for f in dict.fromkeys(found):
            if lookup(f) is None:
                rule(f, lifts=name not in _KEYED)(fn)
        for space in (torch.Tensor, torch, torch.nn.functional):
            written = getattr(space, name + "_", None) if not name.startswith("__") else None
            if written is not None and callable(written) and lookup(written) is None:
                rule(written, lifts=name not in _KEYED, inplace=True)(fn)
    for f in (torch.Tensor.copy_, torch.ops.aten.copy_.default):
        rule(f, inplace=True)(_copy_)
    for f in (torch.Tensor.fill_, torch.fill_):
        rule(f, lifts=True, inplace=True)(_fill_)
    rule(torch.fill, "aten.fill", lifts=True)(_fill_)
    for f in (torch.Tensor.zero_, torch.zero_):
        rule(f, inplace=True)(_zero_)


_register()
