"""How the members of a pool are: those of the registry, and those that jobs are to bring there or have lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fluster.actors.protocol.members import Member, MemberState
from fluster_bus.messages import EndpointId, JobInfo, JobStatus, TaskStatus

_NOBODYS_FAULT = (JobStatus.KILLED, JobStatus.SUCCEEDED)


def census(name: str, registered: Iterable[Member], jobs: Iterable[JobInfo]) -> list[Member]:
    """All members, those of the registry first, in their order; then the tasks of `jobs` that are not there.

    Of jobs that are not this name's deployment only what they have registered counts: their other tasks may do anything.
    """
    tasks = {(job.job_id, task.task): (job, task) for job in _deployments(name, jobs) for task in job.tasks}
    found = []
    for member in registered:
        known = tasks.get((member.job_id, member.task)) if member.job_id is not None else None
        if known is None:
            found.append(member)
            continue
        job, task = known
        if (task.attempt, task.status.finished()) <= (member.attempt, False):
            del tasks[job.job_id, task.task]
            found.append(_with_history(member, job, task))
    return [*found, *(_unregistered(name, job, task) for job, task in tasks.values())]


def _deployments(name: str, jobs: Iterable[JobInfo]) -> list[JobInfo]:
    return [job for job in jobs if job.name == name]


def _with_history(member: Member, job: JobInfo, task: TaskStatus) -> Member:
    """Processes before this one count as restarts as well."""
    restarts = member.restarts + member.attempt - job.first_attempt
    return dataclasses.replace(member, restarts=restarts, last_error=member.last_error or task.last_failure)


def _unregistered(name: str, job: JobInfo, task: TaskStatus) -> Member:
    restarts = task.attempt - job.first_attempt
    if task.status.finished() and not task.will_retry:
        state = MemberState.DEAD
    else:
        state = MemberState.RESTARTING if restarts or task.will_retry else MemberState.STARTING
    return Member(
        endpoint_id=EndpointId(""),
        name=name,
        address="",
        job_id=job.job_id,
        task=task.task,
        attempt=task.attempt,
        worker_id=task.worker_id,
        state=state,
        restarts=restarts,
        last_error=task.error_message or task.last_failure,
    )


def why_nobody_serves(name: str, jobs: Iterable[JobInfo]) -> str | None:
    """What became of actors that all have died; None when some may come back, or were ended on purpose."""
    tasks = [task for job in _deployments(name, jobs) for task in job.tasks]
    if not tasks or any(not task.status.finished() or task.will_retry for task in tasks):
        return None
    died = [task for task in tasks if task.status not in _NOBODYS_FAULT]
    if not died:
        return None
    others = f", and {len(died) - 1} more" if len(died) > 1 else ""
    return f"its actor has died: task {died[0].task} is {died[0].status}: {died[0].error_message}{others}"


def is_coming_back(name: str, jobs: Iterable[JobInfo]) -> bool:
    """True while actors of a pool that had some start again."""
    tasks = [task for job in _deployments(name, jobs) for task in job.tasks]
    return any(not task.status.finished() or task.will_retry for task in tasks)
