"""Keeping what is imported in the memory that forked processes share.

A page is shared until somebody writes to it, and Python writes to each object that it so much as looks at: its count of references. CPython
has objects whose count nobody touches, None being one, as they never end (PEP 683, Python 3.12). Modules, classes, functions and their
code do not end before their process either; so they are made like None.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterable, Sequence
from ctypes import c_uint32
from functools import cache, partial
from itertools import compress
from types import CodeType, FunctionType
from typing import Any

_PROBES = 100


def keep_shared() -> None:
    """Have as much as possible of what is in memory now stay shared with processes that are forked later.

    No object that is there now ends before its process, but for those whose end does something: files, generators, and what has
    a `__del__`. Where Python has no immortal objects, only its collector keeps its hands off. Called again, it takes in what is new.
    """
    count = _immortal_count()
    if count is not None:
        objects = gc.get_objects()
        _make_immortal(objects, count)
        _make_immortal_code(_of_type(FunctionType, objects), count)
    gc.freeze()  # the first full collection in a copy would write to everything


def _make_immortal(objects: Sequence[object], count: int) -> None:
    types = list(map(type, objects))
    lasting = {kind: not hasattr(kind, "__del__") for kind in set(types)}
    _write_counts(compress(objects, map(lasting.__getitem__, types)), count)


def _make_immortal_code(functions: Iterable[FunctionType], count: int) -> None:
    """The collector does not know of code: it is found from the functions that have it."""
    codes = [function.__code__ for function in functions]
    while codes:
        _write_counts(codes, count)
        codes = list(_of_type(CodeType, [constant for code in codes for constant in code.co_consts]))


def _of_type(kind: type, objects: Sequence[Any]) -> Iterable[Any]:
    return compress(objects, map(partial(operator.is_, kind), map(type, objects)))


def _write_counts(objects: Iterable[object], count: int) -> None:
    word_at = c_uint32.from_address
    for address in map(id, objects):
        word_at(address).value = count


@cache
def _immortal_count() -> int | None:
    """What stands at an immortal object's address, told by None; None where that is not its count of references, or objects end."""
    mortal, probes = object(), []
    before = _word(mortal), _word(None)
    probes += [mortal, None] * _PROBES
    after = _word(mortal), _word(None)
    return before[1] if (after[0] - before[0], after[1] - before[1]) == (_PROBES, 0) else None


def _word(value: object) -> int:
    return c_uint32.from_address(id(value)).value
