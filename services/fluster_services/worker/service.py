"""What a worker answers to operators: what it runs, how that is, its output, and how the worker itself is.

Only operators and services may send to the subjects of workers, see fluster_bus.grants.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluster_bus.connection.bus import Bus, Request
from fluster_bus.core import subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.messages import (
    AttemptList,
    AttemptLogsReply,
    AttemptLogsRequest,
    AttemptQuery,
    AttemptsFlushRequest,
    AttemptStatus,
    Done,
    DrainReply,
    DrainRequest,
    JobId,
    KillAttemptRequest,
    LogLine,
    Message,
    Namespace,
    Offer,
    OfferReply,
    RunReply,
    RunRequest,
    TaskRecord,
    WorkerHealth,
    WorkerId,
)
from fluster_bus.messages.stacks import TaskStack
from fluster_services import lifecycle
from fluster_services.capacity import describe_bytes
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.contract.runtime import RunningTask, Runtime
from fluster_services.worker.contract.spool import SpoolRecord
from fluster_services.worker.engine import EngineError
from fluster_services.worker.presence.presence import Draining
from fluster_services.worker.presence.wellness import Wellness
from fluster_services.worker.stacks import Stacks

_SEARCHED_BYTES = 16 << 20  # of the end of an attempt's output
_REPLY_CHARACTERS = 2 << 20  # of lines, below the server's limit for a message also in JSON
_LITTLE_DISK_BYTES = 1 << 30
_FLUSH_S = 3.0


@dataclass(frozen=True)
class AttemptKey:
    """An attempt, by what its key says."""

    namespace: Namespace
    job_id: JobId
    task: int
    attempt: int

    @classmethod
    def parse(cls, key: str) -> AttemptKey:
        namespace, job_id, task, attempt = key.split(".")
        return cls(Namespace(namespace), JobId(job_id), int(task), int(attempt))


def find_attempt(keys: Collection[str], array_ids: Mapping[str, int], query: AttemptQuery) -> str | None:
    """The key of the attempt that is asked for; the newest of the task when none is named. `array_ids` has those of tasks of arrays."""
    found = [
        (place.attempt, key)
        for key, place in ((key, AttemptKey.parse(key)) for key in keys)
        if (place.namespace, place.job_id) == (query.namespace, query.job_id)
        and (place.task == query.task if query.number is None else array_ids.get(key, place.task) == query.number)
        and query.attempt in (None, place.attempt)
    ]
    return max(found)[1] if found else None


def selected(records: Sequence[SpoolRecord], request: AttemptLogsRequest) -> list[SpoolRecord]:
    """The last of the records that are asked for, as many as a reply holds. Raises ServiceError for a bad pattern."""
    try:
        pattern = re.compile(request.grep) if request.grep is not None else None
    except re.error as error:
        raise ServiceError("BadRequest", f"grep={request.grep!r}: invalid regular expression: {error}") from error
    found: list[SpoolRecord] = []
    size = 0
    for record in reversed(records):
        wanted = (
            request.stream in (None, record.stream)
            and (request.since is None or record.time >= request.since)
            and (pattern is None or pattern.search(record.text) is not None)
        )
        size += len(record.text) if wanted else 0
        if len(found) == request.tail or size > _REPLY_CHARACTERS:
            break
        if wanted:
            found.append(record)
    return found[::-1]


class WorkerService:
    """The verbs of one worker."""

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        *,
        state_dir: Path,
        runtime: Runtime,
        ledger: Ledger,
        claims: Claims,
        draining: Draining,
        wellness: Wellness,
        attempts: Mapping[str, RunningTask],
        array_ids: Mapping[str, int],
        unserved: Callable[[], Sequence[str]],
        on_offer: Callable[[Offer, str], Awaitable[OfferReply]],
        run: Callable[[RunRequest], Awaitable[RunReply]],
        obey: Callable[[TaskRecord], None],
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._state_dir = state_dir
        self._runtime = runtime
        self._ledger = ledger
        self._claims = claims
        self._draining = draining
        self._wellness = wellness
        self._attempts = attempts
        self._array_ids = array_ids
        self._unserved = unserved
        self._on_offer = on_offer
        self._run = run
        self._obey = obey
        self._stacks = Stacks()
        self._started = time.monotonic()

    async def serve(self) -> None:
        """Begin to answer. An offer is what runs a task: the worker claims its record, or declines."""
        await self._bus.serve(subjects.worker_verb(self._worker_id, "offer"), Offer, self._on_offer)
        await self._serve("run", RunRequest, self._run)
        await self._serve("drain", DrainRequest, self._drain)
        await self._serve("status", AttemptQuery, self._status)
        await self._serve("list", Done, self._list)
        await self._serve("logs", AttemptLogsRequest, self._logs)
        await self._serve("stack", AttemptQuery, self._stack)
        await self._serve("flush", AttemptsFlushRequest, self._flush)
        await self._serve("kill", KillAttemptRequest, self._kill)
        await self._serve("health", Done, self._health)

    async def _serve(self, verb: str, request: type[Request], answer: Callable[[Request], Awaitable[Message]]) -> None:
        async def handler(message: Request, _subject: str) -> Message:
            return await answer(message)

        await self._bus.serve(subjects.worker_verb(self._worker_id, verb), request, handler)

    async def _drain(self, request: DrainRequest) -> DrainReply:
        self._draining.ask(request.timeout_s)
        return DrainReply(worker_id=self._worker_id, running=len(self._ledger))

    def _found(self, query: AttemptQuery) -> str:
        key = find_attempt(self._ledger.attempts(), self._array_ids, query)
        if key is None:
            task = query.task if query.number is None else query.number
            number = "no attempt" if query.attempt is None else f"no attempt {query.attempt}"
            raise ServiceError(
                "AttemptNotFoundError",
                f"worker {self._worker_id} has {number} of task {task} of job {query.job_id!r} in namespace "
                f"{query.namespace!r}: `fluster status {query.job_id}` tells where it is",
            )
        return key

    async def _status(self, query: AttemptQuery) -> AttemptStatus:
        return self._described(self._found(query))

    async def _list(self, _request: Done) -> AttemptList:
        attempts = tuple(self._described(key) for key in sorted(self._ledger.attempts()))
        return AttemptList(worker_id=self._worker_id, attempts=attempts)

    def _described(self, key: str) -> AttemptStatus:
        place, running = AttemptKey.parse(key), self._attempts.get(key)
        return AttemptStatus(
            namespace=place.namespace,
            job_id=place.job_id,
            task=place.task,
            array_id=self._array_ids.get(key),
            attempt=place.attempt,
            phase="running" if running is not None else "preparing" if place.attempt else "reserved",
            resources=self._ledger.attempts()[key],
            devices=self._ledger.devices(key),
            pid=running.pid if running is not None else None,
            started_at=running.started_at if running is not None else None,
        )

    async def _logs(self, request: AttemptLogsRequest) -> AttemptLogsReply:
        key = self._found(request)
        place, running, array_id = AttemptKey.parse(key), self._attempts.get(key), self._array_ids.get(key)
        if running is None:
            return AttemptLogsReply(array_id=array_id)
        records, is_all = await asyncio.to_thread(running.read_log_end, max_bytes=_SEARCHED_BYTES)
        lines = tuple(
            LogLine(
                job_id=place.job_id,
                task=place.task,
                attempt=place.attempt,
                stream=record.stream,
                time=record.time,
                text=record.text,
                goes_on=record.is_partial,
            )
            for record in await asyncio.to_thread(selected, records, request)
        )
        return AttemptLogsReply(lines=lines, searched_all=is_all, array_id=array_id)

    async def _stack(self, query: AttemptQuery) -> TaskStack:
        key = self._found(query)
        place, running = AttemptKey.parse(key), self._attempts.get(key)
        try:
            found, is_cut = await self._stacks.read(running) if running is not None else ([], False)
        except EngineError as error:
            raise ServiceError("StackError", str(error)) from error
        return TaskStack(
            worker_id=self._worker_id, task=place.task, attempt=place.attempt, processes=tuple(found), cut=is_cut
        )

    async def _flush(self, request: AttemptsFlushRequest) -> Done:
        """Have all that the job's tasks here have written by now in the log stream; as much as can be in some seconds."""
        places = {key: AttemptKey.parse(key) for key in self._attempts}
        wanted = (request.namespace, request.job_id)
        running = [self._attempts[key] for key, place in places.items() if (place.namespace, place.job_id) == wanted]
        flushes = [asyncio.create_task(each.flush()) for each in running]
        if flushes:
            _done, late = await asyncio.wait(flushes, timeout=_FLUSH_S)
            for each in late:
                each.cancel()
        return Done()

    async def _kill(self, request: KillAttemptRequest) -> AttemptStatus:
        key = self._found(request)
        status, place = self._described(key), AttemptKey.parse(key)
        row = await self._claims.look(place.namespace, place.job_id, place.task)
        now = time.time()
        if row is not None and self._claims.is_mine(row.value, place.attempt):
            changed = await self._claims.change(
                row,
                lambda task: (
                    lifecycle.request_kill(task, now=now, reason=request.reason, force=request.force)
                    if self._claims.is_mine(task, place.attempt)
                    else None
                ),
            )
            if changed is not None:
                self._obey(changed.value)
        return status

    async def _health(self, _request: Done) -> WorkerHealth:
        disk_free = shutil.disk_usage(self._state_dir).free
        trouble, problems = self._wellness.trouble, [*self._wellness.problems(), *self._unserved()]
        if trouble is None and disk_free < _LITTLE_DISK_BYTES:
            problems.append(f"the disk of {self._state_dir} has only {describe_bytes(disk_free)} left")
        return WorkerHealth(
            worker_id=self._worker_id,
            problems=tuple(problems),
            draining=self._draining.is_asked,
            takes_work=not self._draining.is_asked and trouble is None and self._ledger.free.tasks != 0,
            running=len(self._ledger),
            total=self._ledger.total,
            free=self._ledger.free,
            disk_free=disk_free,
            limits=self._runtime.limits(),
            uptime_s=round(time.monotonic() - self._started, 3),
        )
