"""The quick way through a call: if all is as the step has last seen it, run at once.

Which step fits a call is found out with care (``step.py``, ``state.py``). Most calls find all as the call before has
left it. For these a step has one function, written for it, that compares each place with the object that was there,
runs and leaves behind what the step leaves behind. It knows only sameness. Where it meets anything else it gives
`MISS` before anything is done, and the call goes the careful way. So whatever the careful way compares is compared
here, by identity or more strictly:

```text
   arguments          tree, types, shapes, strides, dtypes, devices, requires_grad, memory that is shared
   places             the same objects in them (state.held, recording.read), as many (containers, hooks)
   tensors            spec, local, shape, stride, dtype, device, requires_grad
   modes              torch's and ours, training, which gradients are there
   hyperparameters    the values of those that are constants, how those that are inputs compare
```

A place whose object the step itself replaces (``self.hidden = h``) is looked at with care at each run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
import math
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.capture.cells import Asked, Cell, TableCell, is_value
from shardwise.capture.state import State, liftable, local_of
from shardwise.compat import alike_check, tree_flatten, tree_unflatten
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.gradients import leaf_of

if TYPE_CHECKING:
    from shardwise.capture.record import Form
    from shardwise.capture.step import CapturedStep

MISS: Any = object()
_PLAIN = (str, bytes, int)


def replayer(
    step: CapturedStep,
    state: State,
    lifted: Collection[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modes: Callable[[], Any],
    same_memory: Callable[[Sequence[Any]], bool],
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """The quick way for calls like this one, which the step fits; None if there is something that it cannot compare.

    Args:
        step: The step.
        state: What its function works on.
        lifted: Hyperparameters that are inputs.
        args: The arguments of the call.
        kwargs: Those by name.
        modes: Gives what is set outside of the state.
        same_memory: Whether tensors among arguments share memory as those of the call.

    Returns:
        A function of arguments that gives the result of the step, or `MISS`.

    Cost:
        To make it some 20 us per place; to call it about 0.1 us per place.
    """
    text = _Replay(step, state, lifted)
    text.arguments(args, kwargs)
    text.unless(f"modes() == {text.name(modes())}")
    text.unless("same_memory(leaves)")
    text.held()
    text.hyperparameters()
    text.cells()
    text.gradients()
    alike = alike_check([*text.leaf_tensors.values(), *text.tensors.values()])
    if alike is None:
        return None
    given = "".join(f"{name}, " for name in text.leaf_tensors)
    text.unless(f"alike({given}*tensors)")
    text.run()
    return text.function(
        modes=modes,
        same_memory=same_memory,
        alike=alike,
        tensors=tuple(text.tensors.values()),
    )


class _Replay:
    """The text of the function, and what it names."""

    def __init__(self, step: CapturedStep, state: State, lifted: Collection[str]) -> None:
        self.step, self.state, self.lifted = step, state, lifted
        self.recording = step.recording
        self.names: dict[str, Any] = {}
        self.checks: list[str] = []
        self.body: list[str] = []
        self.leaf_tensors: dict[str, Tensor] = {}  # by the name of a variable
        self.tensors: dict[int, Tensor] = {}  # that stay the same object
        self._known: dict[int, str] = {}
        self._tables: set[int] = set()  # optimizers' tables that are looked for
        self._fixed: set[int] = set()  # cells whose tensor stays the same object

    # ---- words ---------------------------------------------------------------------------------

    def name(self, x: Any) -> str:
        """What an object is called."""
        if x is None or x is True or x is False:
            return repr(x)
        found = self._known.get(id(x))
        if found is None:
            found = self._known[id(x)] = f"k{len(self.names)}"
            self.names[found] = x
        return found

    def unless(self, condition: str) -> None:
        """Miss if a condition does not hold."""
        self.checks.append(f"if not ({condition}): return MISS")

    def place(self, cell: Cell) -> str:
        """What is in a cell, as an expression: ``Cell.read``, but it may raise where nothing is there."""
        holder, key = cell.holder, cell.key
        if isinstance(holder, type):
            holder = vars(holder)
        if isinstance(holder, (dict, list, deque, MappingProxyType)):
            where = self.name(holder)
            what = repr(key) if type(key) in (str, int) else self.name(key)
            table = isinstance(holder, (dict, MappingProxyType))
            plain = type(holder) is not dict and isinstance(holder, dict)
            missing = table and key not in holder
            return f"{where}.get({what})" if plain or missing else f"{where}[{what}]"
        if isinstance(key, str) and key.isidentifier() and hasattr(holder, key):
            return f"{self.name(holder)}.{key}"
        return f"getattr({self.name(holder)}, {key!r}, None)"

    def same(self, place: str, x: Any) -> None:
        """Miss if a place holds something else; floats are compared, for code makes them anew."""
        if type(x) is float and x == 0:  # 0.0 and -0.0 are equal
            self.unless(f"type(x := {place}) is float and repr(x) == {repr(x)!r}")
        elif type(x) is float and math.isfinite(x):
            self.unless(f"type(x := {place}) is float and x == {x!r}")
        else:
            self.unless(f"{place} is {self.name(x)}")

    def tensor(self, name: str, x: Tensor) -> None:
        """Miss if a tensor that stays the same object is another."""
        if id(local_of(x)) in self.tensors:
            return
        if isinstance(x, DTensor):
            self.unless(f"{name}._spec is {self.name(x._spec)}")
            self.unless(f"{name}._local is {self.name(x._local)}")
        self.tensors[id(local_of(x))] = local_of(x)

    # ---- what is looked at -----------------------------------------------------------------------

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The arguments: their tree, and each leaf."""
        leaves, tree = tree_flatten((args, kwargs))
        if not kwargs and all(isinstance(x, Tensor) for x in args):
            self.checks.append("leaves = args")
            self.unless(f"not kwargs and len(args) == {len(args)}")
        else:
            self.names["tree_flatten"] = tree_flatten
            self.checks.append("leaves, tree = tree_flatten((args, kwargs))")
            self.unless(f"tree == {self.name(tree)}")
        if leaves:
            self.checks.append(f"({''.join(f'a{i}, ' for i in range(len(leaves)))}) = leaves")
        for i, x in enumerate(leaves):
            self._argument(f"a{i}", x)

    def _argument(self, name: str, x: Any) -> None:
        if type(x) is float:  # 0.0 and -0.0 are equal
            self.unless(f"type({name}) is float and repr({name}) == {repr(x)!r}")
            return
        if type(x) in _PLAIN:
            self.unless(f"type({name}) is {self.name(type(x))} and {name} == {self.name(x)}")
            return
        if not isinstance(x, Tensor):
            self.unless(f"{name} is {self.name(x)}")
            return
        local = name
        if isinstance(x, DTensor):
            local = f"{name}l"
            spec = self.name(x._spec)
            self.unless(f"type({name}) is {self.name(type(x))} and {name}._spec is {spec}")
            self.checks.append(f"{local} = {name}._local")
        else:
            self.unless(f"type({name}) is {self.name(type(x))}")
        if x.requires_grad:
            graded = x.is_leaf and x.grad is not None
            has = f"({name}.is_leaf and {name}.grad is not None)"
            self.unless(has if graded else f"not {has}")
        self.leaf_tensors[local] = local_of(x)

    def held(self) -> None:
        """What ``State.stale`` looks at, and ``training``."""
        for cell, _ in self.state.held:
            if isinstance(cell, Asked):
                how = "==" if is_value(now := cell.read()) else "is"
                self.unless(f"{self.name(cell.ask)}() {how} {self.name(now)}")
            else:
                self.same(self.place(cell), cell.read())
        for hooks, _ in self.state.hooks:
            self._hooks(self.name(hooks), hooks)
        for _, c, length in self.state.lengths:
            self.unless(f"len({self.name(c)}) == {length}")
        for m in self.state.all_modules:
            self.unless(f"{self.name(m)}.training is {self.name(m.training)}")

    def hyperparameters(self) -> None:
        """What ``State.fixed_numbers`` looks at, and the numbers that are inputs."""
        for o in self.state.optimizers.values():
            groups = self.name(o.param_groups)
            self.unless(f"{self.name(o)}.param_groups is {groups}")
            self.unless(f"len({groups}) == {len(o.param_groups)}")
            for i, group in enumerate(o.param_groups):
                where = self._group(f"{groups}[{i}]", group)
                self._list(f"{where}['params']", group["params"])
                for c in self.state.numbers():
                    if c.find() is group:
                        self._number(f"{where}[{c.key!r}]", c.key, c.read())
        if self.recording.guards:
            self.names["guarded"] = self.step.guarded
            self.unless("guarded()")

    def _group(self, place: str, group: dict[str, Any]) -> str:
        where = self.name(group)
        self.unless(f"{place} is {where} and len({where}) == {len(group)}")
        self._tables.add(id(group))
        return where

    def _list(self, place: str, x: list[Any]) -> None:
        self.names["is_"] = is_
        self.unless(f"{place} is {self.name(x)} and len({self.name(x)}) == {len(x)}")
        self.unless(f"all(map(is_, {self.name(x)}, {self.name(tuple(x))}))")

    def _number(self, place: str, key: str, x: Any) -> None:
        if key not in self.lifted or not liftable(x):
            self.same(place, x)
        elif type(x) is float:
            self.unless(f"type({place}) is float")
        else:
            self.names["liftable"] = liftable
            self.unless(f"type(x := {place}) is tuple and len(x) == {len(x)} and liftable(x)")

    def cells(self) -> None:
        """What ``CapturedStep.fits`` looks at."""
        bound = {(id(c.holder), c.key) for c, _ in self.recording.effects.bound}
        moving: list[int] = []
        for i, (cell, _) in enumerate(self.recording.read):
            x = cell.read()
            if (id(cell.holder), cell.key) in bound or not isinstance(x, Tensor):
                moving.append(i)
                continue
            place = self._table(cell) if isinstance(cell, TableCell) else self.place(cell)
            name = self.name(x)
            self.unless(f"{place} is {name}")
            self.tensor(name, x)
            self._fixed.add(id(cell))
        if moving:
            self.names["fits_at"] = self.step.fits_at
            self.unless(f"fits_at({moving!r})")

    def _table(self, cell: TableCell) -> str:
        """A place in a table of an optimizer; the optimizer must still have that table."""
        table = cell.holder
        if id(table) not in self._tables:
            self.names["is_"] = is_
            for o in self.state.optimizers.values():
                if any(t is table for t in o.state.values()):
                    tables = self.name(o.state)
                    self.unless(f"{self.name(o)}.state is {tables}")
                    self.unless(f"len({tables}) == {len(o.state)}")
                    keys, values = tuple(o.state), tuple(o.state.values())
                    self.unless(f"all(map(is_, {tables}, {self.name(keys)}))")
                    self.unless(f"all(map(is_, {tables}.values(), {self.name(values)}))")
                    self._tables.update(map(id, values))
        assert id(table) in self._tables, "a table is that of an optimizer"
        return f"{self.name(table)}[{cell.key!r}]"

    def gradients(self) -> None:
        """What ``State.grads_there`` looks at, and ``requires_grad``."""
        for p in self.state.all_parameters:
            self.tensor(self.name(p), p)
            local = local_of(p)
            where, leaf = self.name(local), leaf_of(local)
            self._hooks(f"{where}._backward_hooks", local._backward_hooks)
            after: Any = local._post_accumulate_grad_hooks
            self._hooks(f"{where}._post_accumulate_grad_hooks", after)
            self._there(f"{where}.grad", local.grad)
            if leaf is not None:
                self.unless(f"{where}._shardwise_leaf is {self.name(leaf)}")
                self._there(f"{self.name(leaf)}.grad", leaf.grad)
                self._there(f"{self.name(leaf)}.pending", leaf.pending)
                self._hooks(f"{self.name(leaf)}.hooks", leaf.hooks)
            elif isinstance(p, DTensor):
                self.unless(f"'_shardwise_leaf' not in {where}.__dict__")

    def _hooks(self, place: str, hooks: Any) -> None:
        self.unless(f"tuple({place}) == {self.name(tuple(hooks))}" if hooks else f"not {place}")

    def _there(self, place: str, x: Any) -> None:
        self.unless(f"{place} is {'not ' if x is not None else ''}None")

    # ---- what is done ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run, and leave behind what the step leaves behind."""
        step, effects = self.step, self.recording.effects
        parts: list[str] = []
        moving = False  # what the user or the step puts there anew may lie otherwise
        for _, slot in step.step.inputs:
            if slot.role == "closed-over":
                parts.append(self.name(slot.get(None)))
            elif id(slot.cell) in self._fixed:
                parts.append(self.name(local_of(slot.cell.read())))
            else:
                parts.append(f"{self.name(slot.get)}(leaves)")
                moving |= slot.role in ("grad", "state")
        self.checks.append(f"inputs = [{', '.join(parts)}]")
        if moving:
            self.names["lies"] = step.lies
            self.unless("lies(inputs)")
        self.names |= {"execute": step.execute, "wrap": wrap}
        self.body.append("outs = execute(inputs)")
        count = len(self.recording.results.places)
        if effects.of_arguments:
            self.names["leave"] = effects.apply
            self.body.append(f"leave(outs[{count}:], leaves)")
        else:
            for i, (cell, form) in enumerate(effects.bound):
                self._write(cell, self._formed(form, f"outs[{count + i}]"))
            for cell, x in effects.reset:
                self._write(cell, self.name(x))
            for cell in effects.forgotten:
                self._write(cell, "None")
        self.body.append(f"return {self._result()}")

    def _write(self, cell: Cell, x: str) -> None:
        key, holder = cell.key, cell.holder
        if isinstance(cell, TableCell) or isinstance(holder, (dict, list, deque)):
            self.body.append(f"{self.name(cell)}.write({x})")
        elif key.isidentifier():
            self.body.append(f"{self.name(holder)}.{key} = {x}")
        else:
            self.body.append(f"setattr({self.name(holder)}, {key!r}, {x})")

    def _result(self) -> str:
        results, marker = self.recording.results, object()
        if len(results.leaves) == 1 and tree_unflatten([marker], results.tree) is marker:
            if results.given:
                return f"{self.name(results.given[0][1])}(leaves)"
            if not results.places:
                return self.name(results.leaves[0])
            return self._formed(results.forms[0], "outs[0]")
        self.names["rebuild"] = results.rebuild
        return "rebuild(outs, leaves)"

    def _formed(self, form: Form, out: str) -> str:
        if form.history or form.copied:
            return f"{self.name(form.of)}({out})"
        return out if form.spec is None else f"wrap({out}, {self.name(form.spec)})"

    def function(self, **names: Any) -> Callable[..., Any]:
        """The function."""
        lines = ["def replay(args, kwargs):", "    try:"]
        lines += [f"        {line}" for line in self.checks]
        lines.append("    except (LookupError, AttributeError, ValueError): return MISS")
        lines += [f"    {line}" for line in self.body]
        space = {**self.names, **names, "MISS": MISS}
        exec(compile("\n".join(lines), "<the quick way of a captured step>", "exec"), space)
        return space["replay"]
