"""The machines that workers are on: what each has, whatever of it is offered."""

from __future__ import annotations

from pydantic import Field

from fluster_bus.core.names import WorkerId
from fluster_bus.messages.parts.model import Message

MAX_NODE_GPUS = 256  # with instances


class NodeGpu(Message):
    """A GPU of a machine, or an instance of one that is divided (MIG)."""

    index: int = Field(ge=0)
    uuid: str = ""
    model: str = ""
    """As its driver names it."""
    memory: int = Field(default=0, ge=0)
    """Bytes; 0: not known."""
    bus_id: str = ""
    parent: str = ""
    """Of an instance: the UUID of its GPU."""
    divided: bool = False
    fault: str = ""
    """Why it was of no use when the worker looked."""
    withheld: str = ""
    """Why a worker gives it to no task for the time being."""


class NodeInfo(Message):
    """A machine, as a worker found it when it started."""

    machine: str = ""
    """The same for all workers of one start of one machine."""
    system: str = ""
    """Such as Linux 6.8.0 x86_64."""
    cpus: int = Field(default=0, ge=0)
    memory: int = Field(default=0, ge=0)
    """Bytes."""
    disk: int = Field(default=0, ge=0)
    """Bytes of the file system that the worker's state folder is on."""
    gpus: tuple[NodeGpu, ...] = Field(default=(), max_length=MAX_NODE_GPUS)
    gpu_driver: str = ""
    """The version of the GPU driver."""
    cuda: str = ""
    """The newest version that the driver knows."""
    gpu_trouble: str = ""
    """Why GPUs could not be read."""


class WorkerQuery(Message):
    """Asks for workers, by name: those after `after`, at most `limit`. None: all. Their machines are listed only when asked for."""

    nodes: bool = False
    after: WorkerId | None = None
    limit: int | None = Field(default=None, ge=1, le=1_000)


class NodeStatus(Message):
    """A machine, and the workers that are on it."""

    host: str
    info: NodeInfo = NodeInfo()
    workers: tuple[WorkerId, ...] = ()
    alive: bool = False
    """Whether one of them is alive."""
    silent_for_s: float = 0.0
    """Seconds since the last sign of life of any of them."""
    versions: tuple[str, ...] = ()
    """Of Fluster at its workers, sorted."""
    pythons: tuple[str, ...] = ()
