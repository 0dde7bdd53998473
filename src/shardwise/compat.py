"""The only file that touches torch's private names; each is here with the reason."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# What is private has no stubs. Modules that cost time at import, or are not always there, are imported late.
# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import functools
import logging
import sys
import types
from typing import Any
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Functions of torch.nn.functional that are built in C++ arrive in __torch_function__ under these.
NN_BUILTINS: Any = torch._C._nn
LINALG_BUILTINS: Any = torch._C._linalg
FFT_BUILTINS: Any = torch._C._fft
SPECIAL_BUILTINS: Any = torch._C._special

# Samplers of torch.distributions that have no public name.
GAMMA_BUILTINS: Any = (torch._standard_gamma, torch._sample_dirichlet)

# A tensor object with metadata and no data, the floor of a wrapper. By position (size, strides, offset, memory
# format, dtype, torch.layout, device) it costs a fifth less than by name.
make_wrapper: Any = torch.Tensor._make_wrapper_subclass

# Runs a call on a wrapper as if it were a plain tensor (for metadata that C++ knows).
DisableTorchFunction: Any = torch._C.DisableTorchFunctionSubclass
# The same, and with torch function modes off too.
Quiet: Any = torch._C.DisableTorchFunction

TensorBase: Any = torch._C.TensorBase

is_grad_enabled = torch.is_grad_enabled
is_autocast_enabled: Any = torch._C._is_any_autocast_enabled
autocast_dtype: Any = torch.get_autocast_dtype
functorch_active: Any = torch._C._functorch.peek_interpreter_stack
current_graph_task: Any = torch._C._current_graph_task_id
current_autograd_node: Any = torch._C._current_autograd_node
# Many tensors as one flat buffer and back, in C++.
flatten_dense: Any = torch._C._nn.flatten_dense_tensors
unflatten_dense: Any = torch._C._nn.unflatten_dense_tensors
# Frames of this code on the stack are calls of modules.
module_call_code: Any = torch.nn.Module._call_impl.__code__
# What torch.no_grad does, without its four frames, for what every step does once.
set_grad_enabled: Any = torch._C._set_grad_enabled
run_backward: Any = torch.autograd.graph._engine_run_backward
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback


def kernel_flags() -> tuple[Any, ...]:
    """Process or thread flags that decide which kernel runs, and so what a traced program holds."""
    return tuple([flag() for flag in _KERNEL_FLAGS])


# What torch.are_deterministic_algorithms_enabled() and its like call.
_KERNEL_FLAGS: tuple[Callable[[], Any], ...] = (
    torch._C._get_deterministic_algorithms,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C.get_default_dtype,
)


# Calls of torch.optim and torch.amp on lists of tensors.
FOREACH: dict[str, Any] = {
    name.removeprefix("_foreach_"): getattr(torch, name)
    for name in dir(torch)
    if name.startswith("_foreach_")
}
FUSED_STEPS: tuple[Any, ...] = (
    torch._fused_adam_,
    torch._fused_adamw_,
    torch._fused_sgd_,
    torch._fused_adagrad_,
)
unscale_and_check: Any = torch._amp_foreach_non_finite_check_and_unscale_


def add_foreach_type(cls: type) -> None:
    """Let torch.optim choose its foreach and fused forms for parameters of our class."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        types = module._foreach_supported_types
        if cls not in types:
            types.append(cls)


def fake_mode(*, shapes: bool = False) -> Any:
    """A new FakeTensorMode: real kernel choice, no data. With ``shapes`` it can be traced by inductor."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    FakeTensor.__dlpack__ = _no_memory  # pyright: ignore[reportAttributeAccessIssue]
    if not shapes:
        return FakeTensorMode()
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def _no_memory(x: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of a capsule with the address 0, which its reader would read."""
    raise RuntimeError("a fake tensor has no values for numpy or another library to read")


def is_fake(x: object) -> bool:
    """Whether a tensor is a fake of a trace."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def custom_overload(op: object) -> Any:
    """The dispatcher's overload behind what ``torch.library.custom_op`` returns; None for anything else."""
    return getattr(op, "_opoverload", None)


