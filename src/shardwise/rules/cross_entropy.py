"""Cross entropy and negative log likelihood, with the batch cut, the classes cut, or both.

Where the classes are cut ("vocabulary parallel") the logits are never gathered: two reductions of one number
per row give the log of the sum of exponentials, and the rank that holds a row's target adds that row's loss.
So the loss is a pending sum over the ranks that share the classes.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.compat import direct_op
from shardwise.recording import at_each_run, recorder
from shardwise.rules.loss import HALVES, bind, divided, parameter_names, reduction_of
from shardwise.rules.notation import Arg, Labels, LocalProgram, Rule, numbered
from shardwise.rules.registry import functions, rule


def _labels(x: Arg, target: Arg, probabilities: bool) -> tuple[Labels, Labels] | None:
    """Labels of the logits and of the unreduced loss; None if the shapes do not fit."""
    if x.ndim == 0:
        return None
    names = ("c",) if x.ndim == 1 else ("n", "c", *numbered("s", x.ndim - 2))
    out = tuple(n for n in names if n != "c")
    shape = tuple(n for name, n in zip(names, x.shape) if name != "c")
    if probabilities:
        return names, out
    return (names, out) if target.shape == shape else None


def _class_loss(func: Any, *, of_logits: bool) -> None:
    names = parameter_names(func)

    def class_loss(*args: Any, **kwargs: Any) -> Rule | None:
        given = bind(names, args, kwargs)
        x, target, weight = given[names[0]], given["target"], given.get("weight")
        probabilities = of_logits and target.shape == x.shape and target.dtype.is_floating_point
        labels = _labels(x, target, probabilities)
        how = reduction_of(given)
        if labels is None or how not in ("none", "mean", "sum"):
            return None
        dim = 0 if x.ndim == 1 else 1
        if weight is not None and weight.shape != (x.shape[dim],):
            return None
        ins = {x: labels[0], target: labels[0] if probabilities else labels[1]}
        if weight is not None:
            ins[weight] = ("c",)
        shape = tuple(n for i, n in enumerate(x.shape) if i != dim)
        ignore = given.get("ignore_index", -100)
        loss = _Loss(x.shape, dim, how, ignore, probabilities, of_logits)

        def local(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
            now = bind(names, args, kwargs)
            return loss(
                ctx,
                now[names[0]],
                now["target"],
                now.get("weight"),
                now.get("label_smoothing", 0.0),
            )

        usual = (
            of_logits and not probabilities and how == "mean" and weight is None and x.ndim == 2
        )
        if usual and not given.get("label_smoothing") and x.dtype not in HALVES:
            local = functools.partial(_usual, ignore, local)
        special = frozenset(labels[0]) if how == "mean" else frozenset(("c",))
        out = labels[1] if how == "none" else ()
        return Rule(
            ins,
            (out,),
            special=special,
            linear=tuple(frozenset([a]) for a in loss.factors(x, target, weight, given)),
            local=local,
            out_shapes=(shape if out else (),),
        )

    rule(func)(class_loss)


_nll_and_count = direct_op(torch.ops.aten.nll_loss_forward.default)


def _usual(
    ignore: int,
    other: LocalProgram,
    ctx: Any,
    x: Tensor,
    target: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The mean over rows of (rows, classes), rows cut: the kernel's own count, one number exchanged."""
    if "c" in ctx.axes:
        return other(ctx, x, target, *args, **kwargs)
    group, wrong = ctx.group("n"), None
    try:
        loss, count = _nll_and_count(x.log_softmax(1), target, None, 2, ignore)
    except IndexError as error:
        loss, count, wrong = x.sum(), x.new_full((), math.nan), error
    total = group.total(count)
    if total.is_cpu and recorder() is None and not total.item() >= 0:
        _raise_together(group, wrong)
    return loss.div_(total)


_BAD = -(2**40)  # no count of targets, nor what many ranks' counts and a few of these add up to


def _raise_together(group: Any, wrong: IndexError | None) -> None:
    """Raise on all ranks, one of which has a target that is no class.

    It has put NaN, or a negative number, into the count or the weight that goes round anyway.

    Raises:
        IndexError: Of the first rank that has one; torch's words.
    """
    mine = str(wrong or "")
    for text in filter(None, [mine] if group.size == 1 else group.objects(mine)):
        raise IndexError(text)


