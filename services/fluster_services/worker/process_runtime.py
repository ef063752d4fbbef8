"""The runtime that uses plain processes of this machine, each under its keeper."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_services.worker import cgroups
from fluster_services.worker.attempt_directory import (
    EXIT_FILE,
    GONE_SUFFIX,
    KEEPER_FILE,
    KEEPER_LOG_FILE,
    LOG_FILE,
    NEW_SUFFIX,
    PAYLOAD_FILE,
    RESULT_FILE,
    SOCKET_FILE,
    SPEC_FILE,
    ExitRecord,
    LaunchSpec,
    TaskError,
    delete_tree,
    directory_name,
    discard,
    from_json,
    read_json,
    to_json,
)
from fluster_services.worker.cgroups import Enforcer
from fluster_services.worker.limits import group_name, groups
from fluster_services.worker.processes import boot_id, leftovers
from fluster_services.worker.runtime import AlreadyStartedError, Exited, LaunchError, Progressed, Spooled
from fluster_services.worker.spool import SpoolRecord, read_spool, read_spool_end
from fluster_services.worker.template import TemplateHandle

_log = logging.getLogger(__name__)

_MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux has 107
_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
_MAX_UNSENT_BYTES = 64 * 1024
_FORGET_TIMEOUT_S = 60.0
_ASSIGN_TIMEOUT_S = 10.0
_LEFTOVERS_TIMEOUT_S = 10.0
_LEFTOVERS_INTERVAL_S = 0.01
_KEEPER_LOG_TAIL_BYTES = 4000
_MOMENT_S = 0.05  # in which a keeper whose attempt is over is free again
_MAX_IDLE = 32  # keepers that wait for another attempt; each has a few MiB of its own


class ProcessTask:
    """An attempt under a keeper of this machine."""

    def __init__(
        self, spec: LaunchSpec, directory: Path, siblings: set[ProcessTask], idle: IdleKeepers | None = None
    ) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.started_at: float | None = None
        self._directory = directory
        self._siblings = siblings  # of the runtime; holds this one until it is forgotten
        self._idle = idle  # where its keeper goes when it is free
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._record: ExitRecord | None = None
        self._is_forgotten = False
        self._is_coming = False  # its keeper will be free in a moment
        self._is_detached = False
        siblings.add(self)

    @property
    def key(self) -> str:
        return self.spec.key

    async def events(self) -> AsyncIterator[Spooled | Progressed | Exited]:
        while self._record is None:
            message = await self._next_message()
            if message is None and self._is_detached:
                return
            if message is None:
                # Only a socket that nobody listens on proves it dead; what is left of its task is killed for it.
                if not await self.connect():
                    self._record = await self._record_without_keeper()
            elif "exited" in message:
                self._record = from_json(ExitRecord, message["exited"])
                if self._idle is not None and not self._is_coming:
                    self._is_coming = True
                    self._idle.expect(self.key)
            elif "spooled" in message:
                yield Spooled(int(message["spooled"]))
            elif "progress" in message:
                fraction, text = message["progress"]
                yield Progressed(float(fraction), str(text))
        yield Exited(self._record)

    def read_log(self, start_offset: int = 0, *, max_bytes: int = 1024 * 1024) -> tuple[list[SpoolRecord], int]:
        try:
            return read_spool(self._directory / LOG_FILE, start_offset, max_bytes=max_bytes)
        except FileNotFoundError:
            if self._is_forgotten:
                raise
            return [], start_offset  # its keeper died before it could make one

    def read_result(self, start: int, max_bytes: int) -> bytes:
        # The task could have put a link there, and this process may read more than it.
        fd = os.open(self._directory / RESULT_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            file.seek(start)
            return file.read(max_bytes)

    def read_log_end(self, *, max_bytes: int) -> tuple[list[SpoolRecord], bool]:
        try:
            return read_spool_end(self._directory / LOG_FILE, max_bytes=max_bytes)
        except FileNotFoundError:
            if self._is_forgotten:
                raise
            return [], True

    def kill(self, grace_s: float, reason: str, *, preempted: bool = False) -> None:
        self._send({"kill": grace_s, "reason": reason, "preempted": preempted})

    def renew(self, fence_after_s: float | None) -> None:
        if self._writer is not None and self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            return  # its keeper is stopped and will find the lease expired whatever is sent
        self._send({"renew": fence_after_s, "sent_at": time.monotonic()})

    async def forget(self) -> None:
        if self._record is None:
            raise RuntimeError(f"{self.key} cannot be forgotten yet: wait for Exited in its events()")
        self._is_forgotten = True
        is_free = False
        try:
            if self._reader is not None:
                self._send({"forget": True})
                # It deletes the directory, which may be large, and ends, or waits for another attempt.
                is_free = await self._wait_forgotten(self._reader)
        finally:
            if self._idle is not None and self._is_coming:
                self._is_coming = False
                self._idle.expect(self.key, -1)
        if is_free and self._idle is not None and self._reader is not None and self._writer is not None:
            self._idle.add(self.key, self._reader, self._writer)
            self._reader = self._writer = None
        else:
            await self._disconnect()
            if self._directory.exists():
                await asyncio.to_thread(discard, self._directory)
        cgroups.remove(self.spec.groups)
        self._siblings.discard(self)

    async def assign(self, draft: Path) -> bool:
        """Have a keeper that is free run what `draft` holds; False when there is none, or it died before it did.

        Raises AlreadyStartedError, LaunchError.
        """
        idle = self._idle
        found = await idle.take(self.key) if idle is not None else None
        if idle is None or found is None:
            return False
        self._reader, self._writer = found
        self._send({"assign": {"draft": str(draft), "directory": str(self._directory)}})
        try:
            async with asyncio.timeout(_ASSIGN_TIMEOUT_S):
                message = await self._next_message()
        except TimeoutError as cause:  # it is stopped; without its draft it cannot begin later either
            await self._disconnect()
            raise LaunchError(f"{self.key}: the keeper that was to run it did not answer") from cause
        if message is not None and "refused" in message:
            idle.add(self.key, *found)
            self._reader = self._writer = None
            refused = message["refused"]
            if refused["errno"] in (errno.ENOTEMPTY, errno.EEXIST):
                raise AlreadyStartedError(refused["error"])
            raise LaunchError(f"{self._directory} could not be begun: {refused['error']}")
        if message is None:
            await self._disconnect()
        return message is not None or _is_taken(draft)

    async def connect(self) -> bool:
        """Connect to the keeper; whether there is one."""
        await self._disconnect()
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            _connect(connection, self._directory)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=_MAX_MESSAGE_BYTES)
        return True

    async def wait_started(self) -> None:
        """Return when the main process runs, or its keeper is gone."""
        while self.pid is None and await self._next_message() is not None:
            pass

    async def abandon(self) -> None:
        """Have it killed at once and all traces of it deleted, without waiting for that."""
        self._send({"abandon": True})
        await self.detach()
        self._siblings.discard(self)

    async def detach(self) -> None:
        """Let go of the keeper: events() ends."""
        self._is_detached = True
        await self._disconnect()

    def look_up(self) -> None:
        """Learn from the directory what is known without a keeper."""
        known = read_json(self._directory / KEEPER_FILE) or {}
        self.pid = known.get("task_pid")
        self.started_at = known.get("started_at")

    def _send(self, message: dict[str, Any]) -> None:
        # With the keeper gone there is nobody to tell, and events() says so.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _next_message(self) -> dict[str, Any] | None:
        if self._reader is None:
            return None
        try:
            line = await self._reader.readline()
        except (ConnectionResetError, BrokenPipeError):
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        if "started" in message:
            self.pid = int(message["started"]["pid"])
            self.started_at = float(message["started"]["started_at"])
        return message

    async def _wait_forgotten(self, reader: asyncio.StreamReader) -> bool:
        """Return when all traces are gone; whether the keeper is there, and free."""
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                while line := await reader.readline():
                    if line.endswith(b"\n") and "idle" in json.loads(line):
                        return True
                return False
        except (ConnectionResetError, BrokenPipeError):  # it left without reading all that was sent
            return False
        except TimeoutError as cause:
            raise TimeoutError(
                f"{self.key}: its keeper did not delete {self._directory} within {_FORGET_TIMEOUT_S} s"
            ) from cause

    async def _record_without_keeper(self) -> ExitRecord:
        data = read_json(self._directory / EXIT_FILE)
        if data is not None:
            return from_json(ExitRecord, data)
        await self._kill_leftovers()
        message = "the keeper of this attempt died, and its processes with it"
        complaint = _tail(self._directory / KEEPER_LOG_FILE)
        if complaint:
            message = f"{message}; its last words: {complaint}"
        return ExitRecord(
            exit_code=None,
            signal=None,
            reason="keeper_died",
            error=TaskError(type="KeeperDied", message=message),
            started_at=self.started_at,
            finished_at=time.time(),
            log_end=_size(self._directory / LOG_FILE),
        )

    async def _kill_leftovers(self) -> None:
        # The kernel ends the main process with its keeper, but not the children of that.
        known = read_json(self._directory / KEEPER_FILE)
        if known is None or known["boot_id"] != boot_id():
            return
        mark = f"{DIRECTORY_VARIABLE}={self._directory}"
        deadline = time.monotonic() + _LEFTOVERS_TIMEOUT_S
        while pids := leftovers(known["task_pid"], known["started_since_boot_s"], mark):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                _log.error("%s: processes %s survive SIGKILL", self.key, pids)
                return
            await asyncio.sleep(_LEFTOVERS_INTERVAL_S)  # they are no children of ours: nothing tells when they are gone

    async def _disconnect(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            try:
                await writer.wait_closed()
            except (BrokenPipeError, ConnectionResetError):
                return


Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class IdleKeepers:
    """Keepers whose attempts are over and forgotten, and that may have another one of the same namespace."""

    def __init__(self) -> None:
        self._connections: dict[str, list[Connection]] = {}
        self._coming: Counter[str] = Counter()  # {namespace: keepers that will be free in a moment}
        self._wanted: dict[str, deque[asyncio.Future[Connection]]] = {}

    def expect(self, key: str, count: int = 1) -> None:
        """The keeper that has `key` will be free in a moment."""
        self._coming[_namespace(key)] += count

    def add(self, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep the connection to a keeper that had `key`, or let it go where there are enough."""
        wanted = self._wanted.get(_namespace(key), deque())
        while wanted:
            taker = wanted.popleft()
            if not taker.done():
                taker.set_result((reader, writer))
                return
        free = self._connections.setdefault(_namespace(key), [])
        free[:] = [each for each in free if not each[0].at_eof()]
        if sum(map(len, self._connections.values())) < _MAX_IDLE:
            free.append((reader, writer))
        else:
            writer.close()

    async def take(self, key: str) -> Connection | None:
        """The connection to a keeper that may have `key`: the one that was used last, which is the warmest.

        One that will be free in a moment is waited for that long: it is there sooner than a new one.
        """
        free = self._connections.get(_namespace(key), [])
        while free:
            reader, writer = free.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        wanted = self._wanted.setdefault(_namespace(key), deque())
        if len(wanted) >= self._coming[_namespace(key)]:
            return None
        taker: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        wanted.append(taker)
        try:
            await asyncio.wait({taker}, timeout=_MOMENT_S)
            return taker.result() if taker.done() else None
        except asyncio.CancelledError:
            if taker.done():
                taker.result()[1].close()  # nobody else knows of it
            raise
        finally:
            if not taker.done():
                taker.cancel()
            if taker in wanted:
                wanted.remove(taker)

    async def close(self) -> None:
        """Let them go."""
        writers = [writer for free in self._connections.values() for _, writer in free]
        self._connections.clear()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


