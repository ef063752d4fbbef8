"""Calls and replies as they travel: one message carries one call, or those that were issued together.

    calls     pickle of [(method, deadline or None, payload), …]     to fluster.<ns>.actors.<name>.…
    replies   pickle of (endpoint id, [(index, ok, payload), …])     to <the caller's inbox>.<number of the message>

A payload is what the calling thread pickled: `(args, kwargs)`, and back the result, or a failure (failures.py). So
no message is delayed by another's argument, and none is changed by what its caller does later. Moments have the time of
both clocks: the monotonic one counts where both ends run since the same boot, else the wall's.
"""

from __future__ import annotations

import itertools
import json
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.running.fence_clock import boot_id

T = TypeVar("T")

PICKLE, JSON = "pickle", "json"
CODECS = (PICKLE, JSON)  # how the calls of an actor can be written

_tuple = tuple.__new__  # a named tuple of all its fields, which Python makes without running a function of its own

JOINED = "_calls"  # stands for the method in the subject of a message with several
PING = "_ping"  # asks a member whether it is there; answered with True
CANCEL = "_cancel"  # names calls of the same sender, from the same inbox, whose answers are not waited for
MAX_CALLS, MAX_BYTES = 64, 256 << 10  # of one message; a larger call travels alone
MAX_CANCELS = 1_000  # of one message
READ = "_read"  # tells how far the reader of a stream has come
NOTICES = (CANCEL, READ)  # beside calls; not answered, and no harm when told twice
MAX_ITEMS = 1_000  # of a stream, in one reply

# What a reply says of its call, in place of True for a result and False for a failure. Those that follow do not
# end it: it was found to be a stream, with its window; items, as (number of the first, [item, …]); a question whether
# there is still a reader. The end of a stream is a result without content.
OPENED, ITEMS, PROBE = 2, 3, 4
WANTED, UNWANTED = b"yes", b"no"  # the answers to the question


class Moment(NamedTuple):
    """A point in time that processes on other machines understand as well."""

    boot: str
    monotonic: float
    wall: float

    def after(self, seconds: float) -> Moment:
        """The moment that many seconds later."""
        return Moment(self.boot, self.monotonic + seconds, self.wall + seconds)


_BOOT = boot_id()  # empty outside Linux: the wall clock has to do


def now() -> Moment:
    """This moment, by both clocks."""
    return _tuple(Moment, (_BOOT, time.monotonic(), time.time()))


def seconds_between(earlier: tuple[str, float, float], later: tuple[str, float, float]) -> float:
    """How long after `earlier` the moment `later` is; negative when it is before."""
    if earlier[0] and earlier[0] == later[0]:
        return later[1] - earlier[1]
    return later[2] - earlier[2]


def plain(moment: Moment | None) -> tuple[str, float, float] | None:
    """As it travels."""
    return None if moment is None else (moment.boot, moment.monotonic, moment.wall)


# (method, deadline, payload), and of a call that is traced its trace's context
WireCall = (
    tuple[str, tuple[str, float, float] | None, bytes]
    | tuple[str, tuple[str, float, float] | None, bytes, dict[str, str]]
)
WireReply = tuple[Any, int, Any]  # (index, ok or what else it says, payload)


def encode_calls(calls: list[WireCall]) -> bytes:
    return pickle.dumps(calls, protocol=pickle.HIGHEST_PROTOCOL)


def decode_calls(data: bytes) -> list[WireCall]:
    """The calls of a message. Raises InvalidMessageError."""
    try:
        calls = pickle.loads(data)
    except Exception as error:
        raise InvalidMessageError(f"no calls could be read from {len(data):,} bytes: {error}") from error
    if type(calls) is list:
        for call in calls:
            if not (type(call) is tuple and 3 <= len(call) <= 4 and type(call[0]) is str and type(call[2]) is bytes):
                break
        else:
            return calls
    raise InvalidMessageError(f"{type(calls).__name__} is not a list of calls (method, deadline, payload)")


def encode_cancel(calls: list[tuple[int, int]]) -> bytes:
    """A message that says of calls, each given as (number of its message, index there), that they are no longer waited for."""
    return json.dumps(calls).encode()  # nothing is unpickled for it, as some actors take JSON only


def cancelled_calls(reply: str, payload: bytes) -> list[tuple[str, int]]:
    """The (reply subject, index) of each call that a cancel names; only of calls whose replies go to the inbox that
    this message came with. Raises InvalidMessageError.
    """
    inbox = reply.rpartition(".")[0]
    try:
        return [(f"{inbox}.{number:d}", index) for number, index in json.loads(payload)]
    except Exception as error:
        raise InvalidMessageError(f"no calls to cancel could be read from {len(payload):,} bytes: {error}") from error


def encode_reads(reads: list[tuple[int, int, int, int]]) -> bytes:
    """A message that says how far streams are read: [(number of its call's message, index there, items, bytes), …]."""
    return json.dumps(reads).encode()


def reads_of(reply: str, payload: bytes) -> list[tuple[tuple[str, int], int, int]]:
    """((reply subject, index) of its call, items, bytes) of each stream. Raises InvalidMessageError."""
    inbox = reply.rpartition(".")[0]
    try:
        reads = json.loads(payload)
        return [((f"{inbox}.{number:d}", index), int(items), int(size)) for number, index, items, size in reads]
    except Exception as error:
        raise InvalidMessageError(
            f"nothing that was read could be read from {len(payload):,} bytes: {error}"
        ) from error


def encode_replies(endpoint_id: str, replies: Sequence[WireReply]) -> bytes:
    return pickle.dumps((endpoint_id, replies), protocol=pickle.HIGHEST_PROTOCOL)


def decode_replies(data: bytes) -> tuple[str, list[WireReply]]:
    """Who answers, and what. Raises InvalidMessageError."""
    try:
        endpoint_id, replies = pickle.loads(data)
    except Exception as error:
        raise InvalidMessageError(f"no replies could be read from {len(data):,} bytes: {error}") from error
    if not isinstance(endpoint_id, str) or not isinstance(replies, list):
        raise InvalidMessageError("what arrived is not a list of replies (index, ok, payload)")
    return endpoint_id, replies


def batches(items: Sequence[T], sizes: Sequence[int], *, most: int = MAX_CALLS) -> Iterator[Sequence[T]]:
    """Items, each of so many bytes, in order, as many together as one message may carry."""
    start = 0
    while start < len(items):
        stop = start + most
        if sum(sizes[start:stop]) > MAX_BYTES:
            stop = start + _fitting(sizes[start:stop])
        yield items[start:stop]
        start = stop


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first of them one message may carry: one that is too large travels alone."""
    return max(sum(size <= MAX_BYTES for size in itertools.accumulate(sizes)), 1)
