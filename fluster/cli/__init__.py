"""The command `fluster`."""

from __future__ import annotations

import sys

from fluster_bus.running.event_loops import open_closed_streams

__all__ = ["main"]

_INTERRUPTED = 130  # as ExitCode has it


def main() -> None:
    """Run the command that the shell was given."""
    try:
        open_closed_streams()
        from fluster.cli.app import main as run  # it takes a while, in which Ctrl-C ends the command too

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
