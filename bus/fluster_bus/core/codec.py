"""Bytes of what users pass: pickle, cloudpickle where pickle cannot, JSON for callers who speak JSON.

Told apart by the first byte: pickles of protocol 2 and later begin with 0x80, which no JSON text does.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import json
import pickle
import reprlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from fluster_bus.core.errors import InvalidMessageError

# What cloudpickle writes in place of a file's name since 3.1.3, so that pickles do not depend on where a script lies.
_NO_FILE = "<dynamic-code>"
_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce_code_with_file(code: CodeType) -> tuple[object, ...]:
    # A copy of its own for each code object, as of its other texts: which of them are one object is not the same in each process.
    file = "".join(code.co_filename)
    make, args = _reduce_code(code)
    return make, tuple(file if type(each) is str and each == _NO_FILE else each for each in args)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what pickle cannot, functions and classes of scripts and notebooks among it.

    Functions keep the names of their files: tracebacks say where a line is, and show it.
    """

    dispatch_table: ClassVar[ChainMap[type, object]] = ChainMap(
        {CodeType: _reduce_code_with_file}, cloudpickle.Pickler.dispatch_table
    )


def dump_by_value(value: object, file: object) -> None:
    """Write a pickle of `value`. Raises what its parts raise."""
    ByValuePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


def dumps_by_value(value: object) -> bytes:
    """A pickle of `value`. Raises what its parts raise."""
    file = io.BytesIO()
    dump_by_value(value, file)
    return file.getvalue()


PICKLE = b"\x80"  # what a pickle begins with
# The opcode for what a pickle tells by its name. A number: to look for a bytes object, Python tries it as a number first, and
# the exception takes five times as long as the search.
_STACK_GLOBAL = pickle.STACK_GLOBAL[0]
_MAIN_MODULE = b"__main__"
_modules_by_value = cloudpickle.list_registry_pickle_by_value
_SHOWN = reprlib.Repr()  # bounded, and survives values that cannot show themselves
_SHOWN.maxother = 80


def _name_of_missing(_missing: object) -> str:
    return "MISSING"


# Else the fields of a dataclass that travels by value seem to have defaults: it is recognized by its identity, and has no name.
copyreg.pickle(type(dataclasses.MISSING), _name_of_missing)


def encode(value: Any) -> bytes:
    """A pickle of `value`. Raises TypeError, naming what cannot be pickled."""
    plain = _plain_pickle(value)
    if plain is not None:
        return plain
    try:
        return dumps_by_value(value)
    except Exception as error:
        raise cannot_be_pickled(value, error) from error


class _ForeignError(Exception):
    """There is more than plain data."""


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, _foreign: Any) -> Any:
        """Called for what is not a number, text, bytes or container of these."""
        raise _ForeignError


def encode_plain(value: object) -> bytes | None:
    """The pickle of plain data, which can be read everywhere; None where an object of some class is in it."""
    file = io.BytesIO()
    try:
        _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # also what pickle cannot do at all: `encode` tells
        return None
    return file.getvalue()


def _plain_pickle(value: object) -> bytes | None:
    """What pickle itself makes of it, if that means the same everywhere."""
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # any failure means the same: cloudpickle is asked, and raises if it can't
        return None
    return None if mentions_own_modules(data) else data


def reference_to(function: Callable[..., object]) -> bytes | None:
    """The pickle of a function that tells no more than its name, and so stays the same; None for others."""
    is_builtin = isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, ModuleType)
    return _plain_pickle(function) if is_builtin or isinstance(function, FunctionType) else None


def cannot_be_pickled(value: object, error: Exception) -> TypeError:
    """What to raise when cloudpickle raised `error`."""
    return TypeError(
        f"cannot be pickled: {error} (in {_SHOWN.repr(value)}); "
        "pass plain data, or open files, locks and connections where they are used"
    )


def mentions_own_modules(pickled: bytes) -> bool:
    """True for a pickle that may mean another thing, or nothing, in the process that reads it.

    pickle writes a function as a reference to its module. A script's or a notebook's is `__main__`, which is another there,
    and those that the user registered with `cloudpickle.register_pickle_by_value` may not be there: cloudpickle takes
    along by value what is of these.
    """
    if _STACK_GLOBAL not in pickled:  # asked for each argument and result: most name nothing at all
        return False
    return _MAIN_MODULE in pickled or any(name.encode() in pickled for name in _modules_by_value())


def decode(data: bytes | memoryview) -> Any:
    """What `encode` was given. Only for bytes from a sender that may run code here."""
    return pickle.loads(data)


def is_pickle(data: bytes) -> bool:
    """True for a pickle, False for JSON (or for nothing at all, which is a JSON call without arguments)."""
    return data[:1] == PICKLE


def decode_json_call(data: bytes) -> tuple[list[object], dict[str, object]]:
    """Arguments of a call in JSON: `{"args": […], "kwargs": {…}}`, a bare list, or nothing.

    Raises InvalidMessageError with the accepted forms.
    """
    if not data.strip():
        return [], {}
    try:
        call = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(f"the call is not JSON: {error}; {_JSON_CALL}") from error
    if isinstance(call, list):
        return call, {}
    if isinstance(call, dict) and call.keys() <= {"args", "kwargs"}:
        args, kwargs = call.get("args", []), call.get("kwargs", {})
        if isinstance(args, list) and isinstance(kwargs, dict):
            return args, kwargs
    raise InvalidMessageError(f"{data[:200].decode(errors='replace')} is not a call; {_JSON_CALL}")


_JSON_CALL = 'send {"args": [2, 3], "kwargs": {"key": 1}}, a list of arguments, or nothing'


def encode_json_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """What `decode_json_call` reads. Raises TypeError when an argument has no JSON form."""
    try:
        return json.dumps({"args": list(args), "kwargs": dict(kwargs)}, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the arguments have no JSON form: {error}") from error


def encode_json_result(value: object) -> bytes:
    """`{"result": value}`; models and dataclasses are written as objects. Raises TypeError for what has no JSON form."""
    try:
        return json.dumps({"result": value}, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the result has no JSON form: {error}") from error


def _plain(value: object) -> object:
    """Models, dataclasses, dates, sets and the like, as pydantic writes them."""
    from pydantic_core import to_jsonable_python

    if isinstance(value, bytes | bytearray | memoryview):  # some would pass for text, others would not
        raise TypeError(f"{type(value).__name__} is not JSON serializable: give text, or base64.b64encode(…).decode()")
    return to_jsonable_python(value)


def encode_json_error(kind: str, message: str, traceback: str = "", *, advice: str = "") -> bytes:
    """`{"error": {"type", "message", "traceback"}}`, and `"advice"` if there is any on sending it again."""
    error = {"type": kind, "message": message, "traceback": traceback}
    return json.dumps({"error": {**error, "advice": advice} if advice else error}).encode()
