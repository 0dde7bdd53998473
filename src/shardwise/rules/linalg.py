"""Matrices worked on whole, one by one: the batch may be cut, and so may the right-hand sides.

``b [m] [n] -> ...`` for a factorization, ``b [n] [n], b [n] c -> b [n] c`` for a solver, which is linear in its
right-hand sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
import re
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.edges import marked, nothing, tied
from shardwise.rules.loss import bind
from shardwise.rules.notation import (
    ONE,
    WHOLE,
    Arg,
    Labels,
    Rule,
    aligned,
    numbered,
    some_empty,
)
from shardwise.rules.pointwise import tensor_operands
from shardwise.rules.registry import functions, rule

_L = torch.linalg
Refused: Any = _L.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
Cores = tuple[int, ...]


def like_torch(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] | None:
    """Shape, strides and dtype of the results for operands of the global shapes; None if torch has no answer."""

    def meta(x: Any) -> Any:
        if isinstance(x, Arg):
            return torch.empty_strided(x.shape, x.layout.stride, dtype=x.dtype, device="meta")
        return [meta(y) for y in x] if isinstance(x, (tuple, list)) else x

    try:
        with torch.no_grad():
            got = func(*map(meta, args), **{k: meta(v) for k, v in kwargs.items()})
    except (RuntimeError, ValueError, NotImplementedError, IndexError):
        return None
    results = got if isinstance(got, (tuple, list)) else (got,)
    return [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in results]


def with_marks(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """``with_edges`` for a single result that some kernel of the call leaves without a second gradient."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return marked(with_edges(ctx, *args, **kwargs), tensors)


