"""Options of a LocalCluster as its supervisor and its workers have them; some default to the variables that workers
read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from fluster.local_setup import ProfileName
from fluster_bus.core.devices import VISIBLE_DEVICES, as_json, parse_gpus

T = TypeVar("T")

DISK, GPUS, LABELS, RESOURCES = "FLUSTER_DISK", "FLUSTER_GPUS", "FLUSTER_LABELS", "FLUSTER_RESOURCES"


def offered_disk(given: int | str | None) -> int | None:
    """In bytes; None when neither the owner nor FLUSTER_DISK says it. Raises ValueError."""

    def read(value: int | str) -> int:
        from fluster_bus.messages.parts.resources import parse_disk

        return parse_disk(value)

    return _read("disk", given, DISK, read)


def offered_gpus(given: str | None) -> tuple[object, ...] | None:
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


def size_in_bytes(size: int | str) -> int:
    from fluster_bus.messages import parse_size

    return parse_size(size)


def container_settings(
    network: str | None,
    profile: ProfileName,
    mount_roots: Sequence[str | Path],
    shm_size: int | str | None,
    ulimits: Mapping[str, int | tuple[int, int]] | None,
) -> dict[str, object]:
    """Those that are not as usual, by the names that workers have for them. Raises ValueError."""
    if profile not in get_args(ProfileName):
        raise ValueError(f"profile={profile!r} is not known: choose {', '.join(get_args(ProfileName))}")
    settings = {
        "network": network,
        "profile": profile if profile != "default" else None,
        "mount_roots": [str(Path(root).absolute()) for root in mount_roots] or None,
        "shm_bytes": size_in_bytes(shm_size) if shm_size is not None else None,
        "ulimits": _limits(ulimits) if ulimits is not None else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def build_settings(network: str | None, authorities: str | Path | None) -> dict[str, object]:
    """The same of builds. Raises ValueError."""
    if authorities is not None and not (Path(authorities).is_file() and os.access(authorities, os.R_OK)):
        raise ValueError(f"build_ca={str(authorities)!r} cannot be read: give the path of a file of certificates")
    settings = {
        "build_network": network,
        "build_authorities": str(Path(authorities).absolute()) if authorities is not None else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _limits(ulimits: Mapping[str, int | tuple[int, int]]) -> dict[str, tuple[int, int]]:
    pairs = {name: limit if isinstance(limit, tuple) else (limit, limit) for name, limit in ulimits.items()}
    for name, pair in pairs.items():
        if len(pair) != 2 or not all(isinstance(each, int) and each >= -1 for each in pair):
            raise ValueError(
                f"ulimits has {name}={ulimits[name]!r}: give a number, or (soft, hard); -1 means without a limit"
            )
    return pairs


def pickled_backend(backend: object) -> str:
    """A backend as the supervisor is given it: pickled, in Base64. Raises ValueError."""
    import base64
    import pickle

    try:
        return base64.b64encode(pickle.dumps(backend)).decode()
    except Exception as cause:
        raise ValueError(f"backend={backend!r} cannot be handed to the cluster's own process: {cause}") from cause


def machine_memory() -> int:
    """The memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
