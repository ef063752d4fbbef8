"""Which tasks of a job may be offered, when only so many of them may run at once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from fluster_services.controller.state.job_index import JobKey


@dataclass
class _Job:
    limit: int
    inside: set[int] = field(default_factory=set)  # offered, or held by a worker
    outside: set[int] = field(default_factory=set)
    line: list[int] = field(default_factory=list)  # heap of those outside; those that are gone stay until they come up


class Turns:
    """The tasks that have a turn, and those that wait for one, the lowest number first."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Job] = {}

    def enter(self, key: JobKey, task: int, limit: int, held: Iterable[int]) -> bool:
        """True when a task that waits may be offered now; else it is given out later by `leave`.

        `held` are the tasks that workers hold, asked once for each job.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(limit, set(held))
        if task in job.inside:
            return True
        if len(job.inside) < job.limit:
            job.inside.add(task)
            job.outside.discard(task)
            return True
        if task not in job.outside:
            job.outside.add(task)
            heapq.heappush(job.line, task)
        return False

    def leave(self, key: JobKey, task: int) -> int | None:
        """A task neither waits nor runs: the one that has its turn now, if there is one."""
        job = self._jobs.get(key)
        if job is None:
            return None
        job.outside.discard(task)
        job.inside.discard(task)
        next_task = None
        while job.line and next_task is None and len(job.inside) < job.limit:
            first = heapq.heappop(job.line)
            if first in job.outside:
                next_task = first
        if next_task is not None:
            job.outside.discard(next_task)
            job.inside.add(next_task)
        elif not job.inside:
            del self._jobs[key]
        return next_task

    def waits(self, key: JobKey, task: int) -> bool:
        """True for a task that waits for its turn."""
        job = self._jobs.get(key)
        return job is not None and task in job.outside

    def __len__(self) -> int:
        return len(self._jobs)
