"""What clients ask the controller, its answers, and what stands in the queue of submissions for a request that is too large for it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.names import JobId, check_name
from fluster_bus.core.stream_bounds import MAX_INLINE_BYTES, PAYLOADS, REQUESTS
from fluster_bus.messages.jobs import JobInfo, JobStatus
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.wire_range import WireRange
from fluster_bus.messages.records import RefusedJob

MAX_JOBS_A_REQUEST = 10_000
MAX_JOBS_A_REPLY = 1_000
MAX_REASON_CHARACTERS = 1_000


class StatusRequest(Message):
    """Asks how jobs stand; with `submissions`, their places in the submit stream, answered once all were looked at."""

    job_ids: tuple[JobId, ...] = Field(default=(), max_length=MAX_JOBS_A_REQUEST)
    submissions: tuple[int, ...] = Field(default=(), max_length=MAX_JOBS_A_REQUEST)
    details: bool = False  # also what each was asked to run


class StatusReply(Message):
    """The jobs in the order asked for. Unknown ones are named, refused ones with the reason.

    Those that did not fit into one message are left out: ask for them again.
    """

    jobs: tuple[JobInfo, ...] = ()
    unknown: tuple[JobId, ...] = ()
    refused: tuple[RefusedJob, ...] = ()


class ListRequest(Message):
    """Asks for the newest jobs of the namespace."""

    limit: int = Field(default=1_000, ge=1, le=MAX_JOBS_A_REQUEST)
    states: tuple[JobStatus, ...] = ()  # empty: all
    skip: int = Field(default=0, ge=0)  # so many of the newest were sent before; a cursor is quicker, and misses none
    after: int | None = None  # the cursor of the reply before: goes on from there
    details: bool = False  # also what each was asked to run


class ListReply(Message):
    """Jobs, the newest first, without the exceptions that they failed with. There may be more than fit."""

    jobs: tuple[JobInfo, ...] = ()
    more: bool = False  # fewer are listed than were asked for, and there are others
    cursor: int | None = None  # of the last that is listed, with which to ask for those


class TerminateRequest(Message):
    """Asks for a job to be stopped, with what it launched."""

    job_id: JobId
    reason: str = Field(default="terminated by request", max_length=MAX_REASON_CHARACTERS)


class TerminateReply(Message):
    """The job as it stood when the wish was recorded; it ends soon after."""

    job: JobInfo


class ExplainRequest(Message):
    """Asks why a job is not running."""

    job_id: JobId


class ExplainReply(Message):
    """The reason, as one sentence."""

    job_id: JobId
    reason: str


class FlushRequest(Message):
    """Asks the controller to have what a job's tasks have written by now in the log stream, before it answers."""

    job_id: JobId


class OwnerRequest(Message):
    """Tells that a program which owns jobs lives, or that it has ended."""

    owner: str
    ended: bool = False

    @field_validator("owner")
    @classmethod
    def _check_owner(cls, value: str) -> str:
        return check_name("owner", value)


class OwnerReply(Message):
    """For how long the word counts, and how many jobs of the owner have not ended, or may still be recorded after its end."""

    lease_s: float
    unfinished: int = 0


class NamespaceRequest(Message):
    """Asks for a namespace to be there, with its buckets and streams: what a client says first."""

    wire: WireRange | None = None  # what it speaks


class NamespaceReply(Message):
    """A namespace has its buckets and streams."""

    wire: WireRange | None = None  # what the controller speaks
    version: str = ""  # of Fluster, at the controller
    endpoint_lease_s: float | None = None  # of what registers there without a job; None: ten seconds
    seat_lease_s: float | None = None  # of actors that have one instance; None: ten seconds
    object_bytes: dict[str, int] = Field(default_factory=dict)  # {kind of objects: the largest that it has room for}


class Done(Message):
    """It is done; there is nothing more to say."""


_MARK = b'"stored_request"'
_Text = Annotated[str, Field(max_length=1_000)]


class StoredRequest(Message):
    """A JobRequest that is stored among the requests of its namespace, or its payloads."""

    stored_request: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # its SHA-256
    size: int = Field(ge=0, le=1 << 40)  # of its JSON; what is stored may not be larger
    # Among what it is stored. Older clients, and those of older controllers, have it among the payloads.
    kind: Annotated[str, Field(pattern=f"^({PAYLOADS.name}|{REQUESTS.name})$")] = PAYLOADS.name
    # As in the request: for readers of the queue.
    name: _Text = ""
    job_id: _Text | None = None
    submission: _Text | None = None

    @classmethod
    def in_place_of_request(cls, data: bytes) -> Self | None:
        """What a submitted message is, if it is not a request itself."""
        if len(data) > MAX_INLINE_BYTES or _MARK not in data:
            return None
        try:
            return cls.from_json(data)
        except InvalidMessageError:
            return None  # then it is a request, or nothing that can be taken
