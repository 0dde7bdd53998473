"""What a function works on: its modules, optimizers and tensors, and the places that hold their tensors.

Found by looking where Python would: the closure, the defaults, the globals that its code names, the object of a
bound method, and the functions that it calls in the same way. Each place is a *cell*: it is read at every run, so
that nothing is baked in, and put back after recording, which leaves fakes behind.
"""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
import functools
import gc
import sys
import types
from typing import Any
import weakref

import torch
from torch import Tensor, nn

from shardwise.capture.cells import (
    CLOCKS,
    MANY,
    Asked,
    Cell,
    TableCell,
    content_of,
    environment,
    environment_named,
    exact,
    is_numpy,
    is_plain,
    is_same,
    is_value,
    numbers_in,
    random_state,
    settings_named,
)
from shardwise.capture.ir import Slot
from shardwise.capture.names import (
    forward_names,
    functions_of,
    globals_in,
    is_frozen,
    is_quiet,
    members_named,
    names_in,
    strings_in,
)
from shardwise.compat import global_hooks, tree_flatten
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradients import leaf_of

_NUMBERS = (int, float, tuple, bool, str, type(None))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = frozenset(nn.Module().__dict__)
FEW = 8  # numbers in a list of more are data
SOME = 64  # of more, all count as one place
DEPTH = 8  # of containers and objects in each other
MOST = 20_000  # objects that are looked into
_OPEN = ("torch.optim", "torch.amp", "collections")


def local_of(x: Any) -> Any:
    """The tensor that computation works on: the local one of a DTensor."""
    return x._local if isinstance(x, DTensor) else x


