"""The calls of a function on global tensors: run once on fakes, each call with the rule that answers for it.

A call is seen where users make it, above autograd. One that has no rule is seen again below, as the ATen calls that
it consists of; what has no rule there either is *opaque*: nothing is known of its dims. Nothing is computed, sent,
drawn or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
import inspect
from typing import Any

import torch
from torch import Tensor, nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwise.capture.annotate import Mark, mark_of, watcher
from shardwise.capture.state import State
from shardwise.compat import (
    Quiet,
    TorchDispatchMode,
    fake_mode,
    is_fake,
    tree_map_only,
    untraceable,
    without_modes,
)
from shardwise.errors import CaptureError, ShardError
from shardwise.events import user_site
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.compile import fill, flat_results, slot
from shardwise.rules.notation import Arg, Labels, Rule, numbered
from shardwise.rules.registry import Entry, lookup
from shardwise.tensor.attention import attend
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.keywords import ordered, positional

_T = torch.Tensor
_ATEN = torch.ops.aten
_BACKWARD = frozenset((_T.backward, torch.autograd.backward, torch.autograd.grad))
_HEAVY = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "bilinear",
    "scaled_dot_product_attention",
)  # fmt: skip
# Calls that take no values from their operands.
_FRESH = frozenset(
    (
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_tensor",
        "lift_fresh",
    )
)


@dataclass(slots=True)
class Value:
    """One tensor of the function, whole.

    Attributes:
        index: Its number.
        shape: Its shape.
        stride: Its stride, in elements.
        dtype: Its dtype.
        name: Of an argument, a parameter, a buffer or a result; of others, what made it and when.
        role: "input", "parameter", "buffer", "made", "result", or "constant": made from none of these, so
            every rank has it.
        site: The user's line that made it.
        given: Its layout, if it has one already.
        mark: What the user said of it.
    """

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    name: str
    role: str
    site: str = ""
    given: Layout | None = None
    mark: Mark | None = None


@dataclass(slots=True)
class Made:
    """One call.

    Attributes:
        name: Of the function.
        site: The user's line.
        ins: The values that are its tensor arguments, in order.
        outs: The values that are its results.
        entry: The rule, or None for a mark: all dims alike.
        args: Arguments with slots for tensors.
        kwargs: The same by name.
        flags: Of each tensor argument, whether it requires grad and whether it is a leaf.
        heavy: A product of matrices, a convolution or attention.
    """

    name: str
    site: str
    ins: list[int]
    outs: list[int]
    entry: Entry | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    flags: tuple[tuple[bool, bool], ...] = ()
    heavy: bool = False

    def factors(self, layouts: Sequence[Layout]) -> Factors | None:
        """What the rule says for operands of these layouts; None if it does not answer."""
        if self.entry is None:
            names = numbered("d", layouts[0].ndim)
            return Factors([names], [names], frozenset(), {})
        operands = [
            Arg(i, layout, requires_grad=grad, is_leaf=leaf, device="cpu")
            for i, (layout, (grad, leaf)) in enumerate(zip(layouts, self.flags))
        ]
        rule = ask(self.entry, self.args, self.kwargs, operands)
        if rule is None:
            return None
        ins = [rule.ins.get(a, ()) for a in operands]
        return Factors(ins, list(rule.outs), rule.whole, rule.divides, rule.scaled)


@dataclass(frozen=True, slots=True)
class Factors:
    """The part of a rule that tells where axes may go.

    Attributes:
        ins: Labels of each operand; empty: whole.
        outs: Labels of each result.
        whole: Factors that must not be sharded.
        divides: Factors that may be sharded only by a number of ranks that divides this.
        scaled: Those that may also be cut elsewhere, between whole rows of every operand and result.
    """

    ins: list[Labels]
    outs: list[Labels]
    whole: frozenset[str]
    divides: Any
    scaled: frozenset[str] = frozenset()


@dataclass(slots=True)
class Calls:
    """What a function did.

    Attributes:
        values: All tensors.
        made: All calls, in order.
        parameters: The values of tensors of modules, by the id of the tensor.
        arguments: The positional arguments and those by name, with slots for tensors.
        opaque: Names of calls of whose dims nothing is known, with their lines.
        tied: More names of these.
        held: The tensors whose ids are above.
        prefixes: What stands before the names of tensors, for each outermost module.
    """

    values: list[Value] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    parameters: dict[int, int] = field(default_factory=dict)
    arguments: tuple[Any, Any] = ((), {})
    opaque: list[tuple[str, str]] = field(default_factory=list)
    tied: dict[str, int] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)


def ask(
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Arg]
) -> Rule | None:
    """The rule's answer, or None."""
    try:
        return entry.rule(*fill(args, operands), **fill(kwargs, operands))
    except (IndexError, TypeError, ValueError, ShardError):  # a form that it does not know
        return None


