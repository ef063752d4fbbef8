"""Whether a worker runs tasks in containers: as it was told, or where there is an engine."""

from __future__ import annotations

import logging

from fluster.local_setup import RuntimeName
from fluster_services.worker.contract.container import ContainerSettings
from fluster_services.worker.engine.engine import EngineError, find_api_version

_log = logging.getLogger(__name__)


def choose_containers(runtime: RuntimeName, settings: ContainerSettings) -> ContainerSettings | None:
    """`settings`, or None for processes. "auto" takes containers where an engine answers; else there is none to be looked for."""
    if runtime == "process":
        return None
    if runtime == "auto":
        try:
            find_api_version(settings.engine)
        except EngineError as error:
            _log.info("tasks run as processes: %s", error)
            return None
    return settings
