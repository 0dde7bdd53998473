"""Calls about metadata, or about the object rather than its value."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import current
from shardwise.compat import (
    DisableTorchFunction,
    has_compatible_shallow_copy_type,
    on_compare,
    on_data_set,
)
from shardwise.errors import GradientError, LayoutError, UnsupportedError
from shardwise.layout.boxes import restride
from shardwise.layout.cut import Cut
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.spec import spec_of
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.overrides import OVERRIDES, override

_T: Any = torch.Tensor

# The wrapper's C++ side knows these: shape, stride and dtype are global there.
_FROM_WRAPPER = [
    _T.stride, _T.is_contiguous, _T.storage_offset, _T.element_size, _T.nelement, _T.ndimension, _T.numel, _T.dim,
    _T.size, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device, _T.is_inference,
    _T.is_same_size, torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_same_size, torch.is_inference, _T.is_coalesced, _T.dense_dim, _T.sparse_dim, _T.dim_order,
]  # fmt: skip
_GETTERS = (
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_nested",
    "itemsize",
    "nbytes",
    "names",
    "name",
    "imag_",
)


@override(_T.is_conj, _T.is_neg, torch.is_conj, torch.is_neg)
def _lazy_bit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Only the local is a view with a conjugate or negative bit."""
    return func((args[0] if args else kwargs["input"])._local)


# The wrapper's device may be stale: these are read from the local.
_DEVICE_GETTERS = (
    "is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "is_vulkan", "is_ipu", "is_maia", "is_mtia",
)  # fmt: skip


