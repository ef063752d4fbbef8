"""The runtime that uses plain processes of this machine, each under its keeper."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import sys
from collections.abc import Collection
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fluster_services.worker.contract.attempt_directory import (
    GONE_SUFFIX,
    MAX_SPEC_BYTES,
    NEW_SUFFIX,
    PAYLOAD_FILE,
    SOCKET_FILE,
    SPEC_FILE,
    TASK_FOLDER,
    WORK_FOLDER,
    delete_gone,
    directory_name,
    discard,
    read_json,
)
from fluster_services.worker.contract.attempt_records import LaunchSpec, to_json
from fluster_services.worker.contract.faults import AlreadyStartedError, LaunchError, WorkerFaultError
from fluster_services.worker.keeper.bounds import INTERVAL_S
from fluster_services.worker.keeper.template import TemplateDiedError, TemplateHandle
from fluster_services.worker.linux.cgroups import Enforcer
from fluster_services.worker.linux.limits import group_name, groups
from fluster_services.worker.linux.process_locks import take_lock
from fluster_services.worker.linux.scratch import Disks, mount
from fluster_services.worker.runtimes.idle_keepers import IdleKeepers
from fluster_services.worker.runtimes.process_task import MAX_SOCKET_PATH_BYTES, ProcessTask

_log = logging.getLogger(__name__)


class ProcessRuntime:
    """Runs attempts as processes of this machine, each under a keeper that the template forks."""

    def __init__(
        self,
        state_dir: Path,
        template: TemplateHandle,
        enforcer: Enforcer | None = None,
        disks: Disks = Disks(),  # noqa: B008 - it is frozen
    ) -> None:
        """Take hold of `state_dir`, which is made if need be. Raises RuntimeError if another runtime has it."""
        self._state_dir = state_dir.absolute()
        self._template = template
        self._controllers = enforcer.controllers if enforcer is not None else {}
        self._limits = enforcer.describe() if enforcer is not None else "limits of tasks are not enforced"
        self._disks = disks
        self._tasks: set[ProcessTask] = set()  # also those that are over, until they are forgotten
        self._idle = IdleKeepers()
        self._launches: set[asyncio.Task[ProcessTask]] = set()
        longest = os.fsencode(self._state_dir / directory_name("") / SOCKET_FILE)
        if len(longest) > MAX_SOCKET_PATH_BYTES and not sys.platform.startswith("linux"):
            raise RuntimeError(
                f"the state folder {self._state_dir} is too deep for sockets by {len(longest) - MAX_SOCKET_PATH_BYTES} bytes: "
                "choose one with a shorter path"
            )
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._lock = take_lock(self._state_dir)
        except BlockingIOError as cause:
            raise RuntimeError(
                f"another worker uses {self._state_dir}: stop it, or give this one a folder of its own"
            ) from cause

    async def start(self, spec: LaunchSpec, payload: bytes | None = None) -> ProcessTask:
        if self._lock.closed:
            raise RuntimeError(f"this runtime over {self._state_dir} is closed: make a new one")
        # Its code may have begun by the time that this is cancelled: to take it back would have it begun a second time.
        launch = asyncio.ensure_future(self._launch(spec, payload))
        self._launches.add(launch)
        launch.add_done_callback(self._launches.discard)
        return await asyncio.shield(launch)

    async def adopt(self) -> list[ProcessTask]:
        for path in self._state_dir.iterdir():
            if path.name.endswith(NEW_SUFFIX):
                # By renaming: of this and a template that still has the request, one comes first.
                await asyncio.to_thread(discard, path)
            elif path.name.endswith(GONE_SUFFIX):
                await asyncio.to_thread(delete_gone, path)
        # Looked for afterwards, so that none is missed that became a directory of its own meanwhile.
        directories = [path for path in sorted(self._state_dir.iterdir()) if path.is_dir() and "." not in path.name]
        adopted = await asyncio.gather(*map(self._adopt, directories))
        return [task for task in adopted if task is not None]

    @property
    def state_dir(self) -> Path:
        return self._state_dir

    @property
    def tasks(self) -> Collection[ProcessTask]:
        """Those that are not forgotten."""
        return self._tasks

    def renew(self, ended_in_s: float) -> None:
        self._template.renew(self._state_dir, ended_in_s)

    def trouble(self) -> str | None:
        return None if self._template.is_alive() else f"its template process {self._template.pid} is gone: restart it"

    def places(self) -> list[Path]:
        return []

    def examine(self) -> str | None:
        return self.trouble()

    async def wait_broken(self) -> TemplateDiedError:
        return await self._template.wait_died()

    def limits(self) -> str:
        return f"{self._limits}; {self.disk_limits()}"

    def disk_limits(self) -> str:
        """What tasks that asked for disk are held to."""
        return self._disks.describe(INTERVAL_S)

    async def close(self) -> None:
        await asyncio.gather(*self._launches, return_exceptions=True)
        for task in tuple(self._tasks):
            await task.detach()
        await self._idle.close()
        self._tasks.clear()
        self._lock.close()

    async def _adopt(self, directory: Path) -> ProcessTask | None:
        spec = _spec_in(directory)
        if spec is None:
            text = "%s is deleted: its %s is missing, was lost in a crash of the machine or written over by its task"
            _log.error(text, directory, SPEC_FILE)
            await asyncio.to_thread(discard, directory)
            return None
        task = ProcessTask(spec, directory, self._tasks, self._idle)
        task.look_up()
        await task.connect()
        return task

    async def _launch(self, spec: LaunchSpec, payload: bytes | None) -> ProcessTask:
        if payload is not None:
            spec = dataclasses.replace(spec, payload_file=PAYLOAD_FILE)
        elif spec.command is None and spec.payload_file is None:
            raise LaunchError(f"{spec.key} has nothing to run: give a command, a payload_file or a payload")
        directory = self._state_dir / directory_name(spec.key)
        spec = dataclasses.replace(spec, groups=groups(spec.limits, self._controllers, group_name(directory)))
        if spec.disk is not None:
            spec = _held_to_disk(spec, self._disks)
        draft = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}{NEW_SUFFIX}")
        task = ProcessTask(spec, directory, self._tasks, self._idle)
        try:
            await self._begin(task, draft, directory, payload)
        except BaseException:
            self._tasks.discard(task)
            raise
        return task

    async def _begin(self, task: ProcessTask, draft: Path, directory: Path, payload: bytes | None) -> None:
        failure: LaunchError | None = None
        try:
            _write_draft(draft, task.spec, payload)
            if task.spec.scratch is not None and task.spec.disk is not None:
                await _mount_scratch(draft / task.spec.scratch, task.spec.disk)
            if await task.assign(draft):
                return
            await self._template.fork_keeper(draft, directory)
        except OSError as cause:
            discard(draft)
            raise LaunchError(f"{task.key} cannot be written to {draft}: {cause}") from cause
        except AlreadyStartedError as cause:
            discard(draft)
            raise AlreadyStartedError(f"{task.key} was started here already, and is not forgotten") from cause
        except LaunchError as cause:
            failure = cause
        if failure is not None and discard(draft):
            raise failure
        # No draft left, so the template started it before it failed us, if it did.
        if not await task.connect() and failure is not None:
            await asyncio.to_thread(discard, directory)
            raise failure
        await task.wait_started()


def _spec_in(directory: Path) -> LaunchSpec | None:
    """What is to run in an attempt's directory; None where that cannot be known, as its task can write there as well."""
    try:
        spec = TypeAdapter(LaunchSpec).validate_python(read_json(directory / SPEC_FILE, MAX_SPEC_BYTES))
    except (ValidationError, ValueError, RecursionError):
        return None
    return spec if directory_name(spec.key) == directory.name else None


def _held_to_disk(spec: LaunchSpec, disks: Disks) -> LaunchSpec:
    """With what enforces the room that it asked for; a folder of its user's is not looked at."""
    if disks.how == "not enforced":
        return dataclasses.replace(spec, disk=None)
    folder = None
    if disks.how == "mounted":
        is_own = spec.working_dir is None or spec.workspace is not None
        folder = TASK_FOLDER if spec.container is not None else WORK_FOLDER if is_own else None
    return dataclasses.replace(spec, scratch=folder)


async def _mount_scratch(place: Path, size: int) -> None:
    """Raises WorkerFaultError: this worker has said that it can."""
    try:
        await asyncio.to_thread(mount, place, size)
    except OSError as cause:
        raise WorkerFaultError(f"its disk could not be made: {cause.strerror or cause}") from cause


def _write_draft(draft: Path, spec: LaunchSpec, payload: bytes | None) -> None:
    # Whole or not at all by the renaming of the draft, so the files in it need none of their own.
    draft.mkdir(mode=0o700)
    files = [(SPEC_FILE, json.dumps(to_json(spec)).encode()), *([] if payload is None else [(PAYLOAD_FILE, payload)])]
    for name, data in files:
        fd = os.open(f"{draft}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
