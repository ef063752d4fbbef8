"""Makes errors of other processes readable: raised again with their traceback as a note, from the user's code on, with
a remedy.
"""

from __future__ import annotations

import os
from types import TracebackType

from fluster_bus.core import codec
from fluster_bus.core.errors import FlusterError

_DEBUG_VARIABLE = "FLUSTER_DEBUG"
_BEGINNING = "raised "  # of the note
# What stands between Fluster and user code: its own packages, and those of Python that it runs on.
_OURS = frozenset({"fluster", "fluster_bus", "fluster_services", "asyncio", "concurrent", "threading"})
_USES_FLUSTER = "fluster.demo"


def shave(error: BaseException) -> None:
    """Take Fluster's own frames from the traceback of an error that a blocking call raises, where they tell nothing.

    That is so for what `restored` gave, whose note has the remote traceback, and for Fluster's own errors, whose text
    says all. The frames of those stay with FLUSTER_DEBUG=1.
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
            # SystemExit and its like would end the process that asked.
            error = decoded if isinstance(decoded, Exception) else error
    if traceback:
        error.add_note(f"{_BEGINNING}{where}:\n{traceback}")
    return error


def from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not one of ours; the whole of it when all are."""
    frame = trace
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _OURS or module.startswith(_USES_FLUSTER):
            return frame
        frame = frame.tb_next
    return trace


def add_remedy(error: ModuleNotFoundError, needs: str, *, sent: str) -> None:
    """Add to an error what can be done: `needs` names what has to have the module, and `sent` is when that is
    pickled.
    """
    module = (error.name or "").partition(".")[0]
    error.msg = (
        f"{error}: {needs} needs it, and the worker has none. If it is yours, pass its folder as workspace=…, define "
        "the "
        f"callable in the script that you start, or call cloudpickle.register_pickle_by_value({module}) before "
        f"{sent}; if "
        "it is a package, name it in pip_packages=…"
    )
    error.args = (error.msg,)  # by which it is pickled
