"""Which folders of a worker's machine jobs may see in their containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fluster_services.worker.contract.container import INNER_FOLDER, LIBRARIES_FOLDER
from fluster_services.worker.contract.faults import LaunchError

TAKEN = tuple(map(Path, (INNER_FOLDER, LIBRARIES_FOLDER, "/proc", "/sys", "/dev")))  # places in a container
# A process that reaches one of these owns the machine, whichever engine is used.
_ENGINES = (Path("/run/docker.sock"), Path("/run/containerd"), Path("/run/podman"))


def secret_places(engine: str, *own: Path) -> list[Path]:
    """What no container is to see: the ways to engines, `engine` among them, and these folders of Fluster's own."""
    return [*own, Path(engine.removeprefix("unix://")), *_ENGINES]


def is_in_or_around(place: Path, others: Iterable[Path]) -> bool:
    """Whether `place` shows any of the others, or a part of one."""
    return any(place.is_relative_to(each) or each.is_relative_to(place) for each in others)


def checked_mounts(mounts: Mapping[str, str], roots: Sequence[str], *, secret: Sequence[Path] = ()) -> dict[str, str]:
    """`mounts` with what their links lead to. Raises LaunchError for what a worker with these roots does not mount.

    Whatever the roots are: nothing in a `secret` place, nor around one.
    """
    places = [each.resolve() for each in secret]
    found = {}
    for target, source in mounts.items():
        place = Path(source).resolve()
        if not any(place.is_relative_to(Path(root).resolve()) for root in roots):
            allowed = ", ".join(roots) or "nothing: see FLUSTER_MOUNT_ROOTS"
            raise LaunchError(f"mounts has {source!r}, and this worker mounts {allowed}")
        if is_in_or_around(place, places):
            raise LaunchError(f"mounts has {source!r}, where the worker has files that no task may see")
        if not place.exists():
            raise LaunchError(f"mounts has {source!r}, which is not there at this worker")
        if any(Path(target).is_relative_to(taken) for taken in TAKEN):
            raise LaunchError(
                f"mounts has {target!r} as a place in the container, which is taken: choose one such as /data"
            )
        found[target] = str(place)
    return found
