"""The event loop of every process and thread here, and the standard streams that it may take over."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

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


def open_closed_streams() -> None:
    """What the shell closed (`<&-`, `>&-`) is nothing to read from or write to.

    Else other files get its number: what is printed goes there, and libuv ends a process that closes one of these itself.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
