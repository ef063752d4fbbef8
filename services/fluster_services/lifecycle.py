"""The life of a task and of a job, as pure functions: a record, what happened and when in; the new record out.

    state          event                       new state        who writes it
    PENDING        claimed by a worker         BUILDING         the worker
    BUILDING       a hold of a gang is off     PENDING          the worker
    BUILDING       its process runs            RUNNING          the worker
    BUILDING/
    RUNNING        ended with exit code 0      SUCCEEDED        the worker
                   ended otherwise             FAILED           the worker
                   stopped by request          KILLED           the worker
                   its worker is lost          WORKER_FAILED    the controller
    PENDING        stopped by request          KILLED           the controller
                   fits no worker, for long    UNSCHEDULABLE    the controller
                   no worker has its folder    FAILED           the controller
    FAILED         failure budget left         PENDING, n + 1   the controller
    WORKER_FAILED  preemption budget left      PENDING, n + 1   the controller
    any end        its gang starts again       PENDING, n + 1   the controller

A claim of a gang's task is a hold: what follows from it is decided in the job's record (see gangs.py).
A function returns None when the event does not apply to the record any more: it is late, doubled, or about an attempt
that was superseded. Then nothing is written. Every other state than those on the left is final.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from fluster_bus.messages import (
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    Progress,
    TaskError,
    TaskRecord,
    TaskResult,
    Transition,
    WorkerId,
)
from fluster_bus.messages.parts.arrays import number_in
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.messages.records import KEPT_TRANSITIONS

Record = TypeVar("Record", TaskRecord, JobRecord)

_HELD = (JobStatus.BUILDING, JobStatus.RUNNING)  # a worker has it
_MAX_SPARED = 10  # ends at no cost; from then on they cost a preemption, so that nothing is tried for ever
MAX_DISKS_FILLED = 3  # of different workers
MAX_FILLINGS = 6  # where there are fewer of those, or the same ones take it again


# ---- records come into being ----------------------------------------------------------------------------


TASKS_WITH_JOB = 64  # a job that has more is recorded before them, so that whoever is next need not wait for all


def new_job(namespace: Namespace, job_id: JobId, request: JobRequest, *, order: int, now: float) -> JobRecord:
    """The record of a job as it is submitted."""
    first = Transition(number=1, state=JobStatus.PENDING, time=now, reason="submitted")
    return JobRecord(
        job_id=job_id, namespace=namespace, request=request, order=order, submitted_at=now, transitions=(first,)
    )


def new_tasks(job: JobRecord) -> list[TaskRecord]:
    """The records of a job's tasks, all waiting for a worker; none yet while the job waits for others."""
    return list(each_new_task(job))


def is_recorded_later(job: JobRecord) -> bool:
    """True when the tasks are not recorded together with the job: it had to wait for others, or has so many of them that other
    jobs would wait for that.
    """
    return job.released or job.request.replicas > TASKS_WITH_JOB


def each_new_task(job: JobRecord) -> Iterator[TaskRecord]:
    """The same, one after the other: it takes some time to make 10,000 of them."""
    if awaits_others(job):
        return
    request = job.request
    # When it was submitted, or released.
    since = job.transitions[-1]
    first = Transition(
        number=job.told_before + 1,
        state=JobStatus.PENDING,
        time=since.time,
        reason=since.reason,
        attempt=job.first_attempt,
    )
    for task in range(request.replicas):
        yield TaskRecord(
            job_id=job.job_id,
            namespace=job.namespace,
            task=task,
            order=job.order,
            priority=request.priority,
            resources=request.resources,
            max_retries_failure=request.max_retries_failure,
            max_retries_preemption=request.max_retries_preemption,
            retry_window_s=request.retry_window_s,
            retry_backoff_s=request.retry_backoff_s,
            scheduling_timeout_s=request.scheduling_timeout_s,
            gang=request.gang,
            attempt=job.first_attempt,
            transitions=(first,),
        )


# ---- a task ---------------------------------------------------------------------------------------------


def claim(
    task: TaskRecord,
    *,
    attempt: int,
    worker_id: WorkerId,
    now: float,
    epoch: int = 0,
    stored_at: datetime | None = None,
) -> TaskRecord | None:
    """`worker_id` takes the attempt that was offered to it; a task of a gang for `epoch` only, each epoch once.

    `stored_at` is when the bus stored the record that is claimed.
    """
    if task.state is not JobStatus.PENDING or task.attempt != attempt or task.kill_requested is not None:
        return None
    if epoch <= task.epoch if task.gang else epoch:
        return None
    reason = f"held by {worker_id} for epoch {epoch} of its gang" if task.gang else f"claimed by {worker_id}"
    since = (task.waiting_since or stored_at) if task.gang else None
    return _moved(
        task,
        JobStatus.BUILDING,
        now,
        reason,
        worker_id=worker_id,
        started_at=now,
        epoch=epoch,
        waiting_since=since,
    )


