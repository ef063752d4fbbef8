"""Answers what clients ask about their jobs, also by passing it on to their workers, which tenants may not ask themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, BusyError, NoRespondersError, RequestTimeoutError, ServiceError
from fluster_bus.messages import (
    AttemptQuery,
    AttemptsFlushRequest,
    Done,
    FlushRequest,
    JobDetails,
    JobId,
    JobInfo,
    JobRecord,
    JobStatus,
    ListReply,
    ListRequest,
    Namespace,
    Progress,
    RefusedJob,
    StatusReply,
    StatusRequest,
    TaskRecord,
    TerminateReply,
    TerminateRequest,
    WorkerId,
)
from fluster_bus.messages.parts.arrays import number_in
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.requests import MAX_JOBS_A_REPLY
from fluster_bus.messages.stacks import TaskStack, TaskStackRequest
from fluster_services import job_lifecycle
from fluster_services.controller.answers.requests import Pace, present_pace
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.slim_records import is_left, is_slim_end, is_slim_error
from fluster_services.job_lifecycle import job_status, job_summary, task_statuses

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.answers.requests import Pace
    from fluster_services.controller.leading.record_writer import RecordTables, RecordWriter
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.state.reports import ProgressBoard
    from fluster_services.controller.submissions.outcomes import SubmissionOutcomes

_RECORDED_TIMEOUT_S = 4.0  # below the client's own, so that it hears which jobs are not recorded yet
_MAX_REPLY_BYTES = 1 << 20  # of jobs; one alone may have more, and still be below the server's limit
_TIMEOUT_S = 15.0  # above the time that a worker takes at most, and below that of the client
_FLUSH_TIMEOUT_S = 4.0  # above what a worker takes at most, and below the client's own
_AT_ONCE = 100  # workers


class JobRequests:
    """What clients ask about jobs of their namespace, but for why one does not run."""

    def __init__(
        self,
        bus: Bus,
        *,
        job_index: JobIndex,
        tables: RecordTables,
        writer: RecordWriter,
        outcomes: SubmissionOutcomes,
        progress: ProgressBoard,
    ) -> None:
        self._bus = bus
        self._job_index = job_index
        self._tables = tables
        self._writer = writer
        self._outcomes = outcomes
        self._progress = progress

    async def status(self, namespace: Namespace, request: StatusRequest) -> Json:
        pace = present_pace()
        keys = dict.fromkeys(JobKey(namespace, job_id) for job_id in request.job_ids)
        until = asyncio.get_running_loop().time() + _RECORDED_TIMEOUT_S
        refused, unrecorded = await self._looked_at(list(keys), request.submissions, pace, until)
        try:
            # A client that began to watch just after a job's end was published learns of it here alone.
            await self._writer.pending.wait_settled(keys, until=until)
        except TimeoutError as error:
            raise BusyError("records of these jobs are being written: ask again in a moment") from error
        # The id of one that is not recorded yet may be another's, which it is to replace.
        known = {key for key in keys if key not in unrecorded and self._job_index.get(key) is not None}
        page = JobPage()
        for key in (key for key in keys if key in known):
            await pace.step()
            told = await self._told(key, pace, details=request.details, error=True)
            if told is not None and not page.add(told):
                break
        unknown = tuple(key.job_id for key in keys if key not in known)
        return page.reply(StatusReply(unknown=unknown, refused=refused))

    async def _looked_at(
        self, keys: list[JobKey], submissions: tuple[int, ...], pace: Pace, until: float
    ) -> tuple[tuple[RefusedJob, ...], set[JobKey]]:
        """Which of the submissions were refused, and which could not be waited for until that time of the loop's clock."""
        refused: list[RefusedJob] = []
        unrecorded: set[JobKey] = set()
        for key, sequence in zip(keys, submissions, strict=False):
            await pace.step()
            try:
                async with asyncio.timeout_at(until):
                    why = await self._outcomes.wait_looked_at(key, sequence)
            except TimeoutError:
                unrecorded.add(key)
            else:
                refused += [why] if why is not None else []
        return tuple(refused), unrecorded

    async def _told(self, key: JobKey, pace: Pace, *, details: bool = False, error: bool = False) -> bytes | None:
        """The JSON of a job's description, `error` being the exception that it failed with; None when it is gone."""
        entry = self._job_index.get(key)
        if entry is None or entry.job is None:
            return None
        job, tasks = entry.job.value, entry.task_records()
        progress = self._progress.of(key)
        info = job_summary(job, tasks)
        info = await self._whole(info) if error else info.model_copy(update={"error": None})
        if details:
            info = info.model_copy(update={"details": await self._details(info)})
        return await written_job(info, job, tasks, progress, pace)

    async def _whole(self, info: JobInfo) -> JobInfo:
        if not is_slim_error(info.error):
            return info
        row = await self._tables[info.namespace].get(info.job_id)
        return info.model_copy(update={"error": row.value.error if row is not None else None})

    async def _details(self, info: JobInfo) -> JobDetails | None:
        entry = self._job_index.get(JobKey(info.namespace, info.job_id))
        job = entry.job.value if entry is not None and entry.job is not None else None
        if job is None or is_slim_end(job) or is_left(job.request):
            row = await self._tables[info.namespace].get(info.job_id)
            job = row.value if row is not None and isinstance(row.value, JobRecord) else None
        return JobDetails.of(job.request) if job is not None else None

    async def list(self, namespace: Namespace, request: ListRequest) -> Json:
        job_index, pace, page = self._job_index, present_pace(), JobPage(request.limit)
        skip, cursor, more = request.skip, request.after, False
        for key in job_index.newest(namespace, request.after):
            await pace.step()
            entry = job_index.get(key)
            if entry is None or entry.job is None:
                continue
            order = entry.job.value.order
            if request.states and job_status(entry.job.value, entry.task_records()) not in request.states:
                continue
            if skip:
                skip -= 1
                continue
            if page.is_full:
                more = len(page) < request.limit
                break
            told = await self._told(key, pace, details=request.details)
            if told is not None and not page.add(told):
                more = True
                break
            cursor = order
        return page.reply(ListReply(more=more, cursor=cursor))

    async def terminate(self, namespace: Namespace, request: TerminateRequest) -> Json:
        key = JobKey(namespace, request.job_id)
        while True:
            entry = self._job_index.get(key)
            if entry is None or entry.job is None:
                raise ServiceError(
                    "JobNotFoundError", f"no job {request.job_id!r} in namespace {namespace!r}: `fluster ps` lists them"
                )
            wanted = job_lifecycle.request_job_kill(entry.job.value, reason=request.reason)
            job, tasks = entry.job.value, entry.task_records()
            if wanted is None or await self._writer.write(wanted, entry.job.revision):
                return terminated(await written_job(job_summary(job, tasks), job, tasks, {}, present_pace()))
            newer = await self._tables[namespace].get(request.job_id)
            if newer is not None:
                self._writer.apply(newer)

    async def stack(self, namespace: Namespace, request: TaskStackRequest) -> TaskStack:
        job, tasks = known_job(self._job_index, JobKey(namespace, request.job_id))
        return await stack_of(self._bus, job, tasks, request)

    async def flush(self, namespace: Namespace, request: FlushRequest) -> Done:
        _, tasks = known_job(self._job_index, JobKey(namespace, request.job_id))
        await flush_job(self._bus, namespace, request.job_id, tasks)
        return Done()


