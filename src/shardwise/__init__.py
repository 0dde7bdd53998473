"""shardwise: distributed tensors for PyTorch."""

from shardwise.comm.meshes import init_device_mesh as init_device_mesh
from shardwise.events import CommLog as CommLog
from shardwise.layout.mesh import Mesh as DeviceMesh
from shardwise.layout.placement import Partial as Partial, Replicate as Replicate, Shard as Shard
from shardwise.random import manual_seed as manual_seed, rng as rng
import shardwise.rules
from shardwise.program.modes import strict as strict
from shardwise.simulate import simulate as simulate
from shardwise.tensor.create import distribute_module as distribute_module, distribute_tensor as distribute_tensor
from shardwise.tensor import dispatch
from shardwise.tensor.dtensor import DTensor as DTensor
from shardwise.tensor.factories import (
    arange as arange,
    empty as empty,
    eye as eye,
    full as full,
    linspace as linspace,
    ones as ones,
    rand as rand,
    randint as randint,
    randn as randn,
    randperm as randperm,
    zeros as zeros,
)
from shardwise.tensor.local_map import local_map as local_map
from shardwise.tensor.gradients import no_sync as no_sync
