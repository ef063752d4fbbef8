"""Ends the jobs of programs that have ended.

A program speaks through a helper process that sees its end, however it comes. So its end is reported, and only silence of the
helper itself, as when the machine is gone, lasts until the lease is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from fluster_bus.messages import JobRecord, Namespace, OwnerReply, OwnerRequest, TaskRecord
from fluster_bus.running.coroutines import wait_set
from fluster_bus.storage.submissions import submission_progress
from fluster_services import job_lifecycle
from fluster_services.controller.state.job_index import JobIndex, JobKey

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.record_writer import RecordWriter
    from fluster_services.controller.leading.seat import Seat

log = logging.getLogger(__name__)

_LOOKS_IN_A_LEASE = 20
_LONGEST_PAUSE_S = 5.0
_LATE_S = 2.0
MAX_OWNERS = 10_000  # of a namespace
_REMEMBERED = 10_000  # of those of a namespace that have ended: what they submitted last may still be on its way


class Owner(NamedTuple):
    """A program that owns jobs of a namespace."""

    namespace: Namespace
    name: str


class OwnerLeases:
    """When each owner was last heard. Times are seconds of a monotonic clock."""

    def __init__(self, lease_s: float, *, most: int = MAX_OWNERS) -> None:
        self.lease_s = lease_s
        self._most = most
        self._heard_at: dict[Owner, float] = {}
        self._count: Counter[Namespace] = Counter()  # of those
        # {namespace: {owner: what was submitted last, by any program, when its end was reported; None until that is known}}
        self._ended: dict[Namespace, OrderedDict[Owner, int | None]] = {}

    def expect(self, owner: Owner, *, now: float) -> None:
        """A record names it: it has its full time to be heard."""
        if owner not in self._heard_at:
            self._heard_at[owner] = now
            self._count[owner.namespace] += 1

    def why_refused(self, owner: Owner) -> str | None:
        """Why nothing of that owner may be recorded; None when it may."""
        if owner in self._heard_at or self._count[owner.namespace] < self._most:
            return None
        return (
            f"{self._most:,} programs own jobs in namespace {owner.namespace!r}, and {owner.name!r} would be one more: "
            "end some of them, or submit with detached=True what is to outlive its program"
        )

    def on_heard(self, owner: Owner, *, now: float) -> None:
        """It lives. Of one that no record names nothing is noted."""
        if owner in self._heard_at:
            self._heard_at[owner] = now

    def on_end(self, owner: Owner) -> None:
        """It has ended, which it does once."""
        ended = self._ended.setdefault(owner.namespace, OrderedDict())
        ended.setdefault(owner)
        ended.move_to_end(owner)
        while len(ended) > _REMEMBERED:
            ended.popitem(last=False)

    def has_ended(self, owner: Owner) -> bool:
        return owner in self._ended.get(owner.namespace, ())

    def on_order(self, owner: Owner, last: int) -> None:
        """Of all submissions `last` is the newest. The first time that this is said of one that has ended counts."""
        ended = self._ended.get(owner.namespace)
        if ended is not None and owner in ended and ended[owner] is None:
            ended[owner] = last

    def may_come(self, owner: Owner, *, settled: int) -> bool:
        """Whether a submission of one that has ended may still be recorded; those before `settled` were, or were refused."""
        ended = self._ended.get(owner.namespace)
        return settled <= ((ended.get(owner) if ended is not None else None) or 0)

    def on_interruption(self, *, now: float) -> None:
        """The bus or the controller was away, so nothing could be heard: all have their full time again."""
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def forget(self, owner: Owner) -> None:
        """No record names it any longer."""
        if self._heard_at.pop(owner, None) is not None:
            self._count[owner.namespace] -= 1

    def over(self, *, now: float) -> dict[Owner, str]:
        """The owners whose jobs are to end, and why."""
        found = {}
        for owner, heard_at in self._heard_at.items():
            if self.has_ended(owner):
                found[owner] = f"the program that owns it, {owner.name}, has ended"
            elif now - heard_at >= self.lease_s:
                found[owner] = f"the program that owns it, {owner.name}, was not heard for {self.lease_s:g} s"
        return found


class Owners:
    """The programs that own jobs, and those jobs, as far as they have not ended."""

    def __init__(self, bus: Bus, seat: Seat, job_index: JobIndex, writer: RecordWriter, *, lease_s: float) -> None:
        self._bus = bus
        self._seat = seat
        self._job_index = job_index
        self._writer = writer
        self._leases = OwnerLeases(lease_s)
        self._jobs: dict[Owner, set[JobKey]] = {}
        self._owner_of: dict[JobKey, Owner] = {}
        self._wake = asyncio.Event()

    def on_record(self, key: JobKey, record: JobRecord | TaskRecord) -> None:
        """A record was read or written."""
        if isinstance(record, TaskRecord):
            return
        name = record.request.owner
        if name is None or record.is_over:
            self.forget(key)
            return
        owner = Owner(key.namespace, name)
        if self._owner_of.get(key) != owner:
            self.forget(key)
            self._owner_of[key] = owner
            self._jobs.setdefault(owner, set()).add(key)
            self._leases.expect(owner, now=time.monotonic())
            if self._leases.has_ended(owner):
                self._wake.set()

    def why_refused(self, job: JobRecord) -> str | None:
        """Why the job cannot be recorded, of a program that owns none yet; None when it can."""
        return None if job.request.owner is None else self._leases.why_refused(Owner(job.namespace, job.request.owner))

    def forget(self, key: JobKey) -> None:
        """A job has ended, or has another owner."""
        owner = self._owner_of.pop(key, None)
        if owner is None:
            return
        self._jobs[owner].discard(key)
        if not self._jobs[owner]:
            del self._jobs[owner]
            self._leases.forget(owner)

    async def on_told(self, namespace: Namespace, request: OwnerRequest) -> OwnerReply:
        """An owner lives, or has ended."""
        owner, is_any_coming = Owner(namespace, request.owner), False
        if request.ended:
            self._leases.on_end(owner)
            await self._end_jobs()
            # A controller that leads later does not know of this end: so it is reported again until all is recorded.
            order = await submission_progress(self._bus)
            self._leases.on_order(owner, order.last)
            is_any_coming = self._leases.may_come(owner, settled=order.settled)
        else:
            self._leases.on_heard(owner, now=time.monotonic())
        unfinished = len(self._jobs.get(owner, ())) + is_any_coming
        return OwnerReply(lease_s=self._leases.lease_s, unfinished=unfinished)

    async def run(self) -> None:
        """Look who was silent for too long, until cancelled."""
        bus, pause_s = self._bus, min(self._leases.lease_s / _LOOKS_IN_A_LEASE, _LONGEST_PAUSE_S)
        bus.on_reconnect(self._on_interruption)
        self._on_interruption()
        while True:
            started = time.monotonic()
            await wait_set(self._wake, pause_s)
            self._wake.clear()
            if time.monotonic() - started > pause_s + _LATE_S:
                self._on_interruption()  # this process itself was stopped, or the machine slept
            if bus.connected:
                await self._seat.wait_sure()
                await self._end_jobs()

    def _on_interruption(self) -> None:
        self._leases.on_interruption(now=time.monotonic())

    async def _end_jobs(self) -> None:
        job_index = self._job_index
        for owner, reason in self._leases.over(now=time.monotonic()).items():
            ended = []
            for key in self._jobs.get(owner, ()):
                entry = job_index.get(key)
                if entry is None or entry.job is None or entry.job.value.replacement is not None:
                    continue  # one that is replaced is being stopped, and the job that takes its place is another's
                killed = job_lifecycle.request_job_kill(entry.job.value, reason=reason)
                if killed is not None:
                    ended.append((killed, entry.job.revision))
            if ended:
                log.info("%d jobs are ended: %s", len(ended), reason)
                await self._writer.write_verdicts(ended)
