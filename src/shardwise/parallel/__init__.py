"""Parallelism for modules: tensor, sequence, data, fully sharded. Names follow torch's."""

from shardwise.parallel.data import data_parallel
from shardwise.parallel.module import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)
from shardwise.parallel.plan import loss_parallel, parallelize_module
from shardwise.parallel.shard import MixedPrecisionPolicy, fully_shard
from shardwise.parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "data_parallel",
    "fully_shard",
    "loss_parallel",
    "parallelize_module",
    "register_fsdp_forward_method",
]
