"""Where an error happened: the call with its typed operands, the user's line, the module.

The one place that adds context. Inner code raises the first line of a message; the slow path of a call,
and the functions that make DTensors, pass what they catch through ``located`` on its way out. Nothing here
runs while all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import functools
import inspect
import os
import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.compat import module_call_code
from shardwise.errors import MeshError, ShardError
from shardwise.events import user_site
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh

F = TypeVar("F", bound=Callable[..., Any])

_WIDTH = 60


def located(
    error: ShardError, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ShardError:
    """The error, with ``in`` (typed operands), ``at`` (user's line, module) and ``mesh``.

    Calls nest. The place is the user's innermost line; the call is the outermost one made there, since what
    is inside it is torch's or ours.
    """
    site = site_text()
    if error.where.setdefault("at", site) == site:
        error.where = {"in": call_text(func, args, kwargs), "at": site}
        if isinstance(error, MeshError):
            error.where["mesh"] = _meshes(args, kwargs)
    return error


def explained(name: str, *shown: str) -> Callable[[F], F]:
    """Decorate a function that users call: what it raises says where.

    Args:
        name: What the user wrote.
        *shown: Parameters to show, where they were given.
    """

    def decorate(fn: F) -> F:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except ShardError as error:
                given = signature.bind(*args, **kwargs).arguments
                located(
                    error, name, (), {k: given[k] for k in shown if given.get(k) is not None}
                )
                raise

        return call  # pyright: ignore[reportReturnType]

    return decorate


# ---- the call ---------------------------------------------------------------------------------


def call_text(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``torch.mm(f32[8, 6] {dp: S(0)}, f32[6, 4] {dp: R})``; names where the function has some."""
    names = _parameter_names(func, len(args))
    while args and (args[-1] is None or args[-1] is False):
        args = args[:-1]
    given = [*zip(names, args), *kwargs.items()]
    parts = [
        f"{name}: {value_text(a)}" if name else value_text(a)
        for i, (name, a) in enumerate(given)
        if i < len(args) or not (a is None or a is False)
    ]
    return f"{call_name(func)}({', '.join(parts)})"


def call_name(func: Any) -> str:
    """As a user would write it: ``torch.mm``, ``Tensor.add_``, ``F.linear``."""
    if isinstance(func, str):
        return func
    name = torch.overrides.resolve_name(func)
    if name is None:
        name = getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func))
        module = getattr(func, "__module__", None) or ""
        return f"{module}.{name}" if module.startswith("torch.") else name
    return name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")


def value_text(x: Any) -> str:
    """Typed operands by layout, plain tensors by shape, the rest shortened."""
    layout = layout_of(x)
    if layout is not None:
        return str(layout)
    if isinstance(x, Layout):
        return str(x)
    if isinstance(x, Tensor):
        dense = Layout(_NOWHERE, ((),) * x.ndim, (), tuple(x.shape), (1,) * x.ndim, x.dtype)
        return str(dense).partition(" {")[0] + " plain"
    if (
        isinstance(x, (list, tuple))
        and type(x) is not torch.Size
        and any(isinstance(y, Tensor) for y in x)
    ):
        shown = [value_text(y) for y in x[:4]] + (["..."] if len(x) > 4 else [])
        return f"[{', '.join(shown)}]"
    if isinstance(x, Mesh):
        return repr(x).partition(": ")[2].removesuffix(")")
    if callable(x) and hasattr(x, "__name__"):
        return x.__name__
    text = repr(x)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def layout_of(x: Any) -> Layout | None:
    """The layout of a DTensor, whose class is above this file; None for anything else."""
    spec = x.__dict__.get("_spec") if isinstance(x, Tensor) else None
    return None if spec is None else spec.layout


_NOWHERE = Mesh.of("none", (), (0,))


def _parameter_names(func: Any, count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say
        return [""] * count
    names = [p.name if p.kind is not p.VAR_POSITIONAL else "" for p in parameters][:count]
    return names + [""] * (count - len(names))


# ---- the place --------------------------------------------------------------------------------


def site_text() -> str:
    """``train.py:31, module "blocks.0.mlp.up"``."""
    site, module = user_site(), _module_path()
    path, colon, line = site.rpartition(":")
    if path.startswith(os.getcwd() + os.sep):
        site = os.path.relpath(path) + colon + line
    return ", ".join(filter(None, (site, module and f'module "{module}"')))


def _module_path() -> str:
    """Path of the innermost module being called, from the outermost one on the stack."""
    calls = list(_modules_on_stack())
    if not calls:
        return ""
    inner, outer = calls[0], calls[-1]
    for name, module in outer.named_modules():
        if module is inner:
            return name or type(inner).__name__
    return type(inner).__name__


def _modules_on_stack() -> Iterator[nn.Module]:
    """Modules whose ``__call__`` is on the stack, innermost first."""
    frame, code = sys._getframe(1), module_call_code
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _meshes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """One line for each mesh among the operands, if there are several."""
    found: list[Mesh] = []
    stack: list[Any] = [list(args), list(kwargs.values())]
    while stack:
        x = stack.pop(0)
        layout = layout_of(x)
        mesh = layout.mesh if layout is not None else x if isinstance(x, Mesh) else None
        if mesh is not None and mesh not in found:
            found.append(mesh)
        elif isinstance(x, (list, tuple)):
            stack = [*x, *stack]
    return "\n".join(map(repr, found)) if len(found) > 1 else ""
