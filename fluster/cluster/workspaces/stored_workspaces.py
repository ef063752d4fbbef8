"""Takes the workspaces of jobs to the cluster, before the jobs go there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fluster_bus.connection.bus import Bus
from fluster_bus.messages import EnvironmentConfig, JobRequest
from fluster_bus.storage.objects import ObjectStore


async def with_stored_workspaces(bus: Bus, namespace: str, requests: Sequence[JobRequest]) -> list[JobRequest]:
    """The requests as they travel: each folder packed, stored, and named by its hash; each folder once.

    Raises WorkspaceError, and StorageError when it could not be stored.
    """
    stored: dict[str, str] = {}  # {folder: SHA-256}
    ready = []
    for request in requests:
        environment = await with_stored_workspace(bus, namespace, request.environment, stored)
        changed = environment is not request.environment
        ready.append(request.model_copy(update={"environment": environment}) if changed else request)
    return ready


async def with_stored_workspace(
    bus: Bus, namespace: str, environment: EnvironmentConfig, stored: dict[str, str] | None = None
) -> EnvironmentConfig:
    """The same for one environment, which any number of jobs may have then. `stored` are folders that are there already."""
    if environment.workspace is None:
        return environment
    folder, stored = str(environment.workspace), {} if stored is None else stored
    if folder not in stored:
        stored[folder] = await _store(ObjectStore(bus, namespace), folder)
    return environment.model_copy(update={"workspace": None, "bundle": stored[folder]})


async def _store(store: ObjectStore, folder: str) -> str:
    from fluster.cluster.workspaces.workspace import pack  # its pattern library is for those only who have a workspace

    with await asyncio.to_thread(pack, folder) as archive:
        return await store.put_file(archive)
