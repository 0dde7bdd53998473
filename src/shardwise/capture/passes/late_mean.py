"""Gradients are divided by the number of labels after they have been summed over the ranks, not label by label.

```text
   count = all_reduce(count);  g = all_reduce(backward(1 / count))
   count, g = all_reduce(count, backward(1));  g * (1 / count)
```

The backward pass is linear in what it starts from, so it need not wait for the number of labels of all ranks, which
then travels with the gradients: one collective less, and none between forward and backward. For a step that is
compiled: the values differ by rounding.

Done where it can be shown: from the loss to the moves each call is one of `_NAMES` and its kin. If no label counts,
nothing is divided: the gradients of a sum over no labels are what those of its mean are, zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
import math
from typing import Any

import torch

from shardwise.capture.ir import Node, Step, Value
from shardwise.capture.order import Late, is_scalar
from shardwise.capture.passes.bucket import as_moves, key_of, single, start_of

_ATEN = torch.ops.aten
_RANGE = {torch.float32, torch.float64, torch.bfloat16}  # in which a sum over labels has room
# What backward starts from; a rank that holds the zeros of a pending sum starts from zeros.
_CONSTANTS = {_ATEN.ones_like.default, _ATEN.zeros_like.default}
_SCALINGS = {_ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.neg.default}

# By name, without overload. Linear in the first argument, whatever the others are:
_NAMES = """
    view _unsafe_view reshape t transpose permute expand unsqueeze squeeze slice select split split_with_sizes unbind
    clone _to_copy zeros_like detach alias flip roll diagonal slice_backward select_backward
    sum mean neg cumsum div mul mm bmm
    threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward leaky_relu_backward
    hardtanh_backward hardswish_backward softplus_backward native_dropout_backward
    _log_softmax_backward_data _softmax_backward_data
    native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward native_batch_norm_backward
    embedding_dense_backward convolution_backward
    max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward
