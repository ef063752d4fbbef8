"""A real Docker Engine for tests: one of our own on a socket of its own, or the one that FLUSTER_TEST_DOCKER_HOST names.

Ours leaves the machine's network rules alone: its containers have the machine's network, or none.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest
from docker.errors import DockerException

from fluster_services.worker.engine import EngineError, find_api_version
from tests import optional
from tests.docker_image import ImageError, cache_folder, image_name, root_tar
from tests.waiting import wait_until

HOST_VARIABLE = "FLUSTER_TEST_DOCKER_HOST"
_PROGRAMS = ("dockerd", "containerd", "runc", "setpriv")
_PATIENCE_S = 60.0


class EngineMissingError(RuntimeError):
    """There is no engine here, and none can be started."""


class Engine:
    """An engine that answers at `host`, and the images that it has."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.client = docker.APIClient(host, version="auto", timeout=60)
        self.image = image_name()
        self.bare_image = f"{self.image}-bare"  # in which no python3 is found
        self.other_python_image = f"{self.image}-other-python"  # Debian's own Python alone
        self._import_images()

    def _import_images(self) -> None:
        have = {tag for image in self.client.images() for tag in image["RepoTags"] or ()}
        if self.image not in have:
            repository, _, tag = self.image.partition(":")
            with root_tar().open("rb") as source:
                self.client.import_image_from_data(
                    source, repository=repository, tag=tag, changes=["ENV PATH=/usr/local/bin:/usr/bin:/bin"]
                )
        if self.bare_image not in have:
            self._derive(self.bare_image, "ENV PATH=/usr/sbin")
        if self.other_python_image not in have:
            self._derive(self.other_python_image, "ENV PATH=/usr/bin:/bin")

    def _derive(self, name: str, change: str) -> None:
        repository, _, tag = name.partition(":")
        made = self.client.create_container(self.image, "true")["Id"]
        self.client.commit(made, repository, tag, changes=[change])
        self.client.remove_container(made)

    def containers(self, **labels: str) -> list[dict[str, Any]]:
        """All with these labels, also those that have ended."""
        wanted = [f"{name}={value}" for name, value in labels.items()]
        found: list[dict[str, Any]] = self.client.containers(all=True, filters={"label": wanted})
        return found