def make_ready(task: TaskRecord, *, attempt: int, worker_id: WorkerId, gang_address: str | None) -> TaskRecord | None:
    """A hold has all that its process needs."""
    if not task.gang or task.state is not JobStatus.BUILDING or task.is_ready or not _holds(task, attempt, worker_id):
        return None
    return task.model_copy(update={"is_ready": True, "gang_address": gang_address})


def release(
    task: TaskRecord, *, attempt: int, worker_id: WorkerId, epoch: int, now: float, reason: str
) -> TaskRecord | None:
    """A hold is over without a start. It was no attempt at running, so it costs nothing and the number stays."""
    if task.state is not JobStatus.BUILDING or not _holds(task, attempt, worker_id) or task.epoch != epoch:
        return None
    if task.kill_requested is not None:
        return _moved(task, JobStatus.KILLED, now, task.kill_requested, finished_at=now)
    return _moved(task, JobStatus.PENDING, now, reason, **_UNTOUCHED)


def run(
    task: TaskRecord, *, attempt: int, worker_id: WorkerId, now: float, image: UsedImage | None = None
) -> TaskRecord | None:
    """The attempt's process runs; in a container that was made of `image`."""
    if task.state is not JobStatus.BUILDING or not _holds(task, attempt, worker_id):
        return None
    reason = "started" if image is None else f"started, in image {image}"
    return _moved(task, JobStatus.RUNNING, now, reason, image=image, started_at=now, has_output=True)


def end(
    task: TaskRecord,
    *,
    attempt: int,
    worker_id: WorkerId,
    now: float,
    state: JobStatus,
    reason: str,
    exit_code: int | None = None,
    error: TaskError | None = None,
    last_words: str = "",
    result: TaskResult | None = None,
    progress: Progress | None = None,
    is_spared: bool = False,
    filled_disk: bool = False,
    has_output: bool = False,
) -> TaskRecord | None:
    """The attempt ended at its worker: SUCCEEDED, FAILED, KILLED, or WORKER_FAILED when it was not its own fault.

    One that was to be stopped for the sake of its gang costs it nothing, however it ended. Neither does one with `is_spared`,
    for which the worker itself is to blame, but only so often: a task that meets such a worker again and again may well be
    what is wrong. With `filled_disk` it took all the room of its worker's disk; a task that does so on three workers, or six times
    on fewer, has failed. With both it did so where little was left: that is spared so often, and counts from then on.
    """
    if task.state not in _HELD or not _holds(task, attempt, worker_id):
        return None
    is_spared = is_spared and task.spared < _MAX_SPARED
    is_charged = task.restart_requested is None and not is_spared
    filled_disk = filled_disk and not is_spared
    filled = (*task.disk_filled, worker_id) if filled_disk else task.disk_filled
    failed = _charge_failure(task, now, error) if is_charged and state is JobStatus.FAILED else {}
    where = tuple(dict.fromkeys(filled))
    if filled_disk and (len(where) >= MAX_DISKS_FILLED or len(filled) >= MAX_FILLINGS):
        state, reason = JobStatus.FAILED, f"{reason}; it did so {len(filled)} times, on {', '.join(where)}"
        failed = {"failures": max(task.failures, task.max_retries_failure) + 1}
    return _moved(
        task,
        state,
        now,
        reason,
        exit_code=exit_code,
        error=error,
        last_words=last_words,
        result=result,
        progress=progress,
        finished_at=now,
        preemptions=task.preemptions + (is_charged and state is JobStatus.WORKER_FAILED),
        spared=task.spared + is_spared,
        disk_filled=filled,
        has_output=task.has_output or has_output,
        **failed,
    )


def _charge_failure(task: TaskRecord, now: float, error: TaskError | None) -> dict[str, object]:
    if error is not None and error.is_final:
        return {"failures": max(task.failures, task.max_retries_failure) + 1}
    if task.retry_window_s is None:
        return {"failures": task.failures + 1}
    ran_s = max(now - task.started_at, 0.0) if task.started_at is not None else 0.0
    earlier = [age_s + ran_s for age_s in task.failure_ages_s if age_s + ran_s <= task.retry_window_s]
    return {"failures": len(earlier) + 1, "failure_ages_s": (*earlier, 0.0)}


def lose_worker(task: TaskRecord, *, worker_id: WorkerId, now: float, reason: str) -> TaskRecord | None:
    """The worker that held the task is gone; what it cost is charged to the preemption budget."""
    return end(task, attempt=task.attempt, worker_id=worker_id, now=now, state=JobStatus.WORKER_FAILED, reason=reason)


