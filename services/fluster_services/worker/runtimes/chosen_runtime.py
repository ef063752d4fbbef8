"""The runtime of a worker: processes, or containers."""

from __future__ import annotations

import logging
from pathlib import Path

from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.runtime import Runtime
from fluster_services.worker.engine.images import Images
from fluster_services.worker.keeper.template import TemplateHandle
from fluster_services.worker.linux.cgroups import Enforcer
from fluster_services.worker.linux.probing import state_folder_error
from fluster_services.worker.linux.scratch import Disks
from fluster_services.worker.runtimes.docker_runtime import DockerRuntime
from fluster_services.worker.runtimes.process_runtime import ProcessRuntime

_log = logging.getLogger(__name__)


def make_runtime(
    config: WorkerConfig, template: TemplateHandle, enforcer: Enforcer | None, disks: Disks, api_version: str | None
) -> tuple[Runtime, Images | None]:
    """The worker's runtime, and with containers what brings their images. Raises StateFolderError."""
    state_dir: Path = config.state_dir / "attempts"
    settings = config.containers
    try:
        processes = ProcessRuntime(state_dir, template, enforcer, disks)
    except OSError as error:
        raise state_folder_error(state_dir, error) from error
    runtime: Runtime = processes
    images = None
    if settings is not None and api_version is not None:
        enforces_limits = config.enforce_limits != "never"
        runtime = DockerRuntime(processes, settings, api_version, config.limits.disk, enforces_limits=enforces_limits)
        images = Images(settings, api_version)
    _log.info("%s", runtime.limits())
    return runtime, images
