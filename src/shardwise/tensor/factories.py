"""New DTensors from nothing: ``zeros``, ``ones``, ``full``, ``empty``, ``rand``, ``randn``, ``arange``, ``eye``, ...

torch's signatures, with ``device_mesh`` and ``placements`` in place of ``device``. Each rank makes its own
piece only. With a pending placement the *value* is what the name says: ``ones(3, placements=[Partial()])``
adds up to ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from shardwise.comm.meshes import as_mesh
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.layout.placement import Replicate
from shardwise.program.spec import Spec
from shardwise.random import Draw
from shardwise.tensor.crossings import local_spec
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.explain import explained
from shardwise.tensor.likes import Make, filled, make_local
from shardwise.tensor.overrides import override
from shardwise.tensor.random import drawn, kept, settled
from shardwise.tensor.whole import write_into


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """``zeros(2, 3)`` or ``zeros((2, 3))``."""
    if len(size) == 1 and not isinstance(size[0], int) and hasattr(size[0], "__iter__"):
        size = tuple(size[0])
    shape = tuple(int(n) for n in size)
    if any(n < 0 for n in shape):
        raise LayoutError(f"a tensor cannot have the shape {shape}")
    return shape


def _spec(
    shape: tuple[int, ...], dtype: Any, layout: Any, device_mesh: Any, placements: Any
) -> Spec:
    if layout != torch.strided:
        raise UnsupportedError(f"a DTensor is strided; layout={layout} is not supported")
    return local_spec(
        as_mesh(device_mesh), placements, shape, dtype or torch.get_default_dtype()
    )


def _finish(local: Tensor, spec: Spec, requires_grad: bool) -> DTensor:
    out = wrap(kept(local, spec), spec)
    return out.requires_grad_() if requires_grad else out


def _device(spec: Spec) -> torch.device:
    return torch.device(spec.device_type)


def _made(make: Make, spec: Spec, requires_grad: bool) -> DTensor:
    return _finish(make_local(make, spec, _device(spec)), spec, requires_grad)


@explained("shardwise.zeros", "size", "dtype", "device_mesh", "placements")
def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Zeros. O(local) memory.

    Args:
        *size: Global shape: ints, or one sequence of ints.
        requires_grad: Whether the result is a leaf that wants a gradient.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    return _made(
        torch.zeros, _spec(_shape(size), dtype, layout, device_mesh, placements), requires_grad
    )


@explained("shardwise.ones", "size", "dtype", "device_mesh", "placements")
def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Ones. O(local) memory.

    Args:
        *size: Global shape: ints, or one sequence of ints.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    return _made(
        torch.ones, _spec(_shape(size), dtype, layout, device_mesh, placements), requires_grad
    )


@explained("shardwise.empty", "size", "dtype", "device_mesh", "placements")
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Memory as it comes: replicas differ until written to. O(local) memory.

    Args:
        *size: Global shape: ints, or one sequence of ints.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    return _made(
        torch.empty, _spec(_shape(size), dtype, layout, device_mesh, placements), requires_grad
    )


@explained("shardwise.full", "size", "dtype", "device_mesh", "placements")
def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """A tensor full of one number. O(local) memory.

    Args:
        size: Global shape: a sequence of ints, or one int.
        fill_value: The number.
        dtype: None is that of the number, as in torch.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    value = fill_value.item() if isinstance(fill_value, Tensor) else fill_value
    dtype = dtype or torch.full((), value, device="meta").dtype
    return _made(
        filled(value),
        _spec(_shape((size,)), dtype, layout, device_mesh, placements),
        requires_grad,
    )


@explained("shardwise.rand", "size", "dtype", "device_mesh", "placements")
def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Any = None,
    generator: Generator | None = None,
) -> DTensor:
    """Uniform random numbers in [0, 1): the same on every mesh and layout, without communication.

    On a CPU mesh they are those of ``torch.rand`` after the same ``torch.manual_seed``, unless ``rng`` says
    otherwise.

    Args:
        *size: Global shape: ints, or one sequence of ints.
        requires_grad: Whether the result is a leaf that wants a gradient.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.
        generator: None is torch's default CPU generator.

    Raises:
        LayoutError: The placements do not fit.
        ShardError: The ranks' generators are out of step.
    """
    spec = _spec(_shape(size), dtype, layout, device_mesh, placements)
    return _finish(drawn(Draw("uniform"), spec, _device(spec), generator), spec, requires_grad)


