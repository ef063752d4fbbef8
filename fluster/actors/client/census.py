"""How the members of a pool are, by the registry and by the tasks of jobs; and why a pool is empty."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable

from fluster.actors.client.rosters import Rosters
from fluster.actors.protocol.calls import Done
from fluster.actors.protocol.members import Member, MemberState
from fluster.errors import ActorDiedError, ActorNotFoundError
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError
from fluster_bus.core.names import near
from fluster_bus.messages import EndpointId, JobId, JobInfo, JobStatus, StatusReply, StatusRequest, TaskStatus
from fluster_bus.storage.registry import Registry

_NOBODYS_FAULT = (JobStatus.KILLED, JobStatus.SUCCEEDED)


def census(name: str, registered: Iterable[Member], jobs: Iterable[JobInfo]) -> list[Member]:
    """All members, those of the registry first, in their order; then the tasks of `jobs` that are not there.

    Of jobs that are not this name's deployment only what they have registered counts: their other tasks may do anything.
    """
    tasks = {(job.job_id, task.task): (job, task) for job in _deployments(name, jobs) for task in job.tasks}
    found: list[Member] = []
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


log = logging.getLogger(__name__)

_JOBS_TIMEOUT_S = 2.0


class Explanations:
    """Explains failed calls, by the registry and by the state of the jobs of actors that the controller reports."""

    def __init__(self, bus: Carrier, registry: Registry, namespace: str, rosters: Rosters) -> None:
        self._bus = bus
        self._registry = registry
        self._namespace = namespace
        self._rosters = rosters

    async def jobs(self, job_ids: Iterable[JobId]) -> list[JobInfo]:
        """Those of the jobs of which the controller tells; none when it does not answer at once."""
        request = StatusRequest(job_ids=tuple(sorted(job_ids)))
        if not request.job_ids:
            return []
        try:
            subject = subjects.jobs_verb(self._namespace, "status")
            answer = await self._bus.request(subject, request.to_json(), timeout_s=_JOBS_TIMEOUT_S)
            return list(StatusReply.from_json(answer.data).jobs)
        except BusError as error:
            log.info("the state of the jobs of actors cannot be read: %s", error)
            return []

    async def errors(self, done: Iterable[Done]) -> AsyncIterator[tuple[Done, Exception]]:
        """For each of these calls an error with names that are near, and with what to do."""
        try:
            names = {endpoint.name for endpoint in await self._registry.list()}
        except BusError as error:
            log.info("the registry could not be read: %s", error)
            names = set[str]()
        for each in done:
            name = each.call.pool
            roster = self._rosters.get(name)
            jobs = await self.jobs(roster.jobs) if roster is not None else []
            died = why_nobody_serves(name, jobs)
            if died is not None:
                yield each, ActorDiedError(f"{each.error}: {died}")
                continue
            hint = near(name, names) if name not in names and not is_coming_back(name, jobs) else ""
            yield each, ActorNotFoundError(f"{each.error}{hint or '; pool.wait_for_size(1) waits for one'}")
