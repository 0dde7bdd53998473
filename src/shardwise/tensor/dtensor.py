"""``DTensor``: the object, its properties, and the hot path of every call on it.

A ``DTensor`` is a tensor without data that carries a local tensor and a spec. It never requires grad
itself: autograd runs on the locals, and ``requires_grad``, ``grad``, ... read from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
import torch.utils.hooks

from shardwise.comm.execute import mover
from shardwise.comm.transport import Transport
from shardwise.compat import (
    DisableTorchFunction,
    Door,
    TensorBase,
    add_foreach_type,
    make_wrapper,
    run_backward,
)
from shardwise.errors import LayoutError, ShardError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.compile import move_args
from shardwise.program.spec import Spec, spec_of
from shardwise.tensor.explain import explained
from shardwise.tensor.gradient_edges import ResultNumber
from shardwise.tensor.gradients import Leaf, leaf_of, seed, watch
from shardwise.tensor.overrides import OVERRIDES
from shardwise.tensor.plainkeys import index_key, plain_key
from shardwise.tensor.protocol import Protocol
from shardwise.tensor.strides import alias, in_order

_NO_KWARGS: dict[str, Any] = {}

LIFTED: set[Any] = (
    set()
)  # functions whose float arguments are passed at run time: no part of the key
_SLOW: list[Callable[..., Any]] = []  # the slow path, and what adds the place to its errors


def install(
    handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], located: Callable[..., Any]
) -> None:
    """Give the hot path its slow path (``dispatch.py`` does, so that neither imports the other twice)."""
    _SLOW[:] = [handler, located]


class DTensor(Protocol):
    """A tensor on a mesh, with a layout. Written to like one tensor; each rank holds its piece.

    Make one with ``distribute_tensor``, ``DTensor.from_local`` or a factory such as ``shardwise.ones``.
    """

    _local: Tensor
    _spec: Spec
    _view_of: Any  # set on a view that is a copy: where it comes from (see writes.py)
    _shown_grad: Any = (
        None  # the wrapper last handed out for the local's .grad, so that it keeps its identity
    )

    # -- calls ---------------------------------------------------------------------------------
    @classmethod
    def __torch_function__(  # noqa: C901, PLR0912, PLR0915  the hot path: one function, so that a hit makes no call
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look one program up and run it on the locals; compile it the first time."""
        if not kwargs:
            n = len(args)
            if n == 2:
                a, b = args
                if type(a) is DTensor:
                    spec = a._spec
                    kind = type(b)
                    if kind is DTensor:
                        program = spec.fast.get((func, spec, b._spec))
                        if program is not None:
                            if program.arg_movers is None:
                                return _finish(program, program.target(a._local, b._local), a)
                            return _finish(
                                program,
                                program.target(*move_args(program, a._local, b._local)),
                                a,
                            )
                    elif kind is float:
                        program = spec.fast.get((func, spec, float))
                        if program is not None:
                            return _finish(program, program.target(a._local, b), a)
                    elif kind is int:
                        program = spec.fast.get((func, spec, b))
                        if program is not None and program.arg_movers is None:
                            return _finish(
                                program, program.target(a._local, *(program.rest or (b,))), a
                            )
                    elif kind is tuple and func is GETITEM:
                        program = spec.fast.get((func, spec, *map(index_key, b)))
                        if program is not None and program.arg_movers is None:
                            index = b if program.rest is None else program.rest[0]
                            return _finish(program, program.target(a._local, index), a)
            elif n == 3:
                a, b, c = args
                if type(b) is int and type(c) is int and type(a) is DTensor:
                    spec = a._spec
                    program = spec.fast.get((func, spec, b, c))
                    if program is not None and program.arg_movers is None:
                        return _finish(
                            program, program.target(a._local, *(program.rest or (b, c))), a
                        )
                elif type(a) is DTensor and type(b) is DTensor:
                    spec = a._spec
                    if c is None:
                        program = spec.fast.get((func, spec, b._spec, None))
                        if program is not None:
                            if program.arg_movers is None:
                                return _finish(
                                    program, program.target(a._local, b._local, None), a
                                )
                            return _finish(
                                program,
                                program.target(*move_args(program, a._local, b._local, None)),
                                a,
                            )
                    elif type(c) is DTensor:
                        program = spec.fast.get((func, spec, b._spec, c._spec))
                        if program is not None:
                            if program.arg_movers is None:
                                return _finish(
                                    program, program.target(a._local, b._local, c._local), a
                                )
                            return _finish(
                                program,
                                program.target(
                                    *move_args(program, a._local, b._local, c._local)
                                ),
                                a,
                            )
            elif n == 1:
                a = args[0]
                if type(a) is DTensor:
                    spec = a._spec
                    if (
                        func is _IS_COMPLEX
                    ):  # optimizers ask it of every parameter at every step
                        return spec.dtype.is_complex
                    program = spec.fast.get((func, spec))
                    if program is not None:
                        if program.arg_movers is None:
                            return _finish(program, program.target(a._local), a)
                        return _finish(
                            program, program.target(*move_args(program, a._local)), a
                        )
            elif n > 3 and type(args[0]) is DTensor:  # sizes of a view, mostly
                kinds = tuple(map(type, args))
                if _NESTED.isdisjoint(kinds):
                    a, rest = args[0], args[1:]
                    spec = a._spec
                    try:
                        program = spec.fast.get((func, spec, kinds, rest))
                    except TypeError:  # an argument that cannot be hashed
                        program = None
                    if program is not None and program.arg_movers is None:
                        if program.rest is not None:
                            rest = program.rest
                        return _finish(program, program.target(a._local, *rest), a)
            kwargs = _NO_KWARGS
        elif len(args) == 2 and type(args[0]) is DTensor:
            a, b = args
            kind = type(b)
            if kind is DTensor:
                values = tuple(kwargs.values())
                kinds = tuple(map(type, values))
                if _NESTED.isdisjoint(kinds):
                    spec = a._spec
                    key = (func, spec, b._spec, tuple(kwargs), kinds, values)
                    try:
                        program = spec.fast.get(key)
                    except TypeError:  # an argument that cannot be hashed
                        program = None
                    if program is not None and program.arg_movers is None:
                        return _finish(program, program.target(a._local, b._local, **kwargs), a)
            elif kind is tuple and func not in OVERRIDES:  # layer_norm(x, shape, weight=...)
                return _many_tensors(func, args, kwargs)
        elif len(args) == 1 and len(kwargs) == 1 and type(args[0]) is DTensor:
            a = args[0]
            ((name, b),) = kwargs.items()
            if type(b) is bool:
                spec = a._spec
                program = spec.fast.get((func, spec, name, b))
                if program is not None and program.arg_movers is None:
                    return _finish(program, program.target(a._local, **kwargs), a)
        by_hand = OVERRIDES.get(func)
        if by_hand is not None:
            try:
                return by_hand(func, args, kwargs)
            except ShardError as error:
                _SLOW[1](error, func, args, kwargs)
                raise
        key = one_tensor_key(func, args, kwargs)
        if key is None:
            return _many_tensors(func, args, kwargs)
        a = args[0]
        try:
            program = a._spec.fast.get(key)
        except TypeError:  # an argument that cannot be hashed
            return _many_tensors(func, args, kwargs)
        if program is None:
            return _SLOW[0](func, args, kwargs)
        if program.rest is not None:
            return _finish(program, program.target(a._local, *program.rest), a)
        local = a._local if program.arg_movers is None else program.arg_movers[0](a._local)
        return _finish(program, program.target(local, *args[1:], **kwargs), a)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The door: calls that reach the dispatcher on the wrapper itself."""
        with Door():
            return _SLOW[0](func, args, kwargs or {})

    # -- autograd: read from the local -------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:
        """Whether the local requires grad; it does on all ranks or on none."""
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Ask for a gradient (or not) of this leaf."""
        self._local.requires_grad_(requires_grad)
        if requires_grad:
            watch(self._local, self._spec)
        return self

    @property
    def grad_fn(self) -> Any:
        """Autograd node of the local."""
        return self._local.grad_fn

    @property
    def is_leaf(self) -> bool:
        """Whether the local is a leaf."""
        return self._local.is_leaf

    @property
    def retains_grad(self) -> bool:
        """Whether a non-leaf keeps its gradient."""
        return self._local.retains_grad

    @property
    def output_nr(self) -> int:
        """Which result of its node the local is; it knows the layout, see `gradient_edges`."""
        return ResultNumber(self._local.output_nr, self._spec)

    @property
    def _version(self) -> int:
        """Version counter of the local."""
        return self._local._version

    @property
    def grad(self) -> Any:
        """The gradient, in the leaf's layout. Reading it never communicates.

        Under ``no_sync`` it is a pending sum; so is the retained gradient of a replicated non-leaf.
        """
        local, shown = self._local, self._shown_grad
        if shown is not None and shown._local is local.grad:
            return shown
        leaf = leaf_of(local)
        if leaf is not None:
            return _leaf_grad(leaf) if leaf.shown is None else leaf.shown
        if (
            local.requires_grad
            and not local.is_leaf
            and not local.retains_grad
            and "_asked_for" not in self.__dict__
        ):
            return None
        g = local.grad
        if g is None:
            return None
        shown = wrap_like(g, self._spec.layout.dual(), self._spec.transport)
        if (
            shown._local is not g
        ):  # copied into the order of the layout: what is written to it must count
            local.grad = shown._local
        self._shown_grad = shown
        return shown

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            self._set_grad(value)
            return
        leaf = leaf_of(self._local)
        if leaf is not None:
            leaf.clear()
        self._shown_grad = None
        self._local.grad = None

    @explained("Tensor.grad = value", "self", "value")
    def _set_grad(self, value: Any) -> None:
        leaf = leaf_of(self._local)
        self._shown_grad = None
        if not isinstance(value, DTensor):
            raise LayoutError(
                "the gradient of a DTensor must be a DTensor.",
                tries=["x.grad = distribute_tensor(g, x.device_mesh, x.layout)"],
            )
        if value.shape != self.shape:
            raise LayoutError(
                f"a gradient of shape {tuple(value.shape)} for a tensor of shape {tuple(self.shape)}."
            )
        if self.is_leaf and self._local.grad_dtype not in (None, value.dtype):
            raise LayoutError(
                f"a gradient of {value.dtype} for a tensor that takes {self._local.grad_dtype}.",
                tries=["x.grad = g.to(x.dtype)"],
            )
        want = self._spec.layout if leaf is not None else self._spec.layout.dual()
        local = place(value, want.dims, want.partial, self._spec.layout.mesh)
        if leaf is None:
            self._local.grad = local
            if local is value._local and value._spec.layout.mesh is want.mesh:
                self._shown_grad = value
        else:
            leaf.clear()
            leaf.grad = local
            if (
                value._spec.layout.dims == want.dims
                and value._spec.layout.partial == want.partial
            ):
                leaf.shown = value

    @property
    def data(self) -> DTensor:
        """The same values without autograd history."""
        return wrap(self._local.data, self._spec)

    @data.setter
    def data(self, value: Any) -> None:
        self._set_data(value)

    @explained("Tensor.data = value", "self", "value")
    def _set_data(self, value: Any) -> None:
        """``p.data = value``: p keeps its layout; dtype and shape may change. A plain value counts as replicated."""
        own = self._spec.layout
        if not isinstance(value, DTensor):
            if not isinstance(value, Tensor) or value.shape != self.shape:
                raise LayoutError(
                    f"the data of a DTensor must be a DTensor, or a plain tensor of its shape {tuple(self.shape)}.",
                    tries=["x.data = distribute_tensor(t, x.device_mesh, x.layout)"],
                )
            whole = own.replicated().with_dtype(value.dtype)
            value = wrap(value.detach(), spec_of(whole, self._spec.transport))
        if value.shape == self.shape and value.device_mesh == own.mesh:
            local = place(value, own.dims, own.partial, own.mesh)
            layout = own.with_dtype(value.dtype)
        else:
            local, layout = value._local, value._spec.layout
        # The local stays the same object: its hooks, its gradient and its leaf record stay with it.
        self._local.data = local.detach()
        self._become(self._local, spec_of(layout, self._spec.transport))
        watch(self._local, self._spec)

    def _become(self, local: Tensor, spec: Spec) -> None:
        """Change into another tensor in place, the C++ side of the wrapper included."""
        self._shown_grad = None
        if (
            spec.shape != self._spec.shape
            or spec.dtype != self._spec.dtype
            or spec.stride != self._spec.stride
        ):
            with DisableTorchFunction():
                TensorBase.data.__set__(self, wrap(local, spec))
        self._local, self._spec = local, spec
        if (leaf := leaf_of(local)) is not None:
            leaf.spec = spec

    # -- crossings ---------------------------------------------------------------------------------
    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        run_check: bool = True,
        shape: Any = None,
        stride: Any = None,
        grad_placements: Any = None,
    ) -> DTensor:
        """A ``DTensor`` from each rank's piece. Differentiable.

        Args:
            local_tensor: This rank's piece.
            device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
            placements: Placements, spec or layout; None replicates.
            run_check: One small exchange of shapes, dtypes and checksums of replicas, so that uneven
                pieces give the right global shape and differing replicas raise. Without it nothing is
                sent, and every rank's piece is *taken* to have this rank's size: the caller's promise.
            shape: Global shape; skips the check, so that nothing is sent.
            stride: Global stride.
            grad_placements: Layout in which the gradient reaches ``local_tensor``; by default that of the
                value, with pending sums replicated.

        Returns:
            The distributed tensor; a pending ``avg`` is scaled and becomes a pending sum.

        Raises:
            LayoutError: The pieces contradict each other or the placements.
        """
        from_local = _CROSSINGS["from_local"]
        return from_local(
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements
        )

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's piece. Differentiable.

        Args:
            grad_placements: Layout of the gradient that the local program will produce. Not given, the
                gradient of a replicated piece is taken to be whole: equal on all ranks. That guess is
                checked at its first backward, which raises if ranks differ.
        """
        if self._spec.guards is not None:
            _CROSSINGS["fresh"](self)
        local = self._local
        if not (local.requires_grad and torch.is_grad_enabled()):
            return alias(local)
        if (
            grad_placements is None and self._spec.dual is self._spec
        ):  # cut on every axis: nothing to decide
            return alias(local)
        return _CROSSINGS["to_local"](self, grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole value, on every rank."""
        whole = self.redistribute(placements=self._spec.layout.replicated())
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        max_extra_bytes: int | None = None,
    ) -> DTensor:
        """The same value in another layout. Differentiable.

        Args:
            device_mesh: The mesh; None keeps it.
            placements: Placements, spec or layout; None replicates.
            async_op: Return at once; the first use of the result waits for it. Several may be in flight,
                and must be used first in the same order on all ranks.
            forward_dtype: Cast to this before moving.
            backward_dtype: Cast gradients to this before moving them back.
            max_extra_bytes: Move in rounds, there and back, whose buffers take at most so many bytes on each
                rank: next to the operand a move then holds the larger of operand and result, and those.
                The same number on all ranks.

        Raises:
            LayoutError: The placements do not fit, or ``max_extra_bytes`` is too small for a round.
        """
        spec = self._spec
        if spec.guards is not None:
            _CROSSINGS["fresh"](self)
        if max_extra_bytes is not None:
            more = (forward_dtype, backward_dtype, async_op, max_extra_bytes)
            return _CROSSINGS["redistribute"](self, None, device_mesh, placements, *more)
        names = getattr(
            device_mesh, "mesh_dim_names", None
        )  # meshes that differ in names are equal
        key = (
            "redistribute",
            spec,
            device_mesh,
            names,
            tuple(placements) if type(placements) is list else placements,
        )
        try:
            found = spec.programs[0].get(key)
        except TypeError:  # an unhashable spec
            key, found = None, None
        if found is None or async_op or forward_dtype is not None or backward_dtype is not None:
            return _CROSSINGS["redistribute"](
                self, key, device_mesh, placements, forward_dtype, backward_dtype, async_op
            )
        move, out = found
        local = move(self._local)
        if local is self._local:
            local = alias(local)
        return wrap(local, out)

    # -- backward ----------------------------------------------------------------------------------
    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Compute gradients of the leaves; see ``torch.Tensor.backward``."""
        spec = self._spec
        real = not spec.dtype.is_complex
        if gradient is None and inputs is None and real and spec.shape.numel() == 1:
            retain = create_graph if retain_graph is None else retain_graph
            local = self._local
            run_backward(
                (local,),
                (seed(spec, local),),
                retain,
                create_graph,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            return
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call ``hook`` with the gradient, a DTensor in its true layout: the dual of this one's."""
        spec = self._spec

        def on_local(g: Tensor) -> Tensor | None:
            seen = wrap_like(g, spec.layout.dual(), spec.transport)
            got = hook(seen)
            if got is None:
                return None
            if not isinstance(got, DTensor):
                raise LayoutError("a hook on a DTensor must return a DTensor or None.")
            dual = spec.layout.dual()
            return place(got, dual.dims, dual.partial, dual.mesh)

        return self._local.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call ``hook`` with this leaf after its gradient has been accumulated, and reduced."""
        leaf = leaf_of(self._local)
        if leaf is None:
            return self._local.register_post_accumulate_grad_hook(lambda _: hook(self))
        handle = torch.utils.hooks.RemovableHandle(leaf.hooks)
        leaf.hooks[handle.id] = lambda: hook(self)
        return handle

    def retain_grad(self) -> None:
        """Keep the gradient of this non-leaf; it has the dual layout."""
        self._local.retain_grad()


_CROSSINGS: dict[str, Callable[..., Any]] = {}


_NESTED = frozenset(
    (list, tuple, slice, torch.SymFloat)
)  # what cannot be part of a key as it is
GETITEM = torch.Tensor.__getitem__
_IS_COMPLEX = torch.is_complex


def one_tensor_key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """The key of a call on one tensor, its first argument, and flat plain arguments; None if it is no such call.

    All of it is C: the types tell 1, 1.0 and True apart, which hash alike.
    """
    kinds = tuple(map(type, args))
    if (
        not kinds
        or kinds[0] is not DTensor
        or kinds.count(DTensor) != 1
        or not _NESTED.isdisjoint(kinds)
    ):
        return None
    if not kwargs:
        if float in kinds and func in LIFTED:
            return None
        return func, args[0]._spec, kinds, args[1:]
    values = tuple(kwargs.values())
    more = tuple(map(type, values))
    if (
        DTensor in more
        or not _NESTED.isdisjoint(more)
        or ((float in kinds or float in more) and func in LIFTED)
    ):
        return None
    return func, args[0]._spec, kinds, args[1:], tuple(kwargs), more, values


def _many_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rest of the hot path: several tensors, lists, slices, numbers that are passed at run time."""
    key: list[Any] = [func]
    local_args: list[Any] = []
    first: Any = None
    for a in args:
        kind = type(a)
        if kind is DTensor:
            if first is None:
                first = a
            key.append(a._spec)
            local_args.append(a._local)
        elif kind is list or (kind is tuple and a and isinstance(a[0], Tensor)):
            first = flatten_list(a, key, local_args, first)
        elif kind is slice or kind is tuple:
            key.append(plain_key(a))
            local_args.append(a)
        else:
            key.append(kind)
            if kind is not float or func not in LIFTED:
                key.append(a)
            local_args.append(a)
    if first is not None:
        local_kwargs = flatten_kwargs(func, kwargs, key) if kwargs else kwargs
        try:
            program = first._spec.fast.get(tuple(key))
        except TypeError:  # an argument that cannot be hashed
            program = None
        if program is not None:
            rest = program.rest
            if rest is not None:
                return _finish(program, program.target(first._local, *rest), first)
            if program.arg_movers is not None:
                local_args = move_args(program, *local_args)
            return _finish(program, program.target(*local_args, **local_kwargs), first)
    return _SLOW[0](func, args, kwargs)


