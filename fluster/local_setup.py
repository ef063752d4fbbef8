"""How daemons on this machine are set up: what a LocalCluster and its supervisor tell each other, and a worker's
defaults.

Imports next to nothing: nothing of a cluster runs before its supervisor has read this.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, Self, cast

from fluster_bus.core.json_types import JsonObject

if TYPE_CHECKING:
    from pathlib import Path

RuntimeName = Literal["process", "docker", "auto"]
ProfileName = Literal["default", "gpu", "trusted"]  # what tasks in containers may do

SUPERVISOR_MODULE = "fluster_services.supervisor"  # started by name: the services build on this package
ADDRESS_FILE = "address.json"  # in the store folder, of a cluster whose owner has one written; gone when the cluster is
# {variable: the option by which it was given}, for a daemon, from the command that becomes it
OPTIONS_VARIABLE = "FLUSTER_OPTIONS"
WORKER_ID_VARIABLE, STATE_DIR_VARIABLE = "FLUSTER_WORKER_ID", "FLUSTER_STATE_DIR"
START_TIMEOUT_S = 45.0
VM_START_TIMEOUT_S = 900.0  # an image may have to be pulled
MAX_LOCAL_WORKERS, MAX_LOCAL_CONTROLLERS, MAX_PORT = 256, 16, 65_535


@dataclass(frozen=True, kw_only=True)
class LocalSetup:
    """A cluster on this machine."""

    namespaces: tuple[str, ...]  # each once
    workers: int = 1
    controllers: int = 1  # one leads, the others stand by
    cpu: float  # logical CPUs of all workers together; with a backend 0: as that has it
    memory: int  # bytes, of all workers together; with a backend 0: as that has it
    disk: int | None = None  # bytes, the same; None: what is free there, and none with a backend
    # As `fluster_bus.core.devices.as_json` writes them, of all workers together; None: those that are found once the
    # cluster is up.
    devices: tuple[object, ...] | None = None
    labels: tuple[str, ...] = ()  # of each worker, sorted, as zone=a
    resources: dict[str, float] = field(default_factory=dict)  # {name: count}, of all workers together
    store_dir: str | None = None  # None: a temporary folder, removed at the end
    port: int = 0
    working_dir: str
    python_path: tuple[str, ...] = ()
    passes_secrets: bool = True  # tasks get all variables of the owner's environment, else none with names of secrets
    # {name of a time, as fence_after_s: seconds}, where not as usual
    timing: dict[str, float] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)  # {name of a limit, as max_log: its value}, where not as usual
    enforce_limits: bool = False
    runtime: RuntimeName = "process"  # "auto": containers where a Docker engine answers
    docker_host: str | None = None  # None: the machine's own
    image: str | None = None  # of jobs that name none
    # {setting of a worker's containers: value}, where not as usual
    containers: JsonObject = field(default_factory=dict)
    drain_timeout_s: float | None = None  # None: as other workers
    build_timeout_s: float | None = None  # the same
    backend: str | None = None  # what has VMs for the workers, pickled, in Base64; None: they are processes here
    start_timeout_s: float = START_TIMEOUT_S  # from the first process until the last is ready

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        fields: JsonObject = json.loads(data)
        for name, value in fields.items():
            fields[name] = tuple(cast("list[object]", value)) if isinstance(value, list) else value
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class LocalStarted:
    """The supervisor's answer: the address for the operator, or why there is none; before it, how far the cluster
    is.

    Each is a message of `fluster.json_lines`.
    """

    progress: str = ""  # then it is not the last
    address: str = ""
    store_dir: str = ""
    error: str = ""


def default_worker_id() -> str:
    """The host's name, as it can stand in a subject."""
    import socket

    return socket.gethostname().replace(".", "-")


def default_state_dir() -> Path:
    """In the home of the user who starts it: where a worker keeps what it must find again."""
    from pathlib import Path

    return Path.home() / ".fluster" / "worker"
