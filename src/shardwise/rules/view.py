"""Views that keep all elements: other shapes, other orders of dims, dims of size one; expand and repeat.

A dim that is split or merged stays sharded where the cut falls between rows of the outermost dim on both
sides; sizes in the arguments become those of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.registry import rule
from shardwise.rules.rowmap import fetched

Shape = tuple[int, ...]
_T = torch.Tensor


# -- what the rules of views share ---------------------------------------------------------------
def ints(given: Sequence[Any]) -> Shape | None:
    """Numbers given one by one or as one sequence; None if they are anything else."""
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return tuple(given) if all(type(n) is int for n in given) else None


def one_dim(dim: Any, ndim: int) -> int | None:
    """A dim counted from the front; None if torch would refuse it."""
    ndim = max(ndim, 1)
    return dim % ndim if type(dim) is int and -ndim <= dim < ndim else None


def some_dims(dims: Any, ndim: int) -> Shape | None:
    """Several dims counted from the front; None if torch would refuse one."""
    found = ints(dims if isinstance(dims, (tuple, list)) else (dims,))
    if found is None:
        return None
    counted = tuple(one_dim(d, ndim) for d in found)
    return None if None in counted else counted  # pyright: ignore[reportReturnType]


def view_of(
    x: Arg, ins: Labels, out: Labels, shape: Sequence[int] | None = None, **more: Any
) -> Rule:
    """One tensor in, a view of it out; linear."""
    sizes = dict(zip(ins, x.shape)) | {ONE: 1}
    shape = tuple(sizes[name] for name in out) if shape is None else tuple(shape)
    more.setdefault("view", True)
    return Rule({x: ins}, (out,), linear=(frozenset([x]),), out_shapes=(shape,), **more)


def _by_position(
    ctx: Any, x: Any, *_: Any, **__: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``f(x, sizes)`` with the sizes of this rank's piece."""
    return (x, ctx.outs[0].local_shape), {}


