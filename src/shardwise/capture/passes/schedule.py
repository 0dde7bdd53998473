"""Order a step for overlap: collectives start early, and are waited for late.

```text
   1  one order of starts      from the program alone, the same on all ranks
   2  list scheduling          the next start goes out once what it sends is there; other nodes in program order,
                               a wait where its result is needed, and what does not need it runs before
   3  a cap on memory          where a choice would go over, program order
```

Why ranks agree. The order of starts compares places in the program: of matrix products (which one a start needs
last), and of waits and starts (a gather goes out while the module before it runs). A rank counts them in starts and
waits, which all have alike; and as one whose piece is empty may need nothing where others need a product, all take
the latest that any of them finds, exchanged when the step is captured (``capture/order.py``, ``facts_of``). Times, bytes
and the cap never enter. They decide only where the starts lie among a rank's own calls.
That cannot hang: a rank that waits for a collective waits for a peer that has not started it yet; that peer waits
for one that is earlier in the common order, and so on, and for the earliest nobody waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
import heapq

from shardwise.capture.cost import Device, durations, is_heavy, is_view
from shardwise.capture.ir import Node, Step, flatten
from shardwise.capture.memory import Memory, most_live
from shardwise.capture.order import dependencies, followers, places_of_starts
from shardwise.capture.timeline import Clock
from shardwise.route.cost import Profile

LOOK = 8  # so many nodes are looked at for one that there is memory for
SLACK = 1.05  # of the unscheduled peak: the default cap


def schedule(
    step: Step,
    profile: Profile | None = None,
    device: Device | None = None,
    memory_cap_bytes: int | None = None,
    ahead: int = 1,
) -> Step:
    """Start collectives early and wait for them late.

    Args:
        step: A step. It is lowered: what carries out a move is scheduled node by node.
        profile: How fast the mesh talks; default what ``mesh.profile()`` found, else the device type's defaults.
        device: How fast a rank computes; default that of the device type.
        memory_cap_bytes: Bytes beside the inputs that may be live at once; default 1.05 times what the step needs as
            it is. What the order of starts itself needs is not refused, for the ranks would disagree.
        ahead: How many gathers go out before they are asked for; the same on all ranks. 0 leaves gathers where they
            are among the starts.

    Returns:
        The same nodes in another order; the step itself if it has no collectives.

    Cost: n log n in the nodes.
    """
    plan = Plan.of(step, ahead)
    if not plan.order:
        return step
    live = _Profile(step, plan.nodes)
    cap = int(SLACK * live.peak) if memory_cap_bytes is None else memory_cap_bytes
    us = durations(step.with_nodes(plan.nodes), profile, device)
    best: tuple[int, list[Node]] | None = None
    for how in (
        _Way(True, True, True),
        _Way(True, True, False),
        _Way(True, False, False),
        _LAST,
    ):
        run = _Run(step, plan, us, live, cap, how)
        found = [plan.nodes[at] for at in run.all()]
        if best is None or run.memory.peak < best[0]:
            best = run.memory.peak, found
        if best[0] <= cap:
            break
    assert best is not None, "there is at least one way"
    return step.with_nodes(best[1])


@dataclass(frozen=True, slots=True)
class _Way:
    """How bold a schedule is; the next one is taken where memory does not allow it.

    Attributes:
        pulls: Starts go out as soon as they can; else in their turn.
        run_ahead: While a collective is under way, run what comes later in the program.
        late: A wait stands where its result is needed; else where it is in the program.
    """

    pulls: bool
    run_ahead: bool
    late: bool


_LAST = _Way(False, False, False)  # program order, but for what the order of starts asks for


class _Profile:
    """The most live bytes between two places of the program, run as it is."""

    def __init__(self, step: Step, nodes: Sequence[Node]) -> None:
        row, self.peak = most_live(step, nodes)
        self._rows = [row]  # row k: the most of 2**k places
        while 2 ** len(self._rows) <= len(row):
            last, half = self._rows[-1], 2 ** (len(self._rows) - 1)
            self._rows.append([max(a, b) for a, b in zip(last, last[half:])])

    def most(self, first: int, end: int) -> int:
        """From a place up to another, that one excluded."""
        if end <= first:
            return 0
        k = (end - first).bit_length() - 1
        return max(self._rows[k][first], self._rows[k][end - 2**k])


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known before anything is issued.

    Attributes:
        nodes: In program order, lowered.
        before: For each node the places of those that must come before it.
        after: The other way round.
        heavy: Places of matrix products and their kin, in order.
        order: Places of the starts, in the order in which all ranks start them.
        since: For each of these the place in the program that must have been reached.
    """

    nodes: tuple[Node, ...]
    before: list[list[int]]
    after: list[list[int]]
    heavy: list[int]
    order: list[int]
    since: dict[int, int]

    @classmethod
    def of(cls, step: Step, ahead: int = 1) -> Plan:
        """The plan of a step: see the module for why all ranks find the same order."""
        nodes = tuple(flatten(step.nodes))
        before = dependencies(nodes)
        heavy = [at for at, n in enumerate(nodes) if is_heavy(n)]
        since = places_of_starts(nodes, before, is_heavy, ahead)
        agreed = ahead == 1 and all("since" in nodes[at].info for at in since)

        def turn(at: int) -> tuple[int, int]:
            info = nodes[at].info
            return (info["since"], max(info["carries"])) if agreed else (since[at], at)

        order = sorted(since, key=turn)
        return cls(nodes, before, followers(before), heavy, order, since)


