"""Virtual environments of jobs: made by uv, kept by what is in them, shared by all tasks that want the same.

Fluster, and whatever else the worker itself can import, is found behind the environment's own packages (by a .pth file),
so that callables run in it. With another minor version of Python nothing of the worker's can be imported: such an
environment is for commands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fluster_bus.core.json_types import JsonObject
from fluster_bus.messages import EnvironmentConfig
from fluster_services.config import DiskLimits
from fluster_services.worker.contract.container import OWN_MINOR
from fluster_services.worker.contract.faults import BuildError, BuildOutput
from fluster_services.worker.environments.folder_cache import FolderCache, in_thread
from fluster_services.worker.environments.interpreters import (
    TaskPython,
    importable_here,
    is_site,
    names_existing,
    use_existing,
)
from fluster_services.worker.environments.uv import find_uv_cache, run_uv
from fluster_services.worker.linux.disk import why_unfit

_VENV, _SCRATCH, _REQUIREMENTS = "venv", "scratch", "fluster-requirements.txt"
_OVERLAY = "zz_fluster.pth"  # read after the files that packages bring
_LOCK, _PROJECT = "uv.lock", "pyproject.toml"
_FORMAT = 1  # changed when the same recipe makes something else

# A requirement that says all by itself. Anything else (a path, an option) may speak of files of the workspace.
_PLAIN = re.compile(r"\s*(#.*)?|\s*[A-Za-z0-9][\w.-]*\s*(\[[^\]]*\])?\s*([<>=!~(;#].*|@\s*https?://.*)?", re.ASCII)
_VERSION = re.compile(r"\d+(\.\d+)*")
_MINOR = re.compile(r"version_info\s*=\s*(\d+\.\d+)")


Listener = Callable[[BuildOutput], None]  # is given what is said while something is made


@dataclass(frozen=True)
class Needs:
    """What a job asks for beside what is there anyway."""

    python: str | None
    requirements: str  # lines; empty: none
    lock: str | None  # the SHA-256 of uv.lock and pyproject.toml
    workspace: str | None  # the SHA-256 of the workspace, if what is asked for is made of files in it


@dataclass(frozen=True)
class Recipe:
    """All that decides what is in an environment."""

    python: str | None
    requirements: str  # lines; empty: none
    lock: str | None  # the SHA-256 of uv.lock and pyproject.toml
    workspace: str | None  # the SHA-256 of the workspace, if the environment is made of files in it
    overlay: str  # what is behind the environment's own packages
    made_with: str  # this worker's own Python
    format: int = _FORMAT

    def name(self) -> str:
        # Short, since the first lines of installed scripts, which name their interpreter, may not be long.
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def wants_environment(config: EnvironmentConfig) -> bool:
    """True when tasks run in another environment than the worker's own."""
    return bool(config.pip_packages or config.requirements or config.uv_lock or config.python)


class Environments:
    """The virtual environments of one worker."""

    def __init__(self, cache: FolderCache, disk: DiskLimits, *, build_timeout_s: float) -> None:
        self._cache = cache
        self._disk = disk
        self._build_timeout_s = build_timeout_s
        self._is_suspect = False  # uv could not make one

    def examine(self) -> str | None:
        """Why uv cannot keep packages; None when it can, or always could. Blocks; to be called in a thread."""
        folder = find_uv_cache() if self._is_suspect else None
        why = why_unfit(folder, self._disk) if folder is not None else None
        self._is_suspect = why is not None
        return None if why is None else f"its package cache {folder} cannot be used: {why}"

    def places(self) -> list[Path]:
        """Where uv makes what it puts into environments. Blocks; to be called in a thread."""
        folder = find_uv_cache()
        return [folder] if folder is not None else []

    async def use(self, config: EnvironmentConfig, workspace: Path | None, user: str, listen: Listener) -> TaskPython:
        """The environment that `config` asks for, made unless it is there; it stays until `user` releases it.

        If it is made for the first time `listen` gets what is said meanwhile. Raises BuildError with the last words of uv, OSError.
        """
        if config.python is not None and names_existing(config):
            return await use_existing(config.python, self._cache, user)
        needs = read_needs(config, workspace)
        recipe = Recipe(
            python=needs.python,
            requirements=needs.requirements,
            lock=needs.lock,
            workspace=needs.workspace,
            overlay=_overlay(),
            made_with=f"{sys.executable} {sys.version}",
        )

        async def make(path: Path) -> None:
            output = BuildOutput()
            listen(output)
            try:
                await _make_in_time(path, recipe, workspace, output, self._build_timeout_s)
            except Exception:  # and not a cancellation, which says nothing of this machine
                self._is_suspect = True
                raise

        folder = await self._cache.use(recipe.name(), user, make)
        venv = folder / _VENV
        variables = {"VIRTUAL_ENV": str(venv)}
        return TaskPython(venv / "bin" / "python", venv / "bin", variables=variables, version=_minor_of(venv))