def flatten_kwargs(func: Any, kwargs: dict[str, Any], key: list[Any]) -> dict[str, Any]:
    """Add keyword arguments to the key; returns them with local tensors."""
    kinds = tuple(map(type, kwargs.values()))
    lifted = float in kinds and func in LIFTED
    if DTensor not in kinds and not lifted and _NESTED.isdisjoint(kinds):
        key += (tuple(kwargs), kinds, tuple(kwargs.values()))
        return kwargs
    local_kwargs = kwargs.copy()
    for name, a in kwargs.items():
        if type(a) is DTensor:
            key.append(a._spec)
            local_kwargs[name] = a._local
        else:
            key.append(None if lifted and type(a) is float else a)
    key += (tuple(kwargs), kinds)
    return local_kwargs


def flatten_list(items: Any, key: list[Any], local_args: list[Any], first: Any) -> Any:
    """Add a list argument to the key and the local arguments."""
    key.append(len(items) if type(items) is list else ~len(items))
    taken: list[Any] = []
    for x in items:
        if type(x) is DTensor:
            if first is None:
                first = x
            key.append(x._spec)
            taken.append(x._local)
        else:
            key.append(type(x))
            key.append(x)
            taken.append(x)
    local_args.append(taken if type(items) is list else tuple(taken))
    return first


