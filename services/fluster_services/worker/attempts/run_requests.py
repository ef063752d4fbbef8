"""Jobs that an operator wants to run on this worker now: it keeps room for them until they are recorded, and claims them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    DisconnectedError,
    FlusterError,
    NoRespondersError,
    RequestTimeoutError,
    ServiceError,
    StorageError,
)
from fluster_bus.core.names import unique_name
from fluster_bus.messages import (
    JobId,
    JobRequest,
    Namespace,
    Offer,
    RunReply,
    RunRequest,
    StatusReply,
    StatusRequest,
    WorkerId,
)
from fluster_bus.messages.parts.resources import WORKER_LABEL
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.streams import tasks_table
from fluster_bus.storage.submitting import submit
from fluster_bus.storage.tables import Row
from fluster_services.capacity import fits, misfit, needed
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.attempts.offers import UnfitError, reservation_of

log = logging.getLogger(__name__)

REFUSED = "JobRefusedError"  # what clients know it by
_UNANSWERED = (NoRespondersError, RequestTimeoutError, DisconnectedError)
_STORE_WITHIN_S = 10.0  # a server that died is up again long before
_RECORD_TIMEOUT_S = 5.0  # the controller waits a little less for a job to be recorded
_ANSWER_WITHIN_S = 4.0  # then the operator hears that no controller has recorded the job yet


@dataclass(frozen=True)
class _Submitted:
    """A job for whose tasks this worker keeps room."""

    namespace: Namespace
    job_id: JobId
    submission: int  # its place in the submit stream, and so its order
    tasks: range


class _ClaimResult(NamedTuple):
    """How the claims of such a job ended: all of it was claimed, or the controller refused it, or neither."""

    is_claimed: bool = False
    refusal: str | None = None


class RunRequests:
    """What operators asked this worker to run now. Room that was not claimed `claim_within_s` after it was asked for is given
    back; the job then waits for offers as others do, and still runs on this worker only.

    `check` tells why the worker does not take a job, `take` claims a task that is offered, `give_back` frees room.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        ledger: Ledger,
        *,
        check: Callable[[Namespace, JobRequest], Awaitable[str | None]],
        take: Callable[[Offer], Awaitable[str | None]],
        give_back: Callable[[str], Awaitable[None]],
        start: Callable[[Coroutine[object, None, _ClaimResult]], asyncio.Task[_ClaimResult]],
        claim_within_s: float,
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._ledger = ledger
        self._check = check
        self._take = take
        self._give_back = give_back
        self._start = start
        self._claim_within_s = claim_within_s

    async def run(self, request: RunRequest) -> RunReply:
        """Have a job run here now. Raises ServiceError, by the name JobRefusedError, when that cannot be."""
        namespace, job = request.namespace, self._pinned(request.job)
        refusal = why_never_now(request.job) or await self._check(namespace, job)
        if refusal is not None:
            raise self._refused(job, refusal)
        job_id = job.job_id or JobId(unique_name(job.name))
        job = job.model_copy(
            update={"job_id": job_id, "submission": job.submission or unique_name(f"{namespace}.{job_id}")}
        )
        kept = self._keep(namespace, job_id, job)
        try:
            submission = await self._submit(namespace, job)
        except BaseException:
            await self._release(kept)
            raise
        submitted = _Submitted(namespace, job_id, submission, range(job.replicas))
        claiming = self._start(self._see_through(submitted, kept))
        done, _ = await asyncio.wait({claiming}, timeout=_ANSWER_WITHIN_S)
        result = claiming.result() if done else _ClaimResult()
        if result.refusal is not None:
            raise self._refused(job, result.refusal)
        return RunReply(worker_id=self._worker_id, job_id=job_id, submission=submission, claimed=result.is_claimed)

    def _pinned(self, job: JobRequest) -> JobRequest:
        labels = {**job.resources.labels, WORKER_LABEL: self._worker_id}
        return job.model_copy(update={"resources": job.resources.model_copy(update={"labels": labels})})

    def _refused(self, job: JobRequest, reason: str) -> ServiceError:
        return ServiceError(REFUSED, f"worker {self._worker_id} does not run {job.job_id or job.name} now: {reason}")

    def _keep(self, namespace: Namespace, job_id: JobId, job: JobRequest) -> list[str]:
        """Keep room for all tasks, or raise ServiceError."""
        need, keys = needed(job.resources), [reservation_of(namespace, job_id, task) for task in range(job.replicas)]
        if not fits(need, self._ledger.total):
            raise self._refused(job, misfit(need, [(self._worker_id, self._ledger.total)]))
        kept: list[str] = []
        for key in keys:
            if self._ledger.reserve(key, need):
                kept.append(key)
                continue
            reason = self._ledger.why_full(need) or "it was asked to run that job already"
            if len(keys) > 1:
                reason += f" for more than {len(kept)} of {len(keys)} tasks"
            for each in kept:
                self._ledger.release(each)
            raise self._refused(job, f"{reason}; `fluster worker list {self._worker_id}` shows what it has")
        return kept

    async def _submit(self, namespace: Namespace, job: JobRequest) -> int:
        """The job's place in the submit stream. Raises BusError when it is not known to be stored."""
        return await retried(
            lambda _left_s: submit(self._bus, namespace, job, message_id=str(job.submission)),
            on=(*_UNANSWERED, StorageError),
            timeout_s=_STORE_WITHIN_S,
        )

    async def _release(self, kept: list[str]) -> None:
        for key in kept:
            await self._give_back(key)

    async def _see_through(self, submitted: _Submitted, kept: list[str]) -> _ClaimResult:
        """Claim the tasks as they are recorded."""
        claiming = asyncio.create_task(self._claim(submitted))
        asking = asyncio.create_task(self._why_refused(submitted))
        result = _ClaimResult()
        try:
            async with asyncio.timeout(self._claim_within_s):
                await asyncio.wait({claiming, asking}, return_when=asyncio.FIRST_COMPLETED)
                result = _ClaimResult(refusal=asking.result() if asking.done() else None)
                if result.refusal is None:
                    result = _ClaimResult(is_claimed=await claiming)
        except TimeoutError:
            log.warning("%s is not recorded yet: no room is kept for it any longer", submitted.job_id)
        except (FlusterError, UnfitError) as error:
            log.warning("%s is left to offers: %s", submitted.job_id, error)
        finally:
            claiming.cancel()
            asking.cancel()
            await asyncio.gather(claiming, asking, return_exceptions=True)
            await self._release(kept)  # of those that were claimed there is none left
        return result

    async def _claim(self, submitted: _Submitted) -> bool:
        """Whether all tasks were claimed, once that was tried with each; one that was not is left to offers."""
        is_claimed = True
        left = set(submitted.tasks)
        records = tasks_table(self._bus, submitted.namespace).watch(buckets.task_key_of_any(submitted.job_id))
        async with aclosing(records) as changes:
            async for change in changes:
                if not isinstance(change, Row):
                    continue
                task = change.value
                if task.order != submitted.submission or task.task not in left:
                    continue
                left.discard(task.task)
                refusal = await self._take(Offer.of(task, change.revision))
                if refusal is not None:
                    is_claimed = False
                    log.info("%s.%d is not claimed at once: %s", task.job_id, task.task, refusal)
                if not left:
                    return is_claimed
        raise AssertionError("a watch does not end")

    async def _why_refused(self, submitted: _Submitted) -> str | None:
        """Why the controller does not record the job; None once it has."""
        question = StatusRequest(job_ids=(submitted.job_id,), submissions=(submitted.submission,)).to_json()
        subject = subjects.jobs_verb(submitted.namespace, "status")

        async def ask(_left_s: float) -> StatusReply:
            answer = await self._bus.request(subject, question, timeout_s=_RECORD_TIMEOUT_S)
            reply = StatusReply.from_json(answer.data)
            if not reply.refused and not reply.jobs:
                raise RequestTimeoutError(f"{submitted.job_id} is not recorded yet")
            return reply

        reply = await retried(ask, on=_UNANSWERED, timeout_s=math.inf)  # who waits for it has a bound
        return next((each.reason for each in reply.refused if each.sequence == submitted.submission), None)


def why_never_now(job: JobRequest) -> str | None:
    """Why no worker runs such a job on demand, whatever room it has; None when one may."""
    if job.gang:
        return "a gang is gathered from all workers: submit it without naming one"
    if job.after:
        return f"it is to run after {', '.join(job.after)}, so not now: submit it with the label {WORKER_LABEL} instead"
    if job.array is not None and job.array.at_once is not None:
        return f"only {job.array.at_once} of its tasks may run at once ({job.array}), so not all now"
    if job.on_conflict != "error":
        return f"on_conflict={job.on_conflict!r} may mean another job than this one: leave it out"
    return None