def _is_taken(draft: Path) -> bool:
    return not draft.exists()


def _namespace(key: str) -> str:
    return key.partition(".")[0]


class ProcessRuntime:
    """Runs attempts as processes of this machine, each under a keeper that the template forks."""

    def __init__(self, state_dir: Path, template: TemplateHandle, enforcer: Enforcer | None = None) -> None:
        """Take hold of `state_dir`, which is made if need be. Raises RuntimeError if another runtime has it."""
        self._state_dir = state_dir.absolute()
        self._template = template
        self._controllers = enforcer.controllers if enforcer is not None else {}
        self._limits = enforcer.describe() if enforcer is not None else "limits of tasks are not enforced"
        _log.info("%s", self._limits)
        self._tasks: set[ProcessTask] = set()  # also those that are over, until they are forgotten
        self._idle = IdleKeepers()
        self._abandonments: set[asyncio.Task[None]] = set()
        longest = os.fsencode(self._state_dir / directory_name("") / SOCKET_FILE)
        if len(longest) > _MAX_SOCKET_PATH_BYTES and not sys.platform.startswith("linux"):
            raise RuntimeError(
                f"the state folder {self._state_dir} is too deep for sockets by {len(longest) - _MAX_SOCKET_PATH_BYTES} bytes: "
                "choose one with a shorter path"
            )
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(self._state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = os.fdopen(lock_fd, "wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            self._lock.close()
            raise RuntimeError(
                f"another worker uses {self._state_dir}: stop it, or give this one a folder of its own"
            ) from cause

    async def start(self, spec: LaunchSpec, payload: bytes | None = None) -> ProcessTask:
        if self._lock.closed:
            raise RuntimeError(f"this runtime over {self._state_dir} is closed: make a new one")
        launch = asyncio.ensure_future(self._launch(spec, payload))
        try:
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            # The template may have the request already: what comes of it is taken back.
            abandonment = asyncio.ensure_future(_abandon(launch))
            self._abandonments.add(abandonment)
            abandonment.add_done_callback(self._abandonments.discard)
            raise

    async def adopt(self) -> list[ProcessTask]:
        for path in self._state_dir.iterdir():
            if path.name.endswith(NEW_SUFFIX):
                # By renaming: of this and a template that still has the request, one comes first.
                await asyncio.to_thread(discard, path)
            elif path.name.endswith(GONE_SUFFIX):
                await asyncio.to_thread(delete_tree, path)
        # Looked for afterwards, so that none is missed that became a directory of its own meanwhile.
        directories = [path for path in sorted(self._state_dir.iterdir()) if path.is_dir() and "." not in path.name]
        adopted = await asyncio.gather(*map(self._adopt, directories))
        return [task for task in adopted if task is not None]

    def trouble(self) -> str | None:
        return None if self._template.is_alive() else f"its template process {self._template.pid} is gone: restart it"

    def limits(self) -> str:
        return self._limits

    async def close(self) -> None:
        await asyncio.gather(*self._abandonments)
        for task in tuple(self._tasks):
            await task.detach()
        await self._idle.close()
        self._tasks.clear()
        self._lock.close()

    async def _adopt(self, directory: Path) -> ProcessTask | None:
        data = read_json(directory / SPEC_FILE)
        if data is None:
            _log.error("%s is deleted: its %s is missing or was lost in a crash of the machine", directory, SPEC_FILE)
            await asyncio.to_thread(discard, directory)
            return None
        task = ProcessTask(from_json(LaunchSpec, data), directory, self._tasks, self._idle)
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


async def _abandon(launch: asyncio.Future[ProcessTask]) -> None:
    try:
        task = await launch
    except LaunchError:
        return
    await task.abandon()


def _write_draft(draft: Path, spec: LaunchSpec, payload: bytes | None) -> None:
    # Whole or not at all by the renaming of the draft, so the files in it need none of their own.
    draft.mkdir(mode=0o700)
    files = [(SPEC_FILE, json.dumps(to_json(spec)).encode()), *([] if payload is None else [(PAYLOAD_FILE, payload)])]
    for name, data in files:
        fd = os.open(f"{draft}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)


def _connect(connection: socket.socket, directory: Path) -> None:
    path = directory / SOCKET_FILE
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        connection.connect(str(path))
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{fd}/{SOCKET_FILE}")
    finally:
        os.close(fd)


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_KEEPER_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
