"""Takes in what was submitted: records it, or says why not."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.errors import (
    BusError,
    FlusterError,
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    MessageTooLargeError,
)
from fluster_bus.messages import JobId, JobRecord, JobRequest, Namespace, RefusedJob, TaskRecord
from fluster_bus.messages.jobs import MAX_REQUEST_BYTES
from fluster_bus.names import MAX_NAME_LENGTH, check_name
from fluster_bus.submissions import Submission, first_unsettled, submissions
from fluster_bus.tables import Row
from fluster_services import lifecycle
from fluster_services.controller import dependencies
from fluster_services.controller.books import JobKey, record_key
from fluster_services.controller.event_log import refusal
from fluster_services.controller.slim_records import slim_request

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)

_RECORDED_AT_ONCE = 64
_SENT_AGAIN_S = 120.0  # as long as a stream, which has not forgotten the message, drops what is sent twice
_NAMES_COMPARED = 1_000  # of the latest jobs, when one is named that does not exist
_REMEMBERED = 50_000  # submissions whose fate is known without a look at the records


class Intake:
    """The submit stream's reader."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._looked_at: OrderedDict[int, RefusedJob | None] = OrderedDict()  # {sequence: why it was refused}
        self._in_hand: dict[int, asyncio.Task[None]] = {}  # {sequence: who looks at it}
        self._waiters: dict[JobKey | int, list[asyncio.Future[None]]] = {}

    async def run(self) -> None:
        """Record what is submitted, until cancelled."""
        room = asyncio.Semaphore(_RECORDED_AT_ONCE)
        async with asyncio.TaskGroup() as tasks, aclosing(submissions(self._controller.bus)) as submitted:
            async for submission in submitted:
                await room.acquire()
                task = self._in_hand[submission.sequence] = tasks.create_task(self._take(submission))
                task.add_done_callback(lambda _task: room.release())

    async def _take(self, submission: Submission) -> None:
        try:
            await self._look_at(submission)
        finally:
            if self._in_hand.get(submission.sequence) is asyncio.current_task():
                del self._in_hand[submission.sequence]

    async def _look_at(self, submission: Submission) -> None:
        await self._controller.seat.wait_sure()
        refused: RefusedJob | None = None
        try:
            try:
                await self._record(submission)
            except _REFUSED as error:
                refused = self._refused(submission, str(error))
                await submission.refuse()
            else:
                await submission.done()
        except (BusError, _TooEarlyError) as error:
            # The stream delivers it again; creating its records twice does no harm.
            log.warning("submission %d waits: %s", submission.sequence, error)
            return
        self._remember(submission.sequence, refused)

    async def _record(self, submission: Submission) -> None:
        namespace = Namespace(submission.namespace)
        table = self._controller.records.get(namespace)
        if table is None:
            raise UnknownNamespaceError(
                f"the cluster has no namespace {namespace!r}; it has {', '.join(sorted(self._controller.records))}"
            )
        if len(submission.data) > MAX_REQUEST_BYTES:
            raise MessageTooLargeError(
                f"the request has {len(submission.data):,} bytes, over the limit of {MAX_REQUEST_BYTES:,}: "
                "pass a path or a name, and load the data inside the job"
            )
        request = JobRequest.from_json(submission.data)
        job_id = request.job_id or JobId(f"{request.name[: MAX_NAME_LENGTH - 20]}-{submission.sequence}")
        if job_id == subjects.LEADER_KEY:
            raise InvalidNameError(f"{job_id!r} is no job id: the cluster itself has that key; choose another")
        if request.after:
            await self._check_dependencies(namespace, request, submission.sequence)
        now = time.time()
        job = lifecycle.new_job(namespace, job_id, request, order=submission.sequence, now=now)
        try:
            await self._create(job)
        except KeyExistsError as error:
            known = await table.get(job_id)
            if known is None or not _is_same(known.value, job):
                raise KeyExistsError(
                    f"job {job_id!r} exists already in namespace {namespace!r}: leave job_id out, or choose another"
                ) from error
            job = known.value if isinstance(known.value, JobRecord) else job
        for task in lifecycle.new_tasks(job):
            await self.record_task(task)

    async def _check_dependencies(self, namespace: Namespace, request: JobRequest, sequence: int) -> None:
        """Return when the jobs that it is to run after are recorded. Raises UnknownDependencyError, _TooEarlyError."""
        earlier = [task for before, task in self._in_hand.items() if before < sequence]
        if earlier:
            await asyncio.wait(earlier)

        def unknown() -> str | None:
            books = self._controller.books
            return dependencies.unknown(
                request.after,
                lambda job_id: books.get(JobKey(namespace, job_id)) is not None,
                lambda: books.latest(namespace, _NAMES_COMPARED),
            )

        if unknown() is None:
            return
        # What another controller took before it died comes again: only when that is settled it is sure that there is no such.
        settled = await first_unsettled(self._controller.bus) >= sequence
        missing = unknown()
        if missing is not None:
            raise UnknownDependencyError(missing) if settled else _TooEarlyError(missing)

    async def record_task(self, task: TaskRecord) -> None:
        """Write the first record of a task, if it is not there yet. Raises BusError."""
        try:
            await self._create(task)
        except KeyExistsError:
            return  # written before this controller, or the one before it, was stopped

    async def _create(self, record: JobRecord | TaskRecord) -> None:
        key = record_key(record)
        revision = await self._controller.records[record.namespace].create(key, record)
        self._controller.apply(Row(key, record, revision))

    def _refused(self, submission: Submission, reason: str) -> RefusedJob:
        log.warning("submission %d to %s is refused: %s", submission.sequence, submission.subject, reason)
        job_id = _claimed_id(submission.data)
        for namespace in self._controller.records:
            if submission.subject == subjects.jobs_submit(namespace):
                event = refusal(submission.sequence, job_id or "refused", reason, now=time.time())
                self._controller.events.refuse(namespace, event)
        return RefusedJob(sequence=submission.sequence, job_id=job_id, reason=reason[:10_000])

    # ---- who waits for a submission ---------------------------------------------------------------------

    def _remember(self, sequence: int, refused: RefusedJob | None) -> None:
        self._looked_at[sequence] = refused
        while len(self._looked_at) > _REMEMBERED:
            self._looked_at.popitem(last=False)
        self._wake(sequence)

    def on_job_changed(self, key: JobKey) -> None:
        self._wake(key)

    def _wake(self, what: JobKey | int) -> None:
        for future in self._waiters.pop(what, ()):
            if not future.done():
                future.set_result(None)

    async def wait_looked_at(self, job: JobKey, sequence: int) -> RefusedJob | None:
        """Why the submission was refused, None once it is recorded."""
        while sequence not in self._looked_at:
            entry = self._controller.books.get(job)
            if entry is not None and entry.job is not None and entry.job.value.order == sequence:
                return None
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for what in (job, sequence):
                self._waiters.setdefault(what, []).append(future)
            await future
        return self._looked_at[sequence]


class UnknownNamespaceError(FlusterError):
    """The cluster was not set up with that namespace."""


class UnknownDependencyError(FlusterError):
    """It is to run after a job that does not exist."""


class _TooEarlyError(FlusterError):
    """It cannot be decided yet."""


# What will not be better when it comes again.
_REFUSED = (
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    MessageTooLargeError,
    UnknownDependencyError,
    UnknownNamespaceError,
)


def _is_same(known: JobRecord | TaskRecord, job: JobRecord) -> bool:
    """True when `job` was submitted once: it was delivered again, or sent again by a client that saw no answer."""
    if known.order == job.order:
        return True
    if not isinstance(known, JobRecord) or job.submitted_at - known.submitted_at > _SENT_AGAIN_S:
        return False
    return slim_request(known.request) == slim_request(job.request)


def _claimed_id(data: bytes) -> JobId | None:
    """The id or name that a refused message gave itself, if it can be read at all."""
    try:
        message = json.loads(data)
        return JobId(check_name("job id", message.get("job_id") or message.get("name")))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
