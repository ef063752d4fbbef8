"""The runtime that has each attempt in a container of a Docker Engine, attended by its keeper."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_bus.access.address import CREDENTIALS_VARIABLE
from fluster_bus.messages.parts.images import UsedImage
from fluster_services.capacity import describe_bytes
from fluster_services.config import DiskLimits
from fluster_services.worker.contract.attempt_directory import TASK_FOLDER, directory_name
from fluster_services.worker.contract.attempt_records import LaunchSpec, folder_in_workspace
from fluster_services.worker.contract.config import ContainerSettings, WorkerConfig
from fluster_services.worker.contract.container import (
    INNER_FOLDER,
    NOBODY,
    STATE_LABEL,
    Container,
    ContainerSpec,
    checked_mounts,
    create_body,
    given_libraries,
    own_libraries,
    secret_places,
)
from fluster_services.worker.contract.faults import WorkerFaultError
from fluster_services.worker.contract.runtime import Runtime
from fluster_services.worker.engine import EngineError, NotThereError, asked, connect, data_folder, told
from fluster_services.worker.engine_images import Images
from fluster_services.worker.environments.interpreters import without_interpreters_own
from fluster_services.worker.keeper.template import TemplateHandle
from fluster_services.worker.linux.cgroups import Enforcer
from fluster_services.worker.linux.disk import state_folder_error
from fluster_services.worker.linux.limits import Limits, group_name
from fluster_services.worker.linux.scratch import Disks
from fluster_services.worker.runtimes.process_runtime import ProcessRuntime
from fluster_services.worker.runtimes.process_task import ProcessTask

if TYPE_CHECKING:
    import docker

_log = logging.getLogger(__name__)

_SWEEP_S = 30.0
_PING_TIMEOUT_S = 10.0
_CREDENTIALS_FILE = "credentials.json"


class DockerRuntime:
    """Runs attempts in containers. What a keeper does for a process, it does for a process that attends a container.

    With `enforces_limits` a task is held to its memory and CPUs; to a number of processes it always is.
    """

    def __init__(
        self,
        processes: ProcessRuntime,
        settings: ContainerSettings,
        api_version: str,
        disk: DiskLimits,
        *,
        enforces_limits: bool = True,
    ) -> None:
        self._processes = processes
        self._disk = disk
        self._settings = settings
        self._api_version = api_version
        self._enforces_limits = enforces_limits
        self._own = own_libraries(sys.path)
        self._sweep: asyncio.Task[None] | None = None
        self._root = ""  # where the engine keeps its files, once that is known

    async def start(self, spec: LaunchSpec, payload: bytes | None = None) -> ProcessTask:
        return await self._processes.start(self._in_container(spec), payload)

    async def adopt(self) -> list[ProcessTask]:
        adopted = await self._processes.adopt()
        await self._remove_strays()
        self._sweep = asyncio.create_task(self._sweep_forever())
        return adopted

    def renew(self, ended_in_s: float) -> None:
        self._processes.renew(ended_in_s)

    def trouble(self) -> str | None:
        return self._processes.trouble()

    def examine(self) -> str | None:
        trouble = self._processes.trouble()
        if trouble is None:
            try:
                client = connect(self._settings.engine, timeout_s=_PING_TIMEOUT_S, api_version=self._api_version)
                try:
                    with told(self._settings.engine):
                        client.ping()
                        self._root = self._root or data_folder(client)
                finally:
                    client.close()
            except EngineError as error:
                return str(error)
            return self._why_full()
        return trouble

    def places(self) -> list[Path]:
        return [Path(self._root)] if self._root else []

    def _why_full(self) -> str | None:
        try:
            free_bytes = shutil.disk_usage(self._root).free if self._root else None
        except OSError:  # it is not to be seen from here: what the engine says at the next start has to do
            return None
        wanted_bytes = self._disk.well_free_bytes
        if free_bytes is None or free_bytes >= wanted_bytes:
            return None
        return (
            f"the disk of the Docker engine at {self._settings.engine} has no room: less than {describe_bytes(wanted_bytes)} are left at "
            f"{self._root}: `docker system prune` frees what it does not need"
        )

    async def wait_broken(self) -> WorkerFaultError:
        return await self._processes.wait_broken()

    def limits(self) -> str:
        what = "memory, cpu and pids" if self._enforces_limits else "pids"
        enforced = f"limits of tasks are enforced: {what} by the Docker engine at {self._settings.engine}"
        return f"{enforced}; {self._processes.disk_limits()}"

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            await asyncio.wait({self._sweep})
        await self._processes.close()

    def _in_container(self, spec: LaunchSpec) -> LaunchSpec:
        settings = self._settings
        directory = self._processes.state_dir / directory_name(spec.key)
        # As the worker itself, unless that may do everything.
        user = (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)
        is_trusted = settings.profile == "trusted"
        secret = secret_places(settings.engine, self._processes.state_dir)
        given = given_libraries(without_interpreters_own(spec.python_path), secret=secret)
        credentials = spec.env.get(CREDENTIALS_VARIABLE)
        inner = {DIRECTORY_VARIABLE: INNER_FOLDER}
        if credentials is not None:
            inner[CREDENTIALS_VARIABLE] = f"{INNER_FOLDER}/{_CREDENTIALS_FILE}"
        container_spec = ContainerSpec(
            key=spec.key,
            image=spec.image or settings.image,
            exact_image=_exact(spec),
            command=spec.command,
            env={**spec.env, **inner},
            limits=spec.limits if self._enforces_limits else Limits(pids=spec.limits.pids),
            memory=spec.limits.memory,
            devices=spec.devices,
            mounts=checked_mounts(spec.mounts, settings.mount_roots, secret=secret),
            has_workspace=spec.workspace is not None,
            begins_in=folder_in_workspace(spec),
        )
        container = Container(
            engine=settings.engine,
            api_version=self._api_version,
            name=group_name(directory),
            body=create_body(
                container_spec,
                settings,
                state=self._processes.state_dir,
                task_folder=directory / TASK_FOLDER,
                user=user,
                own=self._own,
                given=given,
            ),
            files={} if credentials is None else {_CREDENTIALS_FILE: credentials},
            owner=None if os.getuid() or is_trusted else list(user),
            timeout_s=settings.timeout_s,
        )
        return dataclasses.replace(
            spec,
            image=container_spec.image,
            container=container,
            python_path=list(given.python_path),
            limits=container_spec.limits,
        )

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._remove_strays()

    async def _remove_strays(self) -> None:
        """Remove what was left when neither its keeper nor this worker lived to do it, or the engine did not answer."""
        try:
            found = await asked(self._list)
            # Known before its container is made: one that is not known by now has no keeper.
            known = {task.spec.container.name for task in self._processes.tasks if task.spec.container is not None}
            strays = [name for name in found if name not in known]
            if strays:
                await asked(self._remove, strays)
        except EngineError as error:
            _log.warning("containers of earlier attempts may be left: %s", error)

    def _list(self) -> list[str]:
        with self._client() as client:
            ours = client.containers(all=True, filters={"label": f"{STATE_LABEL}={self._processes.state_dir}"})
            return [name.removeprefix("/") for found in ours for name in found["Names"][:1]]

    def _remove(self, names: list[str]) -> None:
        with self._client() as client:
            for name in names:
                _log.info("container %s is removed: no keeper attends it", name)
                with suppress(NotThereError), told(self._settings.engine):
                    client.remove_container(name, force=True, v=True)

    @contextmanager
    def _client(self) -> Iterator[docker.APIClient]:
        settings = self._settings
        client = connect(settings.engine, timeout_s=settings.timeout_s, api_version=self._api_version)
        try:
            with told(settings.engine):
                yield client
        finally:
            client.close()


def _exact(spec: LaunchSpec) -> str | None:
    """By which the engine knows the image, whatever its name means by now; None for one that was built for packages."""
    if spec.used_image is None or spec.image != spec.used_image["name"]:
        return None
    used = UsedImage.model_validate(spec.used_image)
    return used.exact or used.id


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
