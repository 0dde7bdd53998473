"""Random draws on DTensors: the values that one device would have drawn, whatever the layout.

Every rank draws its own box of one random global tensor (``shardwise.random``); nothing is communicated.
What that asks for, and cannot see by itself, is checked here: the ranks' generators must be in step. They
are compared at the 1st, 2nd, 4th, 8th, ... draw on a mesh.

Calls whose draws depend on data (``multinomial``, ``poisson``, ...) run whole on every rank, in step.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import torch
from torch import Generator, Tensor
import torch.nn.functional as F

from shardwise.comm.execute import mover
from shardwise.comm.transport import Transport
from shardwise.compat import GAMMA_BUILTINS, current_graph_task
from shardwise.errors import LayoutError, ShardError
from shardwise.layout import boxes
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh, join
from shardwise.program.spec import Spec, spec_of
from shardwise.random import Draw, Like, draw, generator_fingerprint, stream_in_force
from shardwise.random.draw import draw_bernoulli
from shardwise.recording import recorder
from shardwise.tensor.absent import Absent
from shardwise.tensor.dispatch import Call, _check_plain, _operands, into_out
from shardwise.tensor.dtensor import DTensor, place, wrap
from shardwise.tensor.overrides import OVERRIDES, Handler
from shardwise.tensor.views import fresh
from shardwise.tensor.whole import run_whole, write_into
from shardwise.tensor.writes import write_to_copy

MAX_STREAMS = 16384
_T = torch.Tensor


# ---- ranks in step ----------------------------------------------------------------------------


def in_step(mesh: Mesh, transport: Transport, generator: Generator | None = None) -> None:
    """Compare the ranks' generators before a draw; a collective at the 1st, 2nd, 4th, ... draw on a mesh.

    Args:
        mesh: The mesh. A rank outside it takes no part.
        transport: This rank's transport.
        generator: What will be drawn from; None is torch's default CPU generator.

    Raises:
        ShardError: On all ranks, if their generators differ.
    """
    if len(mesh.ranks) == 1:
        return
    counts: dict[Mesh, int] = transport.state.setdefault("draws", {})
    count = counts[mesh] = counts.get(mesh, 0) + 1
    if count & (count - 1) or mesh.coordinate_of(transport.rank) is None:
        return
    shared = None if generator is None else id(generator)
    mine = (generator_fingerprint(generator), shared)
    everyone = transport.all_gather_object(mine, mesh.ranks)
    if any(state != everyone[0][0] for state, _ in everyone):
        counts[mesh] = 0
        raise ShardError(
            "the ranks' torch generators are out of step: call torch.manual_seed(seed) with the same seed on all "
            "ranks, or shardwise.manual_seed(seed)"
        )
    if (
        transport.name == "threads"
        and shared is not None
        and len({s for _, s in everyone}) < len(everyone)
    ):
        counts[mesh] = 0
        raise ShardError(
            "virtual ranks share one torch.Generator, so they cannot be in step: make one inside the function that "
            "each rank runs"
        )


def _stream(
    transport: Transport, generator: Generator | None, default: Like | None
) -> Like | None:
    """The stream to draw from. A recompute in backward (checkpointing) takes the one that forward took.

    Forward may have run inside ``with rng(...)`` and backward outside it, so what `rng` chose is remembered
    by the state of the generator.
    """
    chosen: Any = stream_in_force("torch")
    explicit = chosen == stream_in_force("philox")
    like: Any = chosen if explicit else default
    seen: dict[Any, Like] = transport.state.setdefault("streams", {})
    if not (seen or explicit):
        return like
    tape = recorder()
    where: Any = (
        generator_fingerprint(generator) if tape is None else tape.generator_position(generator)
    )
    if current_graph_task() >= 0:
        return seen.get(where, like)
    if explicit:
        if len(seen) >= MAX_STREAMS:
            del seen[next(iter(seen))]
        seen[where] = chosen
    else:
        seen.pop(where, None)
    return like


# ---- a rank's piece of a random tensor ----------------------------------------------------------


def memory_order(layout: Layout) -> tuple[int, ...] | None:
    """Dims from the outermost to the innermost in memory; None if that is their order."""
    if layout.is_contiguous:
        return None
    order = tuple(sorted(range(layout.ndim), key=lambda d: (-layout.stride[d], d)))
    return None if order == tuple(range(layout.ndim)) else order


def prepare(
    spec: Spec, device: torch.device, generator: Generator | None, default: Like | None = None
) -> Like | None:
    """To be called before every draw, on all ranks: compares the ranks, and says which stream."""
    if not spec.layout.numel or device.type == "meta":
        return default
    if recorder() is None:
        in_step(spec.layout.mesh, spec.transport, generator)
    return _stream(spec.transport, generator, default)


def drawn(
    what: Draw,
    spec: Spec,
    device: torch.device,
    generator: Generator | None = None,
    default: Like | None = None,
) -> Tensor:
    """This rank's piece of a random tensor, in memory order; replicated over pending axes.

    Args:
        what: What to draw.
        spec: The tensor's spec.
        device: Where the piece lives.
        generator: None is torch's default CPU generator.
        default: The stream where `rng` chose none; None is torch's on a CPU, else Philox.
    """
    layout = spec.layout
    if what.kind == "normal" and spec.stride is not None:
        what = Draw("normal_strided", what.params)
    like = prepare(spec, device, generator, default)
    order = memory_order(layout)
    return draw(
        what,
        layout.shape,
        spec.offsets,
        spec.local_shape,
        spec.dtype,
        device,
        generator,
        like,
        order,
    )


def settled(layout: Layout) -> Layout:
    """The layout, replicated over the axes with a pending reduction."""
    return (
        layout.with_placement(layout.dims, (None,) * layout.mesh.ndim)
        if layout.is_partial
        else layout
    )


def kept(value: Tensor, spec: Spec) -> Tensor:
    """A piece that is replicated over pending axes as one of ``spec``: kept on one rank."""
    if not spec.layout.is_partial or spec.coord is None:
        return value
    return mover(settled(spec.layout), spec.layout, spec.transport)(value)


def write(x: DTensor, value: DTensor) -> DTensor:
    """``x.copy_(value)``, also where ``x`` is a view that needed communication."""
    if "_view_of" in x.__dict__:
        fresh(x)
        return write_to_copy(_T.copy_, (x, value), {})
    return write_into(x, value)


def overwrite(x: DTensor, value: Tensor) -> DTensor:
    """Write a fresh piece (replicated over pending axes) into ``x``."""
    return write(x, wrap(kept(value, x._spec), x._spec))


def random_override(*functions: Any) -> Callable[[Handler], Handler]:
    """Like ``override``; ``out=`` is taken care of, and a call that is on no DTensor itself."""

    def register(handler: Handler) -> Handler:
        @functools.wraps(handler)
        def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.get("out") is not None:
                return into_out(func, args, kwargs)
            return handler(func, args, kwargs)

        for f in functions:
            OVERRIDES[f] = answer
        return handler

    return register


def overloads(*names: str) -> list[Any]:
    """The ATen overloads of these names, without those that take ``out``."""
    found = []
    for name in names:
        packet = getattr(torch.ops.aten, name)
        found += [getattr(packet, o) for o in packet.overloads() if not o.endswith("out")]
    return found


def _check_once(func: Any, plain: list[Tensor], mesh: Mesh, transport: Transport) -> None:
    """Compare plain tensors over the ranks, once for each call and their shapes."""
    seen: set[Any] = transport.state.setdefault("plain_checked", set())
    key = (func, mesh, *((t.shape, t.dtype) for t in plain))
    if key not in seen:
        _check_plain(func, list(enumerate(plain)), mesh, transport)
        seen.add(key)


# ---- in-place draws -------------------------------------------------------------------------------

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "uniform": ("from", "to"),
    "normal": ("mean", "std"),
    "exponential": ("lambd",),
    "log_normal": ("mean", "std"),
    "cauchy": ("median", "sigma"),
    "geometric": ("p",),
    "bernoulli": ("p",),
}
_DEFAULTS = {
    "mean": {"normal": 0.0, "log_normal": 1.0},
    "std": {"normal": 1.0, "log_normal": 2.0},
}
_OTHERS = {"from": 0.0, "to": 1.0, "lambd": 1.0, "median": 0.0, "sigma": 1.0, "p": 0.5}


def _in_place(kind: str) -> Handler:
    names = _PARAMETERS[kind]
    defaults = [_DEFAULTS[n][kind] if n in _DEFAULTS else _OTHERS[n] for n in names]

    def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, *given = args
        params = [
            *given,
            *(kwargs.get(n, d) for n, d in list(zip(names, defaults))[len(given) :]),
        ]
        generator = kwargs.get("generator")
        if kind == "bernoulli" and isinstance(params[0], Tensor):
            return _bernoulli_by_tensor(x, params[0], generator)
        if kind == "geometric" and not given and "p" not in kwargs:
            raise ShardError("geometric_() needs the probability p")
        what: Any = Draw(kind, tuple(map(float, params)))  # pyright: ignore[reportArgumentType]
        return overwrite(x, drawn(what, x._spec, x.device, generator))

    return fill


for _kind in _PARAMETERS:
    random_override(getattr(_T, _kind + "_"), *overloads(_kind + "_"))(_in_place(_kind))


@random_override(_T.random_, *overloads("random_"))
def _random_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *given = args
    if not given and "from" not in kwargs and "to" not in kwargs:
        what = Draw("random")
    elif len(given) == 1 and "to" not in kwargs:
        what = Draw("randint", (0, int(given[0])))
    else:
        low = given[0] if given else kwargs.get("from", 0)
        high = given[1] if len(given) > 1 else kwargs.get("to")
        what = Draw("randint", (int(low), None if high is None else int(high)))
    return overwrite(x, drawn(what, x._spec, x.device, kwargs.get("generator")))


def _bernoulli_by_tensor(x: Tensor, p: Tensor, generator: Generator | None) -> Tensor:
    """``x.bernoulli_(p)``."""
    if not isinstance(x, DTensor):
        assert isinstance(p, DTensor), "one of the two is a DTensor"
        in_step(p._spec.layout.mesh, p._spec.transport, generator)
        whole: Any = p.detach()
        return x.bernoulli_(whole.full_tensor(), generator=generator)
    return overwrite(x, _coins(x._spec, p, generator))


def _coins(spec: Spec, p: Tensor, generator: Generator | None) -> Tensor:
    """This rank's piece of zeros and ones with probabilities ``p``, which broadcasts."""
    layout = settled(spec.layout)
    p = p.detach()
    if p.shape != spec.shape:
        p = p.expand(spec.shape)
    if isinstance(p, DTensor):
        local = place(p, layout.dims, layout.partial, layout.mesh)
    else:
        _check_once(torch.bernoulli, [p], layout.mesh, spec.transport)
        local = (
            p[tuple(slice(o, o + n) for o, n in zip(spec.offsets, spec.local_shape))]
            if p.ndim
            else p
        )
    like = prepare(spec, local.device, generator)
    order = memory_order(layout) or tuple(range(layout.ndim))
    if local.device.type == "meta" or not layout.numel:
        return torch.empty(spec.local_shape, dtype=spec.dtype, device=local.device)
    shape, offsets = ([xs[d] for d in order] for xs in (layout.shape, spec.offsets))
    got = draw_bernoulli(local.permute(order), shape, offsets, spec.dtype, generator, like)
    return got.permute(sorted(range(layout.ndim), key=order.__getitem__))