def _finish(program: Any, out: Any, a: DTensor) -> Any:
    """Wrap the result of a simple program."""
    spec = program.out
    if spec is None:  # rare: written into, the operand itself, or several results
        return a if program.inplace or out is a._local else program.wrap_many(out)
    if out.dtype is not spec.dtype:  # autocast
        return wrap_like(out, spec.layout, spec.transport)
    if spec.plain:
        r = make_wrapper(DTensor, spec.shape, None, None, None, spec.dtype)
    else:
        r = make_wrapper(
            DTensor, spec.shape, spec.stride, None, None, spec.dtype, torch.strided, out.device
        )
    if program.dense and not out.is_contiguous():
        out = out.contiguous()
    r._local, r._spec = out, spec
    return r


def wrap(local: Tensor, spec: Spec) -> DTensor:
    """A DTensor of a local piece."""
    r = make_wrapper(
        DTensor, spec.shape, spec.stride, None, None, spec.dtype, torch.strided, local.device
    )
    r._local, r._spec = local, spec
    return r


def wrap_like(local: Tensor, layout: Layout, transport: Transport) -> DTensor:
    """A DTensor of a local piece whose dtype and stride order may differ from the layout's."""
    if local.dtype == layout.dtype and layout.is_contiguous and local.is_contiguous():
        return wrap(local, spec_of(layout, transport))
    if local.dtype != layout.dtype:
        layout = layout.with_dtype(local.dtype)
    if 0 in layout.stride:  # an expanded dim: its gradient is dense
        layout = Layout.of(layout.mesh, layout, layout.shape, None, layout.dtype)
    return wrap(in_order(local, layout.stride), spec_of(layout, transport))


def place(x: DTensor, dims: Any, partial: Any, mesh: Mesh) -> Tensor:
    """The local piece of ``x`` in another placement on ``mesh``; differentiable."""
    layout = x._spec.layout if x._spec.layout.mesh is mesh else x._spec.layout.on(mesh)
    return mover(layout, layout.with_placement(dims, partial), x._spec.transport)(x._local)


def _leaf_grad(leaf: Leaf) -> Any:
    if leaf.shown is not None:
        return leaf.shown
    transport = leaf.spec.transport
    own, dual = leaf.spec.layout, leaf.dual
    if leaf.pending is None:
        if leaf.grad is None:
            return None
        leaf.shown = wrap_like(leaf.grad, own, transport)
        leaf.grad = leaf.shown._local  # what is written to it must count
    else:
        if (
            leaf.grad is not None
        ):  # reduced earlier, and more since: from now on a pending sum of both
            leaf.pending = mover(own, dual, transport)(leaf.grad) + leaf.pending
        leaf.shown = wrap_like(leaf.pending, dual, transport)
        leaf.pending, leaf.grad = leaf.shown._local, None
    return leaf.shown


add_foreach_type(DTensor)
