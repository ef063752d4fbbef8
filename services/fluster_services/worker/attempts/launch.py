"""Makes of a task's record what a runtime can start: environment, ports, credentials, working folder."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fluster.cluster.task.task_context import ARRAY_ID, CONTROLLER_ADDRESS, GANG_ADDRESS, KILL_GRACE, TaskIdentity
from fluster_bus.access.address import ADDRESS_VARIABLE, CREDENTIALS_VARIABLE, BusAddress
from fluster_bus.core.buckets import attempt_key
from fluster_bus.core.devices import VISIBLE_DEVICES
from fluster_bus.messages import JobRecord, JobRequest, Namespace, TaskRecord, WorkerId
from fluster_bus.messages.jobs import port_variable
from fluster_bus.messages.parts.origin import SEARCH_VARIABLES, Origin
from fluster_services.config import Timing, WorkerLimits
from fluster_services.worker.attempts.preparation import Prepared
from fluster_services.worker.contract.attempt_records import LaunchSpec
from fluster_services.worker.environments.interpreters import TaskPython, without_interpreters_own
from fluster_services.worker.gpus.allocator import GpuLease
from fluster_services.worker.gpus.inventory import NO_GPU
from fluster_services.worker.linux.limits import Limits

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launcher:
    """What all attempts at one worker have in common."""

    worker_id: WorkerId
    credentials: Mapping[Namespace, BusAddress]  # of the role "job"
    credentials_dir: Path
    timing: Timing
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    working_dir: Path | None = None  # None: a fresh folder for each attempt
    python_path: tuple[str, ...] = ()
    device_kind: str = "cpu"  # of those that tasks are given
    in_containers: bool = False
    inherits_devices: bool = False  # a task that asks for no devices sees what its environment says

    def prepare(self) -> None:
        """Write each namespace's credentials where only its tasks find them."""
        self.credentials_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for namespace, address in self.credentials.items():
            file = self._credentials_file(namespace)
            # Once is enough: a full disk must not keep a worker from coming back to what it runs.
            if not file.exists() or BusAddress.parse(str(file)) != address:
                address.save(file)

    def _credentials_file(self, namespace: Namespace) -> Path:
        return self.credentials_dir / f"{namespace}.json"

    def _visible(self, lease: GpuLease, given: Mapping[str, str]) -> dict[str, str]:
        """The variables by which a task knows its devices; one without any sees none, unless its job names some (`given`)."""
        variable = VISIBLE_DEVICES.get(self.device_kind)
        if variable is None:
            return {}
        devices = lease.devices
        if not devices and self.inherits_devices:
            return {}
        # A container has no others, and counts its own from 0.
        named = {variable: ",".join(map(str, range(len(devices))) if self.in_containers else devices)}
        if self.device_kind != "gpu":
            return named
        if not devices:
            return {} if variable in given else NO_GPU
        return {**lease.variables, **(named if self.in_containers else {})}

    def _folder(self, request: JobRequest, prepared: Prepared) -> tuple[str | None, str]:
        """Where a task runs that has no copy of a workspace, None for a folder of its own; and the notice about that."""
        usual = str(self.working_dir) if self.working_dir is not None else None
        if request.environment.cwd is not None:
            return request.environment.cwd, ""
        origin, image = request.origin, request.environment.image
        if prepared.workspace is not None or request.entrypoint.command is None or origin is None:
            return usual, ""
        if origin.folder is None or image is not None:
            return usual, ""
        if prepared.sees_folder:
            return origin.folder, ""
        return None, (
            f"worker {self.worker_id} does not see the folder {origin.folder!r}, where this was submitted, so this runs in "
            "an empty one: --workspace . (workspace=…) takes a copy along"
        )

    def _python_path(self, command: Sequence[str] | None, own: TaskPython | None) -> list[str]:
        """Where modules are found first. Commands run with their own interpreter, which has its own."""
        if command is not None:
            return []
        return list(self.python_path) if own is None else without_interpreters_own(self.python_path)

    def spec(
        self,
        task: TaskRecord,
        job: JobRecord,
        prepared: Prepared,
        lease: GpuLease = GpuLease(),  # noqa: B008 - it is frozen
    ) -> tuple[LaunchSpec, bytes | None]:
        """What is to be started, and the pickled callable unless it is a command. Raises OSError without free ports."""
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
        origin = request.origin if command is not None else None
        search = {} if self.in_containers else _search(own, origin)
        folder, notice = self._folder(request, prepared)
        bus_url = ",".join(self.credentials[task.namespace].servers)
        environment = {
            **search,
            "PYTHONUNBUFFERED": "1",  # what a program prints is in its log when it prints it
            **_rendezvous(task, job),
            **request.environment.env_vars,
            **prepared.secrets,
            **identity.to_environment(),
            **({ARRAY_ID: str(request.array.ids[task.task])} if request.array is not None else {}),
            KILL_GRACE: f"{self.timing.kill_grace_s:g}",
            **{port_variable(name): str(port) for name, port in _free_ports(request.ports).items()},
            **({GANG_ADDRESS: job.gang_address} if job.gang_address is not None else {}),
            **self._visible(lease, request.environment.env_vars),
            ADDRESS_VARIABLE: bus_url,
            CONTROLLER_ADDRESS: bus_url,
            CREDENTIALS_VARIABLE: str(self._credentials_file(task.namespace)),
        }
        spec = LaunchSpec(
            key=attempt_key(task.namespace, task.job_id, task.task, task.attempt),
            array_id=request.array.ids[task.task] if request.array is not None else None,
            command=list(command) if command is not None else None,
            env=environment,
            unset=[name for name in SEARCH_VARIABLES if command is not None and name not in search],
            notice=notice,
            working_dir=folder,
            workspace=str(prepared.workspace) if prepared.workspace is not None else None,
            python=str(own.python) if own is not None else None,
            python_given=own.given if own is not None else None,
            python_behind=list(own.behind) if own is not None else [],
            python_path=self._python_path(command, own),
            kill_grace_s=self.timing.kill_grace_s,
            must_return=request.must_return,
            timeout_s=request.timeout_s,
            fence_after_s=self.timing.fence_after_s if request.on_disconnect == "stop" else None,
            max_log_bytes=self.limits.logs.stream_bytes,
            max_line_bytes=self.limits.logs.line_bytes,
            devices=list(lease.devices),
            gpu_locks=dict(lease.locks),
            image=prepared.image,
            used_image=prepared.used_image.model_dump() if prepared.used_image is not None else None,
            mounts=dict(request.environment.mounts),
            limits=Limits(
                memory=request.resources.memory_taken, cpu=request.resources.cpu, pids=self.limits.tasks.max_processes
            ),
            disk=request.resources.disk or None,
        )
        return spec, request.entrypoint.pickled


def _search(own: TaskPython | None, origin: Origin | None) -> dict[str, str]:
    """What `python`, and any other name of a program, means: as the submitter's shell has it, if that is of this
    machine and user, else first what this worker's own Python has. An interpreter of the task's own goes before both.
    """
    given = {"PATH": os.environ.get("PATH", os.defpath)}
    if origin is not None and origin.is_same_user_here():
        given = {**given, **origin.search}
    elif own is None:
        given = _before(Path(sys.executable).parent, given["PATH"])
        given = {**{name: os.environ[name] for name in SEARCH_VARIABLES if name in os.environ}, **given}
    if own is None:
        return given
    return {**_before(own.search, given["PATH"]), **own.variables}


def _before(folder: Path, search_path: str) -> dict[str, str]:
    return {"PATH": os.pathsep.join([str(folder), search_path])}


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


def _free_ports(names: Iterable[str]) -> dict[str, int]:
    """A port for each name; all are held until all are known, so no two are the same."""
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in names}
        for each in sockets.values():
            each.bind((_LOOPBACK, 0))
        return {name: each.getsockname()[1] for name, each in sockets.items()}
