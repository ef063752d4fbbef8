"""The folder that a job names to run in: a worker without it leaves the job to others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fluster_bus.messages import EnvironmentConfig, WorkerId


class UnfitError(Exception):
    """This worker lacks what a job names, whatever room it has."""


async def check_folder(environment: EnvironmentConfig, worker_id: WorkerId, *, in_containers: bool) -> None:
    """Return when tasks can run in the folder that is named, if there is one. Raises UnfitError."""
    folder = environment.cwd
    if folder is None or environment.bundle is not None:
        return
    if in_containers:
        raise UnfitError(f"worker {worker_id} runs tasks in containers, which have no folder {folder!r}")
    # In a thread: it may lie on a file system that is slow to answer.
    if not await asyncio.to_thread(_can_be_entered, Path(folder)):
        raise UnfitError(f"worker {worker_id} has no folder {folder!r}, or may not enter it")


def _can_be_entered(folder: Path) -> bool:
    try:
        return folder.is_dir() and os.access(folder, os.X_OK)
    except OSError:
        return False
