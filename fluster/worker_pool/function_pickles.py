"""Pickles of the functions that a pool is given, which are mostly the same again and again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

import cloudpickle

from fluster_bus import codec

_MOST_KEPT = 16  # functions
_MOST_PARTS = 1_000  # of one: to look at more takes as long as to pickle them
_VALUES = frozenset({int, float, complex, str, bytes, bool, NoneType, CodeType})
_MISSING = object()  # stands for a global that is not there


class _Kept(NamedTuple):
    function: object
    parts: list[object] | None  # None: it travels by its name, and stays what it is
    pickle: bytes


class FunctionPickles:
    """Those of one pool."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # {id of the function, which is kept alive}

    def of(self, function: Callable[..., Any]) -> bytes:
        """The pickle of a function as it is now. Raises TypeError for what cannot be called, or pickled.

        One of a script or a notebook travels by value, with the globals that it names: it is pickled anew unless all that
        it takes along is the same as before, and can't have changed.
        """
        kept = self._kept.get(id(function))
        if kept is not None and (kept.parts is None or _are_same(kept.parts, parts_of(function))):
            return kept.pickle
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called: pass the function itself, and its arguments behind it")
        reference = codec.reference_to(function)
        parts = parts_of(function) if reference is None else None
        pickle = codec.encode(function) if reference is None else reference
        if reference is not None or parts is not None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[id(function)] = _Kept(function, parts, pickle)
        return pickle


def _are_same(parts: list[object], others: list[object] | None) -> bool:
    return others is not None and len(parts) == len(others) and all(map(operator.is_, parts, others))


def parts_of(function: object) -> list[object] | None:
    """All that a function takes along when it travels by value; None when any of it could change and be the same object."""
    parts: list[object] = []
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        each = waiting.pop()
        parts.append(each)
        if each is _MISSING or type(each) in _VALUES or id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) is tuple or type(each) is frozenset:
            waiting += each
        elif isinstance(each, ModuleType):
            if sys.modules.get(each.__name__) is not each:
                return None
        elif type(each) is FunctionType and not _is_importable(each):
            if vars(each):
                return None
            waiting += _taken_along(each)
        elif not _is_importable(each):
            return None
        if len(parts) + len(waiting) > _MOST_PARTS:
            return None
    return parts


def _is_importable(thing: object) -> bool:
    """True for a class or a function that is pickled as its module and name."""
    if not isinstance(thing, type | FunctionType | BuiltinFunctionType):
        return False
    module: Any = sys.modules.get(thing.__module__ or "")
    if module is None or thing.__module__ == "__main__":
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    if any(thing.__module__ == name or thing.__module__.startswith(f"{name}.") for name in by_value):
        return False
    try:
        return operator.attrgetter(thing.__qualname__)(module) is thing
    except AttributeError:
        return False


def _taken_along(function: FunctionType) -> Iterator[object]:
    yield function.__code__
    yield function.__defaults__
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name
        yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            yield _MISSING
    for name in _names_in(function.__code__):
        yield function.__globals__.get(name, _MISSING)


def _names_in(code: CodeType) -> Iterator[str]:
    """What may be names of globals, of the functions within as well."""
    yield from code.co_names
    for const in code.co_consts:
        if type(const) is CodeType:
            yield from _names_in(const)
