"""PyTorch's own DTensor under the same checks as ours: the other side of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from torch import Tensor
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import torch.distributed.tensor as peer
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed import multi_threaded_pg

from shardwise.errors import DeadlockError
from shardwise.layout.placement import Placement
from shardwise.testing.libraries import Moved


class Torch:
    """`torch.distributed.tensor`, on the threads of torch's own test suite."""

    name = "torch"
    timeout = 20.0  # seconds until ranks that wait for each other count as hung

    def run(self, fn: Callable[[], Any], n: int) -> list[Any]:
        """Run as threads; ranks that do not end in time are given up."""
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # pyright: ignore
        multi_threaded_pg._install_threaded_pg()
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        results: list[Any] = [None] * n
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=n, store=store)
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn()
            except BaseException as error:
                errors.append(error)
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
            finally:
                dist.destroy_process_group()

        threads = [Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout)
        hung = any(thread.is_alive() for thread in threads)
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        if hung:
            raise DeadlockError(f"ranks did not end in {self.timeout} s")
        if errors:
            raise errors[0]
        return results

    def mesh(self, shape: tuple[int, ...]) -> Any:
        """A CPU mesh."""
        return init_device_mesh("cpu", shape)

    def is_dtensor(self, value: Any) -> bool:
        """Tell torch's."""
        return isinstance(value, peer.DTensor)

    def _placements(self, placements: Sequence[Placement]) -> list[Any]:
        return [
            peer.Shard(p.dim)  # pyright: ignore[reportAttributeAccessIssue]
            if p.is_shard()
            else peer.Partial()
            if p.is_partial()
            else peer.Replicate()  # pyright: ignore
            for p in placements
        ]

    def distribute(self, t: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
        """Every rank cuts its own piece."""
        return peer.distribute_tensor(t, mesh, self._placements(placements), src_data_rank=None)

    def from_local(
        self, local: Tensor, mesh: Any, placements: Sequence[Placement], like: Tensor
    ) -> Tensor:
        """Without a check."""
        return peer.DTensor.from_local(
            local,
            mesh,
            self._placements(placements),
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    @contextmanager
    def random_like_torch(self) -> Iterator[None]:
        """It cannot."""
        yield

    @contextmanager
    def watch(self) -> Iterator[Moved]:
        """Collectives are counted, bytes are not told: one byte each."""
        moved = Moved()
        with CommDebugMode() as mode:
            yield moved
        for op, count in mode.get_comm_counts().items():
            moved.kinds += [str(op).rpartition(".")[2]] * count
        moved.bytes = len(moved.kinds)
