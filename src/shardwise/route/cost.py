"""What moves cost: latency plus bytes over bandwidth, per mesh axis.

A ``Profile`` holds the figures: measured (``mesh.profile()``), given, or the defaults of the device type.
All ranks must use equal ones, or they would choose different routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.route.moves import Move, received_numel

ONE_SHOT_LATENCY = 65 / 64  # its packing costs a little more
LOCAL_US = 0.064  # a local re-cut is not quite free


@dataclass(frozen=True, slots=True)
class Profile:
    """How fast a mesh talks along each of its axes.

    Attributes:
        latency_us: For each axis what one more collective costs.
        bytes_per_us: For each axis how much a rank receives in a microsecond (1 GB/s is 1000).

    Example:
        >>> Profile.nodes((2, 8)).latency_us    # 2 nodes of 8 GPUs: slow between, fast within
        (30.0, 15.0)
    """

    latency_us: tuple[float, ...]
    bytes_per_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.latency_us) != len(self.bytes_per_us):
            raise LayoutError(
                "a profile needs one latency and one bandwidth for each mesh axis."
            )
        if min(self.bytes_per_us, default=1) <= 0 or min(self.latency_us, default=0) < 0:
            raise LayoutError(f"a profile needs positive bandwidths: {self}.")

    @classmethod
    def uniform(
        cls, ndim: int, latency_us: float = 65.536, bytes_per_us: float = 1000.0
    ) -> Profile:
        """The same on all axes; by default Gloo on one machine."""
        return cls((latency_us,) * ndim, (bytes_per_us,) * ndim)

    @classmethod
    def nodes(
        cls,
        shape: Sequence[int],
        within: tuple[float, float] = (15.0, 200_000.0),
        between: tuple[float, float] = (30.0, 25_000.0),
        node_axes: int = 1,
    ) -> Profile:
        """Nodes × GPUs: the first ``node_axes`` axes lie between nodes, the others within one.

        Args:
            shape: Shape of the mesh.
            within: Latency (us) and bandwidth (bytes per us) within a node.
            between: The same between nodes.
            node_axes: Number of leading axes between nodes.
        """
        figures = [between if a < node_axes else within for a in range(len(shape))]
        return cls(tuple(f[0] for f in figures), tuple(f[1] for f in figures))


@lru_cache(maxsize=64)
def default_profile(mesh: Mesh) -> Profile:
    """What is taken until a mesh is profiled."""
    if mesh.device_type == "cpu":
        return Profile.uniform(mesh.ndim)
    return Profile.uniform(mesh.ndim, 20.0, 100_000.0)


# ---- what is minimized -------------------------------------------------------------------------

_OBJECTIVE: ContextVar[str] = ContextVar("shardwise_objective", default="time")

objective = _OBJECTIVE.get


@contextmanager
def minimize(what: str = "bytes") -> Iterator[None]:
    """Choose routes inside the block by ``"bytes"`` received, latency left out, or by ``"time"``.

    All ranks must enter it alike.

    Example:
        >>> with minimize("bytes"):
        ...     objective()
        'bytes'

    Raises:
        LayoutError: There is no such objective.
    """
    if what not in ("time", "bytes"):
        raise LayoutError(
            f"there is nothing to minimize called {what!r}.",
            tries=['minimize("bytes")', 'minimize("time")'],
        )
    token = _OBJECTIVE.set(what)
    try:
        yield
    finally:
        _OBJECTIVE.reset(token)


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of moves under a profile and an objective.

    Attributes:
        profile: The figures.
        bytes_only: Latency is left out; it only breaks ties.
    """

    profile: Profile
    bytes_only: bool = False

    def of(self, kind: str, axes: tuple[int, ...], nbytes: float) -> float:
        """Cost of a move over some axes in which a rank receives so much: us, or bytes."""
        if kind in ("slice", "pad", "keep"):
            return 1e-7 if self.bytes_only else LOCAL_US
        if self.bytes_only:
            return nbytes + (1.01e-5 if kind == "one_shot" else 1e-5)
        latency = max((self.profile.latency_us[a] for a in axes), default=0.0)
        if kind == "one_shot":
            latency *= ONE_SHOT_LATENCY
        slowest = min((self.profile.bytes_per_us[a] for a in axes), default=1.0)
        return latency + nbytes / slowest


class Prices:
    """The prices of moves of one tensor, by elements: ``Cost.of`` with its figures looked up once per group.

    Attributes:
        bytes_only: Latency is left out; it only breaks ties.
        uniform: The price does not depend on the axes.
        local: What a move costs that sends nothing.
        least: What a collective costs at least, however little it receives.
        least_per_numel: What it costs at least to receive an element more.
    """

    def __init__(self, layout: Layout, cost: Cost) -> None:
        self._cost, self._itemsize = cost, itemsize(layout)
        self._rates: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        self.bytes_only = cost.bytes_only
        self.local = cost.of("slice", (), 0)
        rates = [self._rate("all_gather", (a,)) for a in range(layout.mesh.ndim)]
        self.uniform = len(set(rates)) <= 1
        self.least = min((latency for latency, _ in rates), default=0.0)
        self.least_per_numel = min((per_numel for _, per_numel in rates), default=0.0)

    def _rate(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """What it costs to receive nothing, and an element more."""
        per_byte = 1.0
        if not self._cost.bytes_only and axes:
            per_byte = 1.0 / min([self._cost.profile.bytes_per_us[a] for a in axes])
        rate = self._cost.of(kind, axes, 0), self._itemsize * per_byte
        self._rates[kind, axes] = rate
        return rate

    def of(self, kind: str, axes: tuple[int, ...], numel: float) -> float:
        """Cost of a collective over some axes in which a rank receives so many elements."""
        latency, per_numel = self._rates.get((kind, axes)) or self._rate(kind, axes)
        return latency + numel * per_numel


def cost_of(mesh: Mesh, profile: Profile | None = None, what: str | None = None) -> Cost:
    """The price list of a mesh: profile and objective in force where none is given."""
    if profile is not None and len(profile.latency_us) != mesh.ndim:
        raise LayoutError(f"a profile of {len(profile.latency_us)} axes for {mesh}.")
    return Cost(profile or default_profile(mesh), (what or objective()) == "bytes")


SAMPLE = 64  # ranks that a cost is averaged over


def sample(mesh: Mesh) -> list[tuple[int, ...]]:
    """Coordinates of up to ``SAMPLE`` ranks, evenly spread: what a cost is averaged over."""
    n = len(mesh.ranks)
    count = min(n, SAMPLE)
    out: list[tuple[int, ...]] = []
    for i in range(count):
        at = i * n // count
        out.append(tuple(at // s % k for s, k in zip(mesh.strides, mesh.shape)))
    return out


def time_us(move: Move, profile: Profile | None = None) -> float:
    """Predicted time of one move."""
    mesh = move.src.mesh
    nbytes = received_numel(move, sample(mesh)) * itemsize(move.src)
    return cost_of(mesh, profile, "time").of(move.kind, move.axes, nbytes)


def itemsize(layout: Layout) -> int:
    """Bytes of an element."""
    return getattr(layout.dtype, "itemsize", 4)