def with_edges(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """The call on a piece; results of an empty one keep their edges, which some kernels drop."""
    got = ctx.func(*args, **kwargs)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if isinstance(got, Tensor):
        return tied(got, tensors) if got.numel() == 0 else got
    kept = [tied(t, tensors) if t.numel() == 0 and t.requires_grad else t for t in got]
    return type(got)(kept)


class _Together:
    """The call on a piece of a batch, for kernels that refuse some matrices: where one rank raises, all do.

    One number goes round: the first element of the batch that was refused somewhere.

    Attributes:
        names: The factors of the batch.
        batch: Its global shape.
        call: Runs on the piece.
    """

    __slots__ = ("batch", "call", "names")

    def __init__(self, names: Labels, batch: tuple[int, ...], call: Any = with_edges) -> None:
        self.names, self.batch, self.call = names, batch, call

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Run, and compare notes."""
        got, error = None, None
        try:
            got = self.call(ctx, *args, **kwargs)
        except Refused as refused:
            error = refused
        group = ctx.group(*(n for n in self.names if n in ctx.axes))
        if group.size > 1:
            text, element = self.told(ctx, error)
            device = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)).device
            first = group.check(torch.tensor(element, device=device))
            if first < _NONE:
                raise Refused(dict(group.objects((element, text)))[first])
        if error is not None:
            raise error
        return got

    def told(self, ctx: Any, error: Exception | None) -> tuple[str, int]:
        """The message, and the number in the whole batch of the element that it names."""
        if error is None:
            return "", _NONE
        text = str(error)
        found = re.search(r"\(Batch element (\d+)\)", text)
        offsets = ctx.outs[0].offsets[: len(self.batch)]
        local = ctx.outs[0].local_shape[: len(self.batch)]
        here = int(found[1]) if found else 0
        element, scale = 0, 1
        for n, piece, start in zip(self.batch[::-1], local[::-1], offsets[::-1]):
            element += (here % piece + start) * scale
            here, scale = here // piece, scale * n
        if found:
            text = text.replace(found[0], f"(Batch element {element})", 1)
        return text, element


_NONE = 2**62  # no element of any batch


def _batched(
    cores: Cores, outs: Cores | None, *, fails: bool = False, call: Any = with_edges
) -> Callable[[Any], Callable[..., Rule | None]]:
    """Rules of ops on stacks of matrices.

    Args:
        cores: How many dims at the end of each operand are worked on whole; of further operands, none.
        outs: The same of each result; None if what is left of it once the batch is taken off.
        fails: The kernel refuses some matrices.
        call: Runs on the piece.
    """

    def of(func: Any) -> Callable[..., Rule | None]:
        def batched(*args: Any, **kwargs: Any) -> Rule | None:
            operands = tensor_operands(args, kwargs)
            own = (*cores, *(0,) * len(operands))
            if any(a.ndim < n for a, n in zip(operands, own)):
                return None
            batch = tuple(
                torch.broadcast_shapes(*(a.shape[: a.ndim - n] for a, n in zip(operands, own)))
            )
            names = numbered("b", len(batch))
            ins = {a: (*_lead(a, n, names), *(WHOLE,) * n) for a, n in zip(operands, own)}
            results = like_torch(func, args, kwargs)
            return _rule_of(ins, names, batch, results, outs, fails, call)

        return batched

    return of


def _rule_of(
    ins: dict[Arg, Labels],
    names: Labels,
    batch: tuple[int, ...],
    results: Any,
    outs: Cores | None,
    fails: bool,
    call: Any,
) -> Rule | None:
    if results is None or any(shape[: len(batch)] != batch for shape, *_ in results):
        return None
    rest = [len(shape) - len(batch) for shape, *_ in results]
    if outs is not None and tuple(rest) != outs:
        return None
    return Rule(
        ins,
        tuple((*names, *(WHOLE,) * n) for n in rest),
        special=frozenset(names) if fails else frozenset(),
        local=_Together(names, batch, call) if fails else call,
        always_local=some_empty(ins),
        out_shapes=tuple(shape for shape, *_ in results),
        out_strides=tuple(stride for _, stride, _ in results),
    )


def _lead(arg: Arg, core: int, names: Labels) -> Labels:
    count = arg.ndim - core
    tail = names[len(names) - count :]
    return tuple(ONE if n == 1 else name for n, name in zip(arg.shape, tail))


_MATRICES: dict[str, Cores | None] = {
    "cholesky": (2,), "cholesky_ex": (2, 0), "inv": (2,), "inv_ex": (2, 0), "inverse": (2,), "det": (0,), "logdet": (0,),
    "slogdet": (0, 0), "svd": None, "svdvals": (1,), "qr": None, "eigh": (1, 2), "eigvalsh": (1,), "eig": (1, 2),
    "eigvals": (1,), "lu": None, "lu_factor": (2, 1), "lu_factor_ex": (2, 1, 0), "pinv": (2,), "pinverse": (2,),
    "matrix_exp": (2,), "matrix_rank": (0,), "cond": (0,), "ldl_factor": (2, 1),
    "ldl_factor_ex": (2, 1, 0), "cholesky_inverse": (2,),
}  # fmt: skip
_ATEN: dict[str, tuple[Cores, Cores | None]] = {
    "linalg_cholesky_ex": ((2,), (2, 0)), "linalg_inv_ex": ((2,), (2, 0)), "_linalg_det": ((2,), (0, 2, 1)),
    "_linalg_slogdet": ((2,), (0, 0, 2, 1)), "_linalg_svd": ((2,), None), "linalg_qr": ((2,), None),
    "_linalg_eigh": ((2,), None), "linalg_eig": ((2,), (1, 2)), "_linalg_eigvals": ((2,), (1,)),
    "linalg_eigvals": ((2,), (1,)), "linalg_lu": ((2,), None), "linalg_lu_factor_ex": ((2,), (2, 1, 0)),
    "linalg_ldl_factor_ex": ((2,), (2, 1, 0)), "linalg_matrix_exp": ((2,), (2,)), "cholesky_inverse": ((2,), (2,)),
    "linalg_householder_product": ((2, 1), (2,)), "linalg_pinv": ((2,), (2,)), "cholesky": ((2,), (2,)),
    "lu_unpack": ((2, 1), None),
}  # fmt: skip


def _power_of(func: Any) -> Callable[..., Rule | None]:
    def matrix_power(input: Arg, n: int, **_: Any) -> Rule | None:
        return _batched((2,), (2,), fails=n < 0)(func)(input, n)

    return matrix_power


_NEVER_FAIL = frozenset(
    ("det", "logdet", "slogdet", "qr", "lu", "matrix_exp", "cholesky_inverse", "_linalg_det", "_linalg_slogdet",
     "linalg_qr", "linalg_lu", "linalg_matrix_exp", "linalg_householder_product", "lu_unpack")
)  # fmt: skip


def _register() -> None:
    for name, outs in _MATRICES.items():
        for f in functions(name):
            call = with_marks if name == "cond" else with_edges
            rule(f)(_batched((2,), outs, fails=name not in _NEVER_FAIL, call=call)(f))
    for f in functions("matrix_power"):
        rule(f)(_power_of(f))
    for name in ("householder_product", "orgqr"):
        for f in functions(name):
            rule(f)(_batched((2, 1), (2,), call=with_marks)(f))
    for f in functions("lu_unpack"):
        rule(f)(_batched((2, 1), None)(f))
    for name, (cores, outs) in _ATEN.items():
        if hasattr(torch.ops.aten, name):
            for f in functions(f"aten.{name}"):
                call = with_marks if name == "linalg_householder_product" else with_edges
                rule(f)(_batched(cores, outs, fails=name not in _NEVER_FAIL, call=call)(f))


_register()


# -- solvers ---------------------------------------------------------------------------------------
def _told_once(local: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """What a solver tells of the matrix is no sum of what its ranks say where the solution is one, or cut."""
    got = local(ctx, *args, **kwargs)
    kept = [got[0]]
    for told, spec in zip(got[1:], ctx.outs[1:]):
        axes = tuple(a for a, pending in enumerate(spec.layout.partial) if pending)
        kept.append(ctx.group_over(axes).keep(told) if axes else told)
    return type(got)(kept)


def _solver(
    func: Any,
    names: tuple[str, ...],
    *,
    right: str,
    outs: Cores = (2,),
    fails: bool = False,
) -> None:
    """Register a solver.

    Args:
        func: The function.
        names: Its tensor parameters, in order; what they hold is ``right``, a matrix, or pivots.
        right: The parameter that holds right-hand sides.
        outs: Dims of each result's matrices; the first result is the solution.
        fails: The kernel refuses some matrices.
    """

    def solver(*args: Any, **kwargs: Any) -> Rule | None:
        given = bind((*names, "upper", "transpose", "unitriangular"), args, kwargs)
        b = given[right]
        others = [given[n] for n in names if n != right]
        if any(not isinstance(a, Arg) for a in (b, *others)):
            return None
        a = next(x for n, x in given.items() if n in names and n not in (right, *_VECTORS))
        vector = func in _TAKES_VECTORS and _is_vector(a, b)
        columns = bool(given.get("left", True))
        own = {x: 1 if n in _VECTORS else 2 for n, x in given.items() if n in names}
        own[b] = 1 if vector else 2
        if any(x.ndim < n for x, n in own.items()):
            return None
        batch = tuple(torch.broadcast_shapes(*(x.shape[: x.ndim - n] for x, n in own.items())))
        lead = numbered("b", len(batch))
        side = (WHOLE,) if vector else (WHOLE, "c") if columns else ("c", WHOLE)
        ins = {x: (*_lead(x, n, lead), *(WHOLE,) * n) for x, n in own.items()}
        ins[b] = (*_lead(b, len(side), lead), *side)
        results = like_torch(func, args, kwargs)
        if results is None or len(results) != len(outs):
            return None
        if any(shape[: len(batch)] != batch for shape, *_ in results):
            return None
        rest = [(*lead, *side), *((*lead, *(WHOLE,) * n) for n in outs[1:])]
        local: Any = with_edges
        if len(outs) == 1:
            local = partial(_solved, (*names, "upper", "transpose", "unitriangular"), right)
        local = _Together(lead, batch) if fails else local
        return Rule(
            ins,
            tuple(rest),
            whole=frozenset()
            if vector or len(outs) == 1
            else _never_empty(b, "c", b.ndim - (1 if columns else 2)),
            special=frozenset(lead) if fails else frozenset(),
            linear=(frozenset([b]),),
            local=local if len(outs) == 1 else partial(_told_once, local),
            always_local=len(outs) > 1 or some_empty(ins),
            out_shapes=tuple(shape for shape, *_ in results),
            out_strides=tuple(stride for _, stride, _ in results),
        )

    rule(func)(solver)


def _solved(names: tuple[str, ...], right: str, ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The call on a piece; one without right-hand sides has nothing to solve."""
    shape = ctx.outs[0].local_shape
    if 0 not in shape:
        return ctx.func(*args, **kwargs)
    given = bind(names, args, kwargs)
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    made = nothing(shape, tensors, given[right].dtype)
    return marked(made, tensors, [given[right]])


_VECTORS = frozenset(("pivots", "LU_pivots", "tau"))
_TAKES_VECTORS = frozenset([_L.solve, _L.solve_ex, *functions("aten._linalg_solve_ex.default")])


def _never_empty(arg: Arg, name: str, dim: int) -> frozenset[str]:
    """The factor, if some rank would hold none of it."""
    return frozenset([name]) if arg.layout.may_be_empty(dim) else frozenset()


def _is_vector(a: Arg, b: Arg) -> bool:
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)


