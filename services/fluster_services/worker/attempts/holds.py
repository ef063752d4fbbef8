"""Holds: claims of a gang's tasks, under which nothing starts before the job's record says go for their epoch."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack, aclosing

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core.errors import BusError, RevisionConflictError
from fluster_bus.messages import JobRecord, Namespace, TaskRecord
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.storage.streams import jobs_table
from fluster_bus.storage.tables import Deleted, Row
from fluster_services import gangs
from fluster_services.worker.attempts.claims import Claims

log = logging.getLogger(__name__)


Decision = JobRecord | None  # the job's record that says go; None when the hold is off


class Holds:
    """What one worker holds for gangs, by attempt key. Each hold watches its job's record, from its claim on.

    A hold expires when no controller has answered this worker for `expiry_s`: then the worker itself calls the epoch
    off, which the job's record decides against a go that might come at the same moment.
    """

    def __init__(
        self, bus: Bus, claims: Claims, *, namespaces: tuple[Namespace, ...], host: str, expiry_s: float
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._jobs = {namespace: jobs_table(bus, namespace) for namespace in namespaces}
        self._host = host
        self._expiry_s = expiry_s
        self._heard_at = fence_clock()
        self._deciding: dict[str, asyncio.Task[Decision]] = {}  # {attempt key: what becomes of the hold}

    def serve(self, namespace: Namespace) -> None:
        """Hold for gangs of that namespace, too."""
        self._jobs[namespace] = jobs_table(self._bus, namespace)

    def on_heard(self) -> None:
        """A controller has answered: holds live on."""
        self._heard_at = fence_clock()

    def open(self, key: str, record: TaskRecord, *, on_off: Callable[[], object]) -> None:
        """Begin to watch what is decided about a claim; `on_off` is called when that is off."""
        self.on_heard()  # a controller has just offered it
        deciding = self._deciding[key] = asyncio.create_task(self._decision(record))

        def on_decided(decided: asyncio.Task[Decision]) -> None:
            if not decided.cancelled() and decided.exception() is None and decided.result() is None:
                on_off()

        deciding.add_done_callback(on_decided)

    def is_off(self, key: str) -> bool:
        """True when it is decided that the hold is to be released."""
        deciding = self._deciding.get(key)
        return deciding is not None and deciding.done() and deciding.result() is None

    def close(self, key: str) -> None:
        """The hold is over, or was none."""
        deciding = self._deciding.pop(key, None)
        if deciding is not None:
            deciding.cancel()

    async def wait_go(self, key: str, row: Row[TaskRecord]) -> Decision:
        """The job's record once it says go, None once the hold is off. Tells everybody that this one is ready.

        The first task's port is bound until then, so that no other process is given it meanwhile.
        """
        record = row.value
        with ExitStack() as stack:
            address = record.gang_address
            if record.task == 0:
                listening = stack.enter_context(socket.socket())
                listening.bind(("", int(address.rpartition(":")[2]) if address is not None else 0))
                address = f"{self._host}:{listening.getsockname()[1]}"
            if not record.is_ready and not await self._claims.make_ready(row, gang_address=address):
                return None
            return await asyncio.shield(self._deciding[key])

    async def give_up(self, row: Row[TaskRecord], reason: str) -> bool:
        """Release a hold that this worker cannot keep; False when the job's record said go first."""
        if await self._call_off(row.value) is not None:
            return False
        await self._claims.release(row, f"released: {reason}")
        return True

    # ---- deciding ---------------------------------------------------------------------------------------

    async def _decision(self, record: TaskRecord) -> Decision:
        watching = asyncio.create_task(self._watch(record))
        try:
            while True:
                left_s = self._heard_at + self._expiry_s - fence_clock()
                if left_s <= 0:
                    log.warning("a hold of %s expires: no controller answers", record.job_id)
                    return await self._call_off(record)
                await asyncio.wait({watching}, timeout=left_s)
                if watching.done():
                    return watching.result()
        finally:
            watching.cancel()

    async def _watch(self, record: TaskRecord) -> Decision:
        async with aclosing(self._jobs[record.namespace].watch(record.job_id)) as changes:
            async for change in changes:
                if isinstance(change, Deleted):
                    return None
                if isinstance(change, Row):
                    if change.value.order != record.order:
                        return None  # the job was replaced
                    decision = gangs.decision(change.value, record.epoch)
                    if decision is not None:
                        return change.value if decision is gangs.EpochDecision.GO else None
        raise AssertionError("a watch does not end")

    async def _call_off(self, record: TaskRecord) -> Decision:
        """None once the epoch is off; the job's record when it said go first."""
        table = self._jobs[record.namespace]
        while True:
            try:
                row = await table.get(record.job_id)
                if row is None or row.value.order != record.order:  # what has the id now is not the hold's to decide
                    return None
                wanted = gangs.call_off(row.value, record.epoch)
                if wanted is None:
                    is_go = gangs.decision(row.value, record.epoch) is gangs.EpochDecision.GO
                    return row.value if is_go else None
                await table.update(row.key, wanted, row.revision)
            except RevisionConflictError:
                continue
            except BusError as error:
                log.info("epoch %d of %s cannot be called off yet: %s", record.epoch, record.job_id, error)
                await wait_to_retry(self._bus)
            else:
                return None
