"""VMs that are containers of a Docker Engine, each with one worker."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fluster_bus.access.address import BusAddress
from fluster_bus.core.devices import VISIBLE_DEVICES
from fluster_bus.messages import Capacity, WorkerId
from fluster_bus.messages.parts.images import UsedImage
from fluster_services.vm.backend import ClusterToJoin, VMError
from fluster_services.vm.container import (
    OWNER_LABEL,
    STATE_FOLDER,
    WORK_FOLDER,
    User,
    checked_folders,
    is_gone,
    own_mark,
    user_of_vms,
    vm_container,
)
from fluster_services.vm.docker_machine import DockerMachine, Engine
from fluster_services.vm.fleet import Fleet, GpuStock, Machine, sized, usual_size
from fluster_services.vm.machine import setup_line
from fluster_services.worker.contract.config import ContainerSettings, WorkerConfig
from fluster_services.worker.contract.container import given_libraries, is_in_or_around, own_libraries, secret_places
from fluster_services.worker.engine import EngineError, asked, find_api_version
from fluster_services.worker.engine_images import Images
from fluster_services.worker.environments.interpreters import without_interpreters_own
from fluster_services.worker.presence.detection import find_gpus

log = logging.getLogger(__name__)

_HOST_NETWORK = "host"


class DockerBackend(Fleet):
    """A backend whose VMs are containers of the engine at `docker_host` (else DOCKER_HOST, or the machine's own).

    Each is held to its resources, `cpus` and `memory` unless others are asked for, and has some memory beside them for its worker. It
    offers `disk`, which is counted and not enforced, and `labels`. It has `gpus` of this machine's as its own, such as "h100:2", or
    "2" of the model that nvidia-smi tells, from its beginning on; that takes an engine with the NVIDIA container toolkit.
    `image` has to bring Python of this program's own minor version; Fluster is mounted.

    On the machine's `network` a worker reaches the bus by the address that the cluster has. On any other it is given
    `cluster_url`, such as nats://172.17.0.1:4222, by which containers reach the bus.

    They run jobs of the `namespaces`, else of all that the cluster was started with, and have credentials for jobs of no other.

    Each of the `folders` is the same in all VMs as it is here, under the same path and to be written to; what tasks write
    there is yours. Else VMs have no files in common, neither with this machine nor with each other.
    """

    def __init__(
        self,
        *,
        image: str | None = None,
        docker_host: str | None = None,
        cpus: float = 4,
        memory: int | str = "4GB",
        gpus: str | None = None,
        disk: int | str | None = None,
        labels: Mapping[str, str] | None = None,
        network: str = _HOST_NETWORK,
        cluster_url: str | None = None,
        folders: Sequence[str | Path] = (),
        namespaces: Sequence[str] | None = None,
    ) -> None:
        super().__init__(namespaces)
        default = ContainerSettings()
        self._settings = replace(
            default,
            engine=docker_host or os.environ.get("DOCKER_HOST") or default.engine,
            image=image or default.image,
            network=network,
        )
        self._usual = usual_size(cpus, memory, disk=disk, labels=labels)
        self._gpus = GpuStock(gpus, os.environ.get(VISIBLE_DEVICES["gpu"]))
        if network != _HOST_NETWORK and cluster_url is None:
            raise ValueError(
                f"network={network!r} needs cluster_url='nats://HOST:PORT', by which its containers reach the bus: "
                "127.0.0.1 there is the container itself"
            )
        self._folders = checked_folders(folders, engine=self._settings.engine)
        self._cluster_url = BusAddress(cluster_url).url if cluster_url is not None else None
        self._engine: Engine | None = None  # once it is open
        self._images: Images | None = None
        self._image: UsedImage | None = None

    async def open(self, cluster: ClusterToJoin) -> None:
        for folder in self._folders:
            if is_in_or_around(folder.source, [cluster.state_dir.resolve()]):
                raise VMError(
                    f"folders has {str(folder.path)!r}, and the cluster keeps files that no task may see in {str(cluster.state_dir)!r}: "
                    "give another folder, or have those elsewhere (store_dir)"
                )
        try:
            version = await asked(find_api_version, self._settings.engine)
            engine = Engine(self._settings.engine, version, self._settings.timeout_s)
            images = Images(self._settings, version)
            await asked(engine.remove_all, OWNER_LABEL, is_gone)
        except EngineError as cause:
            raise VMError(str(cause)) from cause
        if self._gpus.usual.ids:
            self._gpus.know(await find_gpus())
        await super().open(cluster)
        self._engine, self._images = engine, images

    def _sized(self, resources: Capacity, device_ids: tuple[str, ...]) -> Capacity:
        return sized(resources, self._usual, device_ids)

    def _with_devices(
        self, cluster: ClusterToJoin, vm_id: WorkerId, resources: Capacity
    ) -> tuple[Capacity, tuple[str, ...]]:
        usual = self._gpus.usual
        if resources.devices or not usual.ids:
            return super()._with_devices(cluster, vm_id, resources)
        ids = self._gpus.take(vm_id)
        given = {"device": usual.kind, "variant": usual.variant, "devices": len(ids)}
        return resources.model_copy(update=given), ids

    async def release(self, vm_id: WorkerId) -> None:
        await super().release(vm_id)
        if vm_id not in self._vms:  # else another of its name is there by now
            self._gpus.give_back(vm_id)

    async def _prepare(self) -> None:
        assert self._images is not None  # noqa: S101 - it is open
        # All VMs of this program have the image that the first one has.
        self._image = await self._images.use(None, earlier=self._image)
        log.info("VMs have image %s", self._image)

    def _machine(
        self, cluster: ClusterToJoin, vm_id: WorkerId, resources: Capacity, device_ids: tuple[str, ...]
    ) -> Machine:
        assert self._engine is not None  # noqa: S101 - it is open
        secret = secret_places(self._settings.engine, cluster.state_dir)
        program = User(os.getuid(), os.getgid(), tuple(os.getgroups()))
        container = vm_container(
            vm_id,
            resources,
            image=self._settings.image,
            exact_image=(self._image.exact or self._image.id) if self._image is not None else None,
            network=self._settings.network,
            owner=own_mark(),
            user=user_of_vms(program, shares_folders=bool(self._folders)),
            folders=self._folders,
            device_ids=device_ids,
            libraries=[
                given_libraries(without_interpreters_own(cluster.python_path), secret=secret),
                own_libraries(sys.path),
            ],
        )
        config = WorkerConfig(
            address=self._reached(cluster.address),
            worker_id=vm_id,
            state_dir=Path(STATE_FOLDER),
            total=resources,  # its devices are counted from 0 in there
            job_credentials={name: self._reached(address) for name, address in cluster.job_credentials.items()},
            timing=cluster.timing,
            limits=cluster.limits,
            drain_timeout_s=cluster.drain_timeout_s,
            build_timeout_s=cluster.build_timeout_s,
            working_dir=Path(WORK_FOLDER),
            python_path=container.python_path,
        )
        return DockerMachine(self._engine, container, setup_line(config))

    def _reached(self, address: BusAddress) -> BusAddress:
        return address if self._cluster_url is None else replace(address, url=self._cluster_url)
