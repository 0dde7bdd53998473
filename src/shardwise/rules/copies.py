"""The ``*_copy`` ops: what a view shows, copied. Their rules are those of the views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import WHOLE, Arg, Rule
from shardwise.rules.registry import RuleFunction, rule
from shardwise.rules.slicing import diagonal, narrow, select, slice_, split, unbind, unfold
from shardwise.rules.view import (
    expand,
    permute,
    same,
    squeeze,
    t,
    transpose,
    unsqueeze,
    view,
    view_as_complex,
    view_as_real,
)


def _copied(local: Callable[..., Any]) -> Callable[..., Any]:
    """A local program whose results share no memory with its arguments."""

    @wraps(local)
    def run(*args: Any, **kwargs: Any) -> Any:
        got = local(*args, **kwargs)
        if isinstance(got, Tensor):
            return got.clone(memory_format=torch.contiguous_format)
        return tuple(g.clone(memory_format=torch.contiguous_format) for g in got)

    return run


def as_copy(of_view: RuleFunction) -> RuleFunction:
    """The rule of the copying form of a view.

    Args:
        of_view: The view's rule; takes the same arguments.
    """

    @wraps(of_view)
    def of_copy(*args: Any, **kwargs: Any) -> Rule | None:
        made = of_view(*args, **kwargs)
        if made is None:
            return None
        local = made.local if made.local is None else _copied(made.local)
        return replace(made, view=False, local=local)

    return of_copy


@rule("as_strided_copy", "aten.as_strided_copy")
def as_strided_copy(
    input: Arg, size: Any, stride: Any, storage_offset: Any = None
) -> Rule | None:
    """Elements of memory, which must be whole; of a pending sum its addends."""
    if not input.layout.is_contiguous:
        return None
    names = (WHOLE,) * input.ndim
    shape = tuple(size)
    return Rule(
        {input: names},
        ((WHOLE,) * len(shape),),
        linear=(frozenset([input]),),
        out_shapes=(shape,),
    )


for _name, _of_view in {
    "alias": same,
    "detach": same,
    "diagonal": diagonal,
    "expand": expand,
    "narrow": narrow,
    "permute": permute,
    "select": select,
    "slice": slice_,
    "split": split,
    "split_with_sizes": split,
    "squeeze": squeeze,
    "t": t,
    "transpose": transpose,
    "unbind": unbind,
    "unfold": unfold,
    "unsqueeze": unsqueeze,
    "view": view,
    "view_as_complex": view_as_complex,
    "view_as_real": view_as_real,
}.items():
    rule(f"{_name}_copy", f"aten.{_name}_copy")(as_copy(_of_view))
