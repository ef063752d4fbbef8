"""Notes where commands are submitted, for workers that share that place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_bus.messages import JobRequest
from fluster_bus.messages.parts.origin import Origin


def with_origin(requests: Sequence[JobRequest]) -> list[JobRequest]:
    """The same requests; commands that do not say where they come from are from this process's folder and PATH."""
    if all(request.entrypoint.command is None or request.origin is not None for request in requests):
        return list(requests)
    origin = Origin.here(folder=_folder())
    return [
        request.model_copy(update={"origin": origin})
        if request.entrypoint.command is not None and request.origin is None
        else request
        for request in requests
    ]


def _folder() -> Path | None:
    """The present folder; None in a task's own one, which is gone when the task has ended."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return None
    attempt = os.environ.get(DIRECTORY_VARIABLE)
    if attempt is not None and folder.is_relative_to(Path(attempt).resolve()):
        return None
    return folder
