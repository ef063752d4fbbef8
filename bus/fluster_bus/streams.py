"""The streams and buckets of a cluster and of a namespace: how they are made, written and consumed."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import (
    DiscardPolicy,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from fluster_bus import subjects
from fluster_bus.errors import (
    InvalidMessageError,
    NoRespondersError,
    RequestTimeoutError,
    StorageError,
    StorageTimeoutError,
)
from fluster_bus.messages.actors import ActorSeat, HandledCalls, SavedState
from fluster_bus.messages.endpoints import Endpoint
from fluster_bus.messages.leaders import Fence, Leader
from fluster_bus.messages.model import Message
from fluster_bus.messages.records import JobRecord, TaskRecord
from fluster_bus.messages.workers import WorkerInfo
from fluster_bus.object_kinds import BUNDLES, PAYLOADS, ObjectKind
from fluster_bus.objects import CHUNK_BYTES, MAX_MESSAGES
from fluster_bus.results import RESULT_CHUNK_BYTES
from fluster_bus.retries import retried
from fluster_bus.secret_store import MAX_SECRETS_BYTES
from fluster_bus.store_errors import store_error
from fluster_bus.stream_bounds import (
    CALLS_KEPT_S,
    HISTORY_KEPT_S,
    KEPT_BYTES,
    MAX_CALL_BYTES,
    MAX_CALLS_BYTES,
    MAX_CALLS_OF_ACTOR,
    MAX_RESULTS_BYTES,
    MAX_SECRETS,
    NAMESPACE_BYTES,
    RESULTS_KEPT_S,
    SECRETS_KEPT_S,
    NamespaceBounds,
)
from fluster_bus.tables import Table, sequence_of_ack

if TYPE_CHECKING:
    from fluster_bus.bus import Bus

Record = TypeVar("Record", bound=Message)

_log = logging.getLogger(__name__)

_DUPLICATES_S = 120  # how long the server remembers a Nats-Msg-Id
_CREATE_TIMEOUT_S = 10.0
_ID_HEADER = "Nats-Msg-Id"
_NO_ROOM = 10_047
_PER_SUBJECT = "max_msgs_per_subject"


# ---- tables ---------------------------------------------------------------------------------------------


def _records(bus: Bus, namespace: str, read: Callable[[str, bytes], Record]) -> Table[Record]:
    watch = functools.partial(subjects.watch_jobs, namespace)
    return Table(bus, subjects.jobs_bucket(namespace), read, watch=watch, has=subjects.is_record_key)


def tasks_table(bus: Bus, namespace: str) -> Table[TaskRecord]:
    """The records `<job>.<task>` of a namespace."""
    return _records(bus, namespace, lambda _key, data: TaskRecord.from_json(data))


def jobs_table(bus: Bus, namespace: str) -> Table[JobRecord]:
    """The records `<job>` of a namespace, in the same bucket as those of the tasks."""
    return _records(bus, namespace, lambda _key, data: JobRecord.from_json(data))


def records_table(bus: Bus, namespace: str) -> Table[JobRecord | TaskRecord]:
    """The records of jobs and of tasks, for whoever watches them all."""

    def read(key: str, data: bytes) -> JobRecord | TaskRecord:
        return TaskRecord.from_json(data) if subjects.is_task_key(key) else JobRecord.from_json(data)

    return _records(bus, namespace, read)


def endpoint_key(endpoint: Endpoint) -> str:
    """Where an endpoint stands in its namespace's registry."""
    return subjects.endpoint_key(
        endpoint.name, endpoint.job_id or subjects.NO_JOB, endpoint.task, endpoint.attempt, endpoint.endpoint_id
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

    return Table(bus, subjects.endpoints_bucket(namespace), read, watch=watch)


def leaders_table(bus: Bus) -> Table[Leader]:
    """Who leads, under LEADER_KEY."""
    return Table(
        bus,
        subjects.CONTROLLERS_BUCKET,
        lambda _key, data: Leader.from_json(data),
        watch=subjects.watch_controllers,
    )


def fences_table(bus: Bus, namespace: str) -> Table[Fence]:
    """Whose verdicts are taken in the namespace, under LEADER_KEY of the bucket of its jobs."""
    watch = functools.partial(subjects.watch_jobs, namespace)
    return Table(bus, subjects.jobs_bucket(namespace), lambda _key, data: Fence.from_json(data), watch=watch)


def workers_table(bus: Bus) -> Table[WorkerInfo]:
    """The workers that have registered."""
    return Table(
        bus,
        subjects.WORKERS_BUCKET,
        lambda _key, data: WorkerInfo.from_json(data),
        watch=subjects.watch_workers,
    )


def _actors(bus: Bus, namespace: str, read: Callable[[str, bytes], Record]) -> Table[Record]:
    watch = functools.partial(subjects.watch_actors, namespace)
    return Table(bus, subjects.actors_bucket(namespace), read, watch=watch)


def seats_table(bus: Bus, namespace: str) -> Table[ActorSeat]:
    """Who is the one instance of an actor. Only these rows of their bucket can be watched."""
    return _actors(bus, namespace, lambda _key, data: ActorSeat.from_json(data))


def handled_table(bus: Bus, namespace: str) -> Table[HandledCalls]:
    """How far durable actors have come with their calls."""
    return _actors(bus, namespace, lambda _key, data: HandledCalls.from_json(data))


def states_table(bus: Bus, namespace: str) -> Table[SavedState]:
    """What durable actors have saved."""
    return _actors(bus, namespace, lambda _key, data: SavedState.from_json(data))


# ---- making them ----------------------------------------------------------------------------------------


def _bucket(bucket: str, watch: str, keys: str = subjects.ANY_TAIL) -> StreamConfig:
    return StreamConfig(
        name=subjects.bucket_stream(bucket),
        subjects=[subjects.bucket_key(bucket)],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        allow_direct=True,
        # A roll-up by one who may write a single key would wipe all others: closed, with the purge that does the same.
        allow_rollup_hdrs=False,
        deny_purge=True,
        allow_atomic=True,
        duplicate_window=_DUPLICATES_S,
        republish=RePublish(src=subjects.bucket_key(bucket, keys), dest=watch),
    )


def _durable_calls(namespace: str, bounds: NamespaceBounds) -> StreamConfig:
    """Calls to durable actors, until they are handled."""
    return StreamConfig(
        name=subjects.calls_stream(namespace),
        subjects=[subjects.durable_calls_of_all(namespace)],
        max_age=bounds.calls_kept_s or CALLS_KEPT_S,
        max_bytes=bounds.calls_bytes or MAX_CALLS_BYTES,
        max_msg_size=bounds.max_call_bytes or MAX_CALL_BYTES,
        max_msgs_per_subject=bounds.max_calls_of_actor or MAX_CALLS_OF_ACTOR,
        # Where there is no room a call is refused: what was taken is never dropped for another.
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        storage=StorageType.FILE,
        allow_direct=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
        duplicate_window=_DUPLICATES_S,
        # They wake who serves; what they carry is not for everybody who may watch.
        republish=RePublish(
            src=subjects.durable_calls_of_all(namespace), dest=subjects.watch_calls(namespace), headers_only=True
        ),
    )


def _history(stream: str, subject: str, watch: str, max_bytes: int | None, kept_s: float | None) -> StreamConfig:
    return StreamConfig(
        name=stream,
        subjects=[subject],
        max_age=kept_s or HISTORY_KEPT_S,
        max_bytes=max_bytes or KEPT_BYTES,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        allow_direct=True,
        deny_delete=True,
        deny_purge=True,
        duplicate_window=_DUPLICATES_S,
        republish=RePublish(src=subject, dest=watch),
    )


def _chunks(stream: str, subject: str, *, chunk_bytes: int, kept_s: float, **more: Any) -> StreamConfig:
    """Large things in pieces, each with a subject of its own."""
    return StreamConfig(
        name=stream,
        subjects=[subject],
        max_age=kept_s,
        max_msg_size=chunk_bytes,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        allow_direct=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
        **more,
    )


def _objects(kind: ObjectKind, namespace: str, kept_s: float | None) -> StreamConfig:
    return _chunks(
        subjects.objects_stream(kind.name, namespace),
        subjects.objects_of_all(kind.name, namespace),
        chunk_bytes=CHUNK_BYTES,
        kept_s=kept_s or kind.kept_s,
        # Bounded by their number: a bound in bytes would be set aside, and a server has room for few namespaces then.
        max_msgs=MAX_MESSAGES,
        deny_purge=True,
    )


def _results(namespace: str, max_bytes: int | None, kept_s: float | None) -> StreamConfig:
    return _chunks(
        subjects.results_stream(namespace),
        subjects.results_of_all(namespace),
        chunk_bytes=RESULT_CHUNK_BYTES,
        kept_s=kept_s or RESULTS_KEPT_S,
        max_bytes=max_bytes or MAX_RESULTS_BYTES,
        # Purging is allowed: those of a job go with its records.
    )


def _secrets(namespace: str, max_jobs: int | None, kept_s: float | None) -> StreamConfig:
    return _chunks(
        subjects.secrets_stream(namespace),
        subjects.secrets(namespace),
        chunk_bytes=MAX_SECRETS_BYTES,
        kept_s=kept_s or SECRETS_KEPT_S,
        max_msgs=max_jobs or MAX_SECRETS,
        # Purging is allowed: those of a job go with it.
    )


async def ensure_system(bus: Bus) -> None:
    """Make what the whole cluster needs, unless it is there."""
    await _ensure_all(
        bus,
        StreamConfig(
            name=subjects.SUBMIT_STREAM,
            subjects=[subjects.jobs_submit(subjects.ANY_TOKEN)],
            retention=RetentionPolicy.WORK_QUEUE,
            max_bytes=KEPT_BYTES,
            discard=DiscardPolicy.NEW,  # a full queue refuses a submit, it never drops one
            storage=StorageType.FILE,
            duplicate_window=_DUPLICATES_S,
        ),
        _bucket(subjects.WORKERS_BUCKET, subjects.watch_workers()),
        _bucket(subjects.CONTROLLERS_BUCKET, subjects.watch_controllers()),
    )


async def ensure_namespace(bus: Bus, namespace: str, bounds: NamespaceBounds | None = None) -> None:
    """Make a namespace's buckets and streams, unless they are there; those that are get the bounds that are given."""
    bounds = bounds or NamespaceBounds()
    given: dict[str, dict[str, float | None]] = {
        subjects.logs_stream(namespace): {"max_bytes": bounds.logs_bytes, "max_age": bounds.history_kept_s},
        subjects.events_stream(namespace): {"max_bytes": bounds.events_bytes, "max_age": bounds.history_kept_s},
        subjects.results_stream(namespace): {"max_bytes": bounds.results_bytes, "max_age": bounds.results_kept_s},
        subjects.calls_stream(namespace): {
            "max_bytes": bounds.calls_bytes,
            "max_age": bounds.calls_kept_s,
            "max_msg_size": bounds.max_call_bytes,
            _PER_SUBJECT: bounds.max_calls_of_actor,
        },
        subjects.secrets_stream(namespace): {"max_msgs": bounds.max_secrets, "max_age": bounds.secrets_kept_s},
        subjects.objects_stream(BUNDLES.name, namespace): {"max_age": bounds.workspaces_kept_s},
        subjects.objects_stream(PAYLOADS.name, namespace): {"max_age": bounds.payloads_kept_s},
    }
    await _ensure_all(
        bus,
        _bucket(subjects.jobs_bucket(namespace), subjects.watch_jobs(namespace)),
        _bucket(subjects.endpoints_bucket(namespace), subjects.watch_endpoints(namespace)),
        _history(
            subjects.events_stream(namespace),
            subjects.events_of_all(namespace),
            subjects.watch_events(namespace),
            bounds.events_bytes,
            bounds.history_kept_s,
        ),
        _history(
            subjects.logs_stream(namespace),
            subjects.logs_of_all(namespace),
            subjects.watch_logs(namespace),
            bounds.logs_bytes,
            bounds.history_kept_s,
        ),
        _objects(BUNDLES, namespace, bounds.workspaces_kept_s),
        _objects(PAYLOADS, namespace, bounds.payloads_kept_s),
        _results(namespace, bounds.results_bytes, bounds.results_kept_s),
        _secrets(namespace, bounds.max_secrets, bounds.secrets_kept_s),
        # Who serves is for everybody to watch, what was saved is not.
        _bucket(
            subjects.actors_bucket(namespace),
            subjects.watch_actors(namespace, subjects.seat_key_of_any()),
            subjects.seat_key_of_any(),
        ),
        _durable_calls(namespace, bounds),
        given=given,
        namespace_bytes=bounds.namespace_bytes,
    )


async def _ensure_all(
    bus: Bus,
    *configs: StreamConfig,
    given: Mapping[str, Mapping[str, float | None]] | None = None,
    namespace_bytes: int = NAMESPACE_BYTES,
) -> None:
    """All at once, in half the time: a cluster's start waits for it. Raises what the first raised that failed.

    `given` is {stream: {field: value}}, which is also set in a stream that exists.
    """
    ensured = (_ensure(bus, config, (given or {}).get(str(config.name), {}), namespace_bytes) for config in configs)
    for outcome in await asyncio.gather(*ensured, return_exceptions=True):
        if outcome is not None:
            raise outcome


def _changes(config: StreamConfig, present: StreamConfig, given: Mapping[str, float | None]) -> dict[str, Any]:
    """What is to be changed in a stream that is there."""
    changes: dict[str, Any] = {
        field: value for field, value in given.items() if value is not None and getattr(present, field) != value
    }
    if config.allow_atomic and not present.allow_atomic:  # a version without verdicts in batches made it
        changes["allow_atomic"] = True
    return changes


async def _most_of_a_subject(bus: Bus, config: StreamConfig) -> int:
    """How many messages the subject has that has most in a stream."""
    info = await bus.jetstream.stream_info(str(config.name), subjects_filter=subjects.ANY_TAIL)
    return max((info.state.subjects or {}).values(), default=0)


async def _ensure(bus: Bus, config: StreamConfig, given: Mapping[str, float | None], namespace_bytes: int) -> None:
    async def make_or_tell(left_s: float) -> None:
        try:
            await make(left_s)
        except nats.js.errors.APIError as error:
            if error.err_code != _NO_ROOM:
                raise
            raise StorageError(
                f"stream {config.name} could not be made: the server's store has no room to set aside. A namespace takes "
                f"{namespace_bytes / (1 << 30):.3g} GiB of it: give jetstream.max_file_store more, or have fewer namespaces"
            ) from error

    async def make(left_s: float) -> None:
        async with asyncio.timeout(left_s):
            try:
                present = (await bus.jetstream.stream_info(str(config.name))).config
            except nats.js.errors.NotFoundError:
                await bus.jetstream.add_stream(config)
            else:
                changes = _changes(config, present, given)
                if _PER_SUBJECT in changes and await _most_of_a_subject(bus, present) > changes[_PER_SUBJECT]:
                    # A server would drop the oldest of them at once, which were taken for good.
                    _log.warning("stream %s keeps its %s: a subject has more", config.name, _PER_SUBJECT)
                    del changes[_PER_SUBJECT]
                if changes:
                    await bus.jetstream.update_stream(present.evolve(**changes))

    try:
        # Around a restart of the server a stream's creation now and then fails with 10049 or 503.
        await retried(make_or_tell, on=(nats.errors.Error, TimeoutError), timeout_s=_CREATE_TIMEOUT_S)
    except (nats.errors.Error, TimeoutError) as error:
        raise store_error(f"stream {config.name} could not be made", error) from error


# ---- writing -------------------------------------------------------------------------------------------


async def append(bus: Bus, subject: str, message: Message, *, message_id: str) -> int:
    """Store `message` in the stream that takes `subject`; return its sequence.

    The same `message_id` within two minutes is stored once. Raises StorageError when it was not stored.
    """
    try:
        answer = await bus.request(subject, message.to_json(), headers={_ID_HEADER: message_id})
    except NoRespondersError as error:
        raise StorageError(f"no stream takes {subject}: does the namespace exist, is a controller up?") from error
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
        have after all of them, they are stored too. Else, or when somebody else writes there as well, each is sent again
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