class State:
    """The modules, optimizers and loose tensors of a function.

    Attributes:
        modules: Outermost modules, by name.
        optimizers: By name.
        tensors: Tensors found elsewhere, as cells.
        all_modules: All modules, the inner ones included, each once.
        all_parameters: All parameters, each once.
        held: Where what is no tensor was found, and what was there: an object, a number, text.
        loose: Those numbers and texts among them that no code names: it may ask for them by a name that it computes.
        containers: Lists, dicts and tables of attributes that were looked into, with names.
        generators: Random generators of torch.
        randoms: Those of Python and numpy.
        arrays: Arrays of numpy's, lists and dicts that are too large to be compared, with names.
        clocks: Places that hold a function of ``time``, and which.
        iterators: With names.
        hooks: Tables of hooks, and the keys in them.
        lengths: Containers and tables of modules, with names, and how much is in them.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tensors: list[Cell] = []
        self.all_modules: list[nn.Module] = []
        self.all_parameters: list[Tensor] = []
        self.held: list[tuple[Cell, Any]] = []
        self.loose: list[tuple[Cell, Any]] = []
        self.containers: list[tuple[str, Any]] = []
        self.generators: list[torch.Generator] = []
        self.randoms: list[Any] = []
        self.arrays: list[tuple[str, Any]] = []
        self.clocks: list[tuple[Cell, Any]] = []
        self.iterators: list[tuple[str, Iterator[Any]]] = []
        self.unnamed: list[tuple[Cell, Any]] = []  # loose places that do not count
        self._attributes: list[tuple[Cell, Any]] = []
        self._codes: set[str] = set()
        self._texts: set[str] = set()  # those of them that are text
        self._kinds: dict[Any, None] = {}  # classes and libraries whose members code may name
        self._followed: set[tuple[int, str]] = set()
        self._largest = MANY
        self._tables: dict[int, Any] = {}  # classes and libraries that may get more members
        self.lists: list[Asked] = []  # what counts as a whole, unless it was seen not to
        self.hooks: list[tuple[Any, tuple[Any, ...]]] = []
        self.lengths: list[tuple[str, Any, int]] = []
        self._signature: tuple[Any, ...] | None = None
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used twice

    @classmethod
    def of(
        cls,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ignored: Collection[tuple[int, Any]] = (),
        *,
        arrays: bool = False,
    ) -> State:
        """What a function works on, called with these arguments.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Those by name.
            ignored: Loose places that do not count.
            arrays: Whether the numbers in large arrays and lists count, too.
        """
        state = cls()
        state._largest = sys.maxsize if arrays else MANY
        state.look("", fn)
        for i, x in enumerate(tree_flatten((args, kwargs))[0]):
            state.look(f"argument {i}", x)
        inner = {id(m): m for outer in state.modules.values() for m in outer.modules()}
        state.all_modules = list(inner.values())
        for m in state.all_modules:
            state._look_at_module(m)
        state._follow()
        state._ask()
        state.hooks += [(table, tuple(table)) for table in global_hooks()]
        for optimizer in state.optimizers.values():
            own = vars(optimizer)
            state.held.append((Cell("step", "method", own, "step"), own.get("step")))
            tables = [own.get(key) for key in _STEP_HOOKS]
            state.hooks += [(t, tuple(t)) for t in tables if t is not None]
        state.lengths += [(name, c, len(c)) for name, c in state.containers]
        for cell, x in state._attributes:
            if cell.key in state._codes:
                state.held.append((cell, x))
            elif (id(cell.holder), cell.key) in ignored or _is_data(cell.holder):
                state.unnamed.append((cell, x))
            else:
                state.loose.append((cell, x))
        for asked in state.lists:
            listed = state.unnamed if (id(asked.holder), asked.key) in ignored else state.loose
            listed.append((asked, asked.read()))
        state.held += state.loose
        state.all_parameters = [p for _, p in state.parameters().values()]
        return state

    # ---- looking -----------------------------------------------------------------------------

    def look(self, name: str, x: Any, depth: int = DEPTH) -> None:
        """Find what is in ``x``."""
        plain = x is None or isinstance(x, (str, bytes, int, float, bool, Tensor))
        if plain or id(x) in self._seen or len(self._kept) > MOST:
            return
        if isinstance(x, (type, types.ModuleType)):
            if not is_frozen(x.__module__ if isinstance(x, type) else x.__name__):
                self._kinds[x] = None
                if type(x) is not type:  # attributes of a class may be its metaclass's
                    self.look(name, type(x))
            return
        self._seen.add(id(x))
        self._kept.append(x)
        if isinstance(x, nn.Module):
            self.modules[name] = x
        elif isinstance(x, torch.optim.Optimizer):
            self.optimizers[name] = x
        elif isinstance(x, torch.Generator):
            self.generators.append(x)
        elif depth > 0:
            self._look_inside(name, x, depth)

    def _look_inside(self, name: str, x: Any, depth: int) -> None:
        if isinstance(x, functools.partial):
            self.look(name, x.func, depth)
            self._items(name, list(x.args), depth)
            self.look(f"{name}.keywords", x.keywords, depth)
        elif isinstance(x, types.MethodType):
            self.look(name, x.__self__, depth)
            self.look(name, x.__func__, depth)
        elif isinstance(x, types.FunctionType):
            self._look_into(x, DEPTH)
        elif isinstance(x, (dict, list, deque)):
            self.containers.append((name, x))
            self._items(name, x, depth)
            if SOME < len(x) <= self._largest:
                self.lists.append(numbers_in(name, x))
            elif len(x) > SOME:
                self.arrays.append((name, x))
        elif isinstance(x, (tuple, set, frozenset)):
            if isinstance(x, set) and len(x) <= MANY:
                self.hooks.append((x, tuple(x)))  # what is in it counts, not where
            self._items(name, list(x), depth)
        elif not self._look_for_content(name, x, depth):
            self._look_at_object(name, x, depth)

    def _look_for_content(self, name: str, x: Any, depth: int) -> bool:
        """Whether an object counts by what it holds, not by its attributes: it is noted then."""
        if isinstance(x, (types.MappingProxyType, weakref.ref)):
            for inner in [x()] if isinstance(x, weakref.ref) else gc.get_referents(x):
                self.look(name, inner, depth)
        elif random_state(x) is not None:
            self.randoms.append(x)
        elif (content := content_of(name, x, self._largest)) is not None:
            self.held.append((content, now := content.read()))
            self.look(name, now, depth - 1)
        elif is_numpy(x):
            self.arrays.append((name, x))
        else:
            return False
        return True

    def _look_at_object(self, name: str, x: Any, depth: int) -> None:
        if isinstance(x, Iterator):
            self.iterators.append((name, x))
        if isinstance(x, functools._lru_cache_wrapper):
            self.look(name, x.__wrapped__)
        home, held = type(x).__module__, getattr(x, "__dict__", None)
        strange = not is_quiet(home)
        for key in _slots_of(type(x)) if strange else ():
            if hasattr(x, key):
                cell = Cell(f"{name}.{key}", "state", x, key)
                self._place(cell, getattr(x, key), depth - 1, attribute=True)
        self.look(home, type(x))
        if isinstance(held, dict) and (strange or home.startswith(_OPEN)):
            if strange:
                self.containers.append((name, held))
            self._items(name, held, depth, numbers=strange)

    def _follow(self) -> None:
        """Look at what code names of the classes and libraries that it meets, until there is nothing new."""
        found = True
        while found:
            found = False
            for kind in list(self._kinds):
                self._watch_tables(kind)
                for place, name, x in list(members_named(kind, self._codes)):
                    if (id(place), name) in self._followed:
                        continue
                    self._followed.add((id(place), name))
                    found = True
                    where = f"{place.__name__}.{name}"
                    methods = list(functions_of(x)) if isinstance(place, type) else ()
                    for method in methods:
                        self.look(where, method)
                    cell = Cell(where, "state", place, name)
                    if methods:
                        self.held.append((cell, x))
                    elif not (isinstance(place, type) and hasattr(x, "__get__")):
                        self._place(cell, x, 2, attribute=True)

    def _watch_tables(self, kind: Any) -> None:
        """A class or library may get a member that code names: one that hides another, or that it asks for."""
        for place in kind.__mro__ if isinstance(kind, type) else (kind,):
            home = place.__module__ if isinstance(place, type) else place.__name__
            if id(place) not in self._tables and not is_frozen(home):
                self._tables[id(place)] = place
                self.lengths.append((place.__name__, vars(place), len(vars(place))))

    def _ask(self) -> None:
        """What code asks the language and torch for."""
        for cell in (
            *settings_named(self._codes),
            *environment_named(self._codes, self._texts),
        ):
            self.held.append((cell, cell.read()))
        everything = environment(self._codes)
        if everything is not None:
            self.lists.append(everything)

    def _items(self, name: str, held: Any, depth: int, *, numbers: bool = True) -> None:
        if len(held) > MANY:  # data, not settings
            return
        pairs = dict.items(held) if isinstance(held, dict) else enumerate(held)
        for key, y in list(pairs):
            few = isinstance(held, dict) or len(held) <= FEW
            cell = Cell(f"{name}.{key}", "state", held, key)
            if (few and numbers) or not is_plain(y):
                self._place(cell, y, depth - 1, attribute=isinstance(held, dict))
            elif numbers:
                self._attributes.append((cell, y))

    def _place(self, cell: Cell, x: Any, depth: int, *, attribute: bool = False) -> None:
        """What is at a place: a tensor is an input, anything else is to stay there."""
        if isinstance(x, (type, types.ModuleType)):
            self.look(cell.name, x)
        elif isinstance(x, types.BuiltinFunctionType):
            if x in CLOCKS:
                self.clocks.append((cell, x))
        elif isinstance(x, Tensor):
            self.tensors.append(cell)
        elif is_plain(x) and attribute:
            self._attributes.append((cell, x))
        else:
            self.held.append((cell, x))
            self.look(cell.name, x, depth)

    def _look_into(self, function: Any, depth: int) -> None:
        if is_quiet(function.__module__):
            return
        code = function.__code__
        names = list(names_in(code))
        self._texts.update(strings_in(code))
        self._codes.update(names, self._texts)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._place(Cell(name, "state", cell, "cell_contents"), held, depth - 1)
        if function.__defaults__:
            cell = Cell(f"defaults of {function.__name__}", "state", function, "__defaults__")
            self.held.append((cell, function.__defaults__))
        for default in (
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        ):
            self.look(function.__name__, default, depth - 1)
        if is_frozen(function.__module__):
            return
        around = function.__globals__
        for name in names:
            if name in around:
                self._place(Cell(name, "state", around, name), around[name], depth - 1)
        for name in globals_in(code):
            if name not in around and not hasattr(builtins, name):  # it may come
                self.held.append((Cell(name, "state", around, name), None))

    def _look_at_module(self, m: nn.Module) -> None:
        """What a module holds beside parameters, buffers and modules."""
        for key, child in m._modules.items():
            self.held.append((Cell(str(key), "module", m._modules, key), child))
        for tensors in (m._parameters, m._buffers):  # one may come where there is none
            self.held += [
                (Cell(str(key), "module", tensors, key), None)
                for key, x in tensors.items()
                if x is None
            ]
        own = (m._modules, m._parameters, m._buffers)
        name = type(m).__name__
        self.lengths += [(f"the tables of {name}", inner, len(inner)) for inner in own]
        table, known = m.__dict__, forward_names(type(m))
        self.held.append((Cell("forward", "method", table, "forward"), table.get("forward")))
        self.hooks += [(table[key], tuple(table[key])) for key in _HOOKS if key in table]
        quiet = is_quiet(type(m).__module__)
        if not quiet:
            self._codes.update(known)
            self.look(name, type(m))
        self.containers.append((name, table))
        for key, y in list(table.items()):
            if key in _OWN or isinstance(y, Tensor) or (quiet and key.startswith("_")):
                continue
            cell = Cell(f"{name}.{key}", "state", table, key)
            if quiet and key in known and is_value(y):  # a setting of torch's module
                self.held.append((cell, y))
            else:
                self._place(cell, y, 2, attribute=True)

    # ---- what there is -------------------------------------------------------------------------

    def parameters(self) -> dict[int, tuple[str, Tensor]]:
        """All parameters of modules and optimizers with a name, by id."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, outer in self.modules.items():
            for inner, p in outer.named_parameters(remove_duplicate=False):
                found.setdefault(id(p), (f"{name}.{inner}", p))
        for name, optimizer in self.optimizers.items():
            for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
                found.setdefault(id(p), (f"{name}.{i}", p))
        for c in self.tensors:
            x = c.read()
            if isinstance(x, Tensor) and x.requires_grad and x.is_leaf:
                found.setdefault(id(x), (c.name, x))
        return found

    def cells(self) -> list[Cell]:
        """All places that hold tensors of the state now."""
        out: list[Cell] = list(self.tensors)
        for name, outer in self.modules.items():
            for inner, m in outer.named_modules():
                path = f"{name}.{inner}." if inner else f"{name}."
                for table in (m._parameters, m._buffers, m.__dict__):
                    out += [
                        Cell(path + str(key), "state", table, key)
                        for key, x in table.items()
                        if isinstance(x, Tensor)
                    ]
        for name, p in self.parameters().values():
            out += _grad_cells(name, p)
            for on, optimizer in self.optimizers.items():
                held = optimizer.state.get(p)
                if isinstance(held, dict):
                    out += [
                        TableCell(f"{on}.{key}[{name}]", "state", _state(optimizer, p), key)
                        for key, x in held.items()
                        if isinstance(x, Tensor)
                    ]
        for on, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                out += [
                    TableCell(f"{on}.{key}[{i}]", "state", _group(optimizer, i), key)
                    for key, x in group.items()
                    if isinstance(x, Tensor)
                ]
        return out

    def modes(self) -> list[Cell]:
        """``training`` of modules and ``requires_grad`` of parameters: what a step sets is set after each run."""
        found = [Cell("training", "mode", m.__dict__, "training") for m in self.all_modules]
        return found + [
            Cell("requires_grad", "mode", p, "requires_grad")
            for p in self.all_parameters
            if p.is_leaf
        ]

    def numbers(self) -> list[TableCell]:
        """The optimizers' hyperparameters that are Python numbers."""
        return [
            TableCell(f"{on}.{key}[{i}]", "number", _group(optimizer, i), key)
            for on, optimizer in self.optimizers.items()
            for i, group in enumerate(optimizer.param_groups)
            for key, x in group.items()
            if key != "params" and isinstance(x, _NUMBERS)
        ]

    def fixed_numbers(self, lifted: Collection[str]) -> tuple[Any, ...]:
        """The values of those that are part of a captured step, and the types of the others; whom they are for."""
        return tuple(
            [
                tuple(map(id, group["params"]))
                for optimizer in self.optimizers.values()
                for group in optimizer.param_groups
            ]
            + [
                (key, float) if key in lifted and liftable(x) else (key, exact(x))
                for optimizer in self.optimizers.values()
                for group in optimizer.param_groups
                for key, x in group.items()
                if key != "params" and isinstance(x, _NUMBERS)
            ]
        )

    def moved_loose(self) -> list[Cell]:
        """The loose places that hold something else than when they were looked at."""
        return [c for c, x in self.loose if not is_same(c.read(), x)]

    def signature(self) -> tuple[Any, ...]:
        """What was found, as part of a key."""
        if self._signature is None:
            found: list[Any] = [len(self.tensors)]
            found += [exact(x) if is_value(x) else id(x) for _, x in self.held]
            found += [
                tuple([k for k in c if k in self._codes])
                for _, c in self.containers
                if isinstance(c, dict) and len(c) <= MANY
            ]
            found += [keys for _, keys in self.hooks]
            found += [tuple(x) for m in self.all_modules for x in (m._parameters, m._buffers)]
            self._signature = tuple(found)
        return self._signature

    def grads_there(self) -> tuple[Any, ...]:
        """Which parameters have a gradient (a step adds to it, or makes one), and which hooks they have."""
        out: list[Any] = []
        for p in self.all_parameters:
            local = p._local if type(p) is DTensor else p
            leaf = leaf_of(local)
            before, after = local._backward_hooks, local._post_accumulate_grad_hooks
            out.append(local.grad is None)
            if before:
                out.append(tuple(before))
            if after:
                out.append(tuple(after))
            if leaf is not None:
                out += (leaf.grad is None, leaf.pending is None, tuple(leaf.hooks))
        return tuple(out)

    def stale(self) -> Cell | None:
        """A place that holds something else than when it was looked at."""
        for cell, x in self.held:
            now = cell.read()
            if now is not x and not is_same(now, x):
                return cell
        for hooks, keys in self.hooks:
            if len(hooks) != len(keys) or (keys and tuple(hooks) != keys):
                return Cell("hooks", "hooks", hooks, None)
        for name, c, length in self.lengths:
            if len(c) != length:
                return Cell(name, "state", c, None)
        return None


