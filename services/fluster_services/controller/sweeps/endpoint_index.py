"""What a controller knows of one namespace's registry, as far as removing endpoints goes.

Jobs write there as much as they like, so no step costs more than a few look-ups, however many endpoints there are, and of
each no more is kept than is needed to judge it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from fluster_bus.messages import Endpoint, JobId
from fluster_bus.storage.tables import Deleted, Row

MAX_ENDPOINTS = 100_000  # of a namespace, beyond which new ones are removed


class _Known(NamedTuple):
    revision: int
    written_at: float
    lease_s: float | None
    job_id: JobId | None
    task: int
    attempt: int


class EndpointIndex:
    """The endpoints that are registered, those of them that are to be removed, and the marks of removals.

    Times are seconds of a monotonic clock. Each endpoint is judged when it is learnt, by the caller of `learn`, and again when its
    task's record changes.
    """

    def __init__(self, most: int = MAX_ENDPOINTS) -> None:
        self.most = most
        self._known: dict[str, _Known] = {}
        self._by_task: dict[JobId, dict[int, dict[int, set[str]]]] = {}  # {job: {task: {attempt: keys}}}
        self._leased: dict[str, None] = {}  # the keys of those that have a lease
        self._stale: dict[str, None] = {}  # in the order in which they are to be removed
        self._marks: OrderedDict[str, tuple[float, Deleted]] = (
            OrderedDict()
        )  # {key: when it was removed}, the oldest first

    def __len__(self) -> int:
        return len(self._known)

    def has_room(self, key: str) -> bool:
        """False when an endpoint of that key would be one too many."""
        return len(self._known) < self.most or key in self._known

    def learn(self, row: Row[Endpoint], *, now: float) -> None:
        """An endpoint was registered, or renewed. What its key says of it never changes."""
        key, endpoint = row.key, row.value
        self._marks.pop(key, None)
        self._stale.pop(key, None)
        before = self._known.get(key)
        known = _Known(row.revision, now, endpoint.lease_s, endpoint.job_id, endpoint.task, endpoint.attempt)
        if before is not None:
            known = known._replace(job_id=before.job_id)  # one text for both
        elif known.job_id is not None:
            tasks = self._by_task.setdefault(known.job_id, {})
            tasks.setdefault(known.task, {}).setdefault(known.attempt, set()).add(key)
        self._known[key] = known
        if known.lease_s is None:
            self._leased.pop(key, None)
        else:
            self._leased[key] = None

    def forget(self, key: str) -> None:
        """There is no endpoint under that key."""
        self._stale.pop(key, None)
        self._leased.pop(key, None)
        known = self._known.pop(key, None)
        if known is None or known.job_id is None:
            return
        tasks = self._by_task[known.job_id]
        attempts = tasks[known.task]
        attempts[known.attempt].discard(key)
        if not attempts[known.attempt]:
            del attempts[known.attempt]
        if not attempts:
            del tasks[known.task]
        if not tasks:
            del self._by_task[known.job_id]

    def on_deleted(self, deleted: Deleted, *, now: float) -> None:
        """An endpoint was removed, here or elsewhere. Removed again and again, it has one mark."""
        self.forget(deleted.key)
        self._marks[deleted.key] = now, deleted
        self._marks.move_to_end(deleted.key)

    # ---- what is to be removed ----------------------------------------------------------------------------

    def mark_stale(self, key: str) -> None:
        """An endpoint is to be removed."""
        if key in self._known:
            self._stale[key] = None

    def tasks_of(self, job_id: JobId) -> list[int]:
        """The tasks of a job that endpoints say they are of."""
        return list(self._by_task.get(job_id, ()))

    def of_task(self, job_id: JobId, task: int, *, upto: int | None = None) -> list[str]:
        """The keys of the endpoints of a task; `upto` an attempt, those of it and of earlier ones."""
        attempts = self._by_task.get(job_id, {}).get(task, {})
        # Attempts are counted by controllers; the numbers of endpoints are their writers' word, and there may be many more.
        numbers: Iterable[int] = attempts if upto is None or len(attempts) <= upto else range(upto + 1)
        return [key for each in numbers if upto is None or each <= upto for key in attempts.get(each, ())]

    def next_stale(self) -> tuple[str, int] | None:
        """The key and the revision of an endpoint that is to be removed."""
        key = next(iter(self._stale), None)
        return (key, self._known[key].revision) if key is not None else None

    def remove(self, key: str, revision: int) -> None:
        """An endpoint is gone, unless there is a newer one."""
        if key in self._known and self._known[key].revision == revision:
            self.forget(key)

    def spare(self, key: str, revision: int) -> None:
        """An endpoint is not to be removed: there is a newer one, which is not learnt yet."""
        if key in self._known and self._known[key].revision == revision:
            self._stale.pop(key, None)

    def put_back(self, key: str) -> None:
        """An endpoint could not be removed: after the others it is tried again."""
        if key in self._stale:
            del self._stale[key]
            self._stale[key] = None

    def leased(self) -> list[str]:
        """The keys of the endpoints that have a lease."""
        return list(self._leased)

    def is_over(self, key: str, *, now: float) -> bool:
        """True when the lease of an endpoint is over."""
        known = self._known.get(key)
        return known is not None and known.lease_s is not None and now - known.written_at > known.lease_s

    def renew_all(self, *, now: float) -> None:
        """Nothing could be renewed, or heard: all leases begin anew."""
        for key in self._leased:
            self._known[key] = self._known[key]._replace(written_at=now)

    def written_at(self, key: str) -> float:
        """When an endpoint was last written, as far as is known."""
        return self._known[key].written_at

    @property
    def stale(self) -> list[str]:
        """The keys of those that are to be removed."""
        return list(self._stale)

    # ---- marks --------------------------------------------------------------------------------------------

    def take_mark(self, *, now: float, kept_s: float) -> Deleted | None:
        """A removal whose mark has been there for long enough, each once."""
        if not self._marks:
            return None
        key, (since, deleted) = next(iter(self._marks.items()))
        if now - since <= kept_s:
            return None
        del self._marks[key]
        return deleted

    @property
    def marks(self) -> list[str]:
        """The keys of which there are marks, the oldest first."""
        return list(self._marks)
