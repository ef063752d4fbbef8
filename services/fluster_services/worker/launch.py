"""Makes of a task's record what a runtime can start: environment, ports, credentials, working folder."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fluster.cluster.identity import CONTROLLER_ADDRESS, GANG_ADDRESS, KILL_GRACE, TaskIdentity
from fluster_bus.address import ADDRESS_VARIABLE, CREDENTIALS_VARIABLE, BusAddress
from fluster_bus.messages import JobRecord, Namespace, TaskRecord, WorkerId
from fluster_bus.messages.jobs import port_variable
from fluster_bus.subjects import attempt_key
from fluster_services.config import Timing
from fluster_services.worker.attempt_directory import LaunchSpec
from fluster_services.worker.detection import VISIBLE_DEVICES
from fluster_services.worker.environments import VirtualEnvironment, without_interpreters_own
from fluster_services.worker.limits import MAX_PIDS, Limits
from fluster_services.worker.preparation import Prepared

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launcher:
    """What all attempts at one worker have in common."""

    worker_id: WorkerId
    credentials: Mapping[Namespace, BusAddress]  # of the role "job"
    credentials_dir: Path
    timing: Timing
    working_dir: Path | None = None  # None: a fresh folder for each attempt
    python_path: tuple[str, ...] = ()
    device_kind: str = "cpu"  # of those that tasks are given
    in_containers: bool = False

    def prepare(self) -> None:
        """Write each namespace's credentials where its tasks, and nobody else, find them."""
        self.credentials_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for namespace, address in self.credentials.items():
            address.save(self._credentials_file(namespace))

    def _credentials_file(self, namespace: Namespace) -> Path:
        return self.credentials_dir / f"{namespace}.json"

    def _visible(self, devices: Sequence[str]) -> dict[str, str]:
        """How a task is told which devices are its own; one without any sees none."""
        variable = VISIBLE_DEVICES.get(self.device_kind)
        if self.in_containers:  # which has no others, and counts its own from 0
            devices = [str(number) for number in range(len(devices))]
        return {variable: ",".join(devices)} if variable is not None else {}

    def spec(
        self, task: TaskRecord, job: JobRecord, prepared: Prepared, devices: Sequence[str] = ()
    ) -> tuple[LaunchSpec, bytes | None]:
        """What is to be started, and the pickled callable when it is no command. Raises OSError without free ports."""
        request = job.request
        command = request.entrypoint.command
        identity = TaskIdentity(
            job_id=task.job_id,
            task=task.task,
            num_tasks=request.replicas,
            attempt=task.attempt,
            worker_id=self.worker_id,
            namespace=task.namespace,
        )
        own = prepared.environment
        bus_url = ",".join(self.credentials[task.namespace].servers)
        environment = {
            **({} if self.in_containers else _interpreter(own)),
            "PYTHONUNBUFFERED": "1",  # what a program prints is in its log when it prints it
            **_rendezvous(task, job),
            **request.environment.env_vars,
            **identity.to_environment(),
            KILL_GRACE: f"{self.timing.kill_grace_s:g}",
            **{port_variable(name): str(port) for name, port in _free_ports(request.ports).items()},
            **({GANG_ADDRESS: job.gang_address} if job.gang_address is not None else {}),
            **self._visible(devices),
            ADDRESS_VARIABLE: bus_url,
            CONTROLLER_ADDRESS: bus_url,
            CREDENTIALS_VARIABLE: str(self._credentials_file(task.namespace)),
        }
        spec = LaunchSpec(
            key=attempt_key(task.namespace, task.job_id, task.task, task.attempt),
            command=list(command) if command is not None else None,
            env=environment,
            working_dir=str(self.working_dir) if self.working_dir is not None else None,
            workspace=str(prepared.workspace) if prepared.workspace is not None else None,
            python=str(own.python) if own is not None else None,
            python_path=list(self.python_path) if own is None else without_interpreters_own(self.python_path),
            kill_grace_s=self.timing.kill_grace_s,
            must_return=request.must_return,
            timeout_s=request.timeout_s,
            fence_after_s=self.timing.fence_after_s,
            devices=list(devices),
            image=prepared.image,
            mounts=dict(request.environment.mounts),
            limits=Limits(memory=request.resources.memory, cpu=request.resources.cpu, pids=MAX_PIDS),
        )
        return spec, request.entrypoint.pickled


def _interpreter(own: VirtualEnvironment | None) -> dict[str, str]:
    """What makes `python` mean the task's own, else the one that runs this worker, so that Fluster can be imported."""
    first = own.python if own is not None else Path(sys.executable)
    search_path = os.pathsep.join([str(first.parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": search_path, **({"VIRTUAL_ENV": str(own.folder)} if own is not None else {})}


def _rendezvous(task: TaskRecord, job: JobRecord) -> dict[str, str]:
    """The same by the names that torch.distributed reads; the user's own values go before them."""
    if job.gang_address is None:
        return {}
    host, _, port = job.gang_address.rpartition(":")
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(task.task),
        "WORLD_SIZE": str(job.request.replicas),
    }


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """A port for each name; all are held until all are known, so no two are the same."""
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in names}
        for each in sockets.values():
            each.bind((_LOOPBACK, 0))
        return {name: each.getsockname()[1] for name, each in sockets.items()}
