"""`python -m fluster_services.worker`: a worker for the cluster that FLUSTER_CLUSTER_ADDRESS names."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from fluster.local_setup import STATE_DIR_VARIABLE, ProfileName, RuntimeName, default_state_dir
from fluster_bus.connection.bus import Bus
from fluster_bus.core.devices import MAX_BYTES, MAX_CPUS, VISIBLE_DEVICES, parse_gpus
from fluster_bus.messages import parse_size
from fluster_bus.messages.parts.counted import parse_counts
from fluster_bus.messages.parts.resources import parse_disk, parse_labels
from fluster_services.config import DaemonLogs, Timing
from fluster_services.daemon import address_from_environment, run_daemon
from fluster_services.settings import SettingError, read_settings, read_worker_limits, refusing
from fluster_services.worker.contract.config import ContainerSettings, WorkerConfig, parse_ulimits
from fluster_services.worker.engine import EngineError, choose_containers, find_api_version
from fluster_services.worker.gpus.inventory import MASK_STYLES, MASK_VARIABLE
from fluster_services.worker.gpus.locks import FOLDER_VARIABLE
from fluster_services.worker.keeper.template import start_template
from fluster_services.worker.linux.cgroups import Enforcement, LimitsError, find_enforcer
from fluster_services.worker.linux.disk import StateFolderError, make_state_folder
from fluster_services.worker.linux.processes import raise_descriptor_limit
from fluster_services.worker.linux.scratch import Disks, find_disks
from fluster_services.worker.presence.detection import CapacityOverrides, detect, detect_host
from fluster_services.worker.presence.identity import job_credentials, why_not_apart, worker_id
from fluster_services.worker.presence.presence import Draining

_MOST_THREADS = 16
_THREADS_BESIDE_CPUS = 4


def main() -> None:
    with refusing():
        config = _config_from_environment()
    if len(config.job_credentials) > 1 and config.containers is None:
        sys.stderr.write(f"warning: {why_not_apart(config.job_credentials)}\n")
    run_worker(config)


def _config_from_environment() -> WorkerConfig:
    state_dir = Path(os.environ.get(STATE_DIR_VARIABLE, default_state_dir()))
    address = address_from_environment()
    credentials, credentials_dir = job_credentials(address)
    timing, limits = read_settings(Timing), read_worker_limits()
    _make_state_folder(state_dir)
    total, devices = detect(_overrides(), state_dir, limits.caches)
    return WorkerConfig(
        address=address,
        worker_id=worker_id(address),
        state_dir=state_dir,
        total=total,
        device_ids=devices.ids,
        other_devices=devices.others,
        timing=timing,
        limits=limits,
        job_credentials=credentials,
        job_credentials_dir=credentials_dir,
        enforce_limits=_one_of("FLUSTER_ENFORCE_LIMITS", "auto", get_args(Enforcement)),
        containers=choose_containers(_one_of("FLUSTER_RUNTIME", "process", get_args(RuntimeName)), _containers()),
        build_timeout_s=_build_timeout_s(),
        gpu_mask=_one_of(MASK_VARIABLE, "index", MASK_STYLES),
        gpu_locks=os.environ.get(FOLDER_VARIABLE) or None,
        drain_timeout_s=_seconds("FLUSTER_DRAIN_TIMEOUT_S", WorkerConfig.drain_timeout_s),
        advertised_host=os.environ.get("FLUSTER_ADVERTISED_HOST") or detect_host(address),
    )


def _overrides() -> CapacityOverrides:
    """What the environment says that this worker has."""
    return CapacityOverrides(
        **_parsed(
            ("FLUSTER_CPUS", "cpu", _cpus),
            ("FLUSTER_MEMORY", "memory", _memory),
            ("FLUSTER_DISK", "disk", parse_disk),
            ("FLUSTER_GPUS", "devices", lambda text: parse_gpus(text, os.environ.get(VISIBLE_DEVICES["gpu"]))),
            ("FLUSTER_LABELS", "labels", parse_labels),
            ("FLUSTER_RESOURCES", "resources", parse_counts),
            ("FLUSTER_MAX_CONCURRENT_JOBS", "tasks", _tasks),
        )
    )


def _parsed(*settings: tuple[str, str, Callable[[str], Any]]) -> dict[str, Any]:
    """{name: value} of the (variable, name, how its text is read) that are set."""
    known = {}
    for variable, name, parse in settings:
        text = os.environ.get(variable)
        if text:
            try:
                known[name] = parse(text)
            except ValueError as error:
                raise SettingError(f"{variable}: {error}") from error
    return known


def _cpus(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_CPUS:
        raise ValueError(f"{text!r} is not a number of CPUs: give a number, such as 8")
    return value


def _memory(text: str) -> int:
    size = parse_size(text)
    if not 0 < size <= MAX_BYTES:
        raise ValueError(f"invalid memory {text!r}: give a size above 0, such as 32GB")
    return size


def _tasks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of tasks: give 1 or more, or nothing for as many as have room")
    return int(text)


def _containers() -> ContainerSettings:
    known: dict[str, Any] = {}
    for variable, name in (
        ("DOCKER_HOST", "engine"),
        ("FLUSTER_DOCKER_HOST", "engine"),
        ("FLUSTER_IMAGE", "image"),
        ("FLUSTER_CONTAINER_NETWORK", "network"),
        ("FLUSTER_BUILD_NETWORK", "build_network"),
    ):
        if os.environ.get(variable):
            known[name] = os.environ[variable]
    roots = os.environ.get("FLUSTER_MOUNT_ROOTS", "")
    known["mount_roots"] = tuple(root.strip() for root in roots.split(",") if root.strip())
    known |= _parsed(
        ("FLUSTER_CONTAINER_ULIMITS", "ulimits", parse_ulimits), ("FLUSTER_CONTAINER_SHM_SIZE", "shm_bytes", parse_size)
    )
    known["build_timeout_s"] = _build_timeout_s()
    known["build_authorities"] = _file("FLUSTER_BUILD_CA")
    known["max_images"] = _count("FLUSTER_MAX_IMAGES", ContainerSettings.max_images)
    return ContainerSettings(profile=_one_of("FLUSTER_CONTAINER_PROFILE", "default", get_args(ProfileName)), **known)


def _build_timeout_s() -> float:
    return _seconds("FLUSTER_BUILD_TIMEOUT_S", WorkerConfig.build_timeout_s)


def _one_of(variable: str, default: str, known: Sequence[str]) -> Any:
    text = os.environ.get(variable) or default
    if text not in known:
        raise SettingError(f"{variable}={text!r} is not known: choose {', '.join(known)}")
    return text


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SettingError(f"{variable}={text!r} is not a time: give seconds, such as 60")
    return value


def _file(variable: str) -> str | None:
    path = os.environ.get(variable) or None
    if path is not None and not os.access(path, os.R_OK):
        raise SettingError(f"{variable}={path!r} cannot be read: give the path of a file")
    return path


def _count(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise SettingError(f"{variable}={text!r} is not a number: give one such as {default}")
    return int(text)


def _make_state_folder(folder: Path) -> None:
    try:
        make_state_folder(folder)
    except StateFolderError as error:
        sys.exit(str(error))


def run_worker(
    config: WorkerConfig,
    *,
    ready_fd: int | None = None,
    owner_fd: int | None = None,
    log_file: Path | None = None,
    log_bytes: int = DaemonLogs.file_bytes,
) -> None:
    """Serve until the worker has drained, by request or after SIGTERM or Ctrl-C, or until the owner is gone.

    A second signal ends it at once: its tasks go on under their keepers, and a worker of the same name adopts them.
    """
    draining = Draining()
    _make_state_folder(config.state_dir)
    try:
        api_version = find_api_version(config.containers.engine) if config.containers is not None else None
        enforcer = find_enforcer(config.enforce_limits) if config.containers is None else None
        disks = find_disks(config.state_dir) if config.enforce_limits != "never" else Disks()
    except (EngineError, LimitsError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    # Before there is an event loop or a connection to inherit.
    template = start_template(config.environment, owner_fd=owner_fd)
    raise_descriptor_limit()  # after the template is forked, so that tasks have the limit that they would have elsewhere
    threads = _ready_threads()
    # Now, as tasks have no use for it, and while the template imports what they have use for.
    from fluster_services.worker.runtimes.docker_runtime import make_runtime
    from fluster_services.worker.worker import Worker

    async def serve(bus: Bus, ready: Callable[[], None]) -> None:
        asyncio.get_running_loop().set_default_executor(threads)
        runtime, images = make_runtime(config, template, enforcer, disks, api_version)
        serving = asyncio.Event()

        def on_ready() -> None:
            serving.set()
            ready()

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(Worker(bus, config, runtime, draining, images).run(on_ready))
            leaving = tasks.create_task(draining.wait_asked())
            await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not serving.is_set():  # it has taken nothing that could be drained, and may wait long for a controller
                running.cancel()

    run_daemon(
        serve,
        address=config.address,
        name=config.worker_id,
        ready_fd=ready_fd,
        owner_fd=owner_fd,
        log_file=log_file,
        log_bytes=log_bytes,
        on_leave=lambda: draining.ask(config.drain_timeout_s),
    )


def _ready_threads() -> ThreadPoolExecutor:
    """An executor all of whose threads run already. Raises RuntimeError where they cannot be had.

    Where a machine can make no more threads, a worker must be able to see and say that.
    """
    count = min(_MOST_THREADS, (os.cpu_count() or 1) + _THREADS_BESIDE_CPUS)
    executor = ThreadPoolExecutor(count, thread_name_prefix="fluster-worker")
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):  # each holds a thread of its own until all do
            executor.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        raise
    all_run.wait()
    return executor


if __name__ == "__main__":
    main()