# ---- samples given by tensors -------------------------------------------------------------------


class _Sample(torch.autograd.Function):
    """A sample is constant in its parameters: torch gives them a gradient of zeros."""

    @staticmethod
    def forward(value: Tensor, *parameters: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.like = [(p.shape, p.dtype, p.device) for p in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *(
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like
        )


def _sample(value: DTensor, *parameters: Any) -> DTensor:
    sources = [p._local for p in parameters if isinstance(p, DTensor) and p.requires_grad]
    if not sources or not torch.is_grad_enabled():
        return value
    return wrap(_Sample.apply(value._local, *sources), value._spec)  # pyright: ignore[reportArgumentType]


def _row_major(spec: Spec, shape: torch.Size, dtype: torch.dtype) -> Spec:
    """A row-major result of this shape, sharded like ``spec`` where the dims (aligned right) agree."""
    layout = spec.layout
    lead = len(shape) - layout.ndim
    dims = tuple(
        layout.dims[d - lead] if d >= lead and layout.shape[d - lead] == n else ()
        for d, n in enumerate(shape)
    )
    whole = tuple(shape)
    none = (None,) * layout.mesh.ndim
    return spec_of(
        Layout(layout.mesh, dims, none, whole, boxes.contiguous_stride(whole), dtype),
        spec.transport,
    )


@random_override(torch.bernoulli, _T.bernoulli, *overloads("bernoulli"))
def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "p")
    given = dict(zip(names, args)) | kwargs
    x: Any = given.get("input", given.get("self"))
    p = given.get("p")
    first: Any = x if isinstance(x, DTensor) else p
    fresh(first)
    spec = _row_major(first._spec, x.shape, x.dtype)
    generator = kwargs.get("generator")
    if p is not None and not isinstance(p, Tensor):
        return wrap(drawn(Draw("bernoulli", (float(p),)), spec, first.device, generator), spec)
    source = x if p is None else p
    return _sample(wrap(_coins(spec, source, generator), spec), source)


@random_override(torch.normal, *overloads("normal"))
def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("mean", "std", "size"), args)) | kwargs
    mean, std, generator = given.get("mean", 0.0), given.get("std", 1.0), given.get("generator")
    tensors = [t for t in (mean, std) if isinstance(t, DTensor)]
    if not tensors:
        raise LayoutError(
            "torch.normal: neither mean nor std is a DTensor; use shardwise.randn"
        )
    first = tensors[0]
    for t in tensors:
        fresh(t)
    shape = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, Tensor)))
    spec = _row_major(first._spec, shape, first.dtype)
    with torch.no_grad():
        wide = isinstance(std, Tensor)
        what = Draw("normal", (0.0, 1.0 if wide else float(std)))
        out: Any = wrap(drawn(what, spec, first.device, generator), spec)
        out = (out.mul_(std) if wide else out).add_(mean)
    return _sample(out, *tensors)


