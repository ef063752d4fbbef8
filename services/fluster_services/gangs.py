"""The rules of gangs, as pure functions: all tasks of such a job start together, or none does.

    gathering      every task is offered to one worker by name, which claims it: a hold for the epoch after the job's
    ready          a hold has its environment; the first task's also the address at which the others will find it
    go             all are ready: one compare-and-set on the job's record says so, and every hold becomes a start
    off            not all could be had, or no controller decided in time: the same compare-and-set says that, by
                   the controller or by any of the holding workers, and every hold is released, at no cost
    restart        a task that runs was lost or failed, and has budget left: the others are stopped at no cost, and
                   when no worker holds one, all wait again

Since go and off are written to the same record, only one of them can be said of an epoch, and it binds all: a
worker that says off may release its hold, because go cannot be said after that. No job waits for more while holding
something that others could wait for, except for what holds already; so gangs cannot block each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from typing import TypeVar

from fluster_bus.messages import Capacity, JobRecord, JobStatus, TaskRecord
from fluster_services import capacity, lifecycle

Name = TypeVar("Name", bound=str)

# Records of one job that are decided on before anything else goes on; it has up to 10,000 tasks.
MAX_AT_ONCE = 256


class EpochDecision(Enum):
    """What the job's record says of an epoch."""

    GO = "go"
    OFF = "off"


# ---- an epoch -------------------------------------------------------------------------------------------


def decision(job: JobRecord, epoch: int) -> EpochDecision | None:
    """Whether holds for `epoch` may start or have to be released; None while that is open."""
    if job.state.finished():
        return EpochDecision.OFF
    if job.epoch < epoch:
        return None
    return EpochDecision.GO if job.epoch == epoch and job.is_go else EpochDecision.OFF


def call_off(job: JobRecord, epoch: int) -> JobRecord | None:
    """Decide that holds for `epoch` are to be released; None when it is decided already."""
    if decision(job, epoch) is not None:
        return None
    return job.model_copy(update={"epoch": epoch, "is_go": False, "gang_address": None})


def _say_go(job: JobRecord, tasks: Sequence[TaskRecord], epoch: int) -> JobRecord:
    address = next(task.gang_address for task in tasks if task.task == 0)
    return job.model_copy(update={"epoch": epoch, "is_go": True, "gang_address": address})


# ---- what follows from the records ----------------------------------------------------------------------


def is_waiting(job: JobRecord, tasks: Sequence[TaskRecord]) -> bool:
    """True when all tasks of the gang are there and wait for workers, so that it may be gathered."""
    return (
        not job.state.finished()
        and job.kill_requested is None
        and len(tasks) == job.request.replicas
        and all(task.state is JobStatus.PENDING and task.kill_requested is None for task in tasks)
    )


def has_started(job: JobRecord, tasks: Sequence[TaskRecord]) -> bool:
    """True when the tasks got the word to go, and have not all been made to wait again."""
    return job.is_go and all(task.epoch <= job.epoch for task in tasks) and not is_waiting(job, tasks)


def why_stop(tasks: Sequence[TaskRecord]) -> str | None:
    """Why the whole gang is to be stopped, when one of its tasks has ended for good and did not succeed."""
    ended = (task for task in tasks if lifecycle.is_final(task) and task.state is not JobStatus.SUCCEEDED)
    culprit = min(ended, key=lambda task: task.task, default=None)
    return f"task {culprit.task} of its gang ended as {culprit.state}" if culprit is not None else None


def next_records(
    job: JobRecord, tasks: Sequence[TaskRecord], *, now: float, is_gathering: bool
) -> list[JobRecord | TaskRecord]:
    """The records that replace present ones of a gang that is not to be stopped; none when it is to go on as it does."""
    open_holds = [task for task in tasks if lifecycle.is_held(task) and task.epoch > job.epoch]
    if open_holds:
        decided = _decide(job, tasks, open_holds, is_gathering=is_gathering)
        return [decided] if decided is not None else []
    if not _is_round_over(tasks):
        return []
    held = [task for task in tasks if lifecycle.is_held(task)]
    # Those of an epoch that was called off are on their way back by themselves: nothing of them ever ran.
    running = [task for task in held if job.is_go or task.epoch < job.epoch]
    if held:
        why = _why_restart(tasks)
        stopped = (wanted for task in running if (wanted := lifecycle.request_restart(task, reason=why)) is not None)
        return list(islice(stopped, MAX_AT_ONCE))
    again = (new for task in tasks if (new := lifecycle.restart(task, now=now)) is not None)
    return list(islice(again, MAX_AT_ONCE))


def _decide(
    job: JobRecord, tasks: Sequence[TaskRecord], open_holds: Sequence[TaskRecord], *, is_gathering: bool
) -> JobRecord | None:
    epoch = max(task.epoch for task in open_holds)
    if len(open_holds) == job.request.replicas and all(task.epoch == epoch for task in open_holds):
        # All capacity is reserved; what is left to do, such as building environments, ends by itself.
        return _say_go(job, tasks, epoch) if all(task.is_ready for task in open_holds) else None
    held = {task.task for task in open_holds}
    if is_gathering and all(task.state is JobStatus.PENDING for task in tasks if task.task not in held):
        return None
    return call_off(job, epoch)


def _is_round_over(tasks: Sequence[TaskRecord]) -> bool:
    """True when one of the tasks neither runs nor has succeeded while others did: it cannot catch up with them."""
    begun = [task for task in tasks if task.state is not JobStatus.PENDING]
    return bool(begun) and any(not lifecycle.is_held(task) and task.state is not JobStatus.SUCCEEDED for task in tasks)


def _why_restart(tasks: Sequence[TaskRecord]) -> str:
    ended = [
        task
        for task in tasks
        if task.state.finished() and task.state is not JobStatus.SUCCEEDED and task.restart_requested is None
    ]
    culprit = min(ended, key=lambda task: (task.finished_at or 0.0, task.task), default=None)
    cause = f"task {culprit.task} ended as {culprit.state}" if culprit is not None else "not all of its tasks run"
    return f"its gang starts again: {cause}"


# ---- who takes which task -------------------------------------------------------------------------------


def assign(need: Capacity, count: int, workers: Iterable[tuple[Name, Capacity]]) -> list[Name]:
    """A worker for each task, first-fit; fewer than `count` when they do not fit all at once.

    `workers` are names and what each has free.
    """
    chosen: list[Name] = []
    for name, free in workers:
        if len(chosen) == count:
            break
        chosen += [name] * capacity.times_fit(need, free, count - len(chosen))
    return chosen


def describe_need(need: Capacity, count: int) -> str:
    """`gang of 4 needs 4 x (2 CPUs, 1 GiB memory) at once`, for a person."""
    return f"gang of {count} needs {count} x ({capacity.describe(need)}) at once"
