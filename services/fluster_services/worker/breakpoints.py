"""What `breakpoint()` does in a task, whose standard input is empty: a debugger there would end at once, and say nothing."""

from __future__ import annotations

import os
import sys
from typing import Any


def refuse_breakpoint(*args: Any, **kwargs: Any) -> Any:
    """Raise RuntimeError, which tells how to debug; where PYTHONBREAKPOINT names a debugger, that is called."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100 - it is what the user asked for
    raise RuntimeError(
        "breakpoint(): a task has no terminal. Call the function in your own program, where a debugger has one; or give the job "
        "env_vars={'PYTHONBREAKPOINT': 'module.function'} of a debugger that listens on a port, such as debugpy, or '0' to pass "
        "over breakpoints"
    )
