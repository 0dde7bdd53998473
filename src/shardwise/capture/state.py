"""What a function works on: its modules, optimizers and tensors, and the places that hold their tensors.

Found by looking where Python would: the closure, the defaults, the globals that its code names, the object of a
bound method, and the functions that it calls in the same way. Each place is a *cell*: it is read at every run, so
that nothing is baked in, and put back after recording, which leaves fakes behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.ir import Slot
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradients import leaf_of

_NUMBERS = (int, float, tuple, bool, str, type(None))
DEPTH = 4  # of containers and of functions that call functions
_OPEN = ("torch.optim", "torch.amp")
_QUIET = ("torch", "shardwise", "builtins", "typing", "collections", "functools", "math")


class Cell:
    """A place that holds a tensor, or nothing.

    Attributes:
        name: For the text.
        role: See ``Slot``.
        holder: A dict, or an object with attributes.
        key: Where in it.
    """

    __slots__ = ("holder", "key", "name", "role")

    def __init__(self, name: str, role: str, holder: Any, key: Any) -> None:
        self.name, self.role, self.holder, self.key = name, role, holder, key

    def read(self) -> Any:
        """What is there now."""
        if type(self.holder) is dict:
            return self.holder.get(self.key)
        return getattr(self.holder, self.key)

    def write(self, x: Any) -> None:
        """Put something there."""
        if type(self.holder) is dict:
            self.holder[self.key] = x
        else:
            setattr(self.holder, self.key, x)


class TableCell(Cell):
    """A place in an optimizer's tables, which ``load_state_dict`` replaces: they are asked for at each access.

    Attributes:
        find: Gives the dict.
    """

    __slots__ = ("find",)

    def __init__(self, name: str, role: str, find: Callable[[], Any], key: Any) -> None:
        self.name, self.role, self.find, self.key = name, role, find, key

    @property
    def holder(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dict, now."""
        return self.find()


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
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tensors: list[Cell] = []
        self.all_modules: list[nn.Module] = []
        self.all_parameters: list[Tensor] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used twice

    @classmethod
    def of(cls, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """What a function works on, called with these arguments."""
        state = cls()
        state.look("", fn)
        state.look("argument", [args, kwargs])
        inner = {id(m): m for outer in state.modules.values() for m in outer.modules()}
        state.all_modules = list(inner.values())
        state.all_parameters = [p for _, p in state.parameters().values()]
        return state

    # ---- looking -----------------------------------------------------------------------------

    def look(self, name: str, x: Any, depth: int = DEPTH) -> None:
        """Find what is in ``x``."""
        plain = x is None or isinstance(x, (str, bytes, int, float, bool, Tensor))
        if plain or id(x) in self._seen or isinstance(x, (type, types.ModuleType)):
            return
        self._seen.add(id(x))
        self._kept.append(x)
        if isinstance(x, nn.Module):
            self.modules[name] = x
        elif isinstance(x, torch.optim.Optimizer):
            self.optimizers[name] = x
        elif depth > 0:
            self._look_inside(name, x, depth)

    def _look_inside(self, name: str, x: Any, depth: int) -> None:
        if isinstance(x, functools.partial):
            self.look(name, x.func, depth)
            self.look(name, [x.args, x.keywords], depth - 1)
        elif isinstance(x, types.MethodType):
            self.look(name, x.__self__, depth)
            self.look(name, x.__func__, depth)
        elif isinstance(x, types.FunctionType):
            self._look_into(x, depth)
        elif isinstance(x, dict):
            self._items(name, x, depth)
        elif isinstance(x, (list, tuple, set)):
            for i, y in enumerate(x):
                self.look(f"{name}.{i}", y, depth - 1)
        else:
            home, held = type(x).__module__, getattr(x, "__dict__", None)
            strange = home.split(".")[0] not in _QUIET
            if isinstance(held, dict) and (strange or home.startswith(_OPEN)):
                self._items(name, held, depth)

    def _items(self, name: str, held: dict[Any, Any], depth: int) -> None:
        for key, y in list(held.items()):
            if isinstance(y, Tensor):
                self.tensors.append(Cell(f"{name}.{key}", "state", held, key))
            else:
                self.look(f"{name}.{key}", y, depth - 1)

    def _look_into(self, function: Any, depth: int) -> None:
        if (function.__module__ or "").split(".")[0] in _QUIET:
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if isinstance(held, Tensor):
                self.tensors.append(Cell(name, "state", cell, "cell_contents"))
            else:
                self.look(name, held, depth - 1)
        for default in (
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        ):
            self.look(function.__name__, default, depth - 1)
        for name in _names(code):
            held = function.__globals__.get(name)
            if isinstance(held, Tensor):
                self.tensors.append(Cell(name, "state", function.__globals__, name))
            elif held is not None:
                self.look(name, held, depth - 1)

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

    def numbers(self) -> list[TableCell]:
        """The optimizers' hyperparameters that are Python numbers."""
        return [
            TableCell(f"{on}.{key}[{i}]", "number", _group(optimizer, i), key)
            for on, optimizer in self.optimizers.items()
            for i, group in enumerate(optimizer.param_groups)
            for key, x in group.items()
            if key != "params" and isinstance(x, _NUMBERS)
        ]

    def fixed_numbers(self, lifted: Sequence[str]) -> tuple[Any, ...]:
        """The values of those that are part of a captured step."""
        return tuple(
            [
                (key, x)
                for optimizer in self.optimizers.values()
                for group in optimizer.param_groups
                for key, x in group.items()
                if key != "params" and key not in lifted and isinstance(x, _NUMBERS)
            ]
        )

    def ready(self) -> bool:
        """Whether every optimizer has its state, so that a step makes no new one."""
        return all(
            len(optimizer.state) > 0
            or not any(p.requires_grad for g in optimizer.param_groups for p in g["params"])
            or not _keeps_state(optimizer)
            for optimizer in self.optimizers.values()
        )


def _state(optimizer: torch.optim.Optimizer, p: Tensor) -> Callable[[], Any]:
    return lambda: optimizer.state[p]


def _group(optimizer: torch.optim.Optimizer, i: int) -> Callable[[], Any]:
    return lambda: optimizer.param_groups[i]


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    return not (
        isinstance(optimizer, torch.optim.SGD)
        and not any(g.get("momentum") for g in optimizer.param_groups)
    )


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


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def slot_of(cell: Cell) -> Slot:
    """The slot that reads a cell at each run."""
    x = cell.read()
    layout = x._spec.layout if isinstance(x, DTensor) else None
    if isinstance(cell, TableCell):
        find, key = cell.find, cell.key
        if isinstance(x, DTensor):
            return Slot(cell.name, cell.role, lambda _: find()[key]._local, layout)
        return Slot(cell.name, cell.role, lambda _: find()[key], layout)
    holder, key = cell.holder, cell.key
    if type(holder) is dict:
        if isinstance(x, DTensor):
            return Slot(cell.name, cell.role, lambda _: holder[key]._local, layout)
        return Slot(cell.name, cell.role, lambda _: holder[key], layout)
    return Slot(cell.name, cell.role, lambda _: local_of(getattr(holder, key)), layout)
