"""Exceptions that were raised in another process, raised again here."""

from __future__ import annotations

import os

from fluster_bus.core import codec
from fluster_bus.core.errors import FlusterError

_DEBUG_VARIABLE = "FLUSTER_DEBUG"
_BEGINNING = "raised "  # of the note


def shave(error: BaseException) -> None:
    """Take Fluster's own frames from the traceback of an error that a blocking call raises, where they tell nothing.

    That is so for what `restored` gave, whose note has the remote traceback, and for Fluster's own errors, whose text says
    all. The frames of those stay with FLUSTER_DEBUG=1.
    """
    is_remote = any(note.startswith(_BEGINNING) and ":\n" in note for note in getattr(error, "__notes__", ()))
    if is_remote or (isinstance(error, FlusterError) and not os.environ.get(_DEBUG_VARIABLE)):
        error.__traceback__ = None


def restored(pickled: bytes | None, otherwise: Exception, *, traceback: str, where: str) -> Exception:
    """The exception that was pickled, else `otherwise`, with the traceback of where it was raised as a note."""
    error = otherwise
    if pickled is not None:
        try:
            decoded = codec.decode(pickled)
        except Exception as broken:
            kind = type(broken)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            error.add_note(f"it could not be read as itself here: {name}: {broken}")
        else:
            # SystemExit and its like would end whoever asked.
            error = decoded if isinstance(decoded, Exception) else error
    if traceback:
        error.add_note(f"{_BEGINNING}{where}:\n{traceback}")
    return error
