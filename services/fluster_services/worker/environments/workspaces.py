"""Workspaces at a worker: fetched once, checked, unpacked, and copied by each attempt.

An attempt gets a copy of its own (made by its own process, into its own folder, deleted with that): tasks write where
they run, and through a hard link they would write into everybody's copy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fluster.cluster.workspaces import WORKSPACE_LIMITS, WorkspaceLimits
from fluster_bus.core.errors import ObjectCorruptError, ObjectNotFoundError, ObjectTooLargeError
from fluster_bus.messages import Namespace
from fluster_bus.storage.objects import ObjectStore
from fluster_services.worker.contract.folder_cache import FolderCache, in_thread
from fluster_services.worker.contract.runtime import LaunchError
from fluster_services.worker.environments.unpacking import unpack

_ARCHIVE, _FILES = "workspace.zip", "files"


class WorkspaceUnavailableError(LaunchError):
    """The workspace is not stored any more, or is not what its hash says."""


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

        # By namespace too: to know a hash is no right to what another namespace has stored.
        return await self._cache.use(f"{namespace}.{sha256}", user, make) / _FILES
