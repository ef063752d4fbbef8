"""One measured figure and what it is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEADINGS = ("what", "measured", "against, in the same run", "ratio", "to reach")


@dataclass(frozen=True)
class Row:
    """A line of the table. Both figures come from the same run, so that their ratio means something elsewhere too."""

    what: str  # blocking call(), p50
    value: str  # 250 µs
    against: str = ""  # nc.request 190 µs
    ratio: float | None = None  # of the two: of times, less is better; of rates, more
    target: str = ""  # what it is to reach: of the ratio, or where it has a unit, of the figure itself

    def cells(self) -> tuple[str, str, str, str, str]:
        return self.what, self.value, self.against, "" if self.ratio is None else f"{self.ratio:.2f}", self.target


def as_markdown(rows: Iterable[Row]) -> str:
    """A table as in README.md."""
    lines = [
        " | ".join(cells) for cells in (HEADINGS, ("---", "--:", "---", "--:", "---"), *(row.cells() for row in rows))
    ]
    return "".join(f"| {line} |\n" for line in lines)
