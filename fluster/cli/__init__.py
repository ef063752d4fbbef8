"""The command `fluster`."""

from __future__ import annotations

import gc
import sys

from fluster_bus.running.event_loops import open_closed_streams

__all__ = ["main"]

_INTERRUPTED = 130  # as ExitCode has it


def main() -> None:
    """Run the command that the shell was given."""
    try:
        open_closed_streams()
        gc.disable()  # nothing of a module is garbage
        from fluster.cli.app import main as run  # it takes a while, in which Ctrl-C ends the command too

        gc.freeze()
        gc.enable()
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
