"""Placements, under the name of torch's module: ``from shardwise.placement_types import Shard``."""

from shardwise.layout.placement import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
