"""``F.multi_head_attention_forward`` on DTensors: the same computation with heads as a dim of their own.

Torch's body merges batch and heads into one dim, which no layout with both cut can follow. Here they stay
apart, so a cut batch or cut heads need no communication. Rare options (bias_k, static_k, zero attention, wrong
shapes) run whole, in torch's own body.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from shardwise.tensor.dispatch import Call
from shardwise.tensor.overrides import override
from shardwise.tensor.whole import run_whole

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def attend(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same computation in calls on any tensors; None where torch's own body must run."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return _attend(bound.arguments) if _usual(bound.arguments) else None


@override(F.multi_head_attention_forward)
def multi_head_attention_forward(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Attention with projections; see torch."""
    found = attend(args, kwargs)
    if found is None:
        call = Call(func, args, kwargs, False)
        return run_whole(func, call.tensors, call.tree, call.kwargs)
    return found


def _usual(given: dict[str, Any]) -> bool:
    """Whether the shapes fit and no rare option is asked for; torch's body raises for what does not fit."""
    q, k, v = given["query"], given["key"], given["value"]
    rare = ("bias_k", "bias_v", "static_k", "static_v")
    if any(given[name] is not None for name in rare) or given["add_zero_attn"] or q.is_nested:
        return False
    heads, mask, padding = given["num_heads"], given["attn_mask"], given["key_padding_mask"]
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (2, 3) or k.shape[:-1] != v.shape[:-1]:
        return False
    if q.shape[-1] != given["embed_dim_to_check"] or q.shape[-1] % heads:
        return False
    if given["use_separate_proj_weight"]:
        if any(given[f"{name}_proj_weight"] is None for name in "qkv"):
            return False
    elif given["in_proj_weight"] is None or k.shape != v.shape:
        return False
    if given["is_causal"] and mask is None:
        return False
    batch = q.shape[1] if q.ndim == 3 else 1
    if k.shape[1:-1] != q.shape[1:-1]:
        return False
    for m in (mask, padding):
        if m is not None and not (m.dtype == torch.bool or m.is_floating_point()):
            return False
    if mask is not None:
        wanted = (q.shape[0], k.shape[0])
        if tuple(mask.shape) not in (wanted, (batch * heads, *wanted)):
            return False
    wanted_padding = (batch, k.shape[0]) if q.ndim == 3 else (k.shape[0],)
    return padding is None or tuple(padding.shape) == wanted_padding


def _attend(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    query, heads, need_weights = given["query"], given["num_heads"], given["need_weights"]
    batched = query.ndim == 3
    length, embed = query.shape[0], query.shape[-1]
    q, k, v = (
        _split_heads(x, heads) for x in _projected(given, batched)
    )  # batch, heads, length, dim
    mask, is_causal = _mask(given, q, k, batched)
    dropout_p = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        if dropout_p > 0:
            weights = F.dropout(weights, p=dropout_p)
        out = weights @ v
        if given["average_attn_weights"]:
            weights = weights.mean(dim=1)
        weights = weights if batched else weights.squeeze(0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    out = out.permute(2, 0, 1, 3).reshape(length, q.shape[0], embed)
    out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
    return out if batched else out.squeeze(1), weights


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).permute(1, 2, 0, 3)


def _projected(given: dict[str, Any], batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (length, batch, embed)."""
    query, key, value = given["query"], given["key"], given["value"]
    alike, same = key is value, query is key
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    weight, bias, embed = given["in_proj_weight"], given["in_proj_bias"], query.shape[-1]
    if given["use_separate_proj_weight"]:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        weights = given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"]
    elif alike and same:
        q, k, v = F.linear(query, weight, bias).unflatten(-1, (3, embed)).unbind(-2)
        return q, k, v
    else:
        weights = weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    return q, k, v


def _mask(
    given: dict[str, Any], q: Tensor, k: Tensor, batched: bool
) -> tuple[Tensor | None, bool]:
    """One additive mask that broadcasts to (batch, heads, length, keys), and whether it is causal instead."""
    mask, padding, is_causal = given["attn_mask"], given["key_padding_mask"], given["is_causal"]
    batch, heads = q.shape[:2]
    keys = k.shape[2]
    if is_causal and padding is None and not given["need_weights"]:
        return None, True
    if mask is not None:
        mask = _additive(mask, q.dtype)
        mask = (
            mask.unflatten(0, (batch, heads))
            if mask.ndim == 3
            else mask.unsqueeze(0).unsqueeze(0)
        )
    if padding is not None:
        padding = _additive(padding if batched else padding.unsqueeze(0), q.dtype)
        padding = padding.view(batch, 1, 1, keys)
        mask = padding if mask is None else mask + padding
    return mask, False


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