class _Run:
    """One list scheduling.

    Args:
        step: The step.
        plan: Its plan.
        us: Estimated times.
        live: Live bytes of the program as it is.
        cap: Bytes that may be live.
        how: How bold it is.
    """

    def __init__(
        self,
        step: Step,
        plan: Plan,
        us: dict[int, float],
        live: _Profile,
        cap: int,
        how: _Way,
    ) -> None:
        self.plan, self.live, self.cap, self.how = plan, live, cap, how
        self.clock, self.memory = Clock(us), Memory(step, plan.nodes)
        self.missing = [len(b) for b in plan.before]
        self.issued = [False] * len(plan.nodes)
        self.out: list[int] = []
        self.turn = _turns(plan) if how.late else range(len(plan.nodes))
        self.reached = 0  # all before this place of the program has been issued
        self.early: list[
            tuple[int, int]
        ] = []  # starts before their turn: when that is, and bytes
        self.ready: list[tuple[int, int]] = []  # by turn; no starts
        self.starts = 0  # how many of the order have gone out
        self.in_turn = sorted(
            plan.order, reverse=True
        )  # starts in program order, the next one last
        self.heavy = 0  # how many of the first matrix products have been issued
        self.own: list[int] | None = None  # what the next start still needs
        for at, count in enumerate(self.missing):
            if not count:
                self._offer(at)

    def all(self) -> list[int]:
        """Issue everything; gives the order."""
        while len(self.out) < len(self.plan.nodes):
            if self._pull():
                continue
            at = self._choose()
            if at is None:
                self._send()
            else:
                self._issue(at)
        return self.out

    # ---- nodes ---------------------------------------------------------------------------------

    def _offer(self, at: int) -> None:
        if self.plan.nodes[at].kind != "start":
            heapq.heappush(self.ready, (self.turn[at], at))

    def _issue(self, at: int) -> None:
        n = self.plan.nodes[at]
        self.clock.issue(n)
        self.memory.run(n)
        self.issued[at] = True
        self.out.append(at)
        for later in self.plan.after[at]:
            self.missing[later] -= 1
            if not self.missing[later]:
                self._offer(later)
        while self.reached < len(self.issued) and self.issued[self.reached]:
            self.reached += 1
        heavy = self.plan.heavy
        while self.heavy < len(heavy) and self.issued[heavy[self.heavy]]:
            self.heavy += 1

    def _arrived(self, at: int) -> bool:
        n = self.plan.nodes[at]
        return self.clock.ends.get(n.args[0], float("inf")) <= self.clock.now

    def _choose(self) -> int | None:
        """The next node that is no start; None if it is a start's turn."""
        waits: list[tuple[int, int]] = []  # for what is still under way
        large: list[tuple[int, int]] = []  # there is no memory to run them ahead
        chosen: int | None = None
        while self.ready and chosen is None and len(large) < LOOK:
            turn, at = heapq.heappop(self.ready)
            n = self.plan.nodes[at]
            if self.issued[at]:
                continue
            if not waits and self._due(turn):
                heapq.heappush(self.ready, (turn, at))
                return None
            if n.kind == "wait" and self.how.run_ahead and not self._arrived(at):
                waits.append((turn, at))
            elif waits and not self._takes([n], turn):
                large.append((turn, at))
            else:
                chosen = at
        if chosen is None and waits:
            chosen = min(waits, key=lambda w: self._end(w[1]))[1]
        for x in (*waits, *large):
            if x[1] != chosen:
                heapq.heappush(self.ready, x)
        return chosen

    def _end(self, at: int) -> tuple[float, int]:
        return self.clock.ends[self.plan.nodes[at].args[0]], at

    # ---- starts --------------------------------------------------------------------------------

    def _due(self, turn: int) -> bool:
        """Whether the program has a start before this turn."""
        while self.in_turn and self.issued[self.in_turn[-1]]:
            self.in_turn.pop()
        return bool(self.in_turn) and self.in_turn[-1] < turn

    def _needed(self) -> list[int]:
        """What the next start needs and has not been issued, in program order."""
        if self.own is None:
            found: set[int] = set()
            todo = [self.plan.order[self.starts]]
            while todo:
                for p in self.plan.before[todo.pop()]:
                    if not self.issued[p] and p not in found:
                        found.add(p)
                        todo.append(p)
            self.own = sorted(found)
            self._blockers = [
                p
                for p in self.own
                if self.plan.nodes[p].kind == "wait" or is_heavy(self.plan.nodes[p])
            ]
        return self.own

    def _pull(self) -> bool:
        """Send the next start if what it sends is there, or is quickly made of what is."""
        if not self.how.pulls or self.starts == len(self.plan.order):
            return False
        own = self._needed()
        blockers = self._blockers
        while blockers:
            at = blockers[-1]
            n = self.plan.nodes[at]
            if not self.issued[at] and not (n.kind == "wait" and self._arrived(at)):
                return False
            blockers.pop()
        start = self.plan.order[self.starts]
        heavy = self.plan.heavy
        if bisect_right(heavy, self.plan.since[start]) > self.heavy:
            return False
        todo = [self.plan.nodes[at] for at in (*own, start) if not self.issued[at]]
        if not self._takes(todo, start):
            return False
        self._send()
        return True

    def _takes(self, todo: list[Node], turn: int) -> bool:
        """Whether there is memory for nodes before their turn, now and in the program until then; if so, note it."""
        need = self.memory.needs(*todo)
        if self.memory.live + need > self.cap:
            return False
        more = need - self.memory.gives(todo)
        if turn > self.reached and more > 0:
            self.early = [e for e in self.early if e[0] > self.reached]
            held = more + sum(e[1] for e in self.early)
            if self.live.most(self.reached, turn) + held > self.cap:
                return False
            self.early.append((turn, more))
        return True

    def _send(self) -> None:
        """Issue the next start, and what it needs."""
        own = self._needed()
        self.own = None
        for at in (*own, self.plan.order[self.starts]):
            if not self.issued[at]:
                self._issue(at)
        self.starts += 1


def _turns(plan: Plan) -> list[int]:
    """Where a node stands in the program; waits, views and empty memory stand where the first node needs them."""
    turn = list(range(len(plan.nodes)))
    for at in range(len(plan.nodes) - 1, -1, -1):
        n = plan.nodes[at]
        made_of_nothing = n.kind == "call" and not n.reads
        if n.kind == "wait" or is_view(n) or made_of_nothing:
            turn[at] = max(at, min((turn[x] for x in plan.after[at]), default=len(turn)))
    return turn
