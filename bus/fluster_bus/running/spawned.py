"""Tasks that nobody waits for, but whose faults are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class SpawnedTasks:
    """Those of one connection, whose name stands before what is logged of them."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` until it ends or `close`; an error in it is logged."""
        running = asyncio.create_task(work, name=name)
        self._tasks.add(running)
        running.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s: %s failed", self._owner, task.get_name(), exc_info=task.exception())

    async def close(self) -> None:
        """Cancel those that run, and return when they have ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
