"""shardwise: distributed tensors for PyTorch.

One tensor, many devices, written as if there were one. Names follow ``torch.distributed.tensor``.
"""

from importlib import import_module
from typing import Any

from shardwise import checkpoint
from shardwise.capture.annotate import mark_sharding
from shardwise.capture.propagate import propagate
from shardwise.capture.report import explain
from shardwise.capture.step import capture
from shardwise.comm.meshes import init_device_mesh
from shardwise.events import CommLog
from shardwise.layout.mesh import Mesh as DeviceMesh
from shardwise.layout.placement import Partial, Placement, Replicate, Shard
from shardwise.program.modes import strict
from shardwise.random import manual_seed, rng
from shardwise.route.cost import Profile, minimize
import shardwise.rules  # noqa: F401  the table is filled before the first call
from shardwise.simulate import simulate
from shardwise.tensor.create import distribute_module, distribute_tensor
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from shardwise.tensor.gradients import no_sync
from shardwise.tensor.local_map import local_map
from shardwise.tensor.many import explain_redistribute, redistribute_many, redistribute_state

__version__ = "0.1.0"

_DOORS = ("debug", "device_mesh", "experimental", "parallel", "placement_types", "testing")


def __getattr__(name: str) -> Any:
    """Import a room when it is first asked for: ``shardwise.parallel.fully_shard``."""
    if name in _DOORS:
        return import_module(f"shardwise.{name}")
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


__all__ = [
    "CommLog",
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Profile",
    "Replicate",
    "Shard",
    "arange",
    "capture",
    "checkpoint",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "explain_redistribute",
    "eye",
    "full",
    "init_device_mesh",
    "linspace",
    "local_map",
    "manual_seed",
    "mark_sharding",
    "minimize",
    "no_sync",
    "ones",
    "propagate",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute_many",
    "redistribute_state",
    "rng",
    "simulate",
    "strict",
    "zeros",
]
