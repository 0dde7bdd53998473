"""The functions of ``torch.nn.init`` that arrive as calls of their own: their bodies, on DTensors.

The others (xavier, kaiming_normal, trunc_normal, orthogonal, ...) run their own bodies, whose draws and
writes are calls on DTensors; fans are computed from global shapes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardwise.tensor.overrides import override


@override(nn.init.uniform_)
def _uniform_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("tensor", "a", "b", "generator"), args)) | kwargs
    with torch.no_grad():
        return given["tensor"].uniform_(
            given.get("a", 0.0), given.get("b", 1.0), generator=given.get("generator")
        )


@override(nn.init.normal_)
def _normal_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("tensor", "mean", "std", "generator"), args)) | kwargs
    with torch.no_grad():
        return given["tensor"].normal_(
            given.get("mean", 0.0), given.get("std", 1.0), generator=given.get("generator")
        )


@override(nn.init.constant_)
def _constant_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("tensor", "val"), args)) | kwargs
    with torch.no_grad():
        return given["tensor"].fill_(given["val"])


@override(nn.init.kaiming_uniform_)
def _kaiming_uniform_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("tensor", "a", "mode", "nonlinearity", "generator"), args)) | kwargs
    x = given.pop("tensor")
    generator = given.pop("generator", None)
    func(torch.empty(x.shape, device="meta"), **given)  # raises and warns as torch does
    if 0 in x.shape:
        return x
    field = math.prod(x.shape[2:])
    fan = field * (
        x.shape[1] if given.get("mode", "fan_in").lower() == "fan_in" else x.shape[0]
    )
    gain = nn.init.calculate_gain(given.get("nonlinearity", "leaky_relu"), given.get("a", 0))
    bound = math.sqrt(3.0) * (gain / math.sqrt(fan))
    with torch.no_grad():
        return x.uniform_(-bound, bound, generator=generator)
