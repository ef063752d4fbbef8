"""Writes of records whose outcome the controller does not know yet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from fluster_services.controller.state.books import JobKey


class PendingWrites:
    """Which jobs have records that are being written.

    The server may have stored such a record, and have republished it to those who watch, before the books have it. An
    answer from the books alone would be older than what was published before the question came.
    """

    def __init__(self) -> None:
        self._of: dict[JobKey, set[asyncio.Future[None]]] = {}

    @contextmanager
    def of(self, keys: Collection[JobKey]) -> Iterator[None]:
        """Records of the jobs are written inside, and applied to the books."""
        done = asyncio.get_running_loop().create_future()
        for key in keys:
            self._of.setdefault(key, set()).add(done)
        try:
            yield
        finally:
            done.set_result(None)
            for key in keys:
                others = self._of[key]
                others.discard(done)
                if not others:
                    del self._of[key]

    async def wait_settled(self, keys: Collection[JobKey], *, until: float) -> None:
        """Return when the books have what was being written of the jobs when this was called.

        Raises TimeoutError at `until` of the loop's clock.
        """
        pending = {done for key in keys for done in self._of.get(key, ())}
        if not pending:
            return
        async with asyncio.timeout_at(until):
            await asyncio.wait(pending)
