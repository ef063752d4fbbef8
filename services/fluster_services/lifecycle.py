"""The life of a task, as pure functions: a record, what happened and when in; the new record out.

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
A function returns None when the event does not apply to the record: it is late, doubled, or about an attempt
that was superseded. Then nothing is written. Every other state than those on the left is final.
"""

from __future__ import annotations

import zlib
from datetime import datetime
from typing import Any, TypeVar

from fluster_bus.messages import (
    JobRecord,
    JobStatus,
    Progress,
    TaskError,
    TaskRecord,
    TaskResult,
    Transition,
    WorkerId,
)
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.messages.records import KEPT_TRANSITIONS

Record = TypeVar("Record", TaskRecord, JobRecord)

_HELD = (JobStatus.BUILDING, JobStatus.RUNNING)  # a worker has it
_MAX_SPARED = 10  # ends at no cost; from then on they cost a preemption, so that nothing is tried for ever
MAX_DISKS_FILLED = 3  # of different workers
MAX_FILLINGS = 6  # where there are fewer of those, or the same ones take it again


def claim(
    task: TaskRecord,
    *,
    attempt: int,
    worker_id: WorkerId,
    now: float,
    epoch: int = 0,
    stored_at: datetime | None = None,
    gpus: tuple[str, ...] = (),
) -> TaskRecord | None:
    """`worker_id` takes the attempt that was offered to it, with these GPUs; a task of a gang for `epoch` only, each epoch once.

    `stored_at` is when the bus stored the record that is claimed.
    """
    if task.state is not JobStatus.PENDING or task.attempt != attempt or task.kill_requested is not None:
        return None
    if epoch <= task.epoch if task.gang else epoch:
        return None
    reason = f"held by {worker_id} for epoch {epoch} of its gang" if task.gang else f"claimed by {worker_id}"
    since = (task.waiting_since or stored_at) if task.gang else None
    return moved(
        task,
        JobStatus.BUILDING,
        now,
        reason,
        worker_id=worker_id,
        started_at=now,
        epoch=epoch,
        waiting_since=since,
        gpus=gpus,
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
        return moved(task, JobStatus.KILLED, now, task.kill_requested, finished_at=now)
    return moved(task, JobStatus.PENDING, now, reason, **_UNTOUCHED)


def run(
    task: TaskRecord, *, attempt: int, worker_id: WorkerId, now: float, image: UsedImage | None = None
) -> TaskRecord | None:
    """The attempt's process runs; in a container that was made of `image`."""
    if task.state is not JobStatus.BUILDING or not _holds(task, attempt, worker_id):
        return None
    reason = "started" if image is None else f"started, in image {image}"
    return moved(task, JobStatus.RUNNING, now, reason, image=image, started_at=now, has_output=True)


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
    return moved(
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
    """It is to be stopped: done at once when no worker holds it, else its worker is asked through the record.

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
    return moved(wanted, JobStatus.KILLED, now, reason, finished_at=now)


def request_restart(task: TaskRecord, *, reason: str) -> TaskRecord | None:
    """Its gang starts again, so the worker is asked through the record to stop it."""
    if task.state not in _HELD or task.restart_requested is not None or task.kill_requested is not None:
        return None
    return task.model_copy(update={"restart_requested": reason})


def give_up(task: TaskRecord, *, now: float, reason: str) -> TaskRecord | None:
    """It will never fit."""
    if task.state is not JobStatus.PENDING:
        return None
    return moved(task, JobStatus.UNSCHEDULABLE, now, reason, finished_at=now)


def refuse(task: TaskRecord, *, now: float, reason: str) -> TaskRecord | None:
    """All workers lack what it names: to try again would not help."""
    if task.state is not JobStatus.PENDING:
        return None
    failures = max(task.failures, task.max_retries_failure) + 1
    return moved(task, JobStatus.FAILED, now, reason, finished_at=now, failures=failures)


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


# What a record that no worker has taken yet says of its attempt.
_UNTOUCHED: dict[str, object] = {
    "worker_id": None,
    "gpus": (),
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
    return moved(
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
    come back together; always the same for the same attempt.
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
    """True when the task will not change again."""
    return task.state.finished() and not _may_retry(task)


def is_held(task: TaskRecord) -> bool:
    """True while a worker has it."""
    return task.state in _HELD


def is_to_be_stopped(task: TaskRecord) -> bool:
    """True while a worker has it that is asked, through the record, to stop it."""
    return is_held(task) and (task.kill_requested is not None or task.restart_requested is not None)


def _holds(task: TaskRecord, attempt: int, worker_id: WorkerId) -> bool:
    return task.attempt == attempt and task.worker_id == worker_id


def moved(record: Record, state: JobStatus, now: float, reason: str, **changes: Any) -> Record:
    """`record` in a new state, with the transition that led there."""
    last = record.transitions[-1].number if record.transitions else 0
    attempt, worker_id = 0, None
    if isinstance(record, TaskRecord):
        attempt, worker_id = changes.get("attempt", record.attempt), changes.get("worker_id", record.worker_id)
    transition = Transition(
        number=last + 1,
        state=state,
        time=now,
        reason=reason,
        attempt=attempt,
        worker_id=worker_id,
        gpus=changes.get("gpus", ()),
    )
    transitions = (*record.transitions, transition)[-KEPT_TRANSITIONS:]
    return record.model_copy(update={**changes, "state": state, "transitions": transitions})
