"""What an op allows: the notation, the table, and one file of rules per family of ops."""

from shardwise.rules import (  # noqa: F401
    embedding,
    matmul,
    pointwise,
)
from shardwise.rules.registry import seal

seal()
