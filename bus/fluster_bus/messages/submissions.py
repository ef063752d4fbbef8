"""What stands in the queue of submissions for a request that is too large for it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.object_kinds import PAYLOADS, REQUESTS
from fluster_bus.core.stream_bounds import MAX_INLINE_BYTES
from fluster_bus.messages.parts.model import Message

_MARK = b'"stored_request"'
_Text = Annotated[str, Field(max_length=1_000)]


class StoredRequest(Message):
    """A JobRequest that is stored among the requests of its namespace, or its payloads."""

    stored_request: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # its SHA-256
    size: int = Field(ge=0, le=1 << 40)  # of its JSON; what is stored may not be larger
    # Among what it is stored. Older clients, and those of older controllers, have it among the payloads.
    kind: Annotated[str, Field(pattern=f"^({PAYLOADS.name}|{REQUESTS.name})$")] = PAYLOADS.name
    # As in the request: for who reads the queue.
    name: _Text = ""
    job_id: _Text | None = None
    submission: _Text | None = None

    @classmethod
    def in_place_of_request(cls, data: bytes) -> Self | None:
        """What a submitted message is, if it is no request itself."""
        if len(data) > MAX_INLINE_BYTES or _MARK not in data:
            return None
        try:
            return cls.from_json(data)
        except InvalidMessageError:
            return None  # then it is a request, or nothing that can be taken