class _Loss:
    """The local program of one call.

    Attributes:
        shape: Global shape of the logits.
        dim: Their class dim.
        how: The reduction.
        ignore: Target that does not count.
        probabilities: Whether targets are probabilities of classes.
        of_logits: Whether the input is logits; else log probabilities.
    """

    __slots__ = ("dim", "how", "ignore", "of_logits", "probabilities", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        dim: int,
        how: str,
        ignore: int,
        probabilities: bool,
        of_logits: bool,
    ) -> None:
        self.shape, self.dim, self.how, self.ignore = shape, dim, how, ignore
        self.probabilities, self.of_logits = probabilities, of_logits

    def __call__(
        self, ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
    ) -> Tensor:
        """The local part of the loss: a pending sum over the ranks that cut the rows or the classes."""
        if ctx.group("c").size == 1:
            whole = self._whole(target, weight, smoothing)
            if self.how != "mean":
                return whole(x, self.how)
            total = self.total(ctx, target, weight)
            return divided(lambda how: whole(x, how), total, x.dtype)
        # First what a mean divides by: where a target is wrong, all ranks raise there.
        total: Any = self.total(ctx, target, weight) if self.how == "mean" else None
        dtype = x.dtype
        if dtype in HALVES:
            x = x.float()
            dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else dtype
        rows = self.rows(ctx, x, target, weight, smoothing)
        if self.how == "none":
            return rows.to(dtype)
        if self.how == "sum":
            return rows.sum().to(dtype)
        return (rows.sum() / total).to(dtype)

    def _whole(
        self, target: Tensor, weight: Tensor | None, smoothing: float
    ) -> Callable[[Tensor, str], Tensor]:
        if not self.of_logits:
            return lambda x, how: F.nll_loss(
                x, target, weight, ignore_index=self.ignore, reduction=how
            )
        return lambda x, how: F.cross_entropy(
            x,
            target,
            weight,
            ignore_index=self.ignore,
            reduction=how,
            label_smoothing=smoothing,
        )

    def factors(
        self, x: Arg, target: Arg, weight: Arg | None, given: dict[str, Any]
    ) -> list[Arg]:
        """The arguments that the loss is a multiple of, each alone; a mean also divides by the weights."""
        found = [] if self.of_logits else [x]
        if self.probabilities and not given.get("label_smoothing"):
            found.append(target)
        if weight is not None and (self.how != "mean" or self.probabilities):
            found.append(weight)
        return [a for a in found if [x, target, weight].count(a) == 1]

    def total(self, ctx: Any, target: Tensor, weight: Tensor | None) -> Any:
        """What a mean divides by: the number, or the weights, of all targets that count."""
        if self.probabilities:
            return math.prod(self.shape) // max(self.shape[self.dim], 1)
        with torch.no_grad():
            rows = ctx.group(*(f for f in ctx.axes if f != "c" or weight is not None))
            count, wrong = self.counted(ctx, target, weight), None
            try:
                if recorder() is None:
                    _check_targets(target, self.ignore, self.shape[self.dim])
            except IndexError as error:
                wrong = error
                count = torch.full_like(count, _BAD if weight is None else math.nan)
            total = rows.sum(count)
            if total.is_cpu and recorder() is None and not total.item() >= 0:
                _raise_together(rows, wrong)
            return total

    def counted(self, ctx: Any, target: Tensor, weight: Tensor | None) -> Tensor:
        """The same for the rows, and with weights the classes, that are here."""
        if weight is None:
            return (target != self.ignore).sum()
        inside, near = self.places(ctx, target, weight.shape[0])
        if weight.shape[0] == 0:
            return weight.sum()
        return torch.where(inside, weight[near], weight.new_zeros(())).sum()

    def places(self, ctx: Any, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Which targets are among the ``count`` classes here, and where (some place for the others)."""
        start = ctx.start(0, self.dim)
        inside = (target != self.ignore) & (target >= start) & (target < start + count)
        return inside, torch.where(inside, target - start, torch.zeros_like(target))

    def rows(
        self, ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
    ) -> Tensor:
        """For each row the part of its loss that the classes here make."""
        dim, classes, here = self.dim, self.shape[self.dim], x.shape[self.dim]
        lse = None
        if self.of_logits:
            x, lse = _shifted(ctx.group("c"), x, dim)
        if weight is not None:
            weight = weight.to(x.dtype)
        if self.probabilities:
            share = target.to(x.dtype)
            if smoothing > 0:
                share = share * (1 - smoothing) + smoothing / classes
            if weight is not None:
                share = share * weight.view(-1, *(1,) * (x.ndim - dim - 1))
            return ((x if lse is None else x - lse.unsqueeze(dim)) * -share).sum(dim)
        at_each_run("check targets", _check_targets, target, self.ignore, classes)
        inside, near = self.places(ctx, target, here)
        at = near.unsqueeze(dim)
        picked = (
            x.gather(dim, at).squeeze(dim) if here else x.sum(dim)
        )  # zeros that keep the edge
        nll = -picked if lse is None else lse - picked
        if weight is not None and here:
            nll = nll * weight[near]
        zero = nll.new_zeros(())
        rows = torch.where(inside, nll, zero)
        if not smoothing > 0:
            return rows
        assert lse is not None, "only cross entropy smooths"
        if weight is None:
            smooth = lse * here - x.sum(dim)
        else:
            smooth = lse * weight.sum() - (x * weight.view(-1, *(1,) * (x.ndim - dim - 1))).sum(
                dim
            )
        smooth = torch.where(target != self.ignore, smooth, zero)
        return (1 - smoothing) * rows + (smoothing / classes) * smooth


def _shifted(group: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Logits less the row's maximum, and the log of the row's sum of their exponentials."""
    if x.shape[dim]:
        top = x.detach().amax(dim, keepdim=True)
    else:
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        top = torch.full(shape, -math.inf, dtype=x.dtype, device=x.device)
    x = x - group.reduce(top, "max")
    return x, group.sum(x.exp().sum(dim)).log()


def _check_targets(target: Tensor, ignore: int, classes: int) -> None:
    """Raise as torch does: no rank would hold the class, and the row would silently not count."""
    if target.device.type != "cpu":
        return
    bad = (target != ignore) & ((target < 0) | (target >= classes))
    if bool(bad.any()):
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")


for _f in (F.cross_entropy, *functions("aten.cross_entropy_loss.default")):
    _class_loss(_f, of_logits=True)
for _f in (
    F.nll_loss,
    *functions("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default"),
):
    _class_loss(_f, of_logits=False)


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss_forward(
    self: Arg, target: Arg, weight: Arg | None, reduction: int, ignore_index: int
) -> Rule | None:
    """The loss, and what a mean divides by: both pending sums."""
    labels = _labels(self, target, probabilities=False)
    if labels is None:
        return None
    dim = 0 if self.ndim == 1 else 1
    how = {0: "none", 1: "mean", 2: "sum"}[reduction]
    loss = _Loss(self.shape, dim, how, ignore_index, False, False)
    ins = {self: labels[0], target: labels[1]}
    if weight is not None:
        ins[weight] = ("c",)

    def local(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor]:
        if "c" not in ctx.axes and how != "mean":
            return ctx.func(x, target, weight, reduction, ignore_index)
        value: Any = loss(ctx, x, target, weight, 0.0)
        if how == "none":
            return value, x.new_zeros(())
        if weight is not None or "c" not in ctx.axes:
            return value, loss.counted(ctx, target, weight).to(x.dtype)
        mine = loss.places(ctx, target, x.shape[dim])[0]
        return value, mine.sum().to(x.dtype)

    shape = tuple(n for i, n in enumerate(self.shape) if i != dim)
    out = labels[1] if how == "none" else ()
    return Rule(
        ins,
        (out, ()),
        special=frozenset(labels[0]),
        linear=() if weight is None or how == "mean" else (frozenset([weight]),),
        local=local,
        out_shapes=(shape if out else (), ()),
    )
