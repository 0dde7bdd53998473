"""Large messages over Gloo: rank to rank, straight into place.

Gloo's own all-gather and reduce-scatter go through a copy of everything; its messages between two ranks do not.
Small ones are left to Gloo: there the number of calls counts, not the bytes.

```text
   all_gather       everybody sends its x to everybody, who receives row i from ranks[i] in place
   reduce_scatter   everybody sends row i to ranks[i], who adds up what has come, in group order
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

LARGE_BYTES = 1 << 18  # of one message
_GATHER_TAG, _REDUCE_TAG = (
    0x5C48,
    0x5C49,
)  # so that a user's own messages are not taken for them


class Works:
    """Messages under way, waited for together."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for every one, also when one has failed: memory is free to go afterwards.

        Raises:
            RuntimeError: What the first failed one raised.
        """
        failed: RuntimeError | None = None
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                failed = failed or error
        self._works = []
        if failed is not None:
            raise failed


def start_gather(
    x: Tensor, places: Sequence[int], own: int, pg: ProcessGroup
) -> tuple[Works, Tensor]:
    """Start to stack every member's ``x``, in group order.

    Args:
        x: Contiguous, in memory of the host.
        places: For each member, in group order, its rank within ``pg``.
        own: This rank's place in group order.
        pg: A Gloo group.

    Returns:
        What to wait for, and the rows: [n, *x.shape]. ``x`` must stay as it is until then.
    """
    rows = x.new_empty((len(places), *x.shape))
    works = _all_but(own, places, lambda i, at: pg.recv([rows[i]], at, _GATHER_TAG))
    works += _all_but(own, places, lambda i, at: pg.send([x], at, _GATHER_TAG))
    rows[own].copy_(x)
    return Works(works), rows


def start_reduce(
    x: Tensor, places: Sequence[int], own: int, pg: ProcessGroup
) -> tuple[Works, list[Tensor]]:
    """Start to bring every member its row of everybody's ``x``.

    Returns:
        What to wait for, and this rank's row of each member's ``x``, in group order, for `reduce_in_order`.
    """
    got = x.new_empty((len(places) - 1, *x.shape[1:]))
    parts = list(got.unbind(0))
    parts.insert(own, x[own])
    works = _all_but(own, places, lambda i, at: pg.recv([parts[i]], at, _REDUCE_TAG))
    works += _all_but(own, places, lambda i, at: pg.send([x[i]], at, _REDUCE_TAG))
    return Works(works), parts


def _all_but(own: int, places: Sequence[int], call: Any) -> list[Any]:
    """The call for every member but this one, the next one first: so that not all talk to one."""
    n = len(places)
    return [call(i % n, places[i % n]) for i in range(own + 1, own + n)]