def record_calls(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> Calls:
    """Run a function once on fakes of the global tensors.

    Raises:
        CaptureError: It reads values of tensors, or runs a backward.
    """
    state = State.of(fn, args, kwargs)
    cells = state.cells()
    before = [c.read() for c in cells]
    tensors = _tensors(state)  # before the run, which may put others in their places
    work = _Recorder(mesh, _known(state, tensors))
    try:
        with work.running():
            named = _named_arguments(fn, args, kwargs)
            args, kwargs = work.enter_arguments(named, args, kwargs)
            result = fn(*args, **kwargs)
            work.name_results(result)
            for prefix, of_module in tensors:
                work.enter_unused(prefix, of_module)
    except untraceable() as error:
        raise CaptureError(
            f"propagate cannot follow {getattr(fn, '__name__', type(fn).__name__)}: it reads the values of a "
            f"tensor, and there are none while layouts are inferred ({work.site}).",
            tries=["compute what the program depends on outside, and pass it in as a number"],
        ) from error
    finally:
        for c, x in zip(cells, before):
            if c.read() is not x:
                c.write(x)
    return work.calls


def _tensors(state: State) -> list[tuple[str, dict[str, tuple[str, Tensor]]]]:
    """For each outermost module what stands before the names of its tensors, and by these names role and tensor."""
    alone = len(state.modules) == 1
    found: list[tuple[str, dict[str, tuple[str, Tensor]]]] = []
    for outer, module in state.modules.items():
        prefix = "" if alone or not outer else f"{outer}."
        named: dict[str, tuple[str, Tensor]] = {}
        for name, x in module.named_parameters(remove_duplicate=False):
            named[prefix + name] = "parameter", x
        for name, x in module.named_buffers(remove_duplicate=False):
            named[prefix + name] = "buffer", x
        found.append((prefix, named))
    return found


def _known(
    state: State, tensors: list[tuple[str, dict[str, tuple[str, Tensor]]]]
) -> dict[int, tuple[str, str, Tensor]]:
    """Name and role of the tensors that the function has, by id."""
    found: dict[int, tuple[str, str, Tensor]] = {}
    for _, named in tensors:
        for name, (role, x) in named.items():
            found.setdefault(id(x), (name, role, x))
    for cell in state.tensors:
        x = cell.read()
        role = "parameter" if isinstance(x, (nn.Parameter, DTensor)) else "constant"
        found.setdefault(id(x), (cell.name, role, x))
    return found


def _named_arguments(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """Names of the tensors in the arguments, by id: the parameter's, and where in it."""
    run = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        bound = inspect.signature(run).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    found: dict[int, str] = {}

    def visit(name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            found.setdefault(id(x), name)
        elif isinstance(x, dict):
            for key, y in x.items():
                visit(f"{name}.{key}" if name else str(key), y)
        elif isinstance(x, (tuple, list)):
            for i, y in enumerate(x):
                visit(f"{name}.{i}", y)

    visit("", bound)
    return found


class _Below(TorchDispatchMode):
    """Sees the ATen calls that a call consists of."""

    def __init__(self, recorder: _Recorder, site: str) -> None:
        super().__init__()
        self.recorder, self.site = recorder, site

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "prim":
            self.recorder.note(func, args, kwargs, out, self.site)
        return out


class _Recorder(TorchFunctionMode):
    """Sees the calls."""

    def __init__(self, mesh: Mesh, known: dict[int, tuple[str, str, Tensor]]) -> None:
        super().__init__()
        self.mesh, self.known = mesh, known
        self.calls = Calls()
        self.site = ""
        self._fakes: Any = fake_mode()
        self._stand_in: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by real tensor: it, and its fake
        self._real: dict[int, Tensor] = {}  # by fake
        self._value_of: dict[int, int] = {}
        self._alive: list[Tensor] = []  # keeps each id its own
        self._counts: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the function runs. The user's own dispatch modes are off."""
        token = watcher.set(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(without_modes())
                stack.enter_context(self._fakes)
                stack.enter_context(self)
                yield
        finally:
            watcher.reset(token)

    # ---- values --------------------------------------------------------------------------------

    def value(self, x: Tensor, name: str, role: str, site: str = "") -> Value:
        """A new value for a fake."""
        made = Value(
            len(self.calls.values), tuple(x.shape), tuple(x.stride()), x.dtype, name, role, site
        )
        self.calls.values.append(made)
        self._alive.append(x)
        self._value_of[id(x)] = made.index
        return made

    def fake_of(self, x: Tensor, name: str = "", role: str = "") -> Tensor:
        """The fake that stands for a tensor; made where it is met first."""
        if is_fake(x):
            return x
        found = self._stand_in.get(id(x))
        if found is not None:
            return found[1]
        known = self.known.get(id(x), (name or "tensor", role or "constant", x))
        if role and known[1] == "constant":
            known = (name, role, x)
        device = self.mesh.device_type if x.device.type == "meta" else x.device
        with torch.no_grad():
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        if x.requires_grad:
            fake.requires_grad_()
            if not x.is_leaf:
                fake = fake * 1
        value = self.value(fake, known[0], known[1])
        if isinstance(x, DTensor):
            value.given = x._spec.layout.on(self.mesh)
        else:
            value.mark = mark_of(x)
        if known[1] in ("parameter", "buffer"):
            self.calls.parameters[id(x)] = value.index
            self.calls.held.append(x)
        self._stand_in[id(x)] = (x, fake)
        self._real[id(fake)] = x
        return fake

    def index_of(self, x: Tensor) -> int:
        """The number of a fake's value."""
        found = self._value_of.get(id(x))
        return self.value(x, "tensor", "made", self.site).index if found is None else found

    def enter_arguments(self, named: dict[int, str], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as fakes."""

        def enter(x: Tensor) -> Tensor:
            return self.fake_of(x, named.get(id(x), "argument"), "input")

        with Quiet():
            entered = tree_map_only(Tensor, enter, (args, kwargs))
        self.calls.arguments = self._slots(entered)
        return entered

    def name_results(self, result: Any) -> None:
        """Name the tensors that the function returns."""
        with Quiet():
            found = [x for x in flat_results(result) if is_fake(x)]
            if isinstance(result, dict):
                found = [x for x in result.values() if isinstance(x, Tensor) and is_fake(x)]
            for i, x in enumerate(found):
                value = self.calls.values[self.index_of(x)]
                if value.role == "made":
                    value.role = "result"
                    value.name = "result" if len(found) == 1 else f"result.{i}"

    def enter_unused(self, prefix: str, named: dict[str, tuple[str, Tensor]]) -> None:
        """Know the tensors of a module that no call has used, if any call used one: code names modules that it leaves."""
        known = self.calls.parameters
        if prefix and not any(id(x) in known for _, x in named.values()):
            return
        self.calls.prefixes.append(prefix)
        with Quiet():
            for name, (_, x) in named.items():
                self.fake_of(x)
                if self.calls.values[known[id(x)]].name != name:
                    self.calls.tied[name] = known[id(x)]

    def _slots(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: slot(self.index_of(x)), tree)

    # ---- calls ---------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a call on fakes and note it."""
        self.site = site = user_site()
        if func in _BACKWARD:
            raise CaptureError(
                f"propagate looks at the forward, and the function runs a backward ({site}).",
                tries=["propagate the model, or the function that computes the loss"],
            )
        args, kwargs = tree_map_only(Tensor, self.fake_of, (args, kwargs or {}))
        if func is F.multi_head_attention_forward:
            with self:
                found = attend(args, kwargs)
            if found is not None:
                return found
        if not args:
            args, kwargs = positional(func, kwargs)
        entry = lookup(func) or _ALIKE.get(func)
        if len(kwargs) > 1:
            kwargs = ordered(func, entry and entry.rule, kwargs)
        if entry is not None and self._answers(entry, args, kwargs):
            result = func(*args, **kwargs)
            self.note(func, args, kwargs, result, site, answered=True)
        else:
            with _Below(self, site):
                result = func(*args, **kwargs)
            self._adopt(func, result, site)
        return self._real.get(id(result), result) if isinstance(result, Tensor) else result

    def _answers(self, entry: Entry, args: Any, kwargs: Any) -> bool:
        """Whether a rule answers for a call."""
        tensors, tree, named = _taken(args, kwargs)
        if not tensors:
            return False
        whole = [Layout.of(self.mesh, None, x.shape, x.stride(), x.dtype) for x in tensors]
        operands = [
            Arg(i, layout, requires_grad=x.requires_grad, is_leaf=x.is_leaf, device="cpu")
            for i, (layout, x) in enumerate(zip(whole, tensors))
        ]
        return ask(entry, tree, named, operands) is not None

    def note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        site: str,
        *,
        answered: bool = False,
    ) -> None:
        """Note a call and its results; ``answered``: its rule is known to answer."""
        results = flat_results(result)
        if not results:
            return
        name = getattr(func, "__name__", str(func))
        if func in _GETTERS:
            name = _GETTERS[func]
        name = name.partition(".")[0]
        tensors, tree, named = _taken(args, kwargs)
        ins = [self.index_of(x) for x in tensors]
        values = self.calls.values
        constant = name in _FRESH or all(values[i].role == "constant" for i in ins)
        outs = []
        for x in results:
            known = self._value_of.get(id(x))
            if known is None:
                self._counts[name] = count = self._counts.get(name, 0) + 1
                role = "constant" if constant else "made"
                known = self.value(x, f"{name}.{count}", role, site).index
            outs.append(known)
        if constant:
            return
        entry = lookup(func) or _ALIKE.get(func)
        if entry is None or not (answered or self._answers(entry, args, kwargs)):
            entry = _LIKE if _draws(func, values, ins, outs) else None
        if entry is None:
            self.calls.opaque.append((name, site))
            return
        flags = tuple((x.requires_grad, x.is_leaf) for x in tensors)
        heavy = name in _HEAVY or "conv" in name
        self.calls.made.append(Made(name, site, ins, outs, entry, tree, named, flags, heavy))

    def _adopt(self, func: Any, result: Any, site: str) -> None:
        """Results that no ATen call has shown."""
        for x in flat_results(result):
            if id(x) not in self._value_of:
                name = getattr(func, "__name__", str(func))
                self.value(x, name, "made", site)
                self.calls.opaque.append((name, site))

    def marked(self, x: Tensor, mark: Mark) -> Tensor:
        """Note a mark: a call that changes nothing, with a result that is where the mark says."""
        with Quiet():
            x = self.fake_of(x)
            mark.on(self.mesh, tuple(x.shape))  # what is wrong raises here
            out = x.view_as(x)
        source = self.index_of(x)
        role = self.calls.values[source].role
        self._counts["mark"] = count = self._counts.get("mark", 0) + 1
        made = self.value(
            out, f"mark.{count}", role if role == "constant" else "made", mark.site
        )
        made.mark = mark
        self.calls.made.append(Made("mark_sharding", mark.site, [source], [made.index]))
        return out


def _taken(args: Any, kwargs: Any) -> tuple[list[Tensor], Any, Any]:
    """The tensors of a call in order, and its arguments with slots for them."""
    tensors: list[Tensor] = []

    def take(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            return slot(len(tensors) - 1)
        kind = type(x)
        if kind in (tuple, list):
            return kind([take(y) for y in x])
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return kind(*[take(y) for y in x])
        if kind is dict:
            return {k: take(x[k]) for k in x}
        return x

    tree = take(tuple(args))
    return tensors, tree, {k: take(v) for k, v in kwargs.items()}


# Attributes that are calls: their name is that of the slot.
_GETTERS = {
    getattr(_T, name).__get__: name for name in ("T", "mT", "H", "mH", "real", "imag", "data")
}


def _like(x: Arg, *_: Any, **__: Any) -> Rule:
    names = numbered("d", x.ndim)
    return Rule({x: names}, (names,))


# Calls without a rule, which DTensors answer themselves: the result is like the first operand, dim by dim.
_LIKE = Entry(_like)
_ALIKE: dict[Any, Entry] = dict.fromkeys(
    (
        *(
            F.dropout,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            torch.dropout,
            torch.alpha_dropout,
        ),
        *(F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu, torch.bernoulli, _T.bernoulli),
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
    ),
    _LIKE,
)


def _draws(func: Any, values: list[Value], ins: list[int], outs: list[int]) -> bool:
    """Whether an ATen call draws a random tensor like its operand."""
    tags = getattr(func, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags or not ins:
        return False
    return all(values[i].shape == values[ins[0]].shape for i in (*ins, *outs))
