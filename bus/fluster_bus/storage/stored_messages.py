"""Messages of a stream that are written and read one by one, so that no client needs the right to make consumers.

The results of jobs and their secrets are kept so.

Calls to durable actors are in their stream the same way: written, read, and dropped once they are handled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fluster_bus.connection.connection import DEFAULT_TIMEOUT_S
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import (
    BusError,
    DisconnectedError,
    MessageTooLargeError,
    NoRespondersError,
    ObjectCorruptError,
    ObjectNotFoundError,
    RequestTimeoutError,
    StorageError,
    StreamNotFoundError,
)
from fluster_bus.core.stream_bounds import MAX_CALL_BYTES, SECRETS_KEPT_S
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.feeds import Entry, Feed
from fluster_bus.storage.tables import sequence_of_ack

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.connection.carrier import Carrier
    from fluster_bus.core.delivery import Delivery

_PATIENCE_S = 30.0
_COPIED_S = 0.1  # a copy that takes part is behind by milliseconds
_UNANSWERED = (NoRespondersError, DisconnectedError, RequestTimeoutError)

T = TypeVar("T")
_ID_HEADER = "Nats-Msg-Id"
_REPLY_HEADER = "Fluster-Reply"  # the reply subject of the message itself gets the stream's acknowledgement
_BATCH = 16  # calls that are read at once
_TOO_LARGE = 10_054


@dataclass(frozen=True)
class StoredMessages:
    """A stream that keeps the last message of each subject."""

    bus: Carrier
    stream: str

    async def append(self, subject: str, data: bytes) -> int:
        """Store one message; its sequence. Sent twice it is there once, since the later takes the place of the earlier.

        Raises StorageError, BusError.
        """
        try:
            answer = await _patiently(lambda: self.bus.request(subject, data))
        except NoRespondersError as error:
            raise StreamNotFoundError(
                f"no stream takes {subject}: does the namespace exist, is a controller up?"
            ) from error
        except RequestTimeoutError as error:
            raise StorageError(f"{subject} was not acknowledged: is the server's disk full?") from error
        return sequence_of_ack(answer, subject)

    async def last(self, subject: str) -> Delivery | None:
        """The message on `subject`, None when there is none, or no longer. Raises StorageError, BusError."""
        return await self._read(f"{server_subjects.direct_get(self.stream)}.{subject}")

    async def at(self, sequence: int) -> Delivery | None:
        """The message with that sequence. As `last`."""
        return await self._read(server_subjects.direct_get(self.stream), json.dumps({"seq": sequence}).encode())

    async def settle(self) -> None:
        """Return when the server that leads the stream is known to have passed on what it had, or after a moment."""
        told = json.loads((await _patiently(lambda: self.bus.request(server_subjects.stream_info(self.stream)))).data)
        if told.get("config", {}).get("num_replicas", 1) > 1:
            await asyncio.sleep(_COPIED_S)

    async def _read(self, subject: str, data: bytes = b"") -> Delivery | None:
        try:
            answer = await _patiently(lambda: self.bus.request(subject, data))
        except NoRespondersError as error:
            raise StorageError(
                f"stream {self.stream} does not exist: the controller makes it when it starts"
            ) from error
        return answer if answer.status is None else None


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the server is just coming back: nothing here does harm when it is done twice."""
    return await retried(lambda _left_s: ask(), on=_UNANSWERED, timeout_s=_PATIENCE_S)