class OwnEngine(Engine):
    """One that this process has started, in `folder`, with its images in `data`; it can be stopped and started again."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder = folder
        self._data = data
        self._log = (folder / "dockerd.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = folder / "s"
        self.start()
        try:
            super().__init__(f"unix://{self._socket}")
            self.remove_containers()  # of an earlier run that was killed
            self._remove_old_images()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start it, and return when it answers. Raises EngineMissingError."""
        folder = self._folder
        words = [f"--data-root={self._data}", f"--exec-root={folder / 'exec'}", f"--pidfile={folder / 'pid'}"]
        leash = ["setpriv", "--pdeathsig", "TERM", "--"]  # it ends with the tests, however they end
        self._process = subprocess.Popen(
            [*leash, *self._command(), *words, f"--host=unix://{self._socket}"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        wait_until(self._answers_or_ended, _PATIENCE_S, self.last_words)
        if self._process.poll() is not None:
            raise EngineMissingError(f"dockerd ended: {self.last_words()}")

    def _command(self) -> list[str]:
        return ["dockerd", "--bridge=none", "--iptables=false", "--ip6tables=false", "--live-restore"]

    def _answers_or_ended(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            try:
                connection.connect(str(self._socket))
                connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(4096)
            except OSError:
                return False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def last_words(self) -> str:
        return (self._folder / "dockerd.log").read_text(errors="replace")[-2_000:]

    def stop(self) -> None:
        """End it; containers go on."""
        assert self._process is not None
        self.client.close()  # or the connections that it keeps would be found unclosed one day
        self._process.terminate()
        self._process.wait(_PATIENCE_S)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Have it stop answering."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _remove_old_images(self) -> None:
        """Those of a Python, or a way to make them, that was before."""
        for image in self.client.images():
            for tag in image["RepoTags"] or ():
                if tag.startswith("fluster-test:") and not tag.startswith(self.image):
                    self.client.remove_image(tag, force=True)

    def remove_containers(self) -> None:
        for container in self.client.containers(all=True):
            self.client.remove_container(container["Id"], force=True)

    def remove(self) -> None:
        """End it and all that is left of it."""
        self.remove_containers()
        self.client.close()
        self.stop()
        self._log.close()
        for mount in sorted((each.mountpoint for each in psutil.disk_partitions(all=True)), reverse=True):
            if mount.startswith(f"{self._folder}/"):
                subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)


class SmallEngine(OwnEngine):
    """One whose disk can be filled."""

    @property
    def _filler(self) -> Path:
        return self._data / "filler"

    def fill(self, *, left_bytes: int = 0) -> None:
        """Leave no room on its disk, or so much."""
        free = shutil.disk_usage(self._data).free - left_bytes
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)

    def make_room(self) -> None:
        """Take that back."""
        self._filler.unlink()

    def remove(self) -> None:
        self._filler.unlink(missing_ok=True)
        super().remove()


@contextmanager
def small_engine() -> Iterator[SmallEngine]:
    """An engine with a disk of its own, of memory; as `engine` has it where there can be none."""
    folder = Path(tempfile.mkdtemp(prefix="fluster-engine-"))
    data = folder / "data"
    data.mkdir()
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in _PROGRAMS):
        folder.rmdir()
        optional.skip("docker", "A FULL DISK OF AN ENGINE IS NOT TESTED: an engine of our own needs root and dockerd")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=500m", "fluster", data], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        shutil.rmtree(folder)
        optional.skip("mounts", f"A FULL DISK OF AN ENGINE IS NOT TESTED: {mounted.stderr.strip()}")
    engine = SmallEngine(folder, data)
    try:
        yield engine
    finally:
        engine.remove()


def find_engine(
    own: type[OwnEngine] = OwnEngine, *, data: str = "docker-data", programs: Sequence[str] = _PROGRAMS
) -> Engine:
    """An engine for tests; the caller removes one that is our own (`remove`). Raises EngineMissingError."""
    host = os.environ.get(HOST_VARIABLE)
    try:
        if host:
            find_api_version(host)  # or the SDK would leave open what did not lead anywhere
            return Engine(host)
        missing = [name for name in programs if shutil.which(name) is None]
        if missing:
            raise EngineMissingError(f"no {missing[0]} here (`make docker` installs Debian's)")
        if os.geteuid() != 0:
            raise EngineMissingError(f"an engine of our own needs root; name one that runs: {HOST_VARIABLE}")
        return _own_engine(own, data)
    except (ImageError, EngineError, DockerException, OSError) as error:
        raise EngineMissingError(str(error)) from error


def _kept_data(name: str) -> Path | None:
    """Where an engine finds the images of the last time; None while another process uses that."""
    lock = os.open(cache_folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        os.close(lock)
        return None
    return cache_folder() / name


def _own_engine(own: type[OwnEngine], data: str) -> OwnEngine:
    folder = Path(tempfile.mkdtemp(prefix="fluster-engine-"))
    try:
        return own(folder, _kept_data(data) or folder / "data")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker Engine; without one the test is skipped, or fails when FLUSTER_REQUIRE names docker."""
    yield from lent(find_engine)


def lent(find: Callable[[], Engine]) -> Iterator[Engine]:
    """What `find` finds, removed afterwards if it is ours; as `engine` has it without one."""
    try:
        found = find()
    except EngineMissingError as error:
        optional.skip("docker", f"CONTAINERS ARE NOT TESTED: {error}")
    try:
        yield found
    finally:
        if isinstance(found, OwnEngine):
            found.remove()


@pytest.fixture
def own_engine(engine: Engine) -> OwnEngine:
    """An engine that the test may stop and start."""
    if not isinstance(engine, OwnEngine):
        pytest.skip(f"the engine that {HOST_VARIABLE} names is not ours to stop")
    return engine
