"""Takes in what was submitted: records it, or says why not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    BusError,
    FaultLog,
    InvalidNameError,
    KeyExistsError,
    MessageTooLargeError,
    ObjectNotFoundError,
    RevisionConflictError,
    StorageError,
    one_bounded_line,
)
from fluster_bus.core.names import MAX_NAME_LENGTH, check_name
from fluster_bus.messages import JobId, JobRecord, JobRequest, Namespace, RefusedJob, TaskRecord
from fluster_bus.messages.jobs import MAX_NEW_RECORD_BYTES, MAX_REQUEST_BYTES
from fluster_bus.messages.records import QUOTA_EXCEEDED
from fluster_bus.messages.requests import StoredRequest
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.submissions import Submission, first_unsettled, is_waiting, submissions
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle
from fluster_services.controller.leading.event_log import refusal
from fluster_services.controller.state import conflicts
from fluster_services.controller.state.conflicts import Resolution
from fluster_services.controller.state.job_index import JobIndex, JobKey
from fluster_services.controller.state.slim_records import MAX_BODY_BYTES, weighs_more
from fluster_services.controller.submissions.checks import SubmissionChecks
from fluster_services.controller.submissions.outcomes import (
    REFUSED,
    CircularDependencyError,
    ParkedError,
    ParkedSubmissions,
    QuotaExceededError,
    SubmissionOutcomes,
    TooEarlyError,
    TooManyAncestorsError,
    TooManyDependenciesError,
    TooManyNeedsError,
    UnknownDependencyError,
    UnknownNamespaceError,
    claimed_id,
)
from fluster_services.daemon import StartOverError

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.event_log import EventLog
    from fluster_services.controller.leading.record_writer import RecordTables, RecordWriter
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.namespaces import NamespaceSet
    from fluster_services.controller.state.dirty_jobs import DirtyJobs
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.store_room import JobRooms
    from fluster_services.controller.sweeps.owners import Owners
    from fluster_services.controller.sweeps.retention import RecordSweep

log = logging.getLogger(__name__)

_RECORDED_AT_ONCE = 64
_BYTES_AT_ONCE = 4 << 20  # of JSON, which takes up to thirty times as much once it is read
# Bytes of a request: those of its record, which are less than four times as many, are counted only from here on.
_MAY_BECOME_TOO_LARGE = MAX_NEW_RECORD_BYTES >> 3
_STREAM_TIMEOUT_S = 10.0
_AT_ONCE = 1_000


class IntakeRoom:
    """Room for so many submissions, and so many bytes of them; one alone always has room. One task asks at a time."""

    def __init__(self, at_once: int, most_bytes: int) -> None:
        self._at_once = at_once
        self._most_bytes = most_bytes
        self._count = self._bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Return when there is room, which is taken."""
        while self._count >= self._at_once or (self._bytes and self._bytes + size > self._most_bytes):
            self._changed.clear()
            await self._changed.wait()
        self._count += 1
        self._bytes += size

    def leave(self, size: int) -> None:
        """Give back the room that one had; `size` is what it has not given back yet."""
        self._count -= 1
        self.leave_bytes(size)

    def leave_bytes(self, size: int) -> None:
        """Go on with less: what was read is stored."""
        self._bytes -= size
        self._changed.set()


