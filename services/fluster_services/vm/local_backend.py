"""VMs that are none: each a worker of this machine, below a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fluster_bus.messages import Capacity, WorkerId
from fluster_services.vm.backend import ClusterToJoin, VMError
from fluster_services.vm.fleet import Fleet, Machine, sized, usual_size
from fluster_services.vm.machine import setup_line
from fluster_services.worker.contract.config import WorkerConfig

_LEAVE_TIMEOUT_S, _KILL_TIMEOUT_S = 8.0, 5.0


class LocalBackend(Fleet):
    """A backend whose VMs are workers on this machine. `cpus`, `memory`, `disk` and `labels` are what each offers unless asked for another.

    They run jobs of the `namespaces`, else of all that the cluster was started with, and have credentials for jobs of no other.
    What each offers is logical: nothing is enforced. Tasks find the folders and modules that the cluster's `working_dir` and `python_path` name.
    """

    def __init__(
        self,
        *,
        cpus: float = 4,
        memory: int | str = "4GB",
        disk: int | str | None = None,
        labels: Mapping[str, str] | None = None,
        namespaces: Sequence[str] | None = None,
    ) -> None:
        super().__init__(namespaces)
        self._usual = usual_size(cpus, memory, disk=disk, labels=labels)

    def _sized(self, resources: Capacity, device_ids: tuple[str, ...]) -> Capacity:
        return sized(resources, self._usual, device_ids)

    async def _prepare(self) -> None:
        return  # all is here

    def _machine(
        self, cluster: ClusterToJoin, vm_id: WorkerId, resources: Capacity, device_ids: tuple[str, ...]
    ) -> Machine:
        config = WorkerConfig(
            address=cluster.address,
            worker_id=vm_id,
            state_dir=cluster.state_dir / vm_id,
            total=resources,
            device_ids=device_ids,
            job_credentials=dict(cluster.job_credentials),
            timing=cluster.timing,
            limits=cluster.limits,
            drain_timeout_s=cluster.drain_timeout_s,
            build_timeout_s=cluster.build_timeout_s,
            working_dir=cluster.working_dir,
            python_path=cluster.python_path,
        )
        return _LocalMachine(setup_line(config), config.state_dir)


class _LocalMachine:
    """A process tree of this machine."""

    def __init__(self, setup: bytes, folder: Path) -> None:
        self._setup = setup
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_stopping = False
        self._is_over = threading.Event()

    def run(self, write: Callable[[bytes], None]) -> int:
        try:
            with self._lock:
                if self._is_stopping:
                    return 0
                process = self._process = self._start()
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            with process.stdout:
                while data := process.stdout.read1():  # type: ignore[attr-defined]  # it is a BufferedReader
                    write(data)
            code = process.wait()
            return code if code >= 0 else 128 - code
        finally:
            self._is_over.set()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", "from fluster_services.vm.machine import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at a terminal is for the owner
            )
        except OSError as cause:
            raise VMError(f"its process could not be started: {cause}") from cause
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        with suppress(BrokenPipeError):  # it died at once, and has said why
            process.stdin.write(self._setup)
            process.stdin.flush()
        return process

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            process = self._process
        if process is not None:
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            with suppress(BrokenPipeError):
                process.stdin.close()
            if not self._is_over.wait(_LEAVE_TIMEOUT_S):
                process.kill()  # what it has started ends with it
                if not self._is_over.wait(_KILL_TIMEOUT_S):
                    raise VMError(f"process {process.pid} and what it started do not end")
        shutil.rmtree(self._folder, ignore_errors=True)