def is_custom_op(func: object) -> bool:
    """Whether a callable is an op of the dispatcher that is not torch's own."""
    name = getattr(func, "_qualified_op_name", None) or getattr(func, "_name", "")
    return isinstance(name, str) and "::" in name and not name.startswith(("aten::", "prims::"))


def without_modes() -> Any:
    """Take the user's dispatch modes (counters, loggers) off while a call is compiled."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def untraceable() -> tuple[type[BaseException], ...]:
    """What tracing raises for calls whose result depends on data, or that have no fake kernel."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        NotImplementedError,
    )


# Batch norm with its statistics written in place; the schema says so, the version counters do not.
batch_norm_legit: Any = torch._native_batch_norm_legit


def on_input_mask(handler: Any) -> None:
    """Run ``handler(original, input, **kwargs)`` where ``torch.masked`` reads a mask: it looks layouts up in a set."""
    module = torch.masked._ops
    module._input_mask = functools.partial(handler, module._input_mask)


# Custom autograd Functions: their metaclass, and the ``apply`` of the C++ base (called with the class).
FUNCTION_KIND: Any = type(torch.autograd.Function)
native_apply: Any = torch._C._FunctionBase.__dict__["apply"]


def on_apply(handler: Any) -> None:
    """Run ``handler(cls, *args)`` at ``apply`` of every custom Function, also where it was bound before."""
    torch.autograd.function._SingleLevelFunction.apply = classmethod(handler)


def sets_up_context(function: Any) -> bool:
    """Whether a custom Function has a ``setup_context`` of its own (its forward then takes no ctx)."""
    return (
        function.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context
    )


def backward_hook_core(cls: Any, replacement: Any = None) -> Any:
    """The method of torch's ``BackwardHook`` that puts its node into the graph; or replace it."""
    if replacement is not None:
        cls._apply_on_tensors = replacement
    return cls._apply_on_tensors


# Asked by Module.to and its kind: may `p.data = q` take the place of making a new parameter?
has_compatible_shallow_copy_type: Any = torch._has_compatible_shallow_copy_type


def on_load(wrapped: Any) -> None:
    """Let ``wrapped(original, module, state_dict, prefix, metadata, ...)`` load each module's own values."""
    original = torch.nn.Module._load_from_state_dict

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped(original, self, *args, **kwargs)

    torch.nn.Module._load_from_state_dict = load


def on_compare(convert: Any) -> None:
    """Let ``torch.testing.assert_close`` see ``convert(tensor)`` in place of each tensor."""
    pair = torch.testing._comparison.TensorLikePair
    original = pair._to_tensor
    pair._to_tensor = lambda self, tensor_like: original(self, convert(tensor_like))


