"""The command `fluster`."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]

_INTERRUPTED = 130  # as ExitCode has it


def main() -> None:
    """Run the command that the shell was given."""
    try:
        _open_closed_streams()
        from fluster.cli.app import main as run  # it takes a while, in which Ctrl-C ends the command too

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _open_closed_streams() -> None:
    """What the shell closed (`>&-`) is nothing to read from or write to: else other files get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
