"""The offers that a worker listens for, by its free capacity, and takes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

from fluster_bus.connection.bus import Bus, Subscription
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import BusError
from fluster_bus.messages import (
    Capacity,
    EnvironmentConfig,
    JobId,
    JobRecord,
    JobRequest,
    Namespace,
    Offer,
    OfferReply,
    TaskRecord,
    WorkerId,
)
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.storage.tables import Row
from fluster_services.capacity import CapacityClass, classes_covered, fits, needed
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.gpu_watch import GpuWatch
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.presence.presence import Draining, Presence

log = logging.getLogger(__name__)

_LAG_S = 0.1


class OfferResponder:
    """Takes tasks that are offered: reserves capacity, then claims.

    `start` sees what was claimed to its end, `give_back` frees its capacity, `trouble` tells why the worker takes nothing.
    `spawn` has something done beside, and `track` notes a task that has to be over before the worker leaves. `on_lapse` is called
    when the subscriptions could not be changed, so that `cover` has to be called again.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        *,
        claims: Claims,
        ledger: Ledger,
        presence: Presence,
        draining: Draining,
        gpus: GpuWatch,
        in_containers: bool,
        start: Callable[[Row[TaskRecord], str, JobRecord | None], Coroutine[object, None, None]],
        give_back: Callable[[str], Awaitable[None]],
        trouble: Callable[[], str | None],
        spawn: Callable[[Coroutine[object, None, None]], None],
        track: Callable[[asyncio.Task[object]], None],
        on_lapse: Callable[[], None],
    ) -> None:
        self._worker_id = worker_id
        self._claims = claims
        self._ledger = ledger
        self._presence = presence
        self._draining = draining
        self._gpus = gpus
        self._in_containers = in_containers
        self._start = start
        self._give_back = give_back
        self._trouble = trouble
        self._spawn = spawn
        self._track = track
        self._on_lapse = on_lapse
        self._classes = ClassOffers(bus, self.on_offer)
        self.has_adopted = False  # what an earlier run of this worker has left
        self.is_open = False
        self.is_over = False  # also when an error ends the worker, which takes a moment

    def close(self) -> None:
        """Forget what was to be done in a moment."""
        self._classes.close()

    async def cover(self) -> None:
        """Listen to what the free capacity covers. Raises BusError."""
        if not self.has_adopted:
            return  # what is claimed now would be taken for something that an earlier run claimed and never started
        await self._classes.cover(self.free)

    def free(self) -> Capacity:
        """What may be offered: to report room before the worker listens for offers would have them made in vain."""
        takes_work = self.is_open and not self._draining.is_asked and self._trouble() is None
        return self._ledger.free if takes_work else Capacity()

    async def cover_when_possible(self) -> None:
        """The same; when the bus is away, `on_lapse` is called."""
        try:
            await self.cover()
        except BusError as error:
            # Subscriptions that stand come back with the connection; the rest is set right then.
            log.info("the offers listened to are changed later: %s", error)
            self._on_lapse()

    async def on_offer(self, offer: Offer, _subject: str) -> OfferReply:
        """A controller has offered a task."""
        work = asyncio.current_task()
        if work is not None:
            self._track(work)
        if self._worker_id in offer.spared and not self._is_promised(offer):
            return OfferReply(
                worker_id=self._worker_id, accepted=False, spared=True, reason="kept free for another task"
            )
        try:
            refusal = await self.take(offer)
        except UnfitError as error:
            return OfferReply(worker_id=self._worker_id, accepted=False, unfit=True, reason=str(error))
        return OfferReply(worker_id=self._worker_id, accepted=refusal is None, reason=refusal or "")

    async def take(self, offer: Offer) -> str | None:
        """Reserve, then claim: None when the task is this worker's, else why not. Raises UnfitError."""
        if (refusal := self._why_not_here(offer.namespace)) is not None:
            return refusal
        # The job is not needed yet, but so both come by one round trip.
        row, job = await asyncio.gather(
            self._claims.look(offer.namespace, offer.job_id, offer.task),
            self._claims.job(offer.namespace, offer.job_id),
        )
        if row is None or row.revision < offer.revision:
            return "no such record here"
        if (refusal := self._why_resting(promised=self._is_promised(offer))) is not None:
            return refusal
        if job is not None:
            await self._check_folder(job.request)
        key = buckets.attempt_key(offer.namespace, offer.job_id, offer.task, offer.attempt)
        need = needed(row.value.resources)
        kept = reservation_of(offer.namespace, offer.job_id, offer.task)
        if not self._ledger.reserve(key, need, instead_of=kept):
            self._spawn(self.cover_when_possible())
            return self._ledger.why_full(need) or "it has this attempt already"
        if (refusal := await self._gpus.why_held(key)) is not None:
            await self._give_back(key)
            return refusal
        try:
            claimed = await self._claims.claim(row, offer, gpus=self._gpus.uuids(key))
        except BusError:
            # Claimed or not: the record tells when it can be read again. Until then the capacity stays reserved.
            self._spawn(self._settle(offer, key))
            raise
        if claimed is None:
            await self._give_back(key)
            return "another worker has it, or it is no longer wanted"
        if fits(need, self._ledger.free):
            self._classes.soon(lambda: self._spawn(self.cover_when_possible()))
        else:
            self._spawn(self.cover_when_possible())
        self._spawn(self._start(claimed, key, job))
        return None

    async def why_nothing_new(self, namespace: Namespace, job: JobRequest) -> str | None:
        """Why a job cannot be begun here now, whatever room there is."""
        if (refusal := self._why_not_here(namespace) or self._why_resting()) is not None:
            return refusal
        try:
            await self._check_folder(job)
        except UnfitError as error:
            return str(error)
        return None

    def _why_not_here(self, namespace: Namespace) -> str | None:
        if namespace not in self._ledger.total.namespaces:
            return "no such namespace here"
        if fence_clock() >= self._presence.fence_at:
            return "not heard for so long that it may start nothing"
        return None

    def _why_resting(self, *, promised: bool = False) -> str | None:
        if self.is_over:
            return "it is about to end"
        if self._draining.is_asked and not promised:
            return "it drains"
        trouble = self._trouble()
        return f"it takes no work: {trouble}" if trouble is not None else None

    def _is_promised(self, offer: Offer) -> bool:
        """True for a task for which room is kept, see RunRequests."""
        return reservation_of(offer.namespace, offer.job_id, offer.task) in self._ledger

    async def _check_folder(self, job: JobRequest) -> None:
        await check_folder(job.environment, self._worker_id, in_containers=self._in_containers)

    async def _settle(self, offer: Offer, key: str) -> None:
        gpus = self._gpus.uuids(key)
        row = await self._claims.patiently(lambda: self._claims.settle(offer, gpus=gpus))
        if row is not None:
            self._spawn(self.cover_when_possible())
            await self._start(row, key, None)
        else:
            await self._give_back(key)


