"""Gradient edges of DTensors: they know the layout, so that what is asked of them is a DTensor too.

`torch.autograd.graph.get_gradient_edge` reads a tensor's node and which of the node's results it is, and forgets
the tensor. Of a DTensor that number carries the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from shardwise.program.spec import Spec
from shardwise.tensor.overrides import OVERRIDES


class ResultNumber(int):
    """Which result of its node a local tensor is.

    Attributes:
        spec: Of the DTensor.
    """

    spec: Spec

    def __new__(cls, number: int, spec: Spec) -> ResultNumber:
        """A number that knows a spec."""
        made = super().__new__(cls, number)
        made.spec = spec
        return made


class Edge(GradientEdge):
    """An edge of a DTensor: calls on it come to us, also where nothing else in them is a DTensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As a DTensor's."""
        return OVERRIDES[func](func, args, kwargs or {})


def spec_of_edge(x: Any) -> Spec | None:
    """The spec of the DTensor whose edge this is; None of anything else."""
    return getattr(x.output_nr, "spec", None) if isinstance(x, GradientEdge) else None


def plain_edge(x: Any) -> Any:
    """An edge as torch knows it; anything else as it is."""
    return GradientEdge(*x) if type(x) is Edge else x


def _with_layout(get: Callable[[Any], GradientEdge]) -> Callable[[Any], GradientEdge]:
    @wraps(get)
    def get_gradient_edge(tensor: Any) -> GradientEdge:
        edge = get(tensor)
        return edge if spec_of_edge(edge) is None else Edge(*edge)

    return get_gradient_edge


torch.autograd.graph.get_gradient_edge = _with_layout(torch.autograd.graph.get_gradient_edge)
