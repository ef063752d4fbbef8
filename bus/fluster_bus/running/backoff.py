"""Pauses between attempts that double."""

from __future__ import annotations


class Backoff:
    """How long to pause before the next attempt: `pause_s`, from `first_s` seconds on, doubled by `lengthen` up to `longest_s`."""

    __slots__ = ("first_s", "longest_s", "pause_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s = self.pause_s = first_s
        self.longest_s = longest_s

    def lengthen(self) -> None:
        """An attempt failed: double the pause."""
        self.pause_s = min(2 * self.pause_s, self.longest_s)

    def reset(self) -> None:
        """An attempt succeeded: begin with the first pause again."""
        self.pause_s = self.first_s
