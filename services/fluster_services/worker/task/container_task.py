"""What a keeper runs in place of a task that has a container: a process that has the container made, and attends it.

Its standard streams are the keeper's pipes, so whatever the container writes is spooled as if a process had written it. It leaves with the
container, and tells in container.json how that ended. SIGTERM is for the container's program; BY_FORCE, or the keeper's death, ends it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fluster_bus.core.json_types import JsonObject
from fluster_bus.running.linux_calls import die_with_parent, set_process_name
from fluster_services.worker.contract.attempt_directory import (
    CONTAINER_FILE,
    PAYLOAD_FILE,
    SPEC_FILE,
    WORK_FOLDER,
    write_json,
)
from fluster_services.worker.contract.attempt_records import LaunchSpec, task_folder, to_json
from fluster_services.worker.contract.container import NO_GPUS, Container
from fluster_services.worker.contract.container_output import InitWords, LogPosition, exactly, wait_init
from fluster_services.worker.contract.faults import why_scarce
from fluster_services.worker.engine import (
    EngineAwayError,
    EngineError,
    EngineFullError,
    NotThereError,
    connect,
    data_folder,
    told,
)
from fluster_services.worker.linux.killing import BY_FORCE
from fluster_services.worker.linux.processes import KEEPER_SIGNALS, reset_signals
from fluster_services.worker.task.progress_pipe import leave_word
from fluster_services.worker.task.task_process import (
    EXIT_NOT_EXECUTABLE,
    CannotStartError,
    complain,
    notice_of,
    take_descriptors,
)

if TYPE_CHECKING:
    import docker

EXIT_NO_CONTAINER = 125  # as `docker run` has it

_KEEPER_GONE = signal.SIGHUP
_OVER = signal.SIGUSR2
_WAITED_FOR = {signal.SIGTERM, BY_FORCE, _KEEPER_GONE, _OVER}
_KILL_TIMEOUT_S = 3.0
_ALONE_S = 30.0  # without a keeper, for the container to be gone; else the worker finds it by its labels
_LOOK_S = 0.2  # between two looks at an engine that is away
_OOM_NEWS_S, _OOM_LOOK_S = 1.0, 0.05  # for the news that the kernel killed a process for its memory
_STREAMS = {1: 1, 2: 2}  # {number in the engine's frames: descriptor}
_STDOUT = 1
_TAIL_BYTES = 1_000
# How the init that Docker brings (https://github.com/krallin/tini) says that the program to run does not exist.
_NOT_RUN = re.compile(rb"\[FATAL tini \(\d+\)\] exec .* failed: (.*)\n?\Z")


def run_container(
    spec: LaunchSpec,
    directory: Path,
    *,
    keeper_pid: int,
    faults_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    umask: int,
    kept_fds: Sequence[int] = (),
) -> NoReturn:
    """Attend the container of the attempt in `directory`, in a child that its keeper has just forked; never returns.

    That the engine did not answer, or its disk was full, when it was to start the container is written to `faults_fd`.
    """
    del umask  # of this machine's tasks
    exit_code = EXIT_NO_CONTAINER
    try:
        os.setsid()
        die_with_parent(_KEEPER_GONE)
        if os.getppid() != keeper_pid:
            os._exit(EXIT_NO_CONTAINER)
        set_process_name("fluster-contain")
        take_descriptors(stdout_fd, stderr_fd, faults_fd, *kept_fds)
        os.write(2, notice_of(spec))
        reset_signals(KEEPER_SIGNALS)  # all are blocked, and stay so: they are waited for
        exit_code = _Attendant(spec, directory, faults_fd).run()
    except BaseException as error:
        complain(directory, CannotStartError(type(error).__name__, str(error), EXIT_NO_CONTAINER))
    finally:
        os._exit(exit_code)


class _Attendant:
    """One thread asks the engine and carries the output, this one waits for signals: neither waits for the other."""

    def __init__(self, spec: LaunchSpec, directory: Path, faults_fd: int) -> None:
        assert spec.container is not None  # noqa: S101 - its keeper has looked
        self._spec = spec
        self._container: Container = spec.container
        self._directory = directory
        self._faults_fd = faults_fd
        self._client = self._connect(self._container.timeout_s)
        self._lock = threading.Lock()
        self._asked: signal.Signals | None = None  # by which the container is to end
        self._pid: int | None = None  # of process 1 in the container, once it runs
        self._exit_code = EXIT_NO_CONTAINER
        self._is_over = threading.Event()
        self._positions = {stream: LogPosition() for stream in _STREAMS}
        self._tail = b""  # of stderr
        self._init_words = InitWords()

    def _connect(self, timeout_s: float) -> docker.APIClient:
        return connect(self._container.engine, timeout_s=timeout_s, api_version=self._container.api_version)

    def run(self) -> int:
        threading.Thread(target=self._attend, daemon=True).start()
        while (number := signal.sigwait(_WAITED_FOR)) != _OVER:
            self._end(signal.SIGTERM if number == signal.SIGTERM else signal.SIGKILL)
            if number == _KEEPER_GONE:
                self._is_over.wait(_ALONE_S)
                break
        return self._exit_code

    # Its end, from outside

    def _end(self, number: signal.Signals) -> None:
        with self._lock:
            if self._asked is not signal.SIGKILL:
                self._asked = number
            pid = self._pid
        if pid is not None:
            self._signal(number, pid)

    def _signal(self, number: signal.Signals, pid: int) -> None:
        numbers = [number]
        if number == signal.SIGTERM:
            wait_init(pid)
            numbers.append(signal.SIGCONT)  # a stopped process would sleep through its grace
        client = self._connect(_KILL_TIMEOUT_S)
        try:
            for each in numbers:
                with told(self._container.engine):
                    client.kill(self._container.name, int(each))
        except EngineError:  # it is over, or the engine does not answer
            if number == signal.SIGKILL:
                self._kill_without_engine(pid)
        finally:
            client.close()

    def _kill_without_engine(self, pid: int) -> None:
        try:
            if self._id in Path(f"/proc/{pid}/cgroup").read_text():  # the number could be another's by now
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it is over, or not this user's: the keeper gives up after a while
            return

    # Its life

    def _attend(self) -> None:
        try:
            self._exit_code = self._live()
        except CannotStartError as error:
            self._complain(error)
            self._exit_code = error.exit_code
        except EngineAwayError as error:  # when it was to start it: from then on it is waited for
            os.write(self._faults_fd, str(error).encode(errors="replace"))
        except EngineFullError as error:
            self._report_full(error)
        except EngineError as error:
            self._complain(CannotStartError("EngineError", str(error), EXIT_NO_CONTAINER))
        except BaseException as error:
            self._complain(CannotStartError(type(error).__name__, str(error), EXIT_NO_CONTAINER))
        finally:
            self._is_over.set()
            os.kill(os.getpid(), _OVER)

    def _report_full(self, error: EngineFullError) -> None:
        """Report a full disk, if that of the engine is full: the error may only repeat the words of the command."""
        client = self._connect(_KILL_TIMEOUT_S)
        try:
            with told(self._container.engine):
                scarce = why_scarce(Path(folder)) if (folder := data_folder(client)) else None
        except EngineError as away:
            scarce = str(away)
        finally:
            client.close()
        if scarce is not None:
            os.write(self._faults_fd, f"{error}; {scarce}".encode(errors="replace"))
        else:
            self._complain(CannotStartError("EngineError", str(error), EXIT_NO_CONTAINER))

    def _complain(self, error: CannotStartError) -> None:
        complain(self._directory, error, pipe_folder=self._pipe_folder)

    @property
    def _pipe_folder(self) -> Path:
        return task_folder(self._spec, self._directory)

    def _live(self) -> int:
        _fill(self._spec, self._container, task_folder(self._spec, self._directory))
        try:
            self._id = self._create()
            stream = self._attach()
            if not self._start():
                exit_code = self._ended(128 + int(self._asked or signal.SIGTERM), is_over_memory=False)
            else:
                self._carry(lambda size: os.read(stream.fileno(), size))
                code = self._wait()
                exit_code = self._ended(code, is_over_memory=self._was_over_memory(code))
        except EngineError:
            self._remove(self._connect(_KILL_TIMEOUT_S))  # which may be in trouble
            raise
        except BaseException:
            self._remove(self._client)
            raise
        self._remove(self._client)
        return exit_code

    def _create(self) -> str:
        name = self._container.name
        try:
            with told(self._container.engine):
                try:
                    made = self._client.create_container_from_config(self._container.body, name)
                except Exception as error:
                    if getattr(error, "status_code", None) != 409:
                        raise
                    # Of an attempt of that name which was forgotten: its directory is ours now.
                    self._client.remove_container(name, force=True, v=True)
                    made = self._client.create_container_from_config(self._container.body, name)
        except NotThereError as cause:
            message = f"image {self._spec.image!r} is not here: {cause}"
            raise CannotStartError("ImageNotFound", message, EXIT_NO_CONTAINER) from cause
        return str(made["Id"])

    def _attach(self) -> Any:
        with told(self._container.engine):
            stream = self._client.attach_socket(self._id, {"stdout": 1, "stderr": 1, "stream": 1})
            os.set_blocking(
                stream.fileno(), True
            )  # the SDK gives it the time-out of a request, to which its `read` keeps
            return stream

    def _start(self) -> bool:
        """Whether it was started: not so when it is no longer wanted."""
        with self._lock:
            if self._asked is not None:
                return False
        try:
            with told(self._container.engine):
                self._client.start(self._id)
        except EngineAwayError:
            self._wait_engine()  # which may have heard, and runs it: it is over once the engine has removed it
            raise
        except EngineError as cause:
            if NO_GPUS not in str(cause):
                raise
            message = f"{cause}: install the NVIDIA container toolkit there, or have this worker offer no GPUs: FLUSTER_GPUS=0"
            raise CannotStartError("NoGpuRuntimeError", message, EXIT_NO_CONTAINER) from cause
        pid = int(self._patiently_inspected()["Pid"])
        with self._lock:
            self._pid, asked = pid, self._asked
        if asked is not None:
            self._signal(asked, pid)
        return True

    def _inspect(self) -> dict[str, object]:
        with told(self._container.engine):
            state: dict[str, object] = self._client.inspect_container(self._id)["State"]
        return state

    def _patiently_inspected(self) -> JsonObject:
        """The state of a container that was started, whenever the engine answers."""
        while True:
            try:
                return self._inspect()
            except EngineAwayError:
                self._wait_engine()

    def _was_over_memory(self, code: int) -> bool:
        """Whether the kernel killed a process of it for its limit of memory.

        The engine learns of such a kill and of the container's end by separate events, the end sometimes first.
        """
        if code == 0:
            return False
        until = time.monotonic()
        if self._spec.limits.memory and self._asked is None:
            until += _OOM_NEWS_S
        while not self._patiently_inspected()["OOMKilled"]:
            if time.monotonic() >= until:
                return False
            time.sleep(_OOM_LOOK_S)
        return True

    def _carry(self, read: Callable[[int], bytes | None]) -> None:
        """Write what comes in the engine's frames, and is new, to the keeper's pipes."""
        while len(header := exactly(read, 8)) == 8:
            stream, size = header[0], int.from_bytes(header[4:], "big")
            while size > 0 and (data := read(size)):
                size -= len(data)
                self._write(stream, self._positions[stream].new(data))

    def _write(self, stream: int, data: bytes) -> None:
        if stream == _STDOUT:
            data = self._init_words.sift(data)
        else:
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self._pass_on(stream, data)

    def _pass_on(self, stream: int, data: bytes) -> None:
        while data:
            data = data[os.write(_STREAMS[stream], data) :]

    def _wait(self) -> int:
        """Its exit code, when it is over. An engine that goes away meanwhile is waited for."""
        has_lost = False
        while True:
            try:
                with told(self._container.engine):
                    code = int(self._client.wait(self._id, timeout=None)["StatusCode"])
                if has_lost:
                    self._carry_rest(follow=False)  # who follows may miss the very end
                return code
            except NotThereError as cause:
                raise CannotStartError(
                    "ContainerGone", "its container was removed from outside", EXIT_NO_CONTAINER
                ) from cause
            except EngineError:
                has_lost = True
                self._wait_engine()
                self._carry_rest(follow=True)

    def _wait_engine(self) -> None:
        """Return when the engine answers: until then the state of the task is unknown, and it may well run."""
        while True:
            try:
                self._inspect()
                return
            except NotThereError:
                return
            except EngineError:
                time.sleep(_LOOK_S)

    def _carry_rest(self, *, follow: bool) -> None:
        """What was written since the stream broke: the engine has kept all from the beginning."""
        for position in self._positions.values():
            position.again()
        try:
            with told(self._container.engine):
                # The SDK's own `logs` does not tell the streams apart.
                url = f"{self._client.base_url}/v{self._client.api_version}/containers/{self._id}/logs"
                parameters = {"stdout": 1, "stderr": 1, "follow": int(follow)}
                response = self._client.get(url, params=parameters, stream=True, timeout=None)
                self._carry(response.raw.read)
        except EngineError:  # away again, which the next `wait` tells, too
            return

    def _ended(self, code: int, *, is_over_memory: bool) -> int:
        """Tell how; the shell's and Docker's way to name a signal is undone."""
        self._pass_on(_STDOUT, self._init_words.rest())
        failure = _NOT_RUN.search(self._tail)
        if code in (EXIT_NOT_EXECUTABLE, EXIT_NOT_EXECUTABLE + 1) and failure is not None:
            raise CannotStartError("FileNotFoundError", _not_run(self._spec, failure[1].decode(errors="replace")), code)
        number = code - 128
        if number in signal.valid_signals() and self._init_words.exit_code != code:
            code = -number
        told = {"code": code, "oom": is_over_memory}
        leave_word(self._directory / CONTAINER_FILE, told, pipe_folder=self._pipe_folder)
        return max(code, 0)

    def _remove(self, client: docker.APIClient) -> None:
        try:
            with told(self._container.engine):
                client.remove_container(self._container.name, force=True, v=True)
        except EngineError:  # the worker finds it by its labels
            return


def _fill(spec: LaunchSpec, container: Container, folder: Path) -> None:
    """Put into the task's folder what it is to find there."""
    work = folder / WORK_FOLDER
    try:
        if spec.workspace is not None:
            shutil.copytree(spec.workspace, work, symlinks=True)
        else:
            work.mkdir()
        for name, source in container.files.items():
            shutil.copyfile(source, folder / name)
            (folder / name).chmod(0o600)
        if spec.payload_file is not None:
            shutil.copyfile(folder.parent / spec.payload_file, folder / PAYLOAD_FILE)
            told_spec = replace(spec, payload_file=PAYLOAD_FILE, container=None, env={}, groups={})
            write_json(folder / SPEC_FILE, to_json(told_spec))
        if container.owner is not None:
            user, group = container.owner
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user, group, follow_symlinks=False)
    except (OSError, shutil.Error) as cause:
        raise CannotStartError("OSError", f"its folder could not be filled: {cause}", EXIT_NOT_EXECUTABLE) from cause


def _not_run(spec: LaunchSpec, reason: str) -> str:
    if spec.command is not None:
        return f"command {spec.command[0]!r} cannot be run in image {spec.image!r}: {reason}"
    return (
        f"image {spec.image!r} has no python3 to run a callable with ({reason}): name one with the worker's own version "
        "of Python, or give the job as a command"
    )