# ---- whole, in step --------------------------------------------------------------------------------


def run_in_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, and run whole on every rank with its own generator: in step, so with equal results."""
    call = Call(func, args, kwargs, lifts=False)
    if next(t for t in call.tensors if isinstance(t, DTensor))._spec.coord is None:
        return Absent(func, _operands(call, func), None)(call, args, kwargs)
    tensors = [t for t in call.tensors if isinstance(t, DTensor)]
    mesh = join([t._spec.layout.mesh for t in tensors])
    plain = [t for t in call.tensors if not isinstance(t, DTensor)]
    if plain:
        _check_once(func, plain, mesh, call.transport)
    for t in tensors:
        fresh(t)
    in_step(mesh, call.transport, kwargs.get("generator"))
    return run_whole(func, call.tensors, call.tree, call.kwargs)


random_override(
    torch.multinomial, _T.multinomial, torch.poisson, torch.binomial, *GAMMA_BUILTINS,
    *overloads("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)(run_in_step)  # fmt: skip


@random_override(F.rrelu, torch.rrelu, torch.rrelu_, *overloads("rrelu", "rrelu_"))
def _rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "lower", "upper", "training"), args)) | kwargs
    if given.get("training", False):
        return run_in_step(func, args, kwargs)
    x: Any = given.get("input", given.get("self"))
    slope = (float(given.get("lower", 1 / 8)) + float(given.get("upper", 1 / 3))) / 2
    inplace = given.get("inplace", False) or func.__name__.split(".")[0].endswith("_")
    return F.leaky_relu(x, slope, inplace=inplace)


@random_override(F.gumbel_softmax)
def _gumbel_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("logits", "tau", "hard", "eps", "dim"), args)) | kwargs
    logits, tau, dim = given["logits"], given.get("tau", 1), given.get("dim", -1)
    gumbels = (
        -torch.empty_like(logits, memory_format=torch.contiguous_format).exponential_().log()
    )
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not given.get("hard", False):
        return soft
    index = soft.max(dim, keepdim=True)[1]
    one_hot = torch.zeros_like(logits, memory_format=torch.contiguous_format).scatter_(
        dim, index, 1.0
    )
    return one_hot - soft.detach() + soft