def _from_wrapper(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunction():
        return func(*args, **kwargs)


for _f in _FROM_WRAPPER:
    OVERRIDES[_f] = _from_wrapper
for _name in _GETTERS:
    _descriptor = getattr(_T, _name, None)
    if _descriptor is not None and hasattr(_descriptor, "__get__"):
        OVERRIDES[_descriptor.__get__] = _from_wrapper


def _from_local(name: str) -> Any:
    def get(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(args[0]._local, name)

    return get


for _name in _DEVICE_GETTERS:
    _descriptor = getattr(_T, _name, None)
    if _descriptor is not None and hasattr(_descriptor, "__get__"):
        OVERRIDES[_descriptor.__get__] = _from_local(_name)


@override(torch.is_complex, _T.is_complex)
def _is_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x: Any = (
        args[0] if args else kwargs["input"]
    )  # the optimizers ask every parameter at every step
    return x._spec.dtype.is_complex


def _view_getter(method: Any) -> Any:
    def get(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method(args[0])

    return get


OVERRIDES[_T.T.__get__] = _view_getter(lambda x: x.permute(*reversed(range(x.ndim))))
OVERRIDES[_T.mT.__get__] = _view_getter(lambda x: x.transpose(-2, -1))
OVERRIDES[_T.H.__get__] = _view_getter(
    lambda x: x.transpose(-2, -1).conj() if x.ndim else x.conj()
)
OVERRIDES[_T.mH.__get__] = _view_getter(lambda x: x.transpose(-2, -1).conj())
OVERRIDES[_T.real.__get__] = _view_getter(lambda x: torch.real(x) if x.is_complex() else x)
OVERRIDES[_T.imag.__get__] = _view_getter(lambda x: torch.imag(x))


# Held by every DTensor and no part of what a user put on it.
_OWN = ("_local", "_spec", "_shown_grad", "_view_of", "_asked_for")


@override(_T.__deepcopy__)
def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, memo = args
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise GradientError(
            "only tensors that the user created support deepcopy; this one is the result of a call.",
            tries=["copy.deepcopy(x.detach())"],
        )
    out = wrap(
        x._local.detach().clone(memory_format=torch.preserve_format), x._spec.guards or x._spec
    )
    memo[id(x)] = out
    if x.requires_grad:
        out.requires_grad_()
    if (
        not isinstance(x, torch.nn.Parameter) and (g := x.grad) is not None
    ):  # as torch: not of parameters
        out.grad = copy.deepcopy(g, memo)
    for name, value in x.__dict__.items():
        if name not in _OWN:
            vars(out)[name] = copy.deepcopy(value, memo)
    return out


def rebuild(
    local: Tensor,
    mesh: tuple[Any, ...],
    placed: tuple[Any, ...],
    tensor: tuple[Any, ...],
    rank: int,
    requires_grad: bool,
    state: dict[str, Any],
) -> DTensor:
    """What unpickling calls: each rank reads back the piece that it wrote.

    Raises:
        LayoutError: Another rank wrote this piece.
    """
    layout, transport = Layout(Mesh.of(*mesh), *placed, *tensor), current()
    if transport.rank != rank and not layout.is_replicated:
        raise LayoutError(
            f"this is rank {rank}'s piece of {layout}, read on rank {transport.rank}.",
            tries=[
                "let every rank read what it wrote",
                "save x.full_tensor()",
                "shardwise.checkpoint: any ranks can read it",
            ],
        )
    out = wrap(local, spec_of(layout, transport))
    if requires_grad:
        out.requires_grad_()
    vars(out).update(state)
    return out


torch.serialization.add_safe_globals([rebuild, Cut])  # for torch.load(weights_only=True)


@override(_T.__reduce_ex__)
def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    state = {k: v for k, v in x.__dict__.items() if k not in _OWN}
    layout, mesh = x._spec.layout, x._spec.layout.mesh
    return rebuild, (
        x._local.detach(),
        (mesh.device_type, mesh.shape, mesh.ranks, mesh.names),
        (layout.dims, layout.partial),
        (layout.shape, layout.stride, layout.dtype),
        x._spec.transport.rank,
        x.requires_grad,
        state,
    )


@override(_T.module_load)
def _module_load(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``load_state_dict`` puts in place of ``self``; a plain value is given the layout of ``self``."""
    x, other = args
    if not isinstance(x, DTensor):
        return (
            x.copy_(other.full_tensor()).detach()
            if not kwargs.get("assign")
            else other.detach()
        )
    if kwargs.get("assign"):
        if isinstance(other, DTensor):
            return other.detach()
        return like(x, other)
    return x.copy_(other).detach()


def like(x: DTensor, value: Tensor) -> DTensor:
    """A plain value that all ranks have, laid out like ``x``."""
    whole = x._spec.layout.replicated().with_dtype(value.dtype)
    if value.shape != x.shape:
        raise LayoutError(
            f"a value of shape {tuple(value.shape)} for a DTensor of shape {tuple(x.shape)}."
        )
    value = value.detach().to(x._spec.device_type)
    have = wrap(
        value,
        spec_of(
            whole.with_tensor(whole.shape, restride(whole.shape, value.stride()), value.dtype),
            x._spec.transport,
        ),
    )
    return have.redistribute(placements=x._spec.layout)


_set_ops = torch.ops.aten.set_  # it comes through the dispatcher


@override(_T.set_, *(getattr(_set_ops, overload) for overload in _set_ops.overloads()))
def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.set_(y)``: x becomes another name of y's memory where the layouts agree, and keeps its own where not."""
    x, y = (*args, *kwargs.values())[:2] if len(args) + len(kwargs) > 1 else (args[0], None)
    if not isinstance(x, DTensor) or not isinstance(y, DTensor) or len(args) + len(kwargs) > 2:
        raise UnsupportedError(
            "set_ on a DTensor takes a DTensor; storages are in pieces.",
            tries=["x.set_(y)", "x.data = y"],
        )
    x.data = y
    return x


@override(has_compatible_shallow_copy_type)
def _can_set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``x.data = y`` would do; ``Module.to`` asks."""
    x, y = args
    return isinstance(x, DTensor) and isinstance(y, DTensor) and func(x._local, y._local)


def _check_data(x: Tensor, value: Any) -> None:
    """``plain.data = dtensor``: the object would stay plain, over memory that is not there."""
    if type(value) is DTensor and type(x) is not DTensor:
        raise LayoutError(
            "the data of a plain tensor cannot be a DTensor.",
            tries=[
                "module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, placements))",
                "distribute_module(module, mesh, partition_fn): parameters keep their identity",
            ],
        )


on_data_set(_check_data)


@override(_T.detach_)
def _detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0]._local.detach_()
    return args[0]


@override(_T.untyped_storage, _T.storage, _T._typed_storage)
def _storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x: Any = args[0]
    if not x._spec.layout.is_replicated:
        raise UnsupportedError(
            f"the storage of {x._spec.layout} is in pieces.",
            tries=["x.to_local() for this rank's piece", "x.full_tensor() for the whole value"],
        )
    return getattr(x._local, func.__name__)()


@override(_T.apply_, _T.map_, _T.map2_, _T.share_memory_)
def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        f"{func.__name__} works on memory, which a DTensor has in pieces.",
        tries=["x.to_local()"],
    )


@override(_T.is_shared)
def _is_shared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0]._local.is_shared()


@override(_T.is_set_to)
def _is_set_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0]._local.is_set_to(args[1]._local)


@override(_T.cpu, _T.cuda)
def _to_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, want = args[0], func.__name__
    if x.device.type == want:
        return x
    raise UnsupportedError(
        f"the device of a DTensor is that of its mesh ({x.device.type}); redistribute to a {want} mesh"
    )


@override(_T.new_tensor)
def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._local.new_tensor(*args[1:], **kwargs)


def _array_wrap(
    x: DTensor, array: Any, context: Any = None, return_scalar: bool = False
) -> DTensor:
    """A numpy function was called on the whole value, on all ranks: its result is replicated."""
    value = torch.from_numpy(array.astype("uint8") if array.dtype == bool else array)
    layout = Layout.of(x.device_mesh, None, value.shape, value.stride(), value.dtype)
    return wrap(value, spec_of(layout, x._spec.transport))


DTensor.__array_wrap__ = _array_wrap  # pyright: ignore[reportAttributeAccessIssue]
on_compare(lambda t: t.full_tensor().detach() if isinstance(t, DTensor) else t)
