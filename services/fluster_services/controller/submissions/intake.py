"""Takes in what was submitted: records it, or says why not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    BusError,
    FlusterError,
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    MessageTooLargeError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    RevisionConflictError,
    StorageError,
)
from fluster_bus.core.fault_log import FaultLog, one_bounded_line
from fluster_bus.core.names import MAX_NAME_LENGTH, check_name
from fluster_bus.messages import JobId, JobRecord, JobRequest, Namespace, RefusedJob, TaskRecord
from fluster_bus.messages.jobs import MAX_REQUEST_BYTES
from fluster_bus.messages.records import QUOTA_EXCEEDED
from fluster_bus.messages.requests import StoredRequest
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.submissions import Submission, first_unsettled, is_waiting, submissions
from fluster_bus.storage.tables import Row
from fluster_services import capacity, lifecycle
from fluster_services.controller.leading.event_log import refusal
from fluster_services.controller.namespaces.job_room import NoRoomForJobError
from fluster_services.controller.rules import conflicts, dependencies
from fluster_services.controller.rules.conflicts import Verdict
from fluster_services.controller.rules.reconcile import why_attempt_is_over
from fluster_services.controller.state.books import JobKey
from fluster_services.controller.state.families import MAX_DEPTH
from fluster_services.controller.state.slim_records import MAX_BODY_BYTES, weighs_more
from fluster_services.controller.submissions.intake_room import IntakeRoom
from fluster_services.daemon import StartOverError

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.event_log import EventLog
    from fluster_services.controller.leading.record_writer import RecordTables, RecordWriter
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.namespaces.job_room import JobRooms
    from fluster_services.controller.namespaces.namespaces import NamespaceSet
    from fluster_services.controller.state.books import Books
    from fluster_services.controller.state.dirty_jobs import DirtyJobs
    from fluster_services.controller.sweeps.owners import Owners
    from fluster_services.controller.sweeps.retention import RecordSweep

log = logging.getLogger(__name__)

_RECORDED_AT_ONCE = 64
_BYTES_AT_ONCE = 4 << 20  # of JSON, which takes up to thirty times as much once it is read
_MAX_PARKED = 500  # below what the stream has out at once, so that these never hold up the others
_STREAM_TIMEOUT_S = 10.0
_NAMES_COMPARED = 1_000  # of the latest jobs, when one is named that does not exist
MAX_DEPENDENCIES = 200_000  # that jobs which wait have in all, of a namespace: the controller keeps and looks at each
MAX_NEEDS = 500  # that unfinished jobs of a namespace have: among so many it is looked who is offered next
_REMEMBERED = 50_000  # submissions whose fate is known without a look at the records


class Intake:
    """The submit stream's reader."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        books: Books,
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
        self._books = books
        self._tables = tables
        self._namespaces = namespaces
        self._job_rooms = job_rooms
        self._writer = writer
        self._dirty = dirty
        self._events = events
        self._owners = owners
        self._retention = retention
        self._looked_at: OrderedDict[int, RefusedJob | None] = OrderedDict()  # {sequence: why it was refused}
        self._room = IntakeRoom(_RECORDED_AT_ONCE, _BYTES_AT_ONCE)
        self._unstored: dict[int, int] = {}  # {sequence: bytes of what is not recorded yet}
        self._in_hand: dict[int, asyncio.Task[None]] = {}  # {sequence: who looks at it}
        self._parked: dict[JobKey, Submission] = {}  # {job that is to be gone first: what replaces it}
        self._blocking: dict[JobKey, set[JobKey]] = {}  # {unfinished job: parked ones that wait for it}
        self._settled_before = 0
        self._entering: dict[Namespace, int] = {}  # {namespace: jobs that are about to be recorded}
        self._faults = FaultLog(log)
        self._tasks: asyncio.TaskGroup
        self._waiters: dict[JobKey | int, list[asyncio.Future[None]]] = {}

    @property
    def has_parked(self) -> bool:
        """True while a submission waits for the job to be gone whose id it takes over."""
        return bool(self._parked)

    async def run(self) -> None:
        """Record what is submitted, until cancelled."""
        room = self._room
        bus = self._bus
        self._settled_before = await retried(
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
            self._parked.clear()
            self._blocking.clear()

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
            except _REFUSED as error:
                code = QUOTA_EXCEEDED if isinstance(error, QuotaExceededError) else ""
                refused = self._refused(submission, message, str(error), code=code)
                await submission.refuse()
            except (BusError, StartOverError, _ParkedError, _TooEarlyError):
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
        except _ParkedError:
            return
        except (BusError, _TooEarlyError) as error:
            # The stream delivers it again; creating its records twice does no harm.
            log.warning("submission %d waits: %s", submission.sequence, error)
            return
        self._remember(submission.sequence, refused)
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
            raise _TooEarlyError(f"namespace {namespace} is being added")
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
        job = lifecycle.new_job(namespace, job_id, request, order=submission.sequence, now=time.time())
        is_new = self._books.get(JobKey(namespace, job_id)) is None
        if is_new:
            self._check_launcher(job)
            self._check_owner(job)
            self._check_parent(job)
            self._check_need(job)
            self._check_quota(job)
            await self._check_dependencies(job)
            await self._job_rooms.take(namespace, submission.size, request)
        recorded: JobRecord | None = job
        try:
            with self._room_to_wait(job) if is_new else contextlib.nullcontext():
                await self._writer.create(job)
        except KeyExistsError:
            recorded = await self._settle(submission, job)
        if recorded is None:
            return
        if lifecycle.is_recorded_later(recorded):
            self._dirty.mark(JobKey(namespace, job_id))
            return
        self._room.leave_bytes(self._unstored.pop(submission.sequence, 0))  # of many tasks none needs them
        for task in lifecycle.each_new_task(recorded):
            await self._writer.record_task(task)

    async def _settle(self, submission: Submission, job: JobRecord) -> JobRecord | None:
        """The record whose tasks are to be recorded, where the id of `job` is taken; None when there is nothing to do.

        Raises KeyExistsError, CircularDependencyError, TooManyReplacementsError, _ParkedError, BusError.
        """
        table, key = self._tables[job.namespace], JobKey(job.namespace, job.job_id)
        while True:
            row = await table.get(job.job_id)
            if row is None or not isinstance(row.value, JobRecord):
                raise _TooEarlyError(f"the record of {job.job_id} was taken away at this moment")
            self._writer.apply(row)
            known, blocking = row.value, self._books.unfinished(key)
            match conflicts.judge(known, job, gone=blocking is None):
                case Verdict.RECORDED:
                    await self._forget_replaced_tasks(known)
                    return known
                case Verdict.DONE:
                    if known.request.submission != job.request.submission:  # another is kept instead of it
                        self._writer.forget_secrets(job)
                    return None
                case Verdict.REFUSE:
                    self._writer.forget_secrets(job)
                    raise KeyExistsError(conflicts.refusal(known))
                case Verdict.STOP:
                    await self._check_after(job, row)
                    marked = conflicts.mark(known, job.order)
                    if marked is None and blocking is not None:
                        self._park(key, submission, blocking)
                        raise _ParkedError
                    if marked is not None:
                        self._check_room(key)
                        await self._writer.write(marked, row.revision)
                case Verdict.REPLACE:
                    await self._check_after(job, row)
                    with self._room_to_wait(job):  # which was there just now
                        replaced = await self._replace(job, row, known)
                    if replaced is not None:
                        await self._forget_replaced_tasks(replaced)
                        return replaced

    async def _replace(self, job: JobRecord, row: Row[JobRecord | TaskRecord], known: JobRecord) -> JobRecord | None:
        """Write the job's record in the place of one that has ended; None when that has changed meanwhile."""
        rows = await self._tables[job.namespace].rows(subjects.task_key_of_any(job.job_id))
        tasks = [each.value for each in rows if isinstance(each.value, TaskRecord)]
        if conflicts.is_half_removed(known, tasks):
            # What its tasks told and tried is not known any more, so nothing can go on from there.
            await self._retention.removed(JobKey(job.namespace, job.job_id))
            raise _TooEarlyError(f"the records of the job that had the id {job.job_id} are being removed")
        new = conflicts.successor(known, tasks, job)
        return new if await self._writer.write(new, row.revision) else None

    async def _check_after(self, job: JobRecord, row: Row[JobRecord | TaskRecord]) -> None:
        """Return when the job can wait for what it names, in the place of the one in `row`, which else stays unmarked."""
        try:
            self._check_parent(job)
            self._check_need(job)
            await self._check_dependencies(job)
            self._check_circle(job)
            self._check_quota(job)
            self._check_room_to_wait(job)
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

    def _check_launcher(self, job: JobRecord) -> None:
        """Refuse what an attempt launched that has ended since: it could still run when the next one begins."""
        launcher = self._books.launcher(job.namespace, job.request)
        why = why_attempt_is_over(job.request, launcher)
        if why is not None:
            raise LauncherEndedError(why)

    def _check_owner(self, job: JobRecord) -> None:
        why = self._owners.why_refused(job)
        if why is not None:
            raise TooManyOwnersError(why)

    def _check_need(self, job: JobRecord) -> None:
        books, need = self._books, capacity.needed(job.request.resources)
        if not books.has_need(job.namespace, need) and books.need_count(job.namespace) >= MAX_NEEDS:
            raise TooManyNeedsError(
                f"resources: unfinished jobs of namespace {job.namespace!r} ask for {MAX_NEEDS:,} different ones, which is the most: "
                "ask for the same as others do, such as memory in whole GiB"
            )

    def _check_parent(self, job: JobRecord) -> None:
        parent = job.request.parent
        key = JobKey(job.namespace, job.job_id)
        if parent is not None and not self._books.may_launch(JobKey(job.namespace, parent), key):
            raise TooManyAncestorsError(
                f"parent={parent!r}: {MAX_DEPTH} jobs were launched from within one another, which is the most, or "
                f"{job.job_id!r} is above it itself: launch it with detached=True, or from a job further up"
            )

    def _check_quota(self, job: JobRecord) -> None:
        """Refuse what the namespace's quota never has room for."""
        request = job.request
        need = capacity.needed(request.resources, job.namespace)
        count = request.replicas if request.gang else 1
        why = self._books.shares.why_never(job.namespace, need, count)
        if why is not None:
            raise QuotaExceededError(why)

    @contextlib.contextmanager
    def _room_to_wait(self, job: JobRecord) -> Iterator[None]:
        """The job is counted among those that wait, while its record is being written. Raises QuotaExceededError."""
        self._check_room_to_wait(job)
        self._entering[job.namespace] = self._entering.get(job.namespace, 0) + 1
        try:
            yield
        finally:
            self._entering[job.namespace] -= 1

    def _check_room_to_wait(self, job: JobRecord) -> None:
        """Refuse one job more than may wait at once."""
        namespace, books = job.namespace, self._books
        waiting = books.waiting(namespace) + self._entering.get(namespace, 0)
        why = books.shares.why_no_more_jobs(namespace, waiting)
        if why is not None:
            raise QuotaExceededError(why)

    def _check_circle(self, job: JobRecord) -> None:
        books = self._books

        def get(job_id: JobId) -> JobRecord | None:
            entry = books.get(JobKey(job.namespace, job_id))
            return entry.job.value if entry is not None and entry.job is not None else None

        why = conflicts.circle(job.job_id, job.request.after, get)
        if why is not None:
            raise CircularDependencyError(why)

    async def _forget_replaced_tasks(self, job: JobRecord) -> None:
        """Take away the records of tasks that only those had that had the job's id before; the others are overwritten."""
        if not job.earlier:
            return
        table = self._tables[job.namespace]
        for row in await table.rows(subjects.task_key_of_any(job.job_id)):
            task = row.value
            if isinstance(task, TaskRecord) and task.order < job.order and task.task >= job.request.replicas:
                with contextlib.suppress(RevisionConflictError):  # somebody else did
                    await table.delete(row.key, revision=row.revision)

    # ---- what waits for a job to be gone ----------------------------------------------------------------

    def _check_room(self, key: JobKey) -> None:
        if key in self._parked:
            return
        most = max(_MAX_PARKED // len(self._tables), 1)
        waiting = sum(1 for each in self._parked if each.namespace == key.namespace)
        if waiting >= most or len(self._parked) >= _MAX_PARKED:
            raise TooManyReplacementsError(
                f"{waiting} submissions of namespace {key.namespace!r} wait already for the jobs that they replace to end: "
                "try again later"
            )

    def _park(self, key: JobKey, submission: Submission, blocking: JobKey) -> None:
        """Look at the submission again when the job that it waits for has ended. Until then the stream keeps it too."""
        before = self._parked.get(key)
        self._parked[key] = submission.without_data()
        self._blocking.setdefault(blocking, set()).add(key)
        if before is not None and before.sequence != submission.sequence:
            self._begin(before)  # it is the later one that counts

    def _begin(self, submission: Submission, *, then: Callable[[], None] | None = None) -> None:
        task = self._in_hand[submission.sequence] = self._tasks.create_task(self._take(submission))
        if then is not None:
            task.add_done_callback(lambda _task: then())

    def _unpark(self, ended: JobKey) -> None:
        for key in self._blocking.pop(ended, ()):
            blocking = self._books.unfinished(key)
            if blocking is not None:
                self._blocking.setdefault(blocking, set()).add(key)
            elif key in self._parked:
                self._begin(self._parked.pop(key))

    # ---- what it runs after -----------------------------------------------------------------------------

    async def _check_dependencies(self, job: JobRecord) -> None:
        """Return when the jobs that it is to run after are recorded. Raises UnknownDependencyError, _TooEarlyError."""
        if not job.request.after:
            return
        count = len(job.request.after)
        if self._books.dependency_count(job.namespace) + count > MAX_DEPENDENCIES:
            raise TooManyDependenciesError(
                f"after: jobs of namespace {job.namespace!r} that wait name {MAX_DEPENDENCIES:,} others in all, which is the "
                f"most, and this one names {count:,} more: let one job wait for them, and the others for that one"
            )
        earlier = [task for before, task in self._in_hand.items() if before < job.order]
        if earlier:
            await asyncio.wait(earlier)

        def unknown() -> str | None:
            books = self._books
            return dependencies.unknown(
                job.request.after,
                lambda job_id: books.get(JobKey(job.namespace, job_id)) is not None,
                lambda: books.latest(job.namespace, _NAMES_COMPARED),
            )

        if unknown() is None:
            return
        # What another controller took before it died comes again: only when that is settled it is sure that there is no such.
        settled = await first_unsettled(self._bus) >= job.order
        missing = unknown()
        if missing is not None:
            raise UnknownDependencyError(missing) if settled else _TooEarlyError(missing)

    def _refused(self, submission: Submission, data: bytes, reason: str, *, code: str = "") -> RefusedJob:
        reason = one_bounded_line(reason)
        self._faults.warning("submission %d to %s is refused: %s", submission.sequence, submission.subject, reason)
        job_id = _claimed_id(data)
        for namespace in self._tables:
            if submission.subject == subjects.jobs_submit(namespace):
                event = refusal(submission.sequence, job_id or "refused", reason, now=time.time())
                self._events.refuse(namespace, event)
        return RefusedJob(sequence=submission.sequence, job_id=job_id, reason=reason, code=code)

    # ---- who waits for a submission ---------------------------------------------------------------------

    def _remember(self, sequence: int, refused: RefusedJob | None) -> None:
        self._looked_at[sequence] = refused
        while len(self._looked_at) > _REMEMBERED:
            self._looked_at.popitem(last=False)
        self._wake(sequence)

    def on_job_changed(self, key: JobKey) -> None:
        self._wake(key)
        self._unpark(key)

    def _wake(self, what: JobKey | int) -> None:
        for future in self._waiters.pop(what, ()):
            if not future.done():
                future.set_result(None)

    def _stop_waiting(self, future: asyncio.Future[None], *awaited: JobKey | int) -> None:
        for what in awaited:
            waiters = self._waiters.get(what)
            if waiters is not None and future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._waiters[what]

    async def wait_looked_at(self, job: JobKey, sequence: int) -> RefusedJob | None:
        """Why the submission was refused, None once it is recorded."""
        while sequence not in self._looked_at:
            if sequence < self._settled_before:
                return None  # by an earlier controller: the records tell what became of it
            entry = self._books.get(job)
            if entry is not None and entry.job is not None and entry.job.value.order == sequence:
                return None
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for what in (job, sequence):
                self._waiters.setdefault(what, []).append(future)
            try:
                await future
            except asyncio.CancelledError:
                self._stop_waiting(future, job, sequence)
                raise
        return self._looked_at[sequence]


class UnknownNamespaceError(FlusterError):
    """The cluster does not have that namespace, or not for long."""


class UnknownDependencyError(FlusterError):
    """It is to run after a job that does not exist."""


class CircularDependencyError(FlusterError):
    """It is to replace a job for which those wait that it is to run after."""


class LauncherEndedError(FlusterError):
    """The attempt that launched it has ended."""


class TooManyOwnersError(FlusterError):
    """Too many programs own jobs of the namespace."""


class TooManyAncestorsError(FlusterError):
    """Jobs were launched from within one another too often, or in a circle."""


class TooManyDependenciesError(FlusterError):
    """Those that wait in the namespace name too many others."""


class TooManyNeedsError(FlusterError):
    """Unfinished jobs of the namespace ask for too many different resources."""


class TooManyReplacementsError(FlusterError):
    """Too many jobs are being stopped to be replaced."""


class QuotaExceededError(FlusterError):
    """The namespace's quota has no room for the job, whatever ends, or for one more that waits."""


class _ParkedError(FlusterError):
    """It is looked at again when the job that it replaces is gone."""


class _TooEarlyError(FlusterError):
    """It cannot be decided yet."""


# What will not be better when it comes again.
_REFUSED = (
    CircularDependencyError,
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    LauncherEndedError,
    MessageTooLargeError,
    NoRoomForJobError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    QuotaExceededError,
    TooManyAncestorsError,
    TooManyDependenciesError,
    TooManyNeedsError,
    TooManyOwnersError,
    TooManyReplacementsError,
    UnknownDependencyError,
    UnknownNamespaceError,
)


def default_job_id(name: str, sequence: int) -> JobId:
    """Of a job whose request names none."""
    return JobId(f"{name[: MAX_NAME_LENGTH - 20]}-{sequence}")


def _claimed_id(data: bytes) -> JobId | None:
    """The id or name that a refused message gave itself, if it can be read at all."""
    try:
        message = json.loads(data)
        return JobId(check_name("job id", message.get("job_id") or message.get("name")))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
