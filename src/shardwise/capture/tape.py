"""The recorder: a step runs once on fake tensors, and every local call, move and draw becomes a node.

A dispatch mode sees each call on local tensors below autograd, forward and backward alike. A real tensor that it
meets is *lifted*: it becomes an input of the step, and a fake stands for it. So nothing is computed, nothing is
sent and nothing of the user's is written while a step is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
import functools
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.ir import OUTSIDE, RNG, Node, Slot, Value, placed
from shardwise.capture.kernels import as_run
from shardwise.capture.number import HINT, number
from shardwise.comm.transport import Handle, Ready
from shardwise.compat import (
    TorchDispatchMode,
    direct_op,
    fake_mode,
    is_fake,
    on_rng_state,
    storage_id,
    untraceable,
    without_modes,
)
from shardwise.errors import CaptureError
from shardwise.events import user_site
from shardwise.recording import record_with, recorder
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradients import leaf_of

_ATEN = torch.ops.aten
_STAND_INS = (Tensor, torch.SymFloat)  # a fake or a hint stands for them
_REFUSED = {
    **{
        getattr(_ATEN.set_, name): "set_ changes whose memory a tensor has"
        for name in _ATEN.set_.overloads()
        if not name.endswith("out")
    },
    _ATEN.resize_.default: "resize_ changes the memory of a tensor",
}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# What is written although the schema does not say so: positions of the tensors, and of the flag that says whether.
_HIDDEN_WRITES: dict[Any, tuple[tuple[int, ...], int]] = {
    _ATEN.native_batch_norm.default: ((3, 4), 5),
    _ATEN.cudnn_batch_norm.default: ((3, 4), 5),
    _ATEN.miopen_batch_norm.default: ((3, 4), 5),
}
# Kernels that keep something for backward only where gradients are on, which they are not when a step runs.
_ASKS_WHETHER_GRAD = {_ATEN.mkldnn_rnn_layer.default}
# What gives a tensor another shape in place, and the view that it is then.
_VIEWS_IN_PLACE: dict[Any, Any] = {
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.as_strided_.default: _ATEN.as_strided.default,
}
_SHAPES: dict[str, Callable[..., Sequence[int]]] = {
    "all_gather": lambda x, n, how: (n, *x.shape),
    "reduce_scatter": lambda x, n, how: x.shape[1:],
    "all_reduce": lambda x, n, how: x.shape,
    "broadcast": lambda x, n, how: x.shape,
    "all_to_all": lambda x, n, how: (sum(how["out_splits"]),),
}


class Taped(Handle):
    """The handle of a collective that was noted."""

    __slots__ = ("_out", "_tape", "_value")

    def __init__(self, tape: Tape, value: Value, out: Tensor) -> None:
        self._tape, self._value, self._out = tape, value, out

    def wait(self) -> Tensor:
        """Note the wait, once."""
        if self._value is not None:
            out, self._value = self._value, None  # pyright: ignore[reportAttributeAccessIssue]
            self._tape.note_wait(out, self._out)
        return self._out


class Tape(TorchDispatchMode):
    """See the module.

    Args:
        slots: Where known tensors come from, by the id of the local tensor.
        rank: This rank.
    """

    def __init__(self, slots: dict[int, Slot], rank: int) -> None:
        super().__init__()
        self.slots, self.rank = slots, rank
        self.nodes: list[Node] = []
        self.inputs: list[tuple[Value, Slot]] = []
        self.lifted_leaves: list[
            tuple[Tensor, Any, Any]
        ] = []  # with the gradients they had, own and reduced
        self.guards: list[tuple[Slot, Callable[..., bool], Any, bool]] = []
        self.fake_mode: Any = fake_mode()
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}
        self._from_outside: set[int] = set()  # fakes that stand for tensors from outside
        self._roots: dict[int, int] = {}
        self._firsts: dict[int, Value] = {}  # by memory: the first value that lies there
        self._next = 0
        self.constants: dict[int, Tensor] = {}
        self.facts: list[str] = []  # what all ranks must have alike, and nothing else shows
        self.doubts: list[str] = []  # what it read that may be another thing at the next run
        self.reads_file: Exception | None = None
        self.from_arrays = False  # whether it made a tensor of a numpy array
        self.generators: set[int] = {id(torch.default_generator)}  # that were there before
        self.own_generators: dict[int, tuple[Any, Tensor]] = {}  # others, with their states
        self.restores: list[Callable[[], None]] = []
        self.checks: list[Callable[[], None]] = []
        self._collectives = 0
        self._draws: dict[
            int, tuple[object, int]
        ] = {}  # by generator: since which state, how many

    @property
    def next_index(self) -> int:
        """The next free number of a value."""
        return self._next

    # ---- values --------------------------------------------------------------------------------

    def new_value(self, fake: Tensor | None, kind: str = "tensor") -> Value:
        """A value for a fake tensor, a number or a handle."""
        index = self._next
        self._next += 1
        root = index
        if fake is not None:
            if fake.layout is not torch.strided or fake.dtype in _QUANTIZED:
                what = fake.dtype if fake.dtype in _QUANTIZED else fake.layout
                raise self.refuse(
                    f"it makes or takes a tensor of {what}", ["do it outside the step"]
                )
            root = self._roots.setdefault(storage_id(fake), index)
        value = Value(index, fake, root, kind)
        if fake is not None:
            self._firsts.setdefault(storage_id(fake), value)
            fake._shardwise_value = value  # pyright: ignore[reportAttributeAccessIssue]
        return value

    def value_of(self, x: Tensor) -> Value:
        """The value that a tensor stands for; a real one is lifted."""
        fake = self.fake_of(x)
        found = getattr(fake, "_shardwise_value", None)
        return self._alias(fake) if found is None else found

    def _alias(self, fake: Tensor) -> Value:
        """The value of a tensor that was made past the dispatcher: another object for one that is known."""
        first = self._firsts.get(storage_id(fake))
        known = None if first is None else first.fake
        if first is None or known is None or _lies(known) != _lies(fake):
            raise self.refuse(
                "it makes a tensor in a way that is not seen", ["view_as, detach or clone"]
            )
        fake._shardwise_value = first  # pyright: ignore[reportAttributeAccessIssue]
        return first

    def fake_of(self, x: Tensor) -> Tensor:
        """The fake that stands for a tensor."""
        if is_fake(x):
            if x.fake_mode is not self.fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
                raise self.refuse(
                    "it uses a deep copy of a recorded tensor, or one that an earlier recording left behind",
                    ["clone() in place of copy.deepcopy"],
                )
            return x
        found = self._lifted.get(id(x))
        if found is None:
            with without_modes():
                fake = self.fake_mode.from_tensor(x.detach())
            self._lifted[id(x)] = found = (x, fake)
            self._from_outside.add(id(fake))
            value = self.new_value(fake)
            slot = self.slots.get(id(x))
            if slot is None:
                slot = Slot("tensor", "closed-over", lambda _, x=x: x)
            self.inputs.append((value, slot))
            if x.requires_grad and x.is_leaf:
                leaf = leaf_of(x)
                self.lifted_leaves.append((x, x.grad, leaf and (leaf.grad, leaf.pending)))
            elif x.requires_grad and not x.is_inference():
                self._end_of_history(x, slot)
        return found[1]

    def _end_of_history(self, x: Tensor, slot: Slot) -> None:
        """What a tensor was computed from lies outside: no gradient goes there."""

        def refuse(_: Tensor) -> None:
            raise self.refuse(
                f"backward leaves the step through {slot.role} {slot.name}, which was computed outside",
                ["detach() it", "compute it in the step"],
            )

        self.afterwards(x.register_hook(refuse).remove)

    def lift_number(self, slot: Slot, now: float) -> torch.SymFloat:
        """A number that comes from outside at each run; how it compares with constants decides which step fits."""
        value = self.new_value(None, "number")
        self.inputs.append((value, slot))

        def decide(compare: Callable[..., bool], other: Any) -> bool:
            answer = bool(compare(now, other))
            self.guards.append((slot, compare, other, answer))
            return answer

        return number(value, self._note_number, self._refuse_number, decide)

    def add_input(self, x: Tensor, slot: Slot) -> None:
        """Lift a tensor that comes from a slot."""
        self.slots[id(x)] = slot
        self.fake_of(x)

    # ---- errors --------------------------------------------------------------------------------

    def refuse(self, what: str, tries: Sequence[str] = ()) -> Exception:
        """The error for what no later run could repeat."""
        return CaptureError(
            f"this step cannot be captured: {what} (at {user_site() or 'unknown'}).",
            tries=tries,
        )

    def _refuse_number(self, what: str) -> Exception:
        return self.refuse(
            what,
            [
                "keep it a tensor: torch.where in place of if, return it in place of .item()",
                "split the step: capture the parts before and after, and decide between them",
            ],
        )

    # ---- calls ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a call on fakes, and note it."""
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            with self:
                return DTensor.__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("prim", "profiler"):
            return self._on_fakes(func, args, kwargs)[0]
        if func is _ATEN._local_scalar_dense.default:
            return self._read(args[0])
        if func in _REFUSED:
            raise self.refuse(_REFUSED[func])
        if func.namespace == "c10d":  # what is waited for later shows nowhere
            raise self.refuse(
                f"it calls torch.distributed itself ({func.overloadpacket.__name__.rstrip('_')})",
                [
                    "a DTensor: from_local, then redistribute or full_tensor",
                    "do it outside the step",
                ],
            )
        if func is _ATEN.lift_fresh.default and not is_fake(args[0]):
            return self._constant(args[0])
        if (
            func in _VIEWS_IN_PLACE
            and is_fake(args[0])
            and id(args[0]) not in self._from_outside
        ):
            return self._another_view(func, args)
        if torch.is_grad_enabled() and func.overloadpacket.__name__.endswith("_"):
            self._check_history(func, args, kwargs)
        result, fakes, named = self._on_fakes(func, args, kwargs)
        written = _written(func, args, kwargs)
        outs: list[Value] = []
        given: dict[int, Any] = {}
        for new, old in zip(_tensors((fakes, named)), _tensors((args, kwargs))):
            given.setdefault(id(new), old)

        def valued(y: Tensor) -> Value:
            if id(y) in given:
                return self.value_of(y)
            value = self.new_value(y)
            outs.append(value)
            return value

        tree = _mapped(valued, Tensor, result)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not outs and not written and not draws:
            if not func._schema.returns:  # a check, as torch._assert_async
                self.effect(
                    str(func), functools.partial(direct_op(func), **kwargs), *args, writes=False
                )
            return result
        own = tuple(self._own(a) for a in args)
        own_named = {k: self._own(a) for k, a in kwargs.items()}
        kind, target = "call", func
        if func in _ASKS_WHETHER_GRAD and torch.is_grad_enabled():
            kind, target = "opaque", torch.enable_grad()(direct_op(func))
        self._note(
            kind, str(func), target, own, own_named, tuple(outs), tree, written, draws=draws
        )
        return _mapped(lambda y: given.get(id(y), y), Tensor, result)

    def _another_view(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        """``x.t_()``: x is another view from here on; what was known of it as it was remains so."""
        x = args[0]
        value = self.value_of(x)
        with without_modes(), self.fake_mode:
            value.fake = x.detach()
            value.fake._shardwise_value = value
        self._on_fakes(func, args, {})
        out = self.new_value(x)
        if self._firsts[storage_id(x)] is value:
            self._firsts[storage_id(x)] = out
        target = _VIEWS_IN_PLACE[func]
        self._note("call", str(target), target, (value, *args[1:]), {}, (out,), out)
        return x

    def _check_history(self, func: Any, args: Any, kwargs: Any) -> None:
        """A tensor from outside that is written in place gets no history: it would be that of the recorded call."""
        if not any(x.requires_grad for x in _tensors((args, kwargs))):
            return
        for x in _written(func, args, kwargs):
            base = x if x._base is None else x._base
            outside = not is_fake(base) or id(base) in self._from_outside
            if outside and base.dtype.is_floating_point | base.dtype.is_complex:
                raise self.refuse(
                    "it writes what has a history into a tensor from outside, in place",
                    ["detach() what is written, or write with torch.no_grad()", "return it"],
                )

    def _on_fakes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        fakes = _mapped(self._fake_argument, _STAND_INS, args)
        named = _mapped(self._fake_argument, _STAND_INS, kwargs)
        try:
            with self.fake_mode:
                result = func(*fakes, **named)
        except untraceable() as error:
            raise self._refuse_number(
                f"the shape or value of what {func} gives depends on data"
            ) from error
        return as_run(func, fakes, named, result, self.fake_mode), fakes, named

    def _fake_argument(self, x: Any) -> Any:
        return self.fake_of(x) if isinstance(x, Tensor) else HINT

    def _own(self, tree: Any) -> Any:
        """Arguments as the node keeps them."""
        if isinstance(tree, Tensor):
            return self.value_of(tree)
        if isinstance(tree, torch.SymFloat):
            return tree.node.value
        if type(tree) in (list, tuple):
            return type(tree)([self._own(x) for x in tree])
        return tree

    def _note(
        self,
        kind: str,
        name: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: tuple[Value, ...],
        result: Any,
        written: Sequence[Tensor] = (),
        *,
        draws: bool = False,
        info: dict[str, Any] | None = None,
    ) -> Node:
        node = Node(
            kind,
            name,
            target,
            args,
            kwargs,
            outs,
            result,
            frozenset(),
            frozenset(),
            user_site(),
        )
        reads = {v.root for v in node.inputs}
        writes = {v.root for v in outs if v.root not in reads}
        writes.update(self.value_of(t).root for t in written)
        if draws:
            reads.add(RNG)
            writes.add(RNG)
            given = [*args, *kwargs.values()]
            generator = next((a for a in given if isinstance(a, torch.Generator)), None)
            self._begin_anew(generator)
            since, count = self.generator_position(generator)
            self._draws[id(generator)] = since, count + 1
        node.reads, node.writes = frozenset(reads), frozenset(writes)
        if info:
            node.info = info
        self.nodes.append(node)
        return node

    def _constant(self, x: Tensor) -> Tensor:
        """``torch.tensor(...)`` of Python numbers: made anew at each run, for it may be written to."""
        fake = self._fresh(x)
        out = self.new_value(fake)
        keep = x.clone()
        self._note("opaque", "constant", keep.clone, (), {}, (out,), out)
        self.constants[out.index] = keep
        return fake

    def _fresh(self, like: Tensor) -> Tensor:
        with without_modes(), self.fake_mode:
            device = "cpu" if like.device.type == "meta" else like.device
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=device
            )

    # ---- numbers -------------------------------------------------------------------------------

    def _read(self, x: Tensor) -> Any:
        if not x.dtype.is_floating_point:
            raise self._refuse_number(
                f"Python asks for the value of a tensor of {x.dtype}: a branch, an index or a size depends on it"
            )
        out = self.new_value(None, "number")
        self._note("number", "item", _item, (self.value_of(x),), {}, (out,), out)
        return number(out, self._note_number, self._refuse_number)

    def _note_number(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not any(isinstance(a, Value) for a in args):
            return call(*args)
        out = self.new_value(None, "number")
        self._note("number", name, call, args, {}, (out,), out)
        return out

    # ---- what the lower floors report ----------------------------------------------------------

    def collective(
        self, kind: str, x: Tensor, ranks: tuple[int, ...], *, transport: Any, **how: Any
    ) -> Handle:
        """Note the start of a collective."""
        fake = self.fake_of(x)
        with without_modes(), self.fake_mode:
            shape = _SHAPES[kind](fake, len(ranks), how)
            got = torch.empty(tuple(shape), dtype=fake.dtype, device=fake.device)
        handle = self.new_value(None, "handle")
        op = how.get("op", "")
        name = f"start {kind}{f' {op}' if op else ''} over {how.get('tag') or list(ranks)}"
        info = {
            "kind": kind,
            "ranks": ranks,
            "transport": transport,
            "carries": (self._collectives,),
            **how,
        }
        self._collectives += 1
        target = starter(info)
        written = [x] if how.get("owned") else []
        self._note(
            "start",
            name,
            target,
            (self.value_of(x),),
            {},
            (handle,),
            handle,
            written,
            info=info,
        )
        return Taped(self, handle, got)

    def note_wait(self, handle: Value, got: Tensor) -> None:
        """Note where a collective's result is asked for."""
        out = self.new_value(got)
        self._note("wait", "wait", Handle.wait, (handle,), {}, (out,), out)

    def move(self, mover: Any, x: Tensor) -> Tensor:
        """Note a move, and what carries it out."""
        how = mover.now()
        if not how.steps:
            return x

        def carried_out(y: Tensor) -> Tensor:
            for step in how.steps:
                y = step(y)
            return y

        name = f"move {placed(how.src)} -> {placed(how.dst)}"
        return self._as_one(name, x, carried_out, {"mover": how})

    def block(self, name: str, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        """Note ``call(x)`` as one thing."""
        return self._as_one(name, x, call, {})

    def _as_one(
        self, name: str, x: Tensor, call: Callable[[Tensor], Tensor], info: dict[str, Any]
    ) -> Tensor:
        source = self.value_of(x)
        outer, self.nodes = self.nodes, []
        try:
            with torch.no_grad():
                y = call(x)
        finally:
            body, self.nodes = self.nodes, outer
        out = self.value_of(y)
        if out.root == source.root:  # only another view
            self.nodes += body
            return y
        node = self._note("move", name, None, (source,), {}, (out,), out, info=info)
        node.body = tuple(body)
        node.writes |= {r for n in body for r in n.writes}
        return y

    def fact(self, text: str) -> None:
        """Note what all ranks must have alike."""
        self.facts.append(text)

    def afterwards(self, restore: Callable[[], None]) -> None:
        """Have something put back when the recording ends."""
        self.restores.append(restore)

    def at_end(self, check: Callable[[], None]) -> None:
        """Have something looked at when the recorded call is over."""
        self.checks.append(check)

    def opaque(
        self, name: str, call: Callable[..., Any], like: Callable[[], Tensor], *args: Any
    ) -> Tensor:
        """Note a call whose result is a fresh tensor like what ``like()`` gives; draws keep their order."""
        with without_modes(), record_with(None):
            fake = self._fresh(like())
        out = self.new_value(fake)
        own = tuple(self._own(a) for a in args)
        self._note("opaque", name, call, own, {}, (out,), out, draws=True)
        return fake

    def generator_position(self, generator: Any) -> tuple[object, int]:
        """What stands for the state of a generator."""
        return self._draws.setdefault(id(generator), (object(), 0))

    def read_generator(self, read: Callable[[], Tensor]) -> Tensor:
        """``torch.get_rng_state()``: the state is known at each run only."""
        where = self.generator_position(None)
        state = self.opaque("rng state", read, lambda: torch.empty(0, dtype=torch.uint8))
        self._draws[id(None)] = where
        state._shardwise_position = where  # pyright: ignore[reportAttributeAccessIssue]
        return state

    def write_generator(self, write: Callable[[Tensor], None], state: Tensor) -> None:
        """``torch.set_rng_state(state)``."""
        self.effect("set rng state", write, state, random=True)
        self._draws[id(None)] = getattr(state, "_shardwise_position", (object(), 0))

    def _begin_anew(self, generator: torch.Generator | None) -> None:
        """A generator that the step makes gives the same numbers at each run: those of the seed that it has given it."""
        if generator is None or id(generator) in self.generators:
            return
        state = generator.get_state()
        known = self.own_generators.get(id(generator))
        if known is not None and torch.equal(known[1], state):
            return
        self.own_generators[id(generator)] = generator, state
        where = self.generator_position(None)
        self.effect("seed", functools.partial(generator.set_state, state), random=True)
        self._draws[id(None)] = where

    def effect(
        self,
        name: str,
        call: Callable[..., Any],
        *args: Any,
        random: bool = False,
        writes: bool = True,
    ) -> None:
        """Note a call for what it does: it writes the tensors that it is given, or only looks at them."""
        own = tuple(self._own(a) for a in args)
        written = [a for a in args if writes and isinstance(a, Tensor)]
        node = self._note("effect", name, call, own, {}, (), None, written, draws=random)
        if not written:
            node.reads |= {OUTSIDE}
            node.writes |= {OUTSIDE}

    # ---- for passes ------------------------------------------------------------------------------

    def note_move(self, mover: Any, source: Value, next_index: int) -> tuple[Node | None, int]:
        """A move of a value, as a node, and the next free number; None if nothing moves."""
        fake = source.fake
        assert fake is not None, "only tensors move"
        nodes, _ = self._noted_after(next_index, [source], lambda: self.move(mover, fake))
        return (nodes[0] if len(nodes) == 1 else None), self._next

    def note_calls(
        self, call: Callable[..., Sequence[Tensor]], values: Sequence[Value], next_index: int
    ) -> tuple[list[Node], list[Value], int]:
        """Calls on some values: the nodes, the values that they give, the next free number."""
        nodes, outs = self._noted_after(
            next_index, values, lambda: call(*[v.fake for v in values])
        )
        return nodes, [self.value_of(o) for o in outs], self._next

    def note_together(
        self,
        send: Callable[..., Handle],
        apart: Callable[[Tensor], list[Tensor]],
        values: Sequence[Value],
        next_index: int,
        others: Sequence[Value] = (),
    ) -> tuple[list[Node], list[Value], int]:
        """One collective for several values: the nodes, what becomes of each value, the next free number.

        ``others`` are values that ``apart`` names beside what has arrived.
        """
        nodes, outs = self._noted_after(
            next_index,
            [*values, *others],
            lambda: apart(send(*[v.fake for v in values]).wait()),
        )
        return nodes, [self.value_of(o) for o in outs], self._next

    def _noted_after(
        self, next_index: int, values: Sequence[Value], call: Callable[[], Any]
    ) -> tuple[list[Node], Any]:
        for v in values:  # a pass may have put another value in the place of one
            v.fake._shardwise_value = v  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
        outer, self.nodes = self.nodes, []
        self._next = max(next_index, self._next)
        try:
            with torch.no_grad(), self.running():
                result = call()
        finally:
            nodes, self.nodes = self.nodes, outer
        return nodes, result

    # ---- in force --------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs inside."""
        with (
            torch.autograd.set_multithreading_enabled(False),
            record_with(self),
            self,
        ):
            yield

    def restore(self) -> None:
        """Put back what `afterwards` asked for."""
        while self.restores:
            self.restores.pop()()


def _lies(x: Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory."""
    return x.shape, x.stride(), x.storage_offset(), x.dtype


def starter(info: dict[str, Any]) -> Callable[..., Handle]:
    """What starts a collective on a tensor, from a node's facts."""
    transport, ranks, tag = info["transport"], info["ranks"], info.get("tag", "")
    kind = info["kind"]
    if kind == "broadcast":
        src = info["src"]
        return lambda x: Ready(transport.broadcast(x, ranks, src, tag=tag))
    if kind == "all_gather":
        return functools.partial(transport.all_gather_async, ranks=ranks, tag=tag)
    if kind == "all_to_all":
        return functools.partial(
            transport.all_to_all_async,
            ranks=ranks,
            in_splits=info["in_splits"],
            out_splits=info["out_splits"],
            tag=tag,
        )
    name = f"{kind}_owned_async" if info.get("owned") else f"{kind}_async"
    return functools.partial(getattr(transport, name), ranks=ranks, op=info["op"], tag=tag)


def _reading(read: Callable[[], Tensor]) -> Tensor:
    tape = recorder()
    return tape.read_generator(read) if isinstance(tape, Tape) else read()


def _writing(write: Callable[[Tensor], None], state: Tensor) -> None:
    tape = recorder()
    if isinstance(tape, Tape):
        tape.write_generator(write, state)
    else:
        write(state)


on_rng_state(_reading, _writing)  # activation checkpointing rewinds the generator


def _item(x: Tensor) -> Any:
    return x.item()


def _mapped(call: Callable[[Any], Any], kind: Any, tree: Any) -> Any:
    """A tree of arguments with ``call(x)`` for what is of a kind; torch's own tree functions take ten times as long."""
    if isinstance(tree, kind):
        return call(tree)
    if isinstance(tree, (tuple, list)):
        made = [_mapped(call, kind, x) for x in tree]
        return made if isinstance(tree, list) else tuple(made)
    if isinstance(tree, dict):
        return {k: _mapped(call, kind, x) for k, x in tree.items()}
    return tree


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from _tensors(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from _tensors(x)


@functools.cache
def _write_places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes."""
    found: list[Tensor] = []
    for i, name in _write_places(func):
        found += _tensors(args[i] if i < len(args) else kwargs.get(name))
    hidden = _HIDDEN_WRITES.get(func)
    if hidden is not None:
        places, flag = hidden
        if args[flag]:
            found += _tensors([args[i] for i in places])
    return found
