"""The slow path of a call: overrides, key, program cache, compile, and the bottom of the ladder.

The ladder, top to bottom: a rule answers for the call itself; the call is traced into ATen calls and rules
answer for those; the operands are gathered and the call runs whole, its results replicated. Every rung is
right; the lower ones move more.
"""

from __future__ import annotations

import functools
import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Transport
from shardwise.compat import (
    autocast_dtype,
    is_autocast_enabled,
    is_custom_op,
    jit_tracing,
)
from shardwise.errors import (
    AliasError,
    GradientError,
    LayoutError,
    ShardError,
    StrictError,
    UnsupportedError,
)
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh, join
from shardwise.program.compile import Program, compile_rule, fill, flat_results, slot
from shardwise.program.modes import mode, strict_mode
from shardwise.program.spec import OpenSpec, Spec, program_tables, spec_of
from shardwise.recording import recorder
from shardwise.rules.notation import Arg
from shardwise.rules.registry import lookup
from shardwise.tensor.absent import Absent
from shardwise.tensor.casts import onto, refuse_kind
from shardwise.tensor.checks import check_equal_on_all_ranks
from shardwise.tensor.descent import Descent
from shardwise.tensor.dtensor import DTensor, install, wrap
from shardwise.tensor.explain import located
from shardwise.tensor.hotkeys import fast_key
from shardwise.tensor.keywords import ordered, positional
from shardwise.tensor.overrides import OVERRIDES
from shardwise.tensor.readings import READING, plain_form
from shardwise.tensor.strides import agrees, in_order
from shardwise.tensor.transforms import refuse_tracing
from shardwise.tensor.views import fresh, mark_copies
from shardwise.tensor.whole import (
    check_writable,
    functional_form,
    write_into,
    write_plain,
    writes,
    writes_plain,
)
from shardwise.tensor.writes import write_to_copy, writes_to_copy

MAX_PROGRAMS = 16384
_T = torch.Tensor