@rule(_L.tensorsolve, "aten.linalg_tensorsolve.default")
def tensorsolve(A: Arg, B: Arg, dims: Any = None) -> Rule | None:  # noqa: N803  torch's names
    """Of whole tensors; linear in the right-hand side."""
    results = like_torch(_L.tensorsolve, (A, B, dims), {})
    if results is None:
        return None
    ins = {A: (WHOLE,) * A.ndim, B: (WHOLE,) * B.ndim}
    shape = results[0][0]
    return Rule(ins, ((WHOLE,) * len(shape),), linear=(frozenset([B]),), out_shapes=(shape,))


_solver(_L.solve, ("A", "B"), right="B", fails=True)
_solver(_L.solve_triangular, ("A", "B"), right="B")
_solver(_L.solve_ex, ("A", "B"), right="B", outs=(2, 0), fails=True)
_solver(_L.lu_solve, ("LU", "pivots", "B"), right="B")
_solver(_L.ldl_solve, ("LD", "pivots", "B"), right="B")
for _f in functions("lu_solve"):
    if _f is not _L.lu_solve:
        _solver(_f, ("input", "LU_data", "LU_pivots"), right="input")
for _f in functions("cholesky_solve"):
    _solver(_f, ("input", "L"), right="input")
for _f in functions("ormqr"):
    _solver(_f, ("input", "tau", "other"), right="other")
