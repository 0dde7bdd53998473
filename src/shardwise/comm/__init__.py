"""Moving bytes: who is in the world, and the collectives between its ranks."""

from shardwise.comm.c10d import C10dTransport, process_transport
from shardwise.comm.dry import DryTransport, RankGroup
from shardwise.comm.threads import ThreadsTransport, World
from shardwise.comm.transport import Handle, Ready, Transport, current, use

__all__ = [
    "C10dTransport",
    "DryTransport",
    "Handle",
    "RankGroup",
    "Ready",
    "ThreadsTransport",
    "Transport",
    "World",
    "current",
    "process_transport",
    "use",
]
