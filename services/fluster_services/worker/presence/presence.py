"""How a worker is known: its registration, its place among the services, its heartbeats, and the request that it leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.connection.services_api import Announcement, ServedEndpoint
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, StreamNotFoundError
from fluster_bus.core.version import VERSION
from fluster_bus.messages import Capacity, Heartbeat, HeartbeatReply, WorkerId, WorkerInfo
from fluster_bus.messages.nodes import NodeInfo
from fluster_bus.messages.parts.wire_range import SPOKEN, why_apart
from fluster_bus.running.coroutines import retried, wait_set
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.storage.streams import workers_table
from fluster_services.config import Timing

log = logging.getLogger(__name__)

_CONTROLLER_TIMEOUT_S = 60.0


class Presence:
    """One worker as others know it. `free` and `attempts` tell what its heartbeats say.

    `renew(fence_in_s)` is called after each beat that was heard: what the worker runs is fenced from the sending of the last.
    `on_apart` hears why this worker and the controller that answers have no version of the wire in common, when that is
    another than before; None when they have one. `on_unknown` is called when the controller did not know this worker: it may have given
    it up, or know its records from another time.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        *,
        total: Capacity,
        timing: Timing,
        free: Callable[[], Capacity],
        attempts: Callable[[], Collection[str]],
        is_detecting: bool = False,
        node: NodeInfo | None = None,
        renew: Callable[[float], None],
        on_apart: Callable[[str | None], Awaitable[None]],
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._timing = timing
        self._free = free
        self._attempts = attempts
        self._renew = renew
        self._on_apart = on_apart
        self._on_unknown = on_unknown
        self._apart: str | None = None
        self._due = asyncio.Event()  # a beat is sent before its time
        self.heard_at = fence_clock()  # when the last sign of life that was heard was sent
        self._info = WorkerInfo(
            worker_id=worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            total=total,
            version=VERSION,
            python=platform.python_version(),
            started_at=time.time(),
            worker_timeout_s=timing.worker_timeout_s,
            detecting=is_detecting,
            wire=SPOKEN,
            node=node,
        )

    @property
    def fence_at(self) -> float:
        """When what this worker runs is stopped if nothing more is heard of it, by the fence clock."""
        return self.heard_at + self._timing.fence_after_s

    async def say_draining(self) -> None:
        """Be known as one that takes nothing new."""
        self._info = self._info.model_copy(update={"draining": True})
        await self.register()

    def set_trouble(self, trouble: str | None) -> None:
        """Be known, once registered again, as one that takes nothing because of `trouble`; None: as one that does."""
        self._info = self._info.model_copy(update={"trouble": trouble or ""})

    async def say_detected(self, total: Capacity, node: NodeInfo) -> None:
        """Be known with all that this worker and its machine have."""
        self._info = self._info.model_copy(update={"total": total, "detecting": False, "node": node})
        await self.register()

    def set_withheld(self, why: Sequence[str], counts: tuple[tuple[str, int], ...], node: NodeInfo) -> None:
        """Be known, once registered again, as one that gives so many GPUs, (model, count), to no task, and why."""
        self._info = self._info.model_copy(update={"withheld": tuple(why), "withheld_devices": counts, "node": node})

    async def say_total(self, total: Capacity) -> None:
        """Be known with all that this worker has, and serves, by now."""
        self._info = self._info.model_copy(update={"total": total})
        await self.register()

    async def deregister(self) -> None:
        """Leave the table of workers."""
        await workers_table(self._bus).delete(self._worker_id)

    async def register(self) -> None:
        """Put the worker into the table of workers."""
        table = workers_table(self._bus)

        async def put(_left_s: float) -> float:
            sent = fence_clock()
            await table.put(self._worker_id, self._info)
            return sent

        # On a new cluster the controller is making the table at this moment.
        self.heard_at = await retried(
            put,
            on=(StreamNotFoundError,),
            timeout_s=_CONTROLLER_TIMEOUT_S,
        )

    async def announce(self) -> None:
        """Be listed among the services."""
        endpoints = [
            ServedEndpoint(verb, subjects.worker_verb(self._worker_id, verb)) for verb in subjects.WORKER_VERBS
        ]
        await Announcement(
            "fluster-worker",
            self._worker_id,
            self._info.version,
            description="Runs tasks of a Fluster cluster",
            endpoints=endpoints,
        ).serve(self._bus)

    @property
    def was_heard_lately(self) -> bool:
        """Whether what is started now has the better part of its time before the fence."""
        return fence_clock() - self.heard_at < self._timing.fence_after_s / 2

    async def wait_heard(self) -> None:
        """Return when this worker was heard lately. Raises ClosedError."""
        while not self.was_heard_lately and not await self.beat():
            await wait_to_retry(self._bus, self._timing.heartbeat_s)

    async def beat_forever(self) -> None:
        """Tell again and again that this worker lives, and at once when its connection is back."""
        self._bus.on_reconnect(self._due.set)
        while True:
            started = time.monotonic()
            self._due.clear()
            await self.beat()
            await wait_set(self._due, self._timing.heartbeat_s - (time.monotonic() - started))

    async def beat(self) -> bool:
        """Tell once that this worker lives; whether it was heard."""
        sent = fence_clock()
        beat = Heartbeat(worker_id=self._worker_id, free=self._free(), attempts=tuple(self._attempts()))
        subject = subjects.heartbeats(self._worker_id)
        try:
            answer = await self._bus.request(subject, beat.to_json(), timeout_s=self._timing.heartbeat_s)
            reply = HeartbeatReply.from_json(answer.data)
            if not reply.registered:
                await self.register()
                self._on_unknown()
            await self._compare(reply)
        except BusError as error:
            log.info("a heartbeat was not heard: %s", error)
            return False
        self.heard_at = sent
        self._renew(self.fence_at - fence_clock())
        return True

    async def _compare(self, reply: HeartbeatReply) -> None:
        here = f"worker {self._worker_id} (fluster {self._info.version})"
        apart = why_apart(reply.wire, "the cluster's controller", here=here)
        if apart != self._apart:
            self._apart = apart
            await self._on_apart(apart)


class Draining:
    """Whether a worker is to leave, and until when it waits for what it has. Made before there is an event loop."""

    def __init__(self) -> None:
        self.is_asked = False
        self._deadline: float | None = None
        self._changed = asyncio.Event()

    def ask(self, timeout_s: float | None) -> None:
        """Have the worker leave; after `timeout_s` it hands back what still runs. Asked again, the shorter time counts."""
        self.is_asked = True
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._changed.set()

    async def wait_asked(self) -> None:
        while not self.is_asked:
            await self._changed.wait()

    async def wait_done(self, work: set[asyncio.Task[Any]]) -> bool:
        """True once `work`, which may grow meanwhile, is empty; False when the time is over."""
        while work:
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            left_s = None if self._deadline is None else self._deadline - time.monotonic()
            try:
                if left_s is not None and left_s <= 0:
                    return False
                await asyncio.wait({*work, changed}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
        return True
