"""The library under the yardstick, behind one small face: ours here, PyTorch's in `torch_peer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
import math
from typing import Any, Protocol

from torch import Tensor

from shardwise.comm.meshes import init_device_mesh
from shardwise.events import CommEvent, FallbackEvent, observe
from shardwise.layout.placement import Placement, Replicate
from shardwise.random.scope import rng
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.dtensor import DTensor
from shardwise.testing.layouts import addend, addend_weights


@dataclass(slots=True)
class Moved:
    """What one rank's calls sent for.

    Attributes:
        bytes: Received, without the flags.
        flag_bytes: Received of the numbers by which ranks agree whether all of them raise.
        kinds: The collectives, in order, without those that carry no tensor.
        gathered: The ops that were done by gathering their operands.
    """

    bytes: int = 0
    flag_bytes: int = 0
    kinds: list[str] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)


class Library(Protocol):
    """What a check needs of a library."""

    name: str

    def run(self, fn: Callable[[], Any], n: int) -> list[Any]:
        """Call ``fn`` on ``n`` ranks; raises what a rank raised, `DeadlockError` for a hang."""
        ...

    def mesh(self, shape: tuple[int, ...]) -> Any:
        """A CPU mesh over all ranks."""
        ...

    def is_dtensor(self, value: Any) -> bool:
        """Tell the library's tensors from plain ones."""
        ...

    def distribute(self, t: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
        """Lay a whole tensor out; nothing is sent."""
        ...

    def from_local(
        self, local: Tensor, mesh: Any, placements: Sequence[Placement], like: Tensor
    ) -> Tensor:
        """A tensor from this rank's piece, of the shape and strides of ``like``."""
        ...

    def random_like_torch(self) -> AbstractContextManager[None]:
        """Inside, random ops draw what plain torch draws, if the library can."""
        ...

    def watch(self) -> AbstractContextManager[Moved]:
        """Count what this rank's calls move inside the block."""
        ...


class Shardwise:
    """shardwise, on `simulate`'s virtual ranks."""

    name = "shardwise"

    def run(self, fn: Callable[[], Any], n: int) -> list[Any]:
        """Run by turns; a deadlock is an error at once."""
        return simulate(fn, n)

    def mesh(self, shape: tuple[int, ...]) -> Any:
        """A CPU mesh."""
        return init_device_mesh("cpu", shape)

    def is_dtensor(self, value: Any) -> bool:
        """Tell ours."""
        return isinstance(value, DTensor)

    def distribute(self, t: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
        """Every rank cuts its own piece."""
        return distribute_tensor(t, mesh, placements, src_data_rank=None)

    def from_local(
        self, local: Tensor, mesh: Any, placements: Sequence[Placement], like: Tensor
    ) -> Tensor:
        """Without a check."""
        stride = like.stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=like.shape, stride=stride
        )

    def random_like_torch(self) -> AbstractContextManager[None]:
        """The stream of torch's CPU generator."""
        return rng(like="torch")

    @contextmanager
    def watch(self) -> Iterator[Moved]:
        """Events of this rank's thread."""
        moved = Moved()

        def take(event: object) -> None:
            if isinstance(event, CommEvent) and event.tag.endswith(" check"):
                moved.flag_bytes += event.bytes
            elif isinstance(event, CommEvent):
                moved.bytes += event.bytes
                if event.kind not in ("barrier", "all_gather_object"):
                    moved.kinds.append(event.kind)
            elif isinstance(event, FallbackEvent):
                moved.gathered.append(event.what)

        with observe(take):
            yield moved


def lay_out(
    t: Tensor, mesh: Any, placements: Sequence[Placement], library: Library | None = None
) -> Any:
    """A leaf with these placements; a pending sum has unequal addends.

    Args:
        t: A plain tensor, the whole.
        mesh: Of the library.
        placements: Of ours, one per axis of the mesh.
        library: Default: `Shardwise`.
    """
    library = library or _OURS
    whole = [p if p.is_shard() else _REPLICATE for p in placements]
    x = library.distribute(t, mesh, whole)
    if any(p.is_partial() for p in placements):
        coord = mesh.get_coordinate()
        weight = math.prod(
            addend_weights(mesh.shape[axis])[coord[axis]]
            for axis, p in enumerate(placements)
            if p.is_partial()
        )
        first = all(coord[axis] == 0 for axis, p in enumerate(placements) if p.is_partial())
        local = addend(x.to_local(), weight, first=first)  # pyright: ignore[reportAttributeAccessIssue]
        x = library.from_local(local, mesh, placements, x)
    return x.detach()


_OURS = Shardwise()
_REPLICATE = Replicate()

__all__ = ["Library", "Moved", "Shardwise", "lay_out"]
