"""Meshes, under the name of torch's module: ``from shardwise.device_mesh import init_device_mesh``."""

from shardwise.comm.meshes import init_device_mesh
from shardwise.layout.mesh import Mesh as DeviceMesh

__all__ = ["DeviceMesh", "init_device_mesh"]
