"""Normalisation layers: over a sharded dim, a sum and a sum of squares meet, one number per row.

Batch norm in training takes its statistics over the whole batch, on whatever ranks that is, and every rank
writes the same running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.compat import batch_norm_legit
from shardwise.layout import boxes
from shardwise.rules.notation import ONE, WHOLE, Arg, Labels, Rule, numbered
from shardwise.rules.reduce import count_of, group_of, is_inexact, result_dtype, wide
from shardwise.rules.registry import rule

# Calls that write into plain-looking arguments (running statistics) without a trace in their version.
HIDDEN_WRITES = frozenset(
    (
        F.batch_norm,
        F.instance_norm,
        torch.batch_norm,
        torch.instance_norm,
        torch.native_batch_norm,
        batch_norm_legit,
        *(
            op
            for packet in (
                torch.ops.aten.batch_norm,
                torch.ops.aten.instance_norm,
                torch.ops.aten.native_batch_norm,
                torch.ops.aten._native_batch_norm_legit,
                torch.ops.aten._batch_norm_with_update,
            )
            for op in (packet, packet.default)
        ),
    )
)


def _centred(
    group: Any, x: Tensor, dims: Sequence[int], n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, distance from it, variance: over all ranks of the group, dims kept."""
    dims = tuple(dims)
    middle = group.sum(x.sum(dims, keepdim=True)) / n
    x = x - middle
    return middle, x, group.sum(x.square().sum(dims, keepdim=True)) / n


def _unsharded(input: Arg, dims: Sequence[int], names: Labels) -> frozenset[str]:
    """Factors that the input does not shard: a sharded weight alone must not make its statistics communicate."""
    return frozenset(names[d] for d in dims if not input.layout.dims[d])


# -- layer norm and rms norm ----------------------------------------------------------------------
def _over_last(
    input: Arg, shape: Any, params: Sequence[Arg | None]
) -> tuple[tuple[int, ...], Labels, dict] | None:
    """The normalised dims, the input's labels, all labels; None if torch would refuse the shapes."""
    shape = (shape,) if isinstance(shape, int) else shape
    if not isinstance(shape, (tuple, list)) or not shape or len(shape) > input.ndim:
        return None
    k = input.ndim - len(shape)
    shape = tuple(shape)
    if shape != tuple(input.shape[k:]) or any(
        p is not None and tuple(p.shape) != shape for p in params
    ):
        return None
    names = numbered("d", input.ndim)
    ins = {input: names} | {p: names[k:] for p in params if p is not None}
    return tuple(range(k, input.ndim)), names, ins


