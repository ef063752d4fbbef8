"""What kind of function a callable is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether calling it runs none of its code, and gives a generator, or an asynchronous one, that would."""
    while isinstance(function, functools.partial):
        function = function.func
    candidates = (function, getattr(type(function), "__call__", None))  # noqa: B004 - what a call of it runs is asked for
    return any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in candidates)
