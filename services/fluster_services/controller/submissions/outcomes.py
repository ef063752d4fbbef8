"""How the look at a submission ended: recorded, refused with the reason, or to be looked at again. Requests wait for that.

One that is to replace a job is parked until that is gone, and looked at again then.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from fluster_bus.core.errors import (
    FlusterError,
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    MessageTooLargeError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
)
from fluster_bus.core.names import check_name
from fluster_bus.messages import JobId, RefusedJob
from fluster_services.controller.store_room import NoRoomForJobError

if TYPE_CHECKING:
    from fluster_bus.storage.submissions import Submission
    from fluster_services.controller.leading.record_writer import RecordTables
    from fluster_services.controller.state.job_index import JobIndex, JobKey

_REMEMBERED = 50_000  # submissions whose fate is known without a look at the records
_MAX_PARKED = 500  # below what the stream has out at once, so that these never hold up the others


class SubmissionOutcomes:
    """How the last submissions ended, and the requests that wait for one."""

    def __init__(self, job_index: JobIndex) -> None:
        self._job_index = job_index
        self._looked_at: OrderedDict[int, RefusedJob | None] = OrderedDict()  # {sequence: why it was refused}
        self._waiters: dict[JobKey | int, list[asyncio.Future[None]]] = {}
        self.settled_before = 0  # submissions before this one were looked at by an earlier controller

    def __len__(self) -> int:
        return len(self._looked_at)

    def on_looked_at(self, sequence: int, refused: RefusedJob | None) -> None:
        """A submission was recorded, or refused."""
        self._looked_at[sequence] = refused
        while len(self._looked_at) > _REMEMBERED:
            self._looked_at.popitem(last=False)
        self.wake(sequence)

    def wake(self, what: JobKey | int) -> None:
        """A job has changed, or a submission was looked at: those that wait for it look again."""
        for future in self._waiters.pop(what, ()):
            if not future.done():
                future.set_result(None)

    def _stop_waiting(self, future: asyncio.Future[None], *awaited: JobKey | int) -> None:
        for what in awaited:
            waiters = self._waiters.get(what)
            if waiters is not None and future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._waiters[what]

    async def wait_looked_at(self, job: JobKey, sequence: int) -> RefusedJob | None:
        """Why the submission was refused, None once it is recorded."""
        while sequence not in self._looked_at:
            if sequence < self.settled_before:
                return None  # by an earlier controller: the records tell what became of it
            entry = self._job_index.get(job)
            if entry is not None and entry.job is not None and entry.job.value.order == sequence:
                return None
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for what in (job, sequence):
                self._waiters.setdefault(what, []).append(future)
            try:
                await future
            except asyncio.CancelledError:
                self._stop_waiting(future, job, sequence)
                raise
        return self._looked_at[sequence]


class UnknownNamespaceError(FlusterError):
    """The cluster does not have that namespace, or not for long."""


class UnknownDependencyError(FlusterError):
    """It is to run after a job that does not exist."""


class CircularDependencyError(FlusterError):
    """It is to replace a job for which those wait that it is to run after."""


class LauncherEndedError(FlusterError):
    """The attempt that launched it has ended."""


class TooManyOwnersError(FlusterError):
    """Too many programs own jobs of the namespace."""


class TooManyAncestorsError(FlusterError):
    """Jobs were launched from within one another too often, or in a circle."""


class TooManyDependenciesError(FlusterError):
    """Those that wait in the namespace name too many others."""


class TooManyNeedsError(FlusterError):
    """Unfinished jobs of the namespace ask for too many different resources."""


class TooManyReplacementsError(FlusterError):
    """Too many jobs are being stopped to be replaced."""


class QuotaExceededError(FlusterError):
    """The namespace's quota has no room for the job, whatever ends, or for one more that waits."""


class ParkedError(FlusterError):
    """It is looked at again when the job that it replaces is gone."""


class TooEarlyError(FlusterError):
    """It cannot be decided yet."""


# What will not be better when it comes again.
REFUSED = (
    CircularDependencyError,
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    LauncherEndedError,
    MessageTooLargeError,
    NoRoomForJobError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    QuotaExceededError,
    TooManyAncestorsError,
    TooManyDependenciesError,
    TooManyNeedsError,
    TooManyOwnersError,
    TooManyReplacementsError,
    UnknownDependencyError,
    UnknownNamespaceError,
)


def claimed_id(data: bytes) -> JobId | None:
    """The id or name that a refused message gave itself, if it can be read at all."""
    try:
        message = json.loads(data)
        return JobId(check_name("job id", message.get("job_id") or message.get("name")))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None


class ParkedSubmissions:
    """The submissions that wait for a job to be gone; `begin(submission)` has one looked at again."""

    def __init__(self, job_index: JobIndex, tables: RecordTables, begin: Callable[[Submission], None]) -> None:
        self._job_index = job_index
        self._tables = tables
        self._begin = begin
        self.submissions: dict[JobKey, Submission] = {}  # {job that is to be gone first: what replaces it}
        self.blocking: dict[JobKey, set[JobKey]] = {}  # {unfinished job: parked ones that wait for it}

    def check_room(self, key: JobKey) -> None:
        """Raise TooManyReplacementsError when no more may wait."""
        if key in self.submissions:
            return
        most = max(_MAX_PARKED // len(self._tables), 1)
        waiting = sum(1 for each in self.submissions if each.namespace == key.namespace)
        if waiting >= most or len(self.submissions) >= _MAX_PARKED:
            raise TooManyReplacementsError(
                f"{waiting} submissions of namespace {key.namespace!r} wait already for the jobs that they replace to end: "
                "try again later"
            )

    def park(self, key: JobKey, submission: Submission, blocking: JobKey) -> None:
        """Look at the submission again when the job that it waits for has ended. Until then the stream keeps it too."""
        before = self.submissions.get(key)
        self.submissions[key] = submission.without_data()
        self.blocking.setdefault(blocking, set()).add(key)
        if before is not None and before.sequence != submission.sequence:
            self._begin(before)  # it is the later one that counts

    def on_job_changed(self, key: JobKey) -> None:
        """A job has changed: what waits for it to be gone is looked at again if it is."""
        for parked in self.blocking.pop(key, ()):
            blocking = self._job_index.unfinished(parked)
            if blocking is not None:
                self.blocking.setdefault(blocking, set()).add(parked)
            elif parked in self.submissions:
                self._begin(self.submissions.pop(parked))

    def clear(self) -> None:
        """Forget all: the stream delivers them again."""
        self.submissions.clear()
        self.blocking.clear()
