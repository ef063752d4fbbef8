"""What a program's actors and pool workers write, shown on its stderr as they write it.

Actors and pool workers that jobs deploy are found by what they register: a job's record would be many times as much to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from fluster.cluster.jobs.job_logs import LogFilter, job_logs
from fluster.cluster.jobs.job_states import JobStates
from fluster.cluster.jobs.job_wait import wait_finished
from fluster.cluster.jobs.screen import LineQuota, Screen
from fluster.terminal import is_notebook
from fluster_bus.connection.bus import Bus, Subscription
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError, FaultLog, FlusterError
from fluster_bus.messages import Endpoint, JobId, JobStatus, Namespace, TaskRecord

log = logging.getLogger(__name__)

_LAST_OUTPUT_S = 3.0  # at a job's end, or this program's, for what was written before
_MAX_DEPLOYED = 100  # jobs, deployed by other jobs, that are shown at the same time
_WRITE_S = 1.0  # for the reader of stderr
_MAX_SEEN = 10_000  # jobs; one that was forgotten is only looked at again
_MAX_WAITING = 1_000  # jobs that are still to be looked at
_MAX_GENERATIONS = 16

Found = Callable[[JobId, str, Sequence[JobId]], None]


def is_looked_at() -> bool:
    """Whether a user sees what this program writes as it runs: on a terminal, or in a notebook."""
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


class ShownOutput:
    """Follows the jobs of one connection's pools and deployments. `by_itself` is what becomes of those that were not asked for:
    they are shown (True), or the last lines of what failed are (False), or nothing (None).

    What is shown includes what the jobs deploy in their turn, as far as that is to end with them.
    """

    def __init__(self, bus: Bus, namespace: Namespace, states: JobStates) -> None:
        self.by_itself: bool | None = None
        self._bus = bus
        self._namespace = namespace
        self._states = states
        self._screen = Screen()
        self._followed: dict[JobId, asyncio.Task[None]] = {}
        self._ends_with_program: set[JobId] = set()
        self._wanted: dict[JobId, bool] = {}  # of those that are followed
        self._deployed: set[JobId] = set()  # those of them that a job has deployed
        self._deployed_by_jobs = DeployedByJobs(bus, namespace, states, self._on_deployed)
        self._closing = asyncio.Event()

    def show(self, by_itself: bool) -> None:
        """Treat so what no call has asked for or against, and what jobs deploy. To be called on the bus's loop."""
        self.by_itself = by_itself
        if by_itself:
            self._deployed_by_jobs.begin()

    def follow(
        self, job_id: JobId, name: str, *, first: int = 0, logs: bool | None = None, lives_on: bool = False
    ) -> None:
        """Show what a job's tasks write after `name[index] |`, where the indices begin with `first`.

        `logs` asks for it, or against it; None: as `by_itself` says. One that `lives_on` is not this program's to end.
        """
        wanted = self.by_itself if logs is None else logs
        if wanted is None or job_id in self._followed:
            return
        self._wanted[job_id] = wanted
        if wanted:
            self._deployed_by_jobs.begin()
        writer = _Labelled(name, first, self._screen)
        work = self._show_all(job_id, writer) if wanted else self._show_failures(job_id, writer)
        task = asyncio.create_task(work, name=f"output of {job_id}")
        self._followed[job_id] = task
        if wanted and not lives_on:
            self._ends_with_program.add(job_id)
        task.add_done_callback(lambda _done: self._forget(job_id))

    def _forget(self, job_id: JobId) -> None:
        self._followed.pop(job_id, None)
        self._wanted.pop(job_id, None)
        self._ends_with_program.discard(job_id)
        self._deployed.discard(job_id)

    def _on_deployed(self, job_id: JobId, name: str, above: Sequence[JobId]) -> None:
        """A job has deployed another, as those above that decide: what the program itself launched does not concern others."""
        wanted = next((self._wanted[each] for each in above if each in self._wanted), self.by_itself)
        if not wanted or job_id in self._followed:
            return
        if len(self._deployed) >= _MAX_DEPLOYED:
            self._screen.show(
                f"[fluster: what {name} writes is not shown, as {_MAX_DEPLOYED} jobs that jobs deployed are shown: "
                f"`fluster logs {job_id}` has it]"
            )
            return
        self._deployed.add(job_id)
        self.follow(job_id, name, logs=True)

    async def finish(self, job_id: JobId) -> None:
        """Return when all that a job wrote, which has ended, is shown; after some seconds at the latest."""
        task = self._followed.get(job_id)
        if task is not None:
            await asyncio.wait([task], timeout=_LAST_OUTPUT_S)
            await self._screen.flush(_WRITE_S)

    async def end_all(self, terminate: Callable[[JobId], Awaitable[object]]) -> None:
        """End the jobs that end with this program, so that all they wrote can be shown; takes some seconds at most."""
        await self._settle()
        ending = {self._followed[job_id]: job_id for job_id in self._ends_with_program}
        if not ending or not self._bus.connected:
            return
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(_LAST_OUTPUT_S):
                await asyncio.gather(*(terminate(job_id) for job_id in ending.values()))
                await asyncio.wait(ending)

    async def close(self) -> None:
        """Show what is stored by now, and follow nothing more."""
        await self._settle()
        self._deployed_by_jobs.close()
        self._closing.set()
        running = list(self._followed.values())
        if running:
            await asyncio.wait(running, timeout=_LAST_OUTPUT_S if self._bus.connected else 0.0)
            for task in running:
                task.cancel()
        await self._screen.flush(_WRITE_S)

    async def _settle(self) -> None:
        """Follow all that is there to be followed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_S):
                await self._deployed_by_jobs.settle()

    async def _show_all(self, job_id: JobId, writer: _Labelled) -> None:
        lists = job_logs(self._bus, self._namespace, job_id, wanted=LogFilter(), until=self._over(job_id))
        try:
            async with aclosing(lists):
                async for chunks in lists:
                    for chunk in chunks:
                        for _time, text, goes_on in chunk.lines:
                            if not (goes_on and "\r" in text):  # a progress bar: its end is shown, as a terminal would
                                writer.show(chunk.task, text.rstrip("\r").rpartition("\r")[2])
        except BusError as error:
            log.info("the output of %s is not shown any further: %s", job_id, error)
        finally:
            writer.close()

    async def _over(self, job_id: JobId) -> None:
        """Return when the job has ended, or this connection is about to."""
        finished = asyncio.ensure_future(wait_finished(self._bus, self._namespace, {job_id}, self._states))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait([finished, closing], return_when=asyncio.FIRST_COMPLETED)
            if finished.done():
                finished.result()
        finally:
            finished.cancel()
            closing.cancel()

    async def _show_failures(self, job_id: JobId, writer: _Labelled) -> None:
        """Its tasks' records have the last lines of an attempt that failed."""
        shown: set[tuple[int, int]] = set()

        def on_record(delivery: Delivery) -> None:
            record = TaskRecord.from_json(delivery.data) if delivery.data else None
            if record is None or record.state is not JobStatus.FAILED or not record.last_words:
                return
            if (record.task, record.attempt) not in shown:
                shown.add((record.task, record.attempt))
                writer.show_whole(record.task, record.last_words.splitlines())

        subscription: Subscription | None = None
        try:
            records = subjects.watch_jobs(self._namespace, buckets.task_key_of_any(job_id))
            subscription = await self._bus.subscribe(records, on_record)
            await self._over(job_id)
        except BusError as error:
            log.info("the last lines of %s are not shown: %s", job_id, error)
        finally:
            if subscription is not None and self._bus.connected:
                await subscription.unsubscribe()


