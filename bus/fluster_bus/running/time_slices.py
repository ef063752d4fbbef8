"""Pauses in long work, so that whatever else the program does goes on beside it."""

from __future__ import annotations

import asyncio
import time

SLICE_S = 0.002
_ROUNDS = 8  # of the loop: from its arrival to its answer a heartbeat takes about as many


class TimeSlices:
    """For one who goes on for long without waiting for anything."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def begin(self) -> None:
        """What follows has waited for something, so a new slice begins."""
        self._began = time.monotonic()

    async def step(self) -> bool:
        """Go on at once, or after whatever else is ready, when this slice has lasted long enough; whether anything else went on."""
        if time.monotonic() - self._began < SLICE_S:
            return False
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        self._began = time.monotonic()
        return True
