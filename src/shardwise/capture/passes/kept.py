"""What is given back and gathered again at once is kept, where the step takes no more memory at its peak.

Whether there is memory the ranks have agreed on when the step was captured (``capture/order.py``, ``facts_of``).
"""

from __future__ import annotations

from shardwise.capture.again import gathered_again
from shardwise.capture.ir import Step


def kept(step: Step) -> Step:
    """Leave out gathers of what need not have been given back."""
    gone = {
        at
        for again in gathered_again(step.nodes)
        if step.nodes[again.start].info.get("needed") == 0
        for at in again.places
    }
    if not gone:
        return step
    return step.with_nodes([n for at, n in enumerate(step.nodes) if at not in gone])
