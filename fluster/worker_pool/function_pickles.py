"""Pickles of the functions that a pool is given, which are mostly the same again and again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, ModuleType, NoneType, UnionType
from typing import NamedTuple, cast, get_args, get_origin

import cloudpickle

from fluster_bus.core import codec

_MOST_KEPT = 16  # functions
_MOST_PARTS = 1_000  # of one: to look at more takes as long as to pickle them
_VALUES = frozenset({int, float, complex, str, bytes, bool, NoneType, CodeType})
_IMPORTABLE = (type, FunctionType, BuiltinFunctionType)
_GENERICS = frozenset({GenericAlias, UnionType})
_MISSING = object()  # stands for a global that is not there


class _Kept(NamedTuple):
    function: object
    parts: list[object] | None  # None: it travels by its name
    pickle: bytes


class FunctionPickles:
    """Those of one pool."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # {id of the function, which is kept alive}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, function: Callable[..., object]) -> bytes:
        """The pickle of a function as it is now. Raises TypeError for what cannot be called, or pickled.

        One of a script or a notebook travels by value, with the globals that it names: it is pickled anew unless all that
        it takes along is the same as before, and can't have changed.
        """
        kept = self._kept.get(id(function))
        if kept is not None and _is_as_before(kept):
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


def _is_as_before(kept: _Kept) -> bool:
    if kept.parts is None:
        return _is_importable(kept.function)
    parts = parts_of(kept.function)
    return parts is not None and len(parts) == len(kept.parts) and all(map(operator.is_, parts, kept.parts))


def parts_of(function: object) -> list[object] | None:
    """All that a function takes along when it travels by value; None when any of it could change and be the same object."""
    parts: list[object] = []
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        each = waiting.pop()
        parts.append(each)
        if each is _MISSING or each is NoneType or type(each) in _VALUES or id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) is tuple or type(each) is frozenset:
            waiting += each
        elif isinstance(each, ModuleType):
            if sys.modules.get(each.__name__) is not each or _travels_by_value(each.__name__):
                return None
        elif type(each) is FunctionType and not _is_importable(each):
            if vars(each):
                return None
            parts += (each.__name__, each.__qualname__, each.__module__, each.__doc__)
            waiting += _taken_along(each)
        elif type(each) in _GENERICS:  # list[int], int | None
            waiting += (get_origin(each), *get_args(each))
        elif not _is_importable(each):
            return None
        if len(parts) + len(waiting) > _MOST_PARTS:
            return None
    return parts


def _is_importable(thing: object) -> bool:
    """True for a class or a function that is pickled as its module and name."""
    if not isinstance(thing, _IMPORTABLE):
        return False
    module: object = sys.modules.get(thing.__module__ or "")
    if module is None or thing.__module__ == "__main__":
        return False
    if _travels_by_value(thing.__module__):
        return False
    try:
        return operator.attrgetter(thing.__qualname__)(module) is thing
    except AttributeError:
        return False


def _travels_by_value(module: str) -> bool:
    by_value = cast("set[str]", cloudpickle.list_registry_pickle_by_value())
    return bool(by_value) and any(module == name or module.startswith(f"{name}.") for name in by_value)


def _taken_along(function: FunctionType) -> Iterator[object]:
    yield function.__code__
    yield function.__defaults__
    for values in (function.__kwdefaults__ or {}, function.__annotations__):
        for name, value in values.items():
            yield name
            yield value
    names = frozenset(_names_in(function.__code__))
    for value in _variables(function, names):
        yield value
        if isinstance(value, ModuleType) and "__path__" in vars(value):
            yield from _modules_within(value.__name__, names)


def _variables(function: FunctionType, names: Iterable[str]) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            yield _MISSING
    for name in names:
        yield function.__globals__.get(name, _MISSING)


def _modules_within(package: str, names: Collection[str]) -> Iterator[object]:
    """Those that are imported by now and can be meant: the function is given these as well."""
    for path in map(f"{package}.".__add__, names):
        module = sys.modules.get(path)
        if module is not None:
            yield module
            yield from _modules_within(path, names)


def _names_in(code: CodeType) -> Iterator[str]:
    """What may be names of globals, of the functions within as well."""
    yield from code.co_names
    for const in code.co_consts:
        if type(const) is CodeType:
            yield from _names_in(const)
