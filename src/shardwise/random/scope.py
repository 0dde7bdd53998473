"""Which stream is in force, and the few words about torch's generator that all ranks share."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Literal

import torch
from torch import Generator

from shardwise.errors import UnsupportedError

Like = Literal["torch", "philox"]

_scope: ContextVar[Like | None] = ContextVar("shardwise_rng", default=None)


@contextmanager
def rng(like: Like | None) -> Iterator[None]:
    """Choose the random stream of everything drawn inside.

    The choice is a ContextVar: it holds for this thread or task only. Backward on a GPU runs in
    autograd's own thread, so code that draws again there (activation checkpointing) must carry
    the choice along.

    Args:
        like: "torch": bit-equal to plain torch on one CPU, O(global) time. "philox": the
            counter-based stream, O(local) time. None: each caller's own default.

    Example:
        >>> with rng(like="torch"):
        ...     stream_in_force(default="philox")
        'torch'
    """
    if like not in ("torch", "philox", None):
        raise UnsupportedError(f"there is no random stream {like!r}; try 'torch' or 'philox'.")
    token = _scope.set(like)
    try:
        yield
    finally:
        _scope.reset(token)


def stream_in_force(default: Like) -> Like:
    """The stream that `rng` chose, else ``default``."""
    return _scope.get() or default


def chosen_stream() -> Like | None:
    """The stream that `rng` chose; None: each caller's own default."""
    return _scope.get()


def manual_seed(seed: int) -> Generator:
    """Seed torch's default generators, which feed both streams; same as `torch.manual_seed`.

    All ranks must call it with the same seed; `generator_fingerprint` lets an upper floor check.

    Args:
        seed: The seed.

    Returns:
        The default CPU generator.
    """
    return torch.manual_seed(seed)


def generator_fingerprint(generator: Generator | None = None) -> int:
    """A hash of a generator's whole state: ranks in step have equal ones.

    Args:
        generator: A generator; None is torch's default CPU generator.

    Returns:
        An int in [0, 2**63), so that it fits an int64 tensor.
    """
    state = (torch.default_generator if generator is None else generator).get_state()
    return (
        int.from_bytes(blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little") >> 1
    )


def next_key(generator: Generator | None = None) -> int:
    """Draw the 64-bit key of one Philox call from ``generator``, advancing it by one number.

    Args:
        generator: A generator of any device; None is torch's default CPU generator.

    Returns:
        An int in [-2**63, 2**63).
    """
    device = "cpu" if generator is None else generator.device
    number = torch.empty((), dtype=torch.int64, device=device)
    return int(number.random_(-(2**63), None, generator=generator))
