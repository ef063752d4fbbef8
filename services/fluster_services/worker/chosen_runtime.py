"""Which runtime a worker has: processes, containers, or containers where there is an engine."""

from __future__ import annotations

import logging
from pathlib import Path

from fluster.local_setup import RuntimeName
from fluster_services.worker.cgroups import Enforcer
from fluster_services.worker.config import WorkerConfig
from fluster_services.worker.container import ContainerSettings
from fluster_services.worker.docker_runtime import DockerRuntime
from fluster_services.worker.engine import EngineError, find_api_version
from fluster_services.worker.images import Images
from fluster_services.worker.process_runtime import ProcessRuntime
from fluster_services.worker.runtime import Runtime
from fluster_services.worker.template import TemplateHandle

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


def make_runtime(
    config: WorkerConfig, template: TemplateHandle, enforcer: Enforcer | None, api_version: str | None
) -> tuple[Runtime, Images | None]:
    """The worker's runtime, and with containers what brings their images."""
    state_dir: Path = config.state_dir / "attempts"
    settings = config.containers
    processes = ProcessRuntime(state_dir, template, enforcer)
    runtime: Runtime = processes
    images = None
    if settings is not None and api_version is not None:
        enforces_limits = config.enforce_limits != "never"
        runtime = DockerRuntime(processes, settings, api_version, enforces_limits=enforces_limits)
        images = Images(settings, api_version)
    _log.info("%s", runtime.limits())
    return runtime, images
