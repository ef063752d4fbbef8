"""A worker that runs nothing: it claims as a real one does, and does with the tasks what the test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError
from fluster_bus.messages import (
    Capacity,
    Heartbeat,
    HeartbeatReply,
    JobStatus,
    Namespace,
    Offer,
    OfferReply,
    RecordChanged,
    TaskRecord,
    WorkerId,
    WorkerInfo,
)
from fluster_bus.storage.streams import workers_table
from fluster_bus.storage.tables import Row
from fluster_services.capacity import needed
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.holds import Holds
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.attempts.offers import ClassOffers

GIB = 1 << 30
NAMESPACES = (Namespace("default"),)


@dataclass(frozen=True)
class Plan:
    """How far an attempt goes by itself; it stays there until the test, or a kill wish, ends it."""

    ends: JobStatus | None = JobStatus.SUCCEEDED
    runs: bool = True
    reason: str = "exit code 0"


SUCCEED, STAY_RUNNING, STAY_BUILDING = Plan(), Plan(ends=None), Plan(ends=None, runs=False)
FAIL = Plan(ends=JobStatus.FAILED, reason="exit code 1")


@dataclass
class ToyWorker:
    bus: Bus
    worker_id: WorkerId
    total: Capacity = field(default_factory=lambda: Capacity(cpu=4, memory=8 * GIB))
    plan: Callable[[TaskRecord], Plan] = lambda _record: SUCCEED
    heartbeat_s: float = 1.0
    hold_s: float = 20.0
    namespaces: tuple[Namespace, ...] = NAMESPACES

    def __post_init__(self) -> None:
        self.total = self.total.model_copy(update={"namespaces": self.namespaces})
        self.claims = Claims(self.bus, self.worker_id, self.namespaces)
        self.ledger = Ledger(self.total)
        self.classes = ClassOffers(self.bus, self._on_offer)
        self.held: dict[str, Row[TaskRecord]] = {}  # {attempt key: its record}
        self.claimed: list[str] = []  # attempt keys, in the order claimed; of a gang, holds
        self.starts: list[str] = []  # attempt keys, in the order begun
        self.offers: Counter[str] = Counter()  # {attempt key: how often it was offered}
        self.silent = False
        self.obeys = True
        self.to_stop: set[str] = set()  # attempt keys that it was asked to stop, and did not obey
        self.holds = Holds(self.bus, self.claims, namespaces=self.namespaces, host="127.0.0.1", expiry_s=self.hold_s)
        self.may_prepare = asyncio.Event()  # what a task of a gang needs is there
        self.may_prepare.set()
        self.went: list[tuple[str, int, str | None]] = []  # (attempt key, epoch, address), in the order of go
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> ToyWorker:
        await self.register()
        await self.bus.subscribe(subjects.worker_verb(self.worker_id, "look"), self.on_record_changed)
        await self.bus.serve(subjects.worker_verb(self.worker_id, "offer"), Offer, self._on_offer)
        await self._cover()
        self.bus.spawn(self.beat_forever(), f"{self.worker_id} beats")
        return self

    async def register(self) -> None:
        info = WorkerInfo(
            worker_id=self.worker_id, host="h", pid=1, total=self.total, version="0", python="3", started_at=0
        )
        await workers_table(self.bus).put(self.worker_id, info)

    async def beat_forever(self) -> None:
        while True:
            if not self.silent:
                beat = Heartbeat(worker_id=self.worker_id, free=self.ledger.free, attempts=tuple(self.held))
                try:
                    answer = await self.bus.request(
                        subjects.heartbeats(self.worker_id), beat.to_json(), timeout_s=self.heartbeat_s
                    )
                    self.holds.on_heard()
                    if not HeartbeatReply.from_json(answer.data).registered:
                        await self.register()
                except BusError:
                    pass  # the next one
            await asyncio.sleep(self.heartbeat_s)

    async def _cover(self) -> None:
        while True:
            try:
                await self.classes.cover(lambda: Capacity() if self.silent else self.ledger.free)
                return
            except BusError:
                await self.bus.wait_connected()

    async def vanish(self) -> None:
        """Neither beat nor listen any more, as if the machine were gone."""
        self.silent = True
        await self._cover()

    async def _on_offer(self, offer: Offer, _subject: str) -> OfferReply:
        key = buckets.attempt_key(offer.namespace, offer.job_id, offer.task, offer.attempt)
        self.offers[key] += 1
        if self.worker_id in offer.spared:
            return OfferReply(worker_id=self.worker_id, accepted=False, spared=True)
        row = await self.claims.look(offer.namespace, offer.job_id, offer.task)
        if row is None or row.revision < offer.revision or self.silent:
            return OfferReply(worker_id=self.worker_id, accepted=False)
        if not self.ledger.reserve(key, needed(row.value.resources)):
            return OfferReply(worker_id=self.worker_id, accepted=False)
        try:
            claimed = await self.claims.claim(row, offer)
        except BusError:  # claimed or not: the record tells when it can be read again
            self.bus.spawn(self._settle(offer, key), f"claim of {key}")
            raise
        self._take_up(key, claimed)
        return OfferReply(worker_id=self.worker_id, accepted=claimed is not None)

    async def _settle(self, offer: Offer, key: str) -> None:
        self._take_up(key, await self.claims.patiently(lambda: self.claims.settle(offer)))

    def _take_up(self, key: str, claimed: Row[TaskRecord] | None) -> None:
        if claimed is None:
            self.ledger.release(key)
            return
        self.claimed.append(key)
        self.held[key] = claimed
        self.bus.spawn(self._go(key, claimed), key)

    async def _go(self, key: str, row: Row[TaskRecord]) -> None:
        self.bus.spawn(self._cover(), f"{self.worker_id} listens")
        if row.value.gang and not await self._wait_go(key, row):
            return  # a hold that was let go: nothing was started
        self.starts.append(key)
        plan = self.plan(row.value)
        if plan.runs:
            row = await self.claims.run(row)
            if row.value.kill_requested is not None:
                await self.end(key, JobStatus.KILLED, row.value.kill_requested)
                return
        if plan.ends is not None:
            await self.end(key, plan.ends, plan.reason)

    async def _wait_go(self, key: str, row: Row[TaskRecord]) -> bool:
        off = asyncio.Event()
        self.holds.open(key, row.value, on_off=off.set)
        waits = [asyncio.create_task(event.wait()) for event in (self.may_prepare, off)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        job = None if off.is_set() else await self.holds.wait_go(key, row)
        self.holds.close(key)
        if job is not None:
            self.went.append((key, job.epoch, job.gang_address))
            return True
        if self.held.pop(key, None) is not None:
            self.ledger.release(key)
            await self._cover()
            await self.claims.release(row, "released")
        return False

    async def end(self, key: str, state: JobStatus = JobStatus.SUCCEEDED, reason: str = "exit code 0") -> bool:
        """End an attempt; False when it is not this worker's any more."""
        row = self.held.pop(key, None)
        if row is None:
            return False
        self.ledger.release(key)
        await self._cover()
        return await self.claims.end(row, state, reason, exit_code=0 if state is JobStatus.SUCCEEDED else 1)

    async def on_record_changed(self, delivery: Delivery) -> None:
        look = RecordChanged.from_json(delivery.data)
        row = await self.claims.look(look.namespace, look.job_id, look.task)
        if row is None or self.silent:
            return
        wish = row.value.kill_requested or row.value.restart_requested
        if wish is None:
            return
        key = buckets.attempt_key(look.namespace, look.job_id, look.task, row.value.attempt)
        if self.obeys:
            await self.end(key, JobStatus.KILLED, wish)
        else:
            self.to_stop.add(key)

    def now_held(self) -> list[str]:
        return sorted(self.held)


def started_at_most_once(*workers: ToyWorker) -> bool:
    starts = Counter(key for worker in workers for key in worker.starts)
    return all(count == 1 for count in starts.values())
