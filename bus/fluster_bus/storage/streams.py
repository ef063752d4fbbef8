"""The streams and buckets of a cluster and of a namespace: how they are written and read."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    InvalidMessageError,
    NoRespondersError,
    RequestTimeoutError,
    StorageTimeoutError,
    StreamNotFoundError,
)
from fluster_bus.messages.endpoints import ActorSeat, Endpoint, HandledCalls, SavedState
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.records import Fence, JobRecord, Leader, TaskRecord
from fluster_bus.storage.tables import Table, sequence_of_ack

if TYPE_CHECKING:  # messages that only services and operators use are imported by what reads them
    from fluster_bus.connection.bus import Bus
    from fluster_bus.messages.namespaces import NamespaceRecord
    from fluster_bus.messages.workers import IssuedWorkers, JoinedWorker, JoinTokenRecord, WorkerInfo

Record = TypeVar("Record", bound=Message)

_ID_HEADER = "Nats-Msg-Id"


# ---- tables ---------------------------------------------------------------------------------------------


def _records(bus: Bus, namespace: str, read: Callable[[str, bytes], Record]) -> Table[Record]:
    watch = functools.partial(subjects.watch_jobs, namespace)
    return Table(bus, buckets.jobs_bucket(namespace), read, watch=watch, has=buckets.is_record_key)


def tasks_table(bus: Bus, namespace: str) -> Table[TaskRecord]:
    """The records `<job>.<task>` of a namespace."""
    return _records(bus, namespace, lambda _key, data: TaskRecord.from_json(data))


def jobs_table(bus: Bus, namespace: str) -> Table[JobRecord]:
    """The records `<job>` of a namespace, in the same bucket as those of the tasks."""
    return _records(bus, namespace, lambda _key, data: JobRecord.from_json(data))


def records_table(bus: Bus, namespace: str) -> Table[JobRecord | TaskRecord]:
    """The records of jobs and of tasks, for readers that watch them all."""

    def read(key: str, data: bytes) -> JobRecord | TaskRecord:
        return TaskRecord.from_json(data) if buckets.is_task_key(key) else JobRecord.from_json(data)

    return _records(bus, namespace, read)


def endpoint_key(endpoint: Endpoint) -> str:
    """Where an endpoint stands in its namespace's registry."""
    return buckets.endpoint_key(
        endpoint.name, endpoint.job_id or buckets.NO_JOB, endpoint.task, endpoint.attempt, endpoint.endpoint_id
    )


def endpoints_table(bus: Bus, namespace: str) -> Table[Endpoint]:
    """The registry of a namespace."""
    watch = functools.partial(subjects.watch_endpoints, namespace)

    def read(key: str, data: bytes) -> Endpoint:
        # Jobs write here what they like: a record is believed where it belongs, so none speaks for another name or namespace.
        endpoint = Endpoint.from_json(data)
        place = endpoint_key(endpoint)
        if (place, endpoint.namespace) != (key, namespace):
            raise InvalidMessageError(f"it is of {endpoint.namespace} and belongs under {place}")
        return endpoint

    return Table(bus, buckets.endpoints_bucket(namespace), read, watch=watch)


def leaders_table(bus: Bus) -> Table[Leader]:
    """Who leads, under LEADER_KEY."""
    return Table(
        bus,
        buckets.CONTROLLERS_BUCKET,
        lambda _key, data: Leader.from_json(data),
        watch=subjects.watch_controllers,
    )


def fences_table(bus: Bus, namespace: str) -> Table[Fence]:
    """Whose verdicts are taken in the namespace, under LEADER_KEY of the bucket of its jobs."""
    watch = functools.partial(subjects.watch_jobs, namespace)
    return Table(bus, buckets.jobs_bucket(namespace), lambda _key, data: Fence.from_json(data), watch=watch)


def workers_table(bus: Bus) -> Table[WorkerInfo]:
    """The workers that have registered."""
    from fluster_bus.messages.workers import WorkerInfo

    return Table(
        bus,
        buckets.WORKERS_BUCKET,
        lambda _key, data: WorkerInfo.from_json(data),
        watch=subjects.watch_workers,
    )


