"""The Python that a task uses instead of its worker's: one that was made for it, or one that is on the machine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fluster_bus.messages import EnvironmentConfig
from fluster_services.worker.contract.faults import BuildError
from fluster_services.worker.environments.folder_cache import FolderCache

_INTERPRETERS_OWN = re.compile(r"/(site|dist)-packages$|/python3\.\d+(/lib-dynload)?$|/python3\d+\.zip$")
_SITE = re.compile(r"/(site|dist)-packages$")


@dataclass(frozen=True)
class TaskPython:
    """An interpreter that is ready."""

    python: Path  # runs a callable
    search: Path  # the folder in which commands find it as `python`
    variables: Mapping[str, str] = field(default_factory=dict)  # which say that it is in use
    version: str | None = None  # the minor version, such as 3.12; None: not known before it runs
    given: str | None = None  # how the job names it, if it is used as it is
    behind: tuple[str, ...] = ()  # where its callables find what its own packages do not have


def is_site(path: str) -> bool:
    """True for a folder of installed packages, in which .pth files count."""
    return _SITE.search(path) is not None


def importable_here() -> list[str]:
    """Where this worker imports from, beside the standard library."""
    return [entry for entry in sys.path if entry and (is_site(entry) or not _INTERPRETERS_OWN.search(entry))]


def without_interpreters_own(paths: Sequence[str]) -> list[str]:
    """`paths` without those of an interpreter and its packages, which another interpreter has of its own."""
    return [path for path in paths if not _INTERPRETERS_OWN.search(path)]


def names_existing(config: EnvironmentConfig) -> bool:
    """True when the job names an interpreter, or the folder of an environment, to be used as it is."""
    has_packages = config.pip_packages or config.requirements or config.uv_lock
    return config.python is not None and "/" in config.python and not has_packages


async def use_existing(given: str, cache: FolderCache, user: str) -> TaskPython:
    """The interpreter at the path `given`, or of the environment there. Raises BuildError when there is none."""
    # In a thread: it may lie on a file system that is slow to answer.
    python, search, variables = await asyncio.to_thread(_find, given)
    if search is None:

        async def make(folder: Path) -> None:
            _write_names(folder, python)

        # By its path alone: what lies there may change, and is used as it then is.
        search = await cache.use(hashlib.sha256(f"names of {python}".encode()).hexdigest()[:32], user, make)
    return TaskPython(python, search, variables=variables, given=given, behind=tuple(importable_here()))


def _find(given: str) -> tuple[Path, Path | None, dict[str, str]]:
    """The interpreter, the folder in which it is `python` if there is one, and the variables of its environment."""
    place = Path(given)
    python = place / "bin" / "python" if place.is_dir() else place
    if not place.is_absolute() or not os.access(python, os.X_OK) or python.is_dir():
        raise BuildError(
            f"python={given!r}: this worker has no interpreter there: give the whole path of one, or of an environment "
            "with bin/python in it"
        )
    search = python.parent if _is_same(python.parent / "python", python) else None
    return python, search, _variables(python.parent.parent)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _write_names(folder: Path, python: Path) -> None:
    # No links: an environment's interpreter finds its packages by the path that it is started with.
    for name in ("python", "python3"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} "$@"\n', encoding="utf-8")
        script.chmod(0o700)


def _variables(folder: Path) -> dict[str, str]:
    if (folder / "pyvenv.cfg").exists():
        return {"VIRTUAL_ENV": str(folder)}
    return {"CONDA_PREFIX": str(folder)} if (folder / "conda-meta").is_dir() else {}
