"""A place to run attempts in tests: a state folder, a template, a runtime over them, and the means to see that nothing is left."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import cloudpickle
import psutil
import pytest
from anyio.abc import Process

from fluster_services.config import DiskLimits
from fluster_services.worker.contract.attempt_records import ExitRecord, LaunchSpec, to_json
from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.container import STATE_LABEL
from fluster_services.worker.contract.runtime import Exited
from fluster_services.worker.contract.spool import SpoolRecord
from fluster_services.worker.engine import find_api_version
from fluster_services.worker.keeper.template import TemplateHandle
from fluster_services.worker.runtimes.docker_runtime import DockerRuntime
from fluster_services.worker.runtimes.process_runtime import ProcessRuntime
from fluster_services.worker.runtimes.process_task import ProcessTask
from tests.docker_engine import Engine
from tests.waiting import wait_until_async

MARK = "FLUSTER_TEST_MARK"
PATIENCE_S = 60

# An executed template, where a worker forks one: the test process may have threads.
TEMPLATE = """
import importlib, socket, sys
import cloudpickle
for name in sys.argv[3:]:
    importlib.import_module(name)
from fluster_services.worker.keeper.template import _Template
owner_fd = int(sys.argv[2])
_Template(socket.socket(fileno=int(sys.argv[1])), owner_fd if owner_fd >= 0 else None).run()
"""

WORKER = """
import asyncio, json, sys
from pathlib import Path
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.contract.attempt_records import LaunchSpec, from_json
from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.keeper.template import start_template
from tests.system.runtime_site import make_runtime

async def main(template):
    containers = json.loads(sys.argv[3])
    runtime = make_runtime(Path(sys.argv[1]), template, containers and ContainerSettings(**containers))
    spec = from_json(LaunchSpec, json.loads(sys.argv[2]))

    def renew():  # both from one moment, as a worker does: the last who fences does not come before the keeper
        fence_at = fence_clock() + (spec.fence_after_s or 3600)
        runtime.renew(fence_at + spec.kill_grace_s - fence_clock())
        task.renew(fence_at - fence_clock() if spec.fence_after_s is not None else None)

    runtime.renew(3600)  # until it has started, which takes as long as it takes
    task = await runtime.start(spec)
    renew()
    print(task.pid, flush=True)
    while True:
        await asyncio.sleep(0.05)
        renew()

asyncio.run(main(start_template()))
"""


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that were executed with `mark` in their environment, or copied from one that was."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def make_runtime(
    state_dir: Path, template: TemplateHandle, containers: ContainerSettings | None
) -> ProcessRuntime | DockerRuntime:
    processes = ProcessRuntime(state_dir, template)
    if containers is None:
        return processes
    return DockerRuntime(processes, containers, find_api_version(containers.engine), DiskLimits())


class Worker(NamedTuple):
    process: Process
    spec: LaunchSpec
    task_pid: int

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@dataclass
class Site:
    """A state folder, a template, and a runtime over them; all of its processes are marked."""

    state_dir: Path
    mark: str
    template: TemplateHandle
    runtime: ProcessRuntime | DockerRuntime
    containers: ContainerSettings | None = None
    workers: list[Process] = field(default_factory=list)

    def spec(self, key: str = "ns.job.0.1", **fields: Any) -> LaunchSpec:
        return LaunchSpec(key=key, env={MARK: self.mark, **fields.pop("env", {})}, **fields)

    async def call(self, function: Callable[..., object], *args: object, **fields: Any) -> ProcessTask:
        return await self.runtime.start(self.spec(**fields), cloudpickle.dumps((function, args, {})))

    async def command(self, *command: str, **fields: Any) -> ProcessTask:
        return await self.runtime.start(self.spec(command=list(command), **fields))

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.state_dir.iterdir())

    def processes(self) -> list[psutil.Process]:
        return [process for process in marked(self.mark) if process.pid != self.template.pid]

    async def start_worker(self, script: str, **fields: Any) -> Worker:
        """A worker in a process of its own that runs the script as its one task; this site's own runtime is closed for it."""
        await self.runtime.close()
        spec = self.spec(command=["sh", "-c", script], **fields)
        process = await anyio.open_process(
            [sys.executable, "-c", WORKER, str(self.state_dir), json.dumps(to_json(spec)), self._containers_json()],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=None,
        )
        assert process.stdout is not None
        self.workers.append(process)
        with anyio.fail_after(PATIENCE_S):
            return Worker(process, spec, int(await process.stdout.receive()))

    def _containers_json(self) -> str:
        return json.dumps(self.containers and dataclasses.asdict(self.containers))

    async def adopt(self) -> ProcessTask:
        """The one task that the worker before left."""
        self.runtime = make_runtime(self.state_dir, self.template, self.containers)
        (task,) = await self.runtime.adopt()
        return task

    async def wait_all_gone(self) -> None:
        await wait_until_async(lambda: not self.processes(), PATIENCE_S, self.processes)


