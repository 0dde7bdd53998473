"""What code can reach by name: the globals, attributes, keys and methods that a function mentions.

A step is recorded once, so what it reads in Python must be looked at again before each run. Which places these are
is read off the code: it names them. Methods count as soon as code that is reached names them.
"""

from __future__ import annotations

from collections.abc import Iterator
import dis
import functools
from pathlib import PurePath
import sys
import types
from typing import Any

QUIET = ("torch", "shardwise", "builtins", "typing", "collections", "functools", "math")
_FROZEN = frozenset(
    (*QUIET, "numpy", *sys.stdlib_module_names)
)  # nobody changes what is in there
_INSTALLED = ("site-packages", "dist-packages")
_IMPLIED = (  # what is called without being named
    "__call__",
    "__getitem__",
    "__iter__",
    "__next__",
    "__len__",
    "__bool__",
    "__contains__",
    "__enter__",
    "__exit__",
    "__getattr__",
)


def is_quiet(home: str | None) -> bool:
    """Whether a module of this name is torch's, ours or of the language: what lies there is no setting."""
    return (home or "").split(".")[0] in QUIET


def is_frozen(home: str | None) -> bool:
    """Whether nobody is expected to change what lies in a module of this name: an installed package, the language."""
    top = (home or "").split(".")[0]
    return top in _FROZEN or _is_installed(top)


@functools.cache
def _is_installed(top: str) -> bool:
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return any(part in _INSTALLED for part in PurePath(file).parts)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that a function names, those inside it included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """What a function takes from globals, those inside it included."""
    found = {
        str(i.argval)
        for i in dis.get_instructions(code)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(found).union(*map(globals_in, inside))


def strings_in(code: types.CodeType) -> Iterator[str]:
    """Keys that the code may ask a dict for."""
    for inner in code.co_consts:
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, types.CodeType):
            yield from strings_in(inner)


@functools.cache
def forward_names(kind: type) -> frozenset[str]:
    """What the ``forward`` of a module, and the methods that it names, name."""
    found: set[str] = set()
    todo = ["forward"]
    while todo:
        method = getattr(kind, todo.pop(), None)
        if not isinstance(method, types.FunctionType):
            continue
        new = {*names_in(method.__code__), *strings_in(method.__code__)} - found
        found |= new
        todo += new
    return frozenset(found)


def functions_of(member: Any) -> Iterator[types.FunctionType]:
    """The functions behind a member of a class: a method, a property, a static or class method."""
    parts = [member]
    if isinstance(member, property):
        parts = [member.fget, member.fset]
    elif isinstance(member, (staticmethod, classmethod)):
        parts = [member.__func__]
    elif isinstance(member, functools.cached_property):
        parts = [member.func]
    for part in parts:
        if isinstance(part, types.FunctionType):
            yield part


def members_named(holder: Any, names: set[str]) -> Iterator[tuple[Any, str, Any]]:
    """What a library, or a class and those above it, hold under these names: holder, name and member."""
    for place in holder.__mro__ if isinstance(holder, type) else (holder,):
        home = place.__module__ if isinstance(place, type) else place.__name__
        if is_frozen(home):
            continue
        table = vars(place)
        for name in names.intersection(table):
            yield place, name, table[name]
        if isinstance(place, type):
            for name in _IMPLIED:
                if name in table and name not in names:
                    yield place, name, table[name]
