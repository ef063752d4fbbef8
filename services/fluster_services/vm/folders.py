"""Which folders of this machine its VMs may share with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fluster_services.worker.engine.mounts import TAKEN, is_in_or_around, secret_places

# Where a system has its own files, here and in a container, which would be covered there.
_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/run", "/sbin", "/usr", "/var/run")
_TAKEN = (*map(Path, _SYSTEM), *TAKEN)
_OF_ENGINES = (Path("/var/lib/containerd"), Path("/var/lib/docker"))


@dataclass(frozen=True)
class SharedFolder:
    """A folder that a VM has under the path that it has here."""

    path: Path
    source: Path  # the same without links, which may lead elsewhere by the time that the next VM is made


def checked_folders(folders: Iterable[str | Path], *, engine: str) -> tuple[SharedFolder, ...]:
    """The folders, each once. Raises ValueError for what is no folder, and for what no VM is to see or to cover."""
    if isinstance(folders, str | Path):
        raise ValueError(f"folders={str(folders)!r} is one folder: give a list of them")
    secret = [each.resolve() for each in secret_places(engine, *_OF_ENGINES)]
    found: list[SharedFolder] = []
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ValueError(f"folders has {folder!r}: give a path, such as '/srv/data'")
        given = str(folder)
        path = Path(os.path.normpath(re.sub("^/+", "/", given)))  # POSIX tells two slashes from one
        if not path.is_absolute():
            raise ValueError(f"folders has {given!r}: give the whole path, such as {str(path.absolute())!r}")
        if not path.is_dir():
            raise ValueError(f"folders has {given!r}, which is {'not a folder' if path.exists() else 'not there'}")
        shared = SharedFolder(path, path.resolve())
        if is_in_or_around(shared.source, secret):
            raise ValueError(f"folders has {given!r}, which shows what is a container engine's: no VM may see that")
        if is_in_or_around(path, _TAKEN) or is_in_or_around(shared.source, _TAKEN):
            raise ValueError(
                f"folders has {given!r}, where a system has its own files: give one for data, such as '/srv/data'"
            )
        found.append(shared)
    _check_apart(found)
    return tuple(dict.fromkeys(found))


def _check_apart(folders: list[SharedFolder]) -> None:
    """What lies in another one could be put elsewhere by whoever may write to that."""
    for inner in folders:
        for outer in folders:
            if outer.path in inner.path.parents or outer.source in inner.source.parents:
                raise ValueError(f"folders has {str(inner.path)!r}, which lies in {str(outer.path)!r}: give that alone")
