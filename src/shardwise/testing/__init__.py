"""Checks that users can run on their own rules too."""

from shardwise.testing.sweep import (
    Failure as Failure,
    bytes_moved as bytes_moved,
    check as check,
    sweep as sweep,
)
