"""The worker: owns a machine's capacity, claims tasks that fit, and sees each attempt to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.delivery import Delivery
from fluster_bus.errors import (
    BusError,
    DisconnectedError,
    NoRespondersError,
    RequestTimeoutError,
)
from fluster_bus.messages import (
    Capacity,
    JobRecord,
    JobStatus,
    Look,
    Offer,
    OfferReply,
    TaskRecord,
)
from fluster_bus.objects import ObjectStore
from fluster_bus.registry import Registry
from fluster_bus.retries import retried
from fluster_bus.tables import Row
from fluster_services.capacity import fits, needed
from fluster_services.worker.attempt_directory import LaunchSpec
from fluster_services.worker.claims import Claims
from fluster_services.worker.class_offers import ClassOffers
from fluster_services.worker.config import WorkerConfig
from fluster_services.worker.draining import Draining
from fluster_services.worker.holds import Holds
from fluster_services.worker.launch import Launcher
from fluster_services.worker.ledger import Ledger
from fluster_services.worker.log_pump import LogPump, publish_preparation
from fluster_services.worker.outcome import Outcome, follow
from fluster_services.worker.preparation import Preparation, Prepared
from fluster_services.worker.presence import Presence
from fluster_services.worker.progress_pump import ProgressPump
from fluster_services.worker.result_pump import publish_result
from fluster_services.worker.runtime import LaunchError, RunningTask, Runtime
from fluster_services.worker.service import AttemptKey, WorkerService
from fluster_services.worker.template import TemplateDiedError
from fluster_services.worker.uv import BuildError

log = logging.getLogger(__name__)

_ADOPTION_PAUSE_S = 0.5
_CONTROLLER_TIMEOUT_S = 60.0
_MOMENT_S = 0.05  # shorter than anybody watches
_HAND_BACK_S = 5.0  # beyond the grace: for the ends to be written

Result = TypeVar("Result")


class Worker:
    """One worker on one connection; `run` serves until it is cancelled, or has drained. Cancelled, its tasks outlive it."""

    def __init__(self, bus: Bus, config: WorkerConfig, runtime: Runtime, draining: Draining) -> None:
        self._bus = bus
        self._config = config
        self._runtime = runtime
        self._worker_id = config.worker_id
        namespaces = tuple(config.job_credentials)
        self._claims = Claims(bus, config.worker_id, namespaces)
        self._registries = {namespace: Registry(bus, namespace) for namespace in namespaces}
        self._holds = Holds(
            bus,
            self._claims,
            namespaces=namespaces,
            host=config.advertised_host,
            expiry_s=max(config.timing.hold_s, 2 * config.timing.heartbeat_s),
        )
        self._ledger = Ledger(config.total, config.device_ids)
        self._classes = ClassOffers(bus, self._on_offer)
        self._attempts: dict[str, RunningTask] = {}  # {attempt key: what runs}
        self._presence = Presence(
            bus,
            config.worker_id,
            total=config.total,
            timing=config.timing,
            free=self._free,
            attempts=self._attempts.keys,
        )
        self._service = WorkerService(
            bus,
            config.worker_id,
            state_dir=config.state_dir,
            runtime=runtime,
            ledger=self._ledger,
            claims=self._claims,
            draining=draining,
            attempts=self._attempts,
            on_offer=self._on_offer,
            obey=self._obey,
        )
        self._launcher = Launcher(
            worker_id=config.worker_id,
            credentials=config.job_credentials,
            credentials_dir=config.state_dir / "credentials",
            timing=config.timing,
            working_dir=config.working_dir,
            python_path=config.python_path,
            device_kind=config.total.device,
        )
        self._preparation = Preparation(config.state_dir, functools.partial(ObjectStore, bus), config.caches)
        self._progress = ProgressPump(bus)
        # {attempt key: when the last heartbeat before the record was seen to be this worker's was sent}. A later one proves
        # nothing about it: the task may have been given away between the two.
        self._fence_since: dict[str, float] = {}
        self._preparing: dict[str, asyncio.Task[Any]] = {}  # {attempt key: what it waits for}
        self._launches: set[asyncio.Future[RunningTask]] = set()
        self._draining = draining
        self._is_handing_back = False
        self._tasks = asyncio.TaskGroup()
        self._work: set[asyncio.Task[Any]] = set()  # what has to be over before the worker may leave
        self._review = asyncio.Event()
        self._has_adopted = False
        self._is_open = False

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve; `ready` is called once offers are taken."""
        self._launcher.prepare()
        await asyncio.to_thread(self._preparation.open)
        try:
            async with self._tasks:
                await self._presence.register()
                self._bus.on_reconnect(self._review.set)
                await self._adopt()
                self._has_adopted = True
                await self._bus.subscribe(subjects.worker_verb(self._worker_id, "look"), self._on_look)
                await self._service.serve()
                await self._presence.announce()
                await self._presence.beat()  # what is started before the next one counts from here
                self._is_open = True
                await self._cover_when_possible()
                self._review.set()  # for what was wished before this worker listened
                loops = [
                    self._tasks.create_task(self._presence.beat_forever(self._renew)),
                    self._tasks.create_task(self._progress.repeat_forever()),
                    self._tasks.create_task(self._review_forever()),
                ]
                ready()
                is_done = await self._drain()
                for loop in loops:  # a beat after the worker has left would bring it back
                    loop.cancel()
                await asyncio.wait(loops)
                if is_done:
                    await self._deregister()
        finally:
            self._classes.close()
            await self._preparation.close()
            if self._launches:
                await asyncio.wait(self._launches)
            await self._runtime.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._track(self._tasks.create_task(work))

    def _track(self, work: asyncio.Task[Any]) -> None:
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    # ---- leaving ----------------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        """Whether nothing is left to do, once this worker was asked to leave and has waited for what it had."""
        await self._draining.wait_asked()
        log.info("%s takes nothing new, and leaves when its %d attempts are over", self._worker_id, len(self._ledger))
        self._spawn(self._cover_when_possible())
        self._spawn(self._say_draining())
        if await self._draining.wait_done(self._work):
            return True
        self._is_handing_back = True
        for running in self._attempts.values():
            self._hand_back(running)
        for preparing in self._preparing.values():
            preparing.cancel()
        timeout_s = self._config.timing.kill_grace_s + _HAND_BACK_S
        if self._work:
            await asyncio.wait(self._work, timeout=timeout_s)
        if self._work:
            # Their keepers stop them, and the controller gives them away when this worker has been silent for long enough.
            log.warning("%s leaves, with %d attempts whose end is not told", self._worker_id, len(self._ledger))
        for work in self._work:
            work.cancel()
        return not self._work

    def _hand_back(self, running: RunningTask) -> None:
        running.kill(self._config.timing.kill_grace_s, self._left, preempted=True)

    @property
    def _left(self) -> str:
        return f"worker {self._worker_id} left before it was over"

    async def _say_draining(self) -> None:
        try:
            await self._presence.say_draining()
        except BusError as error:
            log.info("that %s drains is not in the table of workers: %s", self._worker_id, error)

    async def _deregister(self) -> None:
        try:
            await self._presence.deregister()
        except BusError as error:
            log.info("%s leaves without a word, and will be found lost: %s", self._worker_id, error)

    # ---- offers -----------------------------------------------------------------------------------------

    def _renew(self, fence_in_s: float) -> None:
        self._holds.on_heard()
        for running in self._attempts.values():
            running.renew(fence_in_s)

    async def _cover(self) -> None:
        if not self._has_adopted:
            return  # what is claimed now would be taken for something that an earlier run claimed and never started
        await self._classes.cover(self._free)

    def _free(self) -> Capacity:
        """What may be offered: to tell of room before anybody listens for offers would have them made in vain."""
        return self._ledger.free if self._is_open and not self._draining.is_asked else Capacity()

    async def _cover_when_possible(self) -> None:
        try:
            await self._cover()
        except BusError as error:
            # Subscriptions that stand come back with the connection; the rest is set right then.
            log.info("the offers listened to are changed later: %s", error)
            self._review.set()

    # ---- claiming ---------------------------------------------------------------------------------------

    async def _on_offer(self, offer: Offer, _subject: str) -> OfferReply:
        work = asyncio.current_task()
        if work is not None:
            self._track(work)
        if self._worker_id in offer.spared:
            return OfferReply(
                worker_id=self._worker_id, accepted=False, spared=True, reason="kept free for another task"
            )
        refusal = await self._take(offer)
        return OfferReply(worker_id=self._worker_id, accepted=refusal is None, reason=refusal or "")

    async def _take(self, offer: Offer) -> str | None:
        """Reserve, then claim: None when the task is this worker's, else why not."""
        if offer.namespace not in self._config.job_credentials:
            return "no such namespace here"
        if time.monotonic() >= self._presence.fence_at:
            return "not heard for so long that it may start nothing"
        # The job is not needed yet, but so both come by one round trip.
        row, job = await asyncio.gather(
            self._claims.look(offer.namespace, offer.job_id, offer.task),
            self._claims.job(offer.namespace, offer.job_id),
        )
        if row is None or row.revision < offer.revision:
            return "no such record here"
        if self._draining.is_asked:
            return "it drains"
        key = subjects.attempt_key(offer.namespace, offer.job_id, offer.task, offer.attempt)
        need = needed(row.value.resources)
        if not self._ledger.reserve(key, need):
            self._spawn(self._cover_when_possible())
            return "no room"
        try:
            claimed = await self._claims.claim(row, offer)
        except BusError:
            # Claimed or not: the record tells when it can be read again. Until then the capacity stays reserved.
            self._spawn(self._settle(offer, key))
            raise
        if claimed is None:
            await self._give_back(key)
            return "somebody else has it, or it is not wanted any more"
        if fits(need, self._ledger.free):
            self._classes.soon(lambda: self._spawn(self._cover_when_possible()))
        else:
            self._spawn(self._cover_when_possible())
        self._spawn(self._start(claimed, key, job))
        return None

    async def _settle(self, offer: Offer, key: str) -> None:
        row = await self._claims.patiently(lambda: self._claims.settle(offer))
        if row is not None:
            self._spawn(self._cover_when_possible())
            await self._start(row, key, None)
        else:
            await self._give_back(key)

    async def _give_back(self, key: str) -> None:
        """The capacity is free again, and offers for it are listened to."""
        self._holds.close(key)
        self._fence_since.pop(key, None)
        self._preparation.release(key)
        if self._ledger.release(key):
            await self._cover_when_possible()

    # ---- running ----------------------------------------------------------------------------------------

    async def _start(self, row: Row[TaskRecord], key: str, job: JobRecord | None) -> None:
        self._fence_since[key] = self._presence.heard_at
        record = row.value
        if record.gang:
            self._holds.open(key, record, on_off=lambda: self._stop_preparing(key))
        try:
            if job is None or job.order != record.order:  # of whoever had the id before, from a replica that lags
                job = await self._claims.job(record.namespace, record.job_id)
            if job is None or job.order != record.order:
                raise LaunchError(f"job {record.job_id} has no record any more")
            found = await self._prepared(row, job, key)
            if found is None:
                return
            row, prepared = found
            if record.gang:
                job = await self._wait_go(row, key)
                if job is None:
                    return
            spec, payload = self._launcher.spec(row.value, job, prepared, self._ledger.devices(key))
            # This process may be stopped at any point, also here: the keeper looks at the clock itself.
            spec = dataclasses.replace(spec, fence_at=self._fence_since.pop(key) + self._config.timing.fence_after_s)
            running = await self._launch(spec, payload)
        except TemplateDiedError:
            # Nothing can be started here any more: a new worker process, with a new template, adopts what runs.
            await self._end_unstarted(row, key, Outcome(JobStatus.WORKER_FAILED, "its worker has to be started again"))
            raise
        except (LaunchError, BusError, OSError) as error:
            log.warning("%s could not be started: %s", key, error)
            await self._end_unstarted(row, key, Outcome(_blame(error), f"could not be started: {error}"))
            return
        except Exception as error:
            # One task that nobody thought of must not take the worker down, again at each of its attempts.
            log.exception("%s could not be started", key)
            reason = f"could not be started: {type(error).__name__}: {error}"
            await self._end_unstarted(row, key, Outcome(JobStatus.FAILED, reason))
            return
        await self._see_through(row, key, running, adopted=False)

    async def _launch(self, spec: LaunchSpec, payload: bytes | None) -> RunningTask:
        """The attempt, started. Cancelled, this leaves it to the worker's successor, which finds and adopts it.

        Its code may have begun by then: to take it back would have it begun a second time, as another attempt.
        """
        launch = asyncio.ensure_future(self._runtime.start(spec, payload))
        self._launches.add(launch)
        launch.add_done_callback(self._launches.discard)
        return await asyncio.shield(launch)

    async def _prepared(
        self, row: Row[TaskRecord], job: JobRecord, key: str
    ) -> tuple[Row[TaskRecord], Prepared] | None:
        """What the attempt needs, and its record after that; None when it is not wanted any more, and that is settled."""
        record = row.value
        while True:
            prepared = await self._prepare(record, job, key)
            if self._is_handing_back:
                await self._hand_back_unstarted(row, key)
                return None
            if prepared == Prepared() and self._presence.was_heard_lately:
                return row, prepared
            latest = await self._still_wanted(row, key)
            if latest is None:
                return None
            if prepared is not None:
                return latest, prepared

    async def _still_wanted(self, row: Row[TaskRecord], key: str) -> Row[TaskRecord] | None:
        """The record after something that took its time, in which the task may have been given to somebody else, or
        stopped; None when it is not wanted any more, and that is settled.
        """
        record = row.value
        await self._presence.wait_heard()
        self._fence_since[key] = self._presence.heard_at
        latest = await self._claims.patiently(lambda: self._claims.look(record.namespace, record.job_id, record.task))
        if latest is None or not self._claims.is_mine(latest.value, record.attempt):
            await self._give_back(key)
            return None
        wish = latest.value.kill_requested or latest.value.restart_requested
        if wish is not None:
            await self._end_unstarted(latest, key, Outcome(JobStatus.KILLED, wish))
            return None
        if record.gang and self._holds.is_off(key):
            await self._give_back(key)
            await self._claims.release(latest, f"released: not all tasks of epoch {record.epoch} could be held")
            return None
        return latest

    async def _wait_go(self, row: Row[TaskRecord], key: str) -> JobRecord | None:
        """The job's record that lets this task of a gang start; None when it is not to start, and that is settled."""
        while True:
            decision = await self._interruptible(self._holds.wait_go(key, row), key)
            if self._is_handing_back:
                await self._hand_back_unstarted(row, key)
                return None
            latest = await self._still_wanted(row, key)
            if latest is None:
                return None
            if decision is not None:
                return decision
            row = latest

    async def _hand_back_unstarted(self, row: Row[TaskRecord], key: str) -> None:
        """Give up an attempt since this worker leaves; a hold, under which nothing was to start yet, at no cost."""
        await self._give_back(key)
        if not row.value.gang or not await self._holds.give_up(row, self._left):
            await self._claims.end(row, JobStatus.WORKER_FAILED, self._left)

    async def _prepare(self, record: TaskRecord, job: JobRecord, key: str) -> Prepared | None:
        """What the attempt needs; None when that was given up on the word of `_obey`."""
        try:
            prepared = await self._interruptible(self._preparation.prepare(record.namespace, job.request, key), key)
        except BuildError as error:
            await publish_preparation(self._bus, record, error.output.lines)
            raise
        if prepared is None:
            return None
        if prepared.environment is not None and prepared.environment.output is not None:
            await publish_preparation(self._bus, record, prepared.environment.output.lines)
        return prepared

    async def _interruptible(self, work: Coroutine[Any, Any, Result], key: str) -> Result | None:
        """What comes of `work`; None when it was given up: on the word of `_stop_preparing`, or since this worker leaves."""
        if self._is_handing_back:  # whatever was there when that began was told; this was not
            work.close()
            return None
        preparing = self._preparing[key] = asyncio.create_task(work)
        try:
            await asyncio.wait({preparing})
        finally:
            del self._preparing[key]
            preparing.cancel()
        return None if preparing.cancelled() else preparing.result()

    def _stop_preparing(self, key: str) -> None:
        preparing = self._preparing.get(key)
        if preparing is not None:
            preparing.cancel()

    async def _see_through(self, row: Row[TaskRecord], key: str, running: RunningTask, *, adopted: bool) -> None:
        self._attempts[key] = running
        if self._is_handing_back:
            self._hand_back(running)
        pump = LogPump(self._bus, row.value, running)
        if adopted:
            await pump.resume()
        started_at = time.time()
        is_over = asyncio.get_running_loop().create_future()
        tell_running = asyncio.create_task(self._tell_running(row, is_over, started_at))

        async def speak() -> None:
            """Before anybody can read what it says, its record says that it runs."""
            if not is_over.done():
                is_over.set_result(False)
            await asyncio.wait({tell_running})

        try:
            on_progress = functools.partial(self._progress.tell, key, row.value)
            outcome = await follow(running, pump, on_progress=on_progress, before_output=speak)
            if not is_over.done():
                is_over.set_result(True)
            row = await tell_running
        finally:
            tell_running.cancel()
            self._progress.forget(key)
        del self._attempts[key]
        # Joined before the end is written: whoever reads the end and offers the next task finds somebody listening.
        await asyncio.gather(self._remove_endpoints(row.value), self._give_back(key))
        result = await publish_result(self._bus, row.value, running, outcome.result)
        if not await self._claims.end(
            row,
            outcome.state,
            outcome.reason,
            exit_code=outcome.exit_code,
            error=outcome.error,
            started_at=started_at,
            last_words=outcome.last_words,
            result=result,
            progress=outcome.progress,
        ):
            log.info("%s ended as %s, and is not this worker's any more", key, outcome.state)
        await running.forget()

    async def _tell_running(
        self, row: Row[TaskRecord], is_over: asyncio.Future[bool], started_at: float
    ) -> Row[TaskRecord]:
        """Write that it runs, unless it is silent and over in a moment: then that is written together with its end."""
        try:
            async with asyncio.timeout(_MOMENT_S):
                if await asyncio.shield(is_over):
                    return row
        except TimeoutError:
            pass
        row = await self._claims.run(row, started_at=started_at)
        if row.value.state is JobStatus.BUILDING:  # it could not be written: the task was given to somebody else
            record = row.value
            latest = await self._claims.patiently(
                lambda: self._claims.look(record.namespace, record.job_id, record.task)
            )
            if latest is not None:
                self._obey(latest.value)
        self._obey(row.value)  # what was wished while it was being started
        return row

    async def _end_unstarted(self, row: Row[TaskRecord], key: str, outcome: Outcome) -> None:
        await self._give_back(key)
        await self._claims.end(row, outcome.state, outcome.reason)

    async def _remove_endpoints(self, record: TaskRecord) -> None:
        """Whatever the attempt registered is gone with it; callers learn of it at once."""
        registry = self._registries[record.namespace]
        keys = subjects.endpoints_of_attempt(record.job_id, record.task, record.attempt)
        try:
            for row in await registry.table.rows(keys):
                await registry.table.delete(row.key)
        except BusError as error:
            log.info("endpoints of %s are left to the controller: %s", record.job_id, error)

    # ---- wishes and second looks ------------------------------------------------------------------------

    async def _on_look(self, delivery: Delivery) -> None:
        look = Look.from_json(delivery.data)
        row = await self._claims.look(look.namespace, look.job_id, look.task)
        if row is not None:
            self._obey(row.value)

    def _obey(self, record: TaskRecord) -> None:
        """Stop what the record says is to be stopped: a wish, or an attempt that is not the newest any more."""
        grace_s = self._config.timing.kill_grace_s
        for number in range(1, record.attempt + 1):
            key = subjects.attempt_key(record.namespace, record.job_id, record.task, number)
            running, wish = self._attempts.get(key), record.kill_requested or record.restart_requested
            if wish is not None or not self._claims.is_mine(record, number):
                self._stop_preparing(key)
            if running is None:
                continue
            if not self._claims.is_mine(record, number):
                running.kill(0.0, "superseded by a newer attempt")
            elif wish is not None:
                running.kill(grace_s, wish)

    async def _review_forever(self) -> None:
        """Read the records of what runs again after each reconnect, and now and then: a message may be lost."""
        while True:
            try:
                async with asyncio.timeout(self._config.timing.fence_after_s / 3):
                    await self._review.wait()
            except TimeoutError:
                pass  # now and then
            self._review.clear()
            try:
                await self._cover()
                for key in [*self._attempts, *self._preparing]:
                    place = AttemptKey.parse(key)
                    row = await self._claims.look(place.namespace, place.job_id, place.task)
                    if row is not None:
                        self._obey(row.value)
            except BusError as error:
                log.info("claims are read again later: %s", error)
                await self._bus.wait_connected()
                await asyncio.sleep(_ADOPTION_PAUSE_S)
                self._review.set()

    # ---- coming back ------------------------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Take up what an earlier run of this worker started, and give up what it claimed and never started."""
        adopted = {running.key: running for running in await self._runtime.adopt()}
        for key, running in adopted.items():
            place = AttemptKey.parse(key)
            look = functools.partial(self._claims.look, place.namespace, place.job_id, place.task)
            row = await self._claims.patiently(look)
            if row is not None and self._claims.is_mine(row.value, place.attempt):
                log.info("adopted %s", key)
                self._ledger.hold(key, needed(row.value.resources), running.spec.devices or None)
                self._preparation.hold(key, running.spec)
                self._spawn(self._see_through(row, key, running, adopted=True))
            else:
                log.info("%s was superseded while this worker was away", key)
                self._spawn(_discard(running))
        # On a new cluster the controller is making the buckets at this moment.
        held = await retried(
            lambda _left_s: self._claims.held(),
            on=(NoRespondersError, DisconnectedError, RequestTimeoutError),
            timeout_s=_CONTROLLER_TIMEOUT_S,
        )
        for row in held:
            record = row.value
            if subjects.attempt_key(record.namespace, record.job_id, record.task, record.attempt) not in adopted:
                if (
                    record.gang
                    and record.state is JobStatus.BUILDING
                    and await self._holds.give_up(row, f"worker {self._worker_id} was restarted")
                ):
                    continue
                reason = f"worker {self._worker_id} was restarted before it was started"
                await self._claims.end(row, JobStatus.WORKER_FAILED, reason)


async def _discard(running: RunningTask) -> None:
    running.kill(0.0, "superseded by a newer attempt")
    async for _ in running.events():
        pass  # the last one is its end
    await running.forget()


def _blame(error: Exception) -> JobStatus:
    """Whose fault it is that an attempt could not be started: nobody's, when the bus was away."""
    return JobStatus.WORKER_FAILED if isinstance(error, BusError) else JobStatus.FAILED