"""
_LINEAR = frozenset(_NAMES.split())
_LINEAR_IN_SECOND = frozenset({"mul", "mm", "bmm"})
_LINEAR_IN_ALL = frozenset({"add", "sub", "cat", "stack"})  # of tensors, together


def late_mean(step: Step) -> Step:
    """Divide by a number of labels that is summed over ranks where the gradients have arrived."""
    known = as_moves(step)
    done = False
    for n in known.nodes:
        found = _Mean.of(known, n) if n.kind == "move" else None
        late = None if found is None else found.late()
        known, done = late or known, done or late is not None
    return known if done else step


class _Mean:
    """A cross entropy that is a mean over the labels of all ranks.

    Attributes:
        step: The step.
        forward: Gives the sum and the number of labels of this rank.
        move: Sums the number over the ranks.
        backward: The first call of the backward pass; it starts from a constant over the sum.
        constant: Makes that constant, calls without their tensor.
    """

    def __init__(
        self, step: Step, forward: Node, move: Node, backward: Node, constant: tuple[Node, ...]
    ) -> None:
        self.step, self.forward, self.move = step, forward, move
        self.backward, self.constant = backward, constant
        self._index = step.next_index
        self._linear: set[Value] = set()  # multiples of one over the sum, which is left out
        self._arrived: set[Value] = set()  # those of them that are sums over ranks
        self._memory: set[int] = set()  # that they lie in
        self._scaled: dict[Value, Value] = {}
        self._roots: set[int] = set()  # memory of what has been scaled
        self._put_off = Late()
        self._keys: set[Any] = set()  # what they travel with
        self._by: Value | None = None  # what they are multiplied with in the end
        self._out: list[Node] = []
        self._last: Value

    @staticmethod
    def of(step: Step, move: Node) -> _Mean | None:
        """The mean whose number of labels a move sums, if it is one."""
        start = single(move, "all_reduce")
        if start is None or start.info["op"] != "sum":
            return None
        count = move.args[0]
        forward = next((n for n in step.nodes if count in n.outs), None)
        # args: log-probabilities, labels, weight, reduction, the label that does not count
        if (
            forward is None
            or forward.target is not _ATEN.nll_loss_forward.default
            or count is not forward.outs[1]
            or forward.args[2] is not None
            or forward.outs[0].fake is None
            or forward.outs[0].fake.ndim
        ):
            return None
        over = _over(step, move.outs[0])
        found = [
            n
            for n in step.nodes
            # args: gradient, then as those of the forward call, number of labels
            if n.target is _ATEN.nll_loss_backward.default
            and n.args[2:4] == forward.args[1:3]
            and n.args[4] == 2  # of the sum
            and n.args[5] == forward.args[4]
            and n.args[0] in over
        ]
        if len(found) != 1:
            return None
        (backward,) = found
        return _Mean(step, forward, move, backward, over[backward.args[0]])

    def late(self) -> Step | None:
        """The step with the division at the end; None if it is not known to be the same."""
        for n in self.step.nodes:
            if not self._place(n):
                return None
        for v in self.step.outputs:
            if not self._is_plain(v) and not self._scale(v):
                return None
        if self._by is None or key_of(start_of(self.move)) not in self._keys:
            return None
        step = self.step.with_nodes(self._out, self._index)
        outputs = tuple([self._scaled.get(v, v) for v in self.step.outputs])
        return replace(step, outputs=outputs)

    def _place(self, n: Node) -> bool:
        """Whether a node can be placed; it is, before the division or behind it."""
        if n is self.move:
            self._put_off.add(_noted(n, "heavy", 1), member=True)  # it may travel with the rest
            return True
        if n is self.backward:
            n = self._undivided(n)
        elif any(v.root in self._roots and v not in self._scaled for v in n.inputs):
            return False  # it would see what is not divided
        n = n.with_values(self._scaled)
        if self._by is None and self._put_off.stops(n):
            self._put_off.add(n, member=False)
            return _is_small(n)
        taken = [v for v in dict.fromkeys(n.inputs) if v in self._linear]
        if taken and not self._is_linear(n):
            if not all(map(self._scale, taken)):
                return False
            n = n.with_values(self._scaled)
        if not self._memory.isdisjoint(n.writes - {v.root for v in n.outs}):
            return False
        if n.kind == "move" and taken:
            n = _noted(n, "undivided")  # ranks compare that
        self._out.append(n)
        return True

    def _add(self, values: Iterable[Value], arrived: bool) -> None:
        for v in values:
            self._linear.add(v)
            self._memory.add(v.root)
            if arrived:
                self._arrived.add(v)

    def _is_plain(self, v: Value) -> bool:
        return v not in self._linear and v.root not in self._roots

    def _undivided(self, n: Node) -> Node:
        """The first call of the backward pass, from the constant alone."""

        def constant(x: torch.Tensor) -> torch.Tensor:
            for made in self.constant:
                x = made.target(x, *made.args[1:], **made.kwargs)  # pyright: ignore[reportOptionalCall]
            return x

        self._note(constant, self.forward.outs[0])
        self._add(n.outs, arrived=False)
        # the gradient of a sum does not look at the number of labels, which the move may overwrite
        reads = n.reads - {n.args[0].root, self.move.args[0].root} | {self._last.root}
        return replace(n, args=(self._last, *n.args[1:]), reads=reads)

    def _scale(self, v: Value) -> bool:
        """Whether a sum over ranks can be divided; it is."""
        if v in self._scaled:
            return True
        if v not in self._arrived or v.root in self._roots:
            return False
        by = self._by
        if by is None:
            self._out += [*self._put_off.members, *self._put_off.waiting]
            self._note(_one_over, self.move.outs[0])
            by = self._by = self._last
        self._note(torch.mul, v, by)
        self._scaled[v] = self._last
        self._roots.add(v.root)
        return True

    def _note(self, call: Any, *values: Value) -> None:
        made, (self._last,), self._index = self.step.tape.note_calls(
            lambda *xs: [call(*xs)], values, self._index
        )
        for m in made:
            m.site = self.backward.site
        self._out += made

    def _is_linear(self, n: Node) -> bool:
        """Whether a node gives multiples, if what it takes are some."""
        if n.kind == "move":
            return self._is_sum(n)
        if not _is_linear(n, self._linear):
            return False
        self._add(n.outs, any(v in self._arrived for v in n.inputs))
        return True

    def _is_sum(self, n: Node) -> bool:
        """Whether a move of a multiple gives another."""
        inside = {v for v in n.inputs if v in self._linear}
        for b in n.body:
            taken = [v for v in b.inputs if v in inside]
            sends = b.kind == "start" and b.info.get("op") in (None, "sum")
            if taken and sends and b.info["kind"] == "all_reduce":
                self._keys.add(key_of(b))
            if taken and not (sends or b.kind == "wait" or _is_linear(b, inside)):
                return False
            if taken:
                inside.update(b.outs)
        if not inside.issuperset(n.outs):
            return False
        self._add(n.outs, arrived=True)
        return True


def _noted(move: Node, name: str, value: Any = None) -> Node:
    """The move with a fact at its collectives; default which they are."""
    body = [
        replace(b, info={**b.info, name: b.info["carries"] if value is None else value})
        if b.kind == "start"
        else b
        for b in move.body
    ]
    return replace(move, body=tuple(body))


def _over(step: Step, count: Value) -> dict[Value, tuple[Node, ...]]:
    """Constants over a count, of no dims: each with the calls that make the constant."""
    constant: dict[Value, tuple[Node, ...]] = {}
    found: dict[Value, tuple[Node, ...]] = {}
    for n in step.nodes:
        if n.kind != "call" or not n.args or not is_scalar(n):
            continue
        x, *rest = n.args
        if n.target in _CONSTANTS:
            constant[n.outs[0]] = (n,)
        elif n.target in _SCALINGS and all(map(_is_finite, rest)):
            for known in (constant, found):
                if x in known:
                    known[n.outs[0]] = (*known[x], n)
        elif n.target is _ATEN.div.Tensor and x in constant and rest == [count]:
            found[n.outs[0]] = constant[x]
    return found


def _is_small(n: Node) -> bool:
    """Whether a node may come late: it computes or sends scalars, and nothing is seen of it outside."""
    values = (*n.inputs, *n.outs)
    return n.kind not in ("effect", "opaque") and all(
        v.fake is None or v.fake.ndim == 0 for v in values
    )


def _is_finite(x: Any) -> bool:
    return type(x) in (int, float) and x != 0 and math.isfinite(x)


def _is_linear(n: Node, known: set[Value]) -> bool:
    """Whether a call is linear in those of its values that are known to be multiples, and makes new ones of them."""
    if n.kind != "call" or any(v.fake is None or v.fake.dtype not in _RANGE for v in n.outs):
        return False
    namespace, _, name = str(n.target).partition(".")
    name = name.split(".")[0]
    if namespace != "aten" or "rounding_mode" in n.kwargs:
        return False
    at = [i for i, a in enumerate(n.args) if isinstance(a, Value) and a in known]
    inside = sum(v in known for v in n.inputs)
    if name in _LINEAR_IN_ALL:
        tensors = [v for v in n.inputs if v.kind == "tensor"]
        return inside == len(tensors) == len(n.inputs) and not _adds_number(name, n)
    if inside != 1 or not at:
        return False
    return (at == [0] and name in _LINEAR) or (at == [1] and name in _LINEAR_IN_SECOND)


def _adds_number(name: str, n: Node) -> bool:
    return name in ("add", "sub") and not all(isinstance(a, Value) for a in n.args[:2])


def _one_over(count: torch.Tensor) -> torch.Tensor:
    return count.clamp(min=1).reciprocal()