def request_kill(task: TaskRecord, *, now: float, reason: str, force: bool = False) -> TaskRecord | None:
    """Somebody wants it stopped: done at once when nobody holds it, else its worker is asked through the record.

    With `force` without its grace, which one that is being stopped already then loses too.
    """
    if is_final(task):
        return None
    if task.kill_requested is not None:
        is_new = force and not task.kill_at_once and task.state in _HELD
        return task.model_copy(update={"kill_at_once": True}) if is_new else None
    wanted = task.model_copy(update={"kill_requested": reason, "kill_at_once": force})
    if task.state in _HELD:
        return wanted
    return _moved(wanted, JobStatus.KILLED, now, reason, finished_at=now)


def request_restart(task: TaskRecord, *, reason: str) -> TaskRecord | None:
    """Its gang starts again, so the worker is asked through the record to stop it."""
    if task.state not in _HELD or task.restart_requested is not None or task.kill_requested is not None:
        return None
    return task.model_copy(update={"restart_requested": reason})


def give_up(task: TaskRecord, *, now: float, reason: str) -> TaskRecord | None:
    """It will never fit."""
    if task.state is not JobStatus.PENDING:
        return None
    return _moved(task, JobStatus.UNSCHEDULABLE, now, reason, finished_at=now)


def refuse(task: TaskRecord, *, now: float, reason: str) -> TaskRecord | None:
    """All workers lack what it names: to try again would not help."""
    if task.state is not JobStatus.PENDING:
        return None
    failures = max(task.failures, task.max_retries_failure) + 1
    return _moved(task, JobStatus.FAILED, now, reason, finished_at=now, failures=failures)


def retry(task: TaskRecord, *, now: float) -> TaskRecord | None:
    """The next attempt, when the newest one failed and its budget has something left."""
    if not _may_retry(task):
        return None
    used, budget = (
        (task.failures, task.max_retries_failure)
        if task.state is JobStatus.FAILED
        else (task.preemptions, task.max_retries_preemption)
    )
    # A lost worker says nothing about the task: the first time it is tried again at once.
    pauses = used - 1 if task.state is JobStatus.FAILED else used - 2
    pause_s = backoff_s(task, pauses)
    count = f"retry {used} of {budget}" if used else "again, at no cost,"
    reason = f"{count} after {task.state}" + (f", in {pause_s:.1f} s" if pause_s else "")
    return _again(task, now, reason, backoff_s=pause_s)


def restart(task: TaskRecord, *, now: float) -> TaskRecord | None:
    """The next attempt of a gang's task whose round is over: a retry where it failed by itself, else at no cost."""
    if not task.gang or not task.state.finished() or task.kill_requested is not None:
        return None
    if task.restart_requested is None and task.state is not JobStatus.SUCCEEDED:
        return retry(task, now=now)
    return _again(task, now, f"its gang starts again; this attempt ended as {task.state}", backoff_s=0.0)


# What a record that nobody has taken yet says of its attempt.
_UNTOUCHED: dict[str, Any] = {
    "worker_id": None,
    "is_ready": False,
    "gang_address": None,
    "restart_requested": None,
    "exit_code": None,
    "error": None,
    "last_words": "",
    "result": None,
    "progress": None,
    "started_at": None,
    "finished_at": None,
}


def _again(task: TaskRecord, now: float, reason: str, *, backoff_s: float) -> TaskRecord:
    return _moved(
        task,
        JobStatus.PENDING,
        now,
        reason,
        attempt=task.attempt + 1,
        backoff_s=backoff_s,
        waiting_since=None,
        **_UNTOUCHED,
    )


_MAX_DOUBLINGS = 6


def backoff_s(task: TaskRecord, pauses: int) -> float:
    """How long to wait before the next attempt, after so many pauses before: doubled each time, up to 64 times.

    Spread by a quarter to either side, differently for each task and attempt, so that those that failed together do not
    come back together; always the same for the same attempt, whoever computes it.
    """
    if pauses < 0:
        return 0.0
    spread = zlib.crc32(f"{task.namespace}.{task.job_id}.{task.task}.{task.attempt}".encode()) / (1 << 32)
    return float(round(task.retry_backoff_s * 2 ** min(pauses, _MAX_DOUBLINGS) * (0.75 + spread / 2), 3))


def _may_retry(task: TaskRecord) -> bool:
    if task.kill_requested is not None:
        return False
    if task.restart_requested is not None:
        return task.state.finished()
    if task.state is JobStatus.FAILED:
        return task.failures <= task.max_retries_failure
    return task.state is JobStatus.WORKER_FAILED and task.preemptions <= task.max_retries_preemption


def is_final(task: TaskRecord) -> bool:
    """True when the task will not change any more."""
    return task.state.finished() and not _may_retry(task)


