"""How a machine becomes a worker by a join token: what is asked and answered, and what is kept of tokens and of those who joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from fluster_bus.messages.parts.model import Message

JOIN_REFUSED = "JoinRefused"  # the code of the error
MAX_NAMESPACES = 64  # of a token
MAX_USES = 1_000
_Text = Annotated[str, Field(max_length=256)]


class JoinRequest(Message):
    """Who would like to be the worker of this id. Keys are public: whoever asks has made them, and keeps the seeds."""

    worker_id: _Text
    key: _Text
    job_keys: Annotated[Mapping[_Text, _Text], Field(max_length=MAX_NAMESPACES)]  # {namespace: of what its jobs get}


class JoinReply(Message):
    """Signed tokens for the keys of a JoinRequest."""

    worker: str
    jobs: Mapping[str, str]  # {namespace: of its jobs}


class JoinTokenRecord(Message):
    """What a join token is good for, and who has used it. It holds no secret. Times are Unix times in seconds."""

    token_id: str
    namespaces: tuple[str, ...]
    uses: int
    expires_at: float
    used_by: Mapping[str, str] = Field(default_factory=dict)  # {public key of a worker: its id}


class JoinedWorker(Message):
    """Whose the id of a worker is that joined by a token."""

    worker_id: str
    token_id: str
    key: str
    job_keys: Mapping[str, str]  # {namespace: public key}
    joined_at: float
    revoked_at: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All that was signed for it, its jobs' too."""
        return (self.key, *self.job_keys.values())


class IssuedWorkers(Message):
    """The names of workers and of the cluster's own users whose credentials were made by hand: nobody can join by one of them."""

    names: tuple[str, ...] = ()
