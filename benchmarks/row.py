"""One measured figure and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table. Both figures come from the same run, so that their ratio means something elsewhere too."""

    what: str  # blocking call(), p50
    value: str  # 250 µs
    against: str = ""  # nc.request 190 µs
    ratio: float | None = None  # of the two: of times, less is better; of rates, more
    target: str = ""  # what it is to reach: of the ratio, or where it has a unit, of the figure itself