def namespaces_table(bus: Bus) -> Table[NamespaceRecord]:
    """The namespaces of the cluster, each under its name. Only services and operators may read or write them."""
    from fluster_bus.messages.namespaces import NamespaceRecord

    def read(key: str, data: bytes) -> NamespaceRecord:
        record = NamespaceRecord.from_json(data)
        if record.name != key:
            raise InvalidMessageError(f"it is of namespace {record.name!r}")
        return record

    return Table(bus, buckets.NAMESPACES_BUCKET, read, watch=subjects.watch_namespaces)


def _joins(bus: Bus, read: Callable[[str, bytes], Record]) -> Table[Record]:
    return Table(bus, buckets.JOINS_BUCKET, read, watch=subjects.watch_joins)


def join_tokens_table(bus: Bus) -> Table[JoinTokenRecord]:
    """The join tokens that there are, under `join_token_key`. Only services and operators may read or write these, and the next two."""
    from fluster_bus.messages.workers import JoinTokenRecord

    return _joins(bus, lambda _key, data: JoinTokenRecord.from_json(data))


def joined_workers_table(bus: Bus) -> Table[JoinedWorker]:
    """The workers that joined by a token, under `joined_worker_key`, in the same bucket."""
    from fluster_bus.messages.workers import JoinedWorker

    return _joins(bus, lambda _key, data: JoinedWorker.from_json(data))


def issued_workers_table(bus: Bus) -> Table[IssuedWorkers]:
    """Under ISSUED_WORKERS_KEY of the same bucket, the ids that no worker can join as."""
    from fluster_bus.messages.workers import IssuedWorkers

    return _joins(bus, lambda _key, data: IssuedWorkers.from_json(data))


def _actors(bus: Bus, namespace: str, read: Callable[[str, bytes], Record]) -> Table[Record]:
    watch = functools.partial(subjects.watch_actors, namespace)
    return Table(bus, buckets.actors_bucket(namespace), read, watch=watch)


def seats_table(bus: Bus, namespace: str) -> Table[ActorSeat]:
    """Who is the one instance of an actor. Only these rows of their bucket can be watched."""
    return _actors(bus, namespace, lambda _key, data: ActorSeat.from_json(data))


def handled_table(bus: Bus, namespace: str) -> Table[HandledCalls]:
    """How far durable actors have come with their calls."""
    return _actors(bus, namespace, lambda _key, data: HandledCalls.from_json(data))


def states_table(bus: Bus, namespace: str) -> Table[SavedState]:
    """What durable actors have saved."""
    return _actors(bus, namespace, lambda _key, data: SavedState.from_json(data))


# ---- writing -------------------------------------------------------------------------------------------


async def append(bus: Bus, subject: str, message: Message, *, message_id: str) -> int:
    """Store `message` in the stream that takes `subject`; return its sequence.

    The same `message_id` within two minutes is stored once. Raises StorageError when it was not stored.
    """
    return await append_data(bus, subject, message.to_json(), message_id=message_id)


async def append_data(bus: Bus, subject: str, data: bytes, *, message_id: str) -> int:
    """As `append`, for a message that is JSON already."""
    try:
        answer = await bus.request(subject, data, headers={_ID_HEADER: message_id})
    except NoRespondersError as error:
        raise StreamNotFoundError(
            f"no stream takes {subject}: does the namespace exist, is a controller up?"
        ) from error
    except RequestTimeoutError as error:
        raise StorageTimeoutError(f"{subject} was not acknowledged: is the server's disk full?") from error
    return sequence_of_ack(answer, subject)


class Appender:
    """The one writer of a stream, who stores many messages for the price of one acknowledgement."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._last: int | None = None  # the sequence of the last message stored

    async def append(self, messages: Sequence[tuple[str, Message, str]]) -> None:
        """Store (subject, message, message id) in this order, each id once.

        All but the last are sent without asking for an answer: when the answer to that one has the sequence that it must
        have after all of them, they are stored too. Else, or when another client writes there as well, each is sent again
        and asked about. Raises StorageError and other BusErrors; then it is to be tried again as a whole.
        """
        if not messages:
            return
        last, self._last = self._last, None
        if last is not None:
            for subject, message, message_id in messages[:-1]:
                await self._bus.publish(subject, message.to_json(), headers={_ID_HEADER: message_id})
            subject, message, message_id = messages[-1]
            self._last = await append(self._bus, subject, message, message_id=message_id)
            if self._last == last + len(messages):
                return
        self._last = max(await asyncio.gather(*(append(self._bus, *each[:2], message_id=each[2]) for each in messages)))