def read_needs(config: EnvironmentConfig, workspace: Path | None) -> Needs:
    """What `config` asks for, once its workspace is there. Raises BuildError when that lacks a lock."""
    # In one order, so that the same packages are the same environment.
    packages = sorted({package.strip() for package in config.pip_packages})
    requirements = "\n".join([*packages, config.requirements or ""]).strip()
    lock, needs_workspace = _read_lock(workspace) if config.uv_lock else (None, False)
    if not all(_PLAIN.fullmatch(line) for line in requirements.splitlines()):
        needs_workspace = True
    return Needs(config.python, requirements, lock, config.bundle if needs_workspace else None)


def _read_lock(workspace: Path | None) -> tuple[str, bool]:
    """The SHA-256 of a workspace's lock, and whether it locks packages that lie in the workspace."""
    if workspace is None:
        raise BuildError("uv_lock=True needs a workspace with pyproject.toml and uv.lock: give workspace=… too")
    try:
        project, lock = (workspace / _PROJECT).read_bytes(), (workspace / _LOCK).read_bytes()
        locked = tomllib.loads(lock.decode())
    except FileNotFoundError as error:
        raise BuildError(
            f"uv_lock=True, and the workspace has no {Path(error.filename).name}: run `uv lock` there, and see that "
            ".gitignore does not name it"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BuildError(f"the workspace's {_LOCK} cannot be read: {error}; run `uv lock` there") from error
    sha256 = hashlib.sha256(hashlib.sha256(project).digest() + hashlib.sha256(lock).digest()).hexdigest()
    return sha256, any(_lies_in_workspace(package) for package in locked.get("package", []))


def _lies_in_workspace(package: JsonObject) -> bool:
    source = package.get("source", {})
    places = [source[kind] for kind in ("editable", "directory", "virtual", "path") if kind in source]
    return any(place != "." for place in places)  # the project itself is not installed: its files are the task's own


async def _make_in_time(
    path: Path, recipe: Recipe, workspace: Path | None, output: BuildOutput, timeout_s: float
) -> None:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            await _make(path, recipe, workspace, output)
    except TimeoutError as error:
        if not limit.expired():
            raise  # of a file system
        raise BuildError(
            f"its environment was not made within {timeout_s:g} s; the last words of uv:\n{output.last_words()}", output
        ) from error


async def _make(path: Path, recipe: Recipe, workspace: Path | None, output: BuildOutput) -> None:
    venv, scratch = path / _VENV, path / _SCRATCH
    python = f"../{_VENV}/bin/python"
    variables = {"VIRTUAL_ENV": str(venv), "UV_PROJECT_ENVIRONMENT": str(venv)}

    def copy() -> None:
        # Builds write where their sources lie, and the workspace is not theirs alone.
        if workspace is None or (recipe.lock is None and recipe.workspace is None):
            scratch.mkdir()
        else:
            shutil.copytree(workspace, scratch, symlinks=True)

    async def uv(*arguments: str, **more: str) -> None:
        await run_uv(arguments, folder=scratch, variables={**variables, **more}, output=output)

    async def make_venv() -> None:
        command = ("venv", "--quiet", "--no-project", "--python", recipe.python or sys.executable, f"../{_VENV}")
        if recipe.python is None or not _VERSION.fullmatch(recipe.python):
            return await uv(*command)
        # A shim of pyenv's runs a version that is not the chosen one only if told which; uv looks no further then. What it
        # says of a shim does not concern the user where another way succeeds.
        failed: list[BuildError] = []
        for told in ({}, {"PYENV_VERSION": recipe.python}, {"PYENV_VERSION": "system"}):
            said = BuildOutput()
            try:
                await run_uv(command, folder=scratch, variables={**variables, **told}, output=said)
            except BuildError as error:
                failed.append(error)
            else:
                return output.take(said)
        output.take(failed[0].output)
        raise BuildError(str(failed[0]), output) from failed[0]

    await in_thread(copy)
    await make_venv()
    if recipe.lock is not None:
        await uv("sync", "--frozen", "--no-dev", "--no-install-project", "--no-editable", "--python", python)
    if recipe.requirements:
        (scratch / _REQUIREMENTS).write_text(recipe.requirements + "\n", encoding="utf-8")
        await uv("pip", "install", "--python", python, "--requirement", _REQUIREMENTS)
    if _minor_of(venv) == OWN_MINOR:
        (_site_packages(venv) / _OVERLAY).write_text(recipe.overlay, encoding="utf-8")
    await in_thread(lambda: shutil.rmtree(scratch))


def _minor_of(venv: Path) -> str:
    found = _MINOR.search((venv / "pyvenv.cfg").read_text(encoding="utf-8"))
    if found is None:
        raise BuildError(f"{venv / 'pyvenv.cfg'} does not tell the version of Python: delete {venv.parent}")
    return found[1]


def _site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{OWN_MINOR}" / "site-packages"


def _overlay() -> str:
    """A .pth file with all that this worker can import beside the standard library, in its order."""
    lines = [
        # With the .pth files that lie there.
        f"import site; site.addsitedir({entry!r})" if is_site(entry) else entry
        for entry in importable_here()
    ]
    return "\n".join(lines) + "\n"
