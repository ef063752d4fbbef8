"""Exceptions that cannot be pickled as themselves: they travel as instances of RemoteError and of their own class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluster.errors import RemoteError
from fluster_bus.core import codec

_OS_ERRORS_OWN = ("errno", "strerror", "filename", "filename2")


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
