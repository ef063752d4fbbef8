"""Exceptions on their way from an actor to its caller."""

from __future__ import annotations

import concurrent.futures
import pickle
import traceback as tracebacks

from fluster.errors import RemoteError
from fluster.remote_errors.kindred_errors import (
    from_user_code,
    message_of,
    pickled,
    pickled_or_kindred,
    restored,
    type_name,
)
from fluster_bus.core import codec

_MAX_TEXT = 64 << 10  # characters of a traceback or message; an exception never fills a message
_MAX_PICKLE_BYTES = 1 << 20
# What Python itself takes for a sign when it comes out of a future or a generator; SystemExit and its like, which
# would end the caller's process, do not derive from Exception.
_NEVER_THEMSELVES = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)
_FIRST_FRAMES_KEPT, _LAST_KEPT = 8 << 10, 48 << 10

# What the actor says about sending a call again.
RETRY = "retry"  # it may be, as far as its method declares retries
FULL = "full"  # once the mailbox has room again, if its caller wants to wait for that


def traceback_of(error: BaseException, *, skipped_frames: int = 0) -> str:
    """The traceback as text, without the outermost frames, which are ours: so many, and those before user code begins."""
    frame = error.__traceback__
    for _ in range(skipped_frames):
        frame = frame.tb_next if frame is not None else None
    return _shortened("".join(tracebacks.format_exception(type(error), error, from_user_code(frame))))


def _shortened(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_FIRST_FRAMES_KEPT]}\n…\n{text[-_LAST_KEPT:]}"


def encode_failure(error: BaseException, *, skipped_frames: int = 0, advice: str = "") -> bytes:
    """An exception for the wire: as itself where it survives pickling, and always as text."""
    text = traceback_of(error, skipped_frames=skipped_frames)
    kind, message = type_name(error), _shortened(message_of(error))
    itself = None
    if _may_be_itself(error):
        itself = pickled_or_kindred(error, text=(kind, message, text), dump=codec.encode, most_bytes=_MAX_PICKLE_BYTES)
    return pickle.dumps((kind, message, text, itself, advice))


def failure_payload(kind: str, message: str, traceback: str, itself: Exception | None, advice: str) -> bytes:
    """A failure that arrived by another means, as `encode_failure` would have written it."""
    known = pickled(itself, dump=codec.encode, most_bytes=_MAX_PICKLE_BYTES) if _may_be_itself(itself) else None
    return pickle.dumps((kind, message, traceback, known, advice))


def _may_be_itself(error: BaseException | None) -> bool:
    return isinstance(error, Exception) and not isinstance(error, _NEVER_THEMSELVES)


def advice_of(payload: bytes) -> str:
    """What the actor says about sending the call again. The exception itself is not read: its class may be slow to import."""
    *_, advice = pickle.loads(payload)
    return advice if isinstance(advice, str) else ""


def is_failure_of(payload: bytes, kind: type[BaseException]) -> bool:
    """True for an exception of that very class. What travels is not read for it."""
    name: str = pickle.loads(payload)[0]
    return name == f"{kind.__module__}.{kind.__qualname__}"


def decode_failure(payload: bytes) -> Exception:
    """The exception, with the remote traceback as a note; a RemoteError when it cannot be had as itself here."""
    kind, message, text, itself, *_ = pickle.loads(payload)
    return restored(itself, RemoteError(kind, message, text), traceback=text, where="at the actor")
