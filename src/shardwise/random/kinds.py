"""What can be drawn: torch's in-place random methods, as data.

`normal_strided` is `normal_` on a tensor that is not contiguous: torch's CPU then draws one
double-precision pair at a time instead of filling blocks of 16.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, assert_never, get_args

import torch
from torch import Generator, Tensor

from shardwise.errors import UnsupportedError

Kind = Literal[
    "uniform",
    "normal",
    "normal_strided",
    "bernoulli",
    "random",
    "randint",
    "exponential",
    "log_normal",
    "cauchy",
    "geometric",
    "randperm",
]


@dataclass(frozen=True)
class Draw:
    """A random tensor yet to be drawn: a distribution and its parameters.

    ```text
    kind            params, missing ones as in torch     torch's name
    uniform         low=0, high=1                        uniform_, rand
    normal          mean=0, std=1                        normal_, randn, torch.normal
    normal_strided  mean=0, std=1                        normal_ on a non-contiguous tensor
    bernoulli       p=0.5                                bernoulli_ with a number
    random          -                                    random_() over the dtype's range
    randint         low, high (None: the dtype's end)    random_(low, high), randint
    exponential     lambd=1                              exponential_
    log_normal      mean=1, std=2                        log_normal_
    cauchy          median=0, sigma=1                    cauchy_
    geometric       p                                    geometric_
    randperm        -                                    randperm; the shape is (n,)
    ```

    Args:
        kind: A kind of the table.
        params: Its parameters.

    Raises:
        UnsupportedError: The kind is not in the table, or has other parameters.

    Example:
        >>> Draw("normal")
        Draw(kind='normal', params=(0.0, 1.0))
    """

    kind: Kind
    params: tuple[Any, ...] = ()  # numbers, or None for an open end

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise UnsupportedError(f"no random stream draws {self.kind!r}; known: {known}.")
        kind, known = self.kind, _defaults(self.kind)
        required = 2 if kind == "randint" else sum(p is None for p in known)
        if not required <= len(self.params) <= len(known):
            raise UnsupportedError(
                f"{kind} takes {required} to {len(known)} parameters, not {self.params}."
            )
        object.__setattr__(self, "params", (*self.params, *known[len(self.params) :]))

    @property
    def pair(self) -> tuple[Any, Any]:
        """The parameters, filled up with None."""
        first, second, *_ = *self.params, None, None
        return first, second


def _defaults(kind: Kind) -> tuple[Any, ...]:
    """Default parameters; None where there is none."""
    match kind:
        case "uniform" | "normal" | "normal_strided" | "cauchy":
            return (0.0, 1.0)
        case "bernoulli":
            return (0.5,)
        case "random" | "randperm":
            return ()
        case "randint":
            return (None, None)
        case "exponential":
            return (1.0,)
        case "log_normal":
            return (1.0, 2.0)
        case "geometric":
            return (None,)
        case _:
            assert_never(kind)


def drawn(draw: Draw, numel: int, dtype: torch.dtype, generator: Generator | None) -> Tensor:
    """What plain torch draws for ``numel`` elements: a fresh flat contiguous CPU tensor."""
    out = torch.empty(numel, dtype=dtype, device="cpu")
    if draw.kind != "normal_strided":
        return fill(out, draw, generator)
    gaps = torch.empty((numel, 2), dtype=dtype, device="cpu")[:, 0]
    return out.copy_(fill(gaps, draw, generator))


def fill(out: Tensor, draw: Draw, generator: Generator | None) -> Tensor:
    """Let torch draw into ``out``, in place.

    Args:
        out: The tensor to fill, with plain torch's rules for its dtype and strides.
        draw: What to draw.
        generator: A generator of the tensor's device; None is the default one.

    Returns:
        ``out``.
    """
    a, b = draw.pair
    match draw.kind:
        case "uniform":
            return out.uniform_(a, b, generator=generator)
        case "normal" | "normal_strided":
            return out.normal_(a, b, generator=generator)
        case "bernoulli":
            return out.bernoulli_(a, generator=generator)
        case "random":
            return out.random_(generator=generator)
        case "randint":
            return out.random_(a, b, generator=generator)
        case "exponential":
            return out.exponential_(a, generator=generator)
        case "log_normal":
            return out.log_normal_(a, b, generator=generator)
        case "cauchy":
            return out.cauchy_(a, b, generator=generator)
        case "geometric":
            return out.geometric_(a, generator=generator)
        case "randperm":
            return torch.randperm(out.numel(), generator=generator, dtype=out.dtype, out=out)
        case _:
            assert_never(draw.kind)


@lru_cache(maxsize=1024)
def validate(draw: Draw, dtype: torch.dtype) -> None:
    """Raise what torch raises for these parameters and dtype, on every rank alike.

    A rank whose box is empty would otherwise not notice. Draws from a generator of its own.
    """
    if draw.kind != "randperm":
        fill(torch.empty(1, dtype=dtype, device="cpu"), draw, Generator("cpu"))
