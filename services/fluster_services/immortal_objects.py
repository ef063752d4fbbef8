"""Keeping what is imported in the memory that forked processes share.

A page is shared until a process writes to it, and Python writes to each object that it so much as looks at: its count of references. CPython
has objects whose count is never touched, None being one, as they never end (PEP 683, Python 3.12). Modules, classes, functions and their
code do not end before their process either; so they are made like None.

It is done by ctypes, as CPython has no way for objects that others refer to: its PyUnstable_SetImmortal (3.15) takes only those that were just
made. So the module makes sure by probes that it writes where CPython counts (`_immortal_count`), does without where it does not, and a test
fails on a release of CPython where that is so.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from ctypes import c_uint32, sizeof
from functools import cache
from types import FunctionType
from typing import Any

_PROBES = 100
_WORD_BYTES = sizeof(c_uint32)
_words = (c_uint32 * (sys.maxsize // _WORD_BYTES)).from_address(0)  # all of memory


def keep_shared() -> None:
    """Have as much as possible of what is in memory now stay shared with processes that are forked later.

    No object that is there now ends before its process, but for those whose end does something: files, generators, and what has
    a `__del__`. Where Python has no immortal objects, only its collector keeps its hands off. Called again, it takes in what is new.
    """
    count = _immortal_count()
    if count is not None:
        _make_immortal(gc.get_objects(), count)
    gc.freeze()  # the first full collection in a copy would write to everything


def _make_immortal(objects: Sequence[Any], count: int) -> None:
    lasting = {kind for kind in set(map(type, objects)) if not hasattr(kind, "__del__")}
    for each in objects:  # one loop, as there are many
        kind = type(each)
        if kind in lasting:
            _words[id(each) // _WORD_BYTES] = count
            if kind is FunctionType:
                _words[id(each.__code__) // _WORD_BYTES] = count  # the collector does not know of code


@cache
def _immortal_count() -> int | None:
    """What stands at an immortal object's address, told by None; None where that is not its count of references, or objects end."""
    mortal, probes = object(), []
    before = _word(mortal), _word(None)
    probes += [mortal, None] * _PROBES
    after = _word(mortal), _word(None)
    return before[1] if (after[0] - before[0], after[1] - before[1]) == (_PROBES, 0) else None


def _word(value: object) -> int:
    return _words[id(value) // _WORD_BYTES]
