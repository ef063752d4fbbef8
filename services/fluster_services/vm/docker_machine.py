"""One VM in a container: made, attended over a connection whose end is the VM's end, and removed."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fluster_services.vm.backend import VMError
from fluster_services.vm.container import VMContainer, create_body, folders_tar
from fluster_services.worker.contract.container import NO_GPUS, OWN_MINOR
from fluster_services.worker.contract.container_output import exactly
from fluster_services.worker.engine import EngineError, NotThereError, connect, told

if TYPE_CHECKING:
    import docker

_log = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 8.0
_LOOK_S = 0.2  # between two looks at an engine that is away
_CONFLICT = 409
_NO_PROGRAM = 127  # as shells have it


class Engine:
    """The engine of one backend."""

    def __init__(self, url: str, api_version: str, timeout_s: float) -> None:
        self.url = url
        self._api_version = api_version
        self._timeout_s = timeout_s

    @contextmanager
    def client(self) -> Iterator[docker.APIClient]:
        """One for a while; what fails in it is raised as EngineError."""
        client = connect(self.url, timeout_s=self._timeout_s, api_version=self._api_version)
        try:
            with told(self.url):
                yield client
        finally:
            client.close()

    def remove(self, name: str) -> None:
        """Have a container gone, and return when it is; also one that never was. Raises EngineError."""
        with suppress(NotThereError), self.client() as client:
            try:
                client.remove_container(name, force=True, v=True)
            except Exception as error:
                if getattr(error, "status_code", None) != _CONFLICT:
                    raise
                client.wait(name, condition="removed")  # the engine is about to remove it by itself

    def remove_all(self, label: str, is_wanted: Callable[[str], bool]) -> None:
        """Remove the containers whose `label` says so. Raises EngineError."""
        with self.client() as client:
            found = client.containers(all=True, filters={"label": label})
        for each in found:
            if is_wanted(each["Labels"][label]):
                _log.info("container %s is removed: the program that made it is gone", each["Id"][:12])
                self.remove(each["Id"])


class DockerMachine:
    """A container that was not made yet."""

    def __init__(self, engine: Engine, container: VMContainer, setup: bytes) -> None:
        self._engine = engine
        self._container = container
        self._setup = setup
        self._name = f"fluster-{container.vm_id}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._is_stopping = False
        self._leash: socket.socket | None = None
        self._is_over = threading.Event()

    # ---- its life, in one thread ------------------------------------------------------------------------

    def run(self, write: Callable[[bytes], None]) -> int:
        try:
            with self._lock:
                if self._is_stopping:
                    return 0
                self._create()
            code = self._attend(write, is_new=True)
            while code is None:  # the engine went away
                code = self._attend_again(write)
            if code == _NO_PROGRAM:
                raise VMError(f"image {self._container.image!r} has no python3: name one that has Python {OWN_MINOR}")
        except EngineError:
            if not self._is_stopping:
                self._remove_if_possible()
            raise
        finally:
            self._is_over.set()
        return code

    def _create(self) -> None:
        with self._engine.client() as client:
            client.create_container_from_config(create_body(self._container), self._name)
            client.put_archive(self._name, "/", folders_tar(self._container.user))

    def _attend(self, write: Callable[[bytes], None], *, is_new: bool) -> int | None:
        """Its exit code, when it is gone; None when the connection to the engine was lost before."""
        with self._engine.client() as client, _removed_told(client, self._name) as ending:
            with _attached(client, self._name) as leash:
                if is_new:
                    self._start(client)
                    with suppress(BrokenPipeError):  # it died at once, and has said why
                        leash.sendall(self._setup)
                with self._lock:
                    self._leash = leash
                    if self._is_stopping:
                        _let_go(leash)
                try:
                    _carry(leash.recv, write)
                except OSError as error:
                    _log.info("the output of %s breaks off: %s", self._name, error)
                finally:
                    with self._lock:
                        self._leash = None
            try:
                return int(ending.json()["StatusCode"])
            except (OSError, ValueError, KeyError) as error:
                _log.info("how %s ended is not told: %s", self._name, error)
                return None

    def _start(self, client: docker.APIClient) -> None:
        try:
            with told(self._engine.url):
                client.start(self._name)
        except EngineError as cause:
            if NO_GPUS not in str(cause):
                raise
            raise VMError(
                f"{cause}: install the NVIDIA container toolkit there, or have VMs without GPUs (no gpus=…, and FLUSTER_GPUS=0)"
            ) from cause

    def _attend_again(self, write: Callable[[bytes], None]) -> int | None:
        if not self._runs_on():
            raise VMError("it is gone, and the engine, which was away, does not tell how it ended")
        try:
            return self._attend(write, is_new=False)
        except EngineError:  # away once more
            return None

    def _runs_on(self) -> bool:
        """Whether it is still there, once the engine answers."""
        while True:
            try:
                with self._engine.client() as client:
                    return bool(client.inspect_container(self._name)["State"]["Running"])
            except NotThereError:
                return False
            except EngineError:
                time.sleep(_LOOK_S)

    def _remove_if_possible(self) -> None:
        try:
            self._engine.remove(self._name)
        except EngineError as error:  # the next program that uses the engine finds it by its labels
            _log.warning("container %s may be left: %s", self._name, error)

    # ---- its end, from another --------------------------------------------------------------------------

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            leash = self._leash
            if leash is not None:
                _let_go(leash)
        if leash is not None:
            self._is_over.wait(_LEAVE_TIMEOUT_S)
        self._engine.remove(self._name)


@contextmanager
def _removed_told(client: docker.APIClient, name: str) -> Iterator[Any]:
    """An answer that comes in two parts: at once that the engine watches the container, and in the end how that ended."""
    url = client._url("/containers/{0}/wait", name)  # noqa: SLF001 - `wait` returns with the second part only
    answer = client._post(url, params={"condition": "removed"}, stream=True, timeout=None)  # noqa: SLF001
    try:
        client._raise_for_status(answer)  # noqa: SLF001
        yield answer
    finally:
        answer.close()


@contextmanager
def _attached(client: docker.APIClient, name: str) -> Iterator[socket.socket]:
    """A connection to the standard streams of a container; the engine ends the first when this connection ends."""
    stream = client.attach_socket(name, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    with stream, stream._sock as connection:  # noqa: SLF001 - only it can be shut in one direction
        connection.settimeout(None)  # the SDK gives it that of a request
        yield connection


def _let_go(leash: socket.socket) -> None:
    with suppress(OSError):  # the connection is lost already
        leash.shutdown(socket.SHUT_WR)


def _carry(read: Callable[[int], bytes | None], write: Callable[[bytes], None]) -> None:
    """Write what comes in the engine's frames."""
    while len(header := exactly(read, 8)) == 8:
        write(exactly(read, int.from_bytes(header[4:], "big")))
