"""An attempt under a keeper, as its worker sees it."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fluster.json_lines import JsonLineStream
from fluster_bus.core.json_types import JsonObject
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.contract.attempt_directory import (
    KEEPER_FILE,
    KEEPER_LOG_FILE,
    LOG_FILE,
    RESULT_FILE,
    SOCKET_FILE,
    discard,
    read_json_lines,
)
from fluster_services.worker.contract.attempt_records import ExitRecord, LaunchSpec, TaskError, task_folder
from fluster_services.worker.contract.container import Container
from fluster_services.worker.contract.faults import NO_ROOM, AlreadyStartedError, LaunchError, WorkerFaultError
from fluster_services.worker.contract.runtime import Exited, Progressed, Spooled
from fluster_services.worker.contract.spool import SpoolRecord, SpoolRun, read_spool_end, read_spool_runs
from fluster_services.worker.engine import EngineError, asked, remove_container
from fluster_services.worker.keeper.leftovers import exit_note, exit_record, kill_leftovers, start_note
from fluster_services.worker.linux import cgroups
from fluster_services.worker.runtimes.idle_keepers import IdleKeepers

_log = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux has 107
_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
_MAX_UNSENT_BYTES = 64 * 1024
_FORGET_TIMEOUT_S = 60.0
_ASSIGN_TIMEOUT_S = 10.0
_LEFTOVERS_TIMEOUT_S = 10.0
_LEFTOVERS_INTERVAL_S = 0.01
_KEEPER_LOG_TAIL_BYTES = 4000
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
_RESOURCES_PAUSE_S = 0.5
_GROUP_PAUSES_S = (0.02, 0.1, 0.5, 2.0, 5.0)


class ProcessTask:
    """An attempt under a keeper of this machine."""

    def __init__(
        self, spec: LaunchSpec, directory: Path, siblings: set[ProcessTask], idle: IdleKeepers | None = None
    ) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.started_at: float | None = None
        self.directory = directory
        self._siblings = siblings  # of the runtime; holds this one until it is forgotten
        self._idle = idle  # where its keeper goes when it is free
        self._connection: JsonLineStream | None = None  # to its keeper
        self._record: ExitRecord | None = None
        self._is_forgotten = False
        self._is_coming = False  # its keeper will be free in a moment
        self._is_detached = False
        self._flushes: dict[int, asyncio.Future[None]] = {}  # {number: done when all spooled before it is dealt with}
        siblings.add(self)

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def folder(self) -> Path:
        return self.directory

    async def events(self) -> AsyncIterator[Spooled | Progressed | Exited]:
        try:
            async for event, flushed in self._events():
                yield event
                self._end_flushes(flushed)  # the reader has dealt with that event: it asks for the next one
        finally:
            self._end_flushes(math.inf)

    async def _events(self) -> AsyncIterator[tuple[Spooled | Progressed | Exited, float]]:
        """What happens, and up to which number flushes are done with that."""
        while self._record is None:
            message = await self._next_message()
            if message is None and self._is_detached:
                return
            if message is None:
                # Only a socket without a listener proves it dead; what is left of its task is killed for it.
                if not await self.connect():
                    self._record = await self._record_without_keeper()
            elif "exited" in message:
                self._record = exit_record(message["exited"])
                if self._idle is not None and not self._is_coming:
                    self._is_coming = True
                    self._idle.expect(self.key)
            elif "spooled" in message:
                yield Spooled(int(message["spooled"])), int(message.get("flushed", 0))
            elif "progress" in message:
                fraction, text = message["progress"]
                yield Progressed(float(fraction), str(text)), 0
        yield Exited(self._record), math.inf

    async def flush(self) -> None:
        if self._record is not None or self._is_detached:
            return
        # Above those of a worker that was here before, which the keeper may still have.
        number = max(time.monotonic_ns(), max(self._flushes, default=0) + 1)
        done = self._flushes[number] = asyncio.get_running_loop().create_future()
        self.send({"flush": number})
        try:
            await done
        finally:
            self._flushes.pop(number, None)

    def _end_flushes(self, number: float) -> None:
        for each in [each for each in self._flushes if each <= number]:
            done = self._flushes.pop(each)
            if not done.done():
                done.set_result(None)

    def read_log(self, start_offset: int = 0, *, max_bytes: int = 1024 * 1024) -> tuple[list[SpoolRun], int]:
        try:
            return read_spool_runs(self.directory / LOG_FILE, start_offset, max_bytes=max_bytes)
        except FileNotFoundError:
            if self._is_forgotten:
                raise
            return [], start_offset  # its keeper died before it could make one

    def read_result(self, start: int, max_bytes: int) -> bytes:
        # The task could have put a link there, and this process may read more than it.
        fd = os.open(task_folder(self.spec, self.directory) / RESULT_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            file.seek(start)
            return file.read(max_bytes)

    def read_log_end(self, *, max_bytes: int) -> tuple[list[SpoolRecord], bool]:
        try:
            return read_spool_end(self.directory / LOG_FILE, max_bytes=max_bytes)
        except FileNotFoundError:
            if self._is_forgotten:
                raise
            return [], True

    def kill(self, grace_s: float, reason: str, *, preempted: bool = False) -> None:
        self.send({"kill": grace_s, "reason": reason, "preempted": preempted})

    def renew(self, fence_after_s: float | None) -> None:
        if self._connection is not None and self._connection.unsent_bytes > _MAX_UNSENT_BYTES:
            return  # its keeper is stopped and will find the lease expired whatever is sent
        self.send({"renew": fence_after_s, "sent_since_boot_s": fence_clock()})

    async def forget(self) -> None:
        if self._record is None:
            raise RuntimeError(f"{self.key} cannot be forgotten yet: wait for Exited in its events()")
        self._is_forgotten = True
        is_free = False
        try:
            if self._connection is not None:
                self.send({"forget": True})
                # It deletes the directory, which may be large, and ends, or waits for another attempt.
                is_free = await self._wait_forgotten(self._connection)
        finally:
            if self._idle is not None and self._is_coming:
                self._is_coming = False
                self._idle.expect(self.key, -1)
        if is_free and self._idle is not None and self._connection is not None:
            self._idle.add(self.key, self._connection)
            self._connection = None
        else:
            await self._disconnect()
            if self.directory.exists():
                await asyncio.to_thread(discard, self.directory)
        self._siblings.discard(self)
        for pause_s in _GROUP_PAUSES_S:
            if cgroups.remove(self.spec.groups):
                return
            await asyncio.sleep(pause_s)  # the kernel may take a moment to see that all have left

    async def assign(self, draft: Path) -> bool:
        """Have a keeper that is free run what `draft` holds; False when there is none, or it died before it did.

        Raises AlreadyStartedError, LaunchError.
        """
        idle = self._idle
        found = await idle.take(self.key) if idle is not None else None
        if idle is None or found is None:
            return False
        self._connection = found
        self.send({"assign": {"draft": str(draft), "directory": str(self.directory)}})
        try:
            async with asyncio.timeout(_ASSIGN_TIMEOUT_S):
                message = await self._next_message()
        except TimeoutError as cause:  # it is stopped; without its draft it cannot begin later either
            await self._disconnect()
            raise WorkerFaultError(f"{self.key}: the keeper that was to run it did not answer") from cause
        if message is not None and "refused" in message:
            idle.add(self.key, found)
            self._connection = None
            refused = message["refused"]
            if refused["errno"] in (errno.ENOTEMPTY, errno.EEXIST):
                raise AlreadyStartedError(refused["error"])
            kind = LaunchError if refused["errno"] in NO_ROOM else WorkerFaultError
            raise kind(f"{self.directory} could not be begun: {refused['error']}")
        if message is None:
            await self._disconnect()
        return message is not None or _is_taken(draft)

    async def connect(self) -> bool:
        """Connect to the keeper; whether there is one."""
        await self._disconnect()
        connection = await self._patiently_connected()
        if connection is None:
            return False
        self._connection = JsonLineStream(*await asyncio.open_unix_connection(sock=connection), _MAX_MESSAGE_BYTES)
        return True

    async def _patiently_connected(self) -> socket.socket | None:
        while True:
            try:
                return _connect(self.directory)
            except OSError as error:
                # The attempt runs, whatever this process lacks at the moment.
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                _log.warning("%s: its keeper is not reached yet: %s", self.key, error)
            await asyncio.sleep(_RESOURCES_PAUSE_S)

    async def wait_started(self) -> None:
        """Return when the main process runs, or its keeper is gone."""
        while self.pid is None and await self._next_message() is not None:
            pass

    async def detach(self) -> None:
        """Let go of the keeper: events() ends."""
        self._is_detached = True
        await self._disconnect()

    def look_up(self) -> None:
        """Learn from the directory what is known without a keeper."""
        known = start_note(self.directory)
        if known is not None:
            self.pid, self.started_at = known["task_pid"], known["started_at"]

    def send(self, message: dict[str, object]) -> None:
        # With the keeper gone nothing is sent, and events() says so.
        if self._connection is not None:
            self._connection.send(message)

    async def _next_message(self) -> JsonObject | None:
        if self._connection is None:
            return None
        try:
            message = await self._connection.receive()
        except (ConnectionResetError, BrokenPipeError):
            return None
        if message is not None and "started" in message:
            self.pid = int(message["started"]["pid"])
            self.started_at = float(message["started"]["started_at"])
        return message

    async def _wait_forgotten(self, connection: JsonLineStream) -> bool:
        """Return when all traces are gone; whether the keeper is there, and free."""
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                while (message := await connection.receive()) is not None:
                    if "idle" in message:
                        return True
                return False
        except (ConnectionResetError, BrokenPipeError):  # it left without reading all that was sent
            return False
        except TimeoutError as cause:
            raise TimeoutError(
                f"{self.key}: its keeper did not delete {self.directory} within {_FORGET_TIMEOUT_S} s"
            ) from cause

    async def _record_without_keeper(self) -> ExitRecord:
        noted = exit_note(self.directory)
        if noted is not None:
            return noted
        survivors: list[int] = []
        if self.spec.container is not None:
            await asked(_remove_container, self.spec.container)
        else:
            survivors = await self._kill_leftovers()
        message = "the keeper of this attempt died, and its processes with it"
        complaint = _tail(self.directory / KEEPER_LOG_FILE)
        if complaint:
            message = f"{message}; its last words: {complaint}"
        is_started = self.started_at is not None or read_json_lines(self.directory / KEEPER_FILE)
        return ExitRecord(
            exit_code=None,
            signal=None,
            reason="keeper_died" if is_started else "worker_fault",
            kill_reason=None if is_started else "its keeper died before it had started it",
            error=TaskError(type="KeeperDied", message=message),
            started_at=self.started_at,
            finished_at=time.time(),
            log_end=_size(self.directory / LOG_FILE),
            surviving_pids=survivors,
        )

    async def _kill_leftovers(self) -> list[int]:
        """Have what is left of the task gone; returns what could not be killed."""
        # The kernel ends the main process with its keeper, but not the children of that.
        deadline = time.monotonic() + _LEFTOVERS_TIMEOUT_S
        while pids := kill_leftovers(self.directory, self.spec):
            if time.monotonic() > deadline:
                return pids
            await asyncio.sleep(
                _LEFTOVERS_INTERVAL_S
            )  # they are not our children: their end is not reported to this process
        return []

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            try:
                await connection.wait_closed()
            except (BrokenPipeError, ConnectionResetError):
                return


def _remove_container(container: Container) -> None:
    try:
        remove_container(container)
    except EngineError as error:
        _log.error("container %s is left: %s", container.name, error)  # until the next start of this worker


def _is_taken(draft: Path) -> bool:
    return not draft.exists()


def _connect(directory: Path) -> socket.socket | None:
    """A connection to the keeper in `directory`; None when there is none. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        path = directory / SOCKET_FILE
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            connection.connect(str(path))
            return connection
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{fd}/{SOCKET_FILE}")
        finally:
            os.close(fd)
        return connection
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


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
