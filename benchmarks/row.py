"""One measured figure and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table. `value` and `baseline_value` have the same `unit` and come from the same run."""

    what: str  # call(), one after the other, p50
    value: float
    unit: str  # µs, ms, 1/s
    baseline: str  # nc.request between two bare processes, p50
    baseline_value: float

    @property
    def ratio(self) -> float:
        """How many times the baseline it is: of a time, less is better; of a rate, more."""
        return self.value / self.baseline_value
