"""Names in the registry, who serves them, and what is kept of actors that serve a name alone."""

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
    job_id: JobId | None = None
    """None: a server outside of any job, kept alive by its lease."""
    task: int = 0
    attempt: int = 0
    worker_id: WorkerId | None = None
    metadata: Mapping[str, str] = Field(default_factory=dict)
    lease_s: float | None = None
    """Without a renewal in this time it is removed."""

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


class EndpointQuery(Message):
    """Asks for the endpoints of a name, or of names with a prefix."""

    name: str | None = None
    prefix: str = ""


class EndpointList(Message):
    """Endpoints that are registered."""

    endpoints: tuple[Endpoint, ...] = ()


class UnregisterRequest(Message):
    """Takes one endpoint away."""

    endpoint_id: str


class ActorSeat(Message):
    """Whose an actor's name is, as the holder says itself. It does as long as it writes this again and again."""

    instance: str = ""  # empty: it was given back
    holder: str = ""  # the task whose attempts follow each other; empty for a process outside of any job
    who: str = ""  # for people
    is_durable: bool = False  # its calls are stored, also while no process has the seat
    lease_s: float | None = None  # for how long it counts on each writing; None: ten seconds


class KeptAnswer(Message):
    """The answer to the call that was handled last: its actor may have ended before it was sent."""

    subject: str
    ok: bool
    payload: bytes


class HandledCalls(Message):
    """How far a durable actor has come. Only the instance that wrote it last may write it again."""

    instance: str
    sequence: int = 0  # of the last call that was handled, in the stream of calls
    answer: KeptAnswer | None = None


class SavedState(Message):
    """What a durable actor has saved, a pickle. Only the instance that wrote it last may write it again."""

    instance: str
    data: bytes | None = None  # None before anything was saved
    sequence: int = 0  # of the call that it was saved in: it is not run again


class TrimCalls(Message):
    """Asks that the calls of an actor that stand before a sequence are dropped."""

    name: str
    before: int