class Call:
    """One call taken apart: a tree of plain arguments with slots, the tensors, and the key.

    Attributes:
        mixed: Some tensors are plain, or lie on a slice of the mesh, and must be cast on entry.
    """

    __slots__ = ("cacheable", "key", "kwargs", "mixed", "tensors", "transport", "tree")

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lifts: bool
    ) -> None:
        self.tensors: list[Tensor] = []
        self.key: list[Any] = [func]
        self.cacheable = True
        self.tree = tuple([self._take(a, lifts) for a in args])
        self.kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            self.key.append(name)
            self.kwargs[name] = self._take(value, lifts)
        first = next(t for t in self.tensors if isinstance(t, DTensor))
        self.transport = first._spec.transport
        mesh = first._spec.layout.mesh
        self.mixed = any(
            not isinstance(t, DTensor) or t._spec.layout.mesh is not mesh for t in self.tensors
        )

    def _take(self, x: Any, lifts: bool) -> Any:
        kind = type(x)
        key = self.key
        if isinstance(x, Tensor):
            self.tensors.append(x)
            if isinstance(x, DTensor):
                key.append(x._spec.guards or x._spec)
            else:
                if x.layout is not torch.strided:  # it may have no strides
                    refuse_kind(x)
                key.append(("plain", x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
            return slot(len(self.tensors) - 1)
        if kind is float or kind is complex:
            key.append(kind if lifts else (kind, _exact(x)))
            return x
        if kind is tuple or kind is list or kind is torch.Size:
            key.append((kind, len(x)))
            return (
                kind([self._take(y, lifts) for y in x])
                if kind is not torch.Size
                else x_size(self, x)
            )
        if isinstance(x, tuple):  # a named tuple
            key.append((kind, len(x)))
            return kind(*[self._take(y, lifts) for y in x])
        if kind is slice:
            key.append("slice")
            return slice(
                self._take(x.start, lifts), self._take(x.stop, lifts), self._take(x.step, lifts)
            )
        if kind is dict:
            key.append(("dict", *x))
            return {k: self._take(v, lifts) for k, v in x.items()}
        if isinstance(x, Integral) and not isinstance(x, int):  # numpy's, also in slices
            return self._take(int(x), lifts)
        if hasattr(x, "__array__") and hasattr(x, "ndim") and not isinstance(x, (int, float)):
            return self._take(torch.as_tensor(x), lifts)
        try:
            hash(x)
        except TypeError:
            self.cacheable = False
        else:
            key.append((kind, x))
        return x


def x_size(call: Call, x: torch.Size) -> torch.Size:
    """A Size holds ints only: keyed by value."""
    call.key.append(tuple(x))
    return x


def _exact(x: float | complex) -> str:
    """A number by its bits: NaNs alike, zeros of different sign apart."""
    if isinstance(x, complex):
        return f"{_exact(x.real)},{_exact(x.imag)}"
    return "nan" if math.isnan(x) else float(x).hex()


def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a call that the hot path has no program for; what it raises says where."""
    try:
        return _answer(func, args, kwargs)
    except ShardError as error:
        located(error, func, args, kwargs)
        raise


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args:
        args, kwargs = positional(func, kwargs)
    if func in READING and (plain := plain_form(func, args)) is not None:
        func, args = plain
        return func(*args, **kwargs)
    if writes_to_copy(func, args):
        fresh(args[0])
        return write_to_copy(func, args, kwargs)
    special = OVERRIDES.get(func)
    if special is not None:
        return special(func, args, kwargs)
    if jit_tracing() is not None:
        refuse_tracing()
    if writes_plain(func, args, kwargs):
        return write_plain(func, args, kwargs)
    if kwargs.get("out") is not None and not is_custom_op(func):
        return into_out(func, args, kwargs)
    if kwargs.get("requires_grad"):  # a new leaf: its gradient is watched
        rest = {k: v for k, v in kwargs.items() if k != "requires_grad"}
        return func(*args, **rest).requires_grad_()
    entry = lookup(func)
    if len(kwargs) > 1:
        kwargs = ordered(func, entry and entry.rule, kwargs)
    call = Call(func, args, kwargs, entry is not None and entry.lifts)
    table = program_tables(call.transport)[mode()]
    if is_autocast_enabled():
        call.key.append(("autocast", autocast_dtype("cpu"), autocast_dtype("cuda")))
    key = tuple(call.key)
    program = table.get(key) if call.cacheable else None
    if program is None:
        return _compile_and_run(func, entry, call, key, table, args, kwargs)
    return run(program, call, func, args, kwargs)


def run(
    program: Any, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a program on a call's local tensors and wrap the results."""
    if not isinstance(program, Program):
        return program(call, args, kwargs)
    if program.inplace:
        _refuse_write_to_copy(program.name, call)
    locals_ = _locals(call)
    return _wrap_results(program, program.run(locals_, call.tree, call.kwargs), call)


def _locals(call: Call) -> list[Tensor]:
    """The local operands, on the mesh of the call."""
    for t in call.tensors:
        if isinstance(t, DTensor):
            fresh(t)
    if not call.mixed:
        return [t._local for t in call.tensors if isinstance(t, DTensor)]
    mesh = join([t._spec.layout.mesh for t in call.tensors if isinstance(t, DTensor)])
    return [onto(t, mesh) for t in call.tensors]


def _compile_and_run(
    func: Any,
    entry: Any,
    call: Call,
    key: tuple[Any, ...],
    table: dict[Any, Any],
    args: Any,
    kwargs: Any,
) -> Any:
    name = getattr(func, "__name__", "")
    _refuse_collective(func, name)
    if writes(name):
        _refuse_write_to_copy(name, call)
        check_writable(func, call.tensors, call.tree, call.kwargs)
    operands = _operands(call, func)
    made = (
        compile_rule(entry, func, operands, call.tree, call.kwargs, call.transport)
        if entry is not None
        else None
    )
    if operands[0].layout.mesh.coordinate_of(call.transport.rank) is None:
        absent = Absent(func, operands, made and made[1])
        if call.cacheable:
            table[key] = absent
        return absent(call, args, kwargs)
    if made is not None:
        program, layouts = made
        program.simple = program.simple and not call.mixed
        result = program.run(_locals(call), call.tree, call.kwargs)
        if result is None and is_custom_op(
            func
        ):  # the hot path would return its first argument
            program.simple = False
        _settle_outs(program, layouts, result, call)
        if call.cacheable:
            _remember(table, key, program, func, call, args, kwargs, entry)
        return _wrap_results(program, result, call)
    return _descend(func, call, key, table, args, kwargs)


def _refuse_collective(func: Any, name: str) -> None:
    """A collective that the program makes itself is about what each rank holds, not about the one tensor."""
    inside = getattr(func, "__module__", None) or ""
    if inside.startswith("torch.distributed.") or str(func).partition(".")[0] in _C10D:
        raise UnsupportedError(
            f"{name} works on each rank's own tensor, and a DTensor is one tensor on all of them.",
            tries=[
                "x.full_tensor(): the whole value, reduced",
                "x.redistribute(mesh, placements): another layout",
                "x.to_local(): this rank's piece, for collectives of your own",
            ],
        )


_C10D = frozenset(("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"))


def _descend(
    func: Any, call: Call, key: tuple[Any, ...], table: dict[Any, Any], args: Any, kwargs: Any
) -> Any:
    """No rule answered for the call itself: take the next rungs of the ladder."""
    pure = functional_form(func)
    if pure is not None and lookup(pure) is not None:
        if not isinstance(args[0], DTensor):  # a plain tensor is written whole on every rank
            return write_plain(func, args, kwargs)
        first = (
            args[0].clone() if torch.is_grad_enabled() else args[0]
        )  # what is saved must not change
        return write_into(args[0], pure(first, *args[1:], **kwargs))

    descent = Descent(func, lookup(func), _operands)
    if call.cacheable:
        table[key] = descent
    return descent(call, args, kwargs)


def into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, then write into the given tensors, which keep their layouts."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    result, out = func(*args, **rest), kwargs["out"]
    targets = [out] if isinstance(out, Tensor) else list(out)
    values = [result] if isinstance(result, Tensor) else list(result)
    for target, value in zip(targets, values):
        if not isinstance(target, DTensor) or not isinstance(value, DTensor):
            raise LayoutError(
                "out= next to DTensors must be a DTensor.",
                tries=["out=shardwise.empty(shape, device_mesh=mesh)"],
            )
        if torch.is_grad_enabled() and (value.requires_grad or target.requires_grad):
            raise GradientError(
                f"{getattr(func, '__name__', func)}(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad.",
                tries=["leave out= away", "with torch.no_grad():"],
            )
        if target.shape != value.shape and target.numel() == 0:  # torch gives it memory
            fit = spec_of(value._spec.layout.with_dtype(target.dtype), value._spec.transport)
            target._become(value._local.to(target.dtype, copy=True), fit)
            continue
        if target.shape != value.shape:
            raise LayoutError(
                f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}"
            )
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(
                f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
            )
        if writes_to_copy(_T.copy_, (target,)):
            write_to_copy(_T.copy_, (target, value), {})
        else:
            write_into(target, value)
    return out


def _remember(
    table: dict[Any, Any],
    key: tuple[Any, ...],
    program: Program,
    func: Any,
    call: Call,
    args: Any,
    kwargs: Any,
    entry: Any,
) -> None:
    if len(table) > MAX_PROGRAMS:
        table.clear()
    table[key] = program
    if program.simple and not is_autocast_enabled() and not _shortcut(program, args, kwargs):
        fast = fast_key(func, args, kwargs, entry.lifts)
        if fast is not None:
            table = call.transport.state["programs"][-1]
            if len(table) > MAX_PROGRAMS:
                table.clear()
            table[fast] = program


def _shortcut(program: Program, args: Any, kwargs: Any) -> bool:
    """Whether the hot path would pass the arguments on as they are although the program changes them."""
    if kwargs or len(args) > 2:
        return False
    if len(args) == 1:
        return program.rest is not None
    return type(args[1]) is float and (
        program.rest is not None or program.arg_movers is not None
    )


def _operands(call: Call, func: Any) -> list[Arg]:
    """The tensor arguments as rules see them, on one mesh; checks plain ones."""
    mesh = join([t._spec.layout.mesh for t in call.tensors if isinstance(t, DTensor)])
    operands: list[Arg] = []
    plain: list[tuple[int, Tensor]] = []
    grad = (
        torch.is_grad_enabled()
    )  # if not, leafness does not matter, and some views of leaves raise when asked
    for i, t in enumerate(call.tensors):
        if isinstance(t, DTensor):
            layout = t._spec.layout
            if layout.mesh is not mesh:
                layout = layout.on(mesh)
        else:
            refuse_kind(t)
            plain.append((i, t))
            layout = Layout.of(mesh, None, t.shape, t.stride(), t.dtype)
        operands.append(
            Arg(
                i,
                layout,
                plain=not isinstance(t, DTensor),
                requires_grad=t.requires_grad,
                is_leaf=not grad or t.is_leaf,
                device=t.device,
            )
        )
    if plain:
        _check_plain(func, plain, mesh, call.transport)
    return operands


def _check_plain(
    func: Any, plain: list[tuple[int, Tensor]], mesh: Mesh, transport: Transport
) -> None:
    name = getattr(func, "__name__", str(func))
    if strict_mode() and any(t.numel() > 1 for _, t in plain):
        i = next(i for i, t in plain if t.numel() > 1)
        raise StrictError(
            f"{name}: argument {i} is a plain tensor next to a DTensor, which strict() forbids.",
            tries=[
                "distribute_tensor(x, mesh, placements) if every rank has the whole tensor",
                "DTensor.from_local(x, mesh, placements) if every rank has its own piece",
            ],
        )
    if recorder() is not None:  # there are no values; the eager call before has compared them
        return
    if mesh.coordinate_of(transport.rank) is not None:
        check_equal_on_all_ranks(
            [(f"{name}: tensor argument {i}", t) for i, t in plain], mesh, transport
        )


def _settle_outs(program: Program, layouts: list[Any], result: Any, call: Call) -> None:
    """Fix the results' specs: the dtype is that of the first local run; the shape must fit the box."""
    specs: list[Any] = []
    for t, layout in zip(flat_results(result), layouts):
        if type(layout) is OpenSpec:
            specs.append(layout)
            continue
        spec = spec_of(layout.with_dtype(t.dtype), call.transport)
        if t.shape != spec.local_shape and spec.coord is not None:
            raise ShardError(
                f"{program.name}: the local result has shape {tuple(t.shape)}, the layout {layout} asks for "
                f"{tuple(spec.local_shape)} here; the rule is wrong"
            )
        specs.append(spec)
    program.outs = tuple(specs)
    if not program.simple or program.inplace:
        return
    if isinstance(result, Tensor) and _unchanged(program, result, call.tensors[0]):
        program.wrap_many = functools.partial(
            wrap, spec=specs[0]
        )  # `out` is None: see `_finish`
    elif isinstance(result, Tensor):
        program.out = specs[0]
        program.dense = (
            specs[0].stride is None and not program.view and not result.is_contiguous()
        )
        if (
            specs[0].stride is not None
            and not program.view
            and not agrees(result, specs[0].layout.stride)
        ):
            program.simple = False  # the slow path copies it into the order of the layout
    else:
        outs, view = program.outs, program.view
        flat = type(result) in (list, tuple) and all(isinstance(t, Tensor) for t in result)
        if view and flat:  # pieces of one tensor
            program.wrap_many = lambda views: type(views)(map(wrap, views, outs))
        else:
            program.wrap_many = lambda result: _rewrap(result, iter(outs), view)


def _wrap_results(program: Program, result: Any, call: Call) -> Any:
    if program.inplace:
        return (
            None if result is None else call.tensors[0]
        )  # an op that writes may return nothing
    if _unchanged(program, result, call.tensors[0]):
        return call.tensors[0]
    assert program.outs is not None, "a compiled program knows its results"
    specs = iter(program.outs)
    wrapped = _rewrap(result, specs, program.view and not program.moved_view)
    if program.view:
        base = call.tensors[0]
        if isinstance(base, DTensor) and (program.moved_view or "_view_of" in base.__dict__):
            args, kwargs = fill(call.tree, call.tensors), fill(call.kwargs, call.tensors)
            mark_copies(call.key[0], args, kwargs, wrapped)
    return wrapped


def _unchanged(program: Program, result: Any, first: Tensor) -> bool:
    """Whether torch returned the operand itself: ``x.contiguous()``, ``x.to(x.dtype)``."""
    return (
        isinstance(first, DTensor)
        and program.ctx is None
        and result is first._local
        and program.outs == (first._spec,)
    )


def _rewrap(result: Any, specs: Any, view: bool) -> Any:
    if isinstance(result, Tensor):
        spec = next(specs)
        if type(spec) is OpenSpec:
            spec = spec.of(result)
        if not view:
            result = _in_stride_order(result, spec)
        return wrap(result, spec)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*[_rewrap(x, specs, view) for x in result])
    if isinstance(result, (tuple, list)):
        return type(result)([_rewrap(x, specs, view) for x in result])
    return result


def _in_stride_order(local: Tensor, spec: Spec) -> Tensor:
    """The local in the stride order of its layout (a copy where a kernel returned another)."""
    if spec.stride is None:
        return local if local.is_contiguous() else local.contiguous()
    return in_order(local, spec.layout.stride)


def _refuse_write_to_copy(name: str, call: Call) -> None:
    first = call.tensors[0] if call.tensors else None
    if isinstance(first, DTensor) and "_view_of" in first.__dict__:
        raise AliasError(
            f"{name} would write into a view that needed communication: it is a copy, and the write "
            "would not reach its base.",
            tries=[
                "write into the base: x[index] = value",
                "clone() the view, if the base is to stay",
            ],
        )


install(handle, located)