@explained("shardwise.randn", "size", "dtype", "device_mesh", "placements")
def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Any = None,
    generator: Generator | None = None,
) -> DTensor:
    """Standard normal random numbers: the same on every mesh and layout, without communication.

    On a CPU mesh they are those of ``torch.randn`` after the same ``torch.manual_seed``, unless ``rng`` says
    otherwise.

    Args:
        *size: Global shape: ints, or one sequence of ints.
        requires_grad: Whether the result is a leaf that wants a gradient.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.
        generator: None is torch's default CPU generator.

    Raises:
        LayoutError: The placements do not fit.
        ShardError: The ranks' generators are out of step.
    """
    spec = _spec(_shape(size), dtype, layout, device_mesh, placements)
    return _finish(drawn(Draw("normal"), spec, _device(spec), generator), spec, requires_grad)


@explained("shardwise.randint", "bounds_and_size", "dtype", "device_mesh", "placements")
def randint(
    *bounds_and_size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
    generator: Generator | None = None,
    **named: Any,
) -> DTensor:
    """Random integers: ``randint(high, size)`` or ``randint(low, high, size)``.

    Args:
        *bounds_and_size: ``low`` (default 0), ``high`` (exclusive), and the global shape; also by name.
        dtype: None is int64.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.
        generator: None is torch's default CPU generator.
        **named: ``low``, ``high``, ``size``.

    Raises:
        LayoutError: The placements do not fit, or ``high`` or ``size`` is missing.
        ShardError: The ranks' generators are out of step.
    """
    given = list(bounds_and_size)
    size = named["size"] if "size" in named else given.pop() if given else None
    high = named["high"] if "high" in named else given.pop() if given else None
    low = named["low"] if "low" in named else given.pop() if given else 0
    if size is None or high is None or given or not set(named) <= {"low", "high", "size"}:
        raise LayoutError("randint takes (high, size) or (low, high, size)")
    spec = _spec(_shape((size,)), dtype or torch.int64, layout, device_mesh, placements)
    what = Draw("randint", (int(low), int(high)))
    return _finish(drawn(what, spec, _device(spec), generator), spec, requires_grad)


@explained("shardwise.randperm", "n", "dtype", "device_mesh", "placements")
def randperm(
    n: int,
    *,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
    generator: Generator | None = None,
) -> DTensor:
    """A random permutation of 0, ..., n - 1. O(n) time and memory on every rank.

    Args:
        n: How many.
        dtype: Dtype of the result.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.
        generator: None is torch's default CPU generator.

    Raises:
        LayoutError: The placements do not fit.
        ShardError: The ranks' generators are out of step.
    """
    spec = _spec((int(n),), dtype, layout, device_mesh, placements)
    return _finish(drawn(Draw("randperm"), spec, _device(spec), generator), spec, requires_grad)