class Templates:
    """Starts templates, and ends them with the test."""

    def __init__(self) -> None:
        self._started: list[tuple[TemplateHandle, subprocess.Popen[bytes]]] = []

    def start(self, mark: str, owner_fd: int | None = None, imports: Sequence[str] = ()) -> TemplateHandle:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *([] if owner_fd is None else [owner_fd])]
        numbers = [theirs.fileno(), -1 if owner_fd is None else owner_fd]
        command = [sys.executable, "-c", TEMPLATE, *map(str, numbers), *imports]
        environment = {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, pass_fds=fds, env=environment)
        theirs.close()
        handle = TemplateHandle(ours, process.pid)
        self._started.append((handle, process))
        return handle

    def close(self) -> None:
        for handle, process in self._started:
            handle.close()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    templates = Templates()
    yield templates
    templates.close()


@pytest.fixture(scope="module")
def shared_template(templates: Templates) -> tuple[TemplateHandle, str]:
    mark = uuid.uuid4().hex
    return templates.start(mark), mark


@pytest.fixture
async def site(tmp_path: Path, shared_template: tuple[TemplateHandle, str]) -> AsyncIterator[Site]:
    template, mark = shared_template
    site = Site(tmp_path / "state", mark, template, ProcessRuntime(tmp_path / "state", template))
    yield site
    await _close(site)


@pytest.fixture(scope="module")
def docker_template(templates: Templates) -> tuple[TemplateHandle, str]:
    mark = uuid.uuid4().hex
    return templates.start(mark, imports=["docker"]), mark


@pytest.fixture
async def docker_site(
    tmp_path: Path, docker_template: tuple[TemplateHandle, str], engine: Engine
) -> AsyncIterator[Site]:
    """The same with containers."""
    template, mark = docker_template
    containers = ContainerSettings(engine=engine.host, image=engine.image)
    state_dir = tmp_path / "state"
    site = Site(state_dir, mark, template, make_runtime(state_dir, template, containers), containers)
    yield site
    await _close(site)
    assert engine.containers(**{STATE_LABEL: str(state_dir)}) == []


@pytest.fixture(params=["process", "docker"])
def any_site(request: pytest.FixtureRequest) -> Site:
    """A site of either kind: what is shown with it holds for every runtime."""
    site: Site = request.getfixturevalue("site" if request.param == "process" else "docker_site")
    return site


async def _close(site: Site) -> None:
    for worker in site.workers:
        if worker.returncode is None:  # the test failed before it killed it
            worker.kill()
        await worker.aclose()
    processes = site.runtime if isinstance(site.runtime, ProcessRuntime) else site.runtime._processes  # noqa: SLF001 - those that the container runtime runs outside of containers
    for task in tuple(processes._tasks):  # noqa: SLF001 - what a failed test left running
        task.kill(0, "the test is over")
        await end_of(task)
        await task.forget()
    await site.runtime.close()
    await site.wait_all_gone()
    assert site.entries() == ["lock"]


async def end_of(task: ProcessTask) -> ExitRecord:
    with anyio.fail_after(PATIENCE_S):
        async for event in task.events():
            if isinstance(event, Exited):
                return event.record
    raise AssertionError(f"{task.key} was detached")


def read_all(task: ProcessTask, offset: int = 0) -> list[SpoolRecord]:
    records: list[SpoolRecord] = []
    while True:
        more, offset = task.read_log(offset)
        if not more:
            return records
        records += [record for run in more for record in run.records()]


def texts(task: ProcessTask, stream: str = "stdout") -> list[str]:
    return [record.text for record in read_all(task) if record.stream == stream]


async def wait_for_line(task: ProcessTask, text: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        async for _ in task.events():
            if any(text in record.text for record in read_all(task)):
                return
    raise AssertionError(f"{task.key} ended without {text!r}: {read_all(task)}")


def peak_memory_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])