class _Labelled:
    """The lines of one job's tasks, each with its task's label, as many of each as can be read."""

    def __init__(self, name: str, first: int, screen: Screen) -> None:
        self._name = name
        self._first = first
        self._screen = screen
        self._quotas: defaultdict[int, LineQuota] = defaultdict(LineQuota)
        self._timer: asyncio.TimerHandle | None = None  # of the next look at what was left out

    def show(self, task: int, text: str) -> None:
        """A line, unless its task wrote too many this second."""
        quota, now = self._quotas[task], time.monotonic()
        self._tell_left_out(task, quota.settle(now))
        if quota.admit(now):
            self.show_whole(task, [text])
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1.0, self._settle)

    def show_whole(self, task: int, lines: list[str]) -> None:
        """All the lines."""
        for line in lines:
            self._screen.show(f"{self._name}[{self._first + task}] | {line}")

    def close(self) -> None:
        """Tell what was left out so far."""
        if self._timer is not None:
            self._timer.cancel()
        for task, quota in self._quotas.items():
            self._tell_left_out(task, quota.settle(float("inf")))

    def _settle(self) -> None:
        self._timer = None
        now = time.monotonic()
        for task, quota in self._quotas.items():
            self._tell_left_out(task, quota.settle(now))
        if any(quota.owes for quota in self._quotas.values()):
            self._timer = asyncio.get_running_loop().call_later(1.0, self._settle)

    def _tell_left_out(self, task: int, lines: int) -> None:
        if lines:
            self.show_whole(task, [f"[fluster: {lines:,} more lines in that second: pool.logs() has them]"])


