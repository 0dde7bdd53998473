"""The user's object: ``DTensor``, making one, its gradients, its random numbers."""

from shardwise.tensor import backward, crossings, dispatch, metadata  # noqa: F401  they register themselves