class Intake:
    """The submit stream's reader."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        job_index: JobIndex,
        tables: RecordTables,
        namespaces: NamespaceSet,
        job_rooms: JobRooms,
        writer: RecordWriter,
        dirty: DirtyJobs,
        events: EventLog,
        owners: Owners,
        retention: RecordSweep,
    ) -> None:
        self._bus = bus
        self._seat = seat
        self._job_index = job_index
        self._tables = tables
        self._namespaces = namespaces
        self._job_rooms = job_rooms
        self._writer = writer
        self._dirty = dirty
        self._events = events
        self._retention = retention
        self.outcomes = SubmissionOutcomes(job_index)
        self.parked = ParkedSubmissions(job_index, tables, self._begin)
        self._checks = SubmissionChecks(bus, job_index, owners, self._wait_earlier)
        self._room = IntakeRoom(_RECORDED_AT_ONCE, _BYTES_AT_ONCE)
        self._unstored: dict[int, int] = {}  # {sequence: bytes of what is not recorded yet}
        self._in_hand: dict[int, asyncio.Task[None]] = {}  # {sequence: who looks at it}
        self._faults = FaultLog(log)
        self._tasks: asyncio.TaskGroup

    @property
    def has_parked(self) -> bool:
        """True while a submission waits for the job to be gone whose id it takes over."""
        return bool(self.parked.submissions)

    async def run(self) -> None:
        """Record what is submitted, until cancelled."""
        room = self._room
        bus = self._bus
        self.outcomes.settled_before = await retried(
            lambda _left_s: first_unsettled(bus), on=(StorageError,), timeout_s=_STREAM_TIMEOUT_S
        )
        try:
            async with asyncio.TaskGroup() as self._tasks, aclosing(submissions(bus)) as submitted:
                async for submission in submitted:
                    if submission.sequence in self._in_hand:
                        continue  # it came again before it was done with
                    await room.enter(submission.size)
                    self._unstored[submission.sequence] = submission.size
                    self._begin(submission, then=functools.partial(self._leave, submission.sequence))
                    del submission  # while the next one is waited for, nothing holds what it has
        finally:
            self.parked.clear()

    def _leave(self, sequence: int) -> None:
        self._room.leave(self._unstored.pop(sequence, 0))

    async def _take(self, submission: Submission) -> None:
        try:
            await self._look_at(submission)
        finally:
            if self._in_hand.get(submission.sequence) is asyncio.current_task():
                del self._in_hand[submission.sequence]

    async def _look_at(self, submission: Submission) -> None:
        await self._seat.wait_sure()
        refused: RefusedJob | None = None
        try:
            message = await submission.message()
            try:
                await self._record(submission, message)
            except REFUSED as error:
                code = QUOTA_EXCEEDED if isinstance(error, QuotaExceededError) else ""
                refused = self._refused(submission, message, str(error), code=code)
                await submission.refuse()
            except (BusError, StartOverError, ParkedError, TooEarlyError):
                raise
            except Exception as error:
                # A tenant wrote it: what nothing expects of it ends this submission, and no other's.
                self._faults.fault(
                    error, "submission %d to %s could not be taken", submission.sequence, submission.subject
                )
                refused = self._refused(submission, message, f"it cannot be recorded: {type(error).__name__}: {error}")
                await submission.refuse()
            else:
                await submission.done()
        except ParkedError:
            return
        except (BusError, TooEarlyError) as error:
            # The stream delivers it again; creating its records twice does no harm.
            log.warning("submission %d waits: %s", submission.sequence, error)
            return
        self.outcomes.on_looked_at(submission.sequence, refused)
        try:
            await submission.forget_request(message)
        except (BusError, InvalidNameError) as error:
            log.info("the request of submission %d goes after its time: %s", submission.sequence, error)

    async def _was_recorded(self, submission: Submission, message: bytes) -> bool:
        """Whether the controller that had the lead before has done all that the submission asks for, and removed its request."""
        stored = StoredRequest.in_place_of_request(message)
        if stored is None:
            return False
        job_id = stored.job_id or default_job_id(stored.name, submission.sequence)
        row = await self._tables[Namespace(submission.namespace)].get(check_name("job id", job_id))
        if row is not None and isinstance(row.value, JobRecord) and row.value.order == submission.sequence:
            return True
        return not await is_waiting(self._bus, submission.sequence)

    async def _record(self, submission: Submission, message: bytes) -> None:
        namespace = Namespace(submission.namespace)
        why = self._namespaces.why_closed(namespace)
        if why is not None:
            raise UnknownNamespaceError(why)
        if not self._namespaces.is_acted_on(namespace):
            raise TooEarlyError(f"namespace {namespace} is being added")
        if submission.size > MAX_REQUEST_BYTES:
            raise MessageTooLargeError(
                f"the request has {submission.size:,} bytes, over the limit of {MAX_REQUEST_BYTES:,}: "
                "pass a path or a name, and load the data inside the job"
            )
        try:
            request = JobRequest.from_json(await submission.request(message))
        except ObjectNotFoundError:
            if await self._was_recorded(submission, message):
                return
            raise
        if weighs_more(request.resources, MAX_BODY_BYTES):
            raise MessageTooLargeError(
                f"resources of job {request.name} take more than {MAX_BODY_BYTES:,} bytes, and each task has them: "
                "name fewer of them"
            )
        job_id = request.job_id or default_job_id(request.name, submission.sequence)
        if job_id == buckets.LEADER_KEY:
            raise InvalidNameError(f"invalid job id {job_id!r}: the cluster itself has that key; choose another")
        job = job_lifecycle.new_job(namespace, job_id, request, order=submission.sequence, now=time.time())
        if submission.size > _MAY_BECOME_TOO_LARGE and len(job.to_json()) > MAX_NEW_RECORD_BYTES:
            raise MessageTooLargeError(
                f"the record of job {request.name} has over {MAX_NEW_RECORD_BYTES:,} bytes, as its numbers take more there than in the "
                "request: pass a path or a name, and load the data inside the job"
            )
        is_new = self._job_index.get(JobKey(namespace, job_id)) is None
        if is_new:
            await self._checks.check_new(job)
            await self._job_rooms.take(namespace, submission.size, request)
        recorded: JobRecord | None = job
        try:
            with self._checks.room_to_wait(job) if is_new else contextlib.nullcontext():
                await self._writer.create(job)
        except KeyExistsError:
            recorded = await self._settle(submission, job)
        if recorded is None:
            return
        if job_lifecycle.is_recorded_later(recorded):
            self._dirty.mark(JobKey(namespace, job_id))
            return
        self._room.leave_bytes(self._unstored.pop(submission.sequence, 0))  # of many tasks none needs them
        for task in job_lifecycle.each_new_task(recorded):
            await self._writer.record_task(task)

    async def _settle(self, submission: Submission, job: JobRecord) -> JobRecord | None:
        """The record whose tasks are to be recorded, where the id of `job` is taken; None when there is nothing to do.

        Raises KeyExistsError, CircularDependencyError, TooManyReplacementsError, ParkedError, BusError.
        """
        table, key = self._tables[job.namespace], JobKey(job.namespace, job.job_id)
        while True:
            row = await table.get(job.job_id)
            if row is None or not isinstance(row.value, JobRecord):
                raise TooEarlyError(f"the record of {job.job_id} was taken away at this moment")
            self._writer.apply(row)
            known, blocking = row.value, self._job_index.unfinished(key)
            match conflicts.resolve(known, job, gone=blocking is None):
                case Resolution.RECORDED:
                    await self._forget_replaced_tasks(known)
                    return known
                case Resolution.DONE:
                    if known.request.submission != job.request.submission:  # another is kept instead of it
                        self._writer.forget_secrets(job)
                    return None
                case Resolution.REFUSE:
                    self._writer.forget_secrets(job)
                    raise KeyExistsError(conflicts.refusal(known))
                case Resolution.STOP:
                    await self._check_after(job, row)
                    marked = conflicts.mark(known, job.order)
                    if marked is None and blocking is not None:
                        self.parked.park(key, submission, blocking)
                        raise ParkedError
                    if marked is not None:
                        self.parked.check_room(key)
                        await self._writer.write(marked, row.revision)
                case Resolution.REPLACE:
                    await self._check_after(job, row)
                    with self._checks.room_to_wait(job):  # which was there just now
                        replaced = await self._replace(job, row, known)
                    if replaced is not None:
                        await self._forget_replaced_tasks(replaced)
                        return replaced

    async def _replace(self, job: JobRecord, row: Row[JobRecord | TaskRecord], known: JobRecord) -> JobRecord | None:
        """Write the job's record in the place of one that has ended; None when that has changed meanwhile."""
        rows = await self._tables[job.namespace].rows(buckets.task_key_of_any(job.job_id))
        tasks = [each.value for each in rows if isinstance(each.value, TaskRecord)]
        if conflicts.is_half_removed(known, tasks):
            # What its tasks told and tried is unknown by now, so nothing can go on from there.
            await self._retention.removed(JobKey(job.namespace, job.job_id))
            raise TooEarlyError(f"the records of the job that had the id {job.job_id} are being removed")
        new = conflicts.successor(known, tasks, job)
        return new if await self._writer.write(new, row.revision) else None

    async def _check_after(self, job: JobRecord, row: Row[JobRecord | TaskRecord]) -> None:
        """Return when the job can wait for what it names, in the place of the one in `row`, which else stays unmarked."""
        try:
            await self._checks.check_successor(job)
        except (
            CircularDependencyError,
            QuotaExceededError,
            TooManyAncestorsError,
            TooManyDependenciesError,
            TooManyNeedsError,
            UnknownDependencyError,
        ):
            known = row.value
            if isinstance(known, JobRecord) and known.replacement is not None and known.replacement.order == job.order:
                await self._writer.write(conflicts.unmark(known), row.revision)
            raise

    async def _forget_replaced_tasks(self, job: JobRecord) -> None:
        """Take away the records of tasks that only those had that had the job's id before; the others are overwritten."""
        if not job.earlier:
            return
        table = self._tables[job.namespace]
        for row in await table.rows(buckets.task_key_of_any(job.job_id)):
            task = row.value
            if isinstance(task, TaskRecord) and task.order < job.order and task.task >= job.request.replicas:
                with contextlib.suppress(RevisionConflictError):  # another did
                    await table.delete(row.key, revision=row.revision)

    def on_job_changed(self, key: JobKey) -> None:
        """A record of a job was read or written."""
        self.outcomes.wake(key)
        self.parked.on_job_changed(key)

    async def _wait_earlier(self, order: int) -> None:
        """Return when the submissions before that which are in hand are looked at."""
        earlier = [task for before, task in self._in_hand.items() if before < order]
        if earlier:
            await asyncio.wait(earlier)

    def _begin(self, submission: Submission, *, then: Callable[[], None] | None = None) -> None:
        task = self._in_hand[submission.sequence] = self._tasks.create_task(self._take(submission))
        if then is not None:
            task.add_done_callback(lambda _task: then())

    def _refused(self, submission: Submission, data: bytes, reason: str, *, code: str = "") -> RefusedJob:
        reason = one_bounded_line(reason)
        self._faults.warning("submission %d to %s is refused: %s", submission.sequence, submission.subject, reason)
        job_id = claimed_id(data)
        for namespace in self._tables:
            if submission.subject == subjects.jobs_submit(namespace):
                event = refusal(submission.sequence, job_id or "refused", reason, now=time.time())
                self._events.refuse(namespace, event)
        return RefusedJob(sequence=submission.sequence, job_id=job_id, reason=reason, code=code)


