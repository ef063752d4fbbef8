"""Calls and replies between Fluster's own caller and an actor that takes JSON only: nothing of the actor's is unpickled.

One message carries one call, in the form that people write too. Replies come to an inbox of their own, whose name no
such actor can turn into that of the other one, where pickles are read.
"""

from __future__ import annotations

import builtins
import json

from fluster.actors.protocol.failures import failure_payload
from fluster.errors import (
    ActorDiedError,
    ActorFailedError,
    ActorGivenUpError,
    ActorTimeoutError,
    InvalidArgumentsError,
    MailboxFullError,
)
from fluster.tracing import HEADERS, Carrier
from fluster_bus.core import codec
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError, MessageTooLargeError
from fluster_bus.payloads import payloads

DEADLINE_HEADER = "Fluster-Deadline"  # a moment, as in the frames of other calls

# What the other end raises of Fluster's own, by its name on the wire.
_KNOWN: dict[str, type[Exception]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        ActorDiedError,
        ActorFailedError,
        ActorGivenUpError,
        ActorTimeoutError,
        InvalidArgumentsError,
        InvalidMessageError,
        MailboxFullError,
        MessageTooLargeError,
    )
}


class NoJsonError(TypeError):
    """The arguments of a call have no form in JSON."""


def encode_call(payload: bytes) -> bytes:
    """A call in JSON, of the payload that this process pickled. Raises NoJsonError."""
    try:
        args, kwargs = payloads.decode(payload)
    except Exception as error:  # of a user's class
        raise NoJsonError(f"the arguments have no JSON form: they cannot be read again: {error}") from error
    try:
        return codec.encode_json_call(args, kwargs)
    except TypeError as error:
        raise NoJsonError(str(error)) from error


def headers_of(deadline: tuple[str, float, float] | None, trace: Carrier | None = None) -> dict[str, str] | None:
    """What a message says beside its call: nothing, most often."""
    headers = dict(trace or {})
    if deadline is not None:
        headers[DEADLINE_HEADER] = json.dumps(deadline)
    return headers or None


def trace_of(delivery: Delivery) -> Carrier | None:
    """The trace that the call belongs to."""
    headers = delivery.headers
    if not headers or HEADERS[0] not in headers:
        return None
    return {name: headers[name] for name in HEADERS if name in headers}


def deadline_of(delivery: Delivery) -> tuple[str, float, float] | None:
    """Until when its caller waits. Raises InvalidMessageError."""
    text = delivery.headers.get(DEADLINE_HEADER) if delivery.headers else None
    if text is None:
        return None
    try:
        boot, monotonic, wall = json.loads(text)
        return str(boot), float(monotonic), float(wall)
    except (ValueError, TypeError) as error:
        raise InvalidMessageError(f"{DEADLINE_HEADER}: {text[:80]!r} is not [boot id, monotonic, wall]") from error


def decode_reply(data: bytes) -> tuple[bool, bytes]:
    """Whether the call went well, and the payload that says so in this process. Raises InvalidMessageError."""
    try:
        answer = json.loads(data)
        if "result" in answer:
            return True, codec.encode(answer["result"])
        error = answer["error"]
        kind, message = str(error["type"]), str(error["message"])
        text = str(error.get("traceback", ""))
        return False, failure_payload(kind, message, text, _exception(kind, message), str(error.get("advice", "")))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise InvalidMessageError(
            f"{data[:200].decode(errors='replace')!r} is not a reply: an actor that takes JSON answers "
            '{"result": …} or {"error": {"type": …, "message": …}}'
        ) from error


def _exception(kind: str, message: str) -> Exception | None:
    """The exception itself where it is Fluster's or Python's own, and made of a text."""
    found: object = _KNOWN.get(kind) or getattr(builtins, kind, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    try:
        return found(message)
    except TypeError:  # it takes more than a text
        return None
