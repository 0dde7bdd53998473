"""What is done to a captured step, one file each; a pass takes a step and gives another of the same value."""

from collections.abc import Callable

from shardwise.capture.ir import Step

Pass = Callable[[Step], Step]

DEFAULT: tuple[Pass, ...] = ()
