"""A module that a test registers to travel by value."""

from __future__ import annotations

number = 5


def double() -> int:
    return 2 * number
