"""Workspaces on their way to the cluster: a folder becomes one archive, which is stored under its hash before the job
goes.

The same content gives the same bytes. Where a job runs it is unpacked, within the same limits. What only packing needs
is imported when a folder is packed: every client and every worker imports this module.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from fluster.errors import WorkspaceError

if TYPE_CHECKING:
    import pathspec

    from fluster_bus.connection.bus import Bus
    from fluster_bus.messages import EnvironmentConfig, JobRequest
    from fluster_bus.storage.objects import ObjectStore

# Never what a job needs: the history, and what Python writes while it runs, which would make every packing another.
_LEFT_OUT = frozenset({".git", "__pycache__"})
# What is in a virtual environment names its folder and its machine's Python: a copy of it is of no use.
_VENV_FILE = "pyvenv.cfg"
_IGNORE_FILE = ".gitignore"
_FOLDER_ABOVE = "ps_d"  # the group with which pathspec's expressions match the end of a folder's name
_SHOWN = 5
_TIME = (1980, 1, 1, 0, 0, 0)  # the oldest that the format knows
_UNIX = 3
_COMPRESSION = 6
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkspaceLimits:
    """Bounds of one workspace."""

    files: int = 50_000  # folders and links counted too
    bytes: int = 1 << 30  # unpacked
    archive_bytes: int = 256 << 20  # packed
    ratio: float = 200.0  # of unpacked to packed, counted where there is more than `free_bytes`
    free_bytes: int = 64 << 20  # this much may come out of however little: zeros pack a thousand to one


WORKSPACE_LIMITS = WorkspaceLimits()


# ---- how it is stored ------------------------------------------------------------------------------------


async def with_stored_workspaces(bus: Bus, namespace: str, requests: Sequence[JobRequest]) -> list[JobRequest]:
    """The requests as they travel: each folder packed, stored, and named by its hash; each folder once.

    Raises WorkspaceError, and StorageError when it could not be stored.
    """
    stored: dict[str, str] = {}  # {folder: SHA-256}
    ready: list[JobRequest] = []
    for request in requests:
        environment = await with_stored_workspace(bus, namespace, request.environment, stored)
        changed = environment is not request.environment
        ready.append(request.model_copy(update={"environment": environment}) if changed else request)
    return ready


async def with_stored_workspace(
    bus: Bus, namespace: str, environment: EnvironmentConfig, stored: dict[str, str] | None = None
) -> EnvironmentConfig:
    """The same for one environment, which any number of jobs may have then. `stored` are folders that are there
    already.
    """
    if environment.workspace is None:
        return environment
    from fluster_bus.storage.objects import ObjectStore

    folder, stored = str(environment.workspace), {} if stored is None else stored
    if folder not in stored:
        stored[folder] = await _store(ObjectStore(bus, namespace), folder)
    return environment.model_copy(update={"workspace": None, "bundle": stored[folder]})


async def _store(store: ObjectStore, folder: str) -> str:
    with await asyncio.to_thread(pack, folder) as archive:
        return await store.put_file(archive)


def pack(folder: str | Path, limits: WorkspaceLimits = WORKSPACE_LIMITS) -> BinaryIO:
    """A temporary file with the packed `folder`, without .git, __pycache__, virtual environments and what .gitignore
    files name.

    It is a zip archive, and the same bytes whenever the same files are packed. Raises WorkspaceError when the folder
    is too large, which names what makes it so, or holds what cannot travel: links that lead out, sockets, devices.
    """
    import tempfile

    root = Path(folder)
    if not root.is_dir():
        raise WorkspaceError(f"workspace {str(folder)!r} is not a folder: name the one that holds the job's code")
    root = root.resolve()
    try:
        found = _collect(root, limits)
        archive: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - it is the result
        try:
            size = _write(archive, found)
            if size != sum(member.size for member in found):
                raise WorkspaceError(f"workspace {root} changed while it was packed: launch the job again")
            _check_archive(root, archive, found, limits)
        except BaseException:
            archive.close()
            raise
    except OSError as error:
        raise WorkspaceError(f"workspace {root} cannot be packed: {error}") from error
    return archive


@dataclass(frozen=True)
class _Member:
    """A file, a link or an empty folder that is packed."""

    name: str  # within the archive, with slashes
    path: Path
    mode: int
    size: int = 0
    target: str = ""  # of a link


# ---- what is packed -------------------------------------------------------------------------------------


def _collect(root: Path, limits: WorkspaceLimits) -> list[_Member]:
    found: list[_Member] = []
    size = 0
    for member in _walk(root, root, _rules_above(root)):
        found.append(member)
        size += member.size
        if len(found) > 4 * limits.files:  # enough seen to tell what it is
            break
    if len(found) > limits.files:
        # By the folders right below the root: that is what one would leave out.
        crowds = Counter(member.name.partition("/")[0] for member in found)
        shown = ", ".join(f"{name} ({count:,})" for name, count in crowds.most_common(_SHOWN))
        _refuse(root, f"has more than {limits.files:,} files; most are in {shown}")
    if size > limits.bytes:
        _refuse(
            root, f"has {_shown(size)}, over the limit of {_shown(limits.bytes)}; the largest are {_largest(found)}"
        )
    return sorted(found, key=lambda member: member.name)


def _refuse(root: Path, why: str) -> NoReturn:
    raise WorkspaceError(f"workspace {root} {why}. Name what the job does not need in {root / _IGNORE_FILE}")


def _largest(found: Sequence[_Member]) -> str:
    largest = sorted(found, key=lambda member: member.size, reverse=True)[:_SHOWN]
    return ", ".join(f"{member.name} ({_shown(member.size)})" for member in largest)


def _shown(size: int) -> str:
    amount, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:.4g} {unit}"


@dataclass(frozen=True)
class _Rules:
    """What one .gitignore says of the paths below its folder, each by itself."""

    folder: Path
    of_files: pathspec.GitIgnoreSpec
    of_folders: pathspec.GitIgnoreSpec

    def verdict(self, path: Path, *, is_folder: bool) -> bool | None:
        """True: left out. False: taken in again. None: it says nothing."""
        name = path.relative_to(self.folder).as_posix()
        for rule in reversed((self.of_folders if is_folder else self.of_files).patterns):
            found = rule.match_file(name)
            # What matches a folder above has been heeded there, and says nothing of what lies in it.
            if found is not None and cast("Any", found).match.groupdict().get(_FOLDER_ABOVE) is None:
                return rule.include
        return None


def _rules_of(folder: Path) -> tuple[_Rules, ...]:
    import pathspec

    try:
        lines = (folder / _IGNORE_FILE).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, IsADirectoryError):
        return ()
    folder_lines = [line.rstrip(" ")[:-1] if line.rstrip(" ").endswith("/") else line for line in lines]
    return (_Rules(folder, *(pathspec.GitIgnoreSpec.from_lines(each) for each in (lines, folder_lines))),)


def _rules_above(root: Path) -> tuple[_Rules, ...]:
    """Those of the folders between the repository's root and `root`, when it lies within a repository."""
    above = [root, *root.parents]
    inside = next(
        (above[1 : number + 1] for number, folder in enumerate(above) if (folder / ".git").exists()), list[Path]()
    )
    rules = tuple(rule for folder in reversed(inside) for rule in _rules_of(folder))
    return () if _is_ignored(root, rules, is_folder=True) else rules  # who names an ignored folder wants it