async def side_by_side(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What these return, in order; none runs on when one has failed."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


RESULT_CHUNK_BYTES = 512 << 10
_AT_ONCE = 8


@dataclass(frozen=True)
class ResultStore:
    """What the callables of a namespace's jobs returned: bytes that workers store for its clients to read.

    A result is a row of chunks, messages named by job, task, attempt and number. Only workers may write them, so what a
    client unpickles is what a job of its own namespace returned. How many there are is in the task's record.
    """

    bus: Bus
    namespace: str

    @property
    def _messages(self) -> StoredMessages:
        return StoredMessages(self.bus, buckets.results_stream(self.namespace))

    async def put(self, job_id: str, task: int, attempt: int, chunks: Iterable[bytes]) -> None:
        """Store the chunks, each of RESULT_CHUNK_BYTES but for the last; doing it again changes nothing.

        Raises StorageError, BusError.
        """
        for number, chunk in enumerate(chunks):
            await self._messages.append(subjects.result_part(self.namespace, job_id, task, attempt, number), chunk)

    async def get(self, job_id: str, task: int, attempt: int, size: int) -> bytes:
        """The `size` bytes that were put. Raises ObjectNotFoundError, ObjectCorruptError, StorageError, BusError."""
        count = -(-size // RESULT_CHUNK_BYTES)
        chunks: list[bytes] = []
        for start in range(0, count, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, count))
            chunks += await side_by_side(self._chunk(job_id, task, attempt, number) for number in numbers)
        data = b"".join(chunks)
        if len(data) != size:
            raise ObjectCorruptError(
                f"the result of task {task} of job {job_id} has {len(data):,} bytes, not the {size:,} of its record"
            )
        return data

    async def remove(self, job_id: str) -> None:
        """Remove all results of a job. It needs the right to change streams. Raises BusError."""
        request = json.dumps({"filter": subjects.results_of_job(self.namespace, job_id)}).encode()
        await self.bus.request(server_subjects.stream_purge(buckets.results_stream(self.namespace)), request)

    async def _chunk(self, job_id: str, task: int, attempt: int, number: int) -> bytes:
        found = await self._messages.last(subjects.result_part(self.namespace, job_id, task, attempt, number))
        if found is None:
            raise ObjectNotFoundError(
                f"the result of task {task} of job {job_id} is not kept any longer: results are kept for "
                "7 days (FLUSTER_RESULTS_KEPT_S of the controller), or until newer ones take their room"
            )
        return found.data


MAX_SECRETS_BYTES = 64 << 10  # of one job
_REMOVAL_TIMEOUT_S = 600.0  # after a long absence of the bus they go with the rest, by their age


@dataclass(frozen=True)
class SecretStore:
    """The secrets of the jobs of a namespace, by how their submission is named.

    They are written by the program that submits the job, read by workers alone, and removed when the job ends.
    """

    bus: Bus
    namespace: str

    def name_of(self, submission: str) -> str:
        """The subject of those of one job; it does not tell whose they are."""
        return subjects.secrets(self.namespace, hashlib.blake2s(submission.encode(), digest_size=16).hexdigest())

    async def put(self, submission: str, values: Mapping[str, str]) -> None:
        """Store {variable: value} of one job; doing it again changes nothing. Raises StorageError, BusError."""
        await self._messages.append(self.name_of(submission), json.dumps(dict(values)).encode())

    async def get(self, submission: str) -> dict[str, str]:
        """What was put. Only services can. Raises ObjectNotFoundError, StorageError, BusError."""
        found = await self._messages.last(self.name_of(submission))
        values = json.loads(found.data) if found is not None else None
        if not isinstance(values, dict):
            raise ObjectNotFoundError(
                f"its secrets are no longer kept: they go when a job ends, or after a time, {SECRETS_KEPT_S / 86_400:g} days "
                "unless the cluster is set to another; submit it again"
            )
        return {str(name): str(value) for name, value in values.items()}

    async def remove(self, submission: str) -> None:
        """Remove those of one job. Only services can. Raises BusError."""
        await self.remove_named(self.name_of(submission))

    async def remove_named(self, name: str) -> None:
        """The same, by the name under which they are kept. Raises BusError."""
        request = json.dumps({"filter": name}).encode()
        await self.bus.request(server_subjects.stream_purge(buckets.secrets_stream(self.namespace)), request)

    async def names(self) -> set[str]:
        """Under which names there are some. Only services can ask. Raises BusError."""
        stream = buckets.secrets_stream(self.namespace)
        request = json.dumps({"subjects_filter": subjects.secrets(self.namespace)}).encode()
        told = json.loads((await self.bus.request(server_subjects.stream_info(stream), request)).data)
        if "error" in told:
            raise StorageError(f"stream {stream} tells nothing of itself: {told['error'].get('description')}")
        return set(told["state"].get("subjects") or ())

    @property
    def _messages(self) -> StoredMessages:
        return StoredMessages(self.bus, buckets.secrets_stream(self.namespace))


async def remove_secrets(store: SecretStore, submission: str) -> None:
    """Remove those of one job, once the bus lets them be removed."""
    await retried(lambda _left_s: store.remove(submission), on=(BusError,), timeout_s=_REMOVAL_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call as its stream has it."""

    sequence: int
    call_id: str
    reply: str  # an inbox; empty when no answer is wanted
    data: bytes

    @staticmethod
    def of(entry: Entry) -> StoredCall:
        reply = entry.headers.get(_REPLY_HEADER, "")
        call_id = entry.headers.get(_ID_HEADER) or str(entry.sequence)
        return StoredCall(entry.sequence, call_id, reply if subjects.is_inbox(reply) else "", entry.data)


async def store_call(
    bus: Bus,
    namespace: str,
    name: str,
    data: bytes,
    *,
    call_id: str,
    reply: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> bool:
    """Store a call; False when it was there already, by its id.

    Raises MessageTooLargeError, StreamNotFoundError, StorageError when there is no room, and what `Bus.request` raises.
    """
    headers = {_ID_HEADER: call_id, _REPLY_HEADER: reply}
    try:
        answer = await bus.request(subjects.durable_calls(namespace, name), data, timeout_s=timeout_s, headers=headers)
    except NoRespondersError as error:
        raise StreamNotFoundError(f"no stream takes calls to {name}: does the namespace {namespace} exist?") from error
    ack = json.loads(answer.data)
    if ack.get("error", {}).get("err_code") == _TOO_LARGE:
        raise MessageTooLargeError(
            f"a stored call has {len(data):,} bytes, more than its cluster takes ({MAX_CALL_BYTES >> 20} MiB with the headers, unless "
            "FLUSTER_MAX_CALL says else): put what is large where the actor finds it, and pass its name"
        )
    sequence_of_ack(answer, f"the call to {name}")
    return not ack.get("duplicate", False)


def calls_feed(bus: Bus, namespace: str, name: str) -> Feed:
    """The calls of one actor, in order. What is republished of them are headers, to wake the reader."""
    return Feed(
        bus,
        buckets.calls_stream(namespace),
        subject=subjects.durable_calls(namespace, name),
        watch=subjects.watch_calls(namespace, name),
        batch=_BATCH,
    )


async def drop_calls(bus: Bus, namespace: str, name: str, before: int) -> None:
    """Drop the calls of an actor that stand before sequence `before`. Only services may. Raises StorageError."""
    request = json.dumps({"filter": subjects.durable_calls(namespace, name), "seq": before}).encode()
    answer = await bus.request(server_subjects.stream_purge(buckets.calls_stream(namespace)), request)
    error = json.loads(answer.data).get("error")
    if error is not None:
        raise StorageError(f"the calls of {name} could not be dropped: {error.get('description')}")
