"""Where submissions wait: until there is room to look at them, and until the job is gone that they are to replace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from fluster_services.controller.submissions.outcomes import TooManyReplacementsError

if TYPE_CHECKING:
    from fluster_bus.storage.submissions import Submission
    from fluster_services.controller.leading.record_writer import RecordTables
    from fluster_services.controller.state.job_index import JobIndex, JobKey

_MAX_PARKED = 500  # below what the stream has out at once, so that these never hold up the others


class IntakeRoom:
    """Room for so many submissions, and so many bytes of them; one alone always has room. One task asks at a time."""

    def __init__(self, at_once: int, most_bytes: int) -> None:
        self._at_once = at_once
        self._most_bytes = most_bytes
        self._count = self._bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Return when there is room, which is taken."""
        while self._count >= self._at_once or (self._bytes and self._bytes + size > self._most_bytes):
            self._changed.clear()
            await self._changed.wait()
        self._count += 1
        self._bytes += size

    def leave(self, size: int) -> None:
        """Give back the room that one had; `size` is what it has not given back yet."""
        self._count -= 1
        self.leave_bytes(size)

    def leave_bytes(self, size: int) -> None:
        """Go on with less: what was read is stored."""
        self._bytes -= size
        self._changed.set()


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
