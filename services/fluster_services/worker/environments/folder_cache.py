"""Folders that are costly to make: made once for all who want them at the same moment, kept while there is room.

<root>/<name>-<random>/   one folder, being made until it has its mark
    made                  the mark: how many bytes it takes; when it was changed is when the folder was last used
    …                     what was made
<root>/….gone             being deleted
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from fluster_services.config import DiskLimits
from fluster_services.worker.contract.attempt_directory import GONE_SUFFIX, delete_tree
from fluster_services.worker.linux.disk import size_of, why_unfit

log = logging.getLogger(__name__)

_MARK = "made"


@dataclass(eq=False)
class _Folder:
    name: str
    path: Path
    making: asyncio.Task[None] | None = None  # None: it was there when the cache was opened
    size: int = 0
    used_at: float = 0.0
    users: set[str] = field(default_factory=set)

    @property
    def is_made(self) -> bool:
        return self.making is None or self.making.done()


class FolderCache:
    """The folders below `root`, at most `max_bytes` of them beside those in use. Used by one event loop."""

    def __init__(self, root: Path, max_bytes: int, disk: DiskLimits) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._disk = disk
        self._folders: dict[str, _Folder] = {}  # {name: folder}
        self._deletions: set[asyncio.Task[None]] = set()
        self._makings: set[asyncio.Task[None]] = set()
        self._is_suspect = False  # something could not be put there

    def open(self) -> None:
        """Find what an earlier run has made, and delete what it has not finished."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._root.iterdir():
            name = path.name.rpartition("-")[0]
            size = _marked_size(path / _MARK)
            if path.name.endswith(GONE_SUFFIX) or size is None or name in self._folders:
                delete_tree(path)
            else:
                used_at = (path / _MARK).stat().st_mtime
                self._folders[name] = _Folder(name, path, size=size, used_at=used_at)

    async def use(self, name: str, user: str, make: Callable[[Path], Awaitable[None]]) -> Path:
        """The folder `name`, which `make(path)` fills unless it is there. It stays until `user` releases it.

        Who asks for it while it is made waits for the same making, and is raised what that raises; then nothing of it
        is left, and the next one tries again. It is given up when all who wait for it are cancelled.
        """
        folder = self._folders.get(name)
        if folder is None:
            folder = _Folder(name, self._root / f"{name}-{secrets.token_hex(4)}")
            self._folders[name] = folder
            folder.making = asyncio.create_task(self._make(folder, make), name=f"making {name}")
            self._makings.add(folder.making)
            folder.making.add_done_callback(self._on_made)
        folder.users.add(user)
        if folder.making is not None:
            try:
                await asyncio.shield(folder.making)
            except BaseException:
                self._leave(folder, user)
                raise
        self._touch(folder)
        return folder.path

    def _leave(self, folder: _Folder, user: str) -> None:
        folder.users.discard(user)
        if not folder.users and folder.making is not None and not folder.making.done():
            self._forget(folder)  # at once: who comes now has it made anew, elsewhere
            folder.making.cancel()

    def _on_made(self, making: asyncio.Task[None]) -> None:
        self._makings.discard(making)
        if not making.cancelled():
            making.exception()  # it is raised to those that wait, if any are left

    async def _make(self, folder: _Folder, make: Callable[[Path], Awaitable[None]]) -> None:
        try:
            folder.path.mkdir(mode=0o700)
            await make(folder.path)
            folder.size = await asyncio.to_thread(size_of, folder.path)
            (folder.path / _MARK).write_text(str(folder.size))
        except BaseException as error:
            self._is_suspect = self._is_suspect or isinstance(error, Exception)
            self._forget(folder)
            self._delete(folder.path)
            raise
        self._evict()

    @property
    def root(self) -> Path:
        return self._root

    def examine(self) -> str | None:
        """Why nothing can be put there; None when something can, or always could. Blocks; to be called in a thread."""
        if not self._is_suspect:
            return None
        why = why_unfit(self._root, self._disk)
        self._is_suspect = why is not None
        return None if why is None else f"its cache {self._root} cannot be used: {why}"

    def _forget(self, folder: _Folder) -> None:
        if self._folders.get(folder.name) is folder:
            del self._folders[folder.name]

    def hold(self, path: Path, user: str) -> None:
        """Keep the folder in which `path` lies for `user`, who uses it already."""
        for folder in self._folders.values():
            if path.is_relative_to(folder.path):
                folder.users.add(user)

    def release(self, user: str) -> None:
        """What `user` used may be deleted to make room."""
        for folder in self._folders.values():
            if user in folder.users:
                folder.users.discard(user)
                self._touch(folder)
        self._evict()

    def _touch(self, folder: _Folder) -> None:
        folder.used_at = time.time()
        try:
            os.utime(folder.path / _MARK)
        except OSError as error:  # the order is wrong after a restart, that is all
            log.warning("%s cannot be marked as used: %s", folder.path, error)

    def _evict(self) -> None:
        total = sum(folder.size for folder in self._folders.values())
        idle = [folder for folder in self._folders.values() if folder.is_made and not folder.users]
        for folder in sorted(idle, key=lambda folder: folder.used_at):
            if total <= self._max_bytes:
                return
            total -= folder.size
            log.info("%s is deleted to make room", folder.path)
            self._forget(folder)
            self._delete(folder.path)

    def _delete(self, path: Path) -> None:
        gone = path.with_name(path.name + GONE_SUFFIX)
        try:
            path.rename(gone)
        except (FileNotFoundError, NotADirectoryError):
            return
        deletion = asyncio.create_task(asyncio.to_thread(delete_tree, gone), name=f"deletion of {gone}")
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)

    async def settled(self) -> None:
        """Return when all that was given up is deleted."""
        while self._deletions:
            await asyncio.wait(self._deletions)

    async def close(self) -> None:
        """Stop what is being made, and return when nothing runs here. The folders stay."""
        for making in self._makings:
            making.cancel()
        await asyncio.gather(*self._makings, return_exceptions=True)
        await asyncio.gather(*self._deletions)


def stored_bytes(root: Path) -> int:
    """How much lies in the cache at `root`, whether or not it is open."""
    return sum(_marked_size(mark) or 0 for mark in root.glob(f"*/{_MARK}"))


def _marked_size(mark: Path) -> int | None:
    """None when the folder was not finished, or a power cut took the mark's text."""
    try:
        return int(mark.read_text())
    except (OSError, ValueError):
        return None


async def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread; cancelled, wait until it has ended all the same, since it cannot be stopped half-way."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
