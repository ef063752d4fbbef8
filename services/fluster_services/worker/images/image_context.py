"""What an engine is sent to build an image from: a tar with the Dockerfile and the files that it speaks of."""

from __future__ import annotations

import io
import json
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from fluster_services.worker.images.image_install import REQUIREMENTS
from fluster_services.worker.images.image_recipe import INSTALLER, ImageRecipe

_PROJECT_FILES = ("pyproject.toml", "uv.lock")


def write_context(
    file: IO[bytes],
    recipe: ImageRecipe,
    dockerfile: str,
    *,
    workspace: Path | None,
    variables: Mapping[str, str],
    authorities: str | None,
    uv: Path | None,
) -> None:
    """Write the tar into `file`, which is at its start then. Raises OSError.

    `authorities` is the text of certificates, which pip is to trust; `uv` is the program that installs what a lock names.
    """
    needs = recipe.needs
    with tarfile.open(fileobj=file, mode="w") as archive:
        _add(archive, "Dockerfile", dockerfile)
        for folder in ("environment", "build", "build/workspace"):
            _add_folder(archive, folder)
        _add(archive, "build/image_install.py", INSTALLER)
        _add(archive, "build/recipe.json", json.dumps(recipe.installation()))
        _add(archive, "build/settings.json", json.dumps(dict(variables)))
        if authorities is not None:
            _add(archive, "build/ca.pem", authorities)
        if workspace is not None and needs.workspace is not None:
            archive.add(workspace, "build/workspace", filter=_plain)
        elif workspace is not None and needs.lock is not None:
            for name in _PROJECT_FILES:
                archive.add(workspace / name, f"build/workspace/{name}", filter=_plain)
        if needs.requirements:
            _add(archive, f"build/workspace/{REQUIREMENTS}", needs.requirements + "\n")
        if uv is not None and needs.lock is not None:
            archive.add(uv.resolve(), "build/uv", filter=_plain)
    file.seek(0)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    archive.addfile(entry, io.BytesIO(data))


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(entry)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """As it is for everybody: whose it is here, and since when, is nothing to an image."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    is_executable = entry.isdir() or entry.mode & stat.S_IXUSR
    entry.mode = 0o755 if is_executable else 0o644
    return entry
