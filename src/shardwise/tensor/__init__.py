"""The user's object: ``DTensor``, making one, its gradients, its random numbers."""

from shardwise.compat import hide_from_dynamo
from shardwise.tensor import (  # noqa: F401  they register themselves
    attention,
    backward,
    crossings,
    dispatch,
    dropout,
    factories,
    foreach,
    foreach_norm,
    fractional,
    functions,
    fused,
    grids,
    hooks,
    init,
    likes,
    loading,
    masks,
    metadata,
    random,
    shapes,
    strided,
)
from shardwise.tensor.dtensor import DTensor

hide_from_dynamo(
    "shardwise",
    *(getattr(DTensor, name).__func__ for name in ("__torch_function__", "__torch_dispatch__")),
)