def is_held(task: TaskRecord) -> bool:
    """True while a worker has it."""
    return task.state in _HELD


def is_to_be_stopped(task: TaskRecord) -> bool:
    """True while a worker has it that is asked, through the record, to stop it."""
    return is_held(task) and (task.kill_requested is not None or task.restart_requested is not None)


def _holds(task: TaskRecord, attempt: int, worker_id: WorkerId) -> bool:
    return task.attempt == attempt and task.worker_id == worker_id


# ---- a job ----------------------------------------------------------------------------------------------


def request_job_kill(job: JobRecord, *, reason: str) -> JobRecord | None:
    """The job is to be stopped; its tasks are stopped one by one after this is written.

    One that is about to be replaced is being stopped already: then the wish is meant for its replacement.
    """
    if job.replacement is not None:
        if job.replacement.kill_requested is not None:
            return None
        stopped = job.replacement.model_copy(update={"kill_requested": reason})
        return job.model_copy(update={"replacement": stopped})
    if job.state.finished() or job.kill_requested is not None:
        return None
    return job.model_copy(update={"kill_requested": reason})


def awaits_others(job: JobRecord) -> bool:
    """True while jobs that it is to run after have not ended: then its tasks have no records."""
    return bool(job.request.after) and not job.released


def release_job(job: JobRecord, *, now: float) -> JobRecord | None:
    """What the job was to run after has ended: its tasks may be recorded, and offered."""
    if job.state.finished() or not awaits_others(job):
        return None
    return _moved(job, JobStatus.PENDING, now, "what it was to run after has ended", released=True)


def end_unreleased(job: JobRecord, *, state: JobStatus, now: float, reason: str) -> JobRecord | None:
    """The end of a job that still waited for others, so that none of its tasks was ever there."""
    if job.state.finished() or not awaits_others(job):
        return None
    return _moved(job, state, now, reason, error_message=reason, finished_at=now)


def finish_job(job: JobRecord, tasks: Iterable[TaskRecord], *, now: float) -> JobRecord | None:
    """The job's end, once all its tasks have ended: SUCCEEDED if all did, KILLED if that was asked for, else the
    worst that happened to one, with its error and its last words.
    """
    tasks = sorted(tasks, key=lambda task: task.task)  # whoever decides names the same culprit
    if job.state.finished() or not tasks or not all(is_final(task) for task in tasks):
        return None
    state = _joined_state(job, tasks)
    culprit = next((task for task in tasks if task.state is state), None) if state is not JobStatus.SUCCEEDED else None
    message = (job.kill_requested or "") if state is JobStatus.KILLED else ""
    if culprit is not None:
        message = culprit.transitions[-1].reason if culprit.transitions else ""
        if len(tasks) > 1 and not _is_of_all(job, state):
            message = f"task {number_in(job.request.array, culprit.task)}: {message}"
        # What could not be started says the same there.
        if culprit.last_words.removeprefix("fluster: ") not in message:
            message = f"{message}; its last words:\n{culprit.last_words}"
    started = [task.started_at for task in tasks if task.started_at is not None]
    return _moved(
        job,
        state,
        now,
        message or "all tasks succeeded",
        error_message=message,
        error=culprit.error if culprit else None,
        started_at=min(started, default=None),
        finished_at=now,
    )


def _is_of_all(job: JobRecord, state: JobStatus) -> bool:
    """True when what happened to one task was meant for all: a wish to stop the job, or a gang that nothing can hold."""
    return job.kill_requested is not None or (state is JobStatus.UNSCHEDULABLE and job.request.gang)


def _joined_state(job: JobRecord, tasks: list[TaskRecord]) -> JobStatus:
    states = {task.state for task in tasks}
    if states == {JobStatus.SUCCEEDED}:
        return JobStatus.SUCCEEDED
    if job.kill_requested is not None:
        return JobStatus.KILLED
    order = (JobStatus.FAILED, JobStatus.UNSCHEDULABLE, JobStatus.WORKER_FAILED, JobStatus.KILLED)
    return next(state for state in order if state in states)


def _moved(record: Record, state: JobStatus, now: float, reason: str, **changes: Any) -> Record:
    """`record` in a new state, with the transition that led there."""
    last = record.transitions[-1].number if record.transitions else 0
    attempt, worker_id = 0, None
    if isinstance(record, TaskRecord):
        attempt, worker_id = changes.get("attempt", record.attempt), changes.get("worker_id", record.worker_id)
    transition = Transition(number=last + 1, state=state, time=now, reason=reason, attempt=attempt, worker_id=worker_id)
    transitions = (*record.transitions, transition)[-KEPT_TRANSITIONS:]
    return record.model_copy(update={**changes, "state": state, "transitions": transitions})