@explained("shardwise.arange", "start", "dtype", "device_mesh", "placements")
def arange(
    start: Any = 0,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """``start, start + step, ...`` up to ``end``, exclusive; ``arange(end)`` starts at 0.

    Memory is O(local) where all numbers are whole; with fractions each rank makes all of it and keeps its
    piece, so that the roundings are torch's.

    Args:
        start: First number; the end, if it is the only argument.
        end: Where to stop.
        step: Difference of neighbours.
        dtype: None is int64, or the default dtype if a number is floating.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    if end is None:
        start, end = 0, start
    like = torch.arange(start, end, step, dtype=dtype, device="meta")
    spec = _spec(tuple(like.shape), like.dtype, layout, device_mesh, placements)
    offset, size, device = spec.offsets[0], spec.local_shape[0], _device(spec)
    if _is_whole(start, step, like):
        first = int(start) + offset * int(step)
        local = (
            torch.arange(size, dtype=torch.int64, device=device)
            .mul_(int(step))
            .add_(first)
            .to(like.dtype)
        )
    else:
        local = torch.arange(start, end, step, dtype=like.dtype, device=device)[
            offset : offset + size
        ].clone()
    return _finish(local, spec, requires_grad)


def _is_whole(start: Any, step: Any, like: Tensor) -> bool:
    """Whether all numbers are whole and exact in the dtype, whichever way they are computed."""
    if not (float(start).is_integer() and float(step).is_integer()):
        return False
    if not like.dtype.is_floating_point:
        return True
    limit = 1 / torch.finfo(like.dtype).eps
    return abs(start) + abs(step) * like.numel() <= limit


@explained("shardwise.linspace", "start", "dtype", "device_mesh", "placements")
def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """``steps`` numbers from ``start`` to ``end``, both inclusive; O(steps) memory while it is made.

    Args:
        start: First number.
        end: Last number.
        steps: How many.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    spec = _spec((int(steps),), dtype, layout, device_mesh, placements)
    whole = torch.linspace(start, end, steps, dtype=spec.dtype, device=_device(spec))
    return _finish(whole[spec.offsets[0] :][: spec.local_shape[0]].clone(), spec, requires_grad)


@explained("shardwise.eye", "n", "dtype", "device_mesh", "placements")
def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Any = None,
) -> DTensor:
    """Ones on the diagonal, zeros elsewhere. O(local) memory.

    Args:
        n: Rows.
        m: Columns; None is ``n``.
        dtype: None is torch's default dtype.
        layout: ``torch.strided``.
        requires_grad: Whether the result is a leaf that wants a gradient.
        device_mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        placements: Placements, spec or layout; None replicates.

    Raises:
        LayoutError: The placements do not fit.
    """
    shape = _shape((n, n if m is None else m))
    spec = _spec(shape, dtype, layout, device_mesh, placements)
    local = make_local(torch.zeros, spec, _device(spec))
    rows, columns = spec.offsets
    if -local.shape[0] < rows - columns < local.shape[1]:
        local.diagonal(rows - columns).fill_(1)
    return _finish(local, spec, requires_grad)


# ---- torch.zeros(..., out=x) -----------------------------------------------------------------------


def _into(factory: Callable[..., DTensor], names: tuple[str, ...]) -> Any:
    """``torch.eye(3, 4, out=x)``: made in the layout of ``x``, then written into it."""

    def make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if not isinstance(out, DTensor):
            plain = [a.item() if isinstance(a, DTensor) else a for a in args]
            value = func(
                *plain,
                **{k: v.item() if isinstance(v, DTensor) else v for k, v in kwargs.items()},
            )
            ends = [a for a in (*args, *kwargs.values()) if isinstance(a, DTensor)]
            if factory is not linspace or not ends:
                return value
            mesh: Any = ends[0].device_mesh  # the ends are tensors, not sizes: so is the result
            return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        given = {k: v for k, v in kwargs.items() if k in names or k == "generator"}
        if "size" in given and factory in (zeros, ones, empty, rand, randn):
            args = (given.pop("size"),)
        where: Any = {"dtype": out.dtype, "device_mesh": out.device_mesh}
        shape = (
            func(*args, **{**given, "device": "meta"}).shape
            if factory is not randperm
            else (args[0],)
        )
        if tuple(shape) != tuple(out.shape):
            raise LayoutError(f"out= has shape {tuple(out.shape)}, the result {tuple(shape)}")
        value = factory(*args, **given, **where, placements=settled(out.layout))
        return write_into(out, value)

    return make


for _func, _factory, _names in (
    (torch.zeros, zeros, ("size",)),
    (torch.ones, ones, ("size",)),
    (torch.empty, empty, ("size",)),
    (torch.full, full, ("size", "fill_value")),
    (torch.rand, rand, ("size",)),
    (torch.randn, randn, ("size",)),
    (torch.randint, randint, ("low", "high", "size")),
    (torch.randperm, randperm, ("n",)),
    (torch.arange, arange, ("start", "end", "step")),
    (torch.linspace, linspace, ("start", "end", "steps")),
    (torch.eye, eye, ("n", "m")),
):
    override(_func)(_into(_factory, _names))
