"""What an attempt needs to be there before it starts: its workspace, and its virtual environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fluster_bus.core.errors import ObjectNotFoundError
from fluster_bus.messages import EnvironmentConfig, JobRequest, Namespace
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.stored_messages import SecretStore
from fluster_services.config import WorkerLimits
from fluster_services.worker.contract.attempt_records import LaunchSpec
from fluster_services.worker.contract.container import OWN_MINOR
from fluster_services.worker.contract.faults import LaunchError
from fluster_services.worker.engine_images import Images
from fluster_services.worker.environments.environment_images import EnvironmentImages
from fluster_services.worker.environments.environments import (
    Environments,
    Listener,
    read_needs,
    wants_environment,
)
from fluster_services.worker.environments.folder_cache import FolderCache
from fluster_services.worker.environments.interpreters import TaskPython
from fluster_services.worker.environments.workspaces import Workspaces


class PythonMismatchError(LaunchError):
    """The callable was pickled by another minor version of Python than would run it."""


@dataclass(frozen=True)
class Prepared:
    """What is there for an attempt."""

    workspace: Path | None = None  # to be copied
    environment: TaskPython | None = None
    image: str | None = field(default=None, compare=False)  # None: no container; usually it is there, and costs no time
    used_image: UsedImage | None = field(default=None, compare=False)  # that one, or what was built upon it
    secrets: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # {variable: value}
    sees_folder: bool = field(default=False, compare=False)  # from which the command was submitted


class Preparation:
    """The caches of one worker, below `folder`; with `images`, its tasks run in containers."""

    def __init__(
        self,
        folder: Path,
        store: Callable[[Namespace], ObjectStore],
        secrets: Callable[[Namespace], SecretStore],
        limits: WorkerLimits,
        images: Images | None = None,
        *,
        build_timeout_s: float = 1_800.0,
    ) -> None:
        self._images = images
        self._secrets = secrets
        self._built = (
            EnvironmentImages(images.settings, images.api_version, str(folder)) if images is not None else None
        )
        self._caches = (
            FolderCache(folder / "workspaces", limits.caches.workspaces_bytes, limits.disk),
            FolderCache(folder / "environments", limits.caches.environments_bytes, limits.disk),
        )
        self._unopened = list(self._caches)
        self._workspaces = Workspaces(self._caches[0], store)
        self._environments = Environments(self._caches[1], limits.disk, build_timeout_s=build_timeout_s)

    def open_caches(self) -> None:
        """Find what is there from an earlier run; called again after an OSError it goes on. To be called in a thread."""
        while self._unopened:
            self._unopened[-1].open()
            self._unopened.pop()

    def open(self) -> None:
        """Begin with removing what builds of images have left."""
        if self._built is not None:
            self._built.open()

    def examine(self) -> str | None:
        """Why a cache that something could not be put into still takes nothing; None when all do. To be called in a thread."""
        found = (each.examine() for each in (*self._caches, self._environments))
        return next((trouble for trouble in found if trouble is not None), None)

    def places(self) -> list[Path]:
        """Where all of it is made. To be called in a thread."""
        return [*(cache.root for cache in self._caches), *self._environments.places()]

    async def prepare(
        self,
        namespace: Namespace,
        request: JobRequest,
        key: str,
        listen: Listener,
        *,
        earlier_image: UsedImage | None = None,
    ) -> Prepared:
        """Make what the request's environment asks for; it stays until `key` is released. `listen` gets what is said meanwhile.

        `earlier_image` is what its image meant to an attempt of the same job.

        Raises LaunchError, whose text is meant for the user; OSError; BusError when the bus is away.
        """
        config = request.environment
        if config.workspace is not None:
            raise LaunchError(
                f"workspace={str(config.workspace)!r} is a folder of the client, which was not packed: launch the job "
                "with Cluster.launch, or give bundle=<the SHA-256 of a packed folder that is stored>"
            )
        _check_image(config, in_containers=self._images is not None)
        _check_pickled_by(request)
        workspace = None
        if config.bundle is not None:
            workspace = await self._workspaces.use(namespace, config.bundle, key)
        secrets = await self._read_secrets(namespace, request)
        if self._images is not None and self._built is not None:
            base = await self._images.use(config.image, key, listen, earlier=earlier_image)
            image = base.name
            if wants_environment(config):
                image = await self._build(request, base, workspace, key, listen)
            return Prepared(workspace, image=image, used_image=base, secrets=secrets)
        environment = None
        if wants_environment(config):
            environment = await self._environments.use(config, workspace, key, listen)
            if environment.version is not None:
                _check_python(request, f"python={config.python!r}", environment.version)
        return Prepared(workspace, environment, secrets=secrets, sees_folder=await _sees_folder(request))

    async def _read_secrets(self, namespace: Namespace, request: JobRequest) -> Mapping[str, str]:
        """Those that the job names. Raises LaunchError when they are not there."""
        names = request.environment.secrets
        if not names:
            return {}
        try:
            values = await self._secrets(namespace).get(request.submission or "")
        except ObjectNotFoundError as error:
            raise LaunchError(str(error)) from error
        return {name: values[name] for name in names if name in values}

    async def _build(
        self, request: JobRequest, base: UsedImage, workspace: Path | None, key: str, listen: Listener
    ) -> str:
        """The image with a job's packages upon `base`."""
        assert self._built is not None  # noqa: S101 - tasks run in containers
        needs = read_needs(request.environment, workspace)
        given = f"image {base.name!r}" if needs.python is None else f"python={needs.python!r} in image {base.name!r}"
        exact = base.exact or base.name
        # Known before anything is built, which may take long and be in vain.
        _check_python(request, given, await self._built.find_python(exact, needs.python))
        return await self._built.use(exact, needs, workspace, key, listen)

    def hold(self, key: str, spec: LaunchSpec) -> None:
        """Keep what a task that runs already uses."""
        for path in (spec.workspace, spec.python):
            for cache in self._caches if path is not None else ():
                cache.hold(Path(path or ""), key)

    def release(self, key: str) -> None:
        """The attempt is over."""
        for cache in self._caches:
            cache.release(key)
        if self._built is not None:
            self._built.release(key)

    async def settled(self) -> None:
        """Return when nothing is left of what could not be made."""
        for cache in self._caches:
            await cache.settled()

    async def close(self) -> None:
        """Stop what is being prepared."""
        if self._built is not None:
            await self._built.close()
        for cache in self._caches:
            await cache.close()


