"""The workers of a pool, and their work. Lives on the loop of the cluster's connection."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, cast

from fluster.actors.client.rosters import Roster
from fluster.actors.pool.pool import AsyncActorPool
from fluster.actors.protocol.failures import RETRY, advice_of, decode_failure, is_failure_of
from fluster.actors.results.loop_calls import StoredPayloads, closed
from fluster.cluster import AsyncCluster
from fluster.cluster.jobs.arguments import check_count
from fluster.errors import ActorDiedError, ConnectionLostError, NotRunError, PoisonedTaskError
from fluster.worker_pool.dispatch import TASK_MEMORY, Dispatch, Loss, Pace
from fluster.worker_pool.runner import FAILED, LeavingError, TaskRunner
from fluster.worker_pool.tasks import Bundle, Task, TaskQueue
from fluster.worker_pool.tickets import BundleTicket, UnitTicket
from fluster.worker_pool.work import Batch, Block, Outcome, Slice
from fluster.worker_pool.worker_jobs import PoolPlan, WorkerJobs
from fluster_bus.core import codec
from fluster_bus.core.errors import BusError, ClosedError, ObjectTooLargeError
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.messages import JobId
from fluster_bus.messages.jobs import MAX_REPLICAS
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

_MOST_AT_ONCE = 10_000  # units, before the connection sends them: it keeps no more than a hundred thousand


@dataclass(frozen=True)
class PoolStatus:
    """What a pool is doing."""

    workers: int
    """Workers that take tasks."""
    wanted: int
    """Workers that were asked for."""
    queued: int
    """Tasks, and items of maps, that wait for a worker."""
    out: int
    """Tasks and items that a worker has."""
    done: int
    """Tasks and items that returned."""
    failed: int
    """Tasks and items that raised, were given up, or were cancelled."""


class Workers:
    """Hands work out to the workers and counts it."""

    def __init__(self, cluster: AsyncCluster, plan: PoolPlan, count: int) -> None:
        self.cluster = cluster
        self.plan = plan
        self.wanted = count
        self.error: Exception | None = None  # why there are no longer any workers
        self.pool: AsyncActorPool[TaskRunner] = AsyncActorPool(cluster, plan.name)
        self.loop = asyncio.get_running_loop()
        self._dispatch = Dispatch(task_retries=plan.task_retries)
        self.pace = Pace(TASK_MEMORY)  # of single tasks
        self._tasks = TaskQueue(self.pace, self._count_cancelled)
        self._stored = StoredPayloads(ObjectStore(cluster.bus, cluster.namespace, PAYLOADS), self.loop)
        self._arrived: deque[Task | tuple[Batch, Sequence[Block]]] = deque()  # by any thread
        self._awake = False
        self._calm = False  # what arrives has time until the next answer
        self._counts = {"added": 0, "done": 0, "failed": 0}  # tasks, and items of batches
        self._idle: list[asyncio.Future[None]] = []
        self._leaving: set[str] = set()  # workers that were sent away
        self._unreachable: set[str] = set()  # those that did not respond; they are asked again after the next change
        self._roster: Roster | None = None
        self._ended = asyncio.Event()
        self._jobs = WorkerJobs(cluster, plan, self._end)
        self._jobs.launch(count)
        self._watch = asyncio.create_task(self._follow(), name=f"workers of {plan.name}")

    # ---- who is there -----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Keep up with who is there."""
        try:
            self._roster = await self.pool.roster()
            while True:
                self._unreachable.clear()
                self._pump()
                await self._roster.change()
        except BusError as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
        self._ended.set()
        self._pump()

    def _present(self) -> list[str]:
        """The workers that take tasks, the oldest first. Of more than are wanted the newest are sent away."""
        if self._roster is None:
            return []
        self._leaving &= self._roster.members.keys()
        staying = [str(each.endpoint_id) for each in self._roster.present() if each.endpoint_id not in self._leaving]
        if staying:
            self._jobs.on_workers()
        for worker in staying[self.wanted :]:
            self._leaving.add(worker)
            _ = self.pool.submit_to(worker, TaskRunner.leave.__name__, codec.encode(((), {})))
        return [worker for worker in staying[: self.wanted] if worker not in self._unreachable]

    async def wait_for_workers(self, min_workers: int | None = None, timeout: float | None = 60.0) -> None:
        """Return as soon as `min_workers` are there, all unless told otherwise.

        Raises ActorTimeoutError after `timeout` seconds, and why there are none when the workers ended.
        """
        wanted = (
            self.wanted if min_workers is None else check_count("min_workers", min_workers, 0, "how many to wait for")
        )
        waiting = asyncio.ensure_future(self.pool.wait_for_size(wanted, timeout))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and self.error is not None:
                raise copy.copy(self.error)
            await waiting
        finally:
            waiting.cancel()
            ended.cancel()

    async def size(self) -> int:
        return len(await self.pool.wait_for_members(0))

    async def job_ids(self) -> list[JobId]:
        """The jobs whose tasks the workers are, once they are launched. Raises what kept them from being launched."""
        return await self._jobs.job_ids()

    async def resize(self, workers: int) -> None:
        """Have so many workers: more are launched, or the newest finish what they have and end."""
        check_count("workers", workers, 1, "the number of workers", most=MAX_REPLICAS)
        if self.error is not None:
            raise copy.copy(self.error)
        more, self.wanted = workers - self.wanted, workers
        if more > 0:
            self._jobs.launch(more)
        self._pump()

    # ---- work -------------------------------------------------------------------------------------------

    def add(self, work: Task | tuple[Batch, Sequence[Block]]) -> None:
        """Take work, from any thread. Raises ClosedError."""
        self._arrived.append(work)
        # One wake-up for all that comes until the loop looks, which a closed one never does.
        if not (self._awake or self._calm) or self.loop.is_closed():
            self._awake = True
            try:
                self.loop.call_soon_threadsafe(self._pump)
            except RuntimeError as error:
                raise ClosedError("the connection to the cluster was closed") from error

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Take what arrived and send what there is room for."""
        self._awake = self._calm = False  # before looking: who adds from here on wakes the loop again
        while self._arrived:
            self._take_in(self._arrived.popleft())
        if self.error is not None:
            self._fail_waiting(self.error)
        else:
            now = time.monotonic()
            self._dispatch.on_workers(self._present())
            sent = 0
            for worker, unit in itertools.islice(self._dispatch.assign(now), _MOST_AT_ONCE):
                self._send(worker, unit)
                sent += 1
            if sent == _MOST_AT_ONCE:
                self._wake()
            self._calm = self._dispatch.is_supplied
        self._tell_idle()

    def _take_in(self, work: Task | tuple[Batch, Sequence[Block]]) -> None:
        if isinstance(work, Task):
            self._counts["added"] += 1
            # It comes behind the items of others, or takes as long as others.
            if self._dispatch.last is not self._tasks or self._tasks.pace is not work.pace:
                self._tasks = TaskQueue(work.pace, self._count_cancelled)
                self._dispatch.add(self._tasks)
            self._tasks.add(work)
            return
        batch, blocks = work
        is_in = batch.items > 0
        self._counts["added"] += batch.add(blocks)
        if not is_in:
            self._dispatch.add(batch)

    def _send(self, worker: str, unit: Any) -> None:
        method, args = _call_of(unit)
        ticket = (
            BundleTicket(self, worker, unit, self._on_result)
            if isinstance(unit, Bundle)
            else UnitTicket(self, worker, unit)
        )
        try:
            payload = payloads.encode(((*args, self.plan.task_timeout), {}))
            ticket.on_sent(self.pool.send(worker, method.__name__, payload, ticket))
        except (BusError, ConnectionLostError) as error:
            ticket.set_exception(error)

    # ---- answers ----------------------------------------------------------------------------------------

    def on_answered(self, worker: str, unit: Task | Bundle | Slice, ok: bool, payload: bytes) -> None:
        if not ok and _was_not_run(payload):
            self._unreachable.add(worker)
            self._dispatch.on_lost(unit, Loss.NOT_RUN)
        elif isinstance(unit, Task):
            self._dispatch.on_answered(unit, time.monotonic())
            self._settle(unit, ok, payload)
        elif isinstance(unit, Bundle):
            self._on_bundle(unit, ok, payload)
        elif not ok:
            self._on_failed_slice(unit, payload)
        else:
            self._on_slice(unit, payload)
        self._wake()

    def _settle(self, task: Task, ok: bool, payload: bytes) -> None:
        self._counts["done" if ok else "failed"] += 1
        task.future.settle(ok, payload)

    def _on_result(self, task: Task, item: bytes) -> None:
        """One task of a bundle is answered."""
        if payloads.is_stored(item):
            self._stored.fetch(item).add_done_callback(lambda fetched: self._on_fetched(task, fetched))
        elif item[0] == FAILED:
            self._settle(task, False, item[1:])
        else:
            self._settle(task, True, item)

    def _on_fetched(self, task: Task, fetched: Future[bytes]) -> None:
        try:
            item = fetched.result()
        except (Exception, CancelledError) as error:
            self._fail(task, error if isinstance(error, Exception) else closed())
        else:
            self._on_result(task, item)
        self._wake()

    def _on_bundle(self, bundle: Bundle, ok: bool, payload: bytes) -> None:
        """A bundle has ended. If some of its tasks are left, the first of them failed in a way that ended the others too."""
        self._dispatch.on_answered(bundle, time.monotonic(), bundle.answered)
        if not ok and bundle.size:
            self._settle(bundle.tasks.popleft(), False, payload)
        if bundle.size:
            self._dispatch.on_unfinished(bundle)

    def _on_slice(self, unit: Slice, payload: bytes) -> None:
        values, failures, ran, *more = payloads.decode(payload)
        # An older worker does not tell how long it took.
        self._dispatch.on_answered(unit, time.monotonic(), ran, *more[:1])
        if ran < unit.size:
            self._dispatch.on_unfinished(unit.rest(ran))
        by_index = {unit.first + index: failure for index, failure in failures.items()}
        unit.batch.on_outcome(Outcome(unit.first, unit.first + ran, values=values, failures=by_index))

    def _on_failed_slice(self, unit: Slice, payload: bytes) -> None:
        self._dispatch.on_answered(unit, time.monotonic())
        if not is_failure_of(payload, ObjectTooLargeError):
            failures = dict.fromkeys(range(unit.first, unit.stop), payload)
            unit.batch.on_outcome(Outcome(unit.first, unit.stop, failures=failures))
        elif unit.size > 1 and self.plan.task_retries:  # one of its results is to blame, and only that one is to fail
            for part in unit.parts():
                self._dispatch.on_unfinished(part)
        else:
            unit.fail(
                ObjectTooLargeError(f"{self.plan.name}: what {unit} gave cannot be sent: {decode_failure(payload)}")
            )

    def on_error(self, worker: str, unit: Task | Bundle | Slice, error: BaseException) -> None:
        loss = _loss_of(error)
        if loss is Loss.NOT_RUN:
            self._unreachable.add(worker)
        if unit.size == 0:  # all but the end of a bundle had come
            loss = None
        if loss is None or not self._dispatch.on_lost(unit, loss):
            if loss is None:
                self._dispatch.on_answered(unit, time.monotonic())
            self._fail(unit, self._last_error(unit, error))
        self._wake()

    def _last_error(self, unit: Task | Bundle | Slice, error: BaseException) -> BaseException:
        if isinstance(error, ObjectTooLargeError):
            return ObjectTooLargeError(
                f"{self.plan.name}: {unit} cannot be sent to a worker: {error}; pass a Ref (cluster.put gives one) or a path"
            )
        if unit.deaths < 2:
            return error
        commands = " or ".join(f"`fluster logs {job_id}`" for job_id in self._jobs.launched()) or "pool.logs()"
        return PoisonedTaskError(
            f"{self.plan.name}: {unit} was given to {unit.deaths} workers one after the other, and each died while it had "
            f"it, so it is not given to another: {commands} shows what they wrote (last: {error})"
        )

    def _fail(self, unit: Task | Bundle | Slice | TaskQueue | Batch, error: BaseException) -> None:
        failed = unit.fail(error)  # which counts what it tells by itself
        self._counts["failed"] += failed

    def _count_cancelled(self) -> None:
        self._counts["failed"] += 1

    def count_outcome(self, outcome: Outcome) -> None:
        """Note what became of some items of a batch."""
        failed = outcome.failed
        self._counts["failed"] += failed
        self._counts["done"] += outcome.stop - outcome.start - failed

    # ---- the end ----------------------------------------------------------------------------------------

    def _fail_waiting(self, error: Exception) -> None:
        sources, units = self._dispatch.give_up()
        for each in (*units, *sources):
            self._fail(cast("Task | Bundle | Slice | TaskQueue | Batch", each), copy.copy(error))

    def _cancel_waiting(self, error: Exception) -> None:
        """Cancel what has not begun; what was lost and waits for another worker ends with `error`."""
        sources, units = self._dispatch.give_up()
        for source in sources:
            cast("TaskQueue | Batch", source).cancel()
        for unit in units:
            self._fail(cast("Task | Bundle | Slice", unit), copy.copy(error))

    def _tell_idle(self) -> None:
        if self._idle and self._counts["added"] == self._counts["done"] + self._counts["failed"]:
            waiting, self._idle = self._idle, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    async def status(self) -> PoolStatus:
        return self.status_now()

    def status_now(self) -> PoolStatus:
        self._pump()
        return PoolStatus(
            workers=len(self._present()),
            wanted=self.wanted,
            queued=self._dispatch.waiting,
            out=self._dispatch.out,
            done=self._counts["done"],
            failed=self._counts["failed"],
        )

    async def finish(self) -> None:
        """Return when all work so far is done."""
        idle = self.loop.create_future()
        self._idle.append(idle)
        self._pump()
        await idle

    async def shutdown(self, *, wait: bool) -> None:
        """End the workers; with `wait`, finish all work first, and return when they have ended."""
        if wait:
            await self.finish()
        ended = ActorDiedError(f"{self.plan.name} was shut down before the task was done")
        try:
            self._pump()
            self._cancel_waiting(ended)
            self._end(ended)
            await self._jobs.terminate(wait=wait)
        finally:
            self._jobs.close()
            self._watch.cancel()
            self.pool.give_up(ended)


def _call_of(unit: Task | Bundle | Slice) -> tuple[Callable[..., object], tuple[object, ...]]:
    """What a worker is to do with a unit: the method, and its arguments but for the limit of time."""
    if isinstance(unit, Task):
        return TaskRunner.run, unit.payload
    if isinstance(unit, Bundle):
        return TaskRunner.run_bundle, ([task.payload for task in unit.tasks],)
    return TaskRunner.run_slice, (unit.batch.function, unit.block.payload, unit.start, unit.size)


def _was_not_run(failure: bytes) -> bool:
    """True when the worker says so, and not the task."""
    is_rejected = is_failure_of(failure, NotRunError) and advice_of(failure) == RETRY
    return is_rejected or is_failure_of(failure, LeavingError)


_LOSSES = ((NotRunError, Loss.NOT_RUN), (ActorDiedError, Loss.DEATH), (ConnectionLostError, Loss.CONNECTION))


def _loss_of(error: BaseException) -> Loss | None:
    return next((loss for kind, loss in _LOSSES if isinstance(error, kind)), None)