def hide_from_dynamo(package: str, *deep: Any) -> None:
    """Run the functions of a package's loaded modules as they are under ``torch.compile``, at no cost per call.

    Args:
        package: Its name.
        *deep: See `break_graph`.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    shallow = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    members = vars(value).values() if isinstance(value, type) else (value,)
                    for code in _codes(members):
                        _run_as(code, shallow)
    for function in deep:
        break_graph(function)


def break_graph(function: Any) -> Any:
    """The function, at whose calls a graph of ``torch.compile`` breaks, and below which nothing is compiled either."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    function._torchdynamo_disable = True
    _run_as(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def _run_as(code: Any, strategy: Any) -> None:
    from torch._C._dynamo.eval_frame import set_code_exec_strategy

    set_code_exec_strategy(code, strategy)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _run_as(inner, strategy)


def _codes(members: Any) -> Any:
    for member in members:
        for function in (
            member,
            *(
                getattr(member, name, None)
                for name in ("__func__", "fget", "fset", "__wrapped__")
            ),
        ):
            if isinstance(function, types.FunctionType):
                yield function.__code__


# Where forward-mode derivatives begin and end.
FORWARD_MODE: tuple[Any, ...] = (torch._VF._make_dual, torch._VF._unpack_dual)


def dual_level_open() -> bool:
    """Whether the process is in a level of forward-mode derivatives; there is one for all threads."""
    return torch.autograd.forward_ad._current_level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Whether a plain tensor carries a forward-mode derivative."""
    level = torch.autograd.forward_ad._current_level
    if level < 0:
        return False
    with DisableTorchFunction():
        return torch._VF._unpack_dual(x, level=level).tangent is not None


# What ``torch.meshgrid`` calls for a list.
MESHGRID_OF_LIST: Any = torch._VF.meshgrid

jit_tracing: Any = torch._C._get_tracing_state


def on_jit_trace(check: Any) -> None:
    """Let ``check(function or module, flat inputs)`` look before ``torch.jit.trace`` records."""
    jit, leaves = torch.jit._trace, torch.utils._pytree.tree_leaves
    trace, trace_module = jit._trace_impl, jit.trace_module

    def checked(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        check(func, leaves((example_inputs, kwargs.get("example_kwarg_inputs"))))
        return trace(func, example_inputs, *args, **kwargs)

    def checked_module(mod: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        check(mod, leaves(inputs))
        return trace_module(mod, inputs, *args, **kwargs)

    jit._trace_impl = checked
    jit.trace_module = torch.jit.trace_module = checked_module


def on_make_fx(check: Any) -> None:
    """Let ``check(function or module, flat inputs)`` look before ``make_fx`` records."""
    from torch.fx.experimental.proxy_tensor import _MakefxTracer

    leaves, trace = torch.utils._pytree.tree_leaves, _MakefxTracer.trace

    def checked(self: Any, f: Any, *args: Any) -> Any:
        check(f, leaves(args))
        return trace(self, f, *args)

    _MakefxTracer.trace = checked


# Whether a tensor belongs to a running torch.func transform.
is_functorch_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor

_INCLUDED, _EXCLUDED = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)
_PYTHON = torch._C.DispatchKey.Python
_MODES = torch._C.DispatchKeySet(_PYTHON) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)


class Door:
    """Around a call that came through the dispatcher, below autograd: as if it had come from Python.

    Autograd then records the local calls, and transforms that the dispatcher is working on stand aside. Dispatch
    modes go on seeing the calls: one of them may be recording a step.
    """

    __slots__ = ("_keys", "_stack")

    def __enter__(self) -> None:
        stack, functorch = [], torch._C._functorch
        while functorch.peek_interpreter_stack() is not None:
            stack.append(functorch.pop_dynamic_layer_stack())
        self._stack: list[Any] = stack
        self._keys: Any = None
        if not torch.is_inference_mode_enabled():
            watched = torch._C._dispatch_tls_local_include_set().has(_PYTHON)
            included = _INCLUDED | _MODES if watched else _INCLUDED
            self._keys = torch._C._ForceDispatchKeyGuard(included, _EXCLUDED)
            self._keys.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._keys is not None:
            self._keys.__exit__(*error)
        while self._stack:
            torch._C._functorch.push_dynamic_layer_stack(self._stack.pop())


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` without torch's Python layer, which binds a signature at every call (10 us)."""
    apply = super(torch.autograd.function._SingleLevelFunction, function).apply  # pyright: ignore

    def direct(*args: Any) -> Any:
        if functorch_active() is None:
            return apply(*args)
        with Door():  # ours is for the ranks; a transform that happens to run has no part in it
            return apply(*args)

    return direct


@contextmanager
def named_by_members() -> Any:
    """Inside, a group that only its members make is named by their ranks.

    torch's name counts the groups that a rank has made before, which differ between ranks: they would wait for each
    other under different names, forever.
    """
    from torch.distributed import distributed_c10d

    original = distributed_c10d._hash_ranks_to_str

    def name(ranks: Any) -> str:
        own = "shardwise:" + "_".join(map(str, ranks)) + ":"
        made = (
            distributed_c10d._world.pg_names.values()
        )  # the members have made this one equally often
        return own + str(sum(str(other).startswith(own) for other in made))

    distributed_c10d._hash_ranks_to_str = name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


def on_transform(begin: Any, end: Any) -> None:
    """Call ``begin()`` and ``end()`` around what a ``torch.func`` transform runs."""

    def watched(original: Any) -> Any:
        @contextmanager
        @functools.wraps(original)
        def nested(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                with original(*args, **kwargs) as level:
                    yield level
            finally:
                end()

        return nested

    transforms, vmap = torch._functorch.eager_transforms, torch._functorch.vmap
    for module, name in (
        (transforms, "grad_increment_nesting"),
        (transforms, "jvp_increment_nesting"),
        (vmap, "vmap_increment_nesting"),
    ):
        setattr(module, name, watched(getattr(module, name)))


def left_to_outer_backward(callback: Any) -> bool:
    """At the end of a backward: if it runs inside another one (a reentrant checkpoint), call back at that one's end.

    The node of the outer one that is being run is the only thing there that can be reached from here.
    """
    node = current_autograd_node()
    if node is None:
        return False

    def after(*_: Any) -> None:
        handle.remove()
        queue_callback(callback)

    handle = node.register_hook(after)
    return True


def on_undefined_grad(local_of: Any, like: Any) -> None:
    """Let the node with which ``gradcheck`` withholds a gradient work on the local of a tensor, if it has one."""
    native = torch._C._functions.UndefinedGrad

    def make() -> Any:
        def withhold(x: torch.Tensor) -> torch.Tensor:
            local = local_of(x)
            return native()(x) if local is None else like(x, native()(local))

        return withhold

    torch._C._functions.UndefinedGrad = make


def on_data_set(check: Any) -> None:
    """Call ``check(x, value)`` before ``x.data = value`` of a tensor whose class has no ``data`` of its own.

    Torch asks nobody, and copies the C++ side of the value: that of a tensor without memory makes the next read crash.
    Reading stays in C.
    """
    native = TensorBase.data

    def put(x: torch.Tensor, value: Any) -> None:
        check(x, value)
        native.__set__(x, value)

    torch.Tensor.data = property(native.__get__, put)


# Many copies in one call.
copy_all: Any = torch._foreach_copy_


def storage_users(x: torch.Tensor) -> int:
    """How many tensors share the memory of ``x``, itself included."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def direct_op(overload: Any) -> Any:
    """An ATen overload without its Python layer (1.5 us)."""
    return overload._op


def default_store() -> Any:
    """The key-value store that the ranks of the default process group met in."""
    return torch.distributed.distributed_c10d._get_default_store()


@functools.cache
def checkpoint_types() -> Any:
    """The classes of ``torch.distributed.checkpoint``'s plans and metadata. Importing them takes over a second."""
    from torch.distributed.checkpoint import filesystem, metadata, planner

    names = types.SimpleNamespace(**vars(metadata))
    names.Size, names.StorageInfo = torch.Size, filesystem._StorageInfo
    names.WriteItem, names.WriteItemType = planner.WriteItem, planner.WriteItemType
    names.TensorWriteData = planner.TensorWriteData
    return names


def called_by_stager(depth: int) -> bool:
    """Whether the caller's caller (``depth`` 1) copies a state dict for ``async_save``.

    It asks a tensor for its address, to tell a wrapper (0) from what has memory of its own.
    """
    caller = sys._getframe(depth + 1).f_globals.get("__name__")
    return caller == "torch.distributed.checkpoint._state_dict_stager"


def tensor_builders(dtype: Any) -> tuple[Any, Any, int, tuple[Any, ...]]:
    """How ``torch.save`` pickles a tensor of a dtype: function, storage class, units per element, more arguments."""
    from torch import _utils

    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    if name is not None and hasattr(torch, name):
        return _utils._rebuild_tensor_v2, getattr(torch, name), 1, ()
    return _utils._rebuild_tensor_v3, torch.UntypedStorage, dtype.itemsize, (dtype,)


def storage_id(x: Any) -> int:
    """What two tensors have in common that share their memory, empty ones included."""
    return x.untyped_storage()._cdata


def laid_over(view: Any, base: Any, other: Any) -> Any:
    """A view of the memory of ``base`` as a view of that of ``other``, which is like ``base``; all are fakes.

    Cost: some 30 us.
    """
    size = view.element_size()
    by = (
        other.storage_offset() * other.element_size()
        - base.storage_offset() * base.element_size()
    )
    start, rest = divmod(view.storage_offset() * size + by, size)
    assert not rest, "whoever moves what is seen in another dtype keeps it aligned"
    with without_modes(), view.fake_mode, torch.no_grad():
        made = other.conj() if other.is_conj() else other
        made = torch._neg_view(made) if made.is_neg() else made
        if other.dtype != view.dtype:
            many = other.untyped_storage().nbytes() // size * size // other.element_size()
            made = made.as_strided((many,), (1,), 0).view(view.dtype)
        made = made.as_strided(view.shape, view.stride(), start)
        if view.is_conj():
            made = made.conj()
        return torch._neg_view(made) if view.is_neg() else made


# Calls inside skip autograd's kernels: no graph, no version counters, no view tracking.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd


def alike_check(tensors: Any) -> Any:
    """What says whether tensors are like these in type, dispatch keys, dtype, device, requires_grad, shape and strides.

    Dynamo's guard: some 50 ns a tensor, where Python takes 1 us. None if one of them has no strides.
    """
    if not tensors:
        return lambda: True
    if any(x.layout != torch.strided for x in tensors):
        return None
    return torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    ).check


def on_rng_state(get: Any, put: Any) -> None:
    """Let ``get(original)`` and ``put(original, state)`` answer for torch.get_rng_state and set_rng_state."""
    read, write = torch.random.get_rng_state, torch.random.set_rng_state

    def reading() -> Any:
        return get(read)

    def writing(new_state: Any) -> None:
        put(write, new_state)

    torch.random.get_rng_state = torch.get_rng_state = functools.wraps(read)(reading)
    torch.random.set_rng_state = torch.set_rng_state = functools.wraps(write)(writing)


# Trees of lists, tuples, dicts and what users have registered.
tree_flatten: Any = torch.utils._pytree.tree_flatten
tree_unflatten: Any = torch.utils._pytree.tree_unflatten
tree_map_only: Any = torch.utils._pytree.tree_map_only


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Without the traceback that torch logs when a call on fake tensors raises."""
    log, nothing = logging.getLogger("torch._subclasses.fake_tensor"), lambda _: False
    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)


def compile_flat(
    graph: Any, inputs: list[Any], mode: Any, *, all_cpp: bool = False
) -> Callable[[list[Any]], Any]:
    """A graph of ATen calls on flat tensors, compiled by inductor; it writes in place what the graph does.

    Args:
        graph: The graph; it is used up.
        inputs: Fakes like the tensors that a run gets.
        mode: Their mode, of `fake_mode(shapes=True)`.
        all_cpp: Whether kernels are called from C++, not from Python: cheaper for each of them, dearer for each input.

    Returns:
        A function of the list of inputs, which it empties. Where nothing of autograd's is left to be done after a run,
        it is what inductor made: the wrapper around it takes as long as a small graph.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what it imports
        from torch._functorch import config as aot_config
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: list[tuple[int, Any]] = []

    def keep(gm: Any, examples: Any, **how: Any) -> Any:
        inner.append((len(examples), compile_fx_inner(gm, examples, **how)))
        return inner[-1][1]

    gives = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])
    context = TracingContext(mode)  # with one, inductor keeps what it compiled on disk
    with (
        torch.no_grad(),
        # the key of the step holds shapes and strides
        config.patch(size_asserts=False, cpp_wrapper=all_cpp),
        aot_config.patch(
            enable_autograd_cache=False
        ),  # it keeps the wrapper, and hides what is in it
        tracing(context),
    ):
        wrapped: Any = compile_fx(graph, inputs, inner_compile=keep)
    meta = context.fw_metadata
    plain = (
        len(inner) == 1
        and inner[0][0] == len(inputs)
        and meta is not None
        and meta.num_outputs == gives
        and meta.num_mutated_inp_runtime_indices == 0
        and meta.num_intermediate_bases == 0
        and not meta.tokens
        and not meta.is_rng_op_functionalized
    )
    if not plain:
        return lambda tensors: wrapped(*tensors)
    made = inner[0][1]
    return getattr(made, "current_callable", None) or made


def global_hooks() -> tuple[Any, ...]:
    """The tables of hooks that all modules and all optimizers have."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    return (
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    )
