"""The user's object: ``DTensor``, making one, its gradients, its random numbers."""

from shardwise.tensor import (  # noqa: F401  they register themselves
    attention,
    backward,
    crossings,
    dispatch,
    dropout,
    factories,
    foreach,
    foreach_norm,
    functions,
    fused,
    grids,
    hooks,
    init,
    likes,
    loading,
    metadata,
    random,
    shapes,
)
