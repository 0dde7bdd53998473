"""What is done to a captured step, one file each; a pass takes a step and gives another of the same value."""

from collections.abc import Callable

from shardwise.capture.ir import Step
from shardwise.capture.passes.bucket import bucket
from shardwise.capture.passes.moves import redundant_moves
from shardwise.capture.passes.schedule import schedule
from shardwise.capture.passes.simplify import simplify

Pass = Callable[[Step], Step]

DEFAULT: tuple[Pass, ...] = (simplify, redundant_moves, bucket, simplify, schedule)

__all__ = ["DEFAULT", "Pass", "bucket", "redundant_moves", "schedule", "simplify"]
