"""The daemons of a cluster on this machine: what each is made of, and when it is started again.

Nothing that takes long is imported above: the supervisor imports this before it starts the server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fluster.local_setup import LocalSetup
from fluster_bus.core.devices import Devices, from_json
from fluster_bus.core.errors import FlusterError
from fluster_bus.core.roles import Role
from fluster_bus.running.backoff import Backoff
from fluster_bus.server import EmbeddedServer
from fluster_services.config import LocalLimits, local_timing
from fluster_services.forking import import_kept, import_own
from fluster_services.local_users import JOBS_FOLDER

if TYPE_CHECKING:
    from fluster_bus.access.address import BusAddress
    from fluster_bus.connection.bus import Bus
    from fluster_bus.messages import Capacity, Namespace, WorkerId
    from fluster_services.vm.backend import ClusterToJoin
    from fluster_services.worker.contract.config import ContainerSettings

# What is to be imported before the fork, by those who share it.
FOR_ALL = (
    "fluster_services.daemon",
    "fluster_services.lifecycle",
    "fluster_services.capacity",
    "fluster_bus.storage.registry",
    "fluster_bus.connection.services_api",
    "fluster_bus.storage.streams",
    "uvloop",
)
FOR_WORKERS = ("fluster_services.worker.__main__", "fluster.cluster")
FOR_VMS = ("fluster_services.vm.daemon",)
_FOR_CONTROLLERS = ("fluster_services.controller.__main__",)  # which they import by themselves

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 5.0  # before one that died is started again
_SETTLED_S = 10.0  # one that ran for so long may be started again at once


_FIXED = (
    "the VMs of this cluster have credentials for jobs of the namespaces that it was started with; start it with `fluster up --namespace` "
    "or LocalCluster(namespaces=[…]) for all that are needed"
)


@dataclass
class Daemon:
    """A process that the supervisor forks, and forks again when it ends."""

    name: str
    body: Callable[[int | None, int], None]  # (ready_fd, owner_fd) -> runs until it ends
    title: str = ""  # in errors; else it is the name
    has_wishes: bool = False  # it is a controller, which may have namespaces added
    may_leave: bool = False  # when it ends with status 0 it has done what it was asked to do, and stays away
    pid: int = 0  # 0 while it does not run
    restart_at: float | None = None
    _started_at: float = field(default=0.0, init=False)
    _backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S), init=False)

    def on_start(self, pid: int, now: float) -> None:
        self.pid, self._started_at, self.restart_at = pid, now, None

    def on_end(self, status: int, now: float) -> None:
        """It has ended: say in `restart_at` when it is to be started again, if it is."""
        self.pid = 0
        if self.may_leave and status == 0:
            return
        if now - self._started_at >= _SETTLED_S:
            self._backoff.reset()
        else:
            self._backoff.lengthen()
        self.restart_at = now + self._backoff.pause_s


def read_limits(setup: LocalSetup) -> LocalLimits:
    """Return the limits that the owner has asked for. Raises FlusterError."""
    if not setup.limits:
        return LocalLimits()  # what reads them takes long to import
    import_own("fluster_services.settings")
    from fluster_services.settings import read_local_limits

    return read_local_limits(setup.limits)


class LocalDaemons:
    """Makes those of one cluster, as its owner has asked for them. Their bodies run in processes of their own."""

    def __init__(
        self, setup: LocalSetup, limits: LocalLimits, store_dir: Path, server: EmbeddedServer, wishes: int
    ) -> None:
        """`wishes` is the descriptor into which controllers write what users the server is to let in."""
        self._setup = setup
        self._store_dir = store_dir
        self._server = server
        self._wishes = wishes
        try:
            self._timing = local_timing(setup.timing)
        except ValueError as error:
            raise FlusterError(f"timing: {error}") from error
        self._limits, self._log_bytes = limits, limits.daemon_logs.file_bytes

    def controller(self, number: int) -> Daemon:
        # Started again under the same name, it leads again at once if it did before.
        name = f"controller-{number}" if number else "controller"

        def body(ready_fd: int | None, owner_fd: int) -> None:
            import_kept(*_FOR_CONTROLLERS, is_shared=False)
            from fluster_bus.messages import Namespace
            from fluster_services.controller.__main__ import run_controller
            from fluster_services.controller.controller import ControllerConfig
            from fluster_services.controller.namespace_reconciler import LocalUsers

            config = ControllerConfig(
                address=self._server.credentials(Role.SERVICE),
                namespaces=tuple(Namespace(name) for name in self._setup.namespaces),
                namespaces_are_fixed=_FIXED if self._setup.backend is not None else None,
                server_users=LocalUsers(self._store_dir, self._wishes),
                timing=self._timing,
                records=self._limits.records,
                bounds=self._limits.bounds,
                controller_id=name,
            )
            log_file = self._store_dir / f"logs/{name}.log"
            run_controller(config, ready_fd=ready_fd, owner_fd=owner_fd, log_file=log_file, log_bytes=self._log_bytes)

        return Daemon(name, body, title=f"the {name}", has_wishes=True)

    def worker(self, number: int) -> Daemon:
        name = f"worker-{number}"

        def body(ready_fd: int | None, owner_fd: int) -> None:
            from fluster_bus.messages import WorkerId
            from fluster_services.worker.__main__ import run_worker
            from fluster_services.worker.contract.config import WorkerConfig, program_environment
            from fluster_services.worker.engine import choose_containers
            from fluster_services.worker.gpus.inventory import MASK_VARIABLE, mask_style
            from fluster_services.worker.gpus.locks import FOLDER_VARIABLE

            state_dir = self._store_dir / name
            config = WorkerConfig(
                address=self._server.credentials(Role.WORKER),
                worker_id=WorkerId(name),
                state_dir=state_dir,
                total=self._total(number, state_dir),
                device_ids=self._devices(number).ids,
                detected_share=(number, self._setup.workers) if self._setup.devices is None else None,
                job_credentials=self._job_credentials(),
                job_credentials_dir=self._store_dir / JOBS_FOLDER,
                timing=self._timing,
                limits=self._limits.worker,
                drain_timeout_s=self._drain_timeout_s(),
                build_timeout_s=self._build_timeout_s(),
                working_dir=Path(self._setup.working_dir),
                python_path=self._setup.python_path,
                # The supervisor's own is what the owner's was when it started the cluster.
                environment=program_environment(os.environ, with_secrets=self._setup.passes_secrets),
                gpu_mask=mask_style(os.environ.get(MASK_VARIABLE)),
                gpu_locks=os.environ.get(FOLDER_VARIABLE) or None,
                enforce_limits="always" if self._setup.enforce_limits else "never",
                containers=choose_containers(self._setup.runtime, self._containers()),
            )
            log_file = self._store_dir / f"logs/{name}.log"
            run_worker(config, ready_fd=ready_fd, owner_fd=owner_fd, log_file=log_file, log_bytes=self._log_bytes)

        return Daemon(name, body, may_leave=True)

    def vms(self) -> Daemon:
        def body(ready_fd: int | None, owner_fd: int) -> None:
            import base64
            import pickle

            from fluster_services.vm.daemon import WantedVMs, run_vms

            # The backend's class may be the owner's own.
            sys.path[:] = dict.fromkeys((*self._setup.python_path, *sys.path))
            run_vms(
                WantedVMs(
                    backend=pickle.loads(base64.b64decode(self._setup.backend or "")),
                    resources={self._vm_id(number): self._given(number) for number in range(self._setup.workers)},
                    boot_timeout_s=self._setup.start_timeout_s,
                ),
                self._cluster_to_join,
                address=self._server.credentials(Role.SERVICE),
                ready_fd=ready_fd,
                owner_fd=owner_fd,
                log_file=self._store_dir / "logs/vms.log",
                log_bytes=self._log_bytes,
            )

        return Daemon("vms", body, title="what makes the workers' VMs", may_leave=True)

    def _cluster_to_join(self, bus: Bus) -> ClusterToJoin:
        from fluster_services.vm.backend import ClusterToJoin

        return ClusterToJoin(
            bus=bus,
            address=self._server.credentials(Role.WORKER),
            job_credentials=self._job_credentials(),
            state_dir=self._store_dir,
            timing=self._timing,
            limits=self._limits.worker,
            working_dir=Path(self._setup.working_dir),
            python_path=self._setup.python_path,
            device_ids={self._vm_id(number): self._devices(number).ids for number in range(self._setup.workers)},
            log_dir=self._store_dir / "logs",
            drain_timeout_s=self._drain_timeout_s(),
            build_timeout_s=self._build_timeout_s(),
        )

    def _drain_timeout_s(self) -> float:
        from fluster_services.worker.contract.config import WorkerConfig

        given_s = self._setup.drain_timeout_s
        return WorkerConfig.drain_timeout_s if given_s is None else given_s

    def _build_timeout_s(self) -> float:
        from fluster_services.worker.contract.config import WorkerConfig

        given_s = self._setup.build_timeout_s
        return WorkerConfig.build_timeout_s if given_s is None else given_s

    def _job_credentials(self) -> dict[Namespace, BusAddress]:
        from fluster_bus.messages import Namespace

        return {Namespace(each): self._server.credentials(Role.JOB, each) for each in self._server.namespaces}

    def _containers(self) -> ContainerSettings:
        from fluster_services.worker.contract.config import ContainerSettings

        known = {**self._setup.containers, "build_timeout_s": self._build_timeout_s()}
        if self._setup.docker_host:
            known["engine"] = self._setup.docker_host
        if self._setup.image:
            known["image"] = self._setup.image
        return ContainerSettings(**known)

    def _share(self) -> Capacity:
        from fluster_bus.messages import Capacity

        setup = self._setup
        return Capacity(
            cpu=round(setup.cpu / setup.workers, 3),
            memory=setup.memory // setup.workers,
            disk=(setup.disk or 0) // setup.workers,
            labels=setup.labels,
        )

    def _total(self, number: int, state_dir: Path) -> Capacity:
        """What a worker has from the start."""
        from fluster_services.worker.presence.detection import free_disk

        total = self._given(number)
        if self._setup.disk is not None:
            return total
        free = free_disk(state_dir, self._limits.worker.caches)
        return total.model_copy(update={"disk": free // self._setup.workers})

    def _given(self, number: int) -> Capacity:
        """What the owner has said that a worker, or a VM, has."""
        from fluster_bus.messages.parts.counted import as_counts, share

        devices = self._devices(number)
        given: dict[str, object] = {"device": devices.kind, "variant": devices.variant, "devices": len(devices.ids)}
        given["resources"] = share(as_counts(self._setup.resources), number, self._setup.workers)
        return self._share().model_copy(update=given)

    def _vm_id(self, number: int) -> WorkerId:
        from fluster_bus.messages import WorkerId

        return WorkerId(f"worker-{number}")

    def _devices(self, number: int) -> Devices:
        given = from_json(self._setup.devices) if self._setup.devices is not None else Devices()
        return given.share(number, self._setup.workers)
