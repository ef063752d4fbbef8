"""What a LocalCluster tells its supervisor, and what it hears from it."""

from __future__ import annotations

from pydantic import Field, field_validator

from fluster_bus.messages.model import Message
from fluster_bus.names import check_namespace

SUPERVISOR_MODULE = "fluster_services.supervisor"  # started by name: the services build on this package
MAX_LOCAL_WORKERS, MAX_LOCAL_CONTROLLERS, MAX_PORT = 256, 16, 65_535


class LocalSetup(Message):
    """A cluster on this machine."""

    namespaces: tuple[str, ...] = ("default",)
    workers: int = Field(default=1, ge=1, le=MAX_LOCAL_WORKERS)
    controllers: int = Field(default=1, ge=1, le=MAX_LOCAL_CONTROLLERS)  # one leads, the others stand by
    cpu: float = Field(gt=0)  # logical CPUs of all workers together
    memory: int = Field(gt=0)  # bytes, of all workers together
    store_dir: str | None = None  # None: a temporary folder, removed at the end
    port: int = Field(default=0, ge=0, le=MAX_PORT)
    working_dir: str
    python_path: tuple[str, ...] = ()
    enforce_limits: bool = False

    @field_validator("namespaces")
    @classmethod
    def _check(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check_namespace(name) for name in value))


class LocalStarted(Message):
    """The supervisor's one answer: the address for the operator, or why there is none."""

    address: str = ""
    store_dir: str = ""
    error: str = ""
