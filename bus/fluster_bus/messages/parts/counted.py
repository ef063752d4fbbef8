"""Counted resources with names of the users' own, such as licences: how many a task takes, and how many a worker has.

Counts have at most four decimals: a task may take half of something, as it may of a CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, cast

from pydantic import BeforeValidator, PlainSerializer

MAX_RESOURCES, MAX_COUNT, DECIMALS = 32, 1_000_000_000, 4
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,62}[A-Za-z0-9])?")
_NUMBER = re.compile(r"\d+(\.\d+)?")
# What a task or a worker has in a field of its own: counted twice, it would be booked in neither.
_OTHERWISE = {
    name: option
    for option, names in (("cpu", ("cpu", "cpus")), ("device", ("gpu", "gpus", "tpu", "tpus")))
    for name in names
} | {name: name for name in ("memory", "disk")}
_TINY = 1e-9  # what computing with fractions leaves, such as 3 * 0.1

Counts = tuple[tuple[str, float], ...]  # sorted by name, without those of which there is none; fit to be compared


def check_counts(given: object) -> dict[str, float]:
    """`given` as {name: count}. Raises ValueError, which quotes what is wrong."""
    if not isinstance(given, Mapping):
        raise ValueError(f"invalid resources {_shown(given)}: expected {{name: count}}, such as {{'license': 1}}")
    counts = cast("Mapping[object, object]", given)
    if len(counts) > MAX_RESOURCES:
        raise ValueError(f"{len(counts)} resources are too many: give at most {MAX_RESOURCES}")
    return {_checked_name(name): _checked_count(name, count) for name, count in counts.items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"invalid resource name {_shown(name)}: use at most 64 letters, digits and _ . / -")
    if name.lower() in _OTHERWISE:
        raise ValueError(f"{name!r} cannot be counted by a name of its own: give it as {_OTHERWISE[name.lower()]}")
    return name


def _checked_count(name: object, count: object) -> float:
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 < count <= MAX_COUNT:
        raise ValueError(f"invalid count {_shown(count)} of {name}: expected a number above 0 and up to {MAX_COUNT:g}")
    rounded = round(float(count), DECIMALS)
    if not math.isclose(count, rounded, abs_tol=_TINY):
        raise ValueError(f"invalid count {count!r} of {name}: give at most {DECIMALS} decimals, such as {rounded:g}")
    return rounded


def _shown(value: object) -> str:
    return repr(value)[:100]


def parse_counts(text: str) -> dict[str, float]:
    """The counts in `license=4,slot=0.5`. Raises ValueError."""
    counts: dict[str, float] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, _, count = (part.strip() for part in pair.partition("="))
        if not _NUMBER.fullmatch(count):
            raise ValueError(f"invalid resource {pair[:150]!r}: expected name=count, such as license=1")
        if name in counts:
            raise ValueError(f"resource {name} is given twice: give it once, with its whole count")
        counts[name] = float(count)
    return check_counts(counts)


def as_counts(given: Mapping[str, float]) -> Counts:
    """Sorted, and fit to be compared."""
    return tuple(sorted(given.items()))


def combined(one: Counts, other: Counts, combine: Callable[[float, float], float]) -> Counts:
    """What `combine` makes of the two counts of each name."""
    first, second = dict(one), dict(other)
    counts = {name: combine(first.get(name, 0), second.get(name, 0)) for name in first.keys() | second.keys()}
    return as_counts({name: rounded for name, count in counts.items() if (rounded := round(count, DECIMALS))})


def share(counts: Counts, number: int, parts: int) -> Counts:
    """What the part of that number gets when `parts` share whole pieces as evenly as they can.

    A fraction that is left over is the last one's.
    """

    def upto(count: float, part: int) -> float:
        return count if part == parts else math.floor(count) * part // parts

    return combined(
        as_counts({name: upto(count, number + 1) for name, count in counts}),
        as_counts({name: upto(count, number) for name, count in counts}),
        lambda end, begin: end - begin,
    )


def number_text(count: float) -> str:
    """`4`, or `0.5`: all digits, and none that says nothing."""
    return f"{count:.{DECIMALS}f}".rstrip("0").rstrip(".")


def words(counts: Counts) -> tuple[str, ...]:
    """`("license: 1", "slot: 0.5")`, for a person."""
    return tuple(f"{name}: {number_text(count)}" for name, count in counts)


def _read(value: object) -> object:
    return as_counts(check_counts(cast("object", value))) if isinstance(value, Mapping) else value


# On the wire it is what people write: {"license": 1.0}.
CountsField = Annotated[Counts, BeforeValidator(_read), PlainSerializer(dict, return_type=dict[str, float])]
