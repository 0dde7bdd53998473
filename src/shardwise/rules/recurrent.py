"""Recurrent layers: the batch is cut, time and weights are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rules.notation import WHOLE, Arg, Rule
from shardwise.rules.registry import rule


def _sequence(
    input: Arg,
    states: Sequence[Arg],
    layers: int,
    dropout: float,
    train: bool,
    directions: int,
    batch_first: bool,
) -> Rule | None:
    if (
        input.ndim != 3
        or any(h.ndim != 3 for h in states)
        or (dropout and train and layers > 1)
    ):
        return None  # dropout between layers is drawn inside: run whole
    names = ("b", WHOLE, WHOLE) if batch_first else (WHOLE, "b", WHOLE)
    ins = {input: names} | dict.fromkeys(states, (WHOLE, "b", WHOLE))
    shape = (*input.shape[:2], directions * states[0].shape[2])
    length, batch = (shape[1], shape[0]) if batch_first else shape[:2]
    stride = (shape[2], batch * shape[2], 1) if batch_first and length and batch else None
    count = len(states)
    return Rule(
        ins,
        (names, *((WHOLE, "b", WHOLE),) * count),
        out_shapes=(shape, *(h.shape for h in states)),
        out_strides=(stride, *(None,) * count),
        special=frozenset("b"),
        local=_pieces,
    )


def _pieces(ctx: Any, input: Tensor, hx: Any, *rest: Any, **kwargs: Any) -> Any:
    """On a rank without rows, one row that nobody sees: torch takes another kernel for none, and another dtype."""
    batch_first = kwargs.get("batch_first", rest[6] if len(rest) > 6 else False)
    dim = 0 if batch_first else 1
    if input.shape[dim]:
        return ctx.func(input, hx, *rest, **kwargs)

    def padded(x: Tensor, d: int) -> Tensor:
        return torch.cat([x, x.new_zeros((*x.shape[:d], 1, *x.shape[d + 1 :]))], d)

    states = padded(hx, 1) if isinstance(hx, Tensor) else [padded(h, 1) for h in hx]
    out, *last = ctx.func(padded(input, dim), states, *rest, **kwargs)
    return out.narrow(dim, 0, 0), *[h.narrow(1, 0, 0) for h in last]


@rule("lstm", "aten.lstm.input")
def lstm(
    input: Arg,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: Any,
    dropout: Any,
    train: bool,
    bidirectional: bool,
    batch_first: Any = None,
) -> Rule | None:
    """``t b [i], l b [h], l b [h] -> t b [h], l b [h], l b [h]``; packed sequences run whole."""
    if not isinstance(hx, (list, tuple)) or len(hx) != 2:
        return None
    return _sequence(input, hx, num_layers, dropout, train, 1 + bidirectional, batch_first)


@rule(
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "aten.gru.input",
    "aten.rnn_tanh.input",
    "aten.rnn_relu.input",
)
def gru(
    input: Arg,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: Any,
    dropout: Any,
    train: bool,
    bidirectional: bool,
    batch_first: Any = None,
) -> Rule | None:
    """``t b [i], l b [h] -> t b [h], l b [h]``."""
    if not isinstance(params, (list, tuple)):
        return None
    return _sequence(input, [hx], num_layers, dropout, train, 1 + bidirectional, batch_first)


@rule("lstm_cell", "aten.lstm_cell.default")
def lstm_cell(input: Arg, hx: Any, *weights: Any) -> Rule | None:
    """``b [i], b [h], b [h] -> b [h], b [h]``."""
    if input.ndim != 2 or any(h.ndim != 2 for h in hx):
        return None
    names = ("b", WHOLE)
    return Rule(
        dict.fromkeys((input, *hx), names), (names,) * 2, out_shapes=tuple(h.shape for h in hx)
    )


@rule(
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    *(f"aten.{name}_cell.default" for name in ("gru", "rnn_tanh", "rnn_relu")),
)  # fmt: skip
def gru_cell(input: Arg, hx: Arg, *weights: Any) -> Rule | None:
    """``b [i], b [h] -> b [h]``."""
    if input.ndim != 2 or hx.ndim != 2:
        return None
    names = ("b", WHOLE)
    return Rule({input: names, hx: names}, (names,), out_shapes=(hx.shape,))