def default_job_id(name: str, sequence: int) -> JobId:
    """Of a job whose request names none."""
    return JobId(f"{name[: MAX_NAME_LENGTH - 20]}-{sequence}")


async def settle_lost_submissions(bus: Bus, job_index: JobIndex, writer: RecordWriter) -> None:
    """Look once at each job, and complete what is missing of it."""
    for number, key in enumerate(job_index.keys()):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        if _is_incomplete(job_index, key):
            await retried(functools.partial(_settle, bus, job_index, writer, key), on=(BusError,), timeout_s=math.inf)


def _is_incomplete(job_index: JobIndex, key: JobKey) -> bool:
    entry = job_index.get(key)
    if entry is None or entry.job is None:
        return False
    job = entry.job.value
    lacks_tasks = len(entry.tasks) < job.request.replicas and not job_lifecycle.awaits_others(job)
    return job.replacement is not None or (lacks_tasks and not job.state.finished())


async def _settle(bus: Bus, job_index: JobIndex, writer: RecordWriter, key: JobKey, _left_s: float) -> None:
    entry = job_index.get(key)
    if entry is None or entry.job is None or not _is_incomplete(job_index, key):
        return
    row = entry.job
    job, awaited = row.value, row.value.replacement
    if await is_waiting(bus, job.order if awaited is None else awaited.order):
        return  # it is completed when that is taken in
    log.warning("job %s of namespace %s is completed without what was submitted", key.job_id, key.namespace)
    if awaited is not None:
        await writer.write(conflicts.unmark(job), row.revision)
        return
    for task in job_lifecycle.new_tasks(job):
        if task.task not in entry.tasks:
            await writer.record_task(task)