# -- other shapes ----------------------------------------------------------------------------------
def filled(sizes: Shape | None, numel: int) -> Shape | None:
    """Sizes with their -1 worked out; None if they do not fit."""
    if sizes is None:
        return None
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if rest <= 0 or numel % rest:
            return None
        sizes = tuple(numel // rest if n == -1 else n for n in sizes)
    return sizes if math.prod(sizes) == numel and all(n >= 0 for n in sizes) else None


def regrouped(src: Sequence[int], dst: Sequence[int]) -> tuple[Labels, Labels, dict[str, int]]:
    """Labels of both sides of a reshape, and what the ranks that cut each split or merged dim must divide.

    Both shapes are read from the left in the smallest groups of dims with equal products. In a group the
    outermost dim of each side is the factor; the rest must be whole.
    """
    left, right, divides = [], [], {}
    i = j = 0
    while i < len(src) or j < len(dst):
        name = f"d{i}"
        if i < len(src) and j < len(dst) and src[i] == dst[j]:
            left.append(name)
            right.append(name)
            i, j = i + 1, j + 1
        elif 0 in (*src, *dst):  # nothing to cut, and products tell nothing
            left += [WHOLE] * (len(src) - i)
            right += [WHOLE] * (len(dst) - j)
            break
        elif j < len(dst) and dst[j] == 1:
            right.append(ONE)
            j += 1
        elif i < len(src) and src[i] == 1:
            left.append(ONE)
            i += 1
        else:
            divides[name] = math.gcd(src[i], dst[j])
            a, b, i0, j0 = src[i], dst[j], i, j
            i, j = i + 1, j + 1
            while a != b:
                if a < b:
                    a, i = a * src[i], i + 1
                else:
                    b, j = b * dst[j], j + 1
            left += [name, *([WHOLE] * (i - i0 - 1))]
            right += [name, *([WHOLE] * (j - j0 - 1))]
    return tuple(left), tuple(right), divides


Groups = tuple[Labels, Labels, dict[str, int]]


def _between(shape: Shape, start: int, stop: int, parts: Shape) -> Groups:
    """As `regrouped`, but only the dims from start to stop become others: each of the rest is itself.

    Which of several dims of size one is which the shapes do not tell, and a piece may have none of it.
    """
    left, right, divides = regrouped(shape[start:stop], parts)
    before, after = numbered("b", start), numbered("a", len(shape) - stop)
    return (*before, *left, *after), (*before, *right, *after), divides


def _reshaped(
    x: Arg, shape: Shape | None, localize: Any = _by_position, groups: Groups | None = None
) -> Rule | None:
    """A view of all elements under another shape."""
    if shape is None:
        return None
    ins, out, divides = regrouped(x.shape, shape) if groups is None else groups
    localize = localize if x.layout.is_sharded else None
    return view_of(
        x,
        ins,
        out,
        shape,
        divides=divides,
        scaled=frozenset(divides),
        localize=localize,
    )


def _copied(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A reshape that copies; also where the piece alone could be viewed."""
    return x.clone(memory_format=torch.contiguous_format).view(ctx.outs[0].local_shape)


def _view_or_copy(
    x: Arg, shape: Shape | None, localize: Any = _by_position, groups: Groups | None = None
) -> Rule | None:
    """A reshape: a view where the whole tensor can be viewed, else a copy, on every rank."""
    if shape is None or x.layout.is_contiguous:
        return _reshaped(x, shape, localize, groups)
    meta = torch.empty_strided(x.shape, x.layout.stride, device="meta")
    if meta.reshape(shape)._base is not None:
        return _reshaped(x, shape, localize, groups)
    ins, out, divides = regrouped(x.shape, shape) if groups is None else groups
    return view_of(
        x,
        ins,
        out,
        shape,
        divides=divides,
        scaled=frozenset(divides),
        view=False,
        local=_copied,
        always_local=True,
    )


@rule(_T.view, "aten.view")
def view(x: Arg, *shape: Any, size: Any = None, dtype: Any = None) -> Rule | None:
    """Another shape without a copy; or the same bits as another dtype of the same size."""
    given = shape or ((size,) if size is not None else (dtype,))
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        if given[0].itemsize != x.dtype.itemsize:
            return None
        names = numbered("d", x.ndim)
        return Rule({x: names}, (names,), out_shapes=(x.shape,), view=True)
    return _reshaped(x, filled(ints(given), x.layout.numel))


@rule("aten._unsafe_view")
def _unsafe_view(x: Arg, size: Any) -> Rule | None:
    return _reshaped(x, filled(ints(size), x.layout.numel))


@rule("reshape", "aten.reshape")
def reshape(input: Arg, *shape: Any, **kwargs: Any) -> Rule | None:
    """Another shape, copied only where it must be."""
    given = shape or tuple(kwargs.values())
    return _view_or_copy(input, filled(ints(given), input.layout.numel))


@rule("ravel", "aten.ravel")
def ravel(input: Arg) -> Rule | None:
    """One dim."""
    return _view_or_copy(input, (input.layout.numel,), None)


@rule("flatten", "aten.flatten.using_ints")
def flatten(input: Arg, start_dim: Any = 0, end_dim: Any = -1) -> Rule | None:
    """Several dims as one."""
    start, end = one_dim(start_dim, input.ndim), one_dim(end_dim, input.ndim)
    if start is None or end is None or start > end:
        return None
    if not input.ndim:
        return _view_or_copy(input, (1,), None)
    shape = tuple(input.shape)
    merged = math.prod(shape[start : end + 1])
    groups = _between(shape, start, end + 1, (merged,))
    return _view_or_copy(input, (*shape[:start], merged, *shape[end + 1 :]), None, groups)


@rule("unflatten", "aten.unflatten.int")
def unflatten(input: Arg, dim: Any, sizes: Any) -> Rule | None:
    """One dim as several."""
    at, given = one_dim(dim, input.ndim), ints((sizes,))
    if at is None or not input.ndim or not given:
        return None
    parts = filled(given, input.shape[at])
    if parts is None:
        return None

    def localize(
        ctx: Any, x: Any, *_: Any, **__: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, at, tuple(ctx.outs[0].local_shape[at : at + len(parts)])), {}

    shape = tuple(input.shape)
    groups = _between(shape, at, at + 1, parts)
    return _reshaped(input, (*shape[:at], *parts, *shape[at + 1 :]), localize, groups)


# -- other orders of dims --------------------------------------------------------------------------
def permuted(x: Arg, order: Sequence[int]) -> Rule:
    """The rule of a permutation of all dims."""
    names = numbered("d", x.ndim)
    return view_of(x, names, tuple(names[d] for d in order))


@rule("permute", "aten.permute")
def permute(input: Arg, *dims: Any, **kwargs: Any) -> Rule | None:
    """All dims in another order."""
    given = ints(dims or tuple(kwargs.values()))
    order = None if given is None else some_dims(given, input.ndim)
    if order is None or sorted(order) != list(range(input.ndim)):
        return None
    return permuted(input, order)


@rule(
    "transpose", "swapaxes", "swapdims", "aten.transpose.int", "aten.swapaxes", "aten.swapdims"
)
def transpose(input: Arg, dim0: Any = None, dim1: Any = None, **axes: Any) -> Rule | None:
    """Two dims swapped."""
    a = one_dim(axes.get("axis0", dim0), input.ndim)
    b = one_dim(axes.get("axis1", dim1), input.ndim)
    if a is None or b is None:
        return None
    order = list(range(input.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return permuted(input, order)


@rule("t", "aten.t")
def t(input: Arg) -> Rule | None:
    """A matrix transposed; a vector as it is."""
    return permuted(input, range(input.ndim)[::-1]) if input.ndim <= 2 else None


@rule("adjoint", "aten.adjoint", "aten.mT", "aten.mH")
def adjoint(input: Arg) -> Rule | None:
    """Matrices transposed, and conjugated if complex."""
    if input.ndim < 2:
        return None
    return permuted(input, (*range(input.ndim - 2), input.ndim - 1, input.ndim - 2))


@rule("movedim", "moveaxis", "aten.movedim", "aten.moveaxis")
def movedim(input: Arg, source: Any, destination: Any) -> Rule | None:
    """Some dims moved to other places."""
    src, dst = some_dims(source, input.ndim), some_dims(destination, input.ndim)
    if (
        src is None
        or dst is None
        or len(src) != len(dst)
        or len(set(src)) != len(src)
        or len(set(dst)) != len(dst)
    ):
        return None
    if not input.ndim:
        return permuted(input, ())
    placed = dict(zip(dst, src))
    rest = iter([d for d in range(input.ndim) if d not in src])
    return permuted(
        input, [placed[d] if d in placed else next(rest) for d in range(input.ndim)]
    )


@rule("detach", "aten.detach", "aten.alias")
def same(input: Arg) -> Rule:
    """The same elements under the same shape."""
    return permuted(input, range(input.ndim))


# -- dims of size one ------------------------------------------------------------------------------
@rule("squeeze", "aten.squeeze")
def squeeze(input: Arg, dim: Any = None, *, axis: Any = None) -> Rule | None:
    """Without dims of size one, which are named: a piece may have more of them."""
    dim = axis if dim is None else dim
    wanted = tuple(range(input.ndim)) if dim is None else some_dims(dim, input.ndim)
    if wanted is None:
        return None
    gone = tuple(d for d in wanted if d < input.ndim and input.shape[d] == 1)
    names = tuple(ONE if d in gone else f"d{d}" for d in range(input.ndim))
    out = tuple(f"d{d}" for d in range(input.ndim) if d not in gone)

    def localize(
        ctx: Any, x: Any, *_: Any, **__: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, gone), {}

    shape = tuple(n for d, n in enumerate(input.shape) if d not in gone)
    by_tuple = localize if input.layout.is_sharded else None
    if by_tuple is not None and isinstance(dim, int) and gone:
        by_tuple = None  # squeezes the same dim on every piece
    return view_of(input, names, out, shape, localize=by_tuple)


def squeeze_overload(input: Arg, dim: Any = None) -> Rule | None:
    """ATen has an overload for each form, so what is squeezed must fit the form."""
    made = squeeze(input, dim)
    if made is None or made.localize is None:
        return made
    names = made.ins[input]
    gone = tuple(d for d, name in enumerate(names) if name == ONE)

    def local(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return torch.squeeze(x, gone)

    return view_of(
        input,
        names,
        made.outs[0],
        made.out_shapes[0] if made.out_shapes else None,
        local=local,
        special=frozenset(names),
    )


for _overload in ("default", "dim"):
    rule(f"aten.squeeze.{_overload}")(squeeze_overload)


@rule("unsqueeze", "aten.unsqueeze")
def unsqueeze(input: Arg, dim: Any = None, *, axis: Any = None) -> Rule | None:
    """With one more dim of size one."""
    at = one_dim(axis if dim is None else dim, input.ndim + 1)
    if at is None:
        return None
    names = numbered("d", input.ndim)
    return view_of(input, names, (*names[:at], ONE, *names[at:]))


# -- expand and repeat -----------------------------------------------------------------------------
@rule(_T.expand, "broadcast_to", "aten.expand", "aten.broadcast_to")
def expand(input: Arg, *size: Any, implicit: bool = False, **kwargs: Any) -> Rule | None:
    """Dims of size one stretched, and new ones in front, without a copy."""
    given = ints(size or tuple(kwargs.values()))
    if given is None or len(given) < input.ndim:
        return None
    new = len(given) - input.ndim
    ins: list[str] = []
    out, shape = [WHOLE] * new, list(given[:new])
    for d, (n, want) in enumerate(zip(input.shape, given[new:])):
        kept = want in (n, -1)
        ins.append(f"d{d}" if kept else ONE)
        out.append(f"d{d}" if kept else WHOLE)
        shape.append(n if kept else want)
        if not kept and n != 1:
            return None
    if any(n < 0 for n in shape):
        return None
    localize = _by_position if input.layout.is_sharded else None
    return view_of(input, tuple(ins), tuple(out), shape, localize=localize)


def _repeated(x: Arg, times: Shape) -> Rule:
    new = len(times) - x.ndim
    names = numbered("d", x.ndim)
    ins = tuple(n if k else WHOLE for n, k in zip(names, times[new:]))
    shape = (*times[:new], *(n * k for n, k in zip(x.shape, times[new:])))
    more = [d for d, k in enumerate(times[new:]) if k > 1]

    def local(ctx: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        left = list(times)
        for d in more:
            if names[d] in ctx.axes:
                n, left[new + d] = ctx.ins[0].shape[d], 1
                x = fetched(ctx, x, d, lambda i, n=n: i % max(n, 1), out_dim=new + d)
        return x.repeat(left)

    special = frozenset(names[d] for d in more)
    out = (*[WHOLE] * new, *ins)
    return view_of(x, ins, out, shape, view=False, special=special, local=local)


@rule(_T.repeat, "aten.repeat")
def repeat(input: Arg, *repeats: Any, **kwargs: Any) -> Rule | None:
    """Copies side by side; of a sharded dim each rank fetches the rows of its piece."""
    times = ints(repeats or tuple(kwargs.values()))
    if times is None or len(times) < input.ndim or any(k < 0 for k in times):
        return None
    return _repeated(input, times)


@rule("tile", "aten.tile")
def tile(input: Arg, *dims: Any, **kwargs: Any) -> Rule | None:
    """Like ``repeat``, with missing counts taken as one."""
    times = ints(dims or tuple(kwargs.values()))
    if times is None or any(k < 0 for k in times):
        return None
    return _repeated(input, (*[1] * (input.ndim - len(times)), *times))


# -- numbers seen otherwise ------------------------------------------------------------------------
@rule("view_as_real", "aten.view_as_real")
def view_as_real(input: Arg) -> Rule:
    """Complex numbers as pairs."""
    names = numbered("d", input.ndim)
    return view_of(input, names, (*names, WHOLE), (*input.shape, 2))


@rule("view_as_complex", "aten.view_as_complex")
def view_as_complex(input: Arg) -> Rule | None:
    """Pairs as complex numbers."""
    if not input.ndim:
        return None
    names = numbered("d", input.ndim - 1)
    return view_of(input, (*names, WHOLE), names, input.shape[:-1])


@rule("real", "imag", "aten.real", "aten.imag")
def part(input: Arg) -> Rule:
    """Real and imaginary parts: what is written to them reaches the complex numbers."""
    names = numbered("d", input.ndim)
    return view_of(input, names, names)
