"""How a forked child ends: by itself, never in the frames that it was forked in. Imports nothing that takes time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(body: Callable[[], object]) -> NoReturn:
    """Run `body` as all that this child does, and end with the status that it leaves with, or with 1 and what it raised.

    What the parent has registered for its own end is not run.
    """
    status = 1
    try:
        try:
            body()
            status = 0
        except SystemExit as leaving:
            status = _status_of(leaving)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status_of(leaving: SystemExit) -> int:
    """As Python has it: the number, or 1 and the text."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1