async def _sees_folder(request: JobRequest) -> bool:
    if request.origin is None or request.origin.folder is None or request.environment.bundle is not None:
        return False
    # In a thread: it may lie on a file system that is slow to answer.
    return await asyncio.to_thread(request.origin.sees_folder)


def _check_image(config: EnvironmentConfig, *, in_containers: bool) -> None:
    given = f"image={config.image!r}" if config.image is not None else f"mounts={dict(config.mounts)!r}"
    if (config.image is not None or config.mounts) and not in_containers:
        raise LaunchError(
            f"{given} needs a worker that runs jobs in containers, and this one runs them as processes: "
            "start it with runtime docker, or leave that out"
        )


def _check_pickled_by(request: JobRequest) -> None:
    made_by, own = request.entrypoint.python, OWN_MINOR
    if request.entrypoint.pickled is not None and made_by is not None and made_by != own:
        raise PythonMismatchError(
            f"the callable was pickled by Python {made_by}, and this worker's is {own}: launch it from Python {own}, "
            "or give the job as a command"
        )


def _check_python(request: JobRequest, given: str, version: str) -> None:
    own = OWN_MINOR
    if request.entrypoint.pickled is not None and version != own:
        raise PythonMismatchError(
            f"{given} is Python {version} and this worker's is {own}: a callable needs the worker's own minor version. "
            f"Give the job as a command, or name a Python {own}"
        )