@rule("layer_norm", "aten.layer_norm", lifts=True)
def layer_norm(
    input: Arg,
    normalized_shape: Any,
    weight: Arg | None = None,
    bias: Arg | None = None,
    *_: Any,
    **__: Any,
) -> Rule | None:
    """Local where the normalised dims are whole."""
    if (
        found := _over_last(input, normalized_shape, (weight, bias))
    ) is None or input.dtype.is_complex:
        return None
    dims, names, ins = found
    out = result_dtype(input, None, lambda x: torch.layer_norm(x, (1,)))
    n = count_of(input, dims)

    def local(
        ctx: Any,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        x, var = _centred(group_of(ctx, dims), wide(input), dims, n)[1:]
        return _scaled(x * (var + eps).rsqrt(), weight, bias).to(out)

    return Rule(
        ins,
        (names,),
        special=frozenset(names[d] for d in dims),
        whole=_unsharded(input, dims, names),
        local=local,
    )


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@rule("native_layer_norm", "aten.native_layer_norm", lifts=True)
def native_layer_norm(
    input: Arg, normalized_shape: Any, weight: Arg | None, bias: Arg | None, eps: float
) -> Rule | None:
    """With mean and reciprocal deviation of each row."""
    if (
        found := _over_last(input, normalized_shape, (weight, bias))
    ) is None or input.dtype.is_complex:
        return None
    dims, names, ins = found
    n = count_of(input, dims)
    rows = tuple(ONE if d in dims else name for d, name in enumerate(names))

    def local(
        ctx: Any,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        middle, x, var = _centred(group_of(ctx, dims), wide(input), dims, n)
        scale = (var + eps).rsqrt()
        y = _scaled(x * scale, weight, bias).to(input.dtype)
        return y, middle.detach(), scale.detach()

    return Rule(
        ins,
        (names, rows, rows),
        reduce=dict.fromkeys((names[d] for d in dims), "none"),
        special=frozenset(names[d] for d in dims),
        whole=_unsharded(input, dims, names),
        local=local,
    )


@rule("rms_norm", "aten.rms_norm", lifts=True)
def rms_norm(
    input: Arg, normalized_shape: Any, weight: Arg | None = None, *_: Any, **__: Any
) -> Rule | None:
    """Local where the normalised dims are whole."""
    if (
        found := _over_last(input, normalized_shape, (weight,))
    ) is None or not input.dtype.is_floating_point:
        return None
    dims, names, ins = found
    out = result_dtype(input, None, lambda x: torch.rms_norm(x, (1,)))
    n = count_of(input, dims)

    def local(
        ctx: Any,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        x = wide(input)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        mean = group_of(ctx, dims).sum(x.square().sum(dims, keepdim=True)) / n
        return _scaled(x * (mean + eps).rsqrt(), weight, None).to(out)

    return Rule(
        ins,
        (names,),
        linear=() if weight is None or weight is input else (frozenset([weight]),),
        special=frozenset(names[d] for d in dims),
        whole=_unsharded(input, dims, names),
        local=local,
    )


# -- group norm and instance norm -----------------------------------------------------------------
@rule("group_norm", "aten.group_norm", lifts=True)
def group_norm(
    input: Arg,
    num_groups: int,
    weight: Arg | None = None,
    bias: Arg | None = None,
    *_: Any,
    **__: Any,
) -> Rule | None:
    """Statistics per sample and group: channels are local in whole groups, else sums meet."""
    if input.ndim < 2 or not input.dtype.is_floating_point or 0 in input.shape:
        return None
    c = input.shape[1]
    if type(num_groups) is not int or num_groups < 1 or c % num_groups:
        return None
    if any(p is not None and p.shape != (c,) for p in (weight, bias)):
        return None
    spatial = numbered("s", input.ndim - 2)
    names = ("n", "c", *spatial)
    n = c // num_groups * math.prod(input.shape[2:])
    if n * input.shape[0] == 1:
        return None  # torch says why not
    out = result_dtype(input, None, lambda x: torch.group_norm(x, 1))

    def local(
        ctx: Any,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        held = boxes.pieces(c, ctx.ins[0].layout.dims[1], ctx.mesh.shape)
        between_groups = all(m and m % (c // num_groups) == 0 for _, m in held)
        if between_groups and ctx.group(*spatial).size == 1:
            own = input.shape[1] // (c // num_groups)
            return torch.group_norm(input, own, weight, bias, eps)
        group, x = ctx.group("c", *spatial), wide(input)
        first, m = ctx.ins[0].offsets[1], input.shape[1]
        of = torch.arange(first, first + m, device=x.device) // (c // num_groups)
        dims = tuple(range(2, x.ndim))

        def mean(x: Tensor) -> Tensor:
            each = x.sum(dims) if dims else x
            total = (
                group.sum(each.new_zeros(each.shape[0], num_groups).index_add(1, of, each)) / n
            )
            return total.index_select(1, of).view(x.shape[0], m, *(1,) * len(dims))

        x = x - mean(x)
        x = x * (mean(x.square()) + eps).rsqrt()
        return _affine(x, weight, bias).to(out)

    ins = {input: names} | {p: ("c",) for p in (weight, bias) if p is not None}
    return Rule(
        ins,
        (names,),
        special=frozenset(("c", *spatial)),
        whole=_unsharded(input, (1,), names),
        local=local,
        always_local=n == 1
        and input.layout.is_sharded,  # torch's check would count this rank's samples only
    )


@rule(F.instance_norm)
def instance_norm(
    input: Arg,
    running_mean: Arg | None = None,
    running_var: Arg | None = None,
    weight: Arg | None = None,
    bias: Arg | None = None,
    use_input_stats: bool = True,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Rule | None:
    """Statistics per sample and channel; those that run along are written on every rank."""
    if input.ndim < 3 or not input.dtype.is_floating_point or 0 in input.shape:
        return None
    stats = [p for p in (running_mean, running_var) if p is not None]
    params = [p for p in (weight, bias) if p is not None]
    c, n = input.shape[1], math.prod(input.shape[2:])
    if any(p.shape != (c,) for p in (*stats, *params)) or len(stats) == 1:
        return None
    if n == 1 or not (use_input_stats or stats):
        return None  # torch says why not
    spatial = numbered("s", input.ndim - 2)
    names, dims = ("n", "c", *spatial), tuple(range(2, input.ndim))
    out = result_dtype(input, None, lambda x: torch.layer_norm(x, (1,)))
    ins: dict[Arg, Labels] = {input: names, **dict.fromkeys((*stats, *params), ("c",))}
    cut, whole = input.layout.dims[1], _unsharded(input, (1,), names)
    if any(not set(p.layout.dims[0]) <= set(cut) for p in (*stats, *params)):
        whole = frozenset("c")
    special = set(spatial)
    if use_input_stats and stats:
        written = _written(stats, cut, whole)
        if written is None:
            return None
        ins |= dict.fromkeys(written, (WHOLE,))
        special |= {"n", "c"} if written else {"n"}
    elif stats:
        special = set()

    def local(
        ctx: Any,
        input: Tensor,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        x = wide(input)
        if not use_input_stats:
            assert running_mean is not None, "the rule asks for both"
            assert running_var is not None, "the rule asks for both"
            x = (x - _channels(running_mean, x)) * (_channels(running_var, x) + eps).rsqrt()
            return _affine(x, weight, bias).to(out)
        middle, x, var = _centred(ctx.group(*spatial), x, dims, n)
        buffers = [b for b in (running_mean, running_var) if b is not None]
        with torch.no_grad():
            for buffer, now in zip(buffers, (middle, var * (n / (n - 1)))):
                now = now.detach().sum(0).view(-1)
                now = ctx.group("n").reduce(now, "sum") / ctx.ins[0].shape[0]
                now = _of_all_ranks(ctx, now) if buffer.shape != now.shape else now
                buffer.mul_(1 - momentum).add_(now.to(buffer.dtype), alpha=momentum)
        return _affine(x * (var + eps).rsqrt(), weight, bias).to(out)

    return Rule(
        ins,
        (names,),
        special=frozenset(special),
        whole=whole,
        local=local,
        always_local=input.layout.has_empty(),  # torch fails on an empty piece
    )


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift of channels."""
    weight = None if weight is None else _channels(weight, x)
    return _scaled(x, weight, None if bias is None else _channels(bias, x))


def _channels(p: Tensor, x: Tensor) -> Tensor:
    """A tensor per channel, to broadcast against ``x``."""
    return p.view(x.shape[1], *(1,) * (x.ndim - 2))


# -- batch norm -----------------------------------------------------------------------------------
@rule(F.batch_norm, lifts=True)
def batch_norm(
    input: Arg,
    running_mean: Arg | None,
    running_var: Arg | None,
    weight: Arg | None = None,
    bias: Arg | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Rule | None:
    """``n c ..., c, c, c, c -> n c ...``; in training, sums over the batch meet."""

    def local(
        ctx: Any,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *,
        whole: tuple[bool, ...] = (),
    ) -> Tensor:
        stats, params = (running_mean, running_var), (weight, bias)
        return _apply(ctx, input, stats, params, training, momentum, eps, whole)

    return _batch(input, (running_mean, running_var), (weight, bias), training, local)


@rule(torch.batch_norm, "aten.batch_norm", lifts=True)
def torch_batch_norm(
    input: Arg,
    weight: Arg | None,
    bias: Arg | None,
    running_mean: Arg | None,
    running_var: Arg | None,
    training: bool,
    momentum: Any,
    eps: Any,
    cudnn_enabled: bool,
) -> Rule | None:
    """The same in ATen's order of arguments."""

    def local(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        *_: Any,
        whole: tuple[bool, ...] = (),
    ) -> Tensor:
        stats, params = (running_mean, running_var), (weight, bias)
        return _apply(ctx, input, stats, params, training, momentum, eps, whole)

    return _batch(input, (running_mean, running_var), (weight, bias), training, local)


def _batch(
    input: Arg,
    stats: Sequence[Arg | None],
    params: Sequence[Arg | None],
    training: bool,
    local: Any,
) -> Rule | None:
    if input.ndim < 2 or not is_inexact(input.dtype):
        return None
    names = ("n", "c", *numbered("s", input.ndim - 2))
    c, cut = input.shape[1], input.layout.dims[1]
    given = [p for p in (*stats, *params) if p is not None]
    if any(p.shape != (c,) for p in given):
        return None
    whole = _unsharded(input, (1,), names)
    if any(not set(p.layout.dims[0]) <= set(cut) for p in given):
        whole = frozenset("c")
    ins: dict[Arg, Labels] = {input: names, **dict.fromkeys(given, ("c",))}
    empty = input.layout.has_empty()  # torch's kernels fail on an empty piece
    if not training:
        has_stats = None not in stats
        return Rule(ins, (names,), whole=whole, local=local, always_local=empty and has_stats)
    if math.prod(input.shape) <= c or input.dtype.is_complex:
        return None  # torch says why not
    special = {n for n in names if n != "c"}
    written = _written([p for p in stats if p is not None], cut, whole)
    if written is None:
        return None
    if written:
        ins |= dict.fromkeys(written, (WHOLE,))
        special.add("c")
    local = partial(local, whole=tuple(p is not None and ins[p] == (WHOLE,) for p in stats))
    return Rule(
        ins,
        (names,),
        special=frozenset(special),
        whole=whole,
        local=local,
        always_local=empty,
    )


def _written(
    stats: Sequence[Arg], cut: Sequence[int], whole: frozenset[str]
) -> list[Arg] | None:
    """Those statistics that every rank writes whole; None if one would have to move, though it is written."""
    for p in stats:
        if p.layout.is_partial or p.layout.is_sized:
            return None
        if p.layout.is_sharded and (whole or p.layout.dims[0] != cut):
            return None
    return [p for p in stats if not p.layout.is_sharded]


def _apply(
    ctx: Any,
    input: Tensor,
    stats: tuple[Tensor | None, Tensor | None],
    params: tuple[Tensor | None, Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    whole: tuple[bool, ...],
) -> Tensor:
    """Batch norm on pieces: in training with statistics of the whole batch, which every rank writes down."""
    x = wide(input)
    if not training:
        mean, var = stats
        assert mean is not None, "the rule asks for this program only with statistics"
        assert var is not None, "the rule asks for this program only with statistics"
        x = (x - _channels(mean, x)) * (_channels(var, x) + eps).rsqrt()
        return _affine(x, *params).to(input.dtype)
    spec = ctx.ins[0]
    dims = tuple(d for d in range(input.ndim) if d != 1)
    group = ctx.group("n", *numbered("s", input.ndim - 2))
    n = math.prod(spec.shape) // spec.shape[1]
    middle, x, var = _centred(group, x, dims, n)
    with torch.no_grad():
        for buffer, now, all_channels in zip(stats, (middle, var * (n / (n - 1))), whole):
            if buffer is not None:
                now = now.detach().view(-1)
                now = _of_all_ranks(ctx, now) if all_channels else now
                buffer.mul_(1 - momentum).add_(now.to(buffer.dtype), alpha=momentum)
    return _affine(x * (var + eps).rsqrt(), *params).to(input.dtype)


def _of_all_ranks(ctx: Any, now: Tensor) -> Tensor:
    """A statistic of this rank's channels, with those of the others."""
    if (group := ctx.group("c")).size == 1:
        return now
    first = ctx.ins[0].offsets[1]
    mine = now.new_zeros(ctx.ins[0].shape[1])
    mine[first : first + now.shape[0]] = now
    return group.reduce(mine, "sum")
