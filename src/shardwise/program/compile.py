"""Compile one call into a ``Program``: decide the layouts, lower to moves and a local call.

A call for which a rule answers is a program of one local call: the very same torch function on local
tensors, or the rule's own local program. Anything else goes down the ladder (``ladder.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.execute import mover
from shardwise.comm.many import move_each
from shardwise.comm.transport import Transport
from shardwise.errors import ShardError
from shardwise.layout.boxes import contiguous_stride, restride
from shardwise.layout.layout import Layout
from shardwise.program.decide import Choice, decide
from shardwise.program.local import LocalContext
from shardwise.program.spec import OpenSpec, Spec, spec_of
from shardwise.rules.notation import ONE, WHOLE, Arg, Rule
from shardwise.rules.registry import Entry

Step = Callable[[Tensor], Tensor]
MOST_ZEROS = 2**26  # elements of a doubtful call's operands that are still worth a trial


class Program:
    """A compiled call: move the operands, run on the pieces, say what the results are.

    Attributes:
        func: What to call on the local tensors.
        movers: For each tensor argument its move, or None.
        ctx: Passed first to ``func`` when it is a rule's local program; else None.
        template: Localized plain arguments with ``Slot``s for tensors; None to use the call's own.
        outs: Specs of the results; open ones are of a shape known only at run time.
        simple: The hot path may run it: ``target`` on the locals, then wrap the result.
        target: What the hot path calls: the torch function itself, or the local program with its context.
        arg_movers: For each positional argument its move, or None; None when nothing moves.
        rest: Plain arguments after the one tensor, localized, for the hot path; else None.
        dense: The layout is row-major but the kernel returned something else: copy.
        moved_view: Results alias a moved copy of the first argument, not the argument.
        together: More than one operand sends something: they move in few collectives.
    """

    __slots__ = (
        "arg_movers",
        "ctx",
        "dense",
        "func",
        "inplace",
        "moved_view",
        "movers",
        "name",
        "out",
        "outs",
        "rest",
        "simple",
        "target",
        "template",
        "together",
        "view",
        "wrap_many",
    )

    def __init__(self, func: Any, movers: tuple[Step | None, ...]) -> None:
        self.func, self.movers = func, movers
        self.together = (
            sum(m is not None and getattr(m, "communicates", False) for m in movers) > 1
        )
        self.name = getattr(func, "__name__", str(func))
        self.ctx: LocalContext | None = None
        self.template: tuple[Any, dict[str, Any]] | None = None
        self.outs: tuple[Spec, ...] | None = None
        self.out: Spec | None = None
        self.simple = False
        self.inplace = False
        self.view = False
        self.moved_view = False
        self.target = func
        self.arg_movers: tuple[Step | None, ...] | None = None
        self.rest: tuple[Any, ...] | None = None
        self.dense = False
        self.wrap_many: Callable[[Any], Any] | None = None

    def run(
        self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run on local tensors; ``args`` and ``kwargs`` hold ``Slot``s for them."""
        moved = self._move(tensors)
        if self.template is not None:
            args, kwargs = self.template
        args, kwargs = fill(args, moved), fill(kwargs, moved) if kwargs else {}
        if self.ctx is not None:
            return self.func(self.ctx, *args, **kwargs)
        return self.func(*args, **kwargs)

    def _move(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Move the operands; one that is passed twice moves once, several that communicate move together."""
        if self.together:
            return move_operands(self.movers, tensors)
        moved: list[Tensor] = []
        done: dict[tuple[int, int], Tensor] = {}
        for t, m in zip(tensors, self.movers):
            if m is None:
                moved.append(t)
                continue
            key = (id(t), id(m))
            if key not in done:
                done[key] = m(t)
            moved.append(done[key])
        return moved


def move_args(program: Any, *args: Any) -> list[Any]:
    """The arguments, tensors moved; one that is passed twice moves once."""
    out: list[Any] = []
    if program.together:
        return move_operands(program.arg_movers, args)
    for i, (a, m) in enumerate(zip(args, program.arg_movers)):
        if m is None:
            out.append(a)
            continue
        for j in range(i):
            if args[j] is a and program.arg_movers[j] is m:
                out.append(out[j])
                break
        else:
            out.append(m(a))
    return out


def move_operands(movers: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The arguments, those with a mover moved, in few collectives."""
    places: dict[tuple[int, int], int] = {}
    for i, (a, m) in enumerate(zip(args, movers)):
        if m is not None:
            places.setdefault((id(a), id(m)), i)
    moved = move_each([movers[i] for i in places.values()], [args[i] for i in places.values()])
    done = dict(zip(places, moved))
    return [a if m is None else done[id(a), id(m)] for a, m in zip(args, movers)]


def judge(
    func: Any, operands: Sequence[Arg], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run a doubtful call on zeros: raises what torch raises, before anything has been sent."""
    if sum(a.layout.numel for a in operands) > MOST_ZEROS:
        return
    zeros = [torch.zeros(a.shape, dtype=a.dtype, device=a.device or "cpu") for a in operands]
    with torch.no_grad():
        func(*fill(args, zeros), **fill(kwargs, zeros))


class Slot:
    """Stands for the i-th tensor in a tree of arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


SLOTS = tuple(Slot(i) for i in range(64))


def slot(i: int) -> Slot:
    """The i-th slot."""
    return SLOTS[i] if i < 64 else Slot(i)


def fill(tree: Any, tensors: Any) -> Any:
    """A tree of arguments with its slots filled."""
    kind = type(tree)
    if kind is Slot:
        return tensors[tree.index]
    if kind is tuple:
        return tuple([fill(x, tensors) for x in tree])
    if kind is list:
        return [fill(x, tensors) for x in tree]
    if kind is dict:
        return {k: fill(v, tensors) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*[fill(x, tensors) for x in tree])
    return tree


def flat_results(result: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t for x in result for t in flat_results(x)]
    return []


def compile_rule(
    entry: Entry,
    func: Any,
    operands: Sequence[Arg],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    transport: Transport,
    known: Sequence[tuple[tuple[int, ...], tuple[int, ...], Any]] | None = None,
) -> tuple[Program, list[Any]] | None:
    """The program that a rule gives, and the layouts of its results.

    Args:
        entry: The rule.
        func: The torch function.
        operands: The tensor arguments, on one mesh.
        args: Arguments with slots for tensors.
        kwargs: The same by name.
        transport: This rank's transport.
        known: Shape, stride and dtype of the results where a trace told them; without it the dtypes of the
            layouts are those of the first operand, to be corrected after the first run.

    Returns:
        None if the rule does not answer for these arguments.
    """
    try:
        rule = entry.rule(*fill(args, operands), **fill(kwargs, operands))
    except (
        IndexError,
        TypeError,
    ):  # a form of the op that the rule does not know, or one that torch refuses
        if entry.of_user:
            raise
        if known is None:
            judge(func, operands, args, kwargs)
        return None
    if rule is None:
        return None
    choice = decide(rule, operands, operands[0] if entry.inplace else None)
    given = operands
    if any(a.layout.is_sized for a in operands) and not _any_cut_will_do(entry, rule, choice):
        if entry.inplace and operands[0].layout.is_sized:
            return None
        operands = [_chunked(a) for a in operands]
        rule = entry.rule(*fill(args, operands), **fill(kwargs, operands))
        if rule is None:
            return None
        choice = decide(rule, operands, operands[0] if entry.inplace else None)
    if choice is None or not _sizes_agree(rule, choice, operands):
        return None
    movers = tuple(
        None if choice.ins[a] is g.layout else mover(g.layout, choice.ins[a], transport)
        for a, g in zip(operands, given)
    )
    layouts = _out_layouts(rule, choice, func, operands, args, kwargs, transport, known)
    is_open = any(type(layout) is OpenSpec for layout in layouts)
    program = Program(func, movers)
    program.inplace, program.view = entry.inplace, rule.view
    use_local = choice.local and rule.local is not None
    program.moved_view = rule.view and (
        movers[0] is not None or use_local
    )  # local programs of views copy
    if use_local or rule.localize is not None:
        mesh = operands[0].layout.mesh
        ctx = LocalContext(
            func,
            tuple(spec_of(choice.ins[a], transport) for a in operands),
            tuple(x if type(x) is OpenSpec else spec_of(x, transport) for x in layouts),
            choice.axes,
            mesh,
            transport,
        )
        if use_local:
            program.func, program.ctx = rule.local, ctx
        elif rule.localize is not None and choice.axes:
            program.template = rule.localize(ctx, *args, **kwargs)
    if program.ctx is not None:
        local: Any = program.func
        program.target = functools.partial(local, program.ctx)
    sends = program.ctx is not None or any(m is not None and m.communicates for m in movers)
    asked = known is None and sends and not is_open and not rule.checked
    if asked and _torch_refuses(func, operands, args, kwargs):
        return None
    program.simple = not is_open and _suits_hot_path(program, args, kwargs)
    return program, layouts


def _any_cut_will_do(entry: Entry, rule: Rule, choice: Choice | None) -> bool:
    """Whether a rule is right for operands that are cut at chosen sizes.

    It is where the op itself runs on the pieces, whose factors say all there is to know about them. Programs
    of a rule must look at nothing but the layouts that they are given, as our own do.
    """
    if choice is None:
        return True
    programs = (choice.local and rule.local is not None) or rule.localize is not None
    boxed = not entry.of_user if rule.boxed is None else rule.boxed
    return choice.keeps_sizes and (boxed or not programs)


def _chunked(arg: Arg) -> Arg:
    """The argument as if it were cut as ``torch.chunk`` cuts: it will be moved so."""
    return Arg(
        arg.index,
        arg.layout.chunked(),
        plain=arg.plain,
        requires_grad=arg.requires_grad,
        is_leaf=arg.is_leaf,
        device=arg.device,
    )


def _sizes_agree(rule: Rule, choice: Choice, operands: Sequence[Arg]) -> bool:
    """Whether each sharded factor has one size: pieces of unequal dims could fit where the dims do not."""
    sizes: dict[str, int] = {}
    for arg in operands:
        for name, n in zip(rule.ins.get(arg, ()), arg.shape):
            if (
                name in choice.axes
                and name not in rule.divides
                and sizes.setdefault(name, n) != n
            ):
                return False
    return True


def _torch_refuses(
    func: Any, operands: Sequence[Arg], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the call fails on meta tensors: then nothing may be sent for it.

    The lower rungs of the ladder judge it again, and raise what torch says about the whole tensors.
    """
    try:
        _on_meta(func, operands, args, kwargs)
    except Exception:
        return True
    return False


def _suits_hot_path(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the hot path can run the program, with what it needs for that."""
    if program.moved_view:
        return False
    moves = any(m is not None for m in program.movers)
    if program.template is not None:
        if moves or not _one_tensor_first(program.template):
            return False
        program.rest = program.template[0][1:]
    elif moves:
        if kwargs or any(
            isinstance(a, (list, tuple)) and any(isinstance(x, Slot) for x in a) for a in args
        ):
            return False
        program.arg_movers = tuple(
            program.movers[a.index] if isinstance(a, Slot) else None for a in args
        )
    return True


def _one_tensor_first(template: tuple[Any, dict[str, Any]]) -> bool:
    """Whether the call is ``func(tensor, plain, plain, ...)``, by position."""
    args, kwargs = template
    rest = args[1:]
    nested = any(
        isinstance(a, (list, tuple)) and any(isinstance(x, Slot) for x in a) for a in rest
    )
    return (
        not kwargs
        and isinstance(args[0], Slot)
        and not nested
        and not any(isinstance(a, Slot) for a in rest)
    )


def _out_layouts(
    rule: Rule,
    choice: Choice,
    func: Any,
    operands: Sequence[Arg],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    transport: Transport,
    known: Sequence[tuple[tuple[int, ...], tuple[int, ...], Any]] | None = None,
) -> list[Any]:
    mesh, dtype = operands[0].layout.mesh, operands[0].layout.dtype
    if known is not None:
        return [
            Layout(mesh, dims, partial, *of) for (dims, partial), of in zip(choice.outs, known)
        ]
    strides: list[tuple[int, ...] | None] = [None] * len(rule.outs)
    shapes: list[Any] = list(rule.out_shapes or _shapes(rule, operands))
    if any(None in shape for shape in shapes):
        return [
            OpenSpec(mesh, dims, partial, shape, transport)
            if None in shape
            else Layout(mesh, dims, partial, shape, contiguous_stride(shape), dtype)
            for (dims, partial), shape in zip(choice.outs, shapes)
        ]
    dense = all(a.layout.is_contiguous for a in operands if a.ndim > 1 or rule.view)
    if rule.out_strides is not None:
        strides = list(rule.out_strides)
    elif (order := _asked_order(args, kwargs)) is not None:
        strides = [torch.empty(s, memory_format=order, device="meta").stride() for s in shapes]
    elif rule.view or not dense:
        got = _on_meta(func, operands, args, kwargs)
        if got is not None and len(got) >= len(rule.outs):
            shapes = [tuple(t.shape) for t in got[: len(rule.outs)]]
            strides = [tuple(t.stride()) for t in got[: len(rule.outs)]]
        elif rule.view:
            raise ShardError(
                f"{func} gave no result on meta tensors, so its result's strides are unknown"
            )
        elif len(shapes[0]) == operands[0].ndim:
            strides = [
                restride(s, operands[0].layout.stride) if len(s) == operands[0].ndim else None
                for s in shapes
            ]
    out: list[Layout] = []
    for (dims, partial), shape, stride in zip(choice.outs, shapes, strides):
        assert len(dims) == len(shape), (
            f"the rule of {func} labels {len(dims)} dims of a result {shape}"
        )
        out.append(
            Layout(mesh, dims, partial, shape, stride or contiguous_stride(shape), dtype)
        )
    return out


def _asked_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The memory format that a call asks for (channels last), or None."""
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.memory_format) and a not in (
            torch.contiguous_format,
            torch.preserve_format,
        ):
            return a
    return None


def _shapes(rule: Rule, operands: Sequence[Arg]) -> list[tuple[int, ...]]:
    sizes = {ONE: 1}
    for arg in operands:
        for name, n in zip(rule.ins.get(arg, ()), arg.shape):
            sizes.setdefault(name, n)
    alike = {
        rule.ins.get(a, ()): a.shape for a in reversed(operands)
    }  # dims that are whole share one label
    return [
        alike[names]
        if WHOLE in names and names in alike
        else tuple(sizes[name] for name in names)
        for names in rule.outs
    ]


def _on_meta(
    func: Any, operands: Sequence[Arg], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor] | None:
    """Results on meta tensors of the global shapes; None where the op has no meta form."""
    meta = [
        torch.empty_strided(a.shape, a.layout.stride, dtype=a.dtype, device="meta")
        for a in operands
    ]
    try:
        with torch.no_grad():
            return flat_results(func(*fill(args, meta), **fill(kwargs, meta)))
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if "cannot be called on meta tensors" in str(
            error
        ):  # it looks at values: nothing is known
            return None
        raise
