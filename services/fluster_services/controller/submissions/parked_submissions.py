"""Submissions that wait until the job that they are to replace is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fluster_services.controller.submissions.outcomes import TooManyReplacementsError

if TYPE_CHECKING:
    from fluster_bus.storage.submissions import Submission
    from fluster_services.controller.leading.record_writer import RecordTables
    from fluster_services.controller.state.job_index import JobIndex, JobKey

_MAX_PARKED = 500  # below what the stream has out at once, so that these never hold up the others


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
