"""Errors of other processes: kindred classes for those that cannot be pickled as themselves, and all of them made readable.

Kindred ones travel as instances of RemoteError and of their own class. Readable ones are raised again with their traceback as a note,
from the user's code on, with a remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

from fluster.errors import RemoteError
from fluster_bus.core import codec
from fluster_bus.core.errors import FlusterError

_OS_ERRORS_OWN = ("errno", "strerror", "filename", "filename2")
_DEBUG_VARIABLE = "FLUSTER_DEBUG"
_BEGINNING = "raised "  # of the note
# What stands between Fluster and user code: its own packages, and those of Python that it runs on.
_OURS = frozenset({"fluster", "fluster_bus", "fluster_services", "asyncio", "concurrent", "threading"})
_USES_FLUSTER = "fluster.demo"


def kindred(error: Exception, *, type_name: str, message: str, traceback: str) -> RemoteError | None:
    """An error that `except` finds by the class of `error`, too, with those of its attributes that can be pickled.

    Many exceptions are pickled and cannot be made again, since their constructors take other arguments than they keep:
    here none is called. None where no such object can be made.
    """
    attributes = {name: value for name, value in _attributes(error).items() if _travels(value)}
    arguments = error.args if _travels(error.args) else (message,)
    try:
        return kindred_again(type(error), (type_name, message, traceback), arguments, attributes)
    except Exception:  # a class may do what it likes when it is inherited from
        return None


def kindred_again(
    kind: type[Exception], text: tuple[str, str, str], arguments: tuple[Any, ...], attributes: Mapping[str, Any]
) -> RemoteError:
    """The same where it is unpickled. `text` is its type, message and traceback."""
    type_name, message, traceback = text

    def say(_self: RemoteError) -> str:
        return message

    def reduce(_self: RemoteError) -> tuple[object, ...]:
        return kindred_again, (kind, text, arguments, attributes)

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    metaclass: Any = type(kind)
    both: Any = metaclass(kind.__name__, (RemoteError, kind), {**named, "__str__": say, "__reduce__": reduce})
    # Of the class in C below it, since a constructor of the user's may want anything.
    native: Any = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    made: RemoteError = native.__new__(both)
    # Not by RemoteError's constructor: after it comes that of the other class.
    vars(made).update({"type_name": type_name, "message": message, "traceback": traceback})
    made.args = arguments
    for name, value in attributes.items():
        BaseException.__setattr__(made, name, value)
    return made


def _attributes(error: Exception) -> dict[str, object]:
    own = {name: value for name, value in vars(error).items() if name != "__notes__"}
    if isinstance(error, OSError):  # its own are in no dictionary
        own |= {name: getattr(error, name) for name in _OS_ERRORS_OWN if getattr(error, name, None) is not None}
    return own


def _travels(value: object) -> bool:
    try:
        codec.decode(codec.encode(value))
    except Exception:
        return False
    return True


def shave(error: BaseException) -> None:
    """Take Fluster's own frames from the traceback of an error that a blocking call raises, where they tell nothing.

    That is so for what `restored` gave, whose note has the remote traceback, and for Fluster's own errors, whose text
    says all. The frames of those stay with FLUSTER_DEBUG=1.
    """
    is_remote = any(note.startswith(_BEGINNING) and ":\n" in note for note in getattr(error, "__notes__", ()))
    if is_remote or (isinstance(error, FlusterError) and not os.environ.get(_DEBUG_VARIABLE)):
        error.__traceback__ = None


def type_name(error: BaseException, *, bare: Collection[str] = ("builtins",)) -> str:
    """`ValueError`, `package.module.TheirError`: without the module where that is one of `bare`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in bare else f"{kind.__module__}.{kind.__qualname__}"


def message_of(error: BaseException) -> str:
    """`str(error)`, also of one whose `__str__` fails."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its __str__ raised {type_name(broken)})"


def pickled(error: BaseException | None, *, dump: Callable[[BaseException], bytes], most_bytes: int) -> bytes | None:
    """What `dump` makes of the error; None when that cannot be read again, as many fail only there, or is too large."""
    try:
        data = None if error is None else dump(error)
        return data if data and len(data) <= most_bytes and isinstance(codec.decode(data), BaseException) else None
    except Exception:
        return None


def pickled_or_kindred(
    error: BaseException,
    *,
    text: tuple[str, str, str],
    dump: Callable[[BaseException], bytes],
    most_bytes: int,
) -> bytes | None:
    """As `pickled`; where the error has no such pickle, that of a kindred one with `text`: its type, message and traceback."""
    data = pickled(error, dump=dump, most_bytes=most_bytes)
    if data is None and isinstance(error, Exception):
        name, message, traceback = text
        found = kindred(error, type_name=name, message=message, traceback=traceback)
        data = pickled(found, dump=dump, most_bytes=most_bytes)
    return data


def restored(pickled: bytes | None, otherwise: Exception, *, traceback: str, where: str) -> Exception:
    """The exception that was pickled, else `otherwise`, with the traceback of where it was raised as a note."""
    error = otherwise
    if pickled is not None:
        try:
            decoded = codec.decode(pickled)
        except Exception as broken:
            error.add_note(f"it could not be read as itself here: {type_name(broken)}: {broken}")
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
