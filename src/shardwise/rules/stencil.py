"""Windows over a dim: which rows a piece of the result needs, and what lies beyond the ends."""

from __future__ import annotations

from dataclasses import dataclass
import math

from shardwise.rules.notation import Arg


@dataclass(frozen=True, slots=True)
class Window:
    """One dim of a convolution or a pooling.

    Attributes:
        size: Rows of the whole input.
        kernel: Rows that a window looks at.
        stride: From one window to the next.
        dilation: From one row of a window to the next.
        left: Rows before the first that the first window looks at.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    left: int

    @property
    def span(self) -> int:
        """Rows from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def bounds(self, start: int, count: int) -> tuple[int, int]:
        """First row and end of what some windows look at, ends of the dim not regarded."""
        low = start * self.stride - self.left
        return low, low + (count - 1) * self.stride + self.span if count else low

    def need(self, start: int, count: int) -> range:
        """The rows that exist of these."""
        low, high = self.bounds(start, count)
        low = min(max(low, 0), self.size)
        return range(low, max(min(high, self.size), low))

    def beyond(self, start: int, count: int) -> tuple[int, int]:
        """How many of them lie before the first row, and after those that exist."""
        low, high = self.bounds(start, count)
        before = min(max(-low, 0), high - low)
        return before, high - low - before - len(self.need(start, count))


@dataclass(frozen=True, slots=True)
class Spread:
    """One dim of a transposed convolution: each row adds to a window of the result.

    Attributes:
        size: Rows of the whole input.
        kernel: Rows that a window has.
        stride: From one window to the next.
        dilation: From one row of a window to the next.
        left: Rows of the result that are cut off at its front.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    left: int

    def need(self, start: int, count: int) -> range:
        """The rows that add to a piece of the result."""
        if not count:
            return range(0)
        low = -((self.dilation * (self.kernel - 1) - start - self.left) // self.stride)
        high = (start + count - 1 + self.left) // self.stride + 1
        low = min(max(low, 0), self.size)
        return range(low, max(min(high, self.size), low))

    def around(self, start: int, count: int) -> tuple[int, int, int]:
        """Rows of zeros to put before and after these, and what to cut off the front of the result then."""
        rows, reach = self.need(start, count), self.dilation * (self.kernel - 1)
        first = start + self.left
        low = min(rows.start, first // self.stride)
        last = first + max(count, 1) - 1
        high = max(rows.stop, -((reach - last) // self.stride) + 1, low + 1)
        return rows.start - low, high - rows.stop, first - low * self.stride


def pieces(arg: Arg, dim: int) -> int:
    """Into how many pieces a dim is cut."""
    return math.prod(arg.layout.mesh.shape[a] for a in arg.layout.dims[dim])
