"""torch's own database of ops, as calls: what `shardwise.testing.ops` judges a library by.

The database is `torch.testing._internal.common_methods_invocations.op_db`: for each op sample inputs, which
dtypes it takes, whether it has gradients, and its in-place and ``out=`` forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
import random
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_default_dtype

from shardwise.testing.calls import Call, put, results_of, take

DTYPES = (
    torch.float64,
    torch.float32,
    torch.complex128,
    torch.int64,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.uint8,
    torch.float8_e4m3fn,
)
"""The first that an op has is the one it is judged in."""

MAX_NUMEL = 5000  # larger samples cost seconds and show nothing new
MAX_SAMPLES = 400  # of those that are looked at

UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
    | {"resize_", "resize_as_"}
)
"""Their values mean nothing: shape and dtype are compared."""

RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "pca_lowrank",
        "rand_like",
        "randint_like",
        "randn_like",
        "rand",
        "randint",
        "randn",
        "randperm",
        "svd_lowrank",
        "uniform",
        "torch.ops.aten._safe_softmax.default",
    }
)


@cache
def entries() -> dict[str, Any]:
    """The database, by name: "op" or "op|variant"."""
    return {entry_name(op): op for op in op_db}


def entry_name(op: Any) -> str:
    """Its name: ``nn.functional.pad|reflect`` where it has variants."""
    return f"{op.name}|{op.variant_test_name}" if op.variant_test_name else op.name


def dtype_of(op: Any) -> torch.dtype | None:
    """What the entry is judged in; None if it has none of `DTYPES` on the CPU."""
    return next((dtype for dtype in DTYPES if dtype in op.dtypes), None)


def has_float32(op: Any) -> bool:
    """Whether the entry is one of those that are counted first."""
    return torch.float32 in op.dtypes


def samples(op: Any, count: int) -> list[Any]:
    """Up to ``count`` samples of distinct shapes, then of distinct other arguments; not the huge ones.

    Seeded, so that every run sees the same numbers.

    Raises:
        Exception: What the database raises.
    """
    dtype = dtype_of(op)
    assert dtype is not None, f"{entry_name(op)} has no dtype to be judged in"
    torch.manual_seed(3)
    rng = random.Random(entry_name(op))
    grad = differentiable(op)
    seen: set[Any] = set()
    first: list[Any] = []
    more: list[Any] = []
    whole: list[Any] = []
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=grad), MAX_SAMPLES):
        tensors: list[Tensor] = []
        tree = take((sample.input, sample.args, sample.kwargs), tensors)
        if any(t.layout != torch.strided or t.is_nested for t in tensors):
            continue
        if sum(t.numel() for t in tensors) > MAX_NUMEL:
            whole.append(sample)
            continue
        shapes = tuple(tuple(t.shape) for t in tensors)
        if shapes not in seen:
            seen.add(shapes)
            first.append(sample)
        elif (shapes, str(tree)) not in seen:
            seen.add((shapes, str(tree)))
            more.append(sample)
    if len(first) > count:  # the first and the one with most dims, and any others
        rich = max(first, key=lambda s: s.input.ndim if isinstance(s.input, Tensor) else 0)
        rest = [s for s in first if s is not first[0] and s is not rich]
        first = [s for s in first if s is first[0] or s is rich] + rng.sample(rest, len(rest))
    rng.shuffle(more)
    return (first + more + whole[:1])[:count] if first or more else whole[:1]


def differentiable(op: Any) -> bool:
    """Whether gradients are compared."""
    dtype = dtype_of(op)
    return (
        op.supports_autograd
        and dtype is not None
        and (dtype.is_floating_point or dtype.is_complex)
        and (torch.float32 not in op.dtypes or op.supports_dtype(torch.float32, "cpu"))
        and dtype in op.supported_backward_dtypes("cpu")
    )


def calls(op: Any, sample: Any) -> Iterator[tuple[str, Call]]:
    """The forms of one sample: "function", then "in place", "out", "method" where the op has them."""
    tensors: list[Tensor] = []
    tree = take((sample.input, sample.args, sample.kwargs), tensors)
    names = tuple(_names(sample, tensors))

    def form(run: Callable[[Any, Any, Any], Any]) -> Call:
        return Call(
            lambda *ts: run(*put(tree, ts)),
            tensors,
            sample.output_process_fn_grad,
            random=op.name in RANDOM or "dropout" in op.name,
            uninitialized=op.name in UNINITIALIZED,
            text=_text(op, tree, tensors),
            names=names,
        )

    yield "function", form(lambda x, args, kwargs: op.op(x, *args, **kwargs))
    inplace = op.inplace_variant
    if inplace is not None and isinstance(sample.input, Tensor) and not sample.broadcasts_input:
        yield "in place", form(lambda x, args, kwargs: inplace(x.clone(), *args, **kwargs))
    if op.supports_out and _writes_out(op, sample):
        yield "out", form(lambda x, args, kwargs: _with_out(op, x, args, kwargs))
    method = op.method_variant
    if method is not None and method is not op.op and isinstance(sample.input, Tensor):
        yield "method", form(lambda x, args, kwargs: method(x, *args, **kwargs))


@torch.no_grad()
def _writes_out(op: Any, sample: Any) -> bool:
    """Whether plain torch itself writes the result into ``out=``; `fft.ihfftn` of a vector does not."""
    if dtype_of(op) is None or op.name in RANDOM or op.name in UNINITIALIZED:
        return True
    state = torch.get_rng_state()
    try:
        want = results_of(op.op(sample.input, *sample.args, **sample.kwargs))
        got = results_of(_with_out(op, sample.input, sample.args, sample.kwargs))
        return all(torch.allclose(g, w, equal_nan=True) for g, w in zip(got, want))
    except (
        Exception
    ):  # it has none, or of a dtype that cannot be compared: the check itself will tell
        return True
    finally:
        torch.set_rng_state(state)


@torch.no_grad()
def _with_out(op: Any, x: Any, args: Any, kwargs: Any) -> Any:
    value = op.op(x, *args, **kwargs)
    blank = (
        torch.zeros_like(value)
        if isinstance(value, Tensor)
        else tuple(torch.zeros_like(v) for v in value)
    )
    op.op(x, *args, **kwargs, out=blank)
    return blank


def _names(sample: Any, tensors: list[Tensor]) -> Iterator[str]:
    """What the docs call each tensor: "input", "arg 1", "weight"."""

    def walk(tree: Any, name: str) -> Iterator[str]:
        got: list[Tensor] = []
        take(tree, got)
        for _ in got:
            yield name

    yield from walk(sample.input, "input")
    for i, arg in enumerate(sample.args):
        yield from walk(arg, f"arg {i + 1}")
    for key, value in sample.kwargs.items():
        yield from walk(value, key)


def _text(op: Any, tree: Any, tensors: list[Tensor]) -> str:
    marks = [f"<{','.join(map(str, t.shape))}>" for t in tensors]
    x, args, kwargs = put(tree, marks)
    parts = [str(x), *map(str, args), *(f"{key}={value}" for key, value in kwargs.items())]
    return f"{op.name}({', '.join(parts)})"[:300]


__all__ = [
    "calls",
    "differentiable",
    "dtype_of",
    "entries",
    "entry_name",
    "has_float32",
    "samples",
    "set_default_dtype",
]
