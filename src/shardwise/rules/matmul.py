"""Products of matrices and tensors: a contracted factor leaves a pending sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import Arg, Labels, Rule, aligned, line, numbered, without_empty
from shardwise.rules.registry import rule


def contraction(
    ins: dict[Arg, Labels], out: Labels, factors: tuple[Arg, ...], addend: Arg | None = None
) -> Rule:
    """Linear in each factor alone; an addend is added once where the product is a pending sum."""
    pending = tuple(frozenset([f] if addend is None else [f, addend]) for f in factors)
    return Rule(
        ins,
        (out,),
        linear=pending,
        addends=frozenset() if addend is None else frozenset([addend]),
    )


rule("mm", "aten.mm")(line("m k, k n -> m n", linear=True))
rule("bmm", "aten.bmm")(line("b m k, b k n -> b m n", linear=True))
rule("mv", "aten.mv")(line("m k, k -> m", linear=True))
rule("dot", "vdot", "aten.dot", "aten.vdot")(line("k, k ->", linear=True))
rule("outer", "ger")(line("m, n -> m n", linear=True))


@rule("matmul", "__matmul__", "aten.matmul")
def matmul(input: Arg, other: Arg, *_: Any, **__: Any) -> Rule | None:
    """All forms of matmul: vectors, matrices, broadcast batches."""
    if input.ndim == 0 or other.ndim == 0:
        return None
    left = ("m", "k") if input.ndim > 1 else ("k",)
    right = ("k", "n") if other.ndim > 1 else ("k",)
    batches = max(input.ndim, other.ndim, 2) - 2
    names = numbered("b", batches)
    ins = {
        input: (*_batch(input, names), *left),
        other: (*_batch(other, names), *right),
    }
    out = (*names, *left[:-1], *right[1:])
    shape = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    shape = (
        *shape,
        *(input.shape[-2:-1] if input.ndim > 1 else ()),
        *(other.shape[-1:] if other.ndim > 1 else ()),
    )
    made = contraction(ins, out, (input, other))
    return Rule(made.ins, made.outs, linear=made.linear, out_shapes=(tuple(shape),))


@rule("__rmatmul__")
def rmatmul(input: Arg, other: Arg) -> Rule | None:
    """``other @ input``."""
    return matmul(other, input)


def _batch(arg: Arg, names: Labels) -> Labels:
    count = max(arg.ndim - 2, 0)
    return tuple(
        "1" if n == 1 else name
        for n, name in zip(arg.shape[:count], names[len(names) - count :])
    )


@rule("linear", "aten.linear")
def linear(input: Arg, weight: Arg, bias: Arg | None = None) -> Rule | None:
    """``... k, n k, n -> ... n``; the bias is added once where the product is a pending sum."""
    if weight.ndim != 2 or input.ndim == 0:
        return None
    names = numbered("b", input.ndim - 1)
    ins = {input: (*names, "k"), weight: ("n", "k")}
    if bias is not None:
        ins[bias] = ("n",)
    return contraction(ins, (*names, "n"), (input, weight), bias)


@rule("bilinear", "aten.bilinear")
def bilinear(input1: Arg, input2: Arg, weight: Arg, bias: Arg | None = None) -> Rule | None:
    """``b i, b j, o i j, o -> b o``; linear in each, but for the bias, which is added once."""
    if weight.ndim != 3 or not input1.ndim or input1.ndim != input2.ndim:
        return None
    names = numbered("b", input1.ndim - 1)
    ins = {input1: (*names, "i"), input2: (*names, "j"), weight: ("o", "i", "j")}
    if bias is not None:
        ins[bias] = ("o",)
    made = contraction(ins, (*names, "o"), (input1, input2, weight), bias)
    return replace(made, whole=without_empty(ins, (*names, "i", "j", "o")))


def _scaled_addend(
    scales: tuple[Any, Any],
    addend: Arg,
    ins: dict[Arg, Labels],
    out: Labels,
    factors: tuple[Arg, ...],
) -> Rule | None:
    if (
        not addend.dtype.is_floating_point
        and not addend.dtype.is_complex
        and any(type(s) is float for s in scales)
    ):
        return None  # whether torch cuts the fraction off or raises depends on the sizes
    ins = {addend: aligned(addend, out), **ins}
    made = contraction(ins, out, factors, addend)
    sizes = {name: n for a in factors for name, n in zip(ins[a], a.shape)}
    empty = any(0 in a.shape for a in factors)  # the product is zero
    return Rule(
        ins,
        (out,),
        linear=(*made.linear, frozenset([addend])) if empty else made.linear,
        addends=made.addends,
        out_shapes=(tuple(sizes[name] for name in out),),
    )


@rule("addmm", "aten.addmm")
def addmm(
    input: Arg, mat1: Arg, mat2: Arg, *, beta: Any = 1, alpha: Any = 1, **_: Any
) -> Rule | None:
    """``m n, m k, k n -> m n``."""
    return _scaled_addend(
        (beta, alpha), input, {mat1: ("m", "k"), mat2: ("k", "n")}, ("m", "n"), (mat1, mat2)
    )


@rule("baddbmm", "aten.baddbmm")
def baddbmm(
    input: Arg, batch1: Arg, batch2: Arg, *, beta: Any = 1, alpha: Any = 1, **_: Any
) -> Rule | None:
    """``b m n, b m k, b k n -> b m n``."""
    ins = {batch1: ("b", "m", "k"), batch2: ("b", "k", "n")}
    return _scaled_addend((beta, alpha), input, ins, ("b", "m", "n"), (batch1, batch2))


@rule("addbmm", "aten.addbmm")
def addbmm(
    input: Arg, batch1: Arg, batch2: Arg, *, beta: Any = 1, alpha: Any = 1, **_: Any
) -> Rule | None:
    """``m n, b m k, b k n -> m n``: the batch is summed too."""
    ins = {batch1: ("b", "m", "k"), batch2: ("b", "k", "n")}
    return _scaled_addend((beta, alpha), input, ins, ("m", "n"), (batch1, batch2))


@rule("addr", "aten.addr")
def addr(
    input: Arg, vec1: Arg, vec2: Arg, *, beta: Any = 1, alpha: Any = 1, **_: Any
) -> Rule | None:
    """``m n, m, n -> m n``."""
    return _scaled_addend(
        (beta, alpha), input, {vec1: ("m",), vec2: ("n",)}, ("m", "n"), (vec1, vec2)
    )


@rule("addmv", "aten.addmv")
def addmv(
    input: Arg, mat: Arg, vec: Arg, *, beta: Any = 1, alpha: Any = 1, **_: Any
) -> Rule | None:
    """``m, m k, k -> m``."""
    ins = {mat: ("m", "k"), vec: ("k",)}
    made = _scaled_addend((beta, alpha), input, ins, ("m",), (mat, vec))
    # torch gives the addend's own shape, not that of the product, when a matrix is empty
    if made is None or input.shape == mat.shape[:1]:
        return made
    return replace(made, whole=without_empty(ins, ("m", "k")))


@rule(torch.functional.einsum, torch.einsum)
def einsum(equation: Any, *operands: Any) -> Rule | None:
    """Einsum in its string form; a repeated label in one operand is left to the ladder."""
    if not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None
    rank = max(
        (op.ndim - len(t.replace("...", "")) for t, op in zip(terms, operands) if "..." in t),
        default=0,
    )
    dots = numbered("...", rank)
    ins: dict[Arg, Labels] = {}
    for term, op in zip(terms, operands):
        before, has, after = term.partition("...")
        count = op.ndim - len(before) - len(after) if has else 0
        names = (*before, *(dots[len(dots) - count :] if has else ()), *after)
        if len(set(names)) != len(names) or len(names) != op.ndim:
            return None
        ins[op] = tuple("1" if n == 1 else name for name, n in zip(names, op.shape))
    letters = sorted({c for t in terms for c in t.replace("...", "")})
    if not arrow:
        once = [c for c in letters if left.count(c) == 1]
        right = "..." * bool(rank) + "".join(once)
    before, has, after = right.partition("...")
    out = (*before, *(dots if has else ()), *after)
    if not has and rank:
        return None
    sizes = {"1": 1}
    for term, op in zip(terms, operands):
        before, has, after = term.partition("...")
        count = op.ndim - len(before) - len(after) if has else 0
        for name, n in zip(
            (*before, *(dots[len(dots) - count :] if has else ()), *after), op.shape
        ):
            sizes[name] = max(sizes.get(name, 1), n) if n != 0 else 0
    shape = tuple(sizes[name] for name in out)
    linear = tuple(frozenset([op]) for op in operands)
    summed = frozenset(name for names in ins.values() for name in names) - {*out, "1"}
    return Rule(
        ins, (out,), special=summed, linear=linear, local=_einsum_pieces, out_shapes=(shape,)
    )


def _einsum_pieces(ctx: Any, equation: Any, *operands: Any) -> Tensor:
    """Cast as autocast would: torch does not where the summed dims have size one, as those of a piece may."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    device = operands[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        operands = tuple(
            [
                t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
                for t in operands
            ]
        )
    return torch.einsum(equation, *operands)
