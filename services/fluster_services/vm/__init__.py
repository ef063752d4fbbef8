"""Machines for workers, as many as are wanted: subprocesses here, containers of a Docker Engine, and what keeps the contract."""

from fluster_services.vm.backend import (
    ClusterToJoin,
    UnknownVMError,
    VMBackend,
    VMError,
    VMFailedError,
    VMInfo,
    VMStatus,
    VMTimeoutError,
)
from fluster_services.vm.docker_backend import DockerBackend
from fluster_services.vm.local_backend import LocalBackend

__all__ = [
    "ClusterToJoin",
    "DockerBackend",
    "LocalBackend",
    "UnknownVMError",
    "VMBackend",
    "VMError",
    "VMFailedError",
    "VMInfo",
    "VMStatus",
    "VMTimeoutError",
]
