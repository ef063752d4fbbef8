"""What a LocalCluster's workers offer beside CPUs and memory: given by its owner, or by the variables that workers read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fluster_bus.core.devices import VISIBLE_DEVICES, as_json, parse_gpus

T = TypeVar("T")

DISK, GPUS, LABELS, RESOURCES = "FLUSTER_DISK", "FLUSTER_GPUS", "FLUSTER_LABELS", "FLUSTER_RESOURCES"


def offered_disk(given: int | str | None) -> int | None:
    """In bytes; None when neither the owner nor FLUSTER_DISK says it. Raises ValueError."""

    def read(value: int | str) -> int:
        from fluster_bus.messages.parts.resources import parse_disk

        return parse_disk(value)

    return _read("disk", given, DISK, read)


def offered_gpus(given: str | None) -> tuple[Any, ...] | None:
    """As a LocalSetup has them; None when neither the owner nor FLUSTER_GPUS says it. Raises ValueError."""

    def read(text: str) -> tuple[Any, ...]:
        return tuple(as_json(parse_gpus(text, os.environ.get(VISIBLE_DEVICES["gpu"]))))

    return _read("gpus", given, GPUS, read)


def offered_labels(given: Mapping[str, str] | None) -> tuple[str, ...]:
    """Sorted, as `zone=a`. Raises ValueError."""

    def read(value: Mapping[str, str] | str) -> tuple[str, ...]:
        from fluster_bus.messages.parts.resources import as_words, check_labels, parse_labels

        return as_words(parse_labels(value) if isinstance(value, str) else check_labels(value))

    return _read("labels", given, LABELS, read) or ()


def offered_resources(given: Mapping[str, float] | None) -> dict[str, float]:
    """{name: count}. Raises ValueError."""

    def read(value: Mapping[str, float] | str) -> dict[str, float]:
        from fluster_bus.messages.parts.counted import check_counts, parse_counts

        return parse_counts(value) if isinstance(value, str) else check_counts(value)

    return _read("resources", given, RESOURCES, read) or {}


def _read(name: str, given: Any, variable: str, read: Callable[[Any], T]) -> T | None:
    """What is given, else what the variable says; an error names the one that is wrong."""
    text = os.environ.get(variable)
    if given is None and not text:
        return None
    try:
        return read(given if given is not None else text)
    except ValueError as error:
        raise ValueError(f"{name}={given!r}: {error}" if given is not None else f"{variable}: {error}") from error
