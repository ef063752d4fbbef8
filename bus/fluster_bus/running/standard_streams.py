"""The streams that a process is started with."""

from __future__ import annotations

import os
import sys


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
