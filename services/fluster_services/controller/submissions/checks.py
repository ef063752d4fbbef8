"""What a submission must fulfil to be recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from fluster_bus.messages import JobId, JobRecord, Namespace
from fluster_bus.storage.submissions import first_unsettled
from fluster_services import capacity
from fluster_services.controller.state import conflicts
from fluster_services.controller.state.families import MAX_DEPTH
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.reconcile import unknown_dependency, why_attempt_is_over
from fluster_services.controller.submissions.outcomes import (
    CircularDependencyError,
    LauncherEndedError,
    QuotaExceededError,
    TooEarlyError,
    TooManyAncestorsError,
    TooManyDependenciesError,
    TooManyNeedsError,
    TooManyOwnersError,
    UnknownDependencyError,
)

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.sweeps.owners import Owners

_NAMES_COMPARED = 1_000  # of the latest jobs, when one is named that does not exist
MAX_DEPENDENCIES = 200_000  # that jobs which wait have in all, of a namespace: the controller keeps and looks at each
MAX_NEEDS = 500  # that unfinished jobs of a namespace have: among so many it is looked who is offered next


class SubmissionChecks:
    """Refuses jobs by raising what `outcomes.REFUSED` names. `wait_earlier(order)` returns when those before are looked at."""

    def __init__(
        self, bus: Bus, job_index: JobIndex, owners: Owners, wait_earlier: Callable[[int], Awaitable[None]]
    ) -> None:
        self._bus = bus
        self._job_index = job_index
        self._owners = owners
        self._wait_earlier = wait_earlier
        self._entering: dict[Namespace, int] = {}  # {namespace: jobs that are about to be recorded}

    async def check_new(self, job: JobRecord) -> None:
        """All that a job with a new id must fulfil, but for room to wait."""
        self.check_launcher(job)
        self.check_owner(job)
        self.check_parent(job)
        self.check_need(job)
        self.check_quota(job)
        await self.check_dependencies(job)

    async def check_successor(self, job: JobRecord) -> None:
        """All that a job must fulfil that is to replace another."""
        self.check_parent(job)
        self.check_need(job)
        await self.check_dependencies(job)
        self.check_circle(job)
        self.check_quota(job)
        self.check_room_to_wait(job)

    def check_launcher(self, job: JobRecord) -> None:
        """Refuse what an attempt launched that has ended since: it could still run when the next one begins."""
        launcher = self._job_index.launcher(job.namespace, job.request)
        why = why_attempt_is_over(job.request, launcher)
        if why is not None:
            raise LauncherEndedError(why)

    def check_owner(self, job: JobRecord) -> None:
        why = self._owners.why_refused(job)
        if why is not None:
            raise TooManyOwnersError(why)

    def check_need(self, job: JobRecord) -> None:
        job_index, need = self._job_index, capacity.needed(job.request.resources)
        if not job_index.has_need(job.namespace, need) and job_index.need_count(job.namespace) >= MAX_NEEDS:
            raise TooManyNeedsError(
                f"resources: unfinished jobs of namespace {job.namespace!r} ask for {MAX_NEEDS:,} different ones, which is the most: "
                "ask for the same as others do, such as memory in whole GiB"
            )

    def check_parent(self, job: JobRecord) -> None:
        parent = job.request.parent
        key = JobKey(job.namespace, job.job_id)
        if parent is not None and not self._job_index.may_launch(JobKey(job.namespace, parent), key):
            raise TooManyAncestorsError(
                f"parent={parent!r}: {MAX_DEPTH} jobs were launched from within one another, which is the most, or "
                f"{job.job_id!r} is above it itself: launch it with detached=True, or from a job further up"
            )

    def check_quota(self, job: JobRecord) -> None:
        """Refuse what the namespace's quota never has room for."""
        request = job.request
        need = capacity.needed(request.resources, job.namespace)
        count = request.replicas if request.gang else 1
        why = self._job_index.shares.why_never(job.namespace, need, count)
        if why is not None:
            raise QuotaExceededError(why)

    @contextlib.contextmanager
    def room_to_wait(self, job: JobRecord) -> Iterator[None]:
        """The job is counted among those that wait, while its record is being written. Raises QuotaExceededError."""
        self.check_room_to_wait(job)
        self._entering[job.namespace] = self._entering.get(job.namespace, 0) + 1
        try:
            yield
        finally:
            self._entering[job.namespace] -= 1

    def check_room_to_wait(self, job: JobRecord) -> None:
        """Refuse one job more than may wait at once."""
        namespace, job_index = job.namespace, self._job_index
        waiting = job_index.waiting(namespace) + self._entering.get(namespace, 0)
        why = job_index.shares.why_no_more_jobs(namespace, waiting)
        if why is not None:
            raise QuotaExceededError(why)

    def check_circle(self, job: JobRecord) -> None:
        job_index = self._job_index

        def get(job_id: JobId) -> JobRecord | None:
            entry = job_index.get(JobKey(job.namespace, job_id))
            return entry.job.value if entry is not None and entry.job is not None else None

        why = conflicts.circle(job.job_id, job.request.after, get)
        if why is not None:
            raise CircularDependencyError(why)

    async def check_dependencies(self, job: JobRecord) -> None:
        """Return when the jobs that it is to run after are recorded. Raises UnknownDependencyError, TooEarlyError."""
        if not job.request.after:
            return
        count = len(job.request.after)
        if self._job_index.dependency_count(job.namespace) + count > MAX_DEPENDENCIES:
            raise TooManyDependenciesError(
                f"after: jobs of namespace {job.namespace!r} that wait name {MAX_DEPENDENCIES:,} others in all, which is the "
                f"most, and this one names {count:,} more: let one job wait for them, and the others for that one"
            )
        await self._wait_earlier(job.order)

        def unknown() -> str | None:
            job_index = self._job_index
            return unknown_dependency(
                job.request.after,
                lambda job_id: job_index.get(JobKey(job.namespace, job_id)) is not None,
                lambda: job_index.latest(job.namespace, _NAMES_COMPARED),
            )

        if unknown() is None:
            return
        # What another controller took before it died comes again: only when that is settled it is sure that it does not exist.
        settled = await first_unsettled(self._bus) >= job.order
        missing = unknown()
        if missing is not None:
            raise UnknownDependencyError(missing) if settled else TooEarlyError(missing)
