"""Carries the offers of waiting tasks to the workers, several at once. What is offered when, and to whom: see dispatch.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core.errors import BusError, NoRespondersError
from fluster_bus.messages import Capacity, OfferReply
from fluster_services.controller.scheduling.dispatch import Ask, Dispatch
from fluster_services.controller.scheduling.order import Position

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.config import Timing
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.state.worker_index import WorkerIndex

log = logging.getLogger(__name__)

_OFFER_TIMEOUT_S = 2.0  # an answer takes milliseconds: after this the worker has probably died with the offer
_TAKEN_AT_ONCE = 4


class Offers:
    """The dispatch's hands, and its clock."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        job_index: JobIndex,
        worker_index: WorkerIndex,
        timing: Timing,
        *,
        on_room: Callable[[], None],
    ) -> None:
        """`on_room` is called when some worker has room again, for those that are not offered here: gangs."""
        self.on_room = on_room
        self._bus = bus
        self._seat = seat
        self._wake = asyncio.Event()
        self.dispatch = Dispatch(
            job_index,
            worker_index,
            self,
            reserve_after_s=timing.reserve_after_s,
            unfit_retry_s=timing.unfit_retry_s,
        )

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, action: Callable[[], None], /) -> None:
        asyncio.get_running_loop().call_later(delay_s, action)

    def on_dispatchable(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Offer what waits, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                taken = self.dispatch.take(_TAKEN_AT_ONCE)
                for position, need in taken:
                    tasks.create_task(self._offer(position, need))
                if len(taken) == _TAKEN_AT_ONCE:
                    self._wake.set()
                    await asyncio.sleep(0)  # each has to be found among all that is waited for

    async def _offer(self, position: Position, need: Capacity) -> None:
        try:
            await self._seat.wait_sure()
            asking = self.dispatch.offer(position, need)
            ask = next(asking, None)
            while ask is not None:
                answer = await self._answer(ask)
                try:
                    ask = asking.send(answer)
                except StopIteration:
                    ask = None
        except BusError as error:
            log.warning("the offer of %s.%d is made again: %s", position.job.job_id, position.task, error)
            await wait_to_retry(self._bus)
            self.dispatch.on_unanswered(position, need)

    async def _answer(self, ask: Ask) -> OfferReply | None:
        """A worker's answer to the offer; None when no worker listens."""
        try:
            answer = await self._bus.request(ask.subject, ask.offer.to_json(), timeout_s=_OFFER_TIMEOUT_S)
        except NoRespondersError:
            return None
        return OfferReply.from_json(answer.data)
