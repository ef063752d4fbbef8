"""What the controller knows: an index over the records, kept up as they change. Rebuilt by reading them."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fluster_bus.core import buckets
from fluster_bus.messages import Capacity, JobId, JobRecord, JobRequest, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.storage.tables import Deleted, Row
from fluster_services import capacity, job_lifecycle, lifecycle
from fluster_services.controller.state.families import Families
from fluster_services.controller.state.shares import Shares
from fluster_services.controller.state.slim_records import slim_job, slim_task

_NOTHING = Capacity(tasks=0)
_WAITS = JobStatus.PENDING
_MAX_NAMED = 100  # jobs that one waits for, in an explanation


class JobKey(NamedTuple):
    """A job of the cluster."""

    namespace: Namespace
    job_id: JobId


@dataclass(slots=True)
class JobEntry:
    """A job with its tasks. `job` is None while only records of its tasks have been seen."""

    job: Row[JobRecord] | None = None
    tasks: dict[int, Row[TaskRecord]] = field(default_factory=dict)  # {task: its record}
    begun: int = 0  # tasks that do not wait
    waits: bool = False  # it has not ended, and no task of it has been begun

    def revision_of(self, record: JobRecord | TaskRecord) -> int:
        """The revision of the present record of which `record` is a changed version."""
        row = self.tasks[record.task] if isinstance(record, TaskRecord) else self.job
        assert row is not None  # noqa: S101
        return row.revision

    def task_records(self) -> list[TaskRecord]:
        return [row.value for row in self.tasks.values()]


@dataclass(slots=True)
class _Need:
    """What each task of some jobs needs that are not over."""

    need: Capacity
    jobs: int = 0


class JobIndex:
    """All jobs, with the newest revision of each record."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, JobEntry] = {}
        self._orders: dict[Namespace, list[tuple[int, JobId]]] = {}  # of the jobs whose records were seen, sorted
        self._open: dict[Namespace, dict[JobKey, _Need]] = {}  # {job that is not over: what each of its tasks needs}
        self._needs: dict[Namespace, dict[Capacity, _Need]] = {}  # the different ones among those
        self._families: Families[JobKey] = Families()
        self._dependents: dict[JobKey, set[JobKey]] = {}  # {job: those that wait for its end}
        self._waiting: dict[JobKey, int] = {}  # {job that waits for others: how many it names}
        self._dependencies: Counter[Namespace] = Counter()  # the sums of those
        self._held: dict[WorkerId, dict[tuple[JobKey, int], Capacity]] = {}  # {worker: {task it holds: what it needs}}
        self._taken: dict[WorkerId, Capacity] = {}  # {worker: all that those need}
        self._changed_holders: set[WorkerId] = set()
        self._waiting_jobs: dict[Namespace, int] = {}  # {namespace: its jobs of which no task has been begun}
        self.shares = Shares()

    def apply(self, row: Row[JobRecord] | Row[TaskRecord] | Row[JobRecord | TaskRecord]) -> JobKey | None:
        """Take in a record; returns its job, or None when a newer one is known already."""
        record = row.value
        key = JobKey(record.namespace, record.job_id)
        entry = self._jobs.get(key)
        if entry is None:
            entry = self._jobs[key] = JobEntry()
        if isinstance(record, TaskRecord):
            if entry.job is not None and record.order < entry.job.value.order:
                return None  # of a job that had the id before
            known = entry.tasks.get(record.task)
            if known is not None and known.revision >= row.revision:
                return None
            self._index_held(key, known.value if known else None, record)
            has_begun = record.state is not _WAITS
            if has_begun is not (known is not None and known.value.state is not _WAITS):
                entry.begun += 1 if has_begun else -1
                self._note_waiting(key, entry)
            job = entry.job.value if entry.job is not None else None
            kept = slim_task(record, job) if job is not None and job.state.finished() else record
            entry.tasks[record.task] = Row(row.key, kept, row.revision)
        else:
            if entry.job is not None and entry.job.revision >= row.revision:
                return None
            self._index_order(key, entry.job.value.order if entry.job is not None else None, record.order)
            entry.job = Row(row.key, slim_job(record), row.revision)
            self._drop_replaced(key, entry, record.order)
            is_finished = record.state.finished()
            if entry.waits is (is_finished or entry.begun > 0):
                self._note_waiting(key, entry)
            if is_finished:
                for task, known in entry.tasks.items():
                    entry.tasks[task] = Row(known.key, slim_task(known.value, entry.job.value), known.revision)
            parent = JobKey(key.namespace, record.request.parent) if record.request.parent is not None else None
            self._note_open(key, None if record.is_over else capacity.needed(record.request.resources))
            self._families.put(key, parent=parent, task=record.request.parent_task, is_finished=is_finished)
            self._index_dependencies(key, record)
        return key

    def _note_waiting(self, key: JobKey, entry: JobEntry) -> None:
        waits = not entry.begun and entry.job is not None and not entry.job.value.state.finished()
        if waits is not entry.waits:
            entry.waits = waits
            self._waiting_jobs[key.namespace] = self.waiting(key.namespace) + (1 if waits else -1)

    def _note_open(self, key: JobKey, need: Capacity | None) -> None:
        namespace = key.namespace
        jobs, needs = self._open.setdefault(namespace, {}), self._needs.setdefault(namespace, {})
        before = jobs.pop(key, None)
        if before is not None:
            before.jobs -= 1
            if not before.jobs:
                del needs[before.need]
        if need is not None:
            known = needs.get(need)
            if known is None:
                known = needs[need] = _Need(need)
            known.jobs += 1
            jobs[key] = known
        if not jobs:
            del self._open[namespace], self._needs[namespace]

    def has_need(self, namespace: Namespace, need: Capacity) -> bool:
        """True when a job of the namespace that is not over has tasks that need just that."""
        return need in self._needs.get(namespace, ())

    def need_count(self, namespace: Namespace) -> int:
        """How many different needs the tasks of its jobs have that are not over."""
        return len(self._needs.get(namespace, ()))

    def open_jobs(self, namespace: Namespace) -> list[JobKey]:
        """The jobs of a namespace that are not over, without a look at the others."""
        return list(self._open.get(namespace, ()))

    def _index_order(self, key: JobKey, before: int | None, after: int | None) -> None:
        if before == after:
            return
        orders = self._orders.setdefault(key.namespace, [])
        if before is not None:
            place = bisect.bisect_left(orders, (before, key.job_id))
            assert orders[place] == (before, key.job_id)  # noqa: S101
            del orders[place]
        if after is not None:
            bisect.insort(orders, (after, key.job_id))

    def _drop_replaced(self, key: JobKey, entry: JobEntry, order: int) -> None:
        """Only tasks of the job that has the id now are of interest."""
        for task, row in list(entry.tasks.items()):
            if row.value.order < order:
                del entry.tasks[task]
                entry.begun -= row.value.state is not _WAITS
                self._forget_held(key, row.value)

    def _index_dependencies(self, key: JobKey, job: JobRecord) -> None:
        waits = job_lifecycle.awaits_others(job) and not job.state.finished()
        for job_id in job.request.after:
            dependency = JobKey(key.namespace, job_id)
            if waits:
                self._dependents.setdefault(dependency, set()).add(key)
            elif dependency in self._dependents:
                self._dependents[dependency].discard(key)
                if not self._dependents[dependency]:
                    del self._dependents[dependency]
        self._note_dependencies(key, len(job.request.after) if waits else 0)

    def _note_dependencies(self, key: JobKey, count: int) -> None:
        before = self._waiting.pop(key, 0)
        if count != before:
            self._dependencies[key.namespace] += count - before
        if count:
            self._waiting[key] = count

    def dependency_count(self, namespace: Namespace) -> int:
        """How many jobs are named in all by those that wait for others."""
        return self._dependencies[namespace]

    def has_seen(self, namespace: Namespace, key: str, revision: int) -> bool:
        """True when the record under `key` of a namespace's bucket is known at that revision, or a newer one."""
        job_id, _, task = key.partition(".")
        entry = self._jobs.get(JobKey(namespace, JobId(job_id)))
        if entry is None:
            return False
        if task and not task.isdecimal():
            return False
        row = entry.tasks.get(int(task)) if task else entry.job
        return row is not None and row.revision >= revision

    def _index_held(self, key: JobKey, before: TaskRecord | None, after: TaskRecord) -> None:
        if before is not None:
            self._forget_held(key, before)
        if lifecycle.is_held(after) and after.worker_id is not None:
            need = capacity.needed(after.resources)
            self._held.setdefault(after.worker_id, {})[key, after.task] = need
            self._taken[after.worker_id] = capacity.plus(self.taken(after.worker_id), need)
            self._changed_holders.add(after.worker_id)
            self.shares.take(key.namespace, need)

    def _forget_held(self, key: JobKey, task: TaskRecord) -> None:
        if task.worker_id is None or task.worker_id not in self._held:
            return
        need = self._held[task.worker_id].pop((key, task.task), None)
        if need is not None:
            self._taken[task.worker_id] = capacity.minus(self._taken[task.worker_id], need)
            self._changed_holders.add(task.worker_id)
            self.shares.give_back(key.namespace, need)

    def get(self, key: JobKey) -> JobEntry | None:
        """The job, once its own record has been seen."""
        entry = self._jobs.get(key)
        return entry if entry is not None and entry.job is not None else None

    def remove(self, namespace: Namespace, deleted: Deleted) -> tuple[JobKey, list[JobRecord | TaskRecord]] | None:
        """A record was deleted: with that of a job its tasks go too. Returns what is no longer known."""
        if buckets.is_task_key(deleted.key):
            return None
        key = JobKey(namespace, JobId(deleted.key))
        entry = self._jobs.get(key)
        if entry is None or (entry.job is not None and entry.job.revision > deleted.revision):
            return None
        gone = self.discard(key)
        return (key, gone) if gone is not None else None

    def discard(self, key: JobKey) -> list[JobRecord | TaskRecord] | None:
        """Forget a job; returns its records, None when it was not known."""
        entry = self._jobs.pop(key, None)
        if entry is None:
            return None
        if entry.waits:
            self._waiting_jobs[key.namespace] -= 1
        records: list[JobRecord | TaskRecord] = list(entry.task_records())
        for task in entry.task_records():
            self._forget_held(key, task)
        self._families.remove(key)
        self._note_open(key, None)
        if entry.job is not None:
            records.append(entry.job.value)
            self._index_order(key, entry.job.value.order, None)
            self._forget_dependencies(key, entry.job.value)
        self._note_dependencies(key, 0)
        return records

    def _forget_dependencies(self, key: JobKey, job: JobRecord) -> None:
        for job_id in job.request.after:
            dependents = self._dependents.get(JobKey(key.namespace, job_id), set())
            dependents.discard(key)
            if not dependents:
                self._dependents.pop(JobKey(key.namespace, job_id), None)

    def child_records(self, key: JobKey) -> list[JobRecord]:
        """The records of the jobs that a job has launched."""
        children = (self.get(child) for child in self.children(key))
        return [child.job.value for child in children if child is not None and child.job is not None]

    def children(self, key: JobKey) -> frozenset[JobKey]:
        return self._families.children(key)

    def with_children(self, key: JobKey) -> frozenset[int]:
        """The tasks of a job that launched others which, or what those launched in turn, have not ended."""
        return self._families.launching_tasks(key)

    def unfinished_children(self, key: JobKey, tasks: Iterable[TaskRecord]) -> list[JobId]:
        """Of the jobs that ended attempts of these tasks launched, and of what those launched, one each that has not ended."""
        ended = [task.task for task in tasks if task.state.finished()]
        children = (child for task in ended for child in self._families.live_of_task(key, task))
        left = (self.unfinished(child) for child in itertools.islice(children, _MAX_NAMED))
        return sorted(child.job_id for child in left if child is not None)

    def may_launch(self, parent: JobKey, job: JobKey) -> bool:
        """False when `job` has launched `parent`, directly or over others, or too many jobs stand above that."""
        return self._families.may_launch(parent, job)

    def launcher(self, namespace: Namespace, request: JobRequest) -> TaskRecord | None:
        """The task that launched a job; None when it is not known, or none did."""
        if request.parent is None or request.parent_task is None:
            return None
        entry = self.get(JobKey(namespace, request.parent))
        row = entry.tasks.get(request.parent_task) if entry is not None else None
        return row.value if row is not None else None

    def relieved(self, key: JobKey) -> list[JobKey]:
        """The job that launched this one, which has ended, the one that launched that, and so on, as far as they need not wait
        for what is below them.
        """
        return self._families.relieved(key)

    def unfinished(self, key: JobKey) -> JobKey | None:
        """The job, or one that it launched, or one that those did, that has not ended; None when all are gone."""
        return self._families.unfinished(key)

    def dependents(self, key: JobKey) -> frozenset[JobKey]:
        """The jobs that wait for its end."""
        return frozenset(self._dependents.get(key, ()))

    def dependencies(self, key: JobKey) -> dict[JobId, JobRecord]:
        """The jobs that it names in `after`, as far as they are known."""
        job = self._jobs[key].job
        found = {}
        for job_id in job.value.request.after if job is not None else ():
            dependency = self.get(JobKey(key.namespace, job_id))
            if dependency is not None and dependency.job is not None:
                found[job_id] = dependency.job.value
        return found

    def held_by(self, worker_id: WorkerId) -> list[tuple[JobKey, Row[TaskRecord]]]:
        """The tasks that a worker holds."""
        return [(key, self._jobs[key].tasks[task]) for key, task in self._held.get(worker_id, ())]

    def holders(self) -> list[WorkerId]:
        """The workers that hold something."""
        return [worker_id for worker_id, held in self._held.items() if held]

    def present(self, key: JobKey, task: TaskRecord) -> Row[TaskRecord] | None:
        """The task's row, as long as its record is this one."""
        entry = self.get(key)
        row = entry.tasks.get(task.task) if entry is not None else None
        return row if row is not None and (row.value is task or row.value == task) else None

    def taken(self, worker_id: WorkerId) -> Capacity:
        """What the tasks that a worker holds need in all."""
        return self._taken.get(worker_id, _NOTHING)

    def take_changed_holders(self) -> set[WorkerId]:
        """The workers that hold something else than when this was asked last."""
        changed, self._changed_holders = self._changed_holders, set()
        return changed

    def waiting(self, namespace: Namespace) -> int:
        """How many jobs of the namespace wait: none of their tasks has been begun, or all that were have to be again."""
        return self._waiting_jobs.get(namespace, 0)

    def newest(self, namespace: Namespace, after: int | None = None) -> Iterator[JobKey]:
        """The namespace's jobs, in the order opposite to their submission; those that follow on place `after` in it.

        Jobs may come and go while it is read: each that is there from first to last is found, once.
        """
        place: tuple[int, str] | None = (after, "") if after is not None else None
        while orders := self._orders.get(namespace):
            index = len(orders) if place is None else bisect.bisect_left(orders, place)
            if index == 0:
                return
            place = orders[index - 1]
            yield JobKey(namespace, JobId(place[1]))

    def latest(self, namespace: Namespace, limit: int) -> list[JobId]:
        """Ids of jobs that were recorded last, without a look at the others."""
        found = (key.job_id for key in reversed(self._jobs) if key.namespace == namespace)
        return list(itertools.islice(found, limit))

    def records(self) -> Iterator[tuple[JobKey, JobRecord | TaskRecord]]:
        """Every record, a job's before those of its tasks."""
        for key, entry in list(self._jobs.items()):
            if entry.job is not None:
                yield key, entry.job.value
            for row in list(entry.tasks.values()):
                yield key, row.value

    def record_keys(self, namespace: Namespace) -> set[str]:
        """Under which keys of the namespace's bucket there are records."""
        return {record_key(record) for key, record in self.records() if key.namespace == namespace}

    def keys_of(self, namespace: Namespace) -> list[JobKey]:
        """The jobs of the namespace that are known."""
        return [key for key in self._jobs if key.namespace == namespace]

    def keys(self) -> list[JobKey]:
        return list(self._jobs)

    def sanity_check(self) -> None:
        """Raise AssertionError when the index contradicts the records."""
        recorded = [(key, entry.job.value.order) for key, entry in self._jobs.items() if entry.job is not None]
        for namespace, orders in self._orders.items():
            expected = [(order, key.job_id) for key, order in recorded if key.namespace == namespace]
            assert orders == sorted(expected)  # noqa: S101
        for namespace, count in self._waiting_jobs.items():
            entries = [entry for key, entry in self._jobs.items() if key.namespace == namespace]
            assert count == sum(entry.waits for entry in entries)  # noqa: S101
            for entry in entries:
                is_open = entry.job is not None and not entry.job.value.state.finished()
                assert entry.waits is (is_open and not entry.begun)  # noqa: S101
                assert entry.begun == sum(task.state is not _WAITS for task in entry.task_records())  # noqa: S101
        over = {key: entry.job.value.is_over for key, entry in self._jobs.items() if entry.job is not None}
        assert {key for keys in self._open.values() for key in keys} == {key for key in over if not over[key]}  # noqa: S101
        for namespace, jobs in self._open.items():
            counted = Counter(each.need for each in jobs.values())
            assert {need: known.jobs for need, known in self._needs[namespace].items()} == counted  # noqa: S101
        for dependency, dependents in self._dependents.items():
            for key in dependents:
                job = self._jobs[key].job
                assert job is not None and job_lifecycle.awaits_others(job.value)  # noqa: S101, PT018
                assert dependency.job_id in job.value.request.after  # noqa: S101
        for namespace, count in self._dependencies.items():
            assert count == sum(each for key, each in self._waiting.items() if key.namespace == namespace)  # noqa: S101
        for worker_id, held in self._held.items():
            assert self.taken(worker_id) == capacity.plus_all(_NOTHING, list(held.values()))  # noqa: S101
            for key, task in held:
                record = self._jobs[key].tasks[task].value
                assert record.worker_id == worker_id  # noqa: S101
                assert lifecycle.is_held(record)  # noqa: S101


def record_key(record: JobRecord | TaskRecord) -> str:
    """Where a record stands in its namespace's bucket."""
    return buckets.task_key(record.job_id, record.task) if isinstance(record, TaskRecord) else record.job_id
