"""Which offers a worker listens for, and whether it has the folder that a job names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.subscription import Subscription
from fluster_bus.core import subjects
from fluster_bus.messages import Capacity, EnvironmentConfig, Offer, OfferReply, WorkerId
from fluster_services.capacity import CapacityClass, classes_covered

_LAG_S = 0.1


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
            leaving = [self._subscriptions.pop(each) for each in list(self._subscriptions) if each not in wanted]
            joining = [each for each in wanted if each not in self._subscriptions]
            try:
                for each in joining:
                    self._subscriptions[each] = await self._bus.serve(
                        each.subject, Offer, self._on_offer, queue=subjects.DISPATCH_QUEUE
                    )
                if joining:
                    await self._bus.flush()
            finally:  # also when the connection was lost: a subscription that nobody remembers would come back with it
                await asyncio.gather(*(subscription.drain() for subscription in leaving))


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