def known_job(job_index: JobIndex, key: JobKey) -> tuple[JobRecord, list[TaskRecord]]:
    """The records of a job. Raises ServiceError when there is no such job."""
    entry = job_index.get(key)
    if entry is None or entry.job is None:
        raise ServiceError(
            "JobNotFoundError", f"no job {key.job_id!r} in namespace {key.namespace!r}: `fluster ps` lists them"
        )
    return entry.job.value, entry.task_records()


class JobPage:
    """The first of some jobs, as many as a reply holds; at least one."""

    def __init__(self, limit: int = MAX_JOBS_A_REPLY) -> None:
        self._limit = min(limit, MAX_JOBS_A_REPLY)
        self._jobs: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """True when it holds as many jobs as it may."""
        return len(self._jobs) >= self._limit

    def add(self, job: bytes) -> bool:
        """Take in a job; False when it does not fit."""
        self._size += len(job)
        if self._jobs and (self.is_full or self._size > _MAX_REPLY_BYTES):
            return False
        self._jobs.append(job)
        return True

    def reply(self, rest: Message) -> Json:
        """`rest`, with these jobs."""
        return Json(_with_list(rest.to_json(), "jobs", self._jobs))


class Json:
    """A reply that is written already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def to_json(self) -> bytes:
        return self._data


async def written_job(
    summary: JobInfo, job: JobRecord, tasks: Iterable[TaskRecord], progress: Mapping[int, Progress], pace: Pace
) -> bytes:
    """The JSON of a JobInfo: `summary`, with its tasks."""
    written = []
    for status in task_statuses(job, tasks, progress):
        written.append(status.to_json())
        await pace.step()
    return _with_list(summary.to_json(), "tasks", written)


def terminated(job: bytes) -> Json:
    """A TerminateReply of a job that is written."""
    (name,) = TerminateReply.model_fields
    return Json(b'{"%s":%s}' % (name.encode(), job))


def _with_list(message: bytes, name: str, items: list[bytes]) -> bytes:
    """The JSON of a message that lacks its field `name`, with the items of that."""
    if not items:
        return message
    comma = b"," if len(message) > len(b"{}") else b""
    return b'%s%s"%s":[%s]}' % (message[:-1], comma, name.encode(), b",".join(items))


async def stack_of(bus: Bus, job: JobRecord, tasks: Sequence[TaskRecord], request: TaskStackRequest) -> TaskStack:
    """The stacks of one of the tasks of a job. Raises ServiceError when it does not run, or its worker cannot tell them."""
    task = next((each for each in tasks if each.task == request.task), None)
    which = f"task {number_in(job.request.array, request.task)} of job {request.job_id!r}"
    if task is None:
        raise ServiceError("StackError", f"{which} does not exist: the job has {len(tasks)} tasks, from 0 on")
    if task.worker_id is None or task.state is not JobStatus.RUNNING:
        raise ServiceError("StackError", f"{which} does not run, so it has no stack: it is {task.state}")
    query = AttemptQuery(namespace=task.namespace, job_id=task.job_id, task=task.task, attempt=task.attempt)
    verb = subjects.worker_verb(task.worker_id, "stack")
    try:
        answer = await bus.request(verb, query.to_json(), timeout_s=_TIMEOUT_S)
    except (NoRespondersError, RequestTimeoutError) as error:
        raise ServiceError(
            "StackError", f"{which}: worker {task.worker_id} does not answer: `fluster workers` says how it is"
        ) from error
    except ServiceError as error:
        raise ServiceError(error.code, f"{which}: {error}") from error
    return TaskStack.from_json(answer.data)


log = logging.getLogger(__name__)


async def flush_job(bus: Bus, namespace: Namespace, job_id: JobId, tasks: Sequence[TaskRecord]) -> None:
    """Return when what these tasks had written is in the log stream, or some seconds have passed."""
    workers = {task.worker_id for task in tasks if task.worker_id is not None and not task.state.finished()}
    request = AttemptsFlushRequest(namespace=namespace, job_id=job_id)
    room = asyncio.Semaphore(_AT_ONCE)

    async def flush(worker_id: WorkerId) -> None:
        async with room:
            try:
                await bus.request(
                    subjects.worker_verb(worker_id, "flush"), request.to_json(), timeout_s=_FLUSH_TIMEOUT_S
                )
            except BusError as error:  # it is away, or of a version that does not know how: what is stored is used
                log.info("the output of %s is not flushed at worker %s: %s", job_id, worker_id, error)

    flushes = [asyncio.create_task(flush(worker_id)) for worker_id in sorted(workers)]
    if not flushes:
        return
    try:
        await asyncio.wait(flushes, timeout=_FLUSH_TIMEOUT_S)
    finally:
        for each in flushes:
            each.cancel()
