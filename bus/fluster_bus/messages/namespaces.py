"""What is kept of each namespace of a cluster: that it is there, what it may have at once, and how much its jobs weigh."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from fluster_bus.core.names import Namespace, check_namespace
from fluster_bus.messages.jobs import MAX_PRIORITY
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.resources import Size

MAX_WEIGHT = 1_000_000.0


class NamespaceState(StrEnum):
    """How far a namespace has come: what was begun is completed by whichever controller leads."""

    ADDING = "adding"  # its streams are being made
    ACTIVE = "active"
    DROPPING = "dropping"  # its jobs are being ended
    DELETING = "deleting"  # nothing serves it: its streams are deleted, then this record


class NamespaceQuota(Message):
    """What the jobs of a namespace may have at once, all together; None: as much as there is."""

    cpus: float | None = Field(default=None, ge=0, le=1e9)
    gpus: int | None = Field(default=None, ge=0, le=1_000_000_000)
    memory: Size | None = None
    """Bytes."""
    waiting_jobs: int | None = Field(default=None, ge=0, le=1_000_000_000)
    max_priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """A higher priority counts within the namespace, and as this one beside others."""


class NamespaceRecord(Message):
    """A namespace of the cluster. Only operators and controllers may read or write it."""

    name: Namespace
    quota: NamespaceQuota = NamespaceQuota()
    weight: float = Field(default=1.0, gt=0, le=MAX_WEIGHT)
    """Its share beside others whose jobs wait with equal priority."""
    state: NamespaceState = NamespaceState.ACTIVE
    created_at: float = 0.0
    """Unix time in seconds."""
    added_by: str = Field(default="", max_length=64)
    """The id of the request that asked for it."""

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        check_namespace(self.name)
        return self


QuotaName = Literal["cpus", "gpus", "memory", "waiting_jobs", "max_priority"]

# The codes of errors.
NAMESPACE_REFUSED, NAMESPACE_UNKNOWN, NAMESPACE_IN_USE = "NamespaceRefused", "NamespaceNotFound", "NamespaceInUse"


class NamespaceAdd(Message):
    """Asks for a namespace; sent again under the same id, it asks for the same."""

    name: str
    request_id: str = Field(max_length=64)
    quota: NamespaceQuota = NamespaceQuota()
    weight: float = Field(default=1.0, gt=0, le=MAX_WEIGHT)


class NamespaceSet(Message):
    """Asks for another quota or weight of a namespace. What is not named stays; None in a quota: as much as there is."""

    name: str
    quota: Mapping[QuotaName, int | float | None] = Field(default_factory=dict[QuotaName, int | float | None])
    weight: float | None = Field(default=None, gt=0, le=MAX_WEIGHT)


class NamespaceDrop(Message):
    """Asks that a namespace be gone, and all that it holds; with `force` also while it has unfinished jobs, which are ended."""

    name: str
    force: bool = False


class NamespaceChange(Message):
    """What has become of a request so far. While it is not `done`, it is to be sent again, to learn when it is."""

    done: bool = True
    record: NamespaceRecord | None = None
    """None: the namespace no longer exists."""
    unfinished: int = 0
    """Jobs whose end is waited for."""


class NamespaceStatus(Message):
    """A namespace as the controller sees it."""

    record: NamespaceRecord
    waiting_jobs: int = 0
    running_jobs: int = 0
    store_used: int = 0
    """Bytes."""
    store_share: int = 0


class NamespaceList(Message):
    """All namespaces of the cluster."""

    namespaces: tuple[NamespaceStatus, ...] = ()
