"""What is done to a captured step, one file each; a pass takes a step and gives another of the same value."""

from collections.abc import Callable

from shardwise.capture.ir import Step
from shardwise.capture.passes.bucket import bucket
from shardwise.capture.passes.counts import counts
from shardwise.capture.passes.in_place import in_place
from shardwise.capture.passes.kept import kept
from shardwise.capture.passes.late_mean import late_mean
from shardwise.capture.passes.moves import redundant_moves
from shardwise.capture.passes.scale import scale
from shardwise.capture.passes.schedule import schedule
from shardwise.capture.passes.simplify import simplify

Pass = Callable[[Step], Step]

DEFAULT: tuple[Pass, ...] = (
    simplify,
    kept,
    redundant_moves,
    counts,
    bucket,
    simplify,
    scale,
    in_place,
    schedule,
)
COMPILED: tuple[Pass, ...] = (
    *DEFAULT[:3],
    late_mean,
    *DEFAULT[3:],
)  # those that round otherwise, too

__all__ = [
    "COMPILED",
    "DEFAULT",
    "Pass",
    "bucket",
    "counts",
    "in_place",
    "kept",
    "late_mean",
    "redundant_moves",
    "scale",
    "schedule",
    "simplify",
]
