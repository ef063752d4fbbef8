"""Takes the workspaces of jobs to the cluster, before the jobs go there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fluster_bus.bus import Bus
from fluster_bus.messages import JobRequest
from fluster_bus.objects import ObjectStore


async def with_stored_workspaces(bus: Bus, namespace: str, requests: Sequence[JobRequest]) -> list[JobRequest]:
    """The requests as they travel: each folder packed, stored, and named by its hash; each folder once.

    Raises WorkspaceError, and StorageError when it could not be stored.
    """
    store = ObjectStore(bus, namespace)
    stored: dict[str, str] = {}  # {folder: SHA-256}
    ready = []
    for request in requests:
        workspace = request.environment.workspace
        if workspace is None:
            ready.append(request)
            continue
        folder = str(workspace)
        if folder not in stored:
            stored[folder] = await _store(store, folder)
        environment = request.environment.model_copy(update={"workspace": None, "bundle": stored[folder]})
        ready.append(request.model_copy(update={"environment": environment}))
    return ready


async def _store(store: ObjectStore, folder: str) -> str:
    from fluster.cluster.workspace import pack  # its pattern library is for those only who have a workspace

    with await asyncio.to_thread(pack, folder) as archive:
        return await store.put_file(archive)
