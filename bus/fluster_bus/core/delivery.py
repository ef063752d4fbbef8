"""A message as it arrived, and the headers by which errors travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fluster_bus.core.codec import encode_json_error

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_ERROR_HEADER = "Nats-Service-Error"  # of the services API, ADR-32
_ERROR_CODE_HEADER = "Nats-Service-Error-Code"
STATUS_HEADER, DESCRIPTION_HEADER = "Status", "Description"
# The server adds them to each message of a stream that it hands out, behind the headers that its writer gave it.
SEQUENCE_HEADER, SUBJECT_HEADER, TIME_HEADER = "Nats-Sequence", "Nats-Subject", "Nats-Time-Stamp"
_MAX_ERROR = 1_000  # characters; the whole text is in the data


class Delivery(NamedTuple):
    """A message as it arrived."""

    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None

    @classmethod
    def of(cls, msg: Msg) -> Delivery:
        """What nats-py delivered."""
        headers: dict[str, Any] | None = msg.headers
        return cls(msg.subject, msg.data, msg.reply, headers)

    @property
    def is_stored(self) -> bool:
        """Whether it is a message of a stream: what its headers say is its writer's word then, and no answer to a request."""
        return bool(self.headers) and SEQUENCE_HEADER in self.headers  # type: ignore[operator]

    @property
    def status(self) -> str | None:
        """The server's own word on a reply: `503` no program listens, `404` not found, `204` end of a batch."""
        return self.headers.get(STATUS_HEADER) if self.headers and not self.is_stored else None

    @property
    def error(self) -> tuple[str, str] | None:
        """Code and text of a reply that is a service's error."""
        if not self.headers or _ERROR_HEADER not in self.headers or self.is_stored:
            return None
        return self.headers.get(_ERROR_CODE_HEADER, "unknown"), self.headers[_ERROR_HEADER]


def error_headers(code: str, text: str) -> dict[str, str]:
    """The headers of a reply that is an error."""
    # A header's value cannot hold a line break, nor what has no form in UTF-8.
    one_line = "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))[:_MAX_ERROR]
    return {_ERROR_CODE_HEADER: code, _ERROR_HEADER: one_line or code}


def error_reply(code: str, error: Exception) -> tuple[bytes, dict[str, str]]:
    """Data and headers of a JSON reply that is an error."""
    return encode_json_error(code, str(error)), error_headers(code, str(error))
