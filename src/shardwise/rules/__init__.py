"""What an op allows: the notation, the table, and one file of rules per family of ops."""

from shardwise.rules import (  # noqa: F401
    attention,
    conv,
    cross_entropy,
    embedding,
    extremum,
    image,
    index,
    join,
    loss,
    matmul,
    norm,
    ordering,
    pointwise,
    rearrange,
    recurrent,
    reduce,
    scan,
    scatter,
    slicing,
    softmax,
    vector_norm,
    view,
)
from shardwise.rules.registry import seal

seal()
