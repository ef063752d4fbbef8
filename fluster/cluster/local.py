"""A whole cluster on this machine, for as long as its owner lives; and the cluster that this process belongs to."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from fluster.cluster.blocking import Cluster
from fluster.cluster.client import DEFAULT_NAMESPACE
from fluster.cluster.jobs.arguments import check_count, check_limits, check_seconds
from fluster.cluster.local_options import (
    build_settings,
    container_settings,
    machine_memory,
    offered_disk,
    offered_gpus,
    offered_labels,
    offered_resources,
    pickled_backend,
    size_in_bytes,
)
from fluster.cluster.ownership import note_local
from fluster.cluster.task.task_context import NAMESPACE
from fluster.errors import ClusterStartError
from fluster.json_lines import JsonLines, checked
from fluster.local_setup import (
    MAX_LOCAL_CONTROLLERS,
    MAX_LOCAL_WORKERS,
    MAX_PORT,
    START_TIMEOUT_S,
    SUPERVISOR_MODULE,
    VM_START_TIMEOUT_S,
    LocalSetup,
    LocalStarted,
    ProfileName,
    RuntimeName,
)
from fluster_bus.access.address import ADDRESS_VARIABLE
from fluster_bus.core.devices import MAX_BYTES, MAX_CPUS
from fluster_bus.core.json_types import JsonObject
from fluster_bus.core.lazy_imports import import_now
from fluster_bus.core.names import check_namespace

_log = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 15.0  # beyond what the supervisor itself gives to the start: it tells what was late
_STOP_TIMEOUT_S = 30.0
_MAX_LINE_BYTES = 1024 * 1024  # of what the supervisor says
_REMOVE_TIMEOUT_S, _REMOVE_PAUSE_S = 10.0, 0.05
# {setting of a worker's containers: the argument of LocalCluster, where that is called otherwise}
_OPTIONS = {"shm_bytes": "shm_size", "build_authorities": "build_ca"}
_LOGICAL_CPUS, _LOGICAL_CPUS_PER_CORE = 16, 4  # tasks on a laptop mostly wait; nothing is enforced there


class LocalCluster(Cluster):
    """A nats-server, a controller and workers on this machine, started by this process and gone with it.

    `namespace` is the one that this object works in, `namespaces` are further ones that the cluster has from its start;
    `fluster namespace add` adds others. `cpu` and `memory` are what all workers offer together: by default 16 CPUs or
    four for each core, and the machine's memory. They are logical: nothing is enforced, unless `enforce_limits` asks
    for it. So are `disk`, by default what is free, and `gpus`, such as "h100:8" or "0" for none, by default those that
    nvidia-smi lists once the cluster is up; `labels` are those of each worker. `resources`, such as {"license": 4}, are
    what all have together of things with names of your own, each worker in whole pieces. What is not given is taken
    from FLUSTER_DISK, FLUSTER_GPUS, FLUSTER_LABELS and FLUSTER_RESOURCES, if these are set. A task that asks for no GPU
    has the program's own CUDA_VISIBLE_DEVICES. With `store_dir` the records, logs and registry stay there, and the next
    LocalCluster with the same folder goes on with them. Of several `controllers` one leads and the others stand by.

    Tasks that are processes get the environment that this program has now, without PYTHONPATH and what begins with
    FLUSTER_ or SLURM_; without `pass_secrets` also without variables whose names are like *TOKEN*, *SECRET*, *KEY* or
    *PASSWORD*.

    With `runtime="docker"` each task runs in a container of the Docker engine at `docker_host` (`unix:///…`, by default
    DOCKER_HOST, or the machine's own), in the `image` that its job names, or else in this one, by default
    `python:3.12-slim` of the client's version of Python; "auto" does so where an engine answers.

    `network` and what follows are for tasks in containers, as a worker's settings are: which `profile` they have
    (default, gpu, trusted), the folders below which jobs may have any mounted, how large /dev/shm is, and {name: limit,
    or soft and hard one}, such as {"nofile": (1024, 65_536)}. `build_network` and `build_ca` (a file of certificates)
    are for the images that are built with the packages of jobs.

    The environment of a job, or its image, is made within `build_timeout` seconds (1800), or the job fails. A worker
    that gets SIGTERM waits `drain_timeout` seconds (60) for its tasks before it hands them back.

    The start fails unless all are ready within `start_timeout` seconds (45, with a backend 900): a large store takes a
    while to read, and so does an image that has to be pulled.

    `timing` replaces some of the times of a cluster on one machine, in seconds: {"fence_after_s": 30,
    "worker_timeout_s": 40} or {"seat_lease_s": 3}. Names and rules are those of the settings FLUSTER_…_S of a deployed
    cluster.

    `limits` replaces limits of records, histories, caches, logs and disks, by the names of a deployed cluster's
    settings FLUSTER_… in lower case: {"max_records": 100, "logs_budget": "2GiB", "environments_cache": "5GB",
    "max_log": "1MB", "results_kept_s": 3_600, "least_free_disk": "1GB"}.

    With a `backend`, a VMBackend such as `fluster_services.vm.DockerBackend()`, each worker is one of its VMs, which
    has its usual size unless `cpu` or `memory` say what all have together. It is copied: one object may serve several
    clusters.

    What its actors and the workers of its pools write comes to this program's stderr as well, each line after
    `name[index] |`, at most 100 lines a second of each. That is so on a terminal and in a notebook, and with
    `log_to_driver=True`; else the last 20 lines of what failed do.

    `on_progress` is called with a line whenever the start has come further. Raises ClusterStartError with the reason
    when the cluster does not come up.
    """

    def __init__(
        self,
        namespace: str | None = None,
        workers: int = 1,
        *,
        cpu: float | None = None,
        memory: int | str | None = None,
        disk: int | str | None = None,
        gpus: str | None = None,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        store_dir: str | Path | None = None,
        port: int = 0,
        namespaces: Sequence[str] = (),
        controllers: int = 1,
        pass_secrets: bool = True,
        enforce_limits: bool = False,
        runtime: RuntimeName = "process",
        docker_host: str | None = None,
        image: str | None = None,
        network: str | None = None,
        profile: ProfileName = "default",
        mount_roots: Sequence[str | Path] = (),
        shm_size: int | str | None = None,
        ulimits: Mapping[str, int | tuple[int, int]] | None = None,
        build_network: str | None = None,
        build_ca: str | Path | None = None,
        build_timeout: float | None = None,
        drain_timeout: float | None = None,
        start_timeout: float | None = None,
        timing: Mapping[str, float] | None = None,
        limits: Mapping[str, int | float | str] | None = None,
        backend: object | None = None,
        log_to_driver: bool | None = None,
        on_progress: Callable[[str], object] | None = None,
    ) -> None:
        chosen = namespace or os.environ.get(NAMESPACE) or DEFAULT_NAMESPACE
        for name in (chosen, *namespaces):
            check_namespace(name)
        check_count("workers", workers, 1, "the number of workers", most=MAX_LOCAL_WORKERS)
        check_count("controllers", controllers, 1, "the number of controllers", most=MAX_LOCAL_CONTROLLERS)
        check_count("port", port, 0, "a port, or 0 for a free one", most=MAX_PORT)
        if cpu is not None and (isinstance(cpu, bool) or not isinstance(cpu, int | float) or not 0 < cpu <= MAX_CPUS):
            raise ValueError(f"cpu={cpu!r}: give a number of CPUs above 0, which all workers have together")
        if memory is not None and not 0 < size_in_bytes(memory) <= MAX_BYTES:
            raise ValueError(f"memory={memory!r}: give a size above 0, such as '8GB', which all workers have together")
        if runtime not in get_args(RuntimeName):
            raise ValueError(f"runtime={runtime!r} is not known: choose {', '.join(get_args(RuntimeName))}")
        if backend is not None and (runtime != "process" or enforce_limits or docker_host or image):
            raise ValueError(
                "runtime, docker_host, image and enforce_limits are for workers that are processes of this machine: "
                "with a backend= "
                "tasks are processes of its VMs, which are held to their resources; give docker_host and image to "
                "the backend"
            )
        containers = {
            **container_settings(network, profile, mount_roots, shm_size, ulimits),
            **build_settings(build_network, build_ca),
        }
        if containers and runtime == "process":
            given = ", ".join(_OPTIONS.get(name, name) for name in containers)
            raise ValueError(f"{given} are for tasks in containers: choose runtime='docker'")
        if start_timeout is None:
            start_timeout = START_TIMEOUT_S if backend is None else VM_START_TIMEOUT_S
        logical_cpu = max(_LOGICAL_CPUS, _LOGICAL_CPUS_PER_CORE * (os.cpu_count() or 1))
        setup = LocalSetup(
            namespaces=tuple(dict.fromkeys((chosen, *namespaces))),
            workers=workers,
            controllers=controllers,
            cpu=cpu if cpu is not None else (logical_cpu if backend is None else 0),
            memory=size_in_bytes(memory) if memory is not None else (machine_memory() if backend is None else 0),
            disk=offered_disk(disk),
            devices=offered_gpus(gpus),
            labels=offered_labels(labels),
            resources=offered_resources(resources),
            store_dir=str(Path(store_dir).absolute()) if store_dir is not None else None,
            port=port,
            passes_secrets=pass_secrets,
            enforce_limits=enforce_limits,
            runtime=runtime,
            docker_host=docker_host or os.environ.get("DOCKER_HOST"),
            image=image,
            containers=containers,
            drain_timeout_s=check_seconds("drain_timeout", drain_timeout) if drain_timeout is not None else None,
            build_timeout_s=check_seconds("build_timeout", build_timeout) if build_timeout is not None else None,
            timing={name: check_seconds(f"timing: {name}", value) for name, value in (timing or {}).items()},
            limits=check_limits(limits or {}),
            backend=pickled_backend(backend) if backend is not None else None,
            start_timeout_s=check_seconds("start_timeout", start_timeout),
            working_dir=str(Path.cwd()),
            python_path=tuple(str(Path(entry or ".").absolute()) for entry in sys.path),
        )
        self._supervisor = _Supervisor(setup)
        try:
            import_now()  # while that comes up
            started = self._supervisor.wait_started(on_progress or _log.info)
            self.store_dir: Path = Path(started.store_dir)
            super().__init__(started.address, chosen)
            _clusters.append(weakref.ref(self))
            note_local(self.asynchronous.server)
            from fluster.cluster.jobs.shown_output import is_looked_at

            self.asynchronous.outages.is_gone = self._supervisor.has_ended
            by_itself = is_looked_at() if log_to_driver is None else log_to_driver
            self.portal.loop.call_soon_threadsafe(self.asynchronous.shown.show, by_itself)
        except BaseException:
            self._supervisor.stop()
            raise

    def shutdown(self) -> None:
        """End everything that the cluster runs, and return when it is gone."""
        try:
            if not self.closed:
                self.portal.run(self.asynchronous.shown.end_all, self.asynchronous.terminate)
        finally:
            try:
                super().close()
            finally:
                self._supervisor.stop()

    def close(self) -> None:
        """The same as `shutdown`: no other could use the cluster afterwards."""
        self.shutdown()


class _Supervisor:
    """The process that starts the daemons. Its standard input is the leash: when that ends, so does the cluster."""

    def __init__(self, setup: LocalSetup) -> None:
        self._temporary: Path | None = None  # the folder that the supervisor made and removes
        self._process = subprocess.Popen(
            [sys.executable, "-m", SUPERVISOR_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the owner, which then lets go of the leash
        )
        self._setup = setup
        _leashes.add(self)
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._process.stdin.write(setup.to_json() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once: `wait_started` tells why

    def wait_started(self, on_progress: Callable[[str], object]) -> LocalStarted:
        """What the supervisor reports. Raises ClusterStartError."""
        timeout_s = self._setup.start_timeout_s + _REPORT_TIMEOUT_S
        for message in self._read_messages(timeout_s):
            started = LocalStarted(**message)
            if not started.progress:
                break
            on_progress(started.progress)
        else:
            raise ClusterStartError(self._gone())
        if started.error:
            raise ClusterStartError(started.error)
        self._temporary = Path(started.store_dir) if self._setup.store_dir is None else None
        return started

    def _gone(self) -> str:
        self.stop()
        return f"the cluster's supervisor ended with status {self._process.returncode} before anything was up"

    def _read_messages(self, timeout_s: float) -> Iterator[JsonObject]:
        """What the supervisor says, until it says no more. Raises ClusterStartError when that takes too long."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        deadline = time.monotonic() + timeout_s
        lines = JsonLines(_MAX_LINE_BYTES)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ClusterStartError(f"the cluster was not up within {timeout_s:g} s")
                part = os.read(self._process.stdout.fileno(), 65_536)
                if not part:
                    return
                yield from map(checked, lines.feed(part))

    def has_ended(self) -> bool:
        """Whether this process is gone, and with it the cluster."""
        return self._process.poll() is not None

    def let_go(self) -> None:
        """Close this process's end of the leash without waiting."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the setup was never read: the supervisor is gone already
                self._process.stdin.close()

    def stop(self) -> None:
        """End the cluster and wait until it is gone."""
        self.let_go()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its daemons and tasks end with it
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        _leashes.discard(self)
        if self._process.returncode < 0 and self._temporary is not None:
            _remove(self._temporary)


_clusters: list[weakref.ref[LocalCluster]] = []  # of this process, the newest last


def open_local_cluster() -> LocalCluster | None:
    """The LocalCluster that this process opened last and has not closed, if there is one."""
    _clusters[:] = [each for each in _clusters if (cluster := each()) is not None and not cluster.closed]
    return _clusters[-1]() if _clusters else None


_lock = threading.Lock()
_current: Cluster | None = None


def current_cluster() -> Cluster:
    """The cluster that FLUSTER_CLUSTER_ADDRESS names, else the LocalCluster that this program has open (of several the
    newest), else one that is started on this machine; one per process.

    So the same program runs alone on a laptop and as a job of a cluster. Starting one is said on stderr. Raises what
    `Cluster` and `LocalCluster` raise.
    """
    global _current  # noqa: PLW0603 - one per process is what it promises
    with _lock:
        if _current is None or _current.closed:
            _current = Cluster() if os.environ.get(ADDRESS_VARIABLE) else open_local_cluster() or _start_local()
        return _current


def _start_local() -> LocalCluster:
    cluster = LocalCluster()
    sys.stderr.write(
        f"fluster: {ADDRESS_VARIABLE} is not set: started a cluster on this machine, which ends with this process\n"
    )
    return cluster


def _forget_in_child() -> None:
    global _current  # noqa: PLW0603
    _current = None  # its connection and threads stayed with the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


_leashes: weakref.WeakSet[_Supervisor] = weakref.WeakSet()


def _drop_leashes() -> None:
    for supervisor in list(_leashes):
        supervisor.let_go()


# A forked child must not hold its parent's clusters: they end with the parent alone.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_leashes)


def _remove(folder: Path) -> None:
    """Remove the folder of a supervisor that was killed. Its daemons are on their way out and may still write there."""
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_REMOVE_PAUSE_S)
