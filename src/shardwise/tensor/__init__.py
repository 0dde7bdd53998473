"""The user's object: ``DTensor``, making one, its gradients, its random numbers."""

from shardwise.tensor import (  # noqa: F401  they register themselves
    backward,
    crossings,
    dispatch,
    foreach,
    foreach_norm,
    fused,
    metadata,
)