class DeployedByJobs:
    """Calls `found` with a job, the name that its tasks serve, and the jobs above it, the nearest first. Lives on the bus's loop."""

    def __init__(self, bus: Bus, namespace: Namespace, states: JobStates, found: Found) -> None:
        self._bus = bus
        self._namespace = namespace
        self._states = states
        self._found = found
        self._faults = FaultLog(log)
        self._seen: OrderedDict[JobId, None] = OrderedDict()
        self._new: asyncio.Queue[tuple[JobId, str]] = asyncio.Queue(_MAX_WAITING)
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Find what registers from now on; to be called as often as wanted."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="look for what jobs deploy")

    async def settle(self) -> None:
        """Return when all that has registered is looked at, or cannot be."""
        if self._looking is not None and self._bus.connected:
            settled = asyncio.ensure_future(self._new.join())
            try:
                await asyncio.wait([settled, self._looking], return_when=asyncio.FIRST_COMPLETED)
            finally:
                settled.cancel()

    def close(self) -> None:
        """Find nothing more."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        try:
            await self._bus.subscribe(subjects.watch_endpoints(self._namespace), self._on_endpoint)
        except FlusterError as error:
            log.info("what jobs deploy is not shown: %s", error)
            return
        while True:
            job_id, name = await self._new.get()
            try:
                if above := await self._above(job_id):
                    self._found(job_id, name, above)
            except FlusterError as error:  # it is over and forgotten, or no controller can tell
                log.info("which job has deployed %s is not known: %s", job_id, error)
            finally:
                self._new.task_done()

    def _on_endpoint(self, delivery: Delivery) -> None:
        with self._faults.contained("what %s registers is not shown", delivery.subject):
            if delivery.data:  # else it is gone
                self._hear(Endpoint.from_json(delivery.data))

    def _hear(self, endpoint: Endpoint) -> None:
        if endpoint.job_id is None or endpoint.job_id in self._seen:
            return
        with contextlib.suppress(asyncio.QueueFull):  # then it is looked at when it registers again
            self._new.put_nowait((endpoint.job_id, endpoint.name))
            self._seen[endpoint.job_id] = None
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)

    async def _above(self, job_id: JobId) -> list[JobId]:
        above: list[JobId] = []
        while len(above) < _MAX_GENERATIONS:
            [info] = await self._states.get([above[-1] if above else job_id])
            if info.parent is None:
                break
            above.append(info.parent)
        return above
