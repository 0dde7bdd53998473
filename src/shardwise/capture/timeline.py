"""A discrete-event simulation of a step on one rank: what overlaps, what is exposed, what is live.

```text
   compute      one lane; a start costs it nothing, a wait holds it until the collective is there
   each group   one lane of its own; its collectives run one after another, in the order of their starts
```
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.capture.cost import Device, durations
from shardwise.capture.ir import Node, Step, Value, flatten
from shardwise.capture.memory import peak_bytes
from shardwise.route.cost import Profile


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Attributes:
        lane: ``"compute"``, or the tag of a group.
        name: Of the node; ``"(exposed)"`` where compute waits.
        begin_us: From when.
        end_us: Till when.
    """

    lane: str
    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulated step took; all times in microseconds.

    Attributes:
        total_us: From begin to end.
        compute_us: Of that, what calls take.
        communication_us: What collectives take, on the busiest group.
        exposed_us: How long compute stands still for them.
        peak_bytes: The most bytes that are live at once, beside the inputs.
        events: In order of their begin.
    """

    total_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    peak_bytes: int
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return self.chart()

    def chart(self, width: int = 64) -> str:
        """The lanes as text, ``#`` where busy: of compute calls, of a group collectives."""
        lanes: dict[str, list[str]] = {}
        for e in self.events:
            row = lanes.setdefault(e.lane, ["."] * width)
            scale = width / max(self.total_us, 1e-9)
            first = min(int(e.begin_us * scale), width - 1)
            last = max(first + 1, min(round(e.end_us * scale), width))
            row[first:last] = ["-" if e.name == EXPOSED else "#"] * (last - first)
        wide = max(map(len, lanes), default=0)
        lines = [f"{lane:<{wide}}  {''.join(row)}" for lane, row in lanes.items()]
        lines.append(
            f"total {self.total_us:.0f} us: compute {self.compute_us:.0f}, "
            f"communication {self.communication_us:.0f}, exposed {self.exposed_us:.0f}; "
            f"peak {self.peak_bytes} B"
        )
        return "\n".join(lines)


EXPOSED = "(exposed)"


class Clock:
    """Where compute and the groups are in time, as nodes are issued one after another.

    Args:
        us: Estimated time of each node, by its id.

    Attributes:
        now: Where compute is.
        ends: For each handle when its collective is there.
    """

    def __init__(self, us: dict[int, float]) -> None:
        self.us, self.now = us, 0.0
        self.ends: dict[Value, float] = {}
        self._free: dict[tuple[int, ...], float] = {}

    def issue(self, n: Node) -> tuple[float, float]:
        """Advance by a node; gives from when to when it takes, of a wait how long compute stands still."""
        took = self.us[id(n)]
        if n.kind == "start":
            begin = max(self.now, self._free.get(n.info["ranks"], 0.0))
            self._free[n.info["ranks"]] = self.ends[n.outs[0]] = begin + took
            return begin, begin + took
        begin = self.now
        self.now = max(begin, self.ends[n.args[0]]) if n.kind == "wait" else begin + took
        return begin, self.now

    def end(self) -> float:
        """When all is done."""
        return max([self.now, *self._free.values()])


def timeline(
    step: Step, profile: Profile | None = None, device: Device | None = None
) -> Timeline:
    """Simulate a step.

    Args:
        step: A step; moves count as what carries them out.
        profile: How fast its mesh talks; default what ``mesh.profile()`` found, else the device type's defaults.
        device: How fast a rank computes; default that of the device type.

    Returns:
        Times, peak memory and events. Cost: linear in the nodes.

    Example:
        >>> print(timeline(step.last.step, Profile.nodes((8, 8))))   # a text chart
    """
    nodes = list(flatten(step.nodes))
    clock = Clock(durations(step, profile, device))
    events: list[Event] = []
    exposed = compute = 0.0
    talking: dict[tuple[int, ...], float] = {}
    for n in nodes:
        begin, end = clock.issue(n)
        if n.kind == "wait":
            exposed += end - begin
        elif n.kind == "start":
            talking[n.info["ranks"]] = talking.get(n.info["ranks"], 0.0) + end - begin
        else:
            compute += end - begin
        if end > begin:
            lane = "compute"
            if n.kind == "start":
                lane = n.info.get("tag") or str(list(n.info["ranks"]))
            name = EXPOSED if n.kind == "wait" else n.name
            events.append(Event(lane, name, begin, end))
    events.sort(key=lambda e: e.begin_us)
    return Timeline(
        clock.end(),
        compute,
        max(talking.values(), default=0.0),
        exposed,
        peak_bytes(step, nodes),
        tuple(events),
    )