for _f in functions("triangular_solve"):
    _solver(_f, ("input", "A"), right="input", outs=(2, 2))


@rule(_L.lstsq, "aten.linalg_lstsq.default")
def lstsq(A: Arg, B: Arg, rcond: Any = None, *, driver: Any = None) -> Rule | None:  # noqa: N803  torch's names
    """``b [m] [n], b [m] c -> b [n] c``, with what the driver tells about each matrix."""
    if A.ndim < 2 or rcond is not None or driver not in (None, "gelsy", "gels"):
        return None
    if B.ndim != A.ndim or A.shape[:-1] != B.shape[:-1] or not all((*A.shape, *B.shape)):
        return None
    if driver is None:
        driver = "gelsy" if A.layout.mesh.device_type == "cpu" else "gels"
    batch, (m, n), count = A.shape[:-2], A.shape[-2:], B.shape[-1]
    lead = numbered("b", len(batch))
    told = driver == "gels" and m > n
    ranked = driver == "gelsy"
    ins: dict[Arg, Labels] = {A: (*lead, WHOLE, WHOLE), B: (*lead, WHOLE, "c")}
    return Rule(
        ins,
        (
            (*lead, WHOLE, "c"),
            (*lead, "c") if told else (WHOLE,),
            lead if ranked else (WHOLE,),
            (WHOLE,),
        ),
        whole=_never_empty(B, "c", B.ndim - 1),
        reduce={"c": "none"},  # the rank is the matrix's, whoever has which right-hand sides
        local=with_edges,
        always_local=some_empty(ins),
        out_shapes=(
            (*batch, n, count),
            (*batch, count) if told else (0,),
            batch if ranked else (0,),
            (0,),
        ),
    )


