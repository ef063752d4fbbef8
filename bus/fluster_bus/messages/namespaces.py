"""What is kept of each namespace of a cluster: that it is there, what it may have at once, and how much its jobs weigh."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from fluster_bus.messages.model import Message
from fluster_bus.messages.resources import Size
from fluster_bus.names import Namespace, check_namespace

MAX_WEIGHT = 1_000_000.0


class NamespaceState(StrEnum):
    """How far a namespace has come: what was begun is completed by whichever controller leads."""

    ADDING = "adding"  # its streams are being made
    ACTIVE = "active"
    DROPPING = "dropping"  # its jobs are ended, then its streams are deleted, then this record


class NamespaceQuota(Message):
    """What the jobs of a namespace may have at once, all together; None: as much as there is."""

    cpus: float | None = Field(default=None, ge=0, le=1e9)
    gpus: int | None = Field(default=None, ge=0, le=1_000_000_000)
    memory: Size | None = None  # bytes
    waiting_jobs: int | None = Field(default=None, ge=0, le=1_000_000_000)


class NamespaceRecord(Message):
    """A namespace of the cluster. Only operators and controllers may read or write it."""

    name: Namespace
    quota: NamespaceQuota = NamespaceQuota()
    weight: float = Field(
        default=1.0, gt=0, le=MAX_WEIGHT
    )  # its share beside others whose jobs wait with equal priority
    state: NamespaceState = NamespaceState.ACTIVE
    created_at: float = 0.0  # Unix time in seconds

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        check_namespace(self.name)
        return self