class ClassOffers:
    """The subscriptions of one worker, changed as its free capacity changes."""

    def __init__(self, bus: Bus, on_offer: Callable[[Offer, str], Awaitable[OfferReply]]) -> None:
        self._bus = bus
        self._on_offer = on_offer
        self._subscriptions: dict[CapacityClass, Subscription] = {}
        self._changing = asyncio.Lock()
        self._later: asyncio.TimerHandle | None = None

    def soon(self, cover: Callable[[], object]) -> None:
        """Have `cover` called in a moment, once however often this is asked meanwhile.

        For room that was given away and leaves room for the like of it: a short task has often brought it back by then,
        and nothing was left and joined again. Until then a larger task may be offered in vain, which is declined.
        """
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(_LAG_S, self._cover_now, cover)

    def _cover_now(self, cover: Callable[[], object]) -> None:
        self._later = None
        cover()

    def close(self) -> None:
        """Forget what was to be done in a moment."""
        if self._later is not None:
            self._later.cancel()

    async def cover(self, free: Callable[[], Capacity]) -> None:
        """Return when the bus knows which classes `free()` covers.

        A class is left by draining: an offer that is on its way is still answered, if only by declining it.
        """
        async with self._changing:
            wanted = classes_covered(free())  # read here: it may have changed while another change was under way
            leaving = [self._subscriptions.pop(each) for each in self._subscriptions.keys() - wanted]
            joining = wanted - self._subscriptions.keys()
            try:
                for each in joining:
                    self._subscriptions[each] = await self._bus.serve(
                        each.subject, Offer, self._on_offer, queue=subjects.DISPATCH_QUEUE
                    )
                if joining:
                    await self._bus.flush()
            finally:  # also when the connection was lost: a forgotten subscription would come back with it
                await self._bus.drain_all(leaving)


def reservation_of(namespace: Namespace, job_id: JobId, task: int) -> str:
    """The key under which room is kept for a task before its first attempt is claimed."""
    return buckets.attempt_key(namespace, job_id, task, 0)


class UnfitError(Exception):
    """This worker lacks what a job names, whatever room it has."""


async def check_folder(environment: EnvironmentConfig, worker_id: WorkerId, *, in_containers: bool) -> None:
    """Return when tasks can run in the folder that is named, if there is one. Raises UnfitError."""
    folder = environment.cwd
    if folder is None or environment.bundle is not None:
        return
    if in_containers:
        raise UnfitError(f"worker {worker_id} runs tasks in containers, which have no folder {folder!r}")
    # In a thread: it may lie on a file system that is slow to answer.
    if not await asyncio.to_thread(_can_be_entered, Path(folder)):
        raise UnfitError(f"worker {worker_id} has no folder {folder!r}, or may not enter it")


def _can_be_entered(folder: Path) -> bool:
    try:
        return folder.is_dir() and os.access(folder, os.X_OK)
    except OSError:
        return False
