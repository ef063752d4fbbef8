"""Keeping what is imported in the memory that forked processes share.

A page is shared until somebody writes to it, and Python writes to each object that it so much as looks at: its count of references. CPython
has objects whose count nobody touches, None being one, as they never end (PEP 683, Python 3.12). Modules, classes, functions and their
code do not end before their process either; so they are made like None.

It also writes where it makes new objects, which is wherever between older ones there is room; so there is left none.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from ctypes import c_uint32, pythonapi, sizeof
from functools import cache
from types import FunctionType
from typing import Any

_PROBES = 100
_WORD_BYTES = sizeof(c_uint32)
_words = (c_uint32 * (sys.maxsize // _WORD_BYTES)).from_address(0)  # all of memory

_allocate = pythonapi.PyObject_Malloc
_allocate.restype = None
# Class, size in bytes, pools, blocks that are in use, blocks that are free.
_BLOCKS_OF_A_SIZE = re.compile(rb"^ *\d+ +(\d+) +\d+ +\d+ +(\d+)$", re.MULTILINE)
_MAX_STATS_BYTES = 32 * 1024


def keep_shared() -> None:
    """Have as much as possible of what is in memory now stay shared with processes that are forked later.

    No object that is there now ends before its process, but for those whose end does something: files, generators, and what has
    a `__del__`. Where Python has no immortal objects, only its collector keeps its hands off. Called again, it takes in what is new.
    For a single thread, shortly before a fork.
    """
    count = _immortal_count()
    if count is not None:
        _make_immortal(gc.get_objects(), count)
    gc.freeze()  # the first full collection in a copy would write to everything
    gc.collect()  # finds nothing, and gives back the objects that are held for use again
    _fill_holes()


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


def _fill_holes() -> None:
    """Take each free block of memory on pages that have others in use, for good: a copy shall make its objects on new pages.

    There are some thousand, of up to 512 bytes, on nearly as many pages; all are in memory anyhow.
    """
    for size, free in _BLOCKS_OF_A_SIZE.findall(_allocator_stats()):
        for _ in range(int(free)):
            _allocate(int(size))


def _allocator_stats() -> bytes:
    """What CPython writes to standard error about its allocator of small blocks; nothing of blocks where that is not used."""
    read, write = os.pipe()
    os.set_blocking(write, False)  # rather without its end than waiting for us
    stderr = os.dup(2)
    try:
        os.dup2(write, 2)
        sys._debugmallocstats()  # noqa: SLF001
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(write)
    with os.fdopen(read, "rb", buffering=0) as told:
        return told.read(_MAX_STATS_BYTES)
