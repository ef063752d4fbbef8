"""Publishes each transition of a record once, in order, whatever is restarted in between.

A record carries its last transitions, numbered. What the stream already has is known from the stream itself: after a
restart the events of its last minutes are read, and only what is missing is added. The server drops what is published
twice within two minutes, by the message id.

What is older than these minutes is known by the bus's clock, which dates records and stream alike: the clocks of those who wrote
the transitions may be days off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import BusError, FaultLog, InvalidMessageError
from fluster_bus.messages import Event, JobId, JobRecord, JobStatus, Namespace, TaskRecord, Transition
from fluster_bus.storage.feeds import Feed
from fluster_bus.storage.streams import Appender
from fluster_services.controller.leading.seat import Seat
from fluster_services.controller.state.job_index import record_key

log = logging.getLogger(__name__)

# By then what a record tells is published.
_MARGIN = timedelta(minutes=5)
_STANDBY_S, _MAX_STANDBY = 600.0, 50_000  # by then, and before so many more, the leader has published it
_GATHERED_S, _MAX_BATCH = 0.02, 512

PublishedTimes = dict[int, float]  # {number of a transition of one record: its time}


class EventLog:
    """The event streams of all namespaces."""

    def __init__(self, bus: Bus, seat: Seat) -> None:
        self._bus = bus
        self._seat = seat
        self._seen: dict[tuple[Namespace, str], int] = {}  # {record: the last transition that is queued or published}
        self._stored_until: dict[Namespace, float] = {}  # older transitions are in the stream
        self._told: dict[tuple[Namespace, str], PublishedTimes] = {}  # of records that were not seen yet
        self._queues: defaultdict[Namespace, asyncio.Queue[Event]] = defaultdict(asyncio.Queue)
        self._led: set[Namespace] = set()
        # What the leader is about to publish, for the case that it does not: (when it was seen, namespace, event, stored at)
        self._standby: deque[tuple[float, Namespace, Event, datetime | None]] = deque(maxlen=_MAX_STANDBY)
        self._faults = FaultLog(log)
        self._appenders: dict[Namespace, Appender] = {}

    async def load(self, namespace: Namespace) -> None:
        """Learn what the namespace's stream has."""
        told = await self._published(namespace)
        self._told.update(told)
        self._seen.update({key: max(numbers) for key, numbers in told.items()})

    async def lead(self, namespace: Namespace) -> None:
        """From now on it is this controller that publishes for the namespace: first what the one before it did not."""
        published = await self._published(namespace)
        self._led.add(namespace)
        for event, stored_at in self._take_standby(namespace):
            is_told = _is_told(event.transition, published.get((namespace, _key(event)), {}))
            changed_at = event.transition.time if stored_at is None else stored_at.timestamp()
            if not is_told and changed_at > self._stored_until.get(namespace, 0.0):
                self._put(namespace, event)

    def _take_standby(self, namespace: Namespace) -> list[tuple[Event, datetime | None]]:
        taken = [(event, stored_at) for _, of, event, stored_at in self._standby if of == namespace]
        left = [each for each in self._standby if each[1] != namespace]
        self._standby.clear()
        self._standby.extend(left)
        return taken

    async def _published(self, namespace: Namespace) -> dict[tuple[Namespace, str], PublishedTimes]:
        """What the stream's last minutes have of each record."""
        feed = Feed(
            self._bus,
            buckets.events_stream(namespace),
            subject=subjects.events_of_all(namespace),
            watch=subjects.watch_events(namespace),
        )
        last = await feed.last()
        found: dict[tuple[Namespace, str], PublishedTimes] = {}
        if last is None:
            return found
        since = last.time - _MARGIN
        self._stored_until[namespace] = since.timestamp()
        async for entry in feed.stored(since=since):
            try:
                event = Event.from_json(entry.data)
            except InvalidMessageError as error:
                self._faults.warning("an event of namespace %s is passed over: %s", namespace, error)
                continue
            if _is_refusal(event):
                continue  # its number is another count than that of the job that has the id
            found.setdefault((namespace, _key(event)), {})[event.transition.number] = event.transition.time
        return found

    def on_record(
        self, record: JobRecord | TaskRecord, *, stored_at: datetime | None = None, is_new: bool = False
    ) -> None:
        """Queue the transitions of a record that are not published yet.

        `stored_at` is when this state of it was stored, by the bus's clock, and None for what this controller wrote just now;
        `is_new` says that it was stored after all records were read for the first time.
        """
        key = (record.namespace, record_key(record))
        seen, told = self._seen.get(key, 0), self._told.pop(key, {})
        if any(each.number <= seen and not _is_told(each, told) for each in record.transitions if told):
            seen = 0  # the stream has that of one that had the id before
        stored_until = self._stored_until.get(record.namespace, 0.0)
        is_published = stored_at is not None and stored_at.timestamp() <= stored_until
        # It changed lately, and the stream's last minutes tell nothing of it: for how much of it is older there are only the clocks
        # of those who wrote it.
        by_clocks = not is_new and seen == 0
        for transition in record.transitions:
            if transition.number > seen:
                self._seen[key] = transition.number
                is_older = is_published or (by_clocks and transition.time <= stored_until)
                if not is_older and not _is_told(transition, told):
                    task = record.task if isinstance(record, TaskRecord) else None
                    self._put(
                        record.namespace, Event(job_id=record.job_id, task=task, transition=transition), stored_at
                    )

    def forget(self, records: Iterable[JobRecord | TaskRecord]) -> None:
        """These records are gone."""
        for record in records:
            self._seen.pop((record.namespace, record_key(record)), None)

    def forget_all_but(self, namespace: Namespace, keys: Collection[str]) -> None:
        """A namespace has records under these keys only: what the stream has of others was of ones that were removed."""
        for known in [known for known in self._seen if known[0] == namespace and known[1] not in keys]:
            del self._seen[known]
            self._told.pop(known, None)

    def forget_namespace(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        self._led.discard(namespace)
        self._take_standby(namespace)
        self.forget_all_but(namespace, ())
        for of_namespace in (self._stored_until, self._queues, self._appenders):
            of_namespace.pop(namespace, None)
        for known in [known for known in self._told if known[0] == namespace]:
            del self._told[known]

    def refuse(self, namespace: Namespace, event: Event) -> None:
        """Queue the word that a submission was not taken, as `refusal` makes it."""
        self._put(namespace, event)

    def _put(self, namespace: Namespace, event: Event, stored_at: datetime | None = None) -> None:
        if namespace in self._led:
            self._queues[namespace].put_nowait(event)
            return
        now = time.monotonic()
        self._standby.append((now, namespace, event, stored_at))
        while now - self._standby[0][0] > _STANDBY_S:
            self._standby.popleft()

    async def publish(self, namespace: Namespace) -> None:
        """Publish what is queued for a namespace, until cancelled. All that a moment brings goes at once, since each message
        alone costs more. What a full store does to one namespace's events holds up no other's.
        """
        queue = self._queues[namespace]
        while True:
            batch = [await queue.get()]
            await asyncio.sleep(_GATHERED_S)
            while len(batch) < _MAX_BATCH and not queue.empty():
                batch.append(queue.get_nowait())
            while True:
                # A controller that was stopped for longer than the stream remembers ids must not publish again what the next one published.
                await self._seat.wait_sure()
                try:
                    # Stored in the order sent. What a failure made doubtful is sent again, in order too.
                    await self._append(namespace, batch)
                    break
                except BusError as error:
                    self._faults.warning("%d events of namespace %s wait: %s", len(batch), namespace, error)
                    await wait_to_retry(self._bus)

    async def _append(self, namespace: Namespace, events: list[Event]) -> None:
        appender = self._appenders.setdefault(namespace, Appender(self._bus))
        messages = [
            (
                subjects.events(namespace, event.job_id),
                event,
                f"{namespace}.{_key(event)}.{'refused.' if _is_refusal(event) else ''}{event.transition.number}",
            )
            for event in events
        ]
        await appender.append(messages)


def _is_told(transition: Transition, told: PublishedTimes) -> bool:
    """True when it is in the stream, or is older than what was read of that.

    One of another job that had the id before may have its number, but not its time.
    """
    return bool(told) and (transition.number < min(told) or told.get(transition.number) == transition.time)


def _key(event: Event) -> str:
    return event.job_id if event.task is None else buckets.task_key(event.job_id, event.task)


_REFUSED = "refused: "


def refusal(sequence: int, job_id: str, reason: str, *, now: float) -> Event:
    """The event of a submission that was not taken; its number is its place in the submit stream."""
    transition = Transition(number=sequence, state=JobStatus.FAILED, time=now, reason=_REFUSED + reason)
    return Event(job_id=JobId(job_id), transition=transition)


def _is_refusal(event: Event) -> bool:
    # No end of a job reads so: its reason begins with that of a task, or with the name of an exception.
    return (
        event.task is None
        and event.transition.state is JobStatus.FAILED
        and event.transition.reason.startswith(_REFUSED)
    )