# -- products of vectors, powers -------------------------------------------------------------------
def _dims_but_one(
    operands: Sequence[Arg], dim: Any
) -> tuple[Labels, tuple[int, ...], int] | None:
    shape = tuple(torch.broadcast_shapes(*(a.shape for a in operands)))
    if type(dim) is not int or not -len(shape) <= dim < len(shape):
        return None
    at = dim % len(shape)
    return tuple(WHOLE if d == at else f"d{d}" for d in range(len(shape))), shape, at


def _cross(x: Arg, y: Arg, dim: int) -> Rule | None:
    found = _dims_but_one((x, y), dim)
    if found is None or x.ndim != y.ndim:
        return None
    names, shape, at = found

    def localize(ctx: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = bind(("input", "other"), args[:2], kwargs)
        return (given["input"], given["other"]), {"dim": at}

    return Rule(
        {a: aligned(a, names, shape) for a in (x, y)},
        (names,),
        linear=(frozenset([x]), frozenset([y])),
        localize=localize,
        out_shapes=(shape,),
    )


@rule(_L.cross, "aten.linalg_cross.default")
def linalg_cross(input: Arg, other: Arg, *, dim: int = -1) -> Rule | None:
    """``d [3], d [3] -> d [3]``; linear in each."""
    return _cross(input, other, dim)


@rule(torch.cross, torch.Tensor.cross, "aten.cross.default")
def cross(input: Arg, other: Arg, dim: int | None = None) -> Rule | None:
    """The same over the first dim of size three, unless told."""
    if dim is None:
        shape = torch.broadcast_shapes(input.shape, other.shape)
        if 3 not in shape:
            return None
        dim = tuple(shape).index(3)
    return _cross(input, other, dim)


@rule(_L.vecdot, "aten.linalg_vecdot.default")
def vecdot(x: Arg, y: Arg, *, dim: int = -1) -> Rule | None:
    """``d k, d k -> d``: a sharded dim leaves a pending sum."""
    found = _dims_but_one((x, y), dim)
    if found is None:
        return None
    names, shape, at = found
    full = tuple("k" if d == at else n for d, n in enumerate(names))
    if any(
        a.shape[d - a.ndim] == 1 for a in (x, y) for d in [at - len(shape) + a.ndim] if d >= 0
    ):
        return None

    def localize(ctx: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = bind(("x", "y"), args[:2], kwargs)
        return (given["x"], given["y"]), {"dim": at - len(shape)}

    out = tuple(n for d, n in enumerate(full) if d != at)
    return Rule(
        {a: aligned(a, full, shape) for a in (x, y)},
        (out,),
        linear=(frozenset([x]), frozenset([y])),
        localize=localize,
        out_shapes=(tuple(n for d, n in enumerate(shape) if d != at),),
    )


def _powers(func: Any) -> Callable[..., Rule | None]:
    def powers(x: Arg, N: int | None = None, increasing: Any = None, **_: Any) -> Rule | None:  # noqa: N803  torch's name
        if not x.ndim or not all(x.shape):
            return None
        count = x.shape[-1] if N is None else N
        names = numbered("d", x.ndim)

        def local(ctx: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            more = {} if increasing is None else {"increasing": increasing}
            return marked(func(x, N=count, **more), [x])

        return Rule(
            {x: names},
            ((*names, WHOLE),),
            local=local,
            always_local=x.layout.is_sharded,
            out_shapes=((*x.shape, count),),
        )

    return powers


for _f in (torch.vander, _L.vander, *functions("aten.linalg_vander.default")):
    rule(_f)(_powers(_f))
