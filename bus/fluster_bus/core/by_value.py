"""cloudpickle, whose functions keep the names of their files: tracebacks say where a line is, and show it."""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

# What cloudpickle writes in place of a file's name since 3.1.3, so that pickles do not depend on where a script lies.
_NO_FILE = "<dynamic-code>"
_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce_code_with_file(code: CodeType) -> tuple[Any, ...]:
    # A copy of its own for each code object, as of its other texts: which of them are one object is not the same in each process.
    file = "".join(code.co_filename)
    make, args = _reduce_code(code)
    return make, tuple(file if type(each) is str and each == _NO_FILE else each for each in args)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what pickle cannot, functions and classes of scripts and notebooks among it."""

    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {CodeType: _reduce_code_with_file}, cloudpickle.Pickler.dispatch_table
    )


def dump(value: Any, file: Any) -> None:
    """Write a pickle of `value`. Raises what its parts raise."""
    ByValuePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


def dumps(value: Any) -> bytes:
    """A pickle of `value`. Raises what its parts raise."""
    file = io.BytesIO()
    dump(value, file)
    return file.getvalue()