def _walk(root: Path, folder: Path, rules: tuple[_Rules, ...]) -> Iterator[_Member]:
    rules = (*rules, *_rules_of(folder))
    is_empty = True
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_empty = False
        path = Path(entry.path)
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in _LEFT_OUT or _is_ignored(path, rules, is_folder=is_folder):
            continue
        if is_folder and (path / _VENV_FILE).is_file():
            continue
        if is_folder:
            # What lies in a folder that is left out cannot be taken in again, as git has it.
            yield from _walk(root, path, rules)
        else:
            yield _member(root, path)
    if is_empty and folder != root:
        yield _Member(f"{_name(root, folder)}/", folder, stat.S_IFDIR | 0o755)


def _is_ignored(path: Path, rules: tuple[_Rules, ...], *, is_folder: bool) -> bool:
    """The nearest file that says anything decides."""
    verdicts = (rule.verdict(path, is_folder=is_folder) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _member(root: Path, path: Path) -> _Member:
    name, status = _name(root, path), path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return _Member(name, path, stat.S_IFLNK | 0o777, target=_target(root, path))
    if not stat.S_ISREG(status.st_mode):
        _refuse(root, f"holds {name}, which is neither file, folder nor link and cannot be packed")
    # Of the permissions only this travels: may it be executed?
    return _Member(name, path, stat.S_IFREG | (0o755 if status.st_mode & 0o100 else 0o644), status.st_size)


def _name(root: Path, path: Path) -> str:
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        _refuse(root, f"holds {name!r}, whose name is not UTF-8")
    return name


def _target(root: Path, link: Path) -> str:
    """Where a link leads, from its own folder. Raises WorkspaceError when that is out of the workspace."""
    goal = Path(os.path.realpath(link))
    written = os.readlink(link)  # noqa: PTH115 - as it is written, not as a Path would tidy it
    if not goal.is_relative_to(root):
        _refuse(root, f"holds the link {_name(root, link)} to {written}, which leads out of it")
    return os.path.relpath(goal, link.parent) if written.startswith("/") else written


# ---- how it is packed -----------------------------------------------------------------------------------


def _write(archive: BinaryIO, members: Sequence[_Member]) -> int:
    """The bytes of all files as they were read; of each no more than it had when it was found, and one."""
    import zipfile

    size = 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, allowZip64=False, compresslevel=_COMPRESSION) as packed:
        for member in members:
            entry = zipfile.ZipInfo(member.name, _TIME)
            entry.create_system = _UNIX
            entry.external_attr = member.mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED if stat.S_ISREG(member.mode) else zipfile.ZIP_STORED
            if not stat.S_ISREG(member.mode):
                packed.writestr(entry, member.target.encode())
                continue
            left = member.size + 1
            with member.path.open("rb") as source, packed.open(entry, "w") as target:
                while block := source.read(min(left, _COPY_BYTES)):
                    target.write(block)
                    left -= len(block)
            size += member.size + 1 - left
    return size


def _check_archive(root: Path, archive: BinaryIO, found: Sequence[_Member], limits: WorkspaceLimits) -> None:
    packed = archive.seek(0, os.SEEK_END)
    size = sum(member.size for member in found)
    if packed > limits.archive_bytes:
        _refuse(
            root,
            f"has {_shown(packed)} when packed, over the limit of {_shown(limits.archive_bytes)}; "
            f"the largest are {_largest(found)}",
        )
    if size > limits.free_bytes and size > limits.ratio * packed:
        _refuse(
            root,
            f"packs {size // packed} to 1, over the limit of {limits.ratio:g} to 1 that keeps archives from "
            f"unpacking without end; the largest are {_largest(found)}",
        )
