"""What an op allows: the notation, the table, and one file of rules per family of ops."""

from shardwise.rules import (  # noqa: F401
    embedding,
    extremum,
    matmul,
    ordering,
    pointwise,
    reduce,
    softmax,
)
from shardwise.rules.registry import seal

seal()
