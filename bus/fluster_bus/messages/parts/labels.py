"""Labels: words by which workers differ, such as `zone=a`, and which a task may ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fluster_bus.core.names import MAX_NAME_LENGTH, WorkerId

MAX_LABELS = 64
WORKER_LABEL = "fluster.worker"  # each worker has it by itself: its own name
_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,62}[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9_.:/-]{0,63}")
_WORKER = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return `labels`. Raises ValueError, which quotes what is wrong."""
    if len(labels) > MAX_LABELS:
        raise ValueError(f"{len(labels)} labels are too many: give at most {MAX_LABELS}")
    for key, value in labels.items():
        known = _WORKER if key == WORKER_LABEL else _VALUE
        if not _KEY.fullmatch(key) or not known.fullmatch(value):
            shown = f"{key}={value}"[:150]
            raise ValueError(
                f"invalid label {shown!r}: write key=value, each of at most 64 letters, digits and _ . / - (a value also :)"
            )
    return labels


def parse_labels(text: str) -> dict[str, str]:
    """The labels in `zone=a,disk=ssd`. Raises ValueError."""
    pairs = [each.strip() for each in text.split(",") if each.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"invalid label {pair[:150]!r}: write key=value, such as zone=a")
    labels = {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
    check_labels(labels)
    return labels


def as_words(labels: Mapping[str, str]) -> tuple[str, ...]:
    """`("disk=ssd", "zone=a")`: sorted, and fit to be compared."""
    return tuple(sorted(f"{key}={value}" for key, value in labels.items()))


def from_words(words: tuple[str, ...]) -> dict[str, str]:
    """What `as_words` was given."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def with_own_name(words: Sequence[str], worker_id: WorkerId) -> tuple[str, ...]:
    """The labels of a worker of that name: those that it was given, and the one by which a task asks for just this worker."""
    return tuple(sorted([*given_labels(words), *as_words({WORKER_LABEL: worker_id})]))


def given_labels(words: Sequence[str]) -> tuple[str, ...]:
    """The labels without the one that each worker has by itself."""
    return tuple(word for word in words if word.partition("=")[0] != WORKER_LABEL)


def worker_named(words: tuple[str, ...]) -> WorkerId | None:
    """The one worker that a task with these labels may run on; None when it may on all."""
    name = from_words(words).get(WORKER_LABEL)
    return WorkerId(name) if name is not None else None
