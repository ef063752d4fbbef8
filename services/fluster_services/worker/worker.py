"""The worker: owns a machine's capacity, claims tasks that fit, adopts what an earlier run of it started, and leaves."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.devices import VISIBLE_DEVICES
from fluster_bus.core.errors import (
    BusError,
    DisconnectedError,
    NoRespondersError,
    RequestTimeoutError,
)
from fluster_bus.messages import (
    Capacity,
    Namespace,
    RecordChanged,
)
from fluster_bus.messages.parts.resources import with_own_name
from fluster_bus.running.coroutines import retried, wait_set
from fluster_services.worker.attempts.attempts import Attempts
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.following import discard
from fluster_services.worker.attempts.gpu_watch import container_finder
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.attempts.offers import OfferResponder
from fluster_services.worker.attempts.pumps import ProgressPump
from fluster_services.worker.attempts.run_requests import RunRequests
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.runtime import Runtime
from fluster_services.worker.engine_images import Images
from fluster_services.worker.gpus.allocator import GpuAllocator
from fluster_services.worker.gpus.holders import sees_all_processes
from fluster_services.worker.gpus.reader import GpuReader
from fluster_services.worker.presence.detection import describe_node, offered_gpus
from fluster_services.worker.presence.identity import JobFiles, why_not_apart
from fluster_services.worker.presence.new_namespaces import NewNamespaces
from fluster_services.worker.presence.presence import Draining, Presence
from fluster_services.worker.service import AttemptKey, WorkerService

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_NO_RECORD_S = 3.0  # a server that was away tells what was before for a second or two
_REVIEW_PAUSE_S = 0.5
_CONTROLLER_TIMEOUT_S = 60.0
_HAND_BACK_S = 5.0  # beyond the grace: for the ends to be written


class Worker:
    """One worker on one connection; `run` serves until it is cancelled, or has drained. Cancelled, its tasks outlive it."""

    def __init__(
        self, bus: Bus, config: WorkerConfig, runtime: Runtime, draining: Draining, images: Images | None = None
    ) -> None:
        self._bus = bus
        self._config = config
        self._review = asyncio.Event()
        self._runtime = runtime
        self._worker_id = config.worker_id
        self._claims = Claims(bus, config.worker_id, tuple(config.job_credentials))
        own = {
            "labels": with_own_name(config.total.labels, config.worker_id),
            "namespaces": tuple(sorted(config.job_credentials)),
        }
        total = config.total.model_copy(update=own)
        self._ledger = Ledger(total, config.device_ids, config.other_devices)
        self._presence = Presence(
            bus,
            config.worker_id,
            total=total,
            timing=config.timing,
            free=self._free,
            attempts=lambda: list(self._attempts.running),
            is_detecting=config.detected_share is not None,
            node=describe_node(config.state_dir),
            renew=self._on_heard,
            on_apart=self._on_apart,
            on_unknown=self._on_unknown,
        )
        self._progress = ProgressPump(bus)
        self._allocator = GpuAllocator(
            GpuReader(),
            lock_folder=config.gpu_locks,
            style=config.gpu_mask,
            has_container=container_finder(config, images),
            # On a LocalCluster it may be a display, a notebook's kernel, or the program itself that computes there.
            keeps_apart=config.environment is None and sees_all_processes(),
        )
        self._attempts = Attempts(
            bus,
            config,
            runtime,
            claims=self._claims,
            ledger=self._ledger,
            presence=self._presence,
            progress=self._progress,
            cover=self._cover,
            change=self._on_wellness,
            change_gpus=self._on_gpus,
            allocator=self._allocator,
            images=images,
        )
        self._offers = OfferResponder(
            bus,
            config.worker_id,
            claims=self._claims,
            ledger=self._ledger,
            presence=self._presence,
            draining=draining,
            gpus=self._attempts.gpus,
            in_containers=config.containers is not None,
            start=self._attempts.start,
            give_back=self._attempts.give_back,
            trouble=lambda: self._attempts.wellness.trouble,
            spawn=self._spawn,
            track=self._track,
            on_lapse=self._review.set,
        )
        run_requests = RunRequests(
            bus,
            config.worker_id,
            self._ledger,
            check=self._offers.why_nothing_new,
            take=self._offers.take,
            give_back=self._attempts.give_back,
            start=self._start,
            claim_within_s=max(config.timing.hold_s, 2 * config.timing.heartbeat_s),
        )
        self._service = WorkerService(
            bus,
            config.worker_id,
            state_dir=config.state_dir,
            runtime=runtime,
            ledger=self._ledger,
            claims=self._claims,
            draining=draining,
            wellness=self._attempts.wellness,
            attempts=self._attempts.running,
            array_ids=self._attempts.array_ids,
            unserved=lambda: [
                *self._attempts.gpus.problems(),
                *(self._new.problems() if self._new is not None else []),
            ],
            on_offer=self._offers.on_offer,
            run=run_requests.run,
            obey=self._attempts.obey,
        )
        self._draining = draining
        self._new = self._follow_folder()
        self._tasks = asyncio.TaskGroup()
        self._work: set[asyncio.Task[object]] = set()  # what has to be over before the worker may leave
        self._was_unknown = False  # to the controller, since its records were compared with what this worker has
        self._without_record: dict[str, float] = {}  # {attempt key: since when a look finds none}

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve; `ready` is called once offers are taken."""
        await self._attempts.open()
        try:
            async with self._tasks, self._noting_end():
                await self._attempts.wellness.look()
                await self._presence.register()
                self._bus.on_reconnect(self._review.set)
                await self._adopt()
                await self._attempts.gpus.learn_names()
                self._offers.has_adopted = True
                await self._bus.subscribe(subjects.worker_verb(self._worker_id, "look"), self._on_record_changed)
                await self._service.serve()
                await self._presence.announce()
                await self._presence.beat()  # what is started before the next one counts from here
                self._offers.is_open = True
                await self._offers.cover_when_possible()
                self._review.set()  # for what was wished before this worker listened
                loops = [
                    self._tasks.create_task(self._presence.beat_forever()),
                    self._tasks.create_task(self._progress.repeat_forever()),
                    self._tasks.create_task(self._review_forever()),
                    self._tasks.create_task(self._attempts.wellness.run()),
                    self._tasks.create_task(self._end_when_broken()),
                ]
                ready()
                loops.append(self._tasks.create_task(self._detect()))
                if self._new is not None:
                    loops.append(self._tasks.create_task(self._new.run()))
                is_done = await self._drain()
                for loop in loops:  # a beat after the worker has left would bring it back
                    loop.cancel()
                await asyncio.wait(loops)
                if is_done:
                    await self._deregister()
        finally:
            self._offers.close()
            await self._attempts.close()
            await self._allocator.close()
            await self._runtime.close()

    @asynccontextmanager
    async def _noting_end(self) -> AsyncIterator[None]:
        """Take nothing from when the body ends, which it does as soon as any task of the worker fails."""
        try:
            yield
        finally:
            self._offers.is_over = True

    async def _end_when_broken(self) -> None:
        """A worker that can start nothing is of no use: whatever keeps it starts another, which adopts what runs."""
        error = await self._runtime.wait_broken()
        if not self._draining.is_asked:  # else it is not started again, and sees what runs to its end
            raise error

    async def _detect(self) -> None:
        """Find what is to be found on this machine, which may take long, beside what is done already."""
        inventory = await self._allocator.read()
        share = self._config.detected_share
        if share is None and not inventory.gpus and not inventory.trouble:
            await self._allocator.close()
            return
        if share is not None:
            devices = offered_gpus(inventory, os.environ.get(VISIBLE_DEVICES["gpu"])).share(*share)
            if devices.ids:
                for each in (devices, *devices.others):
                    log.info("%s has %d x %s", self._worker_id, len(each.ids), each.variant)
                self._ledger.add_devices(devices)
                await self._attempts.gpus.learn_names()
            self._attempts.on_devices(devices.kind)
        node = describe_node(self._config.state_dir, inventory)
        await retried(
            lambda _left_s: self._presence.say_detected(self._ledger.total, node), on=(BusError,), timeout_s=math.inf
        )
        if share is not None:
            await self._be_offered()
        await self._attempts.gpus.run()

    def _follow_folder(self) -> NewNamespaces | None:
        """Looks for credentials of jobs that come later, to serve their namespaces; None without a folder for them."""
        folder, address = self._config.job_credentials_dir, self._config.address
        if folder is None:
            return None
        return NewNamespaces(
            self._bus,
            self._worker_id,
            JobFiles(folder, address),
            signed=address.namespaces if address.token is not None else None,
            served=lambda: self._ledger.total.namespaces,
            serve=self._serve,
        )

    async def _serve(self, namespace: Namespace, credentials: BusAddress) -> None:
        """Run jobs of that namespace, too. Raises OSError, AddressError when the credentials for these cannot be kept."""
        await self._attempts.serve(namespace, credentials)
        self._claims.serve(namespace)
        self._ledger.add_namespace(namespace)
        if self._config.containers is None:
            log.warning("%s", why_not_apart(self._ledger.total.namespaces))
        await self._say_total()

    async def _say_total(self) -> None:
        """Have all know what this worker has by now, and be offered it."""
        await retried(lambda _left_s: self._presence.say_total(self._ledger.total), on=(BusError,), timeout_s=math.inf)
        await self._be_offered()

    async def _be_offered(self) -> None:
        """Have what was added to this worker's capacity used at once."""
        await self._offers.cover_when_possible()
        await self._presence.beat()  # who waits for room need not wait for the next one

    def _on_heard(self, fence_in_s: float) -> None:
        self._attempts.renew(fence_in_s)

    def _on_unknown(self) -> None:
        self._was_unknown = True
        self._review.set()

    async def _on_apart(self, why: str | None) -> None:
        await self._attempts.wellness.on_apart(why)

    def _spawn(self, work: Coroutine[object, None, None]) -> None:
        try:
            self._track(self._tasks.create_task(work))
        except RuntimeError:  # the worker ends for another reason: its next run gives up what this one claimed
            work.close()

    def _start(self, work: Coroutine[object, None, Result]) -> asyncio.Task[Result]:
        task = self._tasks.create_task(work)
        self._track(task)
        return task

    def _track(self, work: asyncio.Task[object]) -> None:
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    # ---- leaving ----------------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        """Whether nothing is left to do, once this worker was asked to leave and has waited for what it had."""
        await self._draining.wait_asked()
        log.info("%s takes nothing new, and leaves when its %d attempts are over", self._worker_id, len(self._ledger))
        self._spawn(self._offers.cover_when_possible())
        self._spawn(self._say_draining())
        if await self._draining.wait_done(self._work):
            return True
        self._attempts.hand_back()
        timeout_s = self._config.timing.kill_grace_s + _HAND_BACK_S
        if self._work:
            await asyncio.wait(self._work, timeout=timeout_s)
        if self._work:
            # Their keepers stop them, and the controller gives them away when this worker has been silent for long enough.
            log.warning("%s leaves, with %d attempts whose end is not told", self._worker_id, len(self._ledger))
        for work in self._work:
            work.cancel()
        return not self._work

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

    # ---- how it is --------------------------------------------------------------------------------------

    def _free(self) -> Capacity:
        return self._offers.free()

    async def _cover(self) -> None:
        await self._offers.cover_when_possible()

    async def _on_wellness(self) -> None:
        """The worker has become unfit to run anything, or fit again: first offers stop, then the table of workers says so."""
        self._presence.set_trouble(self._attempts.wellness.trouble)
        if self._offers.is_open:
            await self._offers.cover_when_possible()
            self._spawn(self._say_wellness())

    async def _on_gpus(self) -> None:
        """Other GPUs are given to no task than before, or for other reasons: first nothing comes for them, then all hear of it."""
        gpus = self._attempts.gpus
        node = describe_node(self._config.state_dir, self._allocator.inventory, gpus.withheld_by_uuid())
        self._presence.set_withheld(gpus.told(), self._ledger.withheld_counts, node)
        if self._offers.is_open:
            await self._offers.cover_when_possible()
            self._spawn(self._say_wellness())

    async def _say_wellness(self) -> None:
        try:
            await self._presence.register()
            await self._presence.beat()
        except BusError as error:
            log.info("how %s is stands in the table of workers later: %s", self._worker_id, error)
            self._review.set()

    # ---- wishes and second looks ------------------------------------------------------------------------

    async def _on_record_changed(self, delivery: Delivery) -> None:
        look = RecordChanged.from_json(delivery.data)
        row = await self._claims.look(look.namespace, look.job_id, look.task)
        if row is not None:
            self._attempts.obey(row.value)

    async def _review_forever(self) -> None:
        """Read the records of what runs again after each reconnect, and now and then: a message may be lost."""
        while True:
            await wait_set(self._review, self._config.timing.fence_after_s / 3)
            self._review.clear()
            try:
                await self._offers.cover()
                for key in self._attempts.unsettled():
                    place = AttemptKey.parse(key)
                    row = await self._claims.look(place.namespace, place.job_id, place.task)
                    if row is not None:
                        self._attempts.obey(row.value)
                    self._note_record(key, is_there=row is not None)
                if self._was_unknown:
                    await self._give_up_strange()
                    self._was_unknown = False
            except BusError as error:
                log.info("claims are read again later: %s", error)
                await wait_to_retry(self._bus, _REVIEW_PAUSE_S)
                self._review.set()

    def _note_record(self, key: str, *, is_there: bool) -> None:
        """Stop what has no record for longer than a copy of it lags: it was submitted after the backup that the records are from."""
        if is_there:
            self._without_record.pop(key, None)
        elif time.monotonic() - self._without_record.setdefault(key, time.monotonic()) >= _NO_RECORD_S:
            del self._without_record[key]
            self._attempts.drop(key)

    async def _give_up_strange(self) -> None:
        """Write the end of what this worker holds by the records and does not have: they are from a backup, and it ended since."""
        for row in await self._claims.held():
            key = buckets.attempt_key(row.value.namespace, row.value.job_id, row.value.task, row.value.attempt)
            if key not in self._ledger:
                self._spawn(self._attempts.give_up(row, f"worker {self._worker_id} has lost it"))

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
                self._attempts.hold(row.value, running)
                self._spawn(self._attempts.see_through(row, key, running, adopted=True))
            else:
                log.info("%s was superseded while this worker was away", key)
                self._spawn(discard(running))
        # On a new cluster the controller is making the buckets at this moment.
        held = await retried(
            lambda _left_s: self._claims.held(),
            on=(NoRespondersError, DisconnectedError, RequestTimeoutError),
            timeout_s=_CONTROLLER_TIMEOUT_S,
        )
        for row in held:
            record = row.value
            if buckets.attempt_key(record.namespace, record.job_id, record.task, record.attempt) not in adopted:
                await self._attempts.give_up(row, f"worker {self._worker_id} was restarted before it was started")
