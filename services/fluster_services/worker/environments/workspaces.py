"""Workspaces at a worker: fetched once, checked, unpacked, and copied by each attempt.

An attempt gets a copy of its own (made by its own process, into its own folder, deleted with that): tasks write where
they run, and through a hard link they would write into everybody's copy.

An archive is not trusted: it is checked before anything of it is written.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from fluster.cluster.workspaces import WORKSPACE_LIMITS, WorkspaceLimits
from fluster_bus.core.errors import ObjectCorruptError, ObjectNotFoundError, ObjectTooLargeError
from fluster_bus.messages import Namespace
from fluster_bus.storage.objects import ObjectStore
from fluster_services.worker.contract.faults import LaunchError
from fluster_services.worker.environments.folder_cache import FolderCache, in_thread

_ARCHIVE, _FILES = "workspace.zip", "files"
_BLOCK_BYTES = 1 << 20
_MAX_TARGET_BYTES = 4_096
_MAX_DEPTH = 200
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED = 0x1

# The record at the end, and the mark of its larger form, which no archive within the limits needs.
_END = struct.Struct("<4sHHHHLLH")
_END_MARK, _END64_LOCATOR_MARK, _END64_LOCATOR_BYTES = b"PK\x05\x06", b"PK\x06\x07", 20
_MAX_ENTRY_BYTES = 46 + 4_096  # of the index: what is fixed, and a name as long as a path may be


class WorkspaceUnavailableError(LaunchError):
    """The workspace is no longer stored, or is not what its hash says."""


class Workspaces:
    """The workspaces of one worker."""

    def __init__(
        self,
        cache: FolderCache,
        store: Callable[[Namespace], ObjectStore],
        limits: WorkspaceLimits = WORKSPACE_LIMITS,
    ) -> None:
        self._cache = cache
        self._store = store
        self._limits = limits

    async def use(self, namespace: Namespace, sha256: str, user: str) -> Path:
        """The folder with the unpacked workspace, only to be read; it stays until `user` releases it.

        Raises WorkspaceUnavailableError, UnpackError, OSError, and BusError when it cannot be fetched at the moment.
        """

        async def make(path: Path) -> None:
            archive = path / _ARCHIVE
            try:
                await self._store(namespace).get_file(sha256, archive, max_bytes=self._limits.archive_bytes)
            except (ObjectNotFoundError, ObjectCorruptError, ObjectTooLargeError) as error:
                raise WorkspaceUnavailableError(
                    f"its workspace cannot be had: {error}; launch the job again"
                ) from error
            await in_thread(lambda: unpack(archive, path / _FILES, self._limits))
            archive.unlink()

        # By namespace too: knowing a hash gives no right to what another namespace has stored.
        return await self._cache.use(f"{namespace}.{sha256}", user, make) / _FILES


class UnpackError(LaunchError):
    """The archive cannot be unpacked.

    ├── ArchiveBrokenError     it is not a zip archive, or a damaged one
    ├── UnsafeMemberError      something in it would get out of the folder, or is not a plain file
    ├── TooManyFilesError
    ├── TooLargeError
    └── CompressionRatioError  it unpacks to far more than it has
    """


class ArchiveBrokenError(UnpackError):
    """It is not a zip archive, or a damaged one."""


class UnsafeMemberError(UnpackError):
    """Something in it would get out of the folder, or is neither file, folder nor link."""


class TooManyFilesError(UnpackError):
    """It holds more files than a workspace may have."""


class TooLargeError(UnpackError):
    """It unpacks to more than a workspace may have."""


class CompressionRatioError(UnpackError):
    """It unpacks to so many times its size that it looks like a trap."""


def unpack(archive: Path, folder: Path, limits: WorkspaceLimits) -> None:
    """Unpack `archive` into the new `folder`. Raises UnpackError, OSError; what is there then is to be deleted."""
    folder.mkdir(mode=0o700)
    _check_index(archive, limits)
    try:
        with zipfile.ZipFile(archive) as packed:
            members = packed.infolist()
            _check_members(members, archive.stat().st_size, limits)
            links = [member for member in members if _is_link(member)]
            for member in members:
                if not _is_link(member):
                    _write(packed, member, folder / member.filename)
            # Last, so that nothing is written through one; looked at when all are there, since one may lead to another.
            for link in links:
                _link(packed, link, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, struct.error) as error:
        raise ArchiveBrokenError(f"workspace {archive} is a damaged archive: {error}") from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # to seek to a place before the start, which a damaged index may name
            raise ArchiveBrokenError(f"workspace {archive} is a damaged archive: {error}") from error
        raise
    for link in links:
        _check_link(folder / link.filename, folder)


def _check_index(archive: Path, limits: WorkspaceLimits) -> None:
    """Refuse an index that would fill the memory, before it is read into it."""
    with archive.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _END.size:
            raise ArchiveBrokenError(f"workspace {archive} is not a zip archive: it has {size} bytes")
        file.seek(max(0, size - _END.size - _END64_LOCATOR_BYTES))
        tail = file.read()
    mark, *_numbers, count, index_bytes, _offset, comment_bytes = _END.unpack(tail[-_END.size :])
    if mark != _END_MARK or comment_bytes:
        raise ArchiveBrokenError(f"workspace {archive} is not a zip archive, or has a comment at its end")
    if tail[: -_END.size].startswith(_END64_LOCATOR_MARK):
        raise TooLargeError(f"workspace {archive} is an archive in the form for more than 65,535 files or 4 GiB")
    if count > limits.files:
        raise TooManyFilesError(f"workspace {archive} has {count:,} files, over the limit of {limits.files:,}")
    if index_bytes > limits.files * _MAX_ENTRY_BYTES:
        raise TooManyFilesError(f"workspace {archive} has an index of {index_bytes:,} bytes: too many files")


def _check_members(members: list[zipfile.ZipInfo], packed_bytes: int, limits: WorkspaceLimits) -> None:
    if len(members) > limits.files:
        raise TooManyFilesError(f"the workspace has {len(members):,} files, over the limit of {limits.files:,}")
    size = sum(member.file_size for member in members)
    if size > limits.bytes:
        raise TooLargeError(f"the workspace unpacks to {size:,} bytes, over the limit of {limits.bytes:,}")
    if size > limits.free_bytes and size > limits.ratio * packed_bytes:
        raise CompressionRatioError(
            f"the workspace unpacks to {size:,} bytes from {packed_bytes:,}, over the limit of {limits.ratio:g} to 1"
        )
    seen: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for member in members:
        path = _check_member(member)
        if path in seen:
            raise UnsafeMemberError(f"the workspace has {member.filename!r} twice")
        seen[path] = member
    for path in seen:
        for parent in path.parents:
            above = seen.get(parent)
            if above is not None and not above.is_dir():
                raise UnsafeMemberError(f"the workspace has {str(path)!r} below {str(parent)!r}, which is not a folder")


def _mode(member: zipfile.ZipInfo) -> int:
    return member.external_attr >> 16


def _is_link(member: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(_mode(member))


def _check_member(member: zipfile.ZipInfo) -> PurePosixPath:
    """The member's path below the folder. Raises UnsafeMemberError."""
    shown, mode = repr(member.orig_filename[:200]), _mode(member)
    parts = member.orig_filename.removesuffix("/").split("/")
    if "\0" in member.orig_filename or "" in parts or not {".", ".."}.isdisjoint(parts):
        raise UnsafeMemberError(f"the workspace has {shown}, which is not a path within a folder")
    if len(parts) > _MAX_DEPTH:
        raise UnsafeMemberError(f"the workspace has {shown}, which lies more than {_MAX_DEPTH} folders deep")
    kind = stat.S_IFMT(mode)  # 0 where the packer knows of no modes
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}:
        raise UnsafeMemberError(f"the workspace has {shown}, which is neither file, folder nor link")
    if kind != 0 and (kind == stat.S_IFDIR) != member.is_dir():
        raise UnsafeMemberError(f"the workspace has {shown}, which is a folder by its mode or its name, not by both")
    if mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        raise UnsafeMemberError(f"the workspace has {shown} with the set-user-id, set-group-id or sticky bit")
    if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
        raise UnsafeMemberError(f"the workspace has {shown}, encrypted or packed in an unusual way")
    return PurePosixPath(*parts)


def _write(packed: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    if member.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o755 if _mode(member) & 0o111 else 0o644
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    left = member.file_size
    with os.fdopen(fd, "wb") as target, packed.open(member) as source:
        while block := source.read(_BLOCK_BYTES):
            left -= len(block)
            if left < 0:
                raise TooLargeError(f"{member.filename!r} in the workspace is larger than the archive says")
            target.write(block)


def _link(packed: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    if member.file_size > _MAX_TARGET_BYTES:
        raise UnsafeMemberError(f"the workspace has the link {member.filename!r} to a path that is too long")
    target = packed.read(member).decode()
    if not target or target.startswith("/") or "\0" in target:
        raise UnsafeMemberError(
            f"the workspace has the link {member.filename!r} to {target!r}, which is not a path in it"
        )
    path = folder / member.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _check_link(link: Path, folder: Path) -> None:
    goal = os.path.realpath(link)
    if not Path(goal).is_relative_to(os.path.realpath(folder)):
        raise UnsafeMemberError(
            f"the workspace has the link {str(link.relative_to(folder))!r} to {link.readlink()}, which leads out of it"
        )
