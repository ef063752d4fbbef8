"""The event loop of every process and thread here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from fluster_bus.running.standard_streams import open_closed_streams

if TYPE_CHECKING:
    import asyncio

HAS_UVLOOP = sys.platform != "win32"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What an asyncio.Runner is to make its loop with: uvloop where there is one; None stands for asyncio's own."""
    if not HAS_UVLOOP:
        return None
    import uvloop

    open_closed_streams()
    return uvloop.new_event_loop
