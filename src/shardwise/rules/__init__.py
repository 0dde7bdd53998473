"""What an op allows: the notation, the table, and one file of rules per family of ops."""

from shardwise.rules import (  # noqa: F401
    attention,
    binned,
    conv,
    copies,
    cross_entropy,
    embedding,
    extremum,
    found,
    fourier,
    grouped,
    image,
    index,
    join,
    linalg,
    loss,
    masked,
    matmul,
    norm,
    ordering,
    pointwise,
    pool,
    rearrange,
    recurrent,
    reduce,
    replaced,
    scan,
    scatter,
    slicing,
    softmax,
    sundry,
    vector_norm,
    view,
)
from shardwise.rules.registry import seal

seal()
