"""What a function works on: its modules, optimizers and tensors, and the places that hold their tensors.

Found by looking where Python would: the closure, the defaults, the globals that its code names, the object of a
bound method, and the functions that it calls in the same way. Each place is a *cell*: it is read at every run, so
that nothing is baked in, and put back after recording, which leaves fakes behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.ir import Slot
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradients import leaf_of

DEPTH = 4  # of containers and of functions that call functions
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


def local_of(x: Any) -> Any:
    """The tensor that computation works on: the local one of a DTensor."""
    return x._local if isinstance(x, DTensor) else x


class State:
    """The modules, optimizers and loose tensors of a function.

    Attributes:
        modules: Outermost modules, by name.
        optimizers: By name.
        tensors: Tensors found elsewhere, as cells.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tensors: list[Cell] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []

    # ---- looking -----------------------------------------------------------------------------

    def look(self, name: str, x: Any, depth: int = DEPTH) -> None:
        """Find what is in ``x``."""
        if id(x) in self._seen or x is None or isinstance(x, (str, bytes, int, float, bool)):
            return
        self._seen.add(id(x))
        self._keep.append(x)
        if isinstance(x, nn.Module):
            self.modules[name] = x
        elif isinstance(x, torch.optim.Optimizer):
            self.optimizers[name] = x
        elif isinstance(x, Tensor) or depth == 0 or isinstance(x, types.ModuleType):
            return
        elif isinstance(x, functools.partial):
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
        elif not type(x).__module__.startswith(_QUIET) or type(x).__module__.startswith(
            ("torch.optim", "torch.amp")
        ):
            held = getattr(x, "__dict__", None)
            if isinstance(held, dict):
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

    def all_modules(self) -> list[nn.Module]:
        """All modules, the inner ones included, each once."""
        found: dict[int, nn.Module] = {}
        for outer in self.modules.values():
            for m in outer.modules():
                found[id(m)] = m
        return list(found.values())

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
                for table, role in (
                    (m._parameters, "state"),
                    (m._buffers, "state"),
                    (m.__dict__, "state"),
                ):
                    out += [
                        Cell(path + str(key), role, table, key)
                        for key, x in table.items()
                        if isinstance(x, Tensor)
                    ]
        params = self.parameters()
        for pid, (name, p) in params.items():
            out += _grad_cells(name, p)
            for on, optimizer in self.optimizers.items():
                held = optimizer.state.get(p)
                if isinstance(held, dict):
                    out += [
                        Cell(f"{on}.{key}[{name}]", "state", held, key)
                        for key, x in held.items()
                        if isinstance(x, Tensor)
                    ]
        for on, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                out += [
                    Cell(f"{on}.{key}[{i}]", "state", group, key)
                    for key, x in group.items()
                    if isinstance(x, Tensor)
                ]
        return out

    def numbers(self) -> list[Cell]:
        """The optimizers' hyperparameters that are Python numbers."""
        return [
            Cell(f"{on}.{key}[{i}]", "number", group, key)
            for on, optimizer in self.optimizers.items()
            for i, group in enumerate(optimizer.param_groups)
            for key, x in group.items()
            if key != "params" and isinstance(x, (int, float, tuple, bool, str, type(None)))
        ]

    def ready(self) -> bool:
        """Whether every optimizer has its state, so that a step makes no new one."""
        return all(
            len(optimizer.state) > 0
            or not any(p.requires_grad for g in optimizer.param_groups for p in g["params"])
            or not _keeps_state(optimizer)
            for optimizer in self.optimizers.values()
        )


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
    holder, key = cell.holder, cell.key
    layout = x._spec.layout if isinstance(x, DTensor) else None
    if type(holder) is dict:
        if isinstance(x, DTensor):
            return Slot(cell.name, cell.role, lambda _: holder[key]._local, layout)
        return Slot(cell.name, cell.role, lambda _: holder[key], layout)
    return Slot(cell.name, cell.role, lambda _: local_of(getattr(holder, key)), layout)
