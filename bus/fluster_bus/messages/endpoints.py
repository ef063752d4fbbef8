"""A name in the registry and who stands behind it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator

from fluster_bus.core.names import EndpointId, JobId, Namespace, WorkerId, check_name
from fluster_bus.messages.parts.model import Message

MAX_METADATA_BYTES = 64 << 10


class Endpoint(Message):
    """One of those registered under `name`; for actors the address is a subject."""

    endpoint_id: EndpointId
    name: str
    address: str = Field(min_length=1, max_length=2_048)
    namespace: Namespace
    job_id: JobId | None = None  # None: a server outside of any job, kept alive by its lease
    task: int = 0
    attempt: int = 0
    worker_id: WorkerId | None = None
    metadata: Mapping[str, str] = Field(default_factory=dict)
    lease_s: float | None = None  # without a renewal in this time it is removed

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return check_name("endpoint name", value)

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        size = sum(len(key) + len(text) for key, text in value.items())
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"metadata has {size:,} characters, over the limit of {MAX_METADATA_BYTES:,}")
        return value