def liftable(x: Any) -> bool:
    """Whether a hyperparameter can be an input of the graph: a float, or several."""
    if type(x) is tuple:
        return all(isinstance(y, float) for y in x)
    return isinstance(x, float)


def _state(optimizer: torch.optim.Optimizer, p: Tensor) -> Callable[[], Any]:
    return lambda: optimizer.state[p]


def _group(optimizer: torch.optim.Optimizer, i: int) -> Callable[[], Any]:
    return lambda: optimizer.param_groups[i]


def _grad_cells(name: str, p: Tensor) -> list[Cell]:
    """Where the gradient of a parameter is, and where a wrapper of it is kept."""
    local = local_of(p)
    out = [Cell(f"{name}.grad", "grad", local, "grad")]
    leaf = leaf_of(local)
    if leaf is not None:
        out.append(Cell(f"{name}.grad", "grad", leaf, "grad"))
        out.append(Cell(f"{name}.grad (pending)", "grad", leaf, "pending"))
    return out


def shown_cells(parameters: Iterable[Tensor]) -> Iterator[Cell]:
    """Where wrappers of gradients are remembered: to be forgotten when the gradient is another."""
    for p in parameters:
        if isinstance(p, DTensor):
            yield Cell("", "shown", p, "_shown_grad")
            leaf = leaf_of(p._local)
            if leaf is not None:
                yield Cell("", "shown", leaf, "shown")


def _slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for k in kind.__mro__:
        slots = k.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [s for s in found if s not in ("__dict__", "__weakref__")]


def _is_data(holder: Any) -> bool:
    return isinstance(holder, (dict, list, deque)) and len(holder) > SOME


def slot_of(cell: Cell) -> Slot:
    """The slot that reads a cell at each run."""
    x = cell.read()
    layout = x._spec.layout if isinstance(x, DTensor) else None
    if isinstance(cell, TableCell):
        find, key = cell.find, cell.key
        if isinstance(x, DTensor):
            return Slot(cell.name, cell.role, lambda _: find()[key]._local, layout, cell)
        return Slot(cell.name, cell.role, lambda _: find()[key], layout, cell)
    holder, key = cell.holder, cell.key
    if isinstance(holder, (dict, list, deque)):
        if isinstance(x, DTensor):
            return Slot(cell.name, cell.role, lambda _: holder[key]._local, layout, cell)
        return Slot(cell.name, cell.role, lambda _: holder[key], layout, cell)
    return Slot(cell.name, cell.role, lambda _: local_of(getattr(holder, key)), layout, cell)
