"""Keeping what is imported in the memory that forked processes share.

A page is shared until somebody writes to it, and Python writes to each object that it so much as looks at: its count of references. CPython
has objects whose count nobody touches, None being one, as they never end (PEP 683, Python 3.12). Modules, classes, functions and their
code do not end before their process either; so they are made like None.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from ctypes import c_uint32
from functools import cache
from itertools import chain
from types import FunctionType

_PROBES = 100


def keep_shared() -> None:
    """Have as much as possible of what is in memory now stay shared with processes that are forked later.

    No object that is there now ends before its process, but for those whose end does something: files, generators, and what has
    a `__del__`. Where Python has no immortal objects, only its collector keeps its hands off. Called again, it takes in what is new.
    """
    count = _immortal_count()
    if count is not None:
        _make_immortal(gc.get_objects(), count)
    gc.freeze()  # the first full collection in a copy would write to everything


def _make_immortal(objects: Sequence[object], count: int) -> None:
    lasting = {kind for kind in set(map(type, objects)) if not hasattr(kind, "__del__")}
    kept = [each for each in objects if type(each) in lasting]
    codes = [each.__code__ for each in kept if type(each) is FunctionType]  # of which the collector does not know
    word_at = c_uint32.from_address
    for address in map(id, chain(kept, codes)):
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
