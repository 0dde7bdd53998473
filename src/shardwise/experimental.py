"""What programs import from ``torch.distributed.tensor.experimental``: the same names, or an error that says what to use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from shardwise.errors import UnsupportedError
from shardwise.tensor.local_map import local_map

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Plain tensors next to DTensors count as replicated. They always do here: the block changes nothing.

    The ranks compare a plain tensor once, when the call is compiled, and raise if it differs.
    """
    yield


def register_sharding(op: Any) -> Callable[..., NoReturn]:
    """Refused: a rule is said otherwise here.

    Raises:
        UnsupportedError: Always; it names ``register_rule``.
    """
    raise UnsupportedError(
        f"register_sharding({op}): lists of placements per operand are not what a rule is here.",
        tries=[
            'shardwise.rules.registry.register_rule(op, "m k, k n -> m n"): the factors of the op, as einsum names '
            "them",
            "leave it away: an op without a rule is traced into ops that have one, or runs on gathered operands",
        ],
    )


def context_parallel(mesh: Any, **options: Any) -> NoReturn:
    """Refused: it would change plain tensors in place, and what attention means for them.

    Raises:
        UnsupportedError: Always; it says how sequences are cut here.
    """
    raise UnsupportedError(
        "context_parallel: attention on plain pieces of sequences does not know what the other ranks hold.",
        tries=[
            "DTensors cut along the sequence: scaled_dot_product_attention is exact on them, with is_causal, too"
        ],
    )
